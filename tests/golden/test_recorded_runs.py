"""Four recorded runs of a tiny model, replayed: the detectors speak where they should and are silent where they should be."""

from __future__ import annotations

import json
from typing import Any

import pytest

from grpo_engine.contract.intake import validate
from grpo_engine.contract.job import GrpoConfig
from grpo_engine.guardrail import Replayed, replay
from tests.golden.record_runs import RUNS, TARGET
from tests.golden.recordings import Recording, steps_of

RECORDED: dict[str, Recording] = json.loads(TARGET.read_text(encoding="utf-8"))


def rows(name: str) -> list[tuple[int, dict[str, float]]]:
    return steps_of(RECORDED[name])


def story(name: str, **grpo: Any) -> list[Replayed]:
    return replay(rows(name), validate(GrpoConfig, {"grader": RUNS[name]["grader"], "beta": RUNS[name]["beta"], **grpo}))


def steps(name: str, detector: str, kind: str) -> list[int]:
    return [event.step for event in story(name) if (event.name, event.kind) == (detector, kind)]


def test_every_run_is_recorded_whole() -> None:
    assert {name: len(run["rows"]) for name, run in RECORDED.items()} == {name: run["steps"] for name, run in RUNS.items()}


def test_paying_for_short_answers_collapses_the_length() -> None:
    assert steps("shorter", "length_collapse", "fired")
    assert steps("shorter", "kl_out_of_control", "fired")
    assert not steps("shorter", "kl_out_of_control", "cleared")


def test_paying_for_a_pattern_is_seen_as_hacking_and_as_collapse() -> None:
    assert steps("hacked", "reward_hacking", "fired")
    assert steps("hacked", "kl_out_of_control", "fired")
    assert steps("hacked", "collapse", "fired")
    assert rows("hacked")[-1][1]["reward/mean"] > 5 * rows("hacked")[0][1]["reward/mean"], "the reward alone looks like success"


def test_a_healthy_run_is_silent() -> None:
    assert story("healthy") == []
    assert max(row["kl/ref/k3/mean"] for _, row in rows("healthy")) < 0.05


def test_an_overshoot_fires_and_clears() -> None:
    fired, cleared = steps("adaptive", "kl_out_of_control", "fired"), steps("adaptive", "kl_out_of_control", "cleared")
    assert len(fired) == len(cleared) == 1
    assert fired[0] < cleared[0]


@pytest.mark.parametrize(("name", "has_acted"), [("hacked", True), ("healthy", False)])
def test_a_guardrail_can_be_tried_on_them(name: str, has_acted: bool) -> None:
    rule = {"detector": "collapse", "action": {"type": "rollback", "beta_factor": 10.0}, "consecutive": 3}
    acts = [event.message for event in story(name, guardrails=[rule]) if event.kind == "acted"]
    assert bool(acts) == has_acted
    assert all("would have acted at step" in message for message in acts)
