"""The attention without masks against softmax written out, and the whole forward through it against the one through masks."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from grpo_engine import attention
from grpo_engine.attention import BranchPlan
from grpo_engine.branch_attention import branch_attention

CPU = torch.device("cpu")
LIMIT = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2}


def written_out(query: Tensor, key: Tensor, value: Tensor, may_see: Tensor, scale: float) -> Tensor:
    """softmax over the allowed keys, one head at a time as the formula says."""
    repeats = query.shape[1] // key.shape[1]
    keys, values = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    scores = torch.einsum("nhd,mhd->hnm", query, keys) * scale
    return torch.einsum("hnm,mhd->nhd", scores.masked_fill(~may_see, float("-inf")).softmax(2), values)


def may_see(prompts: Sequence[int], branches: Sequence[Sequence[int]]) -> Tensor:
    """Which packed token may see which: its prompt, and its own past."""
    tokens = []
    for group, (prompt, lengths) in enumerate(zip(prompts, branches, strict=True)):
        tokens += [(group, -1, at) for at in range(prompt)]
        tokens += [(group, branch, prompt + at) for branch, length in enumerate(lengths) for at in range(length)]
    return torch.tensor([[(a[0] == b[0] and b[1] in (-1, a[1]) and b[2] <= a[2]) for b in tokens] for a in tokens])


@pytest.mark.parametrize("dtype", LIMIT)
@pytest.mark.parametrize("seed", range(8))
def test_values_and_gradients(seed: int, dtype: torch.dtype) -> None:
    """Prompts of any length, any number of completions of any length (also none, also empty), shared key heads."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    heads, kv_heads = draw.choice([(9, 3), (4, 4), (6, 2), (2, 1)])
    size = draw.choice([8, 33, 64])
    prompts = [draw.randint(1, 20) for _ in range(draw.randint(1, 3))]
    branches = [[draw.randint(0, 9) for _ in range(draw.randint(0, 4))] for _ in prompts]
    plan = BranchPlan.build([[0] * length for length in prompts], [[[0] * length for length in lengths] for lengths in branches], CPU)
    total = len(plan.input_ids_N)
    inputs = [torch.randn(total, count, size).to(dtype).requires_grad_() for count in (heads, kv_heads, kv_heads)]
    grad = torch.randn(total, heads, size).to(dtype)
    query, key, value = inputs
    output = branch_attention(query, key, value, plan.layout, 0.3)
    wide = [tensor.detach().double().requires_grad_() for tensor in inputs]
    expected = written_out(wide[0], wide[1], wide[2], may_see(prompts, branches), 0.3)
    pairs = zip(
        (output, *torch.autograd.grad(output, inputs, grad)),
        (expected, *torch.autograd.grad(expected, wide, grad.double())),
        strict=True,
    )
    for found, right in pairs:
        assert found.dtype == dtype
        assert float((found.double() - right).detach().abs().max()) <= LIMIT[dtype] * (1 + float(right.detach().abs().max()))


def test_it_is_chosen_by_length_and_not_where_a_window_cuts(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[float] = []

    def spy(query: Tensor, *_: object) -> Tensor:
        used.append(1)
        return query

    monkeypatch.setattr(attention, "branch_attention", spy)
    for length, window, is_used in ((191, None, True), (190, None, False), (191, 192, True), (191, 191, False)):
        plan = BranchPlan.build([[0] * length], [[[0]]], CPU)
        rows = torch.ones(length + 1, 1, 8)
        used.clear()
        plan.attend(0, rows, rows, rows, 1.0, window)
        assert bool(used) is is_used, (length, window)
