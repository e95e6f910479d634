"""Attention of prompts and their branches on the CPU, without masks, padding or a copy of the prompt for each branch.

A completion's token sees its whole prompt and its own past. These two are separate calls of torch's fused kernel, joined by
their log-sum-exps; backwards the kernel gets the joined output and log-sum-exp, which makes each part's gradient exact (the
softmax's normaliser is then the whole one; the same identity as in ring attention, arXiv 2310.01889). The gradients are
computed in fp32 for bf16 inputs: the kernel's own bf16 backward takes twelve times as long for short branches.

Forward is the same with and without gradients, so policy and reference agree bitwise. Left out: windows (masked_attention.py)
and GPUs.

Shapes: N packed tokens   H query heads   K key/value heads   R = H / K   D head size   S tokens of one prompt   M tokens of its
completions   B completions   T tokens of the longest completion.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@dataclass(frozen=True)
class Layout:
    """Where prompts and completions lie among the packed tokens: prompt 1, its completions one after the other, prompt 2, ..."""

    groups: list[tuple[int, int, int]]
    """For each prompt where it begins, where its completions begin and where they end."""
    own_N: Tensor
    """Packed indices of all completion tokens, ascending."""
    place_N: Tensor
    """Place of each of them among B * T padded ones."""
    branches: tuple[int, int]
    """B and T."""


def branch_attention(query_NHD: Tensor, key_NKD: Tensor, value_NKD: Tensor, layout: Layout, scale: float) -> Tensor:
    """Attention output (N, H, D)."""
    output: Tensor = _BranchAttention.apply(query_NHD, key_NKD, value_NKD, layout, scale)  # type: ignore[no-untyped-call]
    return output


def _heads_first(rows_NHD: Tensor, repeats: int = 1) -> Tensor:
    """(N, K, D) -> (1, K * R, N, D), each key head as often as query heads share it."""
    return (rows_NHD if repeats == 1 else rows_NHD.repeat_interleave(repeats, 1)).transpose(0, 1)[None]


def _fold(rows_MHD: Tensor, kv_heads: int) -> Tensor:
    """(M, H, D) -> (1, K, M * R, D): query heads that share a key head become further queries of it."""
    count, _, size = rows_MHD.shape
    return rows_MHD.view(count, kv_heads, -1, size).transpose(0, 1).reshape(1, kv_heads, -1, size)


def _unfold(rows_1KQD: Tensor, count: int) -> Tensor:
    """The inverse of `_fold`."""
    kv_heads, size = rows_1KQD.shape[1], rows_1KQD.shape[3]
    return rows_1KQD.view(kv_heads, count, -1, size).transpose(0, 1).reshape(count, -1, size)


def _pad(rows_NHD: Tensor, layout: Layout) -> Tensor:
    """Completion tokens of packed rows -> (B, H, T, D), zeros where a completion is shorter."""
    count, length = layout.branches
    padded = rows_NHD.new_zeros(count * length, *rows_NHD.shape[1:])
    padded.index_copy_(0, layout.place_N, rows_NHD.index_select(0, layout.own_N))
    return padded.view(count, length, *rows_NHD.shape[1:]).transpose(1, 2)


def _unpad(rows_BHTD: Tensor, layout: Layout) -> Tensor:
    """(B, H, T, D) -> completion tokens in packed order (n, H, D)."""
    return rows_BHTD.transpose(1, 2).flatten(0, 1).index_select(0, layout.place_N)


def _sum_repeats(grad_1HSD: Tensor, repeats: int) -> Tensor:
    """Gradient of repeated key heads (1, K * R, S, D) -> (S, K, D)."""
    _, heads, length, size = grad_1HSD.shape
    return grad_1HSD.view(heads // repeats, repeats, length, size).sum(1).transpose(0, 1)


class _BranchAttention(torch.autograd.Function):
    """See `branch_attention`."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, layout: Layout, scale: float) -> Tensor:
        kv_heads, repeats = key.shape[1], query.shape[1] // key.shape[1]
        output = torch.empty_like(query)
        wide = torch.float32 if query.dtype == torch.bfloat16 else query.dtype
        lse_NH1 = query.new_empty(*query.shape[:2], 1, dtype=wide)
        for start, own, end in layout.groups:
            prompt = slice(start, own)
            parts = (_heads_first(query[prompt]), _heads_first(key[prompt], repeats), _heads_first(value[prompt], repeats))
            found, lse = _forward(*parts, 0.0, True, scale=scale)
            output[prompt], lse_NH1[prompt] = found[0].transpose(0, 1), lse[0].transpose(0, 1)[..., None]
            if own < end:
                parts = (_fold(query[own:end], kv_heads), _heads_first(key[prompt]), _heads_first(value[prompt]))
                found, lse = _forward(*parts, 0.0, False, scale=scale)
                output[own:end], lse_NH1[own:end] = _unfold(found, end - own), _unfold(lse[..., None], end - own)
        if len(layout.own_N):
            parts = (
                _pad(query, layout),
                _pad(key, layout).repeat_interleave(repeats, 1),
                _pad(value, layout).repeat_interleave(repeats, 1),
            )
            found, lse = _forward(*parts, 0.0, True, scale=scale)
            own_output, own_lse = _unpad(found, layout), _unpad(lse[..., None], layout)
            prompt_output, prompt_lse = output.index_select(0, layout.own_N), lse_NH1.index_select(0, layout.own_N)
            whole_lse = torch.logaddexp(own_lse, prompt_lse)
            joined = own_output * (own_lse - whole_lse).exp() + prompt_output * (prompt_lse - whole_lse).exp()
            output.index_copy_(0, layout.own_N, joined.to(output.dtype))
            lse_NH1.index_copy_(0, layout.own_N, whole_lse)
        ctx.save_for_backward(query, key, value, output, lse_NH1)
        ctx.layout, ctx.scale = layout, scale
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        saved = ctx.saved_tensors
        layout, scale, dtype = ctx.layout, ctx.scale, saved[0].dtype
        query, key, value, output, lse_NH1 = (tensor.to(saved[4].dtype) for tensor in saved)
        grad = grads[0].to(lse_NH1.dtype)
        kv_heads, repeats = key.shape[1], query.shape[1] // key.shape[1]
        grad_query, grad_key, grad_value = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
        if len(layout.own_N):
            keys, values = (_pad(tensor, layout).repeat_interleave(repeats, 1) for tensor in (key, value))
            lse = _pad(lse_NH1, layout)[..., 0]
            of_query, of_key, of_value = _backward(
                _pad(grad, layout), _pad(query, layout), keys, values, _pad(output, layout), lse, 0.0, True, scale=scale
            )
            grad_query.index_copy_(0, layout.own_N, _unpad(of_query, layout))
            for target, found in ((grad_key, of_key), (grad_value, of_value)):
                target.index_copy_(0, layout.own_N, _unpad(found.unflatten(1, (kv_heads, repeats)).sum(2), layout))
        for start, own, end in layout.groups:
            prompt = slice(start, own)
            rows = (_heads_first(grad[prompt]), _heads_first(query[prompt]))
            pair = (_heads_first(key[prompt], repeats), _heads_first(value[prompt], repeats))
            lse = lse_NH1[prompt, :, 0].t()[None]
            of_query, of_key, of_value = _backward(*rows, *pair, _heads_first(output[prompt]), lse, 0.0, True, scale=scale)
            grad_query[prompt] = of_query[0].transpose(0, 1)
            grad_key[prompt], grad_value[prompt] = _sum_repeats(of_key, repeats), _sum_repeats(of_value, repeats)
            if own < end:
                folded = [_fold(rows[own:end], kv_heads) for rows in (grad, query, output, lse_NH1)]
                pair = (_heads_first(key[prompt]), _heads_first(value[prompt]))
                of_query, of_key, of_value = _backward(*folded[:2], *pair, folded[2], folded[3][..., 0], 0.0, False, scale=scale)
                grad_query[own:end] += _unfold(of_query, end - own)
                grad_key[prompt] += of_key[0].transpose(0, 1)
                grad_value[prompt] += of_value[0].transpose(0, 1)
        return grad_query.to(dtype), grad_key.to(dtype), grad_value.to(dtype), None, None
