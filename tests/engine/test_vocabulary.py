"""The tiled head gives the textbook numbers and gradients, whatever the tiles."""

from __future__ import annotations

import pytest
import torch

from grpo_engine import vocabulary
from grpo_engine.network import Head
from grpo_engine.vocabulary import ReferenceStates, vocabulary_stats

TOKENS, VOCABULARY, HIDDEN = 7, 1000, 5


def _inputs(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN, dtype=dtype, requires_grad=True)
    weight = torch.randn(VOCABULARY, HIDDEN, dtype=dtype, requires_grad=True)
    bias = torch.randn(VOCABULARY, dtype=dtype, requires_grad=True)
    return hidden, weight, bias, torch.randint(0, VOCABULARY, (TOKENS,))


def _reference(dtype: torch.dtype = torch.float64) -> ReferenceStates:
    torch.manual_seed(1)
    return ReferenceStates(torch.randn(TOKENS, HIDDEN, dtype=dtype), Head(torch.randn(VOCABULARY, HIDDEN, dtype=dtype), None))


def _textbook(hidden, weight, bias, target, temperature, reference):  # type: ignore[no-untyped-def]
    logp = torch.log_softmax((hidden @ weight.T + bias) / temperature, -1)
    logq = torch.log_softmax((reference.hidden_NC @ reference.head.weight_VC.T) / temperature, -1)
    chosen = logp.gather(1, target[:, None])[:, 0]
    return chosen, -(logp.exp() * logp).sum(1), (logp.exp() * (logp - logq)).sum(1), (logq.exp() * (logq - logp)).sum(1)


@pytest.mark.parametrize(("tile_tokens", "tile_elements"), [(2048, 4 * 1024 * 1024), (3, 1024), (1, 1)])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_values_and_gradients_equal_the_textbook(monkeypatch, tile_tokens, tile_elements, temperature):  # type: ignore[no-untyped-def]
    monkeypatch.setattr(vocabulary, "TILE_TOKENS", tile_tokens)
    monkeypatch.setattr(vocabulary, "TILE_ELEMENTS", tile_elements)
    hidden, weight, bias, target = _inputs()
    reference = _reference()
    stats = vocabulary_stats(hidden, Head(weight, bias), target, temperature, reference)
    found = (stats.logprob_N, stats.entropy_N, stats.kl_policy_ref_N, stats.kl_ref_policy_N)
    expected = _textbook(hidden, weight, bias, target, temperature, reference)
    for name, ours, theirs in zip(("logprob", "entropy", "kl_pr", "kl_rp"), found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10, msg=name)
        cotangent = torch.linspace(-1, 2, TOKENS, dtype=torch.float64)
        grads = torch.autograd.grad((ours * cotangent).sum(), (hidden, weight, bias), retain_graph=True)
        wanted = torch.autograd.grad((theirs * cotangent).sum(), (hidden, weight, bias), retain_graph=True)
        for ours_grad, theirs_grad in zip(grads, wanted, strict=True):
            torch.testing.assert_close(ours_grad, theirs_grad, rtol=1e-9, atol=1e-10, msg=f"gradient of {name}")


def test_a_constant_factor_of_the_logits_is_applied() -> None:
    hidden, weight, bias, target = _inputs()
    scaled = vocabulary_stats(hidden, Head(weight, bias, 0.25), target, 1.0)
    tempered = vocabulary_stats(hidden, Head(weight, bias), target, 4.0)
    torch.testing.assert_close(scaled.logprob_N, tempered.logprob_N)


def test_equal_distributions_have_exact_kl_zero_in_every_dtype() -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        hidden, weight, _, target = _inputs(dtype)
        same = ReferenceStates(hidden.detach(), Head(weight.detach(), None))
        stats = vocabulary_stats(hidden, Head(weight, None), target, 1.0, same)
        assert stats.kl_policy_ref_N is not None
        assert stats.kl_ref_policy_N is not None
        assert stats.kl_policy_ref_N.abs().max() == 0
        assert stats.kl_ref_policy_N.abs().max() == 0


def test_bf16_weights_give_fp32_logits_not_bf16_ones() -> None:
    """Logits near 30 have a spacing of 0.125 in bf16; the products must be kept in fp32."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(64, 256).bfloat16() * 2, torch.randn(512, 256).bfloat16()
    target = torch.randint(0, 512, (64,))
    found = vocabulary_stats(hidden, Head(weight, None), target, 1.0).logprob_N
    exact = torch.log_softmax(hidden.double() @ weight.double().T, -1).gather(1, target[:, None])[:, 0]
    rounded = torch.log_softmax((hidden @ weight.T).double(), -1).gather(1, target[:, None])[:, 0]
    assert (found.double() - exact).abs().max() < 1e-3
    assert (rounded - exact).abs().max() > 1e-2


def test_extreme_logits_stay_finite() -> None:
    hidden = torch.tensor([[1000.0], [-1000.0], [0.0]], requires_grad=True)
    weight = torch.tensor([[1.0], [0.5], [-1.0]], requires_grad=True)
    stats = vocabulary_stats(hidden, Head(weight, None), torch.tensor([2, 0, 1]), 1.0)
    (stats.logprob_N.sum() + stats.entropy_N.sum()).backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    assert torch.isfinite(stats.logprob_N).all()
    assert torch.isfinite(stats.entropy_N).all()
    assert torch.isfinite(hidden.grad).all()
    assert torch.isfinite(weight.grad).all()


def test_no_tensor_of_tokens_times_vocabulary_is_ever_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is saved for backward does not grow with the vocabulary."""
    hidden, weight, bias, target = _inputs()
    saved: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor.numel()) or tensor, lambda tensor: tensor):
        stats = vocabulary_stats(hidden, Head(weight, bias), target, 1.0, _reference())
    stats.logprob_N.sum().backward()
    assert saved
    assert max(saved) <= max(weight.numel(), hidden.numel())
