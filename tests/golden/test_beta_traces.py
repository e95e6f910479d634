"""Beta series of every rule, to the last digit, from the same KL series. beta0 = target = 0.02."""

from __future__ import annotations

import json
import math

import pytest

from grpo_engine.beta import AnyBeta, BetaRule, BetaUpdate
from grpo_engine.contract.beta import DeadbandBeta, FixedBeta, PiecewiseSchedule, PpoBeta, RampSchedule, ScheduleBeta, ZieglerBeta
from grpo_engine.contract.error import InvalidRequest
from grpo_engine.contract.intake import validate
from tests.golden.plant import TRACE_KL, closed_loop, trace, unchecked_deadband

DEADBAND = [0.016666666667, 0.016666666667, 0.02, 0.024, 0.0288, 0.03456, 0.03456, 0.0288, 0.024, 0.024]
PPO = [0.01, 0.01, 0.01, 0.02, 0.04, 0.04, 0.04, 0.02, 0.01, 0.01]
ZIEGLER = [0.0196, 0.019404, 0.01979208, 0.0201879216, 0.020591680032]
ZIEGLER += [0.020797596832, 0.020485632880, 0.020075920222, 0.019674401818, 0.019674401818]
ZIEGLER_64 = [0.0199744, 0.019961616384, 0.019987167253, 0.020012750827, 0.020038367148]
ZIEGLER_64 += [0.020051191703, 0.020031942559, 0.020006301673, 0.019980693606, 0.019980693606]


def recipe(**settings: object) -> DeadbandBeta:
    plain = {"rule": "deadband", "value": 0.02, "target": 0.02, "update_every": 1, "ema_decay": None, "arming": False, **settings}
    return validate(DeadbandBeta, plain)


def ziegler(**settings: object) -> ZieglerBeta:
    return validate(ZieglerBeta, {"rule": "ziegler", "value": 0.02, "target": 0.02, "unit": "token", "arming": False, **settings})


def run(cfg: AnyBeta, episodes: int = 0) -> list[BetaUpdate]:
    subject = BetaRule.create(cfg, 100)
    return [subject.update(step, kl, kl, episodes) for step, kl in enumerate(TRACE_KL, start=1)]


def test_deadband_without_smoothing() -> None:
    updates = run(recipe())
    assert [update.new for update in updates] == pytest.approx(DEADBAND, abs=1e-12)
    assert [update.action for update in updates] == [-1, 0, 1, 1, 1, 1, 0, -1, -1, 0]
    assert [update.old for update in updates] == pytest.approx([0.02, *DEADBAND[:-1]], abs=1e-12)


def test_deadband_with_a_long_ema_falls_while_kl_is_high() -> None:
    """Decay 0.9 with a decision each step, which validation refuses: beta falls 42 % while KL is 2.5 times its target."""
    updates = run(unchecked_deadband(ema_decay=0.9))
    assert [update.new for update in updates] == pytest.approx([0.016666666667, 0.013888888889, *[0.011574074074] * 8], abs=1e-12)
    ema = [0.01, 0.0108, 0.01272, 0.016448, 0.0188032, 0.01912288, 0.018910592, 0.0182195328, 0.01689757952, 0.017207821568]
    assert [update.ema for update in updates] == pytest.approx(ema, abs=1e-12)


def test_deadband_with_a_short_ema() -> None:
    updates = run(unchecked_deadband(ema_decay=0.5))
    expected = [0.016666666667, 0.013888888889, 0.016666666667, 0.02, 0.024, 0.0288, 0.03456, 0.03456, 0.0288, 0.024]
    assert [update.new for update in updates] == pytest.approx(expected, abs=1e-12)
    ema = [0.01, 0.014, 0.022, 0.036, 0.038, 0.03, 0.0235, 0.01775, 0.011375, 0.0156875]
    assert [update.ema for update in updates] == pytest.approx(ema, abs=1e-12)


