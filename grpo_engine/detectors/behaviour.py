"""Detectors of what the policy does: collapse, length, hacking, stagnation.

Each takes the history, its thresholds and the job's traits, and returns a verdict, or None when the step lacks what it
needs (then neither firing nor clearing counts on).
"""

from __future__ import annotations

from grpo_engine.contract.diagnostics import BlowUp, Collapse, LengthCollapse, RewardHacking, Stagnation
from grpo_engine.detectors.history import History, fit_slope
from grpo_engine.detectors.verdict import JobTraits, Verdict

BASELINE_STEPS = 5
"""Steps whose mean length shrunken answers are held against."""


def collapse(history: History, cfg: Collapse, job: JobTraits) -> Verdict | None:
    """Repetition or lost entropy together with a high KL."""
    entropy, first_entropy = history.now("policy/entropy"), history.at_start("policy/entropy")
    repetition = history.now("completion/rep_ngram4")
    distinct, first_distinct = history.now("completion/distinct2"), history.at_start("completion/distinct2")
    signs = []
    if entropy is not None and first_entropy is not None and entropy < cfg.entropy_ratio * first_entropy:
        signs.append(f"entropy {entropy:.3g} of {first_entropy:.3g} at the start")
    if repetition is not None and repetition > cfg.rep_ngram4:
        signs.append(f"{repetition:.0%} repeated 4-grams")
    if distinct is not None and first_distinct is not None and distinct < cfg.distinct2_ratio * first_distinct:
        signs.append(f"distinct 2-grams {distinct:.3g} of {first_distinct:.3g} at the start")
    if entropy is None and repetition is None and distinct is None:
        return None
    kl = history.kl()
    target = history.target_per_token(job.unit)
    high = cfg.kl if target is None else cfg.target_ratio * target
    found = ", ".join(signs) or "no sign"
    if kl is None:
        return Verdict.of(len(signs) >= 2, len(signs), 2, f"the policy is collapsing: {found}; stop, or train with beta above 0")
    message = f"the policy is collapsing at {kl:.3g} nats per token: {found}; roll back and raise beta or lower the learning rate"
    return Verdict.of(bool(signs) and kl > high, kl, high, message)


def length_collapse(history: History, cfg: LengthCollapse, _job: JobTraits) -> Verdict | None:
    """Completions much shorter than in the first steps."""
    length, first = history.now("completion/length_mean"), history.at_start("completion/length_mean", cfg.baseline_steps)
    if length is None or not first:
        return None
    ratio = length / first
    message = f"completions have {length:.1f} tokens, {ratio:.0%} of the start: the reward or a summed penalty favours short answers"
    return Verdict.of(ratio < cfg.ratio, ratio, cfg.ratio, message)


def blow_up(history: History, cfg: BlowUp, _job: JobTraits) -> Verdict | None:
    """Entropy, KL and truncation rise together."""
    slopes = (
        history.slope("policy/entropy", cfg.window),
        history.kl_slope(cfg.window),
        history.slope("completion/truncated_frac", cfg.window),
    )
    rising = sum(1 for slope in slopes if slope is not None and slope.is_rising(cfg.standard_errors))
    if any(slope is None for slope in slopes):
        return None
    message = "entropy, KL and truncated completions rise together: the policy is dissolving; lower the learning rate or raise beta"
    return Verdict.of(rising == len(slopes), rising, len(slopes), message)


def reward_hacking(history: History, cfg: RewardHacking, _job: JobTraits) -> Verdict | None:
    """The reward improves and what it stands for does not. A KL penalty alone does not prevent this."""
    reward = history.slope("reward/mean", cfg.window)
    if reward is None:
        return None
    is_rising = reward.is_rising(cfg.standard_errors)
    held_out = fit_slope(history.evaluations[-cfg.eval_points :]) if len(history.evaluations) >= cfg.eval_points else None
    if held_out is not None:
        message = "the training reward rises while the held-out reward falls: the policy games the grader; stop at the best checkpoint"
        if is_rising and held_out.is_falling(cfg.standard_errors):
            return Verdict.of(True, reward.per_step, cfg.standard_errors * reward.se, message)
    kl = history.kl_slope(cfg.window)
    signs = [
        f"{word} rises"
        for word, name in (("length", "completion/length_mean"), ("repetition", "completion/rep_ngram4"))
        if (slope := history.slope(name, cfg.window)) is not None and slope.is_rising(cfg.standard_errors)
    ]
    length, first = history.now("completion/length_mean"), history.at_start("completion/length_mean", BASELINE_STEPS)
    if length is not None and first and length < cfg.shrunk_ratio * first:
        signs.append(f"answers shrank to {length / first:.0%}")
    is_on = is_rising and bool(signs) and kl is not None and kl.is_rising(cfg.standard_errors)
    message = f"reward and KL rise and {' and '.join(signs) or 'length holds'}: read some completions before you trust the reward"
    return Verdict.of(is_on, reward.per_step, cfg.standard_errors * reward.se, message)


def stagnation(history: History, cfg: Stagnation, job: JobTraits) -> Verdict | None:
    """Nothing moves, and the penalty or equal rewards explain it."""
    reward, kl = history.slope("reward/mean", cfg.window), history.kl()
    if reward is None or kl is None:
        return None
    is_flat = not reward.is_rising(cfg.standard_errors) and not reward.is_falling(cfg.standard_errors)
    target = history.target_per_token(job.unit)
    low = cfg.kl if target is None else cfg.target_ratio * target
    causes = []
    beta, first_beta = history.now("beta/applied"), history.at_start("beta/applied")
    if beta and first_beta and beta > cfg.beta_ratio * first_beta:
        causes.append(f"beta is {beta / first_beta:.1f} times its start: lower it")
    kl_norm, policy_norm = history.now("grad_norm/kl"), history.now("grad_norm/policy")
    if kl_norm is not None and policy_norm is not None and kl_norm > cfg.grad_ratio * policy_norm:
        causes.append("the penalty's gradient outweighs the reward's: lower beta")
    equal = history.now("groups/zero_std_frac")
    if equal is not None and equal > cfg.zero_std_frac:
        causes.append(f"{equal:.0%} of the groups have equal rewards: use harder or easier prompts")
    message = f"the reward is flat and KL stays at {kl:.3g} nats per token; {'; '.join(causes) or 'no cause found'}"
    return Verdict.of(is_flat and kl < low and bool(causes), kl, low, message)
