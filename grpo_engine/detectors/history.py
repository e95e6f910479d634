"""What the detectors look at: the recent steps of a run, its first ones, and a line through any metric.

Plain floats. Rows keep only the watched metrics, so that the history fits into every checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

KL_PREFERENCE = ("exact", "k3", "k1", "k2", "abs")
"""Which estimate of kl/ref speaks for the run, best first."""

WATCHED = frozenset(
    {
        *(f"kl/ref/{estimator}/mean" for estimator in KL_PREFERENCE),
        "kl/ref/k1/se",
        "kl/ref/k3/se",
        "kl/ref/k3/token_max",
        "kl/length_correlation",
        "beta/applied",
        "beta/action",
        "beta/saturated",
        "beta/target",
        "policy/entropy",
        "completion/length_mean",
        "completion/truncated_frac",
        "completion/rep_ngram4",
        "completion/distinct2",
        "reward/mean",
        "eval/reward_mean",
        "grad_norm/policy",
        "grad_norm/kl",
        "groups/zero_std_frac",
    }
)
EARLY_STEPS = 10
KEPT_ACTIONS = 50
KEPT_EVALUATIONS = 50


@dataclass(frozen=True)
class Slope:
    """A least-squares line: change per step, and its standard error."""

    per_step: float
    se: float

    def is_rising(self, standard_errors: float) -> bool:
        """Whether the slope is above 0 beyond chance."""
        return self.per_step > 0 and self.per_step > standard_errors * self.se

    def is_falling(self, standard_errors: float) -> bool:
        """Whether the slope is below 0 beyond chance."""
        return self.per_step < 0 and -self.per_step > standard_errors * self.se


def fit_slope(values: Sequence[float]) -> Slope | None:
    """The line through equally spaced values; None for fewer than 3, or when one is not finite."""
    count = len(values)
    if count < 3 or not all(math.isfinite(value) for value in values):
        return None
    middle, mean = (count - 1) / 2, math.fsum(values) / count
    spread = math.fsum((index - middle) ** 2 for index in range(count))
    slope = math.fsum((index - middle) * (value - mean) for index, value in enumerate(values)) / spread
    residual = math.fsum((value - mean - slope * (index - middle)) ** 2 for index, value in enumerate(values))
    noise_floor = (1e-12 * max(abs(value) for value in values)) ** 2
    return Slope(slope, math.sqrt((residual / (count - 2) + noise_floor) / spread))


@dataclass
class History:
    """Rows of watched metrics, oldest first."""

    window: int
    rows: list[dict[str, float]] = field(default_factory=list)
    """The last `window` steps."""
    early: list[dict[str, float]] = field(default_factory=list)
    """The first steps of the run."""
    actions: list[float] = field(default_factory=list)
    """The last raises (1) and lowerings (-1) of beta; holds are left out."""
    evaluations: list[float] = field(default_factory=list)
    """The last held-out rewards."""
    step: int = 0

    def add(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Take in a step. What is not a number (an encoded non-finite value, say) counts as absent."""
        row = {name: float(value) for name, value in metrics.items() if name in WATCHED and isinstance(value, int | float)}
        self.step = step
        self.rows = [*self.rows, row][-self.window :]
        if len(self.early) < EARLY_STEPS:
            self.early.append(row)
        if row.get("beta/action"):
            self.actions = [*self.actions, row["beta/action"]][-KEPT_ACTIONS:]
        if "eval/reward_mean" in row:
            self.evaluations = [*self.evaluations, row["eval/reward_mean"]][-KEPT_EVALUATIONS:]

    def now(self, name: str) -> float | None:
        """The metric at the newest step; None when absent."""
        return self.rows[-1].get(name) if self.rows else None

    def at_start(self, name: str, steps: int = 1) -> float | None:
        """Mean over the run's first steps; None until they are over, or when one lacks the metric."""
        values = [row[name] for row in self.early[:steps] if name in row]
        return math.fsum(values) / steps if len(values) == steps else None

    def kl(self) -> float | None:
        """KL to the reference at the newest step, nats per token, by the best estimate present."""
        return self._kl_of(self.rows[-1]) if self.rows else None

    def kl_slope(self, window: int) -> Slope | None:
        """Slope of that KL over the window; None until the window is full."""
        return self._slope([self._kl_of(row) for row in self.rows[-window:]], window)

    def slope(self, name: str, window: int) -> Slope | None:
        """Slope of a metric over the window; None until the window is full, or when a step lacks it."""
        return self._slope([row.get(name) for row in self.rows[-window:]], window)

    def target_per_token(self, unit: str) -> float | None:
        """Target KL in nats per token, whatever the unit of the rule."""
        target = self.now("beta/target")
        if target is None or unit == "token":
            return target
        length = self.now("completion/length_mean")
        return target / length if length else None

    def state(self) -> dict[str, Any]:
        """The history as JSON."""
        return {
            "rows": self.rows,
            "early": self.early,
            "actions": self.actions,
            "evaluations": self.evaluations,
            "step": self.step,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from `state()`."""
        self.rows = [dict(row) for row in state["rows"]][-self.window :]
        self.early = [dict(row) for row in state["early"]]
        self.actions = list(state["actions"])
        self.evaluations = list(state["evaluations"])
        self.step = state["step"]

    @staticmethod
    def _kl_of(row: Mapping[str, float]) -> float | None:
        return next((row[f"kl/ref/{name}/mean"] for name in KL_PREFERENCE if f"kl/ref/{name}/mean" in row), None)

    @staticmethod
    def _slope(values: Sequence[float | None], window: int) -> Slope | None:
        present = [value for value in values if value is not None]
        return fit_slope(present) if len(present) == window else None
