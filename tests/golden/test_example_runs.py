"""Three recorded runs of the real model on the arithmetic example, replayed through the detectors."""

from __future__ import annotations

import json

from grpo_engine.contract.intake import validate
from grpo_engine.contract.job import GrpoConfig
from grpo_engine.guardrail import Replayed, replay
from tests.golden.record_example import RUNS, TARGET, spec_of
from tests.golden.recordings import Recording, steps_of

RECORDED: dict[str, Recording] = json.loads(TARGET.read_text(encoding="utf-8"))


def rows(name: str) -> list[tuple[int, dict[str, float]]]:
    return steps_of(RECORDED[name])


def story(name: str) -> list[Replayed]:
    return replay(rows(name), validate(GrpoConfig, spec_of(name)["method"]["grpo"]))


def steps(name: str, detector: str, kind: str) -> list[int]:
    return [event.step for event in story(name) if (event.name, event.kind) == (detector, kind)]


def test_every_run_is_recorded_whole() -> None:
    assert {name: len(run["rows"]) for name, run in RECORDED.items()} == {name: run["limits"]["num_steps"] for name, run in RUNS.items()}
    assert all(rows(name)[0][1]["kl/ref/k3/mean"] == 0.0 for name in RUNS)


def test_the_fixed_run_that_misbehaves_is_seen() -> None:
    for detector in ("length_collapse", "reward_hacking", "kl_out_of_control"):
        assert steps("fixed", detector, "fired"), detector
    metrics = [row for _, row in rows("fixed")]
    assert metrics[-1]["reward/mean"] > 10 * metrics[0]["reward/mean"], "the reward alone looks like success"


def test_a_healthy_run_is_silent() -> None:
    assert story("healthy") == []
    readings = [row["kl/ref/k3/mean"] for _, row in rows("healthy")]
    assert max(readings) < 0.05
    assert readings[-1] > 0.001, "it does learn"


def test_an_overshoot_fires_and_clears() -> None:
    fired, cleared = steps("overshoot", "kl_out_of_control", "fired"), steps("overshoot", "kl_out_of_control", "cleared")
    assert fired
    assert cleared
    assert fired[0] < cleared[0]
