"""Log-probabilities by the fast path equal the plain padded forward: values, gradients, exact KL, whatever the batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from grpo_engine import attention
from grpo_engine.attention import BranchPlan
from grpo_engine.batch import Completion, Prompt
from grpo_engine.logprob import MicroBatch, check_shortcut, disable_branching, rollout_stats, split_rows, token_stats
from grpo_engine.network import Network
from grpo_engine.policy import Policy
from tests.engine.model_fixtures import SHAPES, ragged_rows, tiny_policy

TOLERANCES = {torch.float64: 1e-9, torch.float32: 5e-5}


def _plain(policy: Policy) -> Network:
    return Network(policy.model, is_branched=False)


def _whole(rows: list[tuple[Prompt, Completion]]) -> MicroBatch:
    return MicroBatch(list(range(len(rows))), rows)


def _gradients(policy: Policy, network: Network, batches: list[MicroBatch]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Log-probabilities of all rows and the gradient of a fixed weighting of them (and of the entropies)."""
    policy.zero_grad()
    values = torch.zeros(9, 12, dtype=policy.network.dtype)
    weight_BT = torch.linspace(-1, 2, 9 * 12, dtype=policy.network.dtype).view(9, 12)
    for batch in batches:
        stats = token_stats(network, batch, temperature=0.8, pad_id=policy.pad_id, width=12)
        ((stats.logprob_BT + 0.1 * stats.entropy_BT) * stats.mask_BT * weight_BT[batch.index]).sum().backward()
        values[batch.index] = stats.logprob_BT.detach()
    gradients = {name: parameter.grad.clone() for name, parameter in policy.masters.items() if parameter.grad is not None}
    assert set(gradients) == set(policy.masters)
    return values, gradients


@pytest.mark.parametrize("worth_keys", [0, attention.WORTH_KEYS])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("shape", SHAPES)
def test_branched_forward_equals_plain_padded_forward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: str, dtype: torch.dtype, worth_keys: int
) -> None:
    """By both ways of attending: rows as short as these take the one through masks."""
    monkeypatch.setattr(attention, "WORTH_KEYS", worth_keys)
    kind, changes = SHAPES[shape]
    policy = tiny_policy(tmp_path, kind, dtype, **changes)
    assert policy.network.is_branched, policy.network.why_not_branched
    rows = ragged_rows()
    fast, fast_grads = _gradients(policy, policy.network, [_whole(rows)])
    plain, plain_grads = _gradients(policy, _plain(policy), [_whole(rows)])
    assert plain.abs().max() > 1
    torch.testing.assert_close(fast, plain, rtol=0, atol=TOLERANCES[dtype])
    for name, gradient in fast_grads.items():
        scale = max(1.0, float(plain_grads[name].abs().max()))
        torch.testing.assert_close(gradient, plain_grads[name], rtol=0, atol=TOLERANCES[dtype] * scale, msg=name)


def test_plain_forward_equals_transformers_row_by_row(tmp_path: Path) -> None:
    """The oracle itself, against one unpadded call of the model for each row."""
    policy = tiny_policy(tmp_path, dtype=torch.float64)
    rows = ragged_rows()
    stats = token_stats(_plain(policy), _whole(rows), temperature=0.8, pad_id=policy.pad_id)
    for number, (prompt, completion) in enumerate(rows):
        logits = policy.model(torch.tensor([prompt.token_ids + completion.token_ids])).logits[0].double() / 0.8
        logprob = torch.log_softmax(logits, -1)[len(prompt.token_ids) - 1 : -1]
        target = torch.tensor(completion.token_ids)
        count = len(target)
        expected = logprob.gather(1, target[:, None])[:, 0]
        torch.testing.assert_close(stats.logprob_BT[number, :count], expected, rtol=0, atol=1e-9)
        torch.testing.assert_close(stats.entropy_BT[number, :count], -(logprob.exp() * logprob).sum(-1), rtol=0, atol=1e-9)
        assert stats.logprob_BT[number, count:].abs().sum() == 0
        assert stats.mask_BT[number].sum() == count


