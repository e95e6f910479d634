"""A walk over the detectors' settings: each one, changed alone, changes what fires or clears on some series."""

from __future__ import annotations

from typing import Any

import pytest

from grpo_engine.contract.diagnostics import DETECTOR_NAMES, DiagnosticsConfig
from grpo_engine.contract.intake import validate
from grpo_engine.contract.job import GrpoConfig
from grpo_engine.diagnostics import Detectors, Signal

Rows = list[dict[str, float]]


def kl(value: float) -> dict[str, float]:
    return {"kl/ref/k3/mean": value}


def signals(name: str, settings: dict[str, Any], rows: Rows, beta: Any) -> list[Signal]:
    off = {other: {"enabled": False} for other in DETECTOR_NAMES if other != name}
    raw = {"grader": {"type": "math"}, "kl": {"aggregation": "seq_sum"}, "beta": beta, "diagnostics": {**off, name: settings}}
    detectors = Detectors(validate(GrpoConfig, raw))
    return [signal for step, row in enumerate(rows, start=1) for signal in detectors.observe(step, row)]


def noisy(count: int, slope: float, noise: float = 1.0) -> list[float]:
    """A line with a zigzag on it: its slope is significant or not, depending on how many standard errors are asked for."""
    return [1 + slope * n + noise * (-1) ** n for n in range(count)]


ON_OFF = [*[kl(0.11)] * 6, *[kl(0.0)] * 6, *[kl(0.11)] * 6]
START = {"policy/entropy": 2.0, "completion/rep_ngram4": 0.01, "completion/distinct2": 0.9, **kl(0.05)}
SICK = [START, *[{**START, "policy/entropy": 0.3, "completion/rep_ngram4": 0.32, "completion/distinct2": 0.4}] * 6, *[START] * 6]
LENGTHS = [40.0, 42.0, 44.0, 46.0, 48.0, 60.0, *[21.0] * 6, *[44.0] * 6]
FLAT = {"reward/mean": 0.5, "beta/applied": 0.02, **kl(0.003)}
STUCK = (
    [FLAT] * 3
    + [{**FLAT, "beta/applied": 0.11, "groups/zero_std_frac": 0.85, "grad_norm/kl": 1.2, "grad_norm/policy": 1.0}] * 30
    + [{**FLAT, "reward/mean": 0.5 + 0.1 * n} for n in range(30)]
)
CLIMB = noisy(60, 0.35)
HACKED = [{"reward/mean": r, "completion/length_mean": 20 + n, **kl(0.001 * n)} for n, r in enumerate(CLIMB)] + [
    {"reward/mean": 20.0, "completion/length_mean": 80.0, **kl(0.06)} for _ in range(30)
]
EVALUATED = [
    {"reward/mean": 0.1 * n, **({"eval/reward_mean": 1 - 0.01 * n + (0.1 if n < 6 else 0)} if n % 3 == 0 else {})} for n in range(60)
]
SHRUNK = [{"reward/mean": r, "completion/length_mean": max(50.0 - n, 18.0), **kl(0.001 * n)} for n, r in enumerate(CLIMB)]
DISSOLVING = [{"policy/entropy": e, "completion/truncated_frac": e, **kl(0.001 * n)} for n, e in enumerate(noisy(60, 0.35))] + [
    {"policy/entropy": 1.0, "completion/truncated_frac": 0.0, **kl(0.06)}
] * 30
SHORTER = [{"kl/length_correlation": 0.85, "completion/length_mean": 90 - e} for e in noisy(60, 0.35)] + [
    {"kl/length_correlation": 0.85, "completion/length_mean": 50.0}
] * 30
DRIFTING = [{"beta/applied": 0.0008, **kl(0.001 * max(n - 8, 0))} for n in range(50)] + [{"beta/applied": 0.0008, **kl(0.042)}] * 30
TARGETS = [*[{"beta/target": 0.004}] * 3, *[{"beta/target": 0.02, "beta/saturated": 1.0}] * 12, *[{"beta/target": 0.02}] * 6]
LARGE = [*[{"beta/target": 0.12}] * 3, *[{"beta/target": 0.02}] * 6]
HIGH = [*[{"beta/applied": 0.12}] * 3, *[{"beta/applied": 0.02}] * 6]
ZIGZAG = [{"beta/action": float(a)} for a in (1, -1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, 1, 1, 1, 1, 1)]
CALM = {**kl(0.01), "kl/ref/k3/se": 0.0, "kl/ref/k3/token_max": 1.0}
WILD = [*[{**kl(0.01), "kl/ref/k3/se": 0.006, "kl/ref/k3/token_max": 8.0}] * 4, *[CALM] * 5]
WILDER = [{**row, "kl/ref/k3/token_max": 12.0, "kl/ref/k3/se": 0.001} for row in WILD[:4]] + WILD[4:]
BELOW = [*[{"kl/ref/k1/mean": -4e-5, "kl/ref/k1/se": 1e-5}] * 4, *[{"kl/ref/k1/mean": 1e-5, "kl/ref/k1/se": 1e-5}] * 5]
FIRST = [kl(2e-4), kl(0.01)]
SIGNS = ("policy/entropy", "completion/rep_ngram4", "completion/distinct2")
CAUSES: list[dict[str, float]] = [{"beta/applied": 0.11}, {"groups/zero_std_frac": 0.85}, {"grad_norm/kl": 1.2, "grad_norm/policy": 1.0}]
RISING = [*[FLAT] * 3, *[{**FLAT, "beta/applied": 0.11, "reward/mean": value} for value in noisy(60, 0.35)]]
RULE = {"rule": "deadband", "value": 0.02, "target": 0.02, "update_every": 4, "ema_decay": None}

