"""The claims of the interview answer, row by row (kl_rows.json): what is true is proved, what is false is shown to be."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_engine.advantage import group_advantages
from grpo_engine.beta import BetaRule
from grpo_engine.contract.beta import DeadbandBeta, FixedBeta, PpoBeta, needs_reference
from grpo_engine.contract.error import InvalidRequest
from grpo_engine.contract.intake import resolve_spec, validate
from grpo_engine.contract.job import GrpoConfig, LossConfig
from grpo_engine.contract.kl import KlConfig
from grpo_engine.contract.presets import PRESETS, preset_config
from grpo_engine.contract.telemetry import DESCRIPTORS
from grpo_engine.diagnostics import Detectors
from grpo_engine.kl import exact_kl, kl_loss_tokens, kl_penalty, kl_statistics, kl_value
from grpo_engine.loss import Normaliser, aggregate, policy_loss_tokens
from tests.golden.enumeration import A, B, expected_gradient
from tests.golden.plant import TRACE_KL, closed_loop, trace, unchecked_deadband
from tests.golden.test_kl_values import moments


def job(**grpo: Any) -> GrpoConfig:
    raw = {"model": "m", "training_file": "file-a", "method": {"type": "grpo", "grpo": {"grader": {"type": "math"}, **grpo}}}
    return resolve_spec(raw).method.grpo


def kl_token_gradient(x: list[float], **settings: Any) -> list[float]:
    """Gradient of the KL term of each token of one row, log pi_ref - log pi_theta given."""
    logprob_BT = torch.full((1, len(x)), -2.0, dtype=torch.float64, requires_grad=True)
    ref_BT = logprob_BT.detach() + torch.tensor([x], dtype=torch.float64)
    kl_loss_tokens(logprob_BT, ref_BT, logprob_BT.detach(), None, torch.ones(1, len(x)), KlConfig(**settings)).surrogate_BT.sum().backward()
    assert logprob_BT.grad is not None
    return [float(value) for value in logprob_BT.grad[0]]


def test_claim_01_the_kl_of_grpo_is_policy_first() -> None:
    assert KlConfig().direction == "policy_ref"
    assert exact_kl(A.logits[None], A.ref_logprob_V[None], KlConfig().direction).item() == pytest.approx(0.022839075591, abs=1e-9)


def test_claim_02_that_direction_is_called_reverse() -> None:
    assert job(kl={"direction": "reverse"}).kl.direction == "policy_ref"
    assert job(kl={"direction": "forward"}).kl.direction == "ref_policy"
    assert job(preset="recipe_fixed").kl.direction == "policy_ref"
    assert exact_kl(A.logits[None], A.ref_logprob_V[None], "ref_policy").item() == pytest.approx(0.022975461003, abs=1e-9)


def test_claim_03_over_used_tokens_are_punished() -> None:
    k1 = kl_value(B.logits, B.ref_logprob_V, "k1")
    assert k1[0].item() == pytest.approx(1.0296, abs=1e-4)
    assert k1[3].item() == pytest.approx(-3.2189, abs=1e-4)


def test_claim_04_policy_first_seeks_a_mode_and_reference_first_covers() -> None:
    """The text has it the wrong way round. Reference: two peaks; policy: one bell with sigma <= 4, over eleven states."""
    state_V = torch.arange(11, dtype=torch.float64)

    def bell(mu: Tensor, sigma: Tensor) -> Tensor:
        return torch.log_softmax(-((state_V - mu) ** 2) / (2 * sigma**2), -1)

    narrow = torch.tensor([0.6], dtype=torch.float64)
    ref_V = torch.logaddexp(bell(torch.tensor([2.0]), narrow), bell(torch.tensor([8.0]), narrow)) - math.log(2)
    mu_N, sigma_N = torch.cartesian_prod(
        torch.linspace(0, 10, 201, dtype=torch.float64), torch.linspace(0.3, 4, 75, dtype=torch.float64)
    ).unbind(-1)
    policy_NV = bell(mu_N[:, None], sigma_N[:, None])
    for direction, centres, sigma, kl in (("policy_ref", (2.0, 8.0), 0.6, 0.693145), ("ref_policy", (5.0,), 4.0, 0.822294)):
        value_N = exact_kl(policy_NV, ref_V.expand_as(policy_NV), direction)  # type: ignore[arg-type]
        best = int(value_N.argmin())
        assert any(float(mu_N[best]) == pytest.approx(centre) for centre in centres)
        assert float(sigma_N[best]) == pytest.approx(sigma)
        assert float(value_N[best]) == pytest.approx(kl, abs=1e-6)


def test_claim_05_k3_is_positive_and_unbiased_k2_is_not() -> None:
    for case in (A, B):
        exact = exact_kl(case.logits[None], case.ref_logprob_V[None]).item()
        assert bool((kl_value(case.logits, case.ref_logprob_V, "k3") >= 0).all())
        assert moments(case, "k1")[0] == pytest.approx(exact, abs=1e-12)
        assert moments(case, "k3")[0] == pytest.approx(exact, abs=1e-12)
        assert abs(moments(case, "k2")[0] - exact) > 1e-5


def test_claim_06_the_gradient_of_k3_is_that_of_the_other_direction() -> None:
    case_A = expected_gradient(A, KlConfig(grad="naive"))
    assert case_A.tolist() == pytest.approx([0.1, -0.05, -0.05, 0.0], abs=1e-12)
    unbiased = [0.100152237862, -0.051290158096, -0.046578172206, -0.002283907559]
    assert expected_gradient(A, KlConfig(grad="unbiased")).tolist() == pytest.approx(unbiased, abs=1e-12)


def test_claim_07_on_policy_with_equal_lengths_the_loss_is_beta_times_kl() -> None:
    """The advantages of a group add up to 0, so only the penalty is visible in the number (never in the gradient)."""
    generator = torch.Generator().manual_seed(0)
    logprob_BT, ref_BT = (-torch.rand(4, 6, generator=generator, dtype=torch.float64) for _ in range(2))
    logprob_BT.requires_grad_()
    mask_BT = torch.ones(4, 6)
    advantage_B = group_advantages(torch.tensor([[1.0, 0, 0, 1]]), LossConfig()).advantage_PG[0]
    policy = policy_loss_tokens(logprob_BT, logprob_BT.detach(), advantage_B, mask_BT, LossConfig())
    kl = kl_loss_tokens(logprob_BT, ref_BT, logprob_BT.detach(), None, mask_BT, KlConfig())
    normaliser = Normaliser.create(mask_BT, "seq_mean_token_mean", 6)
    policy_term, kl_term = (aggregate(value, mask_BT, normaliser) for value in (policy.loss_BT, kl.surrogate_BT))
    assert policy_term.item() == pytest.approx(0, abs=1e-12)
    assert (policy_term + 0.04 * kl_term).item() == pytest.approx(0.04 * kl.value_BT.mean().item(), abs=1e-12)
    policy_term.backward()
    assert logprob_BT.grad is not None
    assert logprob_BT.grad.abs().sum() > 0.1


def test_claim_08_hacking_is_judged_by_the_held_out_reward_not_by_kl() -> None:
    detectors = Detectors(job())
    fired: set[str] = set()
    for step in range(1, 41):
        metrics = {"reward/mean": step / 40, "kl/ref/k3/mean": 0.01 * (step > 1), "completion/length_mean": 20.0}
        if step % 5 == 0:
            metrics["eval/reward_mean"] = 0.5 - step / 100
        fired |= {signal.detector for signal in detectors.observe(step, metrics) if signal.kind == "fired"}
    assert fired == {"reward_hacking"}


@pytest.mark.parametrize(("beta", "is_fired"), [(0.1, False), (0.1000001, True)])
def test_claim_09_beta_above_a_tenth_warns_and_no_more(beta: float, is_fired: bool) -> None:
    signals = Detectors(job()).observe(1, {"beta/applied": beta})
    assert ("beta_high" in {signal.detector for signal in signals}) == is_fired


def test_claim_10_a_small_beta_alone_is_no_alarm_and_zero_is_legal() -> None:
    def fired(beta: float, kl_per_step: float) -> bool:
        detectors = Detectors(job())
        rows = [{"beta/applied": beta, "kl/ref/k3/mean": 0.001 + kl_per_step * step} for step in range(30)]
        return any(s.detector == "beta_low" for step, row in enumerate(rows, start=1) for s in detectors.observe(step, row))

    assert not fired(0.0005, 0.0)
    assert fired(0.0005, 0.001)
    assert not fired(0.0, 0.001)
    assert not needs_reference(job(beta=0).beta)


def test_claim_11_the_default_lies_in_the_typical_range() -> None:
    assert job().beta == FixedBeta(value=0.02)


def test_claim_12_the_recipe_scales_beta_with_the_model() -> None:
    sizes = {size: job(preset={"name": "recipe_fixed", "size": size}).beta for size in ("lt1b", "7b", "70b")}
    assert sizes == {"lt1b": FixedBeta(value=0.02), "7b": FixedBeta(value=0.02), "70b": FixedBeta(value=0.01)}


def test_claim_13_the_recipes_rule() -> None:
    expected = [0.016666666667, 0.016666666667, 0.02, 0.024, 0.0288, 0.03456, 0.03456, 0.0288, 0.024, 0.024]
    assert trace(BetaRule.create(unchecked_deadband(ema_decay=None), 10), TRACE_KL) == pytest.approx(expected, abs=1e-12)


def test_claim_14_an_ema_needs_rarer_decisions() -> None:
    """With decay 0.9 and a decision each step beta falls by 42 % while KL is at 2.5 times its target: refused."""
    betas = trace(BetaRule.create(unchecked_deadband(ema_decay=0.9), 10), TRACE_KL)
    assert betas[3] / 0.02 == pytest.approx(0.5787, abs=1e-4)
    assert TRACE_KL[3] / 0.02 == 2.5
    plain = {"rule": "deadband", "value": 0.02, "target": 0.02, "ema_decay": 0.9}
    with pytest.raises(InvalidRequest, match="at least 10"):
        validate(DeadbandBeta, {**plain, "update_every": 9})
    assert validate(DeadbandBeta, {**plain, "update_every": 10}).update_every == 10


def test_claim_15_three_kls_have_three_names() -> None:
    assert {"kl/ref/k3/mean", "kl/old/k3/mean", "kl/sampler/k3/mean"} <= set(DESCRIPTORS)
    assert "kl" not in DESCRIPTORS
    assert validate(PpoBeta, {"rule": "ppo", "value": 1, "target": 0.01}).factor == 2.0


def test_claim_16_a_group_of_equal_rewards_gets_the_penalty_alone() -> None:
    def gradient(zero_std_groups: str) -> float:
        cfg = LossConfig(zero_std_groups=zero_std_groups)  # type: ignore[arg-type]
        advantages = group_advantages(torch.tensor([[1.0, 1.0]]), cfg)
        logprob_BT = torch.full((2, 3), -1.0, dtype=torch.float64, requires_grad=True)
        policy_mask_BT, kl_mask_BT = (keep.reshape(2, 1).expand(2, 3) for keep in (advantages.policy_keep_PG, advantages.kl_keep_PG))
        policy = policy_loss_tokens(logprob_BT, logprob_BT.detach(), advantages.advantage_PG[0], policy_mask_BT, cfg)
        kl = kl_loss_tokens(logprob_BT, logprob_BT.detach() - 0.5, logprob_BT.detach(), None, kl_mask_BT, KlConfig())
        loss = aggregate(policy.loss_BT, policy_mask_BT, Normaliser.create(policy_mask_BT, "token_mean", 3))
        loss = loss + aggregate(kl.surrogate_BT, kl_mask_BT, Normaliser.create(kl_mask_BT, "token_mean", 3))
        loss.backward()
        assert logprob_BT.grad is not None
        return float(logprob_BT.grad.sum())

    assert gradient("keep") == pytest.approx(0.5)
    assert gradient("mask_policy") == pytest.approx(0.5)
    assert gradient("drop_all") == 0.0


def test_claim_17_held_low_for_a_tenth_then_raised() -> None:
    ramp = {"rule": "schedule", "schedule": {"type": "linear", "start": 0.005, "end": 0.02, "hold_ratio": 0.1}}
    whole = BetaRule.create(job(beta=ramp).beta, 101)
    assert (whole.value(1), whole.value(11), whole.value(101)) == (0.005, 0.005, 0.02)
    for step in range(1, 41):
        whole.update(step, 0.01, 0.01, 8)
    resumed = BetaRule.create(job(beta=ramp).beta, 101)
    resumed.load(whole.state())
    assert [resumed.value(step) for step in range(41, 102)] == [whole.value(step) for step in range(41, 102)]


def saved_bytes(aggregation: str) -> int:
    """Bytes autograd keeps for the backward pass of a KL term taken from logits."""
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    logits_BTV = torch.zeros(8, 64, 2048, requires_grad=True)
    mask_BT = torch.ones(8, 64)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        logprob_BT = torch.log_softmax(logits_BTV, -1)[:, :, 0]
        kl = kl_loss_tokens(logprob_BT, torch.full((8, 64), -7.0), logprob_BT.detach(), None, mask_BT, KlConfig())
        aggregate(kl.surrogate_BT, mask_BT, Normaliser.create(mask_BT, aggregation, 64)).backward()  # type: ignore[arg-type]
    return sum(kept.values())


def test_claim_18_averaging_kl_per_response_saves_no_memory() -> None:
    """The KL of a token is 1/V of its logits. What costs is the logits, the reference's forward and its weights."""
    assert 8 * 1024 * 4 == 32_768
    assert 8 * 1024 * 151_936 * 4 == 4_978_638_848
    token, response = saved_bytes("token_mean"), saved_bytes("seq_mean_token_mean")
    assert token > 8 * 64 * 2048 * 4
    assert response == pytest.approx(token, rel=0.01)