@pytest.mark.parametrize("shape", ["llama", "gpt2", "window"])
@pytest.mark.parametrize("budget", [1, 20, 45])
def test_results_do_not_depend_on_the_split(tmp_path: Path, shape: str, budget: int) -> None:
    kind, changes = SHAPES[shape]
    policy = tiny_policy(tmp_path, kind, torch.float64, **changes)
    rows = ragged_rows()
    batches = split_rows(rows, budget, is_branched=True)
    assert len(batches) > 1
    assert [index for batch in batches for index in batch.index] == list(range(len(rows)))
    whole, whole_grads = _gradients(policy, policy.network, [_whole(rows)])
    split, split_grads = _gradients(policy, policy.network, batches)
    torch.testing.assert_close(split, whole, rtol=0, atol=1e-9)
    for name, gradient in split_grads.items():
        torch.testing.assert_close(gradient, whole_grads[name], rtol=1e-9, atol=1e-9, msg=name)


def test_a_split_respects_its_budget_and_counts_shared_prompts_once() -> None:
    prompt = Prompt(0, "", list(range(10)), {})
    rows = [(prompt, Completion([1] * 5, [0.0] * 5, "", False)) for _ in range(6)]
    assert [batch.index for batch in split_rows(rows, 25, is_branched=True)] == [[0, 1, 2], [3, 4, 5]]
    assert [batch.index for batch in split_rows(rows, 30, is_branched=False)] == [[0, 1], [2, 3], [4, 5]]
    assert [batch.index for batch in split_rows(rows, 3, is_branched=True)] == [[number] for number in range(6)]


def test_padding_token_changes_nothing(tmp_path: Path) -> None:
    """C04: the pad id may be anything, also an end token or a token of the prompt."""
    policy = tiny_policy(tmp_path)
    rows = ragged_rows()
    readings = [
        _gradients_with_pad(policy, network, rows, pad)
        for network in (policy.network, _plain(policy))
        for pad in (0, 257, rows[0][1].token_ids[0])
    ]
    for values, gradient in readings[1:3]:
        assert torch.equal(values, readings[0][0])
        assert torch.equal(gradient, readings[0][1])
    for values, gradient in readings[4:]:
        torch.testing.assert_close(values, readings[3][0], rtol=0, atol=1e-6)
        torch.testing.assert_close(gradient, readings[3][1], rtol=0, atol=1e-5)


def _gradients_with_pad(
    policy: Policy, network: Network, rows: list[tuple[Prompt, Completion]], pad: int
) -> tuple[torch.Tensor, torch.Tensor]:
    policy.zero_grad()
    stats = token_stats(network, _whole(rows), temperature=1.0, pad_id=pad)
    stats.logprob_BT.sum().backward()
    gradient = policy.masters["model.layers.0.self_attn.q_proj.weight"].grad
    assert gradient is not None
    return stats.logprob_BT.detach(), gradient.clone()


def test_exact_kl_equals_the_enumerated_vocabulary_and_pulls_the_policy_to_the_reference(tmp_path: Path) -> None:
    policy = tiny_policy(tmp_path / "policy", dtype=torch.float64)
    other = tiny_policy(tmp_path / "reference", dtype=torch.float64, seed=1)
    rows = ragged_rows()
    batches = split_rows(rows, 40, is_branched=True)
    reference, states = rollout_stats(other.network, batches, temperature=0.8, pad_id=0, keep_states=True)
    joined, _ = rollout_stats(policy.network, batches, temperature=0.8, pad_id=0, references=states)
    assert joined.exact_policy_ref_BT is not None
    assert joined.exact_ref_policy_BT is not None
    assert reference.logprob_BT.shape == joined.logprob_BT.shape
    for number, (prompt, completion) in enumerate(rows):
        ids = torch.tensor([prompt.token_ids + completion.token_ids])
        logp, logq = (
            torch.log_softmax(model(ids).logits[0].double() / 0.8, -1)[len(prompt.token_ids) - 1 : -1]
            for model in (policy.model, other.model)
        )
        count = len(completion.token_ids)
        torch.testing.assert_close(
            joined.exact_policy_ref_BT[number, :count], (logp.exp() * (logp - logq)).sum(-1).detach(), rtol=0, atol=1e-9
        )
        torch.testing.assert_close(
            joined.exact_ref_policy_BT[number, :count], (logq.exp() * (logq - logp)).sum(-1).detach(), rtol=0, atol=1e-9
        )
    before = float(joined.exact_policy_ref_BT.sum())
    stats = token_stats(policy.network, batches[0], temperature=0.8, pad_id=0, reference=states[0])
    assert stats.exact_policy_ref_BT is not None
    stats.exact_policy_ref_BT.sum().backward()
    with torch.no_grad():
        for master in policy.trainable_parameters():
            if master.grad is not None:
                master -= 1e-3 * master.grad
    after, _ = rollout_stats(policy.network, batches, temperature=0.8, pad_id=0, references=states)
    assert after.exact_policy_ref_BT is not None
    assert float(after.exact_policy_ref_BT.sum()) < before


