"""Applying commands at a step boundary: what a `set` changes, and when it must be refused."""

from __future__ import annotations

from typing import Literal

from grpo_engine.commands import AppliedCommand
from grpo_engine.contract.command import Command
from grpo_engine.events import EventLog
from grpo_engine.learner import Learner

Stop = Literal["pause", "drain"]


class Refused(ValueError):
    """The command cannot be carried out; the message says why and what to do."""


def apply_commands(learner: Learner, log: EventLog, step: int) -> tuple[Stop | None, bool]:
    """Apply what is due before `step`. Returns whether (and why) to stop, and whether a checkpoint is wanted.

    Every command is answered by `control.applied` or `control.refused`.
    """
    stop: Stop | None = None
    should_save = False
    for command in learner.inbox.due(step):
        if isinstance(command, str):
            log.emit("control.refused", command, step=step, level="warn", data={"command": 0, "reason": command})
            continue
        try:
            old, new = _set(learner, command, step) if command.type == "set" else ({}, {})
        except ValueError as error:
            learner.inbox.refuse(command)
            data = {"command": command.number, "reason": str(error), "actor": command.actor}
            log.emit("control.refused", f"command {command.number} refused: {error}", step=step, level="warn", data=data)
            continue
        learner.inbox.record(command, step)
        message = f"command {command.number} ({command.type}) from {command.actor} takes effect at step {step}"
        log.emit("control.applied", message, step=step, data=AppliedCommand(command, step).to_event(old, new))
        if command.type == "pause" or command.type == "drain":
            stop = command.type
        should_save = should_save or command.type == "checkpoint"
    return stop, should_save


def _set(learner: Learner, command: Command, step: int) -> tuple[dict[str, float], dict[str, float]]:
    """Carry out a `set` as a whole or not at all. Returns the old and new values of what it names."""
    rule = learner.rule
    before = rule.state()
    old: dict[str, float] = {}
    new: dict[str, float] = {}
    try:
        if command.beta is not None:
            if command.beta > 0 and learner.reference is None:
                raise Refused(
                    "reference_not_loaded: the job runs without a reference, so beta must stay 0; start a job with kl.monitor true"
                )
            old["beta"] = rule.value(step)
            rule.set_base(command.beta)
            new["beta"] = rule.value(step)
        if command.target is not None:
            if rule.target is not None:
                old["target"] = rule.target
            rule.set_target(command.target)
            new["target"] = command.target
    except ValueError:
        rule.load(before)
        raise
    if command.learning_rate is not None:
        old["learning_rate"] = learner.base_learning_rate
        learner.base_learning_rate = new["learning_rate"] = command.learning_rate
    return old, new
