"""Detectors of the penalty itself: KL, beta, target, estimator, reference.

Each takes the history, its thresholds and the job's traits, and returns a verdict, or None when the step lacks what it
needs (then neither firing nor clearing counts on).
"""

from __future__ import annotations

import itertools

from grpo_engine.contract.diagnostics import (
    BetaHigh,
    BetaLow,
    EstimatorUnreliable,
    KlOutOfControl,
    LengthBias,
    NegativeKl,
    Oscillation,
    RefMismatch,
    TargetTooLarge,
    TargetTooSmall,
)
from grpo_engine.detectors.history import KL_PREFERENCE, History
from grpo_engine.detectors.verdict import JobTraits, Verdict


def kl_out_of_control(history: History, cfg: KlOutOfControl, _job: JobTraits) -> Verdict | None:
    """kl/ref above a fixed number of nats per token."""
    kl = history.kl()
    if kl is None:
        return None
    message = f"KL to the reference is {kl:.4g} nats per token; raise beta, lower the learning rate, or roll back"
    return Verdict(kl > cfg.kl, kl < cfg.kl * cfg.clear_ratio, kl, cfg.kl, message)


def target_too_small(history: History, cfg: TargetTooSmall, job: JobTraits) -> Verdict | None:
    """A target under which a multiplicative rule raises beta without end, or beta already pinned at its max."""
    target = history.target_per_token(job.unit)
    if target is None:
        return None
    if target < cfg.target:
        return Verdict.of(True, target, cfg.target, f"target {target:.4g} nats per token cannot be held; choose at least {cfg.target:g}")
    needed = (cfg.saturated_updates - 1) * job.update_every + 1
    pinned = sum(1 for _ in itertools.takewhile(lambda row: row.get("beta/saturated") == 1, reversed(history.rows)))
    message = f"beta is at its max and KL still above the target {target:.4g}: raise the target or beta's max"
    return Verdict.of(pinned >= min(needed, history.window), pinned, needed, message)


def target_too_large(history: History, cfg: TargetTooLarge, job: JobTraits) -> Verdict | None:
    """A target that itself is out of control."""
    target = history.target_per_token(job.unit)
    if target is None:
        return None
    return Verdict.of(
        target > cfg.target, target, cfg.target, f"target {target:.4g} nats per token allows the policy to leave the reference"
    )


def beta_high(history: History, cfg: BetaHigh, _job: JobTraits) -> Verdict | None:
    """A coefficient that may keep the policy where it is."""
    beta = history.now("beta/applied")
    if beta is None:
        return None
    return Verdict.of(
        beta > cfg.beta, beta, cfg.beta, f"beta {beta:.4g} is high: learning may be slow; judge it by the size of the rewards"
    )


def beta_low(history: History, cfg: BetaLow, _job: JobTraits) -> Verdict | None:
    """A weak penalty while KL rises significantly. Beta 0 is a choice and never fires."""
    beta, slope = history.now("beta/applied"), history.kl_slope(cfg.window)
    if beta is None or slope is None:
        return None
    message = (
        f"beta {beta:.4g} is low and KL grows by {slope.per_step:.3g} nats per token and step; raise beta or watch the held-out reward"
    )
    return Verdict.of(0 < beta < cfg.beta and slope.is_rising(2.0), beta, cfg.beta, message)


def oscillation(history: History, cfg: Oscillation, _job: JobTraits) -> Verdict | None:
    """Raises and lowerings that alternate."""
    if history.now("beta/action") is None:
        return None
    recent = history.actions[-cfg.decisions :]
    changes = sum(1 for left, right in itertools.pairwise(recent) if left != right)
    message = f"beta changed direction {changes} times in its last {len(recent)} moves; widen the band, or raise update_every"
    return Verdict.of(changes >= cfg.sign_changes, changes, cfg.sign_changes, message)


def length_bias(history: History, cfg: LengthBias, job: JobTraits) -> Verdict | None:
    """Summed KL makes length costly, and length falls."""
    correlation, slope = history.now("kl/length_correlation"), history.slope("completion/length_mean", cfg.window)
    if not job.sums_kl_over_tokens or correlation is None or slope is None:
        return None
    message = f"completions pay KL by length (correlation {correlation:.2f}) and get shorter; set kl.aggregation to seq_mean_token_mean"
    is_on = correlation > cfg.correlation and slope.is_falling(cfg.standard_errors)
    return Verdict.of(is_on, correlation, cfg.correlation, message)


def ref_mismatch(history: History, cfg: RefMismatch, job: JobTraits) -> Verdict | None:
    """Step 1 only: policy and reference are the same weights, so every estimate must be 0."""
    if history.step != 1 or not job.starts_at_reference:
        return None
    values = [abs(value) for name in KL_PREFERENCE if (value := history.now(f"kl/ref/{name}/mean")) is not None]
    if not values:
        return None
    message = f"KL at step 1 is {max(values):.3g} instead of 0: policy and reference differ in weights, dropout, temperature or precision"
    return Verdict.of(max(values) > cfg.kl, max(values), cfg.kl, message)


def estimator_unreliable(history: History, cfg: EstimatorUnreliable, _job: JobTraits) -> Verdict | None:
    """k3's weight exp(x) is carried by a few tokens far from the reference."""
    mean, se, largest = (history.now(f"kl/ref/k3/{name}") for name in ("mean", "se", "token_max"))
    if mean is None or se is None or largest is None:
        return None
    if largest > cfg.token_max:
        return Verdict.of(
            True, largest, cfg.token_max, f"one token carries {largest:.3g} nats of k3; read k1, or set kl.estimator to exact"
        )
    ratio = se / mean if mean > cfg.min_mean else 0.0
    message = f"the standard error of k3 is {ratio:.2f} of its mean; read k1, or set kl.estimator to exact"
    return Verdict.of(ratio > cfg.se_ratio, ratio, cfg.se_ratio, message)


def negative_kl(history: History, cfg: NegativeKl, _job: JobTraits) -> Verdict | None:
    """A KL is never negative; single estimates of k1 are, their mean is not beyond chance."""
    mean, se = history.now("kl/ref/k1/mean"), history.now("kl/ref/k1/se")
    if mean is None or se is None:
        return None
    message = f"mean k1 is {mean:.3g}, below 0 beyond chance: the tokens come from another policy (top-p, temperature, stale weights)"
    return Verdict.of(mean < -cfg.standard_errors * se and mean < 0, mean, -cfg.standard_errors * se, message)
