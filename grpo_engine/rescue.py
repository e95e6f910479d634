"""Carrying out what a guardrail asks for: set beta, pause, stop, or go back and change something.

Decides nothing (guardrail.py does). A rollback restores the newest kept resume state from before the trouble, applies the
named change, and writes that state anew, so that a crash right after it does not forget the change. Commands a person gave
since that state stay in force; the guardrails' own counts are never rolled back.
"""

from __future__ import annotations

from typing import Any, Literal

from grpo_engine.checkpoint import read_resume
from grpo_engine.contract.diagnostics import Pause, Rollback, SetBeta
from grpo_engine.contract.event import Outcome
from grpo_engine.events import EventLog
from grpo_engine.guardrail import Act
from grpo_engine.keeper import Keeper
from grpo_engine.learner import Learner
from grpo_engine.outcome import CheckpointFailed

SEEDS = 2**31


def enforce(learner: Learner, keeper: Keeper, log: EventLog, elapsed_s: float) -> Outcome | Literal["rolled_back"] | None:
    """Carry out what is due after the learner's step, in the job's order, up to the first action that ends or rewinds it.

    Returns the verdict that ends the attempt, `rolled_back`, or None to go on.
    """
    for act in learner.guardrails.observe(learner.detectors.active):
        action = act.action
        if isinstance(action, SetBeta):
            _set_beta(learner, log, act, action)
        elif isinstance(action, Rollback):
            if _roll_back(learner, keeper, log, act, action, elapsed_s):
                return "rolled_back"
            return _end(learner, keeper, log, act, elapsed_s, message=f"{act.detector}: no resume state to roll back to")
        else:
            return _end(learner, keeper, log, act, elapsed_s, message=act.message)
    return None


def _set_beta(learner: Learner, log: EventLog, act: Act, action: SetBeta) -> None:
    old = learner.rule.value(learner.step + 1)
    learner.rule.set_base(action.value)
    _announce(learner, log, act, act.message, {"old": {"beta": old}, "new": {"beta": learner.rule.value(learner.step + 1)}})


def _end(learner: Learner, keeper: Keeper, log: EventLog, act: Act, elapsed_s: float, *, message: str) -> Outcome:
    """Checkpoint and give the attempt's verdict: a pause can be resumed, everything else has failed."""
    is_pause = isinstance(act.action, Pause)
    _announce(learner, log, act, message, {})
    if not keeper.save_resume(elapsed_s) and is_pause:
        raise CheckpointFailed(f"paused by {act.detector} at step {learner.step}: the resume state could not be written")
    return Outcome(
        status="stopped" if is_pause else "failed",
        reason="guardrail",
        message=message,
        retryable=is_pause,
        last_step=learner.step,
        resume_checkpoint=keeper.newest_resume,
    )


def _roll_back(learner: Learner, keeper: Keeper, log: EventLog, act: Act, action: Rollback, elapsed_s: float) -> bool:
    """Restore, change, save. Returns False when there is nothing to go back to."""
    found = keeper.resume_before(act.since)
    if found is None:
        return False
    from_step = learner.step
    _, resume = read_resume(found)
    guardrails, seed = learner.guardrails.state(), learner.seed
    later = [record for record in learner.inbox.applied if record.effective_step > resume.step and record.command.type == "set"]
    seconds_before = learner.elapsed_s
    learner.restore(resume, later)
    learner.ranks.wait()  # the state just read is about to be written anew
    learner.guardrails.load(guardrails)
    learner.elapsed_s, learner.seed = seconds_before, seed
    changed = _change(learner, action)
    log.emit("run.rewound", f"back to step {resume.step}", step=resume.step, data={"to_step": resume.step})
    _announce(learner, log, act, act.message, {"from_step": from_step, "to_step": resume.step, **changed})
    keeper.rewind(resume.step)
    keeper.save_resume(elapsed_s)
    return True


def _change(learner: Learner, action: Rollback) -> dict[str, Any]:
    """Apply the named changes. Returns their old and new values."""
    first = learner.step + 1
    old: dict[str, float] = {}
    new: dict[str, float] = {}
    if action.beta_factor is not None:
        old["beta"] = learner.rule.value(first)
        learner.rule.scale(action.beta_factor)
        new["beta"] = learner.rule.value(first)
    if action.learning_rate_factor is not None:
        old["learning_rate"] = learner.base_learning_rate
        learner.base_learning_rate *= action.learning_rate_factor
        new["learning_rate"] = learner.base_learning_rate
    if action.reseed:
        old["seed"] = learner.seed
        learner.seed = (learner.seed + 1) % SEEDS
        new["seed"] = learner.seed
    return {"old": old, "new": new}


def _announce(learner: Learner, log: EventLog, act: Act, message: str, data: dict[str, Any]) -> None:
    described = {"guardrail": act.rule, "detector": act.detector, "action": act.action.type, "since": act.since, "count": act.count}
    log.emit("guardrail.acted", message, step=learner.step, level="error", data={**described, **data})
