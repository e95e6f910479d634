"""Exact resume: killed anywhere and continued, a run gives the same weights, numbers and data order as one left alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from grpo_engine.__main__ import run
from grpo_engine.contract.command import Command
from tests.engine.runs import events, kill_when, make_job, make_run, make_spec, outcome, series, train, weights_sha256

SPEC: dict[str, Any] = {
    "beta": {"rule": "deadband", "value": 0.04, "target": 0.02, "min": 0.01, "update_every": 2, "ema_decay": 0.5},
    "optimizer": {"warmup_steps": 4, "lr_schedule": "cosine", "weight_decay": 0.01},
    "reference": {"sync_every": 4, "mixup_alpha": 0.5},
    "checkpoints": {"every": 3, "resume_every": 3},
    "limits": {"num_steps": 7},
}


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_job(tmp_path_factory.mktemp("job"))


@pytest.fixture(scope="module")
def undisturbed(job: Path) -> Path:
    return train(job, "undisturbed", make_spec(job, **SPEC))


def resume(job: Path, before: Path, name: str, checkpoint: str, spec: dict[str, Any] | None = None, **dispatch: Any) -> Path:
    return train(job, name, spec or make_spec(job, **SPEC), epoch=2, resume_from=f"{before}/checkpoints/{checkpoint}", **dispatch)


@pytest.mark.parametrize("seen", ['"resume-000003"', '"step":5'])
def test_a_run_killed_anywhere_and_resumed_is_the_run_left_alone(job: Path, undisturbed: Path, seen: str, tmp_path: Path) -> None:
    killed = make_run(job, f"killed-{tmp_path.name}", make_spec(job, **SPEC))
    kill_when(killed, seen)
    assert not (killed / "outcome.json").exists()
    resumed = resume(job, killed, f"resumed-{tmp_path.name}", "resume-000003")
    first = events(resumed)[0]
    assert (first.type, first.data["to_step"], first.epoch) == ("run.rewound", 3, 2)
    expected, before, after = series(undisturbed), series(killed), series(resumed)
    assert {step: before[step] for step in (1, 2, 3)} | after == expected
    assert sorted(after) == [4, 5, 6, 7]
    assert weights_sha256(resumed, 7) == weights_sha256(undisturbed, 7)
    assert weights_sha256(resumed, 6) == weights_sha256(undisturbed, 6)


def test_a_resume_after_a_reference_sync_restores_the_moved_reference(job: Path, undisturbed: Path) -> None:
    killed = make_run(job, "killed-late", make_spec(job, **SPEC))
    kill_when(killed, '"resume-000006"')
    resumed = resume(job, killed, "resumed-late", "resume-000006")
    assert series(resumed) == {7: series(undisturbed)[7]}
    assert weights_sha256(resumed, 7) == weights_sha256(undisturbed, 7)


def test_pausing_and_resuming_changes_nothing(job: Path, undisturbed: Path) -> None:
    run_dir = make_run(job, "paused", make_spec(job, **{**SPEC, "limits": {"num_steps": 7}}))
    (run_dir / "commands.jsonl").write_text(Command(number=1, type="pause").model_dump_json() + "\n")
    assert run(run_dir) == 85
    resumed = make_run(
        job, "paused-2", make_spec(job, **SPEC), epoch=2, resume_from=f"{run_dir}/checkpoints/{outcome(run_dir).resume_checkpoint}"
    )
    (resumed / "commands.jsonl").write_text(Command(number=1, type="pause").model_dump_json() + "\n")
    assert run(resumed) == 0, "the number was applied before, so a re-sent pause must not stop the run again"
    assert series(resumed) == series(undisturbed)
    assert weights_sha256(resumed, 7) == weights_sha256(undisturbed, 7)


def test_commands_applied_before_and_after_the_checkpoint_act_at_the_same_steps_again(job: Path) -> None:
    """Number 1 is part of the restored state; number 2 came after the checkpoint and is replayed at its step."""
    spec = make_spec(job, **SPEC)
    whole, cut = make_run(job, "commands-whole", spec), make_run(job, "commands-cut", spec)
    for run_dir in (whole, cut):
        (run_dir / "commands.jsonl").write_text(Command(number=1, type="set", beta=0.3).model_dump_json() + "\n")
    second = Command(number=2, type="set", learning_rate=3e-3, target=0.3)
    record = {
        "command": 2,
        "type": "set",
        "effective_step": 6,
        "old": {},
        "new": {},
        "actor": "operator",
        "settings": second.model_dump(),
    }
    kill_when(cut, '"resume-000003"')
    number = len(events(cut)) + 1
    event = {"epoch": 1, "seq": number, "time": 0.0, "type": "control.applied", "level": "info", "step": 6, "message": "m", "data": record}
    text = (cut / "events.jsonl").read_text()
    (cut / "events.jsonl").write_text(text[: text.rfind("\n") + 1] + json.dumps(event, separators=(",", ":")) + "\n")
    resumed = resume(job, cut, "commands-resumed", "resume-000003", spec)
    (applied,) = events(resumed, "control.applied")
    assert (applied.data["command"], applied.data["effective_step"]) == (2, 6)
    assert series(resumed)[5]["beta/target"] == 0.02
    assert series(resumed)[6]["beta/target"] == 0.3
    run(whole)
    assert series(resumed)[4] == series(whole)[4], "number 1 acts on, from the restored state"
    assert series(resumed)[6]["optimizer/learning_rate"] == pytest.approx(3 * series(whole)[6]["optimizer/learning_rate"])


def test_an_attempt_that_starts_over_says_so(job: Path, undisturbed: Path) -> None:
    again = train(job, "over", make_spec(job, **SPEC), epoch=3)
    assert events(again)[0].data == {"to_step": 0}
    assert series(again) == series(undisturbed)


def test_a_damaged_checkpoint_is_refused_and_may_be_retried_with_another(job: Path, undisturbed: Path) -> None:
    path = undisturbed / "checkpoints" / "resume-000007" / "weights.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    try:
        damaged = resume(job, undisturbed, "damaged", "resume-000007")
    finally:
        path.write_bytes(whole)
    assert (outcome(damaged).status, outcome(damaged).reason, outcome(damaged).retryable) == ("failed", "checkpoint_damaged", True)


def test_another_base_model_is_refused_by_its_sha256(job: Path, undisturbed: Path, tmp_path: Path) -> None:
    other = make_job(tmp_path, seed=1)
    spec = {**make_spec(job, **SPEC), "model": str(other / "model")}
    mixed = resume(job, undisturbed, "other-model", "resume-000007", spec)
    assert (outcome(mixed).reason, outcome(mixed).retryable) == ("reference_mismatch", False)
    assert "SHA-256" in outcome(mixed).message


def test_another_training_file_is_refused(job: Path, undisturbed: Path, tmp_path: Path) -> None:
    rows = (job / "rows.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "fewer.jsonl").write_text("".join(rows[:-1]))
    fewer = resume(job, undisturbed, "fewer", "resume-000007", training_file=str(tmp_path / "fewer.jsonl"))
    assert (outcome(fewer).reason, outcome(fewer).param) == ("config_error", "training_file")