def test_claim_19_the_response_mean_is_kept_under_its_name() -> None:
    for name in ("recipe_fixed", "recipe_adaptive", "recipe_calibrated"):
        assert job(preset=name).kl.aggregation == "seq_mean_token_mean"


@pytest.mark.parametrize(
    ("aggregation", "expected"), [("seq_mean_token_mean", 0.055), ("token_mean", 0.028), ("seq_sum", 0.14), ("constant", 0.00875)]
)
def test_claim_20_only_a_sum_over_tokens_charges_for_length(aggregation: str, expected: float) -> None:
    value_BT = torch.tensor([[0.1, 0.1, *[0.0] * 6], [0.01] * 8], dtype=torch.float64)
    mask_BT = torch.tensor([[1, 1, *[0] * 6], [1] * 8])
    normaliser = Normaliser.create(mask_BT, aggregation, 16)  # type: ignore[arg-type]
    assert aggregate(value_BT, mask_BT, normaliser).item() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(("aggregation", "factor"), [("seq_mean_token_mean", 1.0), ("seq_sum", 2.0)])
def test_claim_21_the_response_mean_is_blind_to_repeated_tokens(aggregation: str, factor: float) -> None:
    """A response with every token twice: the gradient of a shared parameter stays under the mean and doubles under the sum."""

    def gradient(repeats: int) -> float:
        shift = torch.zeros((), dtype=torch.float64, requires_grad=True)
        logprob_BT = torch.tensor([[-1.0, -2.0] * repeats], dtype=torch.float64) + shift
        mask_BT = torch.ones_like(logprob_BT)
        kl = kl_loss_tokens(logprob_BT, logprob_BT.detach() - 0.3, logprob_BT.detach(), None, mask_BT, KlConfig())
        aggregate(kl.surrogate_BT, mask_BT, Normaliser.create(mask_BT, aggregation, 4)).backward()  # type: ignore[arg-type]
        assert shift.grad is not None
        return float(shift.grad)

    assert gradient(2) == pytest.approx(factor * gradient(1))


