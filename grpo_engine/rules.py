"""The adaptive beta rules, each as one pure decision: a reading and a target in, a factor out.

`deadband` is the recipe (x1.2 above the target, /1.2 below 0.8 of it). `ppo` is PPO (1707.06347) section 4, there against
KL(old || theta). `ziegler` is 1909.08593: proportional, per batch of episodes. All compare strictly: equality holds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from grpo_engine.contract.beta import AdaptiveBeta, DeadbandBeta, PpoBeta, ZieglerBeta

EDGE_TOLERANCE = 1e-12
"""Relative: a reading this close to an edge is on it (0.8 * 0.1 is not 0.08 in binary)."""
SMALLEST_FACTOR = 0.1
"""Ziegler's linear factor turns negative when a decision covers more than horizon / clip episodes; it stops here."""


@dataclass(frozen=True)
class Decision:
    """What a rule wants: multiply beta by `factor`."""

    factor: float
    action: Literal[-1, 0, 1]
    reason: str


def band(cfg: AdaptiveBeta, target: float) -> tuple[float, float]:
    """The interval of KL in which the rule holds; a single point for `ziegler`."""
    match cfg:
        case DeadbandBeta():
            return cfg.low_ratio * target, cfg.high_ratio * target
        case PpoBeta():
            return target / cfg.band, target * cfg.band
        case ZieglerBeta():
            return target, target


def lower_edge(cfg: AdaptiveBeta, target: float) -> float:
    """The KL below which the rule lowers beta; reaching it arms the rule."""
    return band(cfg, target)[0]


def decide(cfg: AdaptiveBeta, reading: float, target: float, episodes: int) -> Decision:
    """The decision for a (smoothed) KL. `episodes` are the completions since the last decision; only `ziegler` uses them."""
    low, high = band(cfg, target)
    if reading > high * (1 + EDGE_TOLERANCE):
        return Decision(_up(cfg, reading, target, episodes), 1, f"raised: KL {reading:.6g} is above {high:.6g}")
    if reading < low * (1 - EDGE_TOLERANCE):
        return Decision(_down(cfg, reading, target, episodes), -1, f"lowered: KL {reading:.6g} is below {low:.6g}")
    return Decision(1.0, 0, f"held: KL {reading:.6g} is inside [{low:.6g}, {high:.6g}]")


def _up(cfg: AdaptiveBeta, reading: float, target: float, episodes: int) -> float:
    match cfg:
        case DeadbandBeta():
            return cfg.up
        case PpoBeta():
            return cfg.factor
        case ZieglerBeta():
            return _proportional(cfg, reading, target, episodes)


def _down(cfg: AdaptiveBeta, reading: float, target: float, episodes: int) -> float:
    match cfg:
        case DeadbandBeta():
            return 1 / cfg.down
        case PpoBeta():
            return 1 / cfg.factor
        case ZieglerBeta():
            return _proportional(cfg, reading, target, episodes)


def _proportional(cfg: ZieglerBeta, reading: float, target: float, episodes: int) -> float:
    error = min(max(reading / target - 1, -cfg.clip), cfg.clip)
    return max(1 + error * episodes / cfg.horizon, SMALLEST_FACTOR)
