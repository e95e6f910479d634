"""Runs the detectors over a job's metrics: counts steps, fires, clears, remembers.

Pure Python on metric names (contract/telemetry.py), so that a finished run can be replayed without torch. The conditions
themselves are in `detectors/`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from grpo_engine.contract.diagnostics import DETECTOR_NAMES, DetectorName, DiagnosticsConfig
from grpo_engine.contract.event import Level
from grpo_engine.contract.job import GrpoConfig
from grpo_engine.detectors import behaviour, penalty
from grpo_engine.detectors.history import History
from grpo_engine.detectors.verdict import JobTraits, Verdict

STATE_VERSION = 1
_ALARMS = frozenset({"kl_out_of_control", "collapse", "reward_hacking", "ref_mismatch", "blow_up"})
"""Detectors whose event has level error; the others warn."""

Condition = Callable[[History, Any, JobTraits], Verdict | None]
CONDITIONS: dict[DetectorName, Condition] = {
    "kl_out_of_control": penalty.kl_out_of_control,
    "target_too_small": penalty.target_too_small,
    "target_too_large": penalty.target_too_large,
    "beta_high": penalty.beta_high,
    "beta_low": penalty.beta_low,
    "collapse": behaviour.collapse,
    "length_collapse": behaviour.length_collapse,
    "blow_up": behaviour.blow_up,
    "reward_hacking": behaviour.reward_hacking,
    "stagnation": behaviour.stagnation,
    "oscillation": penalty.oscillation,
    "length_bias": penalty.length_bias,
    "ref_mismatch": penalty.ref_mismatch,
    "estimator_unreliable": penalty.estimator_unreliable,
    "negative_kl": penalty.negative_kl,
}


@dataclass(frozen=True)
class Signal:
    """A detector fired or cleared."""

    detector: DetectorName
    kind: Literal["fired", "cleared"]
    step: int
    since: int
    """First step of the condition that led to it."""
    reading: float
    threshold: float
    message: str

    @property
    def level(self) -> Level:
        """Level of the event."""
        if self.kind == "cleared":
            return "info"
        return "error" if self.detector in _ALARMS else "warn"


@dataclass
class _Watch:
    """One detector's memory."""

    is_active: bool = False
    num_on: int = 0
    num_off: int = 0
    since: int = 0


class Detectors:
    """The detectors of one job. Call `observe` once per step, in order."""

    def __init__(self, grpo: GrpoConfig) -> None:
        self.cfg: DiagnosticsConfig = grpo.diagnostics
        self.traits = JobTraits.of(grpo)
        self._watches: dict[DetectorName, _Watch] = {name: _Watch() for name in DETECTOR_NAMES if self.cfg.enabled(name)}
        self._history = History(window=self._longest_window())

    @property
    def active(self) -> dict[DetectorName, int]:
        """Detectors that have fired and not cleared, with the first step of their condition."""
        return {name: watch.since for name, watch in self._watches.items() if watch.is_active}

    def observe(self, step: int, metrics: Mapping[str, Any]) -> list[Signal]:
        """Take in a step's metrics; what fired or cleared at it."""
        self._history.add(step, metrics)
        signals = []
        for name, watch in self._watches.items():
            cfg = getattr(self.cfg, name)
            verdict = CONDITIONS[name](self._history, cfg, self.traits)
            if verdict is None:
                continue
            kind = _advance(watch, verdict, step, cfg.updates, cfg.clear_after)
            if kind is not None:
                message = verdict.message if kind == "fired" else f"{name} is over (reading {verdict.reading:.4g})"
                signals.append(Signal(name, kind, step, watch.since, verdict.reading, verdict.threshold, message))
        return signals

    def state(self) -> dict[str, Any]:
        """Everything, as JSON, for the checkpoint."""
        watches = {name: dict(vars(watch)) for name, watch in self._watches.items()}
        return {"version": STATE_VERSION, "history": self._history.state(), "watches": watches}

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from `state()`. Raises ValueError for another version."""
        if state.get("version") != STATE_VERSION:
            raise ValueError(f"detector state has version {state.get('version')!r}, this build reads {STATE_VERSION}")
        self._history.load(state["history"])
        for name, watch in state["watches"].items():
            if name in self._watches:
                self._watches[cast(DetectorName, name)] = _Watch(**watch)

    def _longest_window(self) -> int:
        windows = [getattr(getattr(self.cfg, name), "window", 1) for name in self._watches]
        saturation = (self.cfg.target_too_small.saturated_updates - 1) * self.traits.update_every + 1
        return max([*windows, min(saturation, 1000)])


def _advance(watch: _Watch, verdict: Verdict, step: int, updates: int, clear_after: int) -> Literal["fired", "cleared"] | None:
    """Count the verdict; firing and clearing need their own number of steps in a row."""
    if verdict.is_on:
        if watch.num_on == 0 and not watch.is_active:
            watch.since = step
        watch.num_on, watch.num_off = watch.num_on + 1, 0
    else:
        watch.num_on = 0
        watch.num_off = watch.num_off + 1 if verdict.is_off else 0
    if not watch.is_active and watch.num_on >= updates:
        watch.is_active = True
        return "fired"
    if watch.is_active and watch.num_off >= clear_after:
        watch.is_active = False
        return "cleared"
    return None
