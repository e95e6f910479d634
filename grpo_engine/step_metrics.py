"""What one step reports: names and numbers from the rollout and from the update's whole-step tensors.

Pure functions, detached float64 on the CPU. Names are described in contract/telemetry.py. A number that does not exist
is absent; a number that is not finite is reported as it is.

Shapes: B rows, T completion tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from grpo_engine.advantage import Advantages
from grpo_engine.batch import Rollout
from grpo_engine.contract.kl import Direction, Estimator, KlConfig
from grpo_engine.contract.telemetry import KL_ESTIMATORS, KL_STATISTICS
from grpo_engine.kl import kl_statistics, kl_value
from grpo_engine.kl_views import kl_by_position, kl_length_correlation, top_kl_tokens

Metrics = dict[str, float]
TOP_COUNT = 20
"""Tokens and prompts listed by `describe_kl`."""
SAMPLED_ESTIMATORS = tuple(name for name in KL_ESTIMATORS if name != "exact")


@dataclass
class StepTensors:
    """Per-token quantities of the whole step, float64, filled micro-batch by micro-batch. Zero where masked."""

    mask_BT: Tensor
    sampler_logprob_BT: Tensor
    logprob_BT: Tensor
    """Of the latest forward."""
    old_logprob_BT: Tensor
    """Of the first update's forward."""
    entropy_BT: Tensor
    ratio_BT: Tensor
    clipped_low_BT: Tensor
    clipped_high_BT: Tensor
    kl_clipped_BT: Tensor
    ref_logprob_BT: Tensor | None = None
    exact_kl_BT: Tensor | None = None
    """Full-vocabulary KL to the reference in the job's direction, when it is computed."""

    @classmethod
    def create(cls, mask_BT: Tensor, sampler_logprob_BT: Tensor) -> StepTensors:
        """Empty tensors of the step's shape."""
        empty = [torch.zeros_like(mask_BT) for _ in range(7)]
        return cls(mask_BT, sampler_logprob_BT, *empty)


def kl_pair_metrics(
    pair: str, logprob_BT: Tensor, other_logprob_BT: Tensor, mask_BT: Tensor, direction: Direction, exact_BT: Tensor | None = None
) -> Metrics:
    """`kl/<pair>/<estimator>/<statistic>` for every estimator, and `kl_per_sequence/ref/<estimator>/mean`."""
    values = {name: kl_value(logprob_BT, other_logprob_BT, cast(Estimator, name), direction) for name in SAMPLED_ESTIMATORS}
    if exact_BT is not None:
        values["exact"] = exact_BT
    metrics: Metrics = {}
    for estimator, value_BT in values.items():
        statistics = kl_statistics(value_BT, mask_BT)
        metrics.update({f"kl/{pair}/{estimator}/{name}": statistics[name] for name in KL_STATISTICS if name in statistics})
        if pair == "ref" and statistics:
            metrics[f"kl_per_sequence/ref/{estimator}/mean"] = statistics["per_sequence_mean"]
    return metrics


def kl_metrics(tensors: StepTensors, direction: Direction) -> Metrics:
    """KL of the policy to the sampler (policy first) and to the reference (in the job's direction), from the first forward."""
    mask_BT, logprob_BT = tensors.mask_BT, tensors.logprob_BT
    metrics = kl_pair_metrics("sampler", logprob_BT, tensors.sampler_logprob_BT, mask_BT, "policy_ref")
    if tensors.ref_logprob_BT is None:
        return metrics
    metrics |= kl_pair_metrics("ref", logprob_BT, tensors.ref_logprob_BT, mask_BT, direction, tensors.exact_kl_BT)
    correlation = kl_length_correlation(kl_value(logprob_BT, tensors.ref_logprob_BT, "k3", direction), mask_BT)
    return metrics if correlation is None else {**metrics, "kl/length_correlation": correlation}


