"""The written-out forward of lean.py gives what the model's own gives, is taken where it may be, and gives way when it differs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_engine.attention import BranchPlan
from grpo_engine.contract.job import LoraConfig
from grpo_engine.decode import BranchedDecoder
from grpo_engine.lean import LeanForward, make_lean
from grpo_engine.packing import WORTH_CALLS
from tests.engine.model_fixtures import SHAPES, tiny_policy
from tests.engine.runs import events, make_job, make_spec, train

LEAN = ("llama", "tied", "qwen2", "window", "head_bias")
PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 10, 11]]


@pytest.mark.parametrize("shape", LEAN)
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-9), (torch.float32, 5e-5)])
def test_hidden_states_are_the_models(tmp_path: Path, shape: str, dtype: torch.dtype, limit: float) -> None:
    kind, changes = SHAPES[shape]
    network = tiny_policy(tmp_path, kind, dtype, **changes).network
    branches = [[[5, 6, 7], [8]], [[9, 10, 11, 12]]]
    plans = [BranchPlan.build(PROMPTS, branches, network.device) for _ in range(2)]
    with torch.no_grad():
        lean = make_lean(network, 4)
        assert lean is not None
        found = lean(plans[0].input_ids_N, plans[0].position_ids_N, plans[0])
        expected = network.hidden(plans[1])
        torch.testing.assert_close(found, expected, rtol=0, atol=limit)
        torch.testing.assert_close(lean.logits(found), network.logits(expected), rtol=0, atol=limit)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decoding_agrees_with_the_models_own_forward(tmp_path: Path, dtype: torch.dtype) -> None:
    """Logits step by step while rows end one by one, so that the grid shrinks in every way."""
    policy = tiny_policy(tmp_path, "TINY_QWEN2", sliding_window=6)
    policy.model.to(dtype)
    with torch.no_grad():
        own, lean = BranchedDecoder(policy.network, 80), BranchedDecoder(policy.network, 80, make_lean(policy.network, 6))
        own.start(PROMPTS, 3)
        lean.start(PROMPTS, 3)
        kept = {2: [0, 1, 3, 4, 5], 4: [0, 2, 3], 7: [1, 2], 70: [0]}
        rows = 6
        for step in range(75):
            if step in kept:
                own.keep(torch.tensor(kept[step]))
                lean.keep(torch.tensor(kept[step]))
                rows = len(kept[step])
            tokens = torch.arange(rows) * 7 + step
            gap = (lean.step(tokens) - own.step(tokens)).abs()
            if dtype == torch.float32:
                assert float(gap.max()) <= 5e-5
            else:  # both round differently, by a unit of bf16 here and there; the mean is what logprob.py goes by as well
                assert float(gap.mean()) <= 2e-2


def test_other_families_and_adapters_take_the_models_own(tmp_path: Path) -> None:
    for name, policy in {
        "gpt2": tiny_policy(tmp_path / "a", "TINY_GPT2"),
        "adapter": tiny_policy(tmp_path / "b", lora=LoraConfig(type="lora")),
    }.items():
        assert make_lean(policy.network, 4) is None, name
        assert policy.network.why_not_lean == "", name


def test_a_forward_that_differs_is_not_used_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    network = tiny_policy(tmp_path).network
    project = LeanForward._project

    def wrong(self: LeanForward, layer: Any, hidden_NC: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        query_key, value = project(self, layer, hidden_NC)
        return query_key, value * 1.1

    monkeypatch.setattr(LeanForward, "_project", wrong)
    with torch.no_grad():
        assert make_lean(network, 4) is None
        reason = network.why_not_lean
        assert "written-out forward" in reason
        monkeypatch.undo()
        assert make_lean(network, 4) is None
    assert network.why_not_lean == reason


def test_a_run_says_once_that_it_samples_the_slow_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when it is the evaluation before the first step that finds it out."""
    monkeypatch.setattr("grpo_engine.lean._compare", lambda *_: "the written-out forward differs")
    root = make_job(tmp_path)
    evaluation = {"every": 9, "grader": {"type": "regex", "pattern": "^"}}
    spec = make_spec(root, sampling={"max_completion_tokens": WORTH_CALLS}, limits={"num_steps": 2}, evaluation=evaluation)
    said = events(train(root, spec=spec, validation_file=str(root / "rows.jsonl")), "shortcut.disabled")
    assert [(event.step, event.data["reason"]) for event in said] == [(1, "the written-out forward differs")]
