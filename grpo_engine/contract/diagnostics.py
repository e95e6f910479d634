"""Detectors and guardrails: what a run is watched for, with every threshold, and what happens then.

A detector fires when its condition has held for `updates` steps in a row and clears when it has been gone for
`clear_after` steps in a row. KL thresholds are nats per completion token. docs/kl-handbook.md shows the curves.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Field, model_validator

from grpo_engine.contract.base import Fraction, NonNegativeFloat, PositiveFloat, Strict, broken_rule

DetectorName = Literal[
    "kl_out_of_control",
    "target_too_small",
    "target_too_large",
    "beta_high",
    "beta_low",
    "collapse",
    "length_collapse",
    "blow_up",
    "reward_hacking",
    "stagnation",
    "oscillation",
    "length_bias",
    "ref_mismatch",
    "estimator_unreliable",
    "negative_kl",
]
DETECTOR_NAMES: tuple[DetectorName, ...] = get_args(DetectorName)

Window = Annotated[int, Field(ge=4, le=1000)]
SmallCount = Annotated[int, Field(ge=1, le=1000)]


class _Detector(Strict):
    enabled: bool = True
    updates: SmallCount = 1
    """Steps in a row the condition must hold before it fires."""
    clear_after: SmallCount = 3
    """Steps in a row it must be gone before it clears."""


class KlOutOfControl(_Detector):
    """KL to the reference is too large."""

    updates: SmallCount = 3
    kl: PositiveFloat = 0.1
    clear_ratio: Annotated[float, Field(gt=0, le=1)] = 0.8
    """Clears below this share of `kl`."""


class TargetTooSmall(_Detector):
    """The target cannot be met: it is tiny, or beta is pinned at its max."""

    target: PositiveFloat = 0.005
    saturated_updates: SmallCount = 2
    """Decisions of the rule in a row with beta pinned at its max."""


class TargetTooLarge(_Detector):
    """The target allows more drift than `kl_out_of_control` would."""

    target: PositiveFloat = 0.1


class BetaHigh(_Detector):
    """Beta is so large that the policy may hardly move."""

    beta: PositiveFloat = 0.1


class BetaLow(_Detector):
    """Beta is small and KL is rising. A small beta alone is no alarm: several published runs use 0.001 or 0."""

    beta: PositiveFloat = 0.001
    window: Window = 20


class Collapse(_Detector):
    """The policy repeats itself or has lost its entropy while KL is high (without KL: two of the three signs)."""

    entropy_ratio: Fraction = 0.2
    """Of the first step's entropy."""
    rep_ngram4: Fraction = 0.3
    distinct2_ratio: Fraction = 0.5
    """Of the first step's distinct-2."""
    target_ratio: PositiveFloat = 2.0
    """KL counts as high above this multiple of the target ..."""
    kl: PositiveFloat = 0.04
    """... or above this when beta follows no target."""


class LengthCollapse(_Detector):
    """Completions have become much shorter than at the start."""

    updates: SmallCount = 3
    ratio: Fraction = 0.5
    """Of the mean length of the first `baseline_steps` steps."""
    baseline_steps: Annotated[int, Field(ge=1, le=10)] = 5


class BlowUp(_Detector):
    """Entropy, KL and the share of truncated completions rise together."""

    window: Window = 20
    standard_errors: NonNegativeFloat = 2.0


class RewardHacking(_Detector):
    """The training reward rises while the held-out one falls, or with KL while length or repetition rise or answers have shrunk."""

    window: Window = 20
    standard_errors: NonNegativeFloat = 2.0
    """A slope counts when it exceeds this many of its standard errors."""
    eval_points: Annotated[int, Field(ge=3, le=50)] = 5
    """Held-out evaluations looked at."""
    shrunk_ratio: Fraction = 0.5
    """Answers have shrunk below this share of the mean length of the first 5 steps."""


class Stagnation(_Detector):
    """The reward is flat, KL far below its target, and the penalty or equal rewards explain it."""

    window: Window = 20
    standard_errors: NonNegativeFloat = 2.0
    target_ratio: PositiveFloat = 0.2
    kl: PositiveFloat = 0.004
    """KL counts as low below this when beta follows no target."""
    beta_ratio: PositiveFloat = 5.0
    """Beta over beta at the first step."""
    grad_ratio: PositiveFloat = 1.0
    """Gradient norm of the KL term over that of the policy term."""
    zero_std_frac: Fraction = 0.8


