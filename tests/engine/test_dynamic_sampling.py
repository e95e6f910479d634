"""Dynamic sampling: groups with nothing to teach are replaced by fresh prompts, boundedly, and the same ones after a resume."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from grpo_engine.__main__ import read_dispatch
from grpo_engine.assemble import assemble
from grpo_engine.collect import collect
from grpo_engine.events import EventLog
from grpo_engine.keeper import Keeper
from grpo_engine.train import train as steps_of
from tests.engine.runs import make_job, make_run, make_spec, outcome, series, train, weights_sha256

RARE = {"type": "regex", "pattern": "^[0-1]"}
"""Right now and then, so that many groups of four are equal."""


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_job(tmp_path_factory.mktemp("job"))


def spec_of(job: Path, **loss: Any) -> dict[str, Any]:
    return make_spec(job, grader=RARE, loss={"dynamic_sampling": True, **loss}, limits={"num_steps": 5})


def test_equal_groups_are_replaced_and_the_count_is_bounded(job: Path) -> None:
    bounded = series(train(job, "bounded", spec_of(job, dynamic_sampling_rounds=1)))
    wide = series(train(job, "wide", spec_of(job, dynamic_sampling_rounds=16)))
    assert all(0 <= row["groups/resample_rounds"] <= 1 and row["groups/resampled"] <= 3 for row in bounded.values())
    assert sum(row["groups/resample_rounds"] for row in wide.values()) > sum(row["groups/resample_rounds"] for row in bounded.values())
    assert {row["groups/zero_std_frac"] for row in wide.values() if row["groups/resample_rounds"] < 16} == {0.0}
    assert all("reward/sampled_mean" in row for row in wide.values())
    plain = series(train(job, "plain", make_spec(job, grader=RARE, limits={"num_steps": 1})))
    assert plain[1]["groups/zero_std_frac"] > 0, "the example has something to replace"
    assert "groups/resampled" not in plain[1]


def test_it_changes_nothing_when_every_group_varies(job: Path) -> None:
    """A grader under which no group is equal: the run is the one without dynamic sampling."""
    varied = {"type": "length", "unit": "characters", "target_max": 1, "falloff": 50}
    runs = [
        train(job, f"varied-{name}", make_spec(job, grader=varied, loss=loss, limits={"num_steps": 2}))
        for name, loss in (("on", {"dynamic_sampling": True}), ("off", {}))
    ]
    assert all(row["groups/resampled"] == 0 for row in series(runs[0]).values())
    assert weights_sha256(runs[0], 2) == weights_sha256(runs[1], 2)


def test_a_prompt_drawn_twice_in_a_step_meets_other_random_numbers(job: Path) -> None:
    """The file is so small that fresh prompts are the same ones again; the same completions again would never vary."""
    loss = {"dynamic_sampling": True, "dynamic_sampling_rounds": 6}
    never = make_spec(job, grader={"type": "regex", "pattern": "^(?:never){9}"}, loss=loss)
    run_dir = make_run(job, "twice", never)
    log = EventLog(run_dir / "events.jsonl", 1)
    with assemble(read_dispatch(run_dir / "dispatch.json"), run_dir, log) as learner:
        before = learner.dataset.cursor()
        collected = collect(learner, 2, {})
        drawn = 3 + 6 * 3
        after = learner.dataset.cursor()
        assert after["epoch"] * 16 + after["position"] - before["position"] == drawn
        assert collected.metrics["groups/resampled"] == drawn - 3
        assert len(collected.rollout.groups) == 3, "what cannot be replaced is filled with equal groups"
        first = collect(learner, 3, {}).rollout.groups
        learner.dataset.seek(after)
        assert [c.token_ids for g in collect(learner, 3, {}).rollout.groups for c in g.completions] == [
            c.token_ids for g in first for c in g.completions
        ]
    log.close()


def test_a_resumed_run_draws_the_same_prompts(job: Path) -> None:
    spec = spec_of(job)
    whole, cut = train(job, "whole", spec), make_run(job, "cut", spec)
    log = EventLog(cut / "events.jsonl", 1)
    with assemble(read_dispatch(cut / "dispatch.json"), cut, log) as learner:
        for _ in itertools.islice(steps_of(learner, Keeper(cut, learner, log), log), 3):
            pass
    log.close()
    again = train(job, "again", spec, epoch=2, resume_from=f"{cut}/checkpoints/resume-000003")
    assert outcome(again).status == "succeeded"
    assert series(again) == {step: row for step, row in series(whole).items() if step > 3}
    assert weights_sha256(again, 5) == weights_sha256(whole, 5)
