"""What steers: the coefficient beta of the KL penalty, as a union on `rule`.

A plain number means `{"rule": "fixed", "value": number}`. Adaptive rules multiply the scheduled (or constant) base:
beta = clamp(base(step) * multiplier, min, max). They act from the end of calibration on, once per rollout at most.
"""

from __future__ import annotations

import itertools
import math
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from grpo_engine.contract.base import Fraction, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Strict, broken_rule

KlUnit = Literal["token", "sequence"]


class ConstantSchedule(Strict):
    """The same beta at every step."""

    type: Literal["constant"] = "constant"
    value: NonNegativeFloat


class RampSchedule(Strict):
    """Hold `start` for a share of the run, then move gradually to `end`, reached at the last step."""

    type: Literal["linear", "cosine"]
    start: NonNegativeFloat
    end: NonNegativeFloat
    hold_ratio: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the run during which `start` is held."""


class PiecewiseSchedule(Strict):
    """Values at fractions of the run, joined by straight lines or held until the next point."""

    type: Literal["piecewise"]
    points: Annotated[list[Annotated[list[NonNegativeFloat], Field(min_length=2, max_length=2)]], Field(min_length=1, max_length=64)]
    """[[fraction, beta], ...] with fractions strictly increasing from 0 to at most 1."""
    interpolation: Literal["linear", "step"] = "linear"

    @model_validator(mode="after")
    def _ordered(self) -> PiecewiseSchedule:
        fractions = [point[0] for point in self.points]
        if fractions[0] != 0:
            raise broken_rule("points[0][0]", "points must begin at fraction 0; add a first point [0, beta]")
        for number, (before, here) in enumerate(itertools.pairwise(fractions), start=1):
            if here <= before or here > 1:
                at = f"points[{number}][0]"
                raise broken_rule(at, "points must have strictly increasing fractions between 0 and 1; sort them and drop repeats")
        return self


Schedule = Annotated[ConstantSchedule | RampSchedule | PiecewiseSchedule, Field(discriminator="type")]


class Calibration(Strict):
    """Set the target from a warm-up at a fixed beta: a statistic of the KL of the first rollouts."""

    rollouts: PositiveInt = 10
    discard: NonNegativeInt = 0
    """Rollouts dropped at the start (KL is exactly 0 at step 1)."""
    stat: Literal["median", "mean"] = "median"
    min: PositiveFloat = 0.005
    """Lower clamp of the target: below it a multiplicative rule would raise beta without end."""
    max: PositiveFloat = 0.1
    fixed_value: PositiveFloat = 0.02
    """Beta during the warm-up."""

    @model_validator(mode="after")
    def _leaves_samples(self) -> Calibration:
        if self.discard >= self.rollouts:
            raise broken_rule("discard", "discard leaves no rollout to measure; make it smaller than rollouts")
        if self.min > self.max:
            raise broken_rule("min", "min exceeds max; swap them")
        return self


class FixedBeta(Strict):
    """One value for the whole run; 0 means no penalty and no reference in memory."""

    rule: Literal["fixed"] = "fixed"
    value: NonNegativeFloat = 0.02


class ScheduleBeta(Strict):
    """Open loop: beta follows the schedule whatever KL does."""

    rule: Literal["schedule"]
    schedule: Schedule


class _Adaptive(Strict):
    value: NonNegativeFloat | None = None
    """Beta at step 1; excludes `schedule`."""
    schedule: Schedule | None = None
    """A scheduled base which the rule multiplies; excludes `value`."""
    target: float | None = None
    """Target KL in nats, in `unit`; required unless `calibration` sets it."""
    unit: KlUnit = "token"
    """`token`: mean over completion tokens. `sequence`: mean over completions of the sum over tokens."""
    update_every: PositiveInt = 1
    """Rollouts between two decisions."""
    ema_decay: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Smoothing of the measured KL, updated once per rollout; null = the raw value."""
    arming: bool = True
    """Hold back decreases until KL has once reached the lower edge of the band. KL starts at exactly 0, so without it the rule
    walks beta to its floor before there is anything to steer."""
    min: PositiveFloat = 1e-5
    max: PositiveFloat = 1.0
    calibration: Calibration | None = None

    @model_validator(mode="after")
    def _consistent(self) -> _Adaptive:
        if (self.value is None) == (self.schedule is None):
            at = "value" if self.value is None else "schedule"
            raise broken_rule(at, "give exactly one of value and schedule: they exclude each other, and one is required")
        if self.value == 0:
            raise broken_rule(
                "value", "value 0 can never be changed by a multiplicative rule; use a positive value, or rule fixed for beta 0"
            )
        if self.schedule is not None and not any(value > 0 for value in schedule_values(self.schedule)):
            raise broken_rule(
                "schedule", "a schedule that is 0 throughout can never be changed by a multiplicative rule; use positive values"
            )
        if self.target is not None and self.target <= 0:
            raise broken_rule("target", "target must be above 0 nats: no beta reaches a KL of 0")
        if (self.target is None) == (self.calibration is None):
            at = "target" if self.target is None else "calibration"
            raise broken_rule(at, "give exactly one of target and calibration")
        if self.min > self.max:
            raise broken_rule("min", "min exceeds max; swap them")
        if self.value is not None and not self.min <= self.value <= self.max:
            bounds = f"[min {self.min:g}, max {self.max:g}]"
            raise broken_rule("value", f"value {self.value:g} lies outside {bounds}; widen the bounds or move the value")
        if self.calibration is not None and self.unit == "sequence":
            for bound in ("min", "max"):
                if bound not in self.calibration.model_fields_set:
                    raise broken_rule(
                        f"calibration.{bound}",
                        "the default bounds of calibration are nats per token; "
                        "with unit sequence give calibration.min and calibration.max yourself",
                    )
        if self.ema_decay is not None:
            needed = math.ceil(1 / (1 - self.ema_decay) - 1e-9)
            if self.update_every < needed:
                raise broken_rule(
                    "update_every",
                    f"update_every {self.update_every} is shorter than the memory of ema_decay {self.ema_decay} and would oscillate; "
                    f"set update_every to at least {needed}, or ema_decay to null",
                )
        return self