class Oscillation(_Detector):
    """The rule keeps changing its mind."""

    decisions: Annotated[int, Field(ge=2, le=50)] = 6
    """Last raises and lowerings looked at."""
    sign_changes: Annotated[int, Field(ge=1, le=49)] = 4

    @model_validator(mode="after")
    def _reachable(self) -> Oscillation:
        if self.sign_changes >= self.decisions:
            words = f"{self.decisions} decisions have at most {self.decisions - 1} sign changes; lower sign_changes"
            raise broken_rule("sign_changes", words)
        return self


class LengthBias(_Detector):
    """KL is summed over tokens, so longer completions cost more, and completions get shorter."""

    correlation: Fraction = 0.8
    window: Window = 20
    standard_errors: NonNegativeFloat = 2.0


class RefMismatch(_Detector):
    """KL at step 1 is not 0 although the policy still is the reference."""

    kl: PositiveFloat = 1e-4


class EstimatorUnreliable(_Detector):
    """k3 is dominated by a few tokens."""

    updates: SmallCount = 3
    se_ratio: PositiveFloat = 0.5
    """Standard error over mean."""
    token_max: PositiveFloat = 10.0
    min_mean: NonNegativeFloat = 1e-6
    """Means below this are left alone: near the reference every ratio is noise."""


class NegativeKl(_Detector):
    """The mean of k1 is negative beyond chance: the log-probabilities are not of the sampled tokens' distribution."""

    updates: SmallCount = 3
    standard_errors: PositiveFloat = 3.0


class DiagnosticsConfig(Strict):
    """The detectors and their thresholds."""

    kl_out_of_control: KlOutOfControl = KlOutOfControl()
    target_too_small: TargetTooSmall = TargetTooSmall()
    target_too_large: TargetTooLarge = TargetTooLarge()
    beta_high: BetaHigh = BetaHigh()
    beta_low: BetaLow = BetaLow()
    collapse: Collapse = Collapse()
    length_collapse: LengthCollapse = LengthCollapse()
    blow_up: BlowUp = BlowUp()
    reward_hacking: RewardHacking = RewardHacking()
    stagnation: Stagnation = Stagnation()
    oscillation: Oscillation = Oscillation()
    length_bias: LengthBias = LengthBias()
    ref_mismatch: RefMismatch = RefMismatch()
    estimator_unreliable: EstimatorUnreliable = EstimatorUnreliable()
    negative_kl: NegativeKl = NegativeKl()

    def enabled(self, name: DetectorName) -> bool:
        """Whether a detector runs."""
        detector: _Detector = getattr(self, name)
        return detector.enabled


class Pause(Strict):
    """Finish the step, checkpoint, free the slot; a person resumes."""

    type: Literal["pause"]


class Stop(Strict):
    """Finish the step, checkpoint, end the job as failed with reason `guardrail`."""

    type: Literal["stop"]


class SetBeta(Strict):
    """Set the base of beta, as a PATCH would."""

    type: Literal["set_beta"]
    value: NonNegativeFloat


class Rollback(Strict):
    """Go back to the newest checkpoint from before the trouble, change what is named here, go on. After `max_count` times: stop.

    Without a change the same seed would replay the same trouble.
    """

    type: Literal["rollback"]
    beta_factor: PositiveFloat | None = None
    learning_rate_factor: PositiveFloat | None = None
    reseed: bool = False
    max_count: SmallCount = 3

    @model_validator(mode="after")
    def _names_a_change(self) -> Rollback:
        if self.beta_factor in (None, 1.0) and self.learning_rate_factor in (None, 1.0) and not self.reseed:
            words = "a rollback must change something; give beta_factor or learning_rate_factor (not 1), or set reseed to true"
            raise broken_rule("beta_factor", words)
        return self


def _word_is_type(value: Any) -> Any:
    return {"type": value} if isinstance(value, str) else value


GuardrailAction = Annotated[
    Annotated[Pause | Stop | SetBeta | Rollback, Field(discriminator="type")],
    BeforeValidator(_word_is_type),
]


class Guardrail(Strict):
    """A detector and the action it triggers, once per episode: the detector must clear before it can trigger again."""

    detector: DetectorName
    action: GuardrailAction
    """An object with `type`, or the word `pause` or `stop`."""
    consecutive: SmallCount = 1
    """Steps the detector must be on before the action."""
    window: SmallCount | None = None
    """When given, the `consecutive` steps need not follow each other: that many of the last `window` are enough."""

    @model_validator(mode="after")
    def _fits(self) -> Guardrail:
        if self.window is not None and self.window < self.consecutive:
            words = f"a window of {self.window} steps never holds {self.consecutive}; enlarge window or lower consecutive"
            raise broken_rule("window", words)
        return self