def test_ppo() -> None:
    """0.030 is exactly 1.5 times the target: strictly greater is needed, so beta holds."""
    cfg = validate(PpoBeta, {"rule": "ppo", "value": 0.02, "target": 0.02, "arming": False})
    assert trace(BetaRule.create(cfg, 100), TRACE_KL) == pytest.approx(PPO, abs=1e-12)


@pytest.mark.parametrize(("episodes", "expected"), [(1000, ZIEGLER), (64, ZIEGLER_64)])
def test_ziegler(episodes: int, expected: list[float]) -> None:
    """1000 of 10000 episodes is the paper's K = 0.1."""
    assert trace(BetaRule.create(ziegler(), 100), TRACE_KL, episodes) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(("cfg", "episodes", "expected"), [("recipe", 0, 3.80), ("ziegler", 1000, 35.0), ("ziegler", 64, 541.9)])
def test_updates_until_beta_has_doubled(cfg: str, episodes: int, expected: float) -> None:
    subject = BetaRule.create(recipe(max=1.0) if cfg == "recipe" else ziegler(), 10)
    factor = subject.update(1, 1.0, 1.0, episodes).new / 0.02
    assert math.log(2) / math.log(factor) == pytest.approx(expected, abs=0.05)


def test_a_per_token_kl_against_a_target_per_sequence_makes_the_penalty_vanish() -> None:
    """The unit trap of two peers: KL 0.02 per token, target 0.1, 1024 episodes: beta halves every 33.5 steps."""
    subject = BetaRule.create(ziegler(target=0.1), 10)
    factor = subject.update(1, 0.02, 0.02, 1024).new / 0.02
    assert factor == pytest.approx(0.97952, abs=1e-9)
    assert math.log(0.5) / math.log(factor) == pytest.approx(33.5, abs=0.05)


def test_beta_zero_is_refused_because_it_would_never_change() -> None:
    with pytest.raises(InvalidRequest, match="never be changed"):
        recipe(value=0)


class TestClosedLoop:
    """The plant KL = c / beta^g settles or cycles; an EMA is a delay, and so is a slow policy."""

    def settles(self, gain: float, start: float) -> bool:
        betas, _ = closed_loop(unchecked_deadband(ema_decay=None), 300, gain=gain, start=start)
        return len(set(betas[-20:])) == 1

    @pytest.mark.parametrize(("gain", "share"), [(1.0, 0.0), (1.2, 0.0), (1.3, 0.067), (1.5, 0.183), (2.0, 0.40)])
    def test_the_band_is_wide_enough_only_up_to_a_gain(self, gain: float, share: float) -> None:
        """Guaranteed below ln 1.25 / ln 1.2 = 1.2239. The share of cycling starts depends on the set of starts: within 0.1."""
        starts = [0.002 * 1.12**index for index in range(60)]
        cycling = sum(not self.settles(gain, start) for start in starts) / 60
        assert cycling == pytest.approx(share, abs=0.1)
        assert (cycling == 0) == (gain < math.log(1.25) / math.log(1.2))

    @pytest.mark.parametrize(
        ("ema_decay", "update_every", "peak"),
        [
            (None, 1, 0.0597),
            (0.5, 1, 0.0717),
            (0.8, 1, 0.1238),
            (0.9, 1, 0.3081),
            (0.9, 10, 0.0597),
            (0.95, 10, 0.0717),
            (0.98, 50, 0.0597),
        ],
    )
    def test_an_ema_with_frequent_decisions_overshoots(self, ema_decay: float | None, update_every: int, peak: float) -> None:
        betas, _ = closed_loop(unchecked_deadband(ema_decay=ema_decay, update_every=update_every), 2000)
        assert max(betas) == pytest.approx(peak, rel=0.003)

    def test_with_ema_0_9_the_kl_dips_into_the_stall_zone(self) -> None:
        _, readings = closed_loop(unchecked_deadband(ema_decay=0.9), 200)
        assert min(readings) == pytest.approx(0.0032, abs=1e-4)

    @pytest.mark.parametrize(("update_every", "peak"), [(1, 1.59), (10, 0.0717), (50, 0.0597)])
    def test_a_lagging_policy_needs_rare_decisions(self, update_every: int, peak: float) -> None:
        betas, _ = closed_loop(unchecked_deadband(ema_decay=None, update_every=update_every), 2000, lag=20)
        assert max(betas) == pytest.approx(peak, rel=0.01)


