"""Named defaults with their sources. Keys given in the job win over the preset.

The three `recipe_*` presets reproduce a widely read Chinese interview answer on "GRPO's KL divergence" to the letter,
including what the primary sources do not support (docs/kl-handbook.md has the verdicts). The others restate papers; what a
paper does not say is left at this product's default.
"""

from __future__ import annotations

import copy
from typing import Any, Literal

from pydantic import Field

from grpo_engine.contract.base import Strict
from grpo_engine.contract.error import InvalidRequest

AT = "method.grpo.preset"
_BETA_NAMES = ("beta", "kl_beta", "kl_coef", "kl_loss_coef", "init_kl_coef", "ref_policy_kl_penalty", "kl_penalty_coef")
_EXCLUSIVE = {"value": "schedule", "schedule": "value", "target": "calibration", "calibration": "target"}
"""In a beta rule the first excludes the second, so a job's own key removes the preset's other one."""


class PresetCard(Strict):
    """One preset, as `GET /v1/presets` lists it."""

    object: Literal["preset"] = "preset"
    name: str
    description: str
    sources: list[str]
    config: dict[str, Any]
    """Below `method.grpo`; what holds for every size."""
    sizes: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Size name to what it changes; empty when the preset has no sizes. Without a size `config` stands alone."""


_TEXT = "the interview answer on GRPO's KL that this product implements"
_PLAIN_KL = {
    "direction": "policy_ref",
    "estimator": "k1",
    "grad": "unbiased",
    "placement": "loss",
    "aggregation": "seq_mean_token_mean",
    "log_ratio_clip": None,
    "value_clip": None,
}
_RECIPE_RAMP = {"type": "linear", "start": 0.005, "end": 0.02, "hold_ratio": 0.1}
_RECIPE_RULE = {
    "rule": "deadband",
    "schedule": _RECIPE_RAMP,
    "unit": "token",
    "update_every": 50,
    "ema_decay": 0.9,
    "up": 1.2,
    "down": 1.2,
    "low_ratio": 0.8,
    "high_ratio": 1.0,
    "arming": False,
}
_DEEPSEEK_KL = {
    "direction": "policy_ref",
    "estimator": "k3",
    "grad": "naive",
    "importance": "none",
    "placement": "loss",
    "aggregation": "seq_mean_token_mean",
    "log_ratio_clip": None,
    "value_clip": None,
}
_GRPO_LOSS = {"type": "grpo", "scale_rewards": "group", "aggregation": "seq_mean_token_mean"}

PRESETS: list[PresetCard] = [
    PresetCard(
        name="recipe_fixed",
        description=(
            "The recipe with a fixed beta: log-probability difference per token (k1), averaged per response (its 'chunk level' "
            "and length normalisation), unclipped. What the text calls forward KL is KL(pi_theta || pi_ref), direction policy_ref. "
            "The literal autograd of k1 has no effect on average; kl.grad naive with kl.allow_biased gives it."
        ),
        sources=[_TEXT],
        config={"kl": _PLAIN_KL, "beta": {"rule": "fixed", "value": 0.02}, "loss": _GRPO_LOSS},
        sizes={"lt1b": {"beta": {"value": 0.02}}, "7b": {"beta": {"value": 0.02}}, "70b": {"beta": {"value": 0.01}}},
    ),
    PresetCard(
        name="recipe_adaptive",
        description=(
            "The recipe with a moving beta: held at 0.005 for the first 10 % of the run, then raised to 0.02, times a factor that "
            "grows by 1.2 when the EMA of KL is above its target and shrinks by 1.2 below 0.8 of it, every 50 rollouts."
        ),
        sources=[_TEXT],
        config={"kl": _PLAIN_KL, "beta": {**_RECIPE_RULE, "target": 0.02}, "loss": _GRPO_LOSS},
        sizes={"lt1b": {"beta": {"target": 0.02}}, "7b": {"beta": {"target": 0.02}}, "70b": {"beta": {"target": 0.01}}},
    ),
    PresetCard(
        name="recipe_calibrated",
        description=(
            "recipe_adaptive whose target is the median KL of 10 rollouts at a fixed beta, kept inside [0.005, 0.1] nats per token. "
            "KL starts at exactly 0, so the median is often too small; calibration.discard drops the first rollouts."
        ),
        sources=[_TEXT],
        config={
            "kl": _PLAIN_KL,
            "beta": {
                **_RECIPE_RULE,
                "calibration": {"rollouts": 10, "discard": 0, "stat": "median", "min": 0.005, "max": 0.1, "fixed_value": 0.02},
            },
            "loss": _GRPO_LOSS,
        },
        sizes={
            "lt1b": {"beta": {"calibration": {"fixed_value": 0.02}}},
            "7b": {"beta": {"calibration": {"fixed_value": 0.02}}},
            "70b": {"beta": {"calibration": {"fixed_value": 0.01}}},
        },
    ),
    PresetCard(
        name="deepseekmath_2024",
        description=(
            "GRPO as first published: fixed beta 0.04, k3 differentiated as it stands (so the gradient is that of the other "
            "direction), mean per response, 64 completions a prompt, one update per rollout."
        ),
        sources=["https://arxiv.org/abs/2402.03300 (eq. 3-4, eq. 21, section 4.2)"],
        config={
            "kl": _DEEPSEEK_KL,
            "beta": {"rule": "fixed", "value": 0.04},
            "loss": {**_GRPO_LOSS, "num_iterations": 1},
            "sampling": {"group_size": 64, "prompts_per_step": 16, "max_completion_tokens": 1024},
            "optimizer": {"learning_rate": 1e-6},
        },
    ),
    PresetCard(
        name="deepseek_r1",
        description="Stage 1 of DeepSeek-R1: beta 0.001, clip 10, 16 completions a prompt, the reference replaced every 400 steps.",
        sources=["https://arxiv.org/abs/2501.12948"],
        config={
            "kl": _DEEPSEEK_KL,
            "beta": {"rule": "fixed", "value": 0.001},
            "loss": {**_GRPO_LOSS, "epsilon": 10.0},
            "reference": {"sync_every": 400, "mixup_alpha": 1.0},
            "sampling": {"group_size": 16},
            "optimizer": {"learning_rate": 3e-6},
        },
    ),
    PresetCard(
        name="deepseek_v3_2",
        description=(
            "The unbiased estimator of DeepSeek-V3.2: k3 weighted by pi_theta / pi_old with the gradient through the weight, "
            "advantages not divided by the standard deviation. The paper gives no beta (for mathematics weak or none works): set one."
        ),
        sources=["https://arxiv.org/abs/2512.02556"],
        config={
            "kl": {**_PLAIN_KL, "estimator": "k3"},
            "loss": {**_GRPO_LOSS, "scale_rewards": "none"},
        },
    ),
    PresetCard(
        name="dapo",
        description=(
            "DAPO without its sampler: no KL penalty, upper clip 0.28, mean over all tokens. loss.dynamic_sampling is a switch of its own."
        ),
        sources=["https://arxiv.org/abs/2503.14476"],
        config={
            "beta": {"rule": "fixed", "value": 0.0},
            "loss": {"type": "dapo", "aggregation": "token_mean", "epsilon": 0.2, "epsilon_high": 0.28},
        },
    ),
    PresetCard(
        name="dr_grpo",
        description="Dr. GRPO: no KL penalty, no division by the standard deviation, a constant denominator instead of the length.",
        sources=["https://arxiv.org/abs/2503.20783"],
        config={"beta": {"rule": "fixed", "value": 0.0}, "loss": {"type": "dr_grpo", "scale_rewards": "none", "aggregation": "constant"}},
    ),
    PresetCard(
        name="ziegler2019",
        description=(
            "RLHF's first adaptive penalty: k1 in the reward of every token, proportional rule, target 6 nats per sequence, "
            "horizon 10000 episodes, from 0.15."
        ),
        sources=["https://arxiv.org/abs/1909.08593", "https://github.com/openai/lm-human-preferences (launch.py, train_policy.py)"],
        config={
            "kl": {"direction": "policy_ref", "estimator": "k1", "placement": "reward", "discount": 1.0, "log_ratio_clip": None},
            "beta": {
                "rule": "ziegler",
                "value": 0.15,
                "target": 6.0,
                "unit": "sequence",
                "horizon": 10000.0,
                "clip": 0.2,
                "update_every": 1,
                "ema_decay": None,
                "arming": False,
            },
        },
    ),
    PresetCard(
        name="ppo2017",
        description=(
            "The adaptive penalty of PPO section 4: beta doubles above 1.5 times the target and halves below the target divided by 1.5. "
            "PPO applies it to KL(pi_old || pi_theta); here it steers the KL to the reference. Target 0.01, start 0.02: set your own."
        ),
        sources=["https://arxiv.org/abs/1707.06347 (section 4)"],
        config={
            "beta": {
                "rule": "ppo",
                "value": 0.02,
                "target": 0.01,
                "factor": 2.0,
                "band": 1.5,
                "update_every": 1,
                "ema_decay": None,
                "arming": False,
            },
        },
    ),
]
_BY_NAME = {card.name: card for card in PRESETS}


def preset_config(name: str, size: str | None = None) -> dict[str, Any]:
    """The values of a preset below `method.grpo`. Raises InvalidRequest naming the choices."""
    card = _BY_NAME.get(name)
    if card is None:
        raise InvalidRequest(f"{AT} {name!r} is unknown; use one of {', '.join(_BY_NAME)}", param=AT)
    if size is None:
        return copy.deepcopy(card.config)
    if size not in card.sizes:
        choices = f"use one of {', '.join(card.sizes)}" if card.sizes else "remove the size: this preset has none"
        raise InvalidRequest(f"{AT}.size {size!r} is unknown to {name}; {choices}", param=f"{AT}.size")
    return _merge(copy.deepcopy(card.config), card.sizes[size])


def apply_preset(raw: dict[str, Any]) -> dict[str, Any]:
    """The raw job with its preset's values below the job's own, which always win.

    Objects are merged key by key. A beta given as a number or with another `rule` replaces the preset's whole beta; one
    with the same `rule`, or none, is merged, and `value`/`schedule` and `target`/`calibration` displace each other. An
    object of another `type` replaces the preset's. A job without a preset comes back as it is, and anything that is not
    shaped like a job is left for validation to name.
    """
    method = raw.get("method")
    grpo = method.get("grpo") if isinstance(method, dict) else None
    if not isinstance(method, dict) or not isinstance(grpo, dict):
        return raw
    preset = grpo.get("preset")
    if isinstance(preset, str):
        preset = {"name": preset}
    if not isinstance(preset, dict) or not isinstance(preset.get("name"), str):
        return raw
    size = preset.get("size")
    if size is not None and not isinstance(size, str):
        return raw
    base = preset_config(preset["name"], size)
    if any(name in grpo for name in _BETA_NAMES[1:]):
        base.pop("beta", None)
    merged = _merge(base, {**grpo, "preset": preset})
    return {**raw, "method": {**method, "grpo": merged}}


def merge_settings(resolved: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """A whole job with `own` merged over it, as `apply_preset` merges a job over its preset; any name of beta replaces beta."""
    grpo = own.get("method", {}).get("grpo", {})
    if any(name in grpo for name in _BETA_NAMES[1:]):
        below = {key: value for key, value in resolved["method"]["grpo"].items() if key != "beta"}
        resolved = {**resolved, "method": {**resolved["method"], "grpo": below}}
    return _merge(resolved, own)


def _merge(base: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for key, value in own.items():
        below = result.get(key)
        if key == "beta" and isinstance(below, dict) and isinstance(value, dict):
            result[key] = _merge_beta(below, value)
        elif isinstance(below, dict) and isinstance(value, dict) and value.get("type", below.get("type")) == below.get("type"):
            result[key] = _merge(below, value)
        else:
            result[key] = value
    return result


def _merge_beta(below: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    if own.get("rule", below.get("rule")) != below.get("rule"):
        return own
    displaced = {_EXCLUSIVE[key] for key in _EXCLUSIVE.keys() & own.keys() if own[key] is not None}
    return _merge({key: value for key, value in below.items() if key not in displaced - own.keys()}, own)
