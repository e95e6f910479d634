"""`python -m grpo_engine RUN_DIR`: exit codes, outcomes, and errors that name the field and the remedy."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import pytest

from grpo_engine.__main__ import main, read_dispatch, run
from grpo_engine.outcome import write_outcome
from tests.engine.runs import events, make_job, make_run, make_spec, outcome, series, start, train


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_job(tmp_path_factory.mktemp("job"))


def test_a_run_by_hand_ends_with_zero(job: Path) -> None:
    run_dir = make_run(job, "by-hand", make_spec(job, limits={"num_steps": 1}))
    process = start(run_dir)
    assert process.wait(timeout=90) == 0, (run_dir / "engine.log").read_text()
    assert outcome(run_dir).reason == "completed"
    assert events(run_dir)[-1].type == "run.finished"


def test_a_directory_is_used_once(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = train(job, "once", make_spec(job, limits={"num_steps": 1}))
    before = (run_dir / "events.jsonl").read_bytes(), (run_dir / "outcome.json").read_bytes()
    assert main([str(run_dir)]) == 86
    assert "resume_from" in capsys.readouterr().err
    (run_dir / "outcome.json").unlink()
    assert main([str(run_dir)]) == 86
    assert "already holds the events" in capsys.readouterr().err
    assert (run_dir / "events.jsonl").read_bytes() == before[0]


def test_a_directory_without_dispatch_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 86
    assert "dispatch.json" in capsys.readouterr().err
    assert main([str(tmp_path / "missing")]) == 86
    assert list(tmp_path.iterdir()) == []


def broken(job: Path, case: str) -> dict[str, Any]:
    """A dispatch that is wrong in one way."""
    spec, extra = make_spec(job, limits={"num_steps": 1}), {}
    files = {
        "no_rows": "",
        "bad_row": '{"messages": [{"role": "user", "content": "1+1="}]}\n' * 2 + '{"messages": "x"}\n',
        "long_rows": json.dumps({"messages": [{"role": "user", "content": "1" * 300}]}) + "\n",
    }
    if case in files:
        path = job / f"{case}.jsonl"
        path.write_text(files[case])
        extra["training_file"] = str(path)
    elif case == "no_file":
        extra["training_file"] = str(job / "nowhere.jsonl")
    elif case == "no_model":
        spec["model"] = str(job / "no-model")
    elif case == "unknown_key":
        spec["method"]["grpo"]["betta"] = 1
    elif case == "no_room":
        spec["method"]["grpo"]["sampling"]["max_completion_tokens"] = 256
    elif case == "other_reference":
        spec["method"]["grpo"]["reference"] = {"source": "checkpoint:abc"}
    elif case == "no_such_layer":
        spec["method"]["grpo"]["adapter"] = {"type": "lora", "target_modules": ["q_proj", "query"]}
    return {"spec": spec, **extra}


@pytest.mark.parametrize(
    ("case", "param", "words"),
    [
        ("no_rows", "training_file", "empty"),
        ("bad_row", "training_file", "line 3"),
        ("long_rows", "training_file", "longer than"),
        ("no_file", "training_file", "does not exist"),
        ("no_model", "model", "no model folder"),
        ("unknown_key", "method.grpo.betta", "did you mean 'beta'"),
        ("no_room", "method.grpo.sampling.max_completion_tokens", "lower it"),
        ("no_such_layer", "method.grpo.adapter.target_modules", "no layer called 'query'; its linear layers are down_proj, gate_proj"),
        ("other_reference", "method.grpo.reference.source", "reference_from"),
    ],
)
def test_what_a_person_can_mend_is_a_config_error(job: Path, case: str, param: str, words: str) -> None:
    run_dir = make_run(job, case, **broken(job, case))
    assert run(run_dir) == 86
    verdict = outcome(run_dir)
    assert (verdict.status, verdict.reason, verdict.retryable, verdict.param) == ("failed", "config_error", False, param)
    assert words in verdict.message
    assert events(run_dir)[-1].type == "run.finished"
    assert events(run_dir)[-1].level == "error"


def test_a_model_without_chat_template_is_a_config_error(tmp_path: Path) -> None:
    job = make_job(tmp_path, "TINY_GPT2")
    run_dir = train(job, "no-template", make_spec(job, limits={"num_steps": 1}))
    assert outcome(run_dir).param == "method.grpo.data.chat_template"


def test_the_spec_may_be_raw_or_resolved(job: Path) -> None:
    raw = read_dispatch(make_run(job, "raw") / "dispatch.json")
    resolved = read_dispatch(make_run(job, "resolved", raw.spec.model_dump(mode="json")) / "dispatch.json")
    assert raw.spec == resolved.spec


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RuntimeError("kernel panic"), "crash"),
        (MemoryError("no memory"), "out_of_memory"),
        (RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 1 bytes"), "out_of_memory"),
    ],
)
def test_a_crash_is_a_verdict_too(job: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, reason: str, tmp_path: Path) -> None:
    def explode(*args: object) -> None:
        raise error

    monkeypatch.setattr("grpo_engine.train.train_step", explode)
    run_dir = make_run(job, f"crash-{tmp_path.name}")
    assert run(run_dir) == 1
    assert (outcome(run_dir).reason, outcome(run_dir).retryable) == (reason, True)
    assert str(error) in outcome(run_dir).message


def test_a_wrong_dispatch_is_filed_under_its_own_epoch(job: Path) -> None:
    run_dir = make_run(job, "wrong-5", {"model": 3}, epoch=5)
    assert run(run_dir) == 86
    assert [event.epoch for event in events(run_dir)] == [5]


def test_max_seconds_ends_the_run_as_succeeded_with_its_weights(job: Path) -> None:
    run_dir = train(job, "seconds", make_spec(job, limits={"num_steps": 100000, "max_seconds": 1}))
    verdict = outcome(run_dir)
    assert (verdict.status, verdict.reason) == ("succeeded", "max_seconds")
    assert 0 < verdict.last_step < 100000
    names = {path.name for path in (run_dir / "checkpoints").iterdir()}
    assert {f"step-{verdict.last_step:06d}", f"resume-{verdict.last_step:06d}"} <= names


def failing_save(kinds: set[str], steps: set[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the disk refuse some checkpoints."""
    import grpo_engine.keeper as keeper

    real = keeper.checkpoint.save

    def save(parent: Path, kind: Any, step: int, *args: Any, **kwargs: Any) -> Any:
        if kind in kinds and step in steps:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(parent, kind, step, *args, **kwargs)

    monkeypatch.setattr(keeper.checkpoint, "save", save)