SERIES: dict[str, list[Rows]] = {
    "kl_out_of_control": [ON_OFF, [*[kl(0.11)] * 4, *[kl(0.085)] * 6]],
    "target_too_small": [TARGETS],
    "target_too_large": [LARGE],
    "beta_high": [HIGH],
    "beta_low": [DRIFTING],
    "collapse": [SICK, *[[START, {**START, key: SICK[1][key]}] for key in SIGNS]],
    "length_collapse": [[{"completion/length_mean": value} for value in LENGTHS]],
    "blow_up": [DISSOLVING],
    "reward_hacking": [HACKED, EVALUATED, SHRUNK],
    "stagnation": [STUCK, RISING, *[[*[FLAT] * 3, *[{**FLAT, **cause}] * 30] for cause in CAUSES]],
    "oscillation": [ZIGZAG],
    "length_bias": [SHORTER],
    "ref_mismatch": [FIRST],
    "estimator_unreliable": [WILD, WILDER],
    "negative_kl": [BELOW],
}
CHANGES: dict[str, dict[str, Any]] = {
    "kl_out_of_control": {"kl": 0.2, "clear_ratio": 0.9},
    "target_too_small": {"target": 0.001, "saturated_updates": 3},
    "target_too_large": {"target": 0.2},
    "beta_high": {"beta": 0.2},
    "beta_low": {"beta": 0.0005, "window": 10},
    "collapse": {"entropy_ratio": 0.1, "rep_ngram4": 0.5, "distinct2_ratio": 0.3, "target_ratio": 4.0, "kl": 0.06},
    "length_collapse": {"ratio": 0.4, "baseline_steps": 1},
    "blow_up": {"window": 30, "standard_errors": 30.0},
    "reward_hacking": {"window": 30, "standard_errors": 30.0, "eval_points": 8, "shrunk_ratio": 0.3},
    "stagnation": {
        "window": 10,
        "standard_errors": 100.0,
        "target_ratio": 0.05,
        "kl": 0.001,
        "beta_ratio": 8.0,
        "grad_ratio": 2.0,
        "zero_std_frac": 0.9,
    },
    "oscillation": {"decisions": 8, "sign_changes": 5},
    "length_bias": {"correlation": 0.9, "window": 30, "standard_errors": 30.0},
    "ref_mismatch": {"kl": 1e-3},
    "estimator_unreliable": {"se_ratio": 0.9, "token_max": 15.0, "min_mean": 0.1},
    "negative_kl": {"standard_errors": 5.0},
}
SHARED = {"enabled": False, "updates": 4, "clear_after": 2}
WITHOUT_EFFECT = {
    ("ref_mismatch", "updates"): "only step 1 is looked at",
    ("ref_mismatch", "clear_after"): "only step 1 is looked at",
}


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        (name, field, value)
        for name in DETECTOR_NAMES
        for field, value in {**SHARED, **CHANGES[name]}.items()
        if (name, field) not in WITHOUT_EFFECT
    ],
)
def test_each_setting_of_a_detector_changes_its_word(name: str, field: str, value: Any) -> None:
    followed = field == "target_ratio" or name == "target_too_small"
    rows = [[{"beta/target": 0.02, **row} for row in series] if field == "target_ratio" else series for series in SERIES[name]]
    beta = RULE if followed else 0.02
    plain = [signals(name, {}, series, beta) for series in rows]
    assert any(plain), "the series must fire with the defaults"
    if field == "saturated_updates":
        rows = [[row for row in series if row["beta/target"] != 0.004] for series in rows]
        plain = [signals(name, {}, series, beta) for series in rows]
    assert [signals(name, {field: value}, series, beta) for series in rows] != plain


def test_the_walk_leaves_no_setting_out() -> None:
    for name in DETECTOR_NAMES:
        assert set(SHARED) | set(CHANGES[name]) == set(type(getattr(DiagnosticsConfig(), name)).model_fields)