class DeadbandBeta(_Adaptive):
    """The recipe: times `up` above the band, divided by `down` below it, else hold."""

    rule: Literal["deadband"]
    update_every: PositiveInt = 50
    ema_decay: Annotated[float, Field(gt=0, lt=1)] | None = 0.9
    up: Annotated[float, Field(gt=1)] = 1.2
    down: Annotated[float, Field(gt=1)] = 1.2
    low_ratio: Annotated[float, Field(gt=0, le=1)] = 0.8
    high_ratio: Annotated[float, Field(ge=1)] = 1.0


class PpoBeta(_Adaptive):
    """PPO (2017) section 4: times `factor` above band*target, divided by it below target/band."""

    rule: Literal["ppo"]
    factor: Annotated[float, Field(gt=1)] = 2.0
    band: Annotated[float, Field(ge=1)] = 1.5


class ZieglerBeta(_Adaptive):
    """Ziegler et al. (2019): proportional, multiplier *= 1 + clip(KL/target - 1, +-clip) * episodes / horizon."""

    rule: Literal["ziegler"]
    unit: KlUnit = "sequence"
    horizon: PositiveFloat = 10_000.0
    """Episodes (completions)."""
    clip: Fraction = 0.2


def _number_is_fixed(value: Any) -> Any:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return {"rule": "fixed", "value": value}
    return value


BetaConfig = Annotated[
    Annotated[FixedBeta | ScheduleBeta | DeadbandBeta | PpoBeta | ZieglerBeta, Field(discriminator="rule")],
    BeforeValidator(_number_is_fixed),
]
AdaptiveBeta = DeadbandBeta | PpoBeta | ZieglerBeta


def schedule_values(schedule: ConstantSchedule | RampSchedule | PiecewiseSchedule) -> list[float]:
    """The values a schedule passes through at its corners."""
    match schedule:
        case ConstantSchedule():
            return [schedule.value]
        case RampSchedule():
            return [schedule.start, schedule.end]
        case PiecewiseSchedule():
            return [point[1] for point in schedule.points]


def needs_reference(beta: FixedBeta | ScheduleBeta | AdaptiveBeta) -> bool:
    """Whether any step can have beta > 0."""
    match beta:
        case FixedBeta():
            return beta.value > 0
        case ScheduleBeta():
            return any(value > 0 for value in schedule_values(beta.schedule))
        case _:
            return True
