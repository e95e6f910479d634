"""Row counts that repeat, for the CPU.

oneDNN makes code and scratch memory for each shape of a matrix product and keeps them for the shapes it met last: 1 to 4 MB a shape,
measured on products of SmolLM2-135M in bf16. Micro-batches hold as many tokens as their rows happen to have, so that nearly each would
come with shapes of its own: a step in 32 micro-batches of some 530 tokens held 11.2 GiB beside weights and optimizer, and holds 1.3 GiB
since row counts are multiples of 64. The rows that are added reach nothing and are dropped.

Shapes: N tokens   C hidden size   H heads   D head size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from grpo_engine.attention import BranchPlan, Plan

MULTIPLE = 64


def spare_rows(count: int, device: torch.device) -> int:
    """How many rows to add."""
    return -count % MULTIPLE if device.type == "cpu" else 0


@dataclass(frozen=True)
class _WithSpare:
    """A plan for more rows than it has tokens."""

    plan: BranchPlan
    spare: int

    def attend(self, layer: int, query_NHD: Tensor, key_NKD: Tensor, value_NKD: Tensor, scaling: float, window: int | None) -> Tensor:
        """See `Plan.attend`."""
        query_NHD, key_NKD, value_NKD = (rows[: len(rows) - self.spare] for rows in (query_NHD, key_NKD, value_NKD))
        output_NHD = self.plan.attend(layer, query_NHD, key_NKD, value_NKD, scaling, window)
        return functional.pad(output_NHD, (0, 0, 0, 0, 0, self.spare))


def packed_states(forward: Callable[[Tensor, Tensor, Plan], Tensor], plan: BranchPlan) -> Tensor:
    """Final hidden states (N, C) of the plan's tokens by `forward(ids, positions, plan)`."""
    count = len(plan.input_ids_N)
    spare = spare_rows(count, plan.input_ids_N.device)
    if not spare:
        return forward(plan.input_ids_N, plan.position_ids_N, plan)
    ids_N, positions_N = (functional.pad(row_N, (0, spare)) for row_N in (plan.input_ids_N, plan.position_ids_N))
    return forward(ids_N, positions_N, _WithSpare(plan, spare))[:count]
