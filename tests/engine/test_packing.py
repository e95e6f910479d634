"""Packed linear layers give the same numbers, only inside their block."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from grpo_engine.packing import packed_linears


@pytest.mark.parametrize("rows", [1, 7, 33])
def test_packed_layers_give_the_same_numbers_and_are_undone(rows: int) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(64, 96), nn.SiLU(), nn.Linear(96, 32, bias=False)).bfloat16()
    inputs = torch.randn(1, rows, 64).bfloat16()
    with torch.no_grad():
        expected = module(inputs)
        with packed_linears(module, calls=64, rows=8) as count:
            assert count == 2
            torch.testing.assert_close(module(inputs), expected, rtol=1e-2, atol=1e-2)
        assert "forward" not in vars(module[0])
        module[0].weight.zero_()
        torch.testing.assert_close(module(inputs), module[2](torch.nn.functional.silu(module[0].bias)).expand(1, rows, 32))


def test_layers_that_would_not_gain_are_left_alone() -> None:
    with packed_linears(nn.Linear(8, 8), calls=64, rows=8) as count:
        assert count == 0
    with packed_linears(nn.Linear(8, 8).bfloat16(), calls=2, rows=8) as count:
        assert count == 0


def test_an_exception_inside_undoes_the_packing() -> None:
    layer = nn.Linear(8, 8).bfloat16()
    with pytest.raises(RuntimeError, match="inside"), torch.no_grad(), packed_linears(layer, calls=64, rows=8):
        raise RuntimeError("inside")
    assert "forward" not in vars(layer)
