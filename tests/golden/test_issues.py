"""Accidents of other trainers, one test each, named by the public issue (kl_rows.json has the links)."""

from __future__ import annotations

import json
import math
import re
from typing import Any

import pytest
import torch

from grpo_engine.advantage import group_advantages
from grpo_engine.beta import BetaRule
from grpo_engine.contract.beta import FixedBeta, ZieglerBeta
from grpo_engine.contract.error import InvalidRequest
from grpo_engine.contract.intake import resolve_spec, validate
from grpo_engine.contract.job import GrpoConfig, LossConfig, ReferenceConfig
from grpo_engine.contract.kl import KlConfig
from grpo_engine.contract.telemetry import DESCRIPTORS
from grpo_engine.diagnostics import Detectors
from grpo_engine.kl import kl_loss_tokens, kl_penalty, kl_statistics, kl_value
from grpo_engine.loss import Normaliser, aggregate, policy_loss_tokens
from tests.golden.enumeration import A, B, expected_gradient, penalty_gradient
from tests.golden.test_losses import step_gradient

RKL_A = [0.100152237862, -0.051290158096, -0.046578172206, -0.002283907559]
FKL_A = [0.1, -0.05, -0.05, 0.0]
DEADBAND = {"rule": "deadband", "value": 0.02, "target": 0.02, "update_every": 1, "ema_decay": None, "arming": False}


def job(**grpo: Any) -> GrpoConfig:
    raw = {"model": "m", "training_file": "file-a", "method": {"type": "grpo", "grpo": {"grader": {"type": "math"}, **grpo}}}
    return resolve_spec(raw).method.grpo


def rule(beta: Any = DEADBAND, steps: int = 100) -> BetaRule:
    return BetaRule.create(job(beta=beta).beta, steps)


def refused(param: str, words: str, **grpo: Any) -> None:
    with pytest.raises(InvalidRequest, match=words) as caught:
        job(**grpo)
    assert caught.value.param is not None
    assert caught.value.param.startswith(f"method.grpo.{param}")


def kl_gradient(logprob: list[list[float]], ref: list[list[float]], mask: list[list[int]], **settings: Any) -> torch.Tensor:
    logprob_BT = torch.tensor(logprob, dtype=torch.float32, requires_grad=True)
    tokens = kl_loss_tokens(logprob_BT, torch.tensor(ref), logprob_BT.detach(), None, torch.tensor(mask), KlConfig(**settings))
    tokens.surrogate_BT.sum().backward()
    assert logprob_BT.grad is not None
    assert bool(torch.isfinite(tokens.surrogate_BT).all())
    return logprob_BT.grad


def fired(grpo: GrpoConfig, rows: list[dict[str, float]]) -> set[str]:
    detectors = Detectors(grpo)
    return {s.detector for n, row in enumerate(rows, start=1) for s in detectors.observe(n, row) if s.kind == "fired"}


def test_issue_trl_3015_a_far_token_overflows_nothing() -> None:
    for grad in ("naive", "unbiased"):
        assert bool(torch.isfinite(kl_gradient([[-200.0, -1.0]], [[-1.0, -1.5]], [[1, 1]], grad=grad)).all())
    assert kl_gradient([[-200.0]], [[-1.0]], [[1]])[0, 0].item() == -20.0


def test_issue_trl_4040_what_is_not_measured_is_absent() -> None:
    assert kl_statistics(torch.zeros(2, 3), torch.zeros(2, 3)) == {}
    metrics = BetaRule.create(FixedBeta(value=0.0), 10).update(1, math.nan, math.nan, 8).metrics()
    assert metrics == {"beta/next": 0.0, "beta/action": 0, "beta/saturated": 0}


def test_issue_trl_2806_beta_zero_needs_no_reference() -> None:
    assert not job(beta=0).loads_reference
    assert job(beta=0, kl={"monitor": True}).loads_reference
    assert job(beta={"rule": "schedule", "schedule": {"type": "linear", "start": 0, "end": 0.1}}).loads_reference


def test_issue_trl_4532_beta_adapts_with_the_kl_in_the_loss() -> None:
    grpo = job(beta=DEADBAND)
    assert grpo.kl.placement == "loss"
    assert BetaRule.create(grpo.beta, 10).update(1, 0.03, 0.03, 8).new == pytest.approx(0.024)