def test_claim_22_fixed_is_the_default_and_adaptive_a_choice() -> None:
    assert GrpoConfig.model_fields["beta"].default == FixedBeta()
    assert job(beta={"rule": "deadband", "value": 0.02, "target": 0.02}).beta.rule == "deadband"


def test_claim_23_decisions_every_fifty_rollouts_by_default() -> None:
    cfg = validate(DeadbandBeta, {"rule": "deadband", "value": 0.02, "target": 0.02})
    assert (cfg.update_every, cfg.up, cfg.down) == (50, 1.2, 1.2)
    betas = trace(BetaRule.create(cfg, 200), [0.05] * 100)
    assert [index + 1 for index in range(1, 100) if betas[index] != betas[index - 1]] == [50, 100]


def test_claim_24_ten_rollouts_at_kl_zero_do_not_make_a_target_of_zero() -> None:
    rule = BetaRule.create(job(preset="recipe_calibrated").beta, 100)
    updates = [rule.update(step, 0.0, 0.0, 8) for step in range(1, 11)]
    assert rule.target == 0.005
    assert "clamped" in updates[-1].reason


def test_claim_25_sampling_makes_the_symmetric_kl_noisy_and_the_exact_sum_does_not() -> None:
    assert moments(B, "k1")[1] == pytest.approx(0.645, abs=1e-3)
    assert moments(B, "k3")[1] == pytest.approx(4.170, abs=1e-3)
    assert moments(B, "k3", "jeffreys")[1] == pytest.approx(58.295, abs=1e-3)
    per_sample = [exact_kl(B.logits[None], B.ref_logprob_V[None], "jeffreys").item() for _ in range(4)]
    assert len(set(per_sample)) == 1
    assert per_sample[0] == pytest.approx(1.410480312871, abs=1e-9)


