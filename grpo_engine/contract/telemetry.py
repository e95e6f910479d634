"""Telemetry: every metric a step can report, with its unit and direction.

Names are `kl/<ref|old|sampler>/<k1|k2|k3|abs|exact>/<mean|se|p50|p95|max|token_max>` in nats per completion token,
`kl_per_sequence/...` when summed over a completion. `mean`, `se` and `token_max` are over tokens; `p50`, `p95` and
`max` are over completions of their own token means. There is never a bare `kl`.
"""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from grpo_engine.contract.base import PositiveInt, Strict, broken_rule

REFERENCE_REQUESTS = ("exact_kl", "gradient_split_every", "kl_details_every", "rollouts_reference_every")
"""Settings of `TelemetryConfig` that measure KL or ask the reference, so that the job must hold one."""

Direction = Literal["higher_is_better", "lower_is_better", "neutral"]

KL_PAIRS = ("ref", "old", "sampler")
KL_ESTIMATORS = ("k1", "k2", "k3", "abs", "exact")
KL_STATISTICS = ("mean", "se", "p50", "p95", "max", "token_max")


class TelemetryConfig(Strict):
    """Measurements beyond those of every step. None of them changes the training."""

    exact_kl: bool = False
    """Measure `kl/ref/exact` (the sum over the vocabulary) at every step, whatever the estimator in the loss."""
    gradient_split_every: PositiveInt | None = None
    """Every n steps differentiate the policy term and the KL term apart: `grad_norm/policy`, `grad_norm/kl` and
    `grad_cosine/policy_kl`. Costs one more forward and a copy of the gradients at those steps."""
    kl_details_every: PositiveInt | None = None
    """Every n steps `step.completed` carries `data.kl`: KL by position, and the tokens and prompts where it is largest."""
    rollouts_every: PositiveInt | None = 1
    """Every n steps keep the sampled completions with rewards, advantages and per-token KL; null keeps none."""
    rollouts_keep: PositiveInt = 200
    """Steps of rollouts kept, the newest; older ones are deleted."""
    rollouts_redact: bool = False
    """Keep lengths, rewards and KL, and no prompt, completion or token."""
    rollouts_reference_every: PositiveInt | None = None
    """Every n steps, of those whose completions are kept, the reference answers the same prompts with the same random draws;
    null = never. Each completion then has its counterpart beside it. Such a step samples twice."""

    @model_validator(mode="after")
    def _the_references_answers_can_be_kept(self) -> TelemetryConfig:
        if self.rollouts_reference_every is None:
            return self
        if self.rollouts_every is None:
            words = "the reference's answers are kept beside the completions, and none are; set rollouts_every, or remove it"
            raise broken_rule("rollouts_reference_every", words)
        if self.rollouts_redact:
            words = "the reference's answers are text, and rollouts_redact keeps no text; remove one of the two"
            raise broken_rule("rollouts_reference_every", words)
        return self


class MetricDescriptor(Strict):
    """What a metric name means."""

    name: str
    unit: str
    direction: Direction
    description: str


def _kl_descriptors() -> list[MetricDescriptor]:
    pairs = {"ref": "the reference", "old": "the policy before this update", "sampler": "the sampling distribution"}
    rows = [
        MetricDescriptor(
            name=f"kl/{pair}/{estimator}/{statistic}",
            unit="nats/token",
            direction="neutral",
            description=f"{statistic} of the {estimator} estimate of the KL between the policy and {pairs[pair]}",
        )
        for pair in KL_PAIRS
        for estimator in KL_ESTIMATORS
        for statistic in KL_STATISTICS
    ]
    rows += [
        MetricDescriptor(
            name=f"kl_per_sequence/ref/{estimator}/mean",
            unit="nats/completion",
            direction="neutral",
            description=f"mean over completions of the summed {estimator} estimate of the KL to the reference",
        )
        for estimator in KL_ESTIMATORS
    ]
    return rows