def test_issue_trl_4638_the_gradient_form_is_in_the_job_record() -> None:
    raw = {"model": "m", "training_file": "file-a", "method": {"type": "grpo", "grpo": {"grader": {"type": "math"}}}}
    assert json.loads(resolve_spec(raw).model_dump_json())["method"]["grpo"]["kl"]["grad"] == "unbiased"
    assert expected_gradient(A, KlConfig(grad="unbiased")).tolist() == pytest.approx(RKL_A, abs=1e-9)
    assert expected_gradient(A, KlConfig(grad="naive")).tolist() == pytest.approx(FKL_A, abs=1e-9)


def test_issue_trl_6586_the_weight_of_kl_is_per_token_under_every_loss() -> None:
    """A sequence-level ratio broadcast over the KL gives each token a gradient from the others' KL; ours is diagonal."""
    logprob_BT = torch.tensor([[-1.0, -2.0, -0.5]], dtype=torch.float64)
    ref_BT, old_BT = logprob_BT - torch.tensor([[0.3, -0.4, 0.1]]), logprob_BT - 0.2

    def term(values_BT: torch.Tensor) -> torch.Tensor:
        return kl_loss_tokens(values_BT, ref_BT, old_BT, None, torch.ones(1, 3), KlConfig()).surrogate_BT[0]

    jacobian = torch.autograd.functional.jacobian(term, logprob_BT)[:, 0, :]  # type: ignore[no-untyped-call]
    assert torch.equal(jacobian, torch.diag(jacobian.diagonal()))
    expected = torch.tensor([0.3, -0.4, 0.1], dtype=torch.float64) * math.exp(0.2)
    torch.testing.assert_close(jacobian.diagonal(), expected, atol=1e-7, rtol=0)


def test_issue_trl_4967_k1_can_be_placed_in_the_reward() -> None:
    cfg = job(kl={"estimator": "k1", "placement": "reward"}).kl
    assert penalty_gradient(A, cfg).tolist() == pytest.approx(RKL_A, abs=1e-9)


def test_issue_trl_5640_dropped_groups_have_no_kl_gradient() -> None:
    reward_PG = torch.tensor([[1.0, 1.0], [0.0, 1.0]])
    kept = group_advantages(reward_PG, LossConfig(zero_std_groups="drop_all")).kl_keep_PG
    mask = kept.reshape(4, 1).int().tolist()
    assert kl_gradient([[-1.0]] * 4, [[-2.0]] * 4, mask).flatten().tolist() == [0.0, 0.0, 1.0, 1.0]


@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean_token_mean", "seq_sum", "constant"])
def test_issue_trl_3021_gradient_accumulation_changes_nothing(aggregation: str) -> None:
    lengths = [2, 8, 3, 5]
    loss, gradient = step_gradient(lengths, [[0, 1, 2, 3]], aggregation, 0)  # type: ignore[arg-type]
    for split in ([[0], [1], [2], [3]], [[0, 1], [2, 3]], [[3], [0, 2, 1]]):
        other_loss, other_gradient = step_gradient(lengths, split, aggregation, 2)  # type: ignore[arg-type]
        assert other_loss == pytest.approx(loss, abs=1e-12)
        torch.testing.assert_close(other_gradient, gradient, atol=1e-12, rtol=0)


@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean_token_mean", "seq_sum", "constant"])
def test_issue_trl_6369_numerator_and_denominator_share_the_mask(aggregation: str) -> None:
    """A step with truncated rows masked out equals the step without them."""
    value_BT = torch.tensor([[1.0, 2.0], [5.0, 6.0], [3.0, 0.0]], dtype=torch.float64)
    mask_BT = torch.tensor([[1, 1], [0, 0], [1, 0]])
    kept = [0, 2]
    whole = aggregate(value_BT, mask_BT, Normaliser.create(mask_BT, aggregation, 4))  # type: ignore[arg-type]
    part = aggregate(value_BT[kept], mask_BT[kept], Normaliser.create(mask_BT[kept], aggregation, 4))  # type: ignore[arg-type]
    assert whole.item() == part.item() != 0


def test_issue_trl_3248_masked_rows_are_not_zeros_in_the_mean() -> None:
    value_BT = torch.tensor([[1.0], [9.0], [1.0], [9.0]])
    statistics = kl_statistics(value_BT, torch.tensor([[1], [0], [1], [0]]))
    assert (statistics["mean"], statistics["p50"], statistics["per_sequence_mean"]) == (1.0, 1.0, 1.0)