def token_kl(tensors: StepTensors, cfg: KlConfig) -> Tensor | None:
    """(B, T) KL to the reference before the first update, in the job's estimator and direction; None without a reference."""
    if tensors.ref_logprob_BT is None:
        return None
    if cfg.estimator == "exact" and tensors.exact_kl_BT is not None:
        return tensors.exact_kl_BT
    return kl_value(tensors.old_logprob_BT, tensors.ref_logprob_BT, cfg.estimator, cfg.direction)


def describe_kl(tensors: StepTensors, cfg: KlConfig, rollout: Rollout) -> dict[str, Any] | None:
    """KL to the reference before the first update, in the job's estimator: by position, its largest tokens, its prompts."""
    value_BT = token_kl(tensors, cfg)
    if value_BT is None:
        return None
    means, counts = kl_by_position(value_BT, tensors.mask_BT)
    rows, first, prompts = rollout.rows, 0, []
    for group in rollout.groups:
        part = slice(first, first + len(group.completions))
        prompts.append({"row": group.prompt.row, "kl": masked_mean(value_BT[part], tensors.mask_BT[part])})
        first = part.stop
    return {
        "estimator": cfg.estimator,
        "by_position": {"mean": means, "count": counts},
        "top_tokens": [
            {"row": rows[row][0].row, "completion": row, "position": position, "token_id": rows[row][1].token_ids[position], "kl": kl}
            for row, position, kl in top_kl_tokens(value_BT, tensors.mask_BT, TOP_COUNT)
        ],
        "top_prompts": sorted(prompts, key=lambda prompt: -prompt["kl"])[:TOP_COUNT],
    }


def rollout_metrics(rollout: Rollout) -> Metrics:
    """Rewards, lengths and repetition of the completions, before any update. Failed grades are left out of the rewards."""
    completions = [completion for group in rollout.groups for completion in group.completions]
    rewards = [completion.reward for completion in completions if math.isfinite(completion.reward)]
    lengths = torch.tensor([float(len(completion.token_ids)) for completion in completions], dtype=torch.float64)
    metrics: Metrics = {
        "completion/length_mean": float(lengths.mean()),
        "completion/length_p95": float(torch.quantile(lengths, 0.95)),
        "completion/truncated_frac": _mean(float(completion.is_truncated) for completion in completions),
        "completion/rep_ngram4": _mean(repeated_share(completion.token_ids, 4) for completion in completions),
        "completion/distinct2": _mean(1 - repeated_share(completion.token_ids, 2) for completion in completions),
        "grader/failed_frac": 1 - len(rewards) / len(completions),
    }
    if rewards:
        reward_N = torch.tensor(rewards, dtype=torch.float64)
        metrics["reward/mean"] = float(reward_N.mean())
        metrics["reward/std"] = float(reward_N.std(correction=1)) if len(rewards) > 1 else 0.0
    names = sorted({name for completion in completions for name in completion.parts})
    for name in names:
        parts = [completion.parts[name] for completion in completions if math.isfinite(completion.parts.get(name, math.nan))]
        if parts:
            metrics[f"reward/grader/{name}"] = _mean(parts)
    return metrics


def group_metrics(advantages: Advantages) -> Metrics:
    """Spread of rewards within groups."""
    return {
        "reward/group_std": float(advantages.std_P.mean()),
        "groups/zero_std_frac": float(advantages.is_zero_std_P.double().mean()),
    }


def masked_mean(value_BT: Tensor, mask_BT: Tensor) -> float:
    """Mean over unmasked tokens; 0 when there is none."""
    mask_BT = mask_BT.bool()
    return float(value_BT.double()[mask_BT].mean()) if bool(mask_BT.any()) else 0.0


def repeated_share(token_ids: Sequence[int], n: int) -> float:
    """Share of n-grams that occurred before in the same completion; 0 when it is shorter than n."""
    grams = [tuple(token_ids[start : start + n]) for start in range(len(token_ids) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def _mean(values: Iterable[float]) -> float:
    numbers = list(values)
    return math.fsum(numbers) / len(numbers)