class TestBounds:
    def test_beta_reaches_its_max_in_the_predicted_number_of_updates_and_stays(self) -> None:
        subject = BetaRule.create(recipe(target=0.004, max=0.5), 100)
        needed = math.ceil(math.log(0.5 / 0.02) / math.log(1.2))
        updates = [subject.update(step, 0.006, 0.006, 0) for step in range(1, needed + 4)]
        assert updates[needed - 2].new < 0.5
        assert [update.new for update in updates[needed - 1 :]] == pytest.approx([0.5] * 4)
        assert [update.saturated for update in updates[needed - 1 :]] == [1] * 4
        assert subject.state()["saturated_since"] == needed

    def test_there_is_no_windup_beyond_a_bound(self) -> None:
        """However long beta was pinned, one decision in the other direction moves it."""
        subject = BetaRule.create(recipe(max=0.03), 100)
        for step in range(1, 30):
            subject.update(step, 1.0, 1.0, 0)
        assert subject.update(30, 0.001, 0.001, 0).new == pytest.approx(0.03 / 1.2)

    def test_saturation_ends_when_beta_leaves_the_bound(self) -> None:
        subject = BetaRule.create(recipe(min=0.015), 100)
        assert [subject.update(step, kl, kl, 0).saturated for step, kl in enumerate([0.001] * 3 + [0.018, 0.05], start=1)] == [
            0,
            -1,
            -1,
            -1,
            0,
        ]
        assert subject.state()["saturated_since"] is None


class TestArming:
    def test_no_decrease_before_kl_has_reached_the_band(self) -> None:
        """KL starts at 0: unarmed, the recipe walks from 0.04 to its floor of 0.00646 in ten updates; armed, it waits."""
        rising = [0.0005 * step for step in range(1, 11)]
        assert trace(BetaRule.create(recipe(value=0.04), 100), rising)[-1] == pytest.approx(0.04 / 1.2**10)
        assert trace(BetaRule.create(recipe(value=0.04, arming=True), 100), rising) == pytest.approx([0.04] * 10)

    def test_once_armed_it_stays_armed(self) -> None:
        betas = trace(BetaRule.create(recipe(arming=True), 100), [0.001, 0.016, 0.001, 0.001])
        assert betas == pytest.approx([0.02, 0.02, 0.02 / 1.2, 0.02 / 1.44])

    def test_increases_are_never_held_back(self) -> None:
        assert trace(BetaRule.create(recipe(arming=True), 100), [0.03]) == pytest.approx([0.024])


class TestSchedule:
    ramp = RampSchedule(type="linear", start=0.005, end=0.02, hold_ratio=0.1)

    def test_held_then_raised_to_the_last_step(self) -> None:
        subject = BetaRule.create(ScheduleBeta(rule="schedule", schedule=self.ramp), 101)
        assert [subject.value(step) for step in (1, 6, 11, 56, 101)] == pytest.approx([0.005, 0.005, 0.005, 0.0125, 0.02], abs=1e-15)

    def test_cosine_starts_and_ends_flat(self) -> None:
        cosine = self.ramp.model_copy(update={"type": "cosine"})
        subject = BetaRule.create(ScheduleBeta(rule="schedule", schedule=cosine), 101)
        assert subject.value(56) == pytest.approx(0.0125)
        assert subject.value(12) - 0.005 < 1e-5
        assert subject.value(101) == 0.02

    def test_piecewise(self) -> None:
        points = PiecewiseSchedule(type="piecewise", points=[[0, 0.1], [0.5, 0.3], [0.75, 0.1]])
        subject = BetaRule.create(ScheduleBeta(rule="schedule", schedule=points), 101)
        assert [subject.value(step) for step in (1, 26, 51, 76, 101)] == pytest.approx([0.1, 0.2, 0.3, 0.1, 0.1])
        steps = BetaRule.create(ScheduleBeta(rule="schedule", schedule=points.model_copy(update={"interpolation": "step"})), 101)
        assert [steps.value(step) for step in (1, 26, 51, 76, 101)] == pytest.approx([0.1, 0.1, 0.3, 0.1, 0.1])

    def test_a_rule_multiplies_the_scheduled_base(self) -> None:
        subject = BetaRule.create(recipe(value=None, schedule=self.ramp.model_dump()), 101)
        for step in range(1, 56):
            subject.update(step, 0.03 if step == 20 else 0.018, 0.0, 0)
        assert subject.value(56) == pytest.approx(0.0125 * 1.2)
        assert subject.phase == "adaptive"


