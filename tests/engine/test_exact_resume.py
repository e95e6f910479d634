"""Killed at any moment and resumed, a run is the run left alone: weights, KL, beta, rewards and data order, for every feature."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from grpo_engine.__main__ import run
from grpo_engine.contract.event import EngineEvent
from tests.engine.cuts import acts, final_weights, first_attempt, go_on, run_with_cuts, story
from tests.engine.runs import events, make_job, make_spec, outcome


@dataclass(frozen=True)
class Case:
    """Settings, and the steps after whose `step.completed` the run is cut."""

    grpo: dict[str, Any]
    at: tuple[int, ...] = (3,)
    phases: tuple[str, ...] = ("fixed",)
    """Of beta, at those steps."""


FIXED: dict[str, Any] = {"beta": 0.05, "limits": {"num_steps": 4}, "checkpoints": {"resume_every": 2}}
TROUBLE = {"kl_out_of_control": {"kl": 1e-9, "updates": 2, "clear_after": 1}}
"""KL is above 0 from step 2 on: fires at step 3, and again two steps after each rollback."""
ROLLBACK = {"type": "rollback", "beta_factor": 2.0, "learning_rate_factor": 0.5, "reseed": True, "max_count": 2}
LATE = {"kl_out_of_control": {"kl": 1e-9, "updates": 4, "clear_after": 1}}

CASES: dict[str, Case] = {
    "lora": Case({**FIXED, "adapter": {"type": "lora", "rank": 4}, "optimizer": {"learning_rate": 0.01}}),
    "calibrated": Case(
        {
            "beta": {
                "rule": "ppo",
                "value": 0.04,
                "calibration": {"rollouts": 4, "discard": 1, "stat": "mean", "min": 1e-6, "max": 1.0},
                "ema_decay": 0.5,
                "update_every": 2,
            },
            "limits": {"num_steps": 7},
            "checkpoints": {"resume_every": 1},
        },
        at=(3, 6),
        phases=("calibration", "adaptive"),
    ),
    "two updates a rollout": Case({**FIXED, "loss": {"num_iterations": 2, "epsilon_high": 0.3}, "kl": {"importance": "old"}}),
    "penalty in the reward": Case({**FIXED, "kl": {"placement": "reward", "estimator": "k1", "discount": 0.9}}),
    "scheduled": Case(
        {**FIXED, "beta": {"rule": "schedule", "schedule": {"type": "cosine", "start": 0.1, "end": 0.01}}}, phases=("schedule",)
    ),
    "gspo with the exact KL": Case({**FIXED, "loss": {"type": "gspo"}, "kl": {"estimator": "exact"}}),
    "decay and schedules of the optimizer": Case(
        {**FIXED, "optimizer": {"weight_decay": 0.1, "lr_schedule": "linear", "warmup_steps": 3, "betas": [0.8, 0.95]}}
    ),
}
ENVIRONMENT = {"type": "reasoning_gym", "name": "chain_sum", "config": {"max_terms": 2, "max_digits": 1}, "size": 12}


def rollback_spec(job: Path, **changes: Any) -> dict[str, Any]:
    """Trouble is certain, its guardrail goes back twice and stops the third time; resume states of steps 0, 1, 2 ..."""
    sections: dict[str, Any] = {
        **FIXED,
        "guardrails": [{"detector": "kl_out_of_control", "action": ROLLBACK}],
        "diagnostics": TROUBLE,
        "limits": {"num_steps": 6},
        "checkpoints": {"resume_every": 1, "every": 1},
    }
    return make_spec(job, **{**sections, **changes})


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_job(tmp_path_factory.mktemp("job"))


def same(root: Path, spec: dict[str, Any], whole: Path, cut: Path, **dispatch: Any) -> Path:
    """Resume from a cut and compare the whole of it with the run left alone."""
    resumed = go_on(root, spec, [cut], **dispatch)
    run(resumed)
    assert (outcome(resumed).status, outcome(resumed).reason) == (outcome(whole).status, outcome(whole).reason), outcome(resumed).message
    assert_same([whole], [cut, resumed])
    return resumed


def assert_same(whole: list[Path], pieces: list[Path]) -> None:
    expected, found = story(whole), story(pieces)
    assert list(found) == list(expected)
    for step, row in expected.items():
        assert found[step] == row, f"step {step}"
    assert acts(pieces) == acts(whole)
    if outcome(whole[-1]).status == "succeeded":
        assert final_weights(pieces[-1]) == final_weights(whole[-1])


def completed(*steps: int) -> Any:
    return lambda event: event.type == "step.completed" and event.step in steps


@pytest.mark.parametrize("name", CASES)
def test_a_feature_is_continued_exactly(job: Path, tmp_path: Path, name: str) -> None:
    case = CASES[name]
    spec = make_spec(job, **case.grpo)
    whole = first_attempt(job, f"{tmp_path.name}-whole", spec)
    cuts = run_with_cuts(whole, tmp_path, after=completed(*case.at))
    assert outcome(whole).status == "succeeded", outcome(whole).message
    assert tuple(story([whole])[step]["beta"]["phase"] for step in case.at) == case.phases
    assert len(cuts) == len(case.at)
    for cut in cuts:
        resumed = same(job, spec, whole, cut)
        assert events(resumed)[0].data["to_step"] > 0, "it went on and did not start over"


def test_a_rollback_is_repeated_and_gone_on_from_exactly(job: Path, tmp_path: Path) -> None:
    """Cut before it, between its words and its deeds, and after it."""
    spec = rollback_spec(job)
    whole = first_attempt(job, f"{tmp_path.name}-whole", spec)

    def wanted(event: EngineEvent) -> bool:
        return event.type in ("run.rewound", "guardrail.acted") or (event.type == "step.completed" and event.step == 3)

    cuts = run_with_cuts(whole, tmp_path, after=wanted)
    assert len(acts([whole])) == 3
    assert (outcome(whole).status, outcome(whole).reason) == ("failed", "guardrail")
    for cut in cuts[:4]:
        same(job, spec, whole, cut)


def test_a_resumed_run_rolls_back_to_a_state_from_before_it_was_killed(job: Path, tmp_path: Path) -> None:
    """Trouble since step 2 fires at step 5; the kill comes after step 4, with the state of step 3: step 0's is to go back to."""
    spec = rollback_spec(job, diagnostics=LATE, checkpoints={"resume_every": 3}, limits={"num_steps": 6})
    whole = first_attempt(job, f"{tmp_path.name}-whole", spec)
    (cut,) = run_with_cuts(whole, tmp_path, after=lambda event: event.step == 4 and event.type == "step.completed")[:1]
    same(job, spec, whole, cut)