def test_issue_trl_3029_another_temperature_on_one_side_is_a_false_kl() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0], dtype=torch.float64)
    same, other = torch.log_softmax(logits / 0.7, -1), torch.log_softmax(logits, -1)
    assert float((same.exp() * kl_value(same, other, "k1")).sum()) == pytest.approx(0.040109624128, abs=1e-9)
    assert not kl_value(same, torch.log_softmax(logits / 0.7, -1), "k3").any()


@pytest.mark.parametrize("temperature", [0, 1e-7, 0.049])
def test_issue_trl_3640_a_temperature_near_zero_is_refused(temperature: float) -> None:
    refused("sampling.temperature", "greater than or equal to 0.05", sampling={"temperature": temperature})
    assert job(sampling={"temperature": 0.05}).sampling.temperature == 0.05


def test_issue_trl_1161_the_measured_kl_and_the_loss_term_are_two_metrics() -> None:
    assert {"kl/ref/k3/mean", "kl/loss_term"} <= set(DESCRIPTORS)
    logprob, ref, old = torch.tensor([[-5.0]]), torch.tensor([[-1.0]]), torch.tensor([[-5.5]])
    tokens = kl_loss_tokens(logprob, ref, old, None, torch.ones(1, 1), KlConfig(value_clip=10.0))
    assert tokens.value_BT.item() == pytest.approx(math.expm1(4) - 4)
    assert tokens.surrogate_BT.item() == pytest.approx(10 * math.exp(0.5))


def test_issue_trl_925_a_negative_mean_of_k1_alarms_only_beyond_chance() -> None:
    assert "negative_kl" not in fired(job(), [{"kl/ref/k1/mean": -0.0002, "kl/ref/k1/se": 0.0001}] * 5)
    assert "negative_kl" in fired(job(), [{"kl/ref/k1/mean": -0.00031, "kl/ref/k1/se": 0.0001}] * 5)


def test_issue_trl_2976_the_losses_are_reported_apart() -> None:
    assert {"loss/policy", "loss/kl", "loss/total"} <= set(DESCRIPTORS)


def test_issue_trl_18_switching_the_rule_on_moves_beta_and_off_does_not() -> None:
    kl = [0.01, 0.05, 0.05]
    on, off = rule(), rule(0.02)
    assert [on.update(n, x, x, 8).new for n, x in enumerate(kl, start=1)] == pytest.approx([0.02 / 1.2, 0.02, 0.024])
    assert [off.update(n, x, x, 8).new for n, x in enumerate(kl, start=1)] == [0.02, 0.02, 0.02]


def test_issue_verl_2653_beta_goes_on_after_a_resume() -> None:
    kl = [0.01, 0.05, 0.05, 0.003, 0.04, 0.02]
    whole = rule()
    expected = [whole.update(n, x, x, 8).new for n, x in enumerate(kl, start=1)]
    first, second = rule(), rule()
    for n, x in enumerate(kl[:3], start=1):
        first.update(n, x, x, 8)
    second.load(json.loads(json.dumps(first.state())))
    assert second.value(4) == expected[2] != 0.02
    assert [second.update(n, kl[n - 1], 0.0, 8).new for n in (4, 5, 6)] == expected[3:]


def test_issue_verl_1984_the_horizon_counts_episodes() -> None:
    assert "pisodes" in (ZieglerBeta.model_fields["horizon"].description or "")
    beta = {"rule": "ziegler", "value": 0.1, "target": 0.1, "horizon": 1000, "arming": False}
    factors = [rule(beta).update(1, 9.0, 9.0, episodes).new / 0.1 for episodes in (100, 200)]
    assert factors == pytest.approx([1.02, 1.04])
    rare = rule({**beta, "update_every": 2})
    assert [rare.update(n, 9.0, 9.0, 100).new for n in (1, 2)] == pytest.approx([0.1, 0.104])


@pytest.mark.parametrize("x", [-250.0, -30.0, 30.0, 250.0])
def test_issue_verl_891_gradients_stay_finite(x: float) -> None:
    for grad in ("naive", "unbiased"):
        for direction in ("policy_ref", "ref_policy", "jeffreys"):
            assert bool(torch.isfinite(kl_gradient([[-260.0]], [[-260.0 + x]], [[1]], grad=grad, direction=direction)).all())