def test_rollout_stats_keep_row_order_and_gradients_off(tmp_path: Path) -> None:
    policy = tiny_policy(tmp_path)
    rows = ragged_rows()
    shuffled = [MicroBatch([5, 6], rows[5:7]), MicroBatch([0, 1, 2, 3, 4], rows[:5]), MicroBatch([7, 8], rows[7:])]
    joined, states = rollout_stats(policy.network, shuffled, temperature=1.0, pad_id=0)
    whole = token_stats(policy.network, _whole(rows), temperature=1.0, pad_id=0)
    torch.testing.assert_close(joined.logprob_BT, whole.logprob_BT.detach(), rtol=0, atol=1e-5)
    assert not joined.logprob_BT.requires_grad
    assert states == []


def test_the_check_passes_and_a_broken_shortcut_is_caught_and_switched_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = tiny_policy(tmp_path)
    rows = ragged_rows()
    good = check_shortcut(policy.network, rows, temperature=1.0, pad_id=0)
    assert good.is_equal
    assert good.gap <= 5e-5
    original: Callable[..., torch.Tensor] = BranchPlan._own_allowed
    monkeypatch.setattr(BranchPlan, "_own_allowed", lambda plan, window: torch.ones_like(original(plan, window)))
    broken = check_shortcut(policy.network, rows, temperature=1.0, pad_id=0)
    assert not broken.is_equal
    assert broken.gap > 1e-3
    assert "differ" in broken.reason
    disable_branching(broken.reason, policy.network)
    assert policy.network.why_not_cached == ""
    after = token_stats(policy.network, _whole(rows), temperature=1.0, pad_id=0)
    plain = token_stats(_plain(policy), _whole(rows), temperature=1.0, pad_id=0)
    assert torch.equal(after.logprob_BT, plain.logprob_BT)
    assert not check_shortcut(policy.network, rows, temperature=1.0, pad_id=0).is_equal


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_that_ignores_the_plan_is_caught_when_the_model_is_prepared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    assert tiny_policy(tmp_path / "good", dtype=dtype).network.is_branched
    original: Callable[..., torch.Tensor] = BranchPlan._own_allowed
    monkeypatch.setattr(BranchPlan, "_own_allowed", lambda plan, window: torch.ones_like(original(plan, window)))
    broken = tiny_policy(tmp_path / "bad", dtype=dtype).network
    assert not broken.is_branched
    assert "differ" in broken.why_not_branched


def test_activation_checkpointing_recomputes_and_gives_the_same_gradients(tmp_path: Path) -> None:
    policy = tiny_policy(tmp_path, dtype=torch.float64)
    rows = ragged_rows()
    calls = 0

    def count(*_: object) -> None:
        nonlocal calls
        calls += 1

    policy.model.model.layers[0].mlp.register_forward_pre_hook(count)
    _, plain = _gradients(policy, policy.network, [_whole(rows)])
    once, calls = calls, 0
    policy.set_activation_checkpointing(True)
    _, recomputed = _gradients(policy, policy.network, [_whole(rows)])
    assert calls == 2 * once
    for name, gradient in recomputed.items():
        torch.testing.assert_close(gradient, plain[name], rtol=1e-12, atol=1e-12, msg=name)


def test_an_empty_completion_is_refused(tmp_path: Path) -> None:
    policy = tiny_policy(tmp_path)
    with pytest.raises(ValueError, match="empty"):
        token_stats(policy.network, _whole([(Prompt(0, "", [1], {}), Completion([], [], "", True))]), temperature=1.0, pad_id=0)


def test_the_branched_module_is_still_an_ordinary_transformers_model(tmp_path: Path) -> None:
    policy = tiny_policy(tmp_path)
    original = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ids = torch.tensor([[1, 2, 3, 4]])
    torch.testing.assert_close(policy.model(ids).logits, original(ids).logits)
