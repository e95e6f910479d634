"""Rows that are added so that shapes repeat: they change nothing, and the counts are few."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from grpo_engine.attention import BranchPlan, Plan
from grpo_engine.row_counts import MULTIPLE, packed_states
from tests.engine.model_fixtures import tiny_policy

PROMPT = [[5, 6, 7, 8]]


@pytest.mark.parametrize("kind", ["TINY", "TINY_GPT2"])
def test_the_module_sees_few_row_counts_and_the_states_are_those_of_the_tokens_alone(tmp_path: Path, kind: str) -> None:
    network = tiny_policy(tmp_path, kind, torch.float64).network
    seen = set()

    def forward(ids_N: torch.Tensor, positions_N: torch.Tensor, plan: Plan) -> torch.Tensor:
        seen.add(len(ids_N))
        return network.hidden_of(ids_N, positions_N, plan)

    for length in (1, 30, MULTIPLE - 5, MULTIPLE - 4, MULTIPLE - 3, 90):
        plan = BranchPlan.build(PROMPT, [[[9] * length]], torch.device("cpu"))
        found = packed_states(forward, plan)
        alone = network.hidden_of(plan.input_ids_N, plan.position_ids_N, plan)
        torch.testing.assert_close(found, alone, rtol=0, atol=1e-12)
        grads = [torch.autograd.grad(states.square().sum(), network.module.get_input_embeddings().weight)[0] for states in (found, alone)]
        torch.testing.assert_close(*grads, rtol=0, atol=1e-9)
    assert seen == {MULTIPLE, 2 * MULTIPLE}
