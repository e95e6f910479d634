"""softmax(scale * Q K^T + mask) V with an additive mask, forward and backward.

On CUDA this is torch's scaled_dot_product_attention. On the CPU its fused kernel is slow with a mask and short rows (measured on
32 rows of 3 heads, 189 queries, 109 keys in bf16: 71 ms backward, 8 ms here), so the products are written out: scores in fp32
(fp64 for fp64 inputs) from bf16 products, nothing but the inputs saved, scores made again in backward, a few rows at a time so
that memory stays bounded. Forward is the same with and without gradients, so policy and reference agree bitwise. Long rows that
no window cuts take branch_attention.py.

Shapes: B rows   K heads   Q queries   L keys   D head size.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from grpo_engine.device import bf16_products

CHUNK_SCORES = 16 * 1024 * 1024
"""Scores held at once (64 MB in fp32)."""

MOST_SCORES_A_ROW = 8 * CHUNK_SCORES
"""Beyond this the fused kernel is used, which holds none."""


def masked_attention(query_BKQD: Tensor, key_BKLD: Tensor, value_BKLD: Tensor, mask_B1QL: Tensor, scale: float) -> Tensor:
    """Attention output (B, K, Q, D). The mask is added to the scores; it must leave every query at least one key."""
    scores_a_row = query_BKQD.shape[1] * query_BKQD.shape[2] * key_BKLD.shape[2]
    if query_BKQD.device.type != "cpu" or scores_a_row > MOST_SCORES_A_ROW:
        return functional.scaled_dot_product_attention(
            query_BKQD, key_BKLD, value_BKLD, attn_mask=mask_B1QL.to(query_BKQD.dtype), scale=scale
        )
    output: Tensor = _Attention.apply(query_BKQD, key_BKLD, value_BKLD, mask_B1QL, scale)  # type: ignore[no-untyped-call]
    return output


def _chunks(query_BKQD: Tensor, key_BKLD: Tensor) -> Iterator[slice]:
    batch = len(query_BKQD)
    size = max(1, CHUNK_SCORES // (query_BKQD.shape[1] * query_BKQD.shape[2] * key_BKLD.shape[2]))
    for start in range(0, batch, size):
        yield slice(start, min(start + size, batch))


def _widen(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype == torch.bfloat16 else tensor


def _wide_product(left: Tensor, right: Tensor) -> Tensor:
    """left @ right with bf16 inputs and an fp32 result, or all in the inputs' wider dtype."""
    with bf16_products(left.dtype == torch.bfloat16):
        return torch.matmul(_widen(left), _widen(right))


def _shares(query: Tensor, key: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Softmax of the masked scores, fp32 or fp64."""
    return torch.softmax(_wide_product(query, key.transpose(2, 3)).mul_(scale).add_(mask), -1)


class _Attention(torch.autograd.Function):
    """See `masked_attention`."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(query, key, value, mask)
        ctx.scale = scale
        output = torch.empty_like(query)
        for rows in _chunks(query, key):
            share = _shares(query[rows], key[rows], mask[rows], scale)
            output[rows] = share.to(value.dtype) @ value[rows]
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        query, key, value, mask = ctx.saved_tensors
        grad_query, grad_key, grad_value = (torch.empty_like(tensor) for tensor in (query, key, value))
        for rows in _chunks(query, key):
            grad = grads[0][rows]
            share = _shares(query[rows], key[rows], mask[rows], ctx.scale)
            grad_value[rows] = share.to(grad.dtype).transpose(2, 3) @ grad
            grad_share = _wide_product(grad, value[rows].transpose(2, 3))
            grad_scores = torch.ops.aten._softmax_backward_data(grad_share, share, -1, share.dtype).mul_(ctx.scale).to(query.dtype)
            grad_query[rows] = grad_scores @ key[rows]
            grad_key[rows] = grad_scores.transpose(2, 3) @ query[rows]
        return grad_query, grad_key, grad_value, None, None
