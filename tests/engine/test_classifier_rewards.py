"""Runs whose completions a sequence classifier grades: its weights are pinned, and what is wrong with it is the spec's fault."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from grpo_engine.grader import classifier
from tests.engine.grader.build import Here
from tests.engine.runs import events, make_job, make_spec, outcome, series, train
from tests.tiny import make_classifier


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(classifier, "GraderProcess", Here)
    make_classifier(tmp_path / "judge")
    return make_job(tmp_path)


def spec(job: Path, model: str = "judge", **settings: Any) -> dict[str, Any]:
    turns = ["{{item.messages}}", {"role": "assistant", "content": "{{sample.output_text}}"}]
    parts = {"judge": {"type": "score_model", "model": str(job / model), "input": turns}, "digit": {"type": "regex", "pattern": "^[0-4]"}}
    return make_spec(job, grader={"type": "multi", "graders": parts, "weights": {"judge": 0.5, "digit": 1.0}}, **settings)


def test_a_run_learns_from_it_and_goes_on_with_the_same_weights_only(job: Path) -> None:
    first = train(job, "1", spec(job, limits={"num_steps": 3}))
    assert outcome(first).status == "succeeded", outcome(first).message
    assert series(first)[1]["reward/grader/judge"] != 0
    pinned = events(first, "model.loaded")[0].data["grader_sha256"]
    assert list(pinned) == ["method.grpo.grader.graders.judge"]
    state = str(first / "checkpoints" / "resume-000003")
    again = train(job, "2", spec(job, limits={"num_steps": 4}), resume_from=state, epoch=2)
    assert outcome(again).status == "succeeded", outcome(again).message
    make_classifier(job / "judge", seed=1)
    other = outcome(train(job, "3", spec(job, limits={"num_steps": 4}), resume_from=state, epoch=3))
    assert (other.status, other.reason, other.param) == ("failed", "reference_mismatch", "method.grpo.grader.graders.judge.model")


@pytest.mark.parametrize("model", ["model", "nowhere/at/all"])
def test_a_model_that_cannot_judge_is_the_specs_fault(job: Path, model: str) -> None:
    found = outcome(train(job, "1", spec(job, model)))
    assert (found.status, found.reason, found.param) == ("failed", "config_error", "method.grpo.grader.graders.judge.model")


def test_a_gold_classifier_beside_a_cheap_grader(job: Path) -> None:
    (job / "held.jsonl").write_text((job / "rows.jsonl").read_text())
    gold = spec(job)["method"]["grpo"]["grader"]["graders"]["judge"]
    run_dir = train(job, "1", make_spec(job, evaluation={"every": 1, "grader": gold}, limits={"num_steps": 1}),
                    validation_file=str(job / "held.jsonl"))  # fmt: skip
    assert outcome(run_dir).status == "succeeded", outcome(run_dir).message
    assert list(events(run_dir, "model.loaded")[0].data["grader_sha256"]) == ["method.grpo.evaluation.grader"]
