"""The written-out attention equals torch's, forward and backward, also in chunks."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from grpo_engine import masked_attention as module
from grpo_engine.masked_attention import masked_attention

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}


def _inputs(dtype: torch.dtype) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    tensors = [torch.randn(5, 2, length, 8).to(dtype).requires_grad_() for length in (6, 9, 9)]
    mask = torch.where(torch.rand(5, 1, 6, 9) < 0.4, float("-inf"), 0.0)
    mask[..., 0] = 0.0
    return tensors, mask.to(torch.float32 if dtype == torch.bfloat16 else dtype), torch.randn(5, 2, 6, 8).to(dtype)


@pytest.mark.parametrize("chunk", [16 * 1024 * 1024, 250, 1])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_values_and_gradients(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, chunk: int) -> None:
    monkeypatch.setattr(module, "CHUNK_SCORES", chunk)
    tensors, mask, cotangent = _inputs(dtype)
    output = masked_attention(*tensors, mask, 0.3)
    gradients = torch.autograd.grad(output, tensors, cotangent)
    wide = [tensor.detach().double().requires_grad_() for tensor in tensors]
    expected = functional.scaled_dot_product_attention(*wide, attn_mask=mask.double(), scale=0.3)
    wanted = torch.autograd.grad(expected, wide, cotangent.double())
    for found, right in zip((output, *gradients), (expected, *wanted), strict=True):
        assert found.dtype == dtype
        torch.testing.assert_close(found.double(), right, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_forward_is_bitwise_the_same_without_gradients() -> None:
    tensors, mask, _ = _inputs(torch.bfloat16)
    with_gradients = masked_attention(*tensors, mask, 0.3)
    with torch.no_grad():
        assert torch.equal(masked_attention(*tensors, mask, 0.3), with_gradients)


def test_very_long_rows_go_to_the_fused_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors, mask, _ = _inputs(torch.float32)
    written_out = masked_attention(*tensors, mask, 0.3)
    monkeypatch.setattr(module, "MOST_SCORES_A_ROW", 10)
    fused = masked_attention(*tensors, mask, 0.3)
    assert written_out.grad_fn.name() != fused.grad_fn.name()
    torch.testing.assert_close(fused, written_out)
