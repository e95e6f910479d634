"""The job specification a client posts, shaped like OpenAI's fine-tuning job with `method.type = grpo`."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from grpo_engine.contract.base import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Strict, broken_rule
from grpo_engine.contract.beta import BetaConfig, FixedBeta, needs_reference
from grpo_engine.contract.data import DataConfig
from grpo_engine.contract.diagnostics import DiagnosticsConfig, Guardrail, Rollback, SetBeta
from grpo_engine.contract.environment import Environment
from grpo_engine.contract.grader import Grader
from grpo_engine.contract.kl import KlConfig
from grpo_engine.contract.resources import Resources
from grpo_engine.contract.telemetry import REFERENCE_REQUESTS, TelemetryConfig

BETA_ALIASES = ("kl_beta", "kl_coef", "kl_loss_coef", "init_kl_coef", "ref_policy_kl_penalty", "kl_penalty_coef")

LossType = Literal["grpo", "dr_grpo", "dapo", "gspo", "bnpo", "cispo"]
Aggregation = Literal["token_mean", "seq_mean_token_mean", "seq_sum", "constant"]


class ReferenceConfig(Strict):
    """The frozen distribution KL is measured against."""

    source: Annotated[str, Field(pattern=r"^(initial|base|checkpoint:[A-Za-z0-9_-]{1,64}|model:.{1,512})$")] = "initial"
    """`initial`: the weights the job starts from. `base`: the bare base model under LoRA. `checkpoint:<id>`: published weights.
    `model:<name>`: a base model, named as in `model`."""
    sync_every: PositiveInt | None = None
    """Move the reference towards the policy every n steps; null = frozen."""
    mixup_alpha: Annotated[float, Field(gt=0, le=1)] = 0.6
    """reference = alpha * policy + (1 - alpha) * reference at a sync (TRL's `ref_model_mixup_alpha`)."""


class LossConfig(Strict):
    """Policy loss, advantages and their aggregation."""

    type: LossType = "grpo"
    scale_rewards: Literal["group", "batch", "none"] = "group"
    """Divide advantages by the standard deviation of the group, of the batch, or not at all (Dr. GRPO)."""
    adv_eps: NonNegativeFloat = 1e-4
    ddof: Literal[0, 1] = 1
    aggregation: Aggregation | None = None
    """How per-token losses become one number; null = what the loss type's paper uses."""
    epsilon: PositiveFloat = 0.2
    epsilon_high: PositiveFloat | None = None
    """Upper clip (DAPO's clip-higher); null = epsilon."""
    num_iterations: Annotated[int, Field(ge=1, le=64)] = 1
    """Updates per rollout (mu in DeepSeekMath)."""
    zero_std_groups: Literal["keep", "mask_policy", "drop_all"] = "keep"
    """Groups whose rewards are all equal: keep their KL gradient, mask only the policy term, or drop them."""
    mask_truncated: bool = False
    """Leave completions that hit the token limit out of the loss."""
    dynamic_sampling: bool = False
    """Draw fresh prompts in the place of groups whose rewards are all equal (DAPO, section 3.2)."""
    dynamic_sampling_rounds: Annotated[int, Field(ge=1, le=64)] = 4
    """At most so many further draws a step; what is missing then is filled with equal groups."""


class SamplingConfig(Strict):
    """Rollouts: how many and how long."""

    group_size: Annotated[int, Field(ge=2, le=1024)] = 8
    prompts_per_step: Annotated[int, Field(ge=1, le=4096)] = 4
    max_completion_tokens: Annotated[int, Field(ge=1, le=131072)] = 64
    temperature: Annotated[float, Field(ge=0.05, le=10)] = 1.0
    """Applied alike to sampler, policy and reference log-probabilities."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0


class OptimizerConfig(Strict):
    """AdamW on fp32 master weights."""

    learning_rate: PositiveFloat = 1e-6
    betas: Annotated[list[Annotated[float, Field(ge=0, lt=1)]], Field(min_length=2, max_length=2)] = [0.9, 0.999]
    eps: PositiveFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.0
    warmup_steps: NonNegativeInt = 0
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After the warm-up; `linear` and `cosine` fall to 0 at the last step."""
    max_grad_norm: PositiveFloat | None = 1.0
    on_nonfinite: Literal["skip", "abort"] = "skip"
    """A step with non-finite rewards, losses or gradients: leave the weights alone and go on, or end the job."""


class LoraConfig(Strict):
    """Low-rank adapters (peft): the base stays frozen, and is the reference unless another is named.

    Checkpoints hold merged and adapter weights.
    """

    type: Literal["lora"]
    rank: Annotated[int, Field(ge=1, le=1024)] = 16
    alpha: PositiveFloat = 32.0
    """The adapter's output is scaled by alpha / rank."""
    target_modules: Annotated[list[str], Field(min_length=1, max_length=256)] | Literal["all-linear"] = "all-linear"
    """Linear layers by name or end of name, such as `q_proj`; `all-linear` = every one but the output head."""


class CheckpointConfig(Strict):
    """What is kept of the run."""

    every: PositiveInt | None = None
    """Publish weights every n steps; the last step is always published."""
    keep: Annotated[int, Field(ge=1, le=1000)] = 2
    """Published checkpoints kept beside the pinned ones."""
    resume_every: PositiveInt = 10
    """Renew the rolling resume state every n steps."""


class EvaluationConfig(Strict):
    """A held-out file (of an environment: held-out rows) graded every n steps: before the first, after each n-th, and after the last.

    One completion a prompt, sampled as in training (`sampling`) with random numbers of its own, the same ones each time, so
    that a change of the mean comes from the policy. Training is bit for bit the same with and without; beta never moves by it.
    """

    every: PositiveInt
    grader: Grader | None = None
    """The grader that stands for the truth ("gold reward"); null = the training grader."""
    max_prompts: PositiveInt = 64
    """The first so many prompts of the file; of an environment, so many rows of its own."""


class Limits(Strict):
    """How long the job may run."""

    num_steps: Annotated[int, Field(ge=1, le=10_000_000)] = 100
    max_seconds: PositiveInt | None = None
    """Stop with a checkpoint after this time, as succeeded."""


class Preset(Strict):
    """A named set of defaults; keys given in the job win over it."""

    name: str
    size: Literal["lt1b", "7b", "70b"] | None = None


class GrpoConfig(Strict):
    """Everything GRPO-specific."""

    preset: Preset | None = None
    kl: KlConfig = KlConfig()
    beta: BetaConfig = FixedBeta()
    reference: ReferenceConfig = ReferenceConfig()
    loss: LossConfig = LossConfig()
    sampling: SamplingConfig = SamplingConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    adapter: LoraConfig | None = None
    grader: Grader | None = None
    """Required unless an environment brings its own."""
    data: DataConfig = DataConfig()
    environment: Environment | None = None
    evaluation: EvaluationConfig | None = None
    checkpoints: CheckpointConfig = CheckpointConfig()
    guardrails: Annotated[list[Guardrail], Field(max_length=64)] = []
    diagnostics: DiagnosticsConfig = DiagnosticsConfig()
    telemetry: TelemetryConfig = TelemetryConfig()
    limits: Limits = Limits()
    resources: Resources = Resources()

    @model_validator(mode="before")
    @classmethod
    def _beta_aliases(cls, raw: Any) -> Any:
        if not isinstance(raw, dict):
            return raw
        given = [alias for alias in BETA_ALIASES if alias in raw]
        if not given:
            return raw
        if len(given) > 1 or "beta" in raw:
            names = [*given, *(["beta"] if "beta" in raw else [])]
            raise broken_rule(names[0], f"beta is given twice, as {' and '.join(names)}; keep one")
        rest = {key: value for key, value in raw.items() if key != given[0]}
        return {**rest, "beta": raw[given[0]]}

    @model_validator(mode="after")
    def _grader_or_environment(self) -> GrpoConfig:
        if self.grader is None and self.environment is None:
            raise broken_rule("grader", "nothing grades the completions; give a grader, or an environment, which brings its own")
        if self.grader is not None and self.environment is not None:
            raise broken_rule("grader", "an environment brings its own grader; leave out grader, or environment and give a training_file")
        return self

    @model_validator(mode="after")
    def _an_environment_maps_its_own_rows(self) -> GrpoConfig:
        for name in ("format", "prompt_field", "reference_field", "prompt_as", "bad_rows"):
            if self.environment is not None and getattr(self.data, name) != DataConfig.model_fields[name].default:
                raise broken_rule(f"data.{name}", "it tells how a file is read, and an environment has none; leave it out")
        return self

    @model_validator(mode="after")
    def _guardrails_can_act(self) -> GrpoConfig:
        for number, rule in enumerate(self.guardrails):
            at = f"guardrails[{number}]"
            if not self.diagnostics.enabled(rule.detector):
                words = f"{rule.detector} is switched off and never fires; enable diagnostics.{rule.detector}"
                raise broken_rule(f"{at}.detector", words)
            if isinstance(rule.action, SetBeta):
                low, high = getattr(self.beta, "min", 0.0), getattr(self.beta, "max", math.inf)
                if not low <= rule.action.value <= high:
                    words = f"{rule.action.value:g} lies outside the bounds [{low:g}, {high:g}] of beta; choose a value inside"
                    raise broken_rule(f"{at}.action.value", words)
                if rule.action.value > 0 and not self.loads_reference:
                    words = "a beta above 0 needs a reference, and the job loads none; set kl.monitor to true"
                    raise broken_rule(f"{at}.action.value", words)
            if isinstance(rule.action, Rollback) and rule.action.beta_factor is not None and not needs_reference(self.beta):
                raise broken_rule(f"{at}.action.beta_factor", "it multiplies a beta of 0; use learning_rate_factor or reseed")
        return self

    @model_validator(mode="after")
    def _telemetry_has_a_reference(self) -> GrpoConfig:
        wanted = [name for name in REFERENCE_REQUESTS if getattr(self.telemetry, name)]
        if wanted and not self.loads_reference:
            words = "the job holds no reference to measure or to ask; set kl.monitor to true, or remove it"
            raise broken_rule(f"telemetry.{wanted[0]}", words)
        if self.telemetry.gradient_split_every is not None and (self.kl.placement != "loss" or not needs_reference(self.beta)):
            words = "it needs a KL term in the loss; set kl.placement to loss and beta above 0"
            raise broken_rule("telemetry.gradient_split_every", words)
        return self

    @model_validator(mode="after")
    def _an_adapter_is_measured_against_its_base(self) -> GrpoConfig:
        if self.adapter is not None and self.reference.sync_every is not None:
            words = "the reference of a job with an adapter never moves; remove sync_every, or remove adapter to train all weights"
            raise broken_rule("reference.sync_every", words)
        return self

    @property
    def loads_reference(self) -> bool:
        """Whether a reference is held in memory: some beta is positive, or KL is monitored."""
        return needs_reference(self.beta) or self.kl.monitor


class GrpoMethod(Strict):
    """`{"type": "grpo", "grpo": {...}}`."""

    type: Literal["grpo"] = "grpo"
    grpo: GrpoConfig


class JobSpec(Strict):
    """A training job as posted."""

    model: Annotated[str, Field(min_length=1, max_length=512)]
    """A Hub id, a folder below the server's model directory, `smollm2-135m-instruct`, or a published checkpoint (`ftckpt-...`)."""
    training_file: Annotated[str, Field(pattern=r"^file-[A-Za-z0-9_-]{1,64}$")] | None = None
    validation_file: Annotated[str, Field(pattern=r"^file-[A-Za-z0-9_-]{1,64}$")] | None = None
    method: GrpoMethod
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 42
    suffix: Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9._-]+$")] | None = None
    metadata: Annotated[
        dict[Annotated[str, Field(min_length=1, max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)
    ] = {}

    @model_validator(mode="after")
    def _has_data(self) -> JobSpec:
        grpo = self.method.grpo
        if self.training_file is None and grpo.environment is None:
            raise broken_rule("training_file", "there is no data; give a training_file, or method.grpo.environment")
        if grpo.environment is not None:
            for name in ("training_file", "validation_file"):
                if getattr(self, name) is not None:
                    words = "method.grpo.environment makes its own rows, held-out ones too; leave out this file, or the environment"
                    raise broken_rule(name, words)
            return self
        if grpo.evaluation is not None and self.validation_file is None:
            words = "method.grpo.evaluation needs a validation_file; upload one and name it, or remove evaluation"
            raise broken_rule("validation_file", words)
        if self.validation_file is not None and grpo.evaluation is None:
            words = 'it is read by method.grpo.evaluation only; add that, for example {"every": 10}, or remove the file'
            raise broken_rule("validation_file", words)
        return self
