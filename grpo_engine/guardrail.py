"""From a detector that is on to the action its guardrail names, and what a finished run would have triggered.

Pure Python. The engine carries the actions out (train.py); this module decides when.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from grpo_engine.contract.diagnostics import DetectorName, Guardrail, Pause, Rollback, SetBeta, Stop
from grpo_engine.contract.job import GrpoConfig
from grpo_engine.diagnostics import Detectors, Signal

STATE_VERSION = 1


@dataclass(frozen=True)
class Act:
    """An action that is due now."""

    rule: int
    """Index in the job's `guardrails`."""
    detector: DetectorName
    action: Pause | Stop | SetBeta | Rollback
    since: int
    """First step of the trouble: roll back to a checkpoint from before it."""
    count: int
    """How often this guardrail has acted, this time included."""
    message: str


@dataclass
class _Memory:
    """One guardrail's past."""

    recent: list[bool] = field(default_factory=list)
    is_spent: bool = False
    """Acted, and its detector has not cleared since."""
    count: int = 0


class Guardrails:
    """The guardrails of one job. Call `observe` once per step, after the detectors.

    A rollback restores the detectors' state, never this one's: otherwise `max_count` would start over each time.
    """

    def __init__(self, rules: Sequence[Guardrail]) -> None:
        self.rules = list(rules)
        self._memories = [_Memory() for _ in self.rules]

    def observe(self, active: Mapping[DetectorName, int]) -> list[Act]:
        """The actions due, in the job's order. `active` is `Detectors.active`."""
        due = []
        for index, (rule, memory) in enumerate(zip(self.rules, self._memories, strict=True)):
            is_on = rule.detector in active
            memory.recent = [*memory.recent, is_on][-(rule.window or rule.consecutive) :]
            if not is_on:
                memory.is_spent = False
                if rule.window is None:
                    memory.recent = []
            elif not memory.is_spent and sum(memory.recent) >= rule.consecutive:
                memory.is_spent, memory.recent = True, []
                memory.count += 1
                due.append(self._act(index, rule, active[rule.detector], memory.count))
        return due

    @staticmethod
    def _act(index: int, rule: Guardrail, since: int, count: int) -> Act:
        action = rule.action
        if isinstance(action, Rollback) and count > action.max_count:
            message = f"{rule.detector} again after {action.max_count} rollbacks: stopping"
            return Act(index, rule.detector, Stop(type="stop"), since, count, message)
        message = f"{rule.detector} is on since step {since}: {describe(action)}"
        return Act(index, rule.detector, action, since, count, message)

    def state(self) -> list[dict[str, Any]]:
        """Everything, as JSON, for the checkpoint."""
        return [{"version": STATE_VERSION, **vars(memory)} for memory in self._memories]

    def load(self, state: Sequence[Mapping[str, Any]]) -> None:
        """Continue from `state()`. Raises ValueError when it belongs to other guardrails."""
        if len(state) != len(self.rules) or any(row.get("version") != STATE_VERSION for row in state):
            raise ValueError("guardrail state does not belong to these guardrails")
        self._memories = [_Memory(list(row["recent"]), row["is_spent"], row["count"]) for row in state]


def describe(action: Pause | Stop | SetBeta | Rollback) -> str:
    """The action in words."""
    if isinstance(action, SetBeta):
        return f"set beta to {action.value:g}"
    if not isinstance(action, Rollback):
        return action.type
    changes = []
    if action.beta_factor is not None:
        changes.append(f"beta times {action.beta_factor:g}")
    if action.learning_rate_factor is not None:
        changes.append(f"learning rate times {action.learning_rate_factor:g}")
    if action.reseed:
        changes.append("a new seed")
    return f"roll back with {' and '.join(changes)}"


@dataclass(frozen=True)
class Replayed:
    """Something that would have happened at a step."""

    step: int
    kind: Literal["fired", "cleared", "acted"]
    name: str
    """The detector."""
    message: str


def replay(rows: Iterable[tuple[int, Mapping[str, Any]]], grpo: GrpoConfig) -> list[Replayed]:
    """The detectors and guardrails of `grpo` over a finished run's (step, metrics) rows, in step order.

    What an action would have changed later in the run is not known: rows after it are read as they are.
    """
    detectors, guardrails = Detectors(grpo), Guardrails(grpo.guardrails)
    story: list[Replayed] = []
    for step, metrics in rows:
        story += [_told(signal) for signal in detectors.observe(step, metrics)]
        for act in guardrails.observe(detectors.active):
            story.append(Replayed(step, "acted", act.detector, f"would have acted at step {step}: {act.message}"))
    return story


def _told(signal: Signal) -> Replayed:
    verb = "fired" if signal.kind == "fired" else "cleared"
    return Replayed(signal.step, signal.kind, signal.detector, f"would have {verb} at step {signal.step}: {signal.message}")
