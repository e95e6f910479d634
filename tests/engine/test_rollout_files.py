"""Kept completions: what was trained on, as it was, in files that never disturb the training."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from grpo_engine.contract.grader import Regex
from grpo_engine.contract.job import GrpoConfig
from grpo_engine.contract.rollout import KeptCompletion
from grpo_engine.rollout_files import RolloutFiles
from jobs.rollouts import RolloutsDamaged, read_rollouts
from tests.engine.runs import events, make_job, make_spec, outcome, series, train, weights_sha256


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_job(tmp_path_factory.mktemp("job"))


@pytest.fixture(scope="module")
def kept(job: Path) -> Path:
    return train(job, "kept", spec_of(job))


def spec_of(job: Path, **changes: Any) -> dict[str, Any]:
    grader = {"type": "multi", "weights": {"a": 1.0, "b": 0.5}, "graders": {
        "a": {"type": "regex", "pattern": "^[0-4]"}, "b": {"type": "regex", "pattern": "[5-9]"}}}  # fmt: skip
    return make_spec(job, **{"grader": grader, "limits": {"num_steps": 4}, **changes})


def page(run_dir: Path, step: int) -> list[KeptCompletion]:
    found, total = read_rollouts(run_dir / "rollouts" / f"step-{step:06d}.jsonl.zst", limit=1000)
    assert len(found) == total
    return found


def names(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "rollouts").iterdir())


def test_every_completion_is_there_with_what_it_earned(kept: Path) -> None:
    assert names(kept) == [f"step-{step:06d}.jsonl.zst" for step in (1, 2, 3, 4)]
    rows = series(kept)
    for step in (1, 3):
        found = page(kept, step)
        assert [one.index for one in found] == list(range(12))
        assert all(one.prompt and one.completion is not None for one in found)
        rewards = [float(one.reward) for one in found if isinstance(one.reward, float)]
        assert math.fsum(rewards) / 12 == pytest.approx(rows[step]["reward/mean"])
        assert {tuple(one.parts) for one in found} == {("a", "b")}
        for group in range(3):
            part = [one.advantage for one in found[4 * group : 4 * group + 4]]
            assert sum(value for value in part if isinstance(value, float)) == pytest.approx(0, abs=1e-9)
        for one in found:
            columns = (one.token_ids, one.token_texts, one.token_logprobs, one.token_kl)
            assert [len(column or []) for column in columns] == [one.num_tokens] * 4
            assert all(isinstance(value, float) and value <= 0 for value in one.token_logprobs or [])
        tokens = [value for one in found for value in one.token_kl or [] if isinstance(value, float)]
        assert math.fsum(tokens) / len(tokens) == pytest.approx(rows[step]["kl/ref/k3/mean"], rel=1e-5, abs=1e-12)
    assert {value for one in page(kept, 1) for value in one.token_kl or []} == {0.0}
    assert any(value != 0 for one in page(kept, 3) for value in one.token_kl or [])


def test_training_is_bit_for_bit_the_same_without(job: Path, kept: Path) -> None:
    without = train(job, "without", spec_of(job, telemetry={"rollouts_every": None}))
    assert not (without / "rollouts").exists()
    assert series(without) == series(kept)
    assert weights_sha256(without, 4) == weights_sha256(kept, 4)


def test_only_the_newest_are_kept_and_only_every_nth(job: Path) -> None:
    run_dir = train(job, "few", spec_of(job, telemetry={"rollouts_every": 2, "rollouts_keep": 1}))
    assert names(run_dir) == ["step-000004.jsonl.zst"]


def test_redacted_rollouts_hold_numbers_and_no_text(job: Path, kept: Path) -> None:
    run_dir = train(job, "redacted", spec_of(job, telemetry={"rollouts_redact": True}, limits={"num_steps": 1}))
    for one, open_one in zip(page(run_dir, 1), page(kept, 1), strict=True):
        assert (one.prompt, one.completion, one.token_ids, one.token_texts) == (None, None, None, None)
        assert (one.reward, one.num_tokens, one.token_kl) == (open_one.reward, open_one.num_tokens, open_one.token_kl)


def test_without_a_reference_there_is_no_kl(job: Path) -> None:
    run_dir = train(job, "no-reference", spec_of(job, beta=0, limits={"num_steps": 1}))
    assert {one.token_kl is None and one.kl is None for one in page(run_dir, 1)} == {True}
    assert all(one.token_logprobs for one in page(run_dir, 1))


def test_a_step_that_could_not_be_graded_is_kept_too(job: Path) -> None:
    grader = {"type": "string_check", "reference": "{{item.absent}}", "operation": "eq"}
    run_dir = train(job, "ungraded", make_spec(job, grader=grader, limits={"num_steps": 1}))
    found = page(run_dir, 1)
    assert {one.advantage for one in found} == {None}
    assert all(one.completion is not None and not isinstance(one.reward, float) for one in found)


def test_a_disk_that_refuses_is_said_and_training_goes_on(job: Path, kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("grpo_engine.rollout_files.RolloutFiles._write", full)
    run_dir = train(job, "full", spec_of(job))
    assert outcome(run_dir).status == "succeeded"
    failed = events(run_dir, "rollouts.failed")
    assert [event.step for event in failed] == [1, 2, 3, 4]
    assert "No space left" in failed[0].message
    assert weights_sha256(run_dir, 4) == weights_sha256(kept, 4)


def test_a_rollback_forgets_the_steps_that_are_done_anew(job: Path, kept: Path, tmp_path: Path) -> None:
    """The guardrail fires at step 2, goes back to the start with another seed, and stops when it fires again."""
    rule = {"detector": "kl_out_of_control", "action": {"type": "rollback", "reseed": True, "max_count": 1}}
    tight = {"kl_out_of_control": {"kl": 1e-9, "updates": 1, "clear_after": 1}}
    run_dir = train(job, "rollback", spec_of(job, guardrails=[rule], diagnostics=tight))
    assert events(run_dir, "run.rewound")[0].data["to_step"] == 0
    assert names(run_dir) == [f"step-{step:06d}.jsonl.zst" for step in range(1, outcome(run_dir).last_step + 1)]
    assert [one.token_ids for one in page(run_dir, 1)] != [one.token_ids for one in page(kept, 1)]

    shutil.copytree(kept / "rollouts", tmp_path / "rollouts")
    assert RolloutFiles(tmp_path, GrpoConfig(grader=Regex(type="regex", pattern="a")), None).rewind(2) is None
    assert names(tmp_path) == ["step-000001.jsonl.zst", "step-000002.jsonl.zst"]


def test_a_damaged_file_is_said_to_be_one(kept: Path, tmp_path: Path) -> None:
    whole = (kept / "rollouts" / "step-000001.jsonl.zst").read_bytes()
    for number, content in enumerate((b"no zstd", whole[: len(whole) // 2] + b"x", json.dumps({"index": 0}).encode())):
        path = tmp_path / f"{number}.jsonl.zst"
        path.write_bytes(content)
        with pytest.raises(RolloutsDamaged):
            read_rollouts(path)
