"""Attention to the prompt during decoding: torch's fused kernel against the formula written out, which serves other devices."""

from __future__ import annotations

import pytest
import torch

from grpo_engine.decode import _flash, _written_out

LIMIT = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2}
FAR = {"all in reach": None, "of two lengths": [[0] * 5 + [1] * 2, [0] * 7], "one beyond its window": [[1] * 7, [0] * 7]}


@pytest.mark.parametrize("case", FAR)
@pytest.mark.parametrize("dtype", LIMIT)
def test_both_ways_give_the_same(case: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 3, rows, 16).to(dtype) for rows in (5, 7, 7))
    rows = FAR[case]
    far = None if rows is None else torch.zeros(2, 7, dtype=dtype).masked_fill_(torch.tensor(rows).bool(), float("-inf"))[:, None, None]
    found, expected = _flash(query, key, value, far, 0.3), _written_out(query, key, value, far, 0.3)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.double(), other.double(), rtol=0, atol=LIMIT[dtype])
    if case == "one beyond its window":
        assert float(found[0][0].abs().max()) == 0
        assert bool((found[1][0] == float("-inf")).all())