class TestCalibration:
    def calibrated(self, kl: list[float], **settings: object) -> BetaRule:
        calibration = {"rollouts": len(kl), "fixed_value": 0.03, **settings}
        subject = BetaRule.create(recipe(target=None, calibration=calibration), 100)
        for step, value in enumerate(kl, start=1):
            assert subject.phase == "calibration"
            assert subject.value(step) == 0.03
            subject.update(step, value, 99.0, 0)
        return subject

    def test_the_target_is_the_median_and_the_rule_acts_afterwards(self) -> None:
        subject = self.calibrated([0.01, 0.03, 0.05])
        assert subject.target == 0.03
        assert subject.phase == "adaptive"
        assert subject.value(4) == 0.02
        assert subject.update(4, 0.031, 0.0, 0).action == 1

    def test_discard_and_mean(self) -> None:
        assert self.calibrated([0.0, 0.0, 0.02, 0.04], discard=2, stat="mean").target == pytest.approx(0.03)

    def test_a_warm_up_at_zero_is_clamped_and_says_so(self) -> None:
        subject = BetaRule.create(recipe(target=None, calibration={"rollouts": 2}), 100)
        subject.update(1, 0.0, 0.0, 0)
        update = subject.update(2, 0.0, 0.0, 0)
        assert subject.target == 0.005
        assert "clamped from 0" in update.reason
        assert subject.state()["target_source"] == "calibration_clamped"

    def test_non_finite_samples_do_not_count(self) -> None:
        subject = BetaRule.create(recipe(target=None, calibration={"rollouts": 2}), 100)
        for step, kl in enumerate([0.01, math.nan, 0.03], start=1):
            subject.update(step, kl, kl, 0)
        assert subject.target == pytest.approx(0.02)
        assert subject.state()["nonfinite_skips"] == 1


class TestState:
    @pytest.mark.parametrize("cut", range(1, 10))
    def test_resuming_anywhere_continues_the_series(self, cut: int) -> None:
        cfg = unchecked_deadband(ema_decay=0.5, update_every=2, schedule=TestSchedule.ramp, value=None)
        whole = trace(BetaRule.create(cfg, 10), TRACE_KL)
        first = BetaRule.create(cfg, 10)
        trace(first, TRACE_KL[:cut])
        second = BetaRule.create(cfg, 10)
        second.load(json.loads(json.dumps(first.state())))
        rest = [second.update(step, TRACE_KL[step - 1], 0.0, 0).new for step in range(cut + 1, 11)]
        assert rest == whole[cut:]
        assert second.state() == {**second.state(), **{"schedule_step": 10}}

    def test_a_resume_inside_calibration_keeps_its_samples(self) -> None:
        cfg = recipe(target=None, calibration={"rollouts": 3})
        first = BetaRule.create(cfg, 100)
        trace(first, [0.01, 0.03])
        second = BetaRule.create(cfg, 100)
        second.load(json.loads(json.dumps(first.state())))
        second.update(3, 0.05, 0.05, 0)
        assert second.target == 0.03

    def test_the_state_has_every_documented_key(self) -> None:
        documented = (
            "version rule beta multiplier ema ema_count target target_source updates last_action last_kl steps_since_update "
            "saturated_since phase calibration_samples schedule_step nonfinite_skips ref_sha256 rng"
        )
        assert set(documented.split()) <= set(BetaRule.create(recipe(), 100).state())

    def test_a_state_of_another_rule_version_or_reference_is_refused(self) -> None:
        subject = BetaRule.create(recipe(), 100)
        subject.ref_sha256 = "aa"
        state = subject.state()
        for change in ({"rule": "ppo"}, {"version": 0}, {"ref_sha256": "bb"}):
            with pytest.raises(ValueError, match=r"belongs to|version|reference"):
                subject.load({**state, **change})
        with pytest.raises(ValueError, match="lacks ema"):
            subject.load({key: value for key, value in state.items() if key != "ema"})


