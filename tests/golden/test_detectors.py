"""Each detector on a series that should fire it and on one that should not; firing, clearing, guardrails, replay."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_engine.contract.diagnostics import DETECTOR_NAMES, Guardrail
from grpo_engine.contract.error import InvalidRequest
from grpo_engine.contract.intake import validate
from grpo_engine.contract.job import GrpoConfig
from grpo_engine.contract.telemetry import is_known
from grpo_engine.detectors.history import WATCHED, fit_slope
from grpo_engine.diagnostics import CONDITIONS, Detectors
from grpo_engine.guardrail import Guardrails, replay

Rows = list[dict[str, float]]
DEADBAND = {"rule": "deadband", "value": 0.02, "target": 0.02}


def job(**grpo: Any) -> GrpoConfig:
    return validate(GrpoConfig, {"grader": {"type": "math"}, **grpo})


def kl(value: float) -> dict[str, float]:
    return {"kl/ref/k3/mean": value}


def fired(rows: Rows, **grpo: Any) -> set[str]:
    detectors = Detectors(job(**grpo))
    return {s.detector for n, row in enumerate(rows, start=1) for s in detectors.observe(n, row) if s.kind == "fired"}


def line(count: int = 25, **slopes: float) -> Rows:
    """Metrics (double underscores for slashes) that move by a fixed amount each step from 1."""
    return [{name.replace("__", "/"): 1 + slope * n for name, slope in slopes.items()} for n in range(count)]


START = {"policy/entropy": 2.0, "completion/rep_ngram4": 0.01, "completion/distinct2": 0.9, "beta/applied": 0.02}
FLAT = {"reward/mean": 0.5, "beta/applied": 0.02, **kl(0.001)}
SUMMED = {"kl": {"aggregation": "seq_sum"}}

CASES: dict[str, tuple[Rows, Rows, dict[str, Any]]] = {
    "kl_out_of_control": ([kl(0.0), *[kl(0.11)] * 3], [kl(0.0), *[kl(0.11)] * 2, kl(0.09), *[kl(0.11)] * 2], {}),
    "target_too_small": ([{"beta/target": 0.0049}], [{"beta/target": 0.005, "beta/saturated": 1}], {"beta": DEADBAND}),
    "target_too_large": ([{"beta/target": 0.11}], [{"beta/target": 0.1}], {}),
    "beta_high": ([{"beta/applied": 0.1000001}], [{"beta/applied": 0.1}], {}),
    "beta_low": (
        [{"beta/applied": 0.0009, **kl(0.001 * n)} for n in range(25)],
        [{"beta/applied": 0.0009, **kl(0.001 * (n % 2))} for n in range(25)],
        {},
    ),
    "collapse": ([START, {**START, "policy/entropy": 0.3, **kl(0.05)}], [START, {**START, "policy/entropy": 0.3, **kl(0.03)}], {}),
    "length_collapse": (
        [{"completion/length_mean": 40.0}] * 5 + [{"completion/length_mean": 19.0}] * 3,
        [{"completion/length_mean": 40.0}] * 5 + [{"completion/length_mean": 21.0}] * 3,
        {},
    ),
    "blow_up": (
        [{**row, **kl(0.002 * n)} for n, row in enumerate(line(policy__entropy=0.1, completion__truncated_frac=0.1))],
        [{**row, **kl(0.0)} for row in line(policy__entropy=0.1, completion__truncated_frac=0.1)],
        {},
    ),
    "reward_hacking": (
        [{**row, **kl(0.001 * n)} for n, row in enumerate(line(reward__mean=0.1, completion__length_mean=1.0))],
        [{**row, **kl(0.001 * n)} for n, row in enumerate(line(reward__mean=0.1, completion__length_mean=0.0))],
        {},
    ),
    "stagnation": (
        [{**FLAT, **kl(0.0)}] + [{**FLAT, "beta/applied": 0.11}] * 20,
        [{**FLAT, **kl(0.0)}] + [{**FLAT, "beta/applied": 0.09}] * 20,
        {"diagnostics": {"beta_high": {"enabled": False}}},
    ),
    "oscillation": (
        [{"beta/action": action} for action in (1, 0, -1, 1, 0, 0, -1, 1)],
        [{"beta/action": action} for action in (1, 1, -1, -1, 1, 1, -1, -1)],
        {},
    ),
    "length_bias": (
        [{"kl/length_correlation": 0.9, "completion/length_mean": 50.0 - n} for n in range(25)],
        [{"kl/length_correlation": 0.7, "completion/length_mean": 50.0 - n} for n in range(25)],
        SUMMED,
    ),
    "ref_mismatch": ([kl(2e-4)], [kl(0.9e-4), kl(0.05)], {}),
    "estimator_unreliable": (
        [{**kl(0.01 * (n > 0)), "kl/ref/k3/se": 0.006, "kl/ref/k3/token_max": 1.0} for n in range(5)],
        [{**kl(0.01 * (n > 0)), "kl/ref/k3/se": 0.004, "kl/ref/k3/token_max": 9.0} for n in range(5)],
        {},
    ),
    "negative_kl": ([{"kl/ref/k1/mean": -4e-5, "kl/ref/k1/se": 1e-5}] * 3, [{"kl/ref/k1/mean": -2e-5, "kl/ref/k1/se": 1e-5}] * 3, {}),
}


@pytest.mark.parametrize("name", DETECTOR_NAMES)
def test_each_detector_fires_on_its_trouble_and_on_nothing_less(name: str) -> None:
    trouble, healthy, settings = CASES[name]
    assert fired(trouble, **settings) == {name}
    assert fired(healthy, **settings) == set()


@pytest.mark.parametrize("name", DETECTOR_NAMES)
def test_a_detector_that_is_off_is_silent(name: str) -> None:
    trouble, _, settings = CASES[name]
    off = {"diagnostics": {**settings.get("diagnostics", {}), name: {"enabled": False}}}
    assert fired(trouble, **{**settings, **off}) == set()


def test_every_detector_has_a_condition_and_watches_known_metrics() -> None:
    assert tuple(CONDITIONS) == DETECTOR_NAMES
    assert all(is_known(name) for name in WATCHED)


def test_further_signs() -> None:
    """The other ways to fire: repetition, distinct words, a pinned beta, one huge token, equal rewards, the KL gradient."""
    assert fired([START, {**START, "completion/rep_ngram4": 0.31, **kl(0.05)}]) == {"collapse"}
    assert fired([START, {**START, "completion/distinct2": 0.44, **kl(0.05)}]) == {"collapse"}
    pinned = [{"beta/target": 0.02, "beta/saturated": 1}] * 2
    assert fired(pinned, beta={**DEADBAND, "update_every": 1, "ema_decay": None}) == {"target_too_small"}
    assert fired(pinned * 10, beta=DEADBAND) == set()
    assert fired(pinned * 26, beta=DEADBAND) == {"target_too_small"}
    huge = {**kl(0.0), "kl/ref/k3/se": 0.0, "kl/ref/k3/token_max": 10.1}
    assert fired([huge] * 3) == {"estimator_unreliable"}
    assert fired([{**FLAT, **kl(0.0)}] + [{**FLAT, "groups/zero_std_frac": 0.9}] * 20) == {"stagnation"}
    heavy = {**FLAT, "grad_norm/kl": 2.0, "grad_norm/policy": 1.0}
    assert fired([{**heavy, **kl(0.0)}] + [heavy] * 20) == {"stagnation"}


def test_hacking_by_the_held_out_reward() -> None:
    def rows(held_out_per_eval: float) -> Rows:
        return [
            {**row, **({"eval/reward_mean": 0.5 + held_out_per_eval * n} if n % 4 == 0 else {})}
            for n, row in enumerate(line(reward__mean=0.1))
        ]

    assert fired(rows(-0.01)) == {"reward_hacking"}
    assert fired(rows(0.01)) == set()


def test_a_target_per_sequence_is_compared_per_token() -> None:
    beta = {"rule": "ziegler", "value": 0.1, "target": 6.0}
    assert fired([{"beta/target": 6.0, "completion/length_mean": 24.0}], beta=beta) == {"target_too_large"}
    assert fired([{"beta/target": 6.0, "completion/length_mean": 240.0}], beta=beta) == set()


def test_a_reference_of_another_origin_may_start_apart() -> None:
    assert fired([kl(0.05)], reference={"source": "checkpoint:abc"}) == set()


def test_firing_and_clearing_have_their_own_counts() -> None:
    """KL 0.11 three times fires; 0.09 lies between 0.08 and 0.1 and counts for neither; below 0.08 three times clears."""
    detectors = Detectors(job())
    series = [0.0, 0.11, 0.11, 0.11, 0.09, 0.09, 0.09, 0.07, 0.09, 0.07, 0.07, 0.07, 0.11, 0.11, 0.11]
    signals = [(s.step, s.kind, s.since) for n, value in enumerate(series, start=1) for s in detectors.observe(n, kl(value))]
    assert signals == [(4, "fired", 2), (12, "cleared", 2), (15, "fired", 13)]


def test_missing_metrics_decide_nothing() -> None:
    detectors = Detectors(job())
    rows: list[dict[str, Any]] = [kl(0.0), kl(0.2), kl(0.2), {}, {"kl/ref/k3/mean": {"value": None, "nonfinite": "nan"}}, kl(0.2)]
    assert [s.step for n, row in enumerate(rows, start=1) for s in detectors.observe(n, row)] == [6]


@given(cut=st.integers(1, 59))
def test_a_resume_continues_the_counts(cut: int) -> None:
    rows = [
        {**kl(0.003 * (n % 50)), "reward/mean": n / 60, "completion/length_mean": 20.0 + n, "beta/action": (-1) ** n} for n in range(60)
    ]
    rows[0] |= kl(0.0)
    whole, first, second = (Detectors(job()) for _ in range(3))
    expected = [s for n, row in enumerate(rows, start=1) for s in whole.observe(n, row)]
    got = [s for n, row in enumerate(rows[:cut], start=1) for s in first.observe(n, row)]
    second.load(json.loads(json.dumps(first.state())))
    got += [s for n, row in enumerate(rows[cut:], start=cut + 1) for s in second.observe(n, row)]
    assert got == expected
    assert expected
    with pytest.raises(ValueError, match="version"):
        second.load({"version": 0})


def test_a_slope_knows_its_error() -> None:
    noisy = fit_slope([0.0, 1.2, 1.8, 3.1, 3.9])
    assert noisy is not None
    assert noisy.per_step == pytest.approx(0.97)
    assert noisy.se == pytest.approx((0.091 / 3 / 10) ** 0.5, abs=1e-9)
    assert noisy.is_rising(2.0)
    assert not noisy.is_falling(2.0)
    flat = fit_slope([0.1] * 10)
    assert flat is not None
    assert not flat.is_rising(2.0)
    assert fit_slope([1.0, 2.0]) is None
    assert fit_slope([1.0, float("nan"), 2.0]) is None


def guard(action: Any, **settings: Any) -> Guardrail:
    return validate(Guardrail, {"detector": "kl_out_of_control", "action": action, **settings})


def acts(rule: Guardrail, active: list[bool]) -> list[int]:
    guardrails = Guardrails([rule])
    return [n for n, on in enumerate(active, start=1) if guardrails.observe({"kl_out_of_control": 1} if on else {})]


class TestGuardrails:
    def test_it_acts_once_until_the_detector_clears(self) -> None:
        assert acts(guard("pause"), [False, True, True, True, False, True]) == [2, 6]

    def test_consecutive_steps(self) -> None:
        assert acts(guard("stop", consecutive=3), [True, True, False, True, True, True, True]) == [6]

    def test_steps_within_a_window(self) -> None:
        assert acts(guard("stop", consecutive=3, window=4), [True, True, False, False, True, True]) == []
        assert acts(guard("stop", consecutive=3, window=5), [True, True, False, True, True]) == [4]

    def test_rollbacks_end_in_a_stop(self) -> None:
        guardrails = Guardrails([guard({"type": "rollback", "beta_factor": 2.0, "max_count": 2})])
        kinds = []
        for _ in range(3):
            kinds += [act.action.type for act in guardrails.observe({"kl_out_of_control": 7})]
            guardrails.observe({})
        assert kinds == ["rollback", "rollback", "stop"]

    def test_the_act_says_where_the_trouble_began(self) -> None:
        act = Guardrails([guard({"type": "set_beta", "value": 0.1})]).observe({"kl_out_of_control": 7})[0]
        assert (act.since, act.count, act.message) == (7, 1, "kl_out_of_control is on since step 7: set beta to 0.1")

    def test_counts_survive_a_resume(self) -> None:
        rule = guard({"type": "rollback", "reseed": True, "max_count": 1})
        first, second = Guardrails([rule]), Guardrails([rule])
        first.observe({"kl_out_of_control": 2})
        second.load(json.loads(json.dumps(first.state())))
        assert second.observe({"kl_out_of_control": 2}) == []
        second.observe({})
        assert [act.action.type for act in second.observe({"kl_out_of_control": 9})] == ["stop"]
        with pytest.raises(ValueError, match="these guardrails"):
            second.load([])

    @pytest.mark.parametrize(
        ("raw", "words"),
        [
            ({"detector": "nothing", "action": "stop"}, "detector"),
            ({"detector": "collapse", "action": "explode"}, "action"),
            ({"detector": "collapse", "action": {"type": "rollback"}}, "must change something"),
            ({"detector": "collapse", "action": {"type": "rollback", "beta_factor": 1.0}}, "must change something"),
            ({"detector": "collapse", "action": "stop", "consecutive": 5, "window": 3}, "enlarge window"),
        ],
    )
    def test_what_could_never_work_is_refused(self, raw: dict[str, Any], words: str) -> None:
        with pytest.raises(InvalidRequest, match=words):
            validate(Guardrail, raw)


def test_a_finished_run_can_be_asked_what_a_rule_would_have_done() -> None:
    grpo = job(guardrails=[{"detector": "kl_out_of_control", "action": "pause", "consecutive": 2}])
    rows = [(n, kl(0.0005 * n if n > 1 else 0.0)) for n in range(1, 221)] + [(n, kl(0.01)) for n in range(221, 230)]
    story = [(event.step, event.kind, event.name) for event in replay(rows, grpo)]
    assert story == [
        (203, "fired", "kl_out_of_control"),
        (204, "acted", "kl_out_of_control"),
        (223, "cleared", "kl_out_of_control"),
    ]
    assert "would have acted at step 204" in replay(rows, grpo)[1].message