_OTHERS: list[tuple[str, str, Direction, str]] = [
    ("kl/loss_term", "nats/token", "neutral", "the KL term as it enters the loss, before beta"),
    ("kl/clip_frac", "fraction", "lower_is_better", "share of tokens whose log-ratio or value was clipped"),
    ("kl/length_correlation", "1", "neutral", "correlation over completions between length and summed KL to the reference"),
    ("beta/applied", "1", "neutral", "beta used in this step's loss"),
    ("beta/next", "1", "neutral", "beta of the next step"),
    ("beta/action", "sign", "neutral", "-1 lowered, 0 held, 1 raised"),
    ("beta/saturated", "sign", "neutral", "1 at its max, -1 at its min while the rule wants to go on, else 0"),
    ("beta/ema", "nats", "neutral", "smoothed KL the rule compares with its target"),
    ("beta/target", "nats", "neutral", "target KL of the rule"),
    ("loss/policy", "1", "neutral", "policy-gradient term"),
    ("loss/kl", "1", "neutral", "beta times kl/loss_term"),
    ("loss/total", "1", "neutral", "what is differentiated: loss/policy + loss/kl"),
    ("grad_norm/total", "1", "neutral", "global gradient norm before clipping"),
    ("grad_norm/policy", "1", "neutral", "gradient norm of the policy term alone"),
    ("grad_norm/kl", "1", "neutral", "gradient norm of the KL term alone"),
    ("grad_cosine/policy_kl", "1", "neutral", "cosine between the two gradients"),
    ("optimizer/learning_rate", "1", "neutral", "learning rate of this step"),
    ("reward/mean", "1", "higher_is_better", "mean reward over completions"),
    ("reward/std", "1", "neutral", "standard deviation of the reward over completions"),
    ("reward/group_std", "1", "neutral", "mean over groups of the reward's standard deviation"),
    ("groups/zero_std_frac", "fraction", "lower_is_better", "share of groups whose rewards are all equal"),
    ("groups/resampled", "groups", "lower_is_better", "groups drawn in the place of equal ones (loss.dynamic_sampling)"),
    ("groups/resample_rounds", "draws", "lower_is_better", "further draws of this step (loss.dynamic_sampling)"),
    ("reward/sampled_mean", "1", "higher_is_better", "mean reward over all completions drawn, replaced groups included"),
    ("policy/entropy", "nats/token", "neutral", "mean entropy of the policy at completion tokens"),
    ("policy/ratio_mean", "1", "neutral", "mean of pi_theta / pi_old at the update"),
    ("policy/clip_frac_low", "fraction", "neutral", "share of tokens clipped at 1 - epsilon"),
    ("policy/clip_frac_high", "fraction", "neutral", "share of tokens clipped at 1 + epsilon_high"),
    ("completion/length_mean", "tokens", "neutral", "mean completion length, end token included"),
    ("completion/length_p95", "tokens", "neutral", "95th percentile of the completion length"),
    ("completion/truncated_frac", "fraction", "lower_is_better", "share of completions that hit the token limit"),
    ("completion/rep_ngram4", "fraction", "lower_is_better", "share of 4-grams that repeat an earlier one"),
    ("completion/distinct2", "fraction", "higher_is_better", "distinct 2-grams over all 2-grams"),
    ("grader/failed_frac", "fraction", "lower_is_better", "share of completions whose grader gave no finite number"),
    ("eval/reward_mean", "1", "higher_is_better", "mean reward on the held-out file, after this step's update"),
    ("throughput/tokens_per_s", "tokens/s", "higher_is_better", "prompt and completion tokens of the step per second"),
    ("time/step_s", "s", "lower_is_better", "whole step"),
    ("time/sample_s", "s", "lower_is_better", "sampling"),
    ("time/grade_s", "s", "lower_is_better", "grading"),
    ("time/reference_s", "s", "lower_is_better", "reference log-probabilities"),
    ("time/update_s", "s", "lower_is_better", "forward, backward and optimizer"),
    ("time/evaluate_s", "s", "lower_is_better", "sampling and grading of the held-out file"),
    ("time/reference_answers_s", "s", "lower_is_better", "answers of the reference kept beside the completions; not in time/step_s"),
    ("time/checkpoint_s", "s", "lower_is_better", "writing checkpoints"),
]

DESCRIPTORS: dict[str, MetricDescriptor] = {
    row.name: row
    for row in [
        *_kl_descriptors(),
        *(MetricDescriptor(name=n, unit=u, direction=d, description=text) for n, u, d, text in _OTHERS),
    ]
}

PREFIXES = ("reward/grader/",)
"""Families whose last part is a name from the job: `reward/grader/<name>` is the mean score of one part of a multi."""


def is_known(name: str) -> bool:
    """Whether a metric name is described here."""
    return name in DESCRIPTORS or name.startswith(PREFIXES)