def test_claim_27_the_symmetric_kl_is_allowed() -> None:
    for estimator in ("k3", "exact"):
        assert job(kl={"direction": "jeffreys", "estimator": estimator}).kl.direction == "jeffreys"


def test_claim_28_the_recipes_targets() -> None:
    targets = {size: job(preset={"name": "recipe_adaptive", "size": size}).beta.target for size in ("lt1b", "7b", "70b")}  # type: ignore[union-attr]
    assert targets == {"lt1b": 0.02, "7b": 0.02, "70b": 0.01}


def test_claim_29_the_target_is_the_median_of_the_warm_up() -> None:
    calibration = {"rollouts": 3, "fixed_value": 0.02}
    rule = BetaRule.create(job(beta={"rule": "deadband", "value": 0.02, "calibration": calibration}).beta, 100)
    for step, kl in enumerate([0.01, 0.03, 0.05], start=1):
        assert rule.value(step) == 0.02
        rule.update(step, kl, kl, 8)
    assert rule.target == 0.03


def test_claim_30_an_unreachable_target_drives_beta_to_its_max_and_says_so() -> None:
    rule = BetaRule.create(unchecked_deadband(ema_decay=None, target=0.004, max=0.5), 100)
    needed = math.ceil(math.log(0.5 / 0.02) / math.log(1.2))
    updates = [rule.update(step, 0.006, 0.006, 8) for step in range(1, needed + 2)]
    assert [update.saturated for update in updates] == [0] * (needed - 1) + [1, 1]
    assert updates[-1].new == 0.5
    detectors = Detectors(job(beta={"rule": "deadband", "value": 0.02, "target": 0.02, "update_every": 1, "ema_decay": None}))
    fired = [s.step for n, u in enumerate(updates, start=1) for s in detectors.observe(n, {**u.metrics(), "beta/target": 0.02})]
    assert fired == [needed + 1]


