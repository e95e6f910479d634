"""The held-out file: graded on its own, in numbers that come from the weights alone, and without a trace in the training."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from grpo_engine.__main__ import read_dispatch, run
from grpo_engine.assemble import assemble
from grpo_engine.contract.intake import resolve_spec
from grpo_engine.evaluation import evaluation_seed
from grpo_engine.events import EventLog
from grpo_engine.keeper import Keeper
from grpo_engine.train import train as steps_of
from tests.engine.runs import events, make_job, make_run, make_spec, outcome, series, train, weights_sha256

EVALUATION = {"every": 2, "max_prompts": 5, "grader": {"type": "regex", "pattern": "[0-4]"}}


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = make_job(tmp_path_factory.mktemp("job"))
    rows = [{"messages": [{"role": "user", "content": f"{a}-{a}="}], "reference_answer": "0"} for a in range(7)]
    (root / "held_out.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return root


@pytest.fixture(scope="module")
def evaluated(job: Path) -> Path:
    return evaluate(job, "evaluated")


def evaluate(job: Path, name: str, **grpo: Any) -> Path:
    spec = make_spec(job, **{"evaluation": EVALUATION, "limits": {"num_steps": 5}, **grpo})
    return train(job, name, spec, validation_file=str(job / "held_out.jsonl"))


def gold(run_dir: Path) -> dict[int, float]:
    return {event.step or 0: event.data["reward_mean"] for event in events(run_dir, "evaluation.completed")}


def test_it_is_graded_before_the_first_step_after_each_nth_and_after_the_last(evaluated: Path) -> None:
    assert outcome(evaluated).status == "succeeded"
    found = events(evaluated, "evaluation.completed")
    assert [event.step for event in found] == [0, 2, 4, 5]
    assert {event.data["num_prompts"] for event in found} == {5}
    assert len(set(gold(evaluated).values())) > 1, "the weights move, and the held-out reward with them"
    metrics = series(evaluated)
    assert {step: row["eval/reward_mean"] for step, row in metrics.items() if "eval/reward_mean" in row} == {
        step: mean for step, mean in gold(evaluated).items() if step
    }
    about = events(evaluated, "data.loaded")[0].data["validation"]
    assert (about["num_prompts"], about["num_evaluated"]) == (7, 5)


def test_training_is_bit_for_bit_the_same_with_and_without(job: Path, evaluated: Path) -> None:
    plain = train(job, "plain", make_spec(job, limits={"num_steps": 5}))
    without = {
        step: {name: value for name, value in row.items() if not name.startswith("eval/")} for step, row in series(evaluated).items()
    }
    assert without == series(plain)
    assert weights_sha256(evaluated, 5) == weights_sha256(plain, 5)
    states = [[event.data["beta"] for event in events(run_dir, "step.completed")] for run_dir in (evaluated, plain)]
    assert states[0] == states[1], "beta never moves by an evaluation"


def test_weights_that_stand_still_give_the_same_number_every_time(job: Path) -> None:
    """The draws are keyed by the prompt alone, so a difference can come from the weights only."""
    still = evaluate(job, "still", optimizer={"learning_rate": 1e-30, "warmup_steps": 0}, limits={"num_steps": 2})
    (mean,) = set(gold(still).values())
    assert 0 < mean < 1
    assert evaluation_seed(7) not in range(2**31)
    assert evaluation_seed(7) != evaluation_seed(8)


def test_the_training_grader_stands_in_when_there_is_no_other(job: Path) -> None:
    own = evaluate(job, "own", evaluation={"every": 9}, grader={"type": "regex", "pattern": "^"}, limits={"num_steps": 1})
    assert gold(own) == {0: 1.0, 1: 1.0}


def test_a_grader_that_fails_is_said_and_never_counted_as_zero(job: Path) -> None:
    broken = {"every": 1, "grader": {"type": "string_check", "operation": "eq", "reference": "{{item.absent}}"}}
    run_dir = evaluate(job, "broken", evaluation=broken, limits={"num_steps": 1})
    assert outcome(run_dir).status == "succeeded"
    assert "eval/reward_mean" not in series(run_dir)[1]
    found = events(run_dir, "evaluation.completed")[-1]
    assert (found.level, found.data["num_failed"]) == ("error", 7)
    assert found.data["errors"]


def test_a_resumed_run_evaluates_as_the_one_left_alone(job: Path, evaluated: Path) -> None:
    spec, held_out = make_spec(job, evaluation=EVALUATION, limits={"num_steps": 5}), str(job / "held_out.jsonl")
    cut = make_run(job, "cut", spec, validation_file=held_out)
    log = EventLog(cut / "events.jsonl", 1)
    with assemble(read_dispatch(cut / "dispatch.json"), cut, log) as learner:
        for _ in itertools.islice(steps_of(learner, Keeper(cut, learner, log), log), 3):
            pass
    log.close()
    again = train(job, "again", spec, validation_file=held_out, epoch=2, resume_from=f"{cut}/checkpoints/resume-000003")
    assert outcome(again).status == "succeeded"
    assert gold(again) == {step: mean for step, mean in gold(evaluated).items() if step > 3}
    assert weights_sha256(again, 5) == weights_sha256(evaluated, 5)


@pytest.mark.parametrize(
    ("content", "words"), [(None, "does not exist"), ("", "is empty"), ('{"messages": 3}\n', "line 1")], ids=["missing", "empty", "bad"]
)
def test_a_held_out_file_that_cannot_be_used_is_named(job: Path, tmp_path: Path, content: str | None, words: str) -> None:
    path = tmp_path / "held_out.jsonl"
    if content is not None:
        path.write_text(content)
    run_dir = make_run(tmp_path, "1", make_spec(job, evaluation=EVALUATION), validation_file=str(path))
    (tmp_path / "rows.jsonl").write_bytes((job / "rows.jsonl").read_bytes())
    assert run(run_dir) == 86
    assert outcome(run_dir).param == "validation_file"
    assert words in outcome(run_dir).message


def test_a_file_that_nothing_reads_is_refused(job: Path) -> None:
    spec = {**make_spec(job), "training_file": "file-1", "validation_file": "file-2"}
    with pytest.raises(Exception, match="evaluation"):
        resolve_spec(spec)