def test_issue_verl_2928_there_is_no_clamp_that_never_acts() -> None:
    """k3 is never negative, so a lower clamp on it would be dead; value_clip is an upper bound only."""
    x = torch.linspace(-50, 50, 1001, dtype=torch.float64)
    assert bool((kl_value(torch.zeros_like(x), x, "k3") >= 0).all())
    zero, x_BT, cfg = torch.zeros(1, 1), torch.tensor([[3.0]]), KlConfig(estimator="k1", value_clip=1.0)
    clipped = kl_loss_tokens(zero, x_BT, zero, None, torch.ones(1, 1), cfg)
    assert clipped.surrogate_BT.item() == -3.0


def test_issue_verl_265_kl_is_applied_in_one_place() -> None:
    one = torch.ones(1, 1)
    with pytest.raises(ValueError, match="no loss term"):
        kl_loss_tokens(one, one, one, None, one, KlConfig(estimator="k1", placement="reward"))
    with pytest.raises(ValueError, match="no penalty"):
        kl_penalty(one, one, one, KlConfig())


def test_issue_verl_2953_naive_k3_is_biased_and_unbiased_is_not() -> None:
    assert expected_gradient(A, KlConfig(grad="naive")).tolist() != pytest.approx(RKL_A, abs=1e-4)
    assert expected_gradient(A, KlConfig()).tolist() == pytest.approx(RKL_A, abs=1e-9)


def test_issue_verl_1051_entropy_kl_and_truncation_rising_together_alarm() -> None:
    def rows(truncation_per_step: float) -> list[dict[str, float]]:
        return [
            {"policy/entropy": 1 + n / 10, "kl/ref/k3/mean": n / 1000, "completion/truncated_frac": truncation_per_step * n}
            for n in range(25)
        ]

    assert "blow_up" in fired(job(), rows(0.02))
    assert "blow_up" not in fired(job(), rows(0.0))


def test_issue_verl_4818_a_collapse_without_any_kl_is_seen() -> None:
    start = {"policy/entropy": 1.0, "completion/rep_ngram4": 0.0, "completion/distinct2": 0.9}
    collapsed = {"policy/entropy": 0.1, "completion/rep_ngram4": 0.6, "completion/distinct2": 0.2}
    assert fired(job(beta=0), [start, collapsed]) == {"collapse"}
    assert fired(job(beta=0), [start, {**start, "policy/entropy": 0.1}]) == set()


def test_issue_openrlhf_1309_k1_in_the_loss_has_no_gradient_and_k3_another_ones() -> None:
    naive = KlConfig(estimator="k1", grad="naive", allow_biased=True)
    assert expected_gradient(B, naive).tolist() == pytest.approx([0.0] * 4, abs=1e-12)
    assert expected_gradient(A, KlConfig(grad="naive")).tolist() == pytest.approx(FKL_A, abs=1e-9)


@pytest.mark.parametrize("change", [{"target": 0}, {"target": -1}, {"horizon": 0}, {"horizon": -5}, {"value": 0}, {"value": -0.1}])
def test_issue_openrlhf_1289_settings_that_divide_by_zero_are_refused(change: dict[str, float]) -> None:
    refused("beta", "above 0|greater than|never be changed", beta={"rule": "ziegler", "value": 0.1, "target": 6.0, **change})


def test_issue_openrlhf_634_kl_is_computed_wider_than_its_inputs() -> None:
    """Rounding log-probs of about -6 to bf16 alone looks like a KL of 1e-5; in float32 it is below 1e-9."""
    logprob = -4 - 4 * torch.rand(20_000, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    noise = {dtype: kl_value(logprob, logprob.to(dtype), "k3").mean().item() for dtype in (torch.bfloat16, torch.float32)}
    assert noise[torch.bfloat16] > 1e-6
    assert noise[torch.float32] < 1e-9
    assert kl_value(logprob.bfloat16(), logprob.bfloat16(), "k3").dtype == torch.float64


def test_issue_openrlhf_768_the_placement_is_one_and_echoed() -> None:
    assert job(kl={"estimator": "k1", "placement": "reward"}).model_dump()["kl"]["placement"] == "reward"
    refused("kl.placement", "loss", kl={"placement": ["loss", "reward"]})


def test_issue_nemo_rl_2506_the_score_term_is_in_the_gradient() -> None:
    """rho * k3 without the gradient through rho lacks it: what is left is the other divergence's gradient."""
    off_policy = [0.3, 0.3, 0.2, 0.2]
    assert expected_gradient(A, KlConfig(importance="old"), off_policy).tolist() == pytest.approx(RKL_A, abs=1e-9)
    assert expected_gradient(A, KlConfig(importance="old", grad="naive"), off_policy).tolist() == pytest.approx(FKL_A, abs=1e-9)


def test_issue_nemo_rl_3722_a_beta_steered_against_another_reference_is_refused() -> None:
    first, second = rule(), rule()
    first.ref_sha256, second.ref_sha256 = "aa", "bb"
    with pytest.raises(ValueError, match="reference"):
        second.load(first.state())


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "abs", "exact"])
def test_issue_nemo_rl_1349_every_estimator_can_be_chosen(estimator: str) -> None:
    assert job(kl={"estimator": estimator}).kl.estimator == estimator