def test_claim_31_the_threshold_of_control_is_a_setting() -> None:
    def steps_until_fired(threshold: float) -> list[int]:
        detectors = Detectors(job(diagnostics={"kl_out_of_control": {"kl": threshold}}))
        rows = [{"kl/ref/k3/mean": 0.02 * step} for step in range(1, 16)]
        return [n for n, row in enumerate(rows, start=1) if any(s.detector == "kl_out_of_control" for s in detectors.observe(n, row))]

    assert steps_until_fired(0.1) == [8]
    assert steps_until_fired(0.2) == [13]


def test_claim_32_rlhf_puts_k1_into_the_reward() -> None:
    cfg = job(preset="ziegler2019").kl
    assert (cfg.placement, cfg.estimator, cfg.discount) == ("reward", "k1", 1.0)
    old_BT = torch.tensor([[-1.0, -2.0, -3.0]])
    penalty = kl_penalty(old_BT, torch.tensor([[-1.5, -2.5, -2.0]]), torch.ones(1, 3), cfg)
    assert penalty.penalty_BT.tolist() == [[0.0, -0.5, -1.0]]


def test_claim_33_kl_is_per_token_and_the_response_a_view_of_it() -> None:
    kl = kl_loss_tokens(torch.zeros(2, 3), torch.full((2, 3), 0.1), torch.zeros(2, 3), None, torch.ones(2, 3), KlConfig())
    assert kl.value_BT.shape == (2, 3)
    statistics = kl_statistics(kl.value_BT, torch.ones(2, 3))
    assert statistics["per_sequence_mean"] == pytest.approx(3 * statistics["mean"])