def test_a_rollback_takes_back_the_syncs_of_the_reference(job: Path, tmp_path: Path) -> None:
    """Step 1's KL is 0 again after going back to step 0, and a cut right after it changes nothing."""
    spec = rollback_spec(job, reference={"sync_every": 2, "mixup_alpha": 0.5}, checkpoints={"resume_every": 3})
    whole = first_attempt(job, f"{tmp_path.name}-whole", spec)
    cuts = run_with_cuts(whole, tmp_path, after=lambda event: event.type == "step.completed" and event.step == 1)
    firsts = [event.data["metrics"]["kl/ref/k3/mean"] for event in events(whole, "step.completed") if event.step == 1]
    assert len(firsts) > 1
    assert set(firsts) == {0.0}
    same(job, spec, whole, cuts[1])


def test_steps_that_could_not_be_graded_are_counted_across_a_kill(job: Path, tmp_path: Path) -> None:
    """Three in a row end the run, wherever an attempt ended between them."""
    broken = {"type": "string_check", "input": "{{item.no_such_column}}", "reference": "x", "operation": "eq"}
    spec = make_spec(job, **{**FIXED, "grader": broken, "checkpoints": {"resume_every": 1}, "limits": {"num_steps": 9}})
    whole = first_attempt(job, f"{tmp_path.name}-whole", spec)
    cuts = run_with_cuts(whole, tmp_path, after=lambda event: event.type == "checkpoint.saved")
    assert (outcome(whole).reason, outcome(whole).last_step, len(cuts)) == ("grader", 3, 2)
    for cut in cuts:
        same(job, spec, whole, cut)


@pytest.mark.slow
def test_rows_of_an_environment_are_continued_exactly(job: Path, tmp_path: Path) -> None:
    spec = make_spec(job, **FIXED, evaluation={"every": 2, "max_prompts": 3})
    del spec["method"]["grpo"]["grader"]
    spec["method"]["grpo"]["environment"] = ENVIRONMENT
    whole = first_attempt(job, f"{tmp_path.name}-whole", spec, training_file=None)
    (cut,) = run_with_cuts(whole, tmp_path, after=completed(3))
    assert outcome(whole).status == "succeeded", outcome(whole).message
    same(job, spec, whole, cut, training_file=None)


@pytest.mark.slow
def test_a_rollback_cut_before_every_fsync(job: Path, tmp_path: Path) -> None:
    """Inside every checkpoint, of both kinds, that a run with rollbacks writes."""
    spec = rollback_spec(job, checkpoints={"resume_every": 1}, reference={"sync_every": 2, "mixup_alpha": 0.5})
    whole = first_attempt(job, f"{tmp_path.name}-whole", spec)
    cuts = run_with_cuts(whole, tmp_path, at_fsync=True)
    assert len(cuts) > 30
    for cut in random.Random(5).sample(cuts, 8):
        same(job, spec, whole, cut)
