"""Beta as a function of the share of the run that is over. Open loop: nothing measured enters."""

from __future__ import annotations

import itertools
import math

from grpo_engine.contract.beta import ConstantSchedule, PiecewiseSchedule, RampSchedule


def run_fraction(step: int, num_steps: int) -> float:
    """0 at step 1, 1 at the last step; clamped outside."""
    if num_steps <= 1:
        return 0.0
    return min(max((step - 1) / (num_steps - 1), 0.0), 1.0)


def scheduled_value(schedule: ConstantSchedule | RampSchedule | PiecewiseSchedule, fraction: float) -> float:
    """The schedule at a fraction in [0, 1]."""
    match schedule:
        case ConstantSchedule():
            return schedule.value
        case RampSchedule():
            return _ramp(schedule, fraction)
        case PiecewiseSchedule():
            return _piecewise(schedule, fraction)


def _ramp(schedule: RampSchedule, fraction: float) -> float:
    if fraction <= schedule.hold_ratio:
        return schedule.start
    if fraction >= 1:
        return schedule.end
    progress = (fraction - schedule.hold_ratio) / (1 - schedule.hold_ratio)
    if schedule.type == "cosine":
        progress = (1 - math.cos(math.pi * progress)) / 2
    return schedule.start + (schedule.end - schedule.start) * progress


def _piecewise(schedule: PiecewiseSchedule, fraction: float) -> float:
    points = schedule.points
    for (left, start), (right, end) in itertools.pairwise(points):
        if fraction < right:
            if schedule.interpolation == "step":
                return start
            return start + (end - start) * (fraction - left) / (right - left)
    return points[-1][1]