class TestControl:
    def test_set_base_resets_the_multiplier_and_keeps_the_ema(self) -> None:
        subject = BetaRule.create(unchecked_deadband(ema_decay=0.5, max=1.0), 100)
        trace(subject, TRACE_KL[:4])
        ema = subject.state()["ema"]
        subject.set_base(0.1)
        assert subject.value(5) == 0.1
        assert subject.state()["multiplier"] == 1.0
        assert subject.state()["ema"] == ema
        assert subject.update(5, 0.09, 0.09, 0).new == pytest.approx(0.12)

    def test_values_a_rule_cannot_carry_are_refused(self) -> None:
        adaptive = BetaRule.create(recipe(), 100)
        for value in (0.0, 2.0, math.nan, -1.0):
            with pytest.raises(ValueError, match="beta"):
                adaptive.set_base(value)
        with pytest.raises(ValueError, match="above 0"):
            adaptive.set_target(0.0)
        with pytest.raises(ValueError, match="no target"):
            BetaRule.create(FixedBeta(value=0.1), 10).set_target(0.1)
        with pytest.raises(ValueError, match="above 0"):
            adaptive.scale(0.0)

    def test_set_target_ends_a_calibration(self) -> None:
        subject = BetaRule.create(recipe(target=None, calibration={"rollouts": 5}), 100)
        subject.set_target(0.01)
        assert subject.phase == "adaptive"
        assert subject.update(1, 0.02, 0.0, 0).action == 1

    def test_a_fixed_beta_can_be_set_to_anything_and_a_schedule_stops(self) -> None:
        fixed = BetaRule.create(FixedBeta(value=0.1), 10)
        fixed.set_base(0.0)
        assert fixed.value(2) == 0.0
        schedule = BetaRule.create(ScheduleBeta(rule="schedule", schedule=TestSchedule.ramp), 10)
        schedule.set_base(0.5)
        assert (schedule.value(9), schedule.phase) == (0.5, "fixed")

    def test_scale_composes_with_schedule_and_rule(self) -> None:
        subject = BetaRule.create(ScheduleBeta(rule="schedule", schedule=TestSchedule.ramp), 101)
        subject.scale(2.0)
        assert subject.value(101) == 0.04


def test_non_finite_kl_holds_and_counts() -> None:
    subject = BetaRule.create(unchecked_deadband(ema_decay=0.5), 100)
    trace(subject, TRACE_KL[:3])
    before = subject.state()
    for step, kl in ((4, math.nan), (5, math.inf)):
        update = subject.update(step, kl, kl, 0)
        assert (update.action, update.new) == (0, update.old)
    after = subject.state()
    changed = {key for key in before if before[key] != after[key]}
    assert changed == {"nonfinite_skips", "schedule_step", "last_action"}
    assert after["nonfinite_skips"] == 2


def test_one_update_per_rollout() -> None:
    subject = BetaRule.create(recipe(), 100)
    subject.update(1, 0.03, 0.03, 0)
    with pytest.raises(ValueError, match="one update per rollout"):
        subject.update(1, 0.03, 0.03, 0)