def test_issue_skyrl_1633_nan_at_masked_positions_stays_there() -> None:
    nan = float("nan")
    assert kl_gradient([[-1.0, nan]], [[-2.0, nan]], [[1, 0]]).tolist() == [[1.0, 0.0]]
    assert kl_statistics(torch.tensor([[0.5, nan]]), torch.tensor([[1, 0]]))["mean"] == 0.5


def test_issue_skyrl_1296_the_token_mean_is_that_of_the_step() -> None:
    value_BT, mask_BT = torch.tensor([[0.1, 0.1, 0.0], [0.01, 0.01, 0.01]]).double(), torch.tensor([[1, 1, 0], [1, 1, 1]])
    normaliser = Normaliser.create(mask_BT, "token_mean", 3)
    parts = sum(float(aggregate(value_BT[row : row + 1], mask_BT[row : row + 1], normaliser)) for row in range(2))
    assert parts == pytest.approx(0.23 / 5)


@pytest.mark.parametrize("loss_type", ["grpo", "dr_grpo", "dapo", "gspo", "bnpo", "cispo"])
@pytest.mark.parametrize("placement", ["loss", "reward", "advantage"])
def test_issue_skyrl_2104_no_loss_type_drops_the_penalty(loss_type: str, placement: str) -> None:
    cfg = LossConfig(type=loss_type)  # type: ignore[arg-type]
    kl_cfg = KlConfig(estimator="k1", placement=placement)  # type: ignore[arg-type]
    mask_BT = torch.ones(2, 3)
    ref_BT = torch.tensor([[-1.0, -2.0, -0.5], [-0.3, -0.9, -1.4]], dtype=torch.float64)

    def gradient(beta: float) -> torch.Tensor:
        logprob_BT = torch.full((2, 3), -1.0, dtype=torch.float64, requires_grad=True)
        old_BT = logprob_BT.detach()
        advantage = torch.tensor([1.0, -1.0], dtype=torch.float64)[:, None].expand(2, 3)
        if placement != "loss":
            advantage = advantage - beta * kl_penalty(old_BT, ref_BT, mask_BT, kl_cfg).penalty_BT
        loss_BT = policy_loss_tokens(logprob_BT, old_BT, advantage, mask_BT, cfg).loss_BT
        if placement == "loss":
            loss_BT = loss_BT + beta * kl_loss_tokens(logprob_BT, ref_BT, old_BT, None, mask_BT, kl_cfg).surrogate_BT
        loss_BT.sum().backward()
        assert logprob_BT.grad is not None
        return logprob_BT.grad

    assert (gradient(0.5) - gradient(0.0)).abs().max() > 0.01


def test_issue_skyrl_1262_kl_in_the_advantage_is_centred_on_the_batch() -> None:
    old_BT = torch.tensor([[-1.0, -2.0], [-3.0, -1.0]])
    ref_BT = torch.tensor([[-2.0, -2.0], [-3.0, -4.0]])
    cfg = KlConfig(estimator="k1", placement="advantage", discount=0.0)
    penalty = kl_penalty(old_BT, ref_BT, torch.tensor([[1, 1], [1, 0]]), cfg).penalty_BT
    assert penalty.flatten().tolist() == pytest.approx([2 / 3, -1 / 3, -1 / 3, 0.0])
    assert "kl/sampler/k3/mean" in DESCRIPTORS


def test_issue_prime_rl_2458_masked_tokens_have_no_part_in_kl() -> None:
    value_BT = torch.tensor([[0.1, 99.0, 0.3]])
    statistics = kl_statistics(value_BT, torch.tensor([[1, 0, 1]]))
    assert (statistics["mean"], statistics["token_max"]) == pytest.approx((0.2, 0.3))