def test_a_checkpoint_that_cannot_be_written_does_not_end_training(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing_save({"resume"}, {2, 4}, monkeypatch)
    run_dir = train(job, "full-disk", make_spec(job, checkpoints={"resume_every": 2}, limits={"num_steps": 5}))
    assert outcome(run_dir).status == "succeeded"
    assert [event.data["name"] for event in events(run_dir, "checkpoint.failed")] == ["resume-000002", "resume-000004"]
    assert sorted(series(run_dir)) == [1, 2, 3, 4, 5]
    assert not list((run_dir / "checkpoints").glob(".tmp-*"))


def test_the_final_weights_failing_fail_the_run(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing_save({"published"}, {2}, monkeypatch)
    run_dir = make_run(job, "no-result", make_spec(job, checkpoints={"resume_every": 1}, limits={"num_steps": 2}))
    assert run(run_dir) == 1
    verdict = outcome(run_dir)
    assert (verdict.status, verdict.reason, verdict.retryable) == ("failed", "checkpoint_failed", True)
    assert verdict.resume_checkpoint == "resume-000001"


def test_an_outcome_is_replaced_whole(tmp_path: Path, job: Path) -> None:
    verdict = outcome(train(job, "whole", make_spec(job, limits={"num_steps": 1})))
    (tmp_path / ".outcome.json.tmp").write_text("left over")
    write_outcome(tmp_path, verdict)
    assert outcome(tmp_path) == verdict