def test_claim_34_clips_of_kl_are_settings_and_counted() -> None:
    cfg = KlConfig(value_clip=1.0, log_ratio_clip=5.0)
    x_BT = torch.tensor([[0.1, 2.0, 6.0, -6.0]])
    clipped = kl_loss_tokens(torch.zeros(1, 4), x_BT, torch.zeros(1, 4), None, torch.ones(1, 4), cfg)
    assert clipped.clipped_BT.tolist() == [[False, True, True, True]]
    assert "kl/clip_frac" in DESCRIPTORS
    assert job(preset="recipe_fixed").kl.log_ratio_clip is None
    assert kl_token_gradient([3.0], value_clip=1.0) == pytest.approx([-3.0])


def test_claim_36_the_rule_ends_inside_its_band() -> None:
    """A deterministic toy policy, not a language model: the only setting in which such a bound can be checked."""
    cfg = validate(
        DeadbandBeta,
        {"rule": "deadband", "value": 0.02, "target": 0.02, "update_every": 50, "ema_decay": 0.9, "max": 10.0},
    )
    rule = BetaRule.create(cfg, 20_000)
    ref_V = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64).log()
    logits_V, reward_V = ref_V.clone(), torch.tensor([1.0, 0, 0, 0], dtype=torch.float64)
    readings = []
    for step in range(1, 4001):
        p_V = torch.softmax(logits_V, -1)
        k1_V = p_V.log() - ref_V
        kl = float((p_V * k1_V).sum())
        readings.append(kl)
        net_V = reward_V - rule.value(step) * k1_V
        logits_V = logits_V + 0.2 * p_V * (net_V - (p_V * net_V).sum())
        rule.update(step, kl, kl, 8)
    assert all(0.8 * 0.02 <= kl <= 0.02 for kl in readings[-500:])


def test_claim_38_deepseekmath_has_a_fixed_beta_of_four_hundredths() -> None:
    grpo = job(preset="deepseekmath_2024")
    assert grpo.beta == FixedBeta(value=0.04)
    assert (grpo.kl.estimator, grpo.kl.grad, grpo.kl.aggregation) == ("k3", "naive", "seq_mean_token_mean")
    assert (grpo.sampling.group_size, grpo.sampling.max_completion_tokens, grpo.loss.num_iterations) == (64, 1024, 1)
    assert grpo.optimizer.learning_rate == 1e-6


def test_every_preset_names_its_sources() -> None:
    for card in PRESETS:
        assert card.sources
        assert preset_config(card.name) == card.config


def test_a_lagging_plant_is_why_decisions_are_rare() -> None:
    often, _ = closed_loop(unchecked_deadband(ema_decay=None, update_every=1), 2000, lag=20)
    rarely, _ = closed_loop(unchecked_deadband(ema_decay=None, update_every=50), 2000, lag=20)
    assert max(often) > 20 * max(rarely)