def test_issue_unsloth_zoo_1262_a_fully_masked_row_is_no_nan() -> None:
    mask_BT = torch.tensor([[1, 1], [0, 0]])
    value_BT = torch.tensor([[0.5, 0.5], [float("nan")] * 2])
    for aggregation in ("token_mean", "seq_mean_token_mean", "seq_sum", "constant"):
        got = aggregate(value_BT, mask_BT, Normaliser.create(mask_BT, aggregation, 2))  # type: ignore[arg-type]
        assert math.isfinite(got.item())


@pytest.mark.parametrize(
    ("path", "settings"),
    [
        ("kl.estimatr", {"kl": {"estimatr": "k3"}}),
        ("beta.horizon", {"beta": {**DEADBAND, "horizon": 5}}),
        ("loss.delta", {"loss": {"delta": 2}}),
        ("kl.discount", {"kl": {"discount": 0.5}}),
        ("kl.importance_clip", {"kl": {"importance": "none", "importance_clip": 2.0}}),
        ("kl.grad", {"kl": {"estimator": "k1", "placement": "reward", "grad": "naive"}}),
        ("kl.log_ratio_clip", {"kl": {"estimator": "exact", "log_ratio_clip": 5.0}}),
    ],
)
def test_issue_unsloth_zoo_890_what_would_be_ignored_is_refused(path: str, settings: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(path.split(".")[-1])):
        job(**settings)


def test_issue_unsloth_zoo_172_one_wild_token_does_not_hide_the_rest() -> None:
    value_BT = torch.full((100, 10), 0.01)
    value_BT[3, 4] = 6.8e9
    statistics = kl_statistics(value_BT, torch.ones(100, 10))
    assert statistics["p50"] == pytest.approx(0.01)
    assert statistics["p95"] == pytest.approx(0.01)
    assert statistics["token_max"] == pytest.approx(6.8e9)
    rows = [{"kl/ref/k3/mean": statistics["mean"], "kl/ref/k3/se": statistics["se"], "kl/ref/k3/token_max": statistics["token_max"]}]
    assert "estimator_unreliable" in fired(job(), rows * 3)


@pytest.mark.parametrize("source", ["initial", "base", "checkpoint:ckpt-1"])
def test_issue_tinker_cookbook_326_the_reference_can_be_named_and_is_never_ignored(source: str) -> None:
    assert validate(ReferenceConfig, {"source": source}).source == source
    refused("reference.source", "pattern", reference={"source": "somewhere"})
    if source != "base":
        assert job(reference={"source": source}).reference.source == source
    else:
        refused("reference.source", "set it to initial", reference={"source": source})


def test_issue_open_instruct_534_k1_in_the_loss_is_refused() -> None:
    refused("kl", "allow_biased", kl={"estimator": "k1", "grad": "naive"})
    assert job(kl={"estimator": "k1", "grad": "naive", "allow_biased": True}).kl.grad == "naive"


def test_issue_trlx_361_the_rule_reads_the_kl_of_its_unit() -> None:
    per_token, per_sequence = rule({**DEADBAND, "unit": "token"}), rule({**DEADBAND, "unit": "sequence"})
    assert per_token.update(1, 0.001, 9.0, 8).action == -1
    assert per_sequence.update(1, 0.001, 9.0, 8).action == 1
    assert (per_token.state()["last_kl"], per_sequence.state()["last_kl"]) == (0.001, 9.0)


def test_issue_pytorch_rl_1922_beta_moves_once_per_rollout() -> None:
    subject = rule()
    subject.update(1, 0.05, 0.05, 8)
    with pytest.raises(ValueError, match="one update per rollout"):
        subject.update(1, 0.05, 0.05, 8)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "abs", "exact"])
def test_issue_toolrl_52_the_penalty_pulls_towards_the_reference(estimator: str) -> None:
    """One step of gradient descent on the KL term alone lowers the KL, under every estimator and in every direction."""
    for case in (A, B):
        gradient = expected_gradient(case, KlConfig(estimator=estimator))  # type: ignore[arg-type]
        logprob = torch.log_softmax(case.logits - 0.1 * gradient, -1)
        before = float((case.logits.exp() * kl_value(case.logits, case.ref_logprob_V, "k1")).sum())
        after = float((logprob.exp() * kl_value(logprob, case.ref_logprob_V, "k1")).sum())
        assert after < before
