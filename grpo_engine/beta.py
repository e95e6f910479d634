"""The coefficient of the KL penalty over a run: one object, one value per step, one update per rollout.

Computes beta = clamp(base(step) * multiplier, min, max): the base is a constant or a schedule, the multiplier is moved by
the rule (rules.py) from the measured KL. Plain floats; the state is JSON and goes into every checkpoint. Leaves out how
KL is measured: feed it the unclipped, unweighted mean of the step's rollout, once per rollout, never from evaluation.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import Any, Literal

from grpo_engine.contract.beta import AdaptiveBeta, Calibration, DeadbandBeta, FixedBeta, PpoBeta, ScheduleBeta, ZieglerBeta
from grpo_engine.rules import Decision, decide, lower_edge
from grpo_engine.schedule import run_fraction, scheduled_value

AnyBeta = FixedBeta | ScheduleBeta | AdaptiveBeta
Phase = Literal["fixed", "schedule", "calibration", "adaptive"]

STATE_VERSION = 1
BOUND_TOLERANCE = 1e-12
"""Relative: a beta this close to a bound is at the bound."""


@dataclass(frozen=True)
class BetaUpdate:
    """What one rollout did to beta."""

    action: Literal[-1, 0, 1]
    """The rule lowered, held or raised the multiplier. A schedule moves beta with action 0."""
    old: float
    """Beta of the step just done."""
    new: float
    """Beta of the next step."""
    reason: str
    """One sentence."""
    ema: float | None
    target: float | None
    phase: Phase
    saturated: Literal[-1, 0, 1]
    """At its max (1) or min (-1) while the rule wants to go on."""

    def metrics(self) -> dict[str, float]:
        """Telemetry of the update; what has no value is absent."""
        row: dict[str, float] = {"beta/next": self.new, "beta/action": self.action, "beta/saturated": self.saturated}
        if self.ema is not None:
            row["beta/ema"] = self.ema
        if self.target is not None:
            row["beta/target"] = self.target
        return row


@dataclass
class _State:
    """Everything that changes. The names are the public ones of the checkpoint and of `GET` job."""

    multiplier: float = 1.0
    gain: float = 1.0
    """Factor of guardrails on the base; `set_base` resets it."""
    base_override: float | None = None
    """Set by `set_base`; replaces value, schedule and warm-up value."""
    ema: float | None = None
    ema_count: int = 0
    target: float | None = None
    target_source: str | None = None
    """config, calibration, calibration_clamped or control."""
    updates: int = 0
    """Decisions taken (holds included)."""
    last_action: int = 0
    last_kl: float | None = None
    steps_since_update: int = 0
    episodes_since_update: int = 0
    saturated: int = 0
    saturated_since: int | None = None
    """Step at which beta became pinned."""
    is_armed: bool = True
    calibration_samples: list[float] | None = None
    """Finite KL readings of the warm-up; null once the target is known or when there is none."""
    schedule_step: int = 0
    """Last step seen by `update`."""
    nonfinite_skips: int = 0


class BetaRule:
    """Beta of a run. Create it once, ask `value(step)`, call `update` after each rollout."""

    def __init__(self, cfg: AnyBeta, num_steps: int) -> None:
        self.cfg = cfg
        self.num_steps = num_steps
        self.ref_sha256: str | None = None
        """The reference this beta was steered against; set by the engine, stored and checked with the state."""
        self._state = _State()
        if isinstance(cfg, DeadbandBeta | PpoBeta | ZieglerBeta):
            self._state.is_armed = not cfg.arming
            self._state.target = cfg.target
            self._state.target_source = "config" if cfg.target is not None else None
            self._state.calibration_samples = [] if cfg.calibration is not None else None

    @classmethod
    def create(cls, cfg: AnyBeta, num_steps: int) -> BetaRule:
        """A rule at step 1. `num_steps` is the length of the run; schedules are fractions of it."""
        return cls(cfg, num_steps)

    @property
    def phase(self) -> Phase:
        """What decides beta now."""
        if isinstance(self.cfg, FixedBeta):
            return "fixed"
        if isinstance(self.cfg, ScheduleBeta):
            return "fixed" if self._state.base_override is not None else "schedule"
        return "calibration" if self._state.calibration_samples is not None else "adaptive"

    @property
    def target(self) -> float | None:
        """Target KL in nats of the rule's unit; None for fixed and schedule, and until calibration has set it."""
        return self._state.target

    def value(self, step: int) -> float:
        """Beta applied in a step (from 1)."""
        base = self._base(step)
        if isinstance(self.cfg, FixedBeta | ScheduleBeta):
            return base
        if self.phase == "calibration":
            return base
        return min(max(base * self._state.multiplier, self.cfg.min), self.cfg.max)

    def update(self, step: int, kl_token: float | None, kl_sequence: float | None, episodes: int) -> BetaUpdate:
        """Take in a rollout's mean KL per token and per sequence, and its number of completions.

        None: nothing is measured, because the job holds no reference (rules fixed and schedule only). Call once per step,
        in order, also for quarantined steps (with a non-finite KL: everything holds and is counted).
        Raises ValueError when a step comes twice or out of order.
        """
        state = self._state
        if step <= state.schedule_step:
            raise ValueError(f"beta was already updated at step {state.schedule_step}; step {step} comes too late (one update per rollout)")
        old = self.value(step)
        state.schedule_step = step
        cfg = self.cfg
        if isinstance(cfg, FixedBeta | ScheduleBeta):
            if kl_token is not None and math.isfinite(kl_token):
                state.last_kl = kl_token
            elif kl_token is not None:
                state.nonfinite_skips += 1
            return self._report(old, step, 0, f"rule {cfg.rule} does not look at KL")
        kl = kl_token if cfg.unit == "token" else kl_sequence
        if kl is None or not math.isfinite(kl):
            state.nonfinite_skips += 1
            state.last_action = 0
            return self._report(old, step, 0, "held: the measured KL is not finite")
        state.last_kl = kl
        if state.calibration_samples is not None and cfg.calibration is not None:
            return self._report(old, step, 0, self._calibrate(cfg.calibration, state.calibration_samples, kl))
        action, reason = self._adapt(cfg, step, kl, episodes)
        return self._report(old, step, action, reason)

    def _adapt(self, cfg: AdaptiveBeta, step: int, kl: float, episodes: int) -> tuple[Literal[-1, 0, 1], str]:
        state, target = self._state, self._state.target
        assert target is not None
        if cfg.ema_decay is not None:
            state.ema = kl if state.ema is None else cfg.ema_decay * state.ema + (1 - cfg.ema_decay) * kl
            state.ema_count += 1
        reading = kl if state.ema is None else state.ema
        state.is_armed = state.is_armed or reading >= lower_edge(cfg, target) * (1 - BOUND_TOLERANCE)
        state.steps_since_update += 1
        state.episodes_since_update += episodes
        state.last_action = 0
        if state.steps_since_update < cfg.update_every:
            return 0, f"waiting: {state.steps_since_update} of {cfg.update_every} rollouts since the last decision"
        decision = decide(cfg, reading, target, state.episodes_since_update)
        state.steps_since_update = state.episodes_since_update = 0
        state.updates += 1
        if decision.action < 0 and not state.is_armed:
            return 0, f"held: not armed, KL {reading:.6g} has not yet reached {lower_edge(cfg, target):.6g}"
        return self._multiply(cfg, step, decision)

    def _multiply(self, cfg: AdaptiveBeta, step: int, decision: Decision) -> tuple[Literal[-1, 0, 1], str]:
        """Move the multiplier and keep it where beta can follow: no windup beyond the bounds."""
        state, base = self._state, self._base(step + 1)
        if base <= 0:
            return 0, "held: the scheduled base is 0"
        before = min(max(base * state.multiplier, cfg.min), cfg.max)
        wanted = before * decision.factor
        if decision.action:
            state.multiplier = min(max(wanted, cfg.min), cfg.max) / base
        state.last_action = decision.action
        saturated: Literal[-1, 0, 1] = 0
        if wanted >= cfg.max * (1 - BOUND_TOLERANCE) and (decision.action > 0 or state.saturated > 0):
            saturated = 1
        elif wanted <= cfg.min * (1 + BOUND_TOLERANCE) and (decision.action < 0 or state.saturated < 0):
            saturated = -1
        if saturated != state.saturated:
            state.saturated_since = step if saturated else None
        state.saturated = saturated
        pinned = {1: "; pinned at its max", -1: "; pinned at its min", 0: ""}[saturated]
        return decision.action, decision.reason + pinned

    def _calibrate(self, calibration: Calibration, samples: list[float], kl: float) -> str:
        state = self._state
        samples.append(kl)
        if len(samples) < calibration.rollouts:
            return f"calibrating: {len(samples)} of {calibration.rollouts} rollouts at fixed beta"
        kept = samples[calibration.discard :]
        found = statistics.median(kept) if calibration.stat == "median" else statistics.fmean(kept)
        target = min(max(found, calibration.min), calibration.max)
        state.target, state.calibration_samples = target, None
        state.target_source = "calibration" if target == found else "calibration_clamped"
        clamped = "" if target == found else f", clamped from {found:.6g}"
        return f"calibrated: target {target:.6g} nats{clamped}, the {calibration.stat} of {len(kept)} rollouts"

    def _report(self, old: float, step: int, action: Literal[-1, 0, 1], reason: str) -> BetaUpdate:
        state = self._state
        saturated: Literal[-1, 0, 1] = 1 if state.saturated > 0 else -1 if state.saturated < 0 else 0
        return BetaUpdate(action, old, self.value(step + 1), reason, state.ema, state.target, self.phase, saturated)

    def _base(self, step: int) -> float:
        state, cfg = self._state, self.cfg
        if state.base_override is not None:
            base = state.base_override
        elif isinstance(cfg, FixedBeta):
            base = cfg.value
        elif isinstance(cfg, ScheduleBeta):
            base = scheduled_value(cfg.schedule, run_fraction(step, self.num_steps))
        elif state.calibration_samples is not None and cfg.calibration is not None:
            base = cfg.calibration.fixed_value
        elif cfg.schedule is not None:
            base = scheduled_value(cfg.schedule, run_fraction(step, self.num_steps))
        else:
            assert cfg.value is not None
            base = cfg.value
        return base * state.gain

    def set_base(self, value: float) -> None:
        """Replace the base (value, schedule or warm-up value) from the next step on; the multiplier becomes 1, the EMA stays.

        Raises ValueError with a remedy when the rule cannot carry the value.
        """
        if not math.isfinite(value) or value < 0:
            raise ValueError(f"beta must be a finite number >= 0, not {value}")
        cfg = self.cfg
        if isinstance(cfg, DeadbandBeta | PpoBeta | ZieglerBeta) and not cfg.min <= value <= cfg.max:
            bounds = f"[{cfg.min:g}, {cfg.max:g}]"
            raise ValueError(f"beta {value:g} is outside the bounds {bounds} of rule {cfg.rule}; choose a value inside them")
        self._state.base_override, self._state.gain, self._state.multiplier = value, 1.0, 1.0
        self._state.saturated, self._state.saturated_since = 0, None

    def set_target(self, value: float) -> None:
        """Replace the target; a running calibration ends. Raises ValueError when the rule has none or the value is not above 0."""
        if isinstance(self.cfg, FixedBeta | ScheduleBeta):
            raise ValueError(f"rule {self.cfg.rule} has no target; set beta instead, or use rule deadband, ppo or ziegler")
        if not math.isfinite(value) or value <= 0:
            raise ValueError(f"target must be a finite number above 0 nats, not {value}")
        self._state.target, self._state.target_source, self._state.calibration_samples = value, "control", None

    def scale(self, factor: float) -> None:
        """Multiply the base by a factor for the rest of the run (a guardrail's named change). Raises ValueError unless factor > 0."""
        if not math.isfinite(factor) or factor <= 0:
            raise ValueError(f"factor must be a finite number above 0, not {factor}")
        self._state.gain *= factor

    def state(self) -> dict[str, Any]:
        """The whole state as JSON, versioned; `load` continues from it to the last digit."""
        return {
            "version": STATE_VERSION,
            "rule": self.cfg.rule,
            "beta": self.value(self._state.schedule_step + 1),
            "phase": self.phase,
            "ref_sha256": self.ref_sha256,
            "rng": None,
            **{name: list(value) if isinstance(value, list) else value for name, value in vars(self._state).items()},
        }

    def load(self, state: dict[str, Any]) -> None:
        """Continue from `state()`. Raises ValueError when it belongs to another rule, version or reference."""
        if state.get("version") != STATE_VERSION:
            raise ValueError(f"beta state has version {state.get('version')!r}, this build reads {STATE_VERSION}")
        if state.get("rule") != self.cfg.rule:
            raise ValueError(f"beta state belongs to rule {state.get('rule')!r}, the job runs rule {self.cfg.rule!r}")
        stored = state.get("ref_sha256")
        if None not in (stored, self.ref_sha256) and stored != self.ref_sha256:
            raise ValueError(f"beta state was steered against reference {stored}, the job holds {self.ref_sha256}")
        missing = sorted(set(vars(_State())) - set(state))
        if missing:
            raise ValueError(f"beta state lacks {', '.join(missing)}")
        self.ref_sha256 = self.ref_sha256 or stored
        self._state = _State(**{name: state[name] for name in vars(_State())})
        if self._state.calibration_samples is not None:
            self._state.calibration_samples = list(self._state.calibration_samples)
