"""Guardrails in real runs of a tiny model: what each action does to beta, weights, steps and the verdict."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from grpo_engine.contract.error import InvalidRequest
from grpo_engine.contract.event import EXIT_DIVERGED, EXIT_STOPPED
from grpo_engine.contract.intake import validate
from grpo_engine.contract.job import GrpoConfig
from grpo_engine.outcome import exit_code
from tests.engine.runs import events, make_job, make_spec, outcome, series, train

TIGHT = {"kl_out_of_control": {"kl": 1e-9, "updates": 1, "clear_after": 1}}
"""Fires at step 2, the first whose KL is above 0."""


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_job(tmp_path_factory.mktemp("guardrails"))


def guarded(job: Path, name: str, action: Any, **sections: Any) -> Path:
    rules = [{"detector": "kl_out_of_control", "action": action}]
    plain: dict[str, Any] = {"guardrails": rules, "diagnostics": TIGHT, "beta": 0.04, "limits": {"num_steps": 4}}
    return train(job, name, make_spec(job, **{**plain, **sections}))


def acted(run_dir: Path) -> list[dict[str, Any]]:
    return [event.data for event in events(run_dir, "guardrail.acted")]


def steps(run_dir: Path) -> list[int]:
    return [event.step or 0 for event in events(run_dir, "step.completed")]


def test_set_beta_takes_effect_at_the_next_step(job: Path) -> None:
    run_dir = guarded(job, "set", {"type": "set_beta", "value": 0.5})
    assert [row["beta/applied"] for row in series(run_dir).values()] == [0.04, 0.04, 0.5, 0.5]
    assert [(data["old"], data["new"]) for data in acted(run_dir)] == [({"beta": 0.04}, {"beta": 0.5})]
    assert outcome(run_dir).status == "succeeded"


def test_pause_can_be_resumed_and_does_not_pause_again_at_once(job: Path) -> None:
    run_dir = guarded(job, "pause", "pause")
    verdict = outcome(run_dir)
    assert (verdict.status, verdict.reason, verdict.last_step, verdict.resume_checkpoint) == ("stopped", "guardrail", 2, "resume-000002")
    assert exit_code(verdict) == EXIT_STOPPED
    spec = json.loads((run_dir / "dispatch.json").read_text())["spec"]
    again = train(job, "pause-2", spec, epoch=2, resume_from=str(run_dir / "checkpoints" / "resume-000002"))
    assert (outcome(again).status, steps(again)) == ("succeeded", [3, 4])


def test_stop_fails_the_job_with_a_checkpoint(job: Path) -> None:
    verdict = outcome(guarded(job, "stop", "stop"))
    assert (verdict.status, verdict.reason, verdict.retryable) == ("failed", "guardrail", False)
    assert "kl_out_of_control" in verdict.message
    assert verdict.resume_checkpoint == "resume-000002"
    assert exit_code(verdict) == EXIT_DIVERGED


def test_rollback_goes_back_changes_something_and_ends_in_a_stop(job: Path) -> None:
    action = {"type": "rollback", "beta_factor": 2.0, "learning_rate_factor": 0.5, "reseed": True, "max_count": 1}
    run_dir = guarded(job, "rollback", action)
    assert steps(run_dir) == [1, 2, 1, 2]
    assert [event.data["to_step"] for event in events(run_dir, "run.rewound")] == [0]
    first, second = acted(run_dir)
    assert (first["action"], first["since"], first["from_step"], first["to_step"], first["count"]) == ("rollback", 2, 2, 0, 1)
    assert first["old"] == {"beta": 0.04, "learning_rate": 1e-3, "seed": 7}
    assert first["new"] == {"beta": 0.08, "learning_rate": 5e-4, "seed": 8}
    assert (second["action"], second["count"]) == ("stop", 2)
    before, after = (event.data["metrics"] for event in events(run_dir, "step.completed") if event.step == 1)
    assert (before["beta/applied"], after["beta/applied"]) == (0.04, 0.08)
    assert after["kl/ref/k3/mean"] == before["kl/ref/k3/mean"] == 0.0
    assert after["kl/sampler/k3/mean"] != before["kl/sampler/k3/mean"], "another seed samples other completions"
    assert outcome(run_dir).reason == "guardrail"


def test_the_change_is_in_the_resume_state_that_was_gone_back_to(job: Path) -> None:
    """A crash right after the rollback resumes with the change, and with its count."""
    run_dir = guarded(job, "kept", {"type": "rollback", "reseed": True, "max_count": 1})
    state = json.loads((run_dir / "checkpoints" / "resume-000000" / "state.json").read_text())
    assert state["seed"] == 8
    assert state["guardrails"][0]["count"] == 1


def test_a_rollback_skips_states_from_within_the_trouble(job: Path) -> None:
    """Resume states of steps 0 and 3; KL is above 0 from step 2 and fires at step 4: back to step 0, not to 3."""
    late = {"kl_out_of_control": {"kl": 1e-9, "updates": 3}}
    action = {"type": "rollback", "learning_rate_factor": 0.1, "max_count": 1}
    run_dir = guarded(job, "skip", action, diagnostics=late, checkpoints={"resume_every": 3}, limits={"num_steps": 5})
    assert steps(run_dir)[:5] == [1, 2, 3, 4, 1]
    assert acted(run_dir)[0]["to_step"] == 0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"action": "stop", "detector": "collapse"}, "switched off"),
        ({"action": {"type": "set_beta", "value": 2.0}}, "outside"),
    ],
)
def test_guardrails_that_could_not_act_are_refused(change: dict[str, Any], words: str) -> None:
    raw = {
        "grader": {"type": "math"},
        "beta": {"rule": "deadband", "value": 0.02, "target": 0.02},
        "diagnostics": {"collapse": {"enabled": False}},
        "guardrails": [{"detector": "kl_out_of_control", **change}],
    }
    with pytest.raises(InvalidRequest, match=words):
        validate(GrpoConfig, raw)


@pytest.mark.parametrize(
    ("action", "words"),
    [({"type": "set_beta", "value": 0.1}, "kl.monitor"), ({"type": "rollback", "beta_factor": 2.0}, "beta of 0")],
)
def test_a_beta_of_zero_without_a_reference_limits_the_actions(action: dict[str, Any], words: str) -> None:
    rules = [{"detector": "collapse", "action": action}]
    with pytest.raises(InvalidRequest, match=words):
        validate(GrpoConfig, {"grader": {"type": "math"}, "beta": 0, "guardrails": rules})
