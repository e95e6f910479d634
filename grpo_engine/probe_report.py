"""From a rehearsed step to the answer of a probe: numbers under plain names, and warnings about what would disappoint."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from grpo_engine.contract.probe_view import Probe, ProbeKl, ProbeMemory, ProbeSample, ProbeSeconds
from grpo_engine.contract.telemetry import KL_ESTIMATORS
from grpo_engine.contract.view_base import JobWarning, NonFinite, Number
from grpo_engine.learner import Learner
from grpo_engine.memory import SETTINGS, peak_bytes
from grpo_engine.probe_steps import Rehearsal

SAMPLE_GROUPS = SAMPLES_PER_GROUP = 2
SAMPLE_LENGTH = 2000
TIGHT_SHARE = 0.9
_GRADER, _SAMPLING, _RESOURCES = "method.grpo.grader", "method.grpo.sampling", "method.grpo.resources"
_CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))

Facts = Mapping[str, Mapping[str, Any]]
"""Data of the run's opening events, by type: `engine.started`, `model.loaded`, `data.loaded`."""


def describe(learner: Learner, rehearsal: Rehearsal, facts: Facts, load_s: float) -> Probe:
    """The answer."""
    grpo, metrics = learner.grpo, rehearsal.first.metrics
    started, model, data = facts["engine.started"], facts["model.loaded"], facts["data.loaded"]
    seconds, memory = _seconds(rehearsal, load_s), measure_memory(learner.policy.network.device)
    return Probe(
        device=started["device"],
        precision=started["precision"],
        parameters=model["parameters"],
        trained_parameters=model["trained_parameters"],
        context_length=model["context_length"],
        num_steps=grpo.limits.num_steps,
        groups_per_step=grpo.sampling.prompts_per_step,
        groups_probed=rehearsal.groups,
        is_whole_step=rehearsal.is_whole,
        seconds=seconds,
        estimated_seconds=estimate(learner, seconds, data),
        memory=memory,
        kl=_kl(learner, metrics),
        reward_mean=number(metrics.get("reward/mean")),
        reward_std=number(metrics.get("reward/std")),
        zero_variance_share=metrics.get("groups/zero_std_frac"),
        truncated_share=metrics["completion/truncated_frac"],
        failed_share=metrics["grader/failed_frac"],
        mean_completion_tokens=metrics["completion/length_mean"],
        longest_prompt_tokens=data["longest_prompt_tokens"],
        prompts=data["num_prompts"],
        skipped_long_prompts=data["num_skipped_long"],
        samples=_samples(learner, rehearsal),
        warnings=list(_warnings(learner, rehearsal, data, memory)),
    )


def _seconds(rehearsal: Rehearsal, load_s: float) -> ProbeSeconds:
    seconds = rehearsal.seconds
    return ProbeSeconds(
        sampling=seconds["sample"],
        grading=seconds["grade"],
        reference=seconds.get("reference"),
        update=seconds.get("update"),
        step=seconds["step"],
        load=load_s,
    )


def estimate(learner: Learner, seconds: ProbeSeconds, data: Mapping[str, Any]) -> float:
    """Seconds of the whole job; a held-out completion is taken to cost what one of training costs."""
    grpo, num_steps = learner.grpo, learner.num_steps
    total = seconds.load + num_steps * seconds.step
    if grpo.evaluation is not None and "validation" in data:
        passes = 1 + num_steps // grpo.evaluation.every + (num_steps % grpo.evaluation.every != 0)
        share = data["validation"]["num_evaluated"] / (grpo.sampling.prompts_per_step * grpo.sampling.group_size)
        total += passes * share * (seconds.sampling + seconds.grading)
    limit = grpo.limits.max_seconds
    return total if limit is None else min(total, seconds.load + limit)


def measure_memory(device: torch.device) -> ProbeMemory:
    """The peak of this process so far: on a GPU what torch held there, else main memory."""
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        return ProbeMemory(kind="cuda", peak_bytes=torch.cuda.max_memory_allocated(device), total_bytes=total)
    return ProbeMemory(kind="process", peak_bytes=peak_bytes(), total_bytes=main_memory())


def main_memory(limits: tuple[Path, ...] = _CGROUP_LIMITS) -> int | None:
    """Main memory in bytes: the machine's, or the container's when that is less; None where neither says."""
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None
    for path in limits:
        try:
            text = path.read_text().strip()
        except OSError:
            continue
        if text.isdecimal():
            total = min(total, int(text))
    return total if total > 0 else None


def number(value: float | None) -> Number | None:
    """A number as JSON can spell it."""
    if value is None or math.isfinite(value):
        return value
    return NonFinite(nonfinite="nan" if math.isnan(value) else "inf" if value > 0 else "-inf")


def _kl(learner: Learner, metrics: Mapping[str, float]) -> ProbeKl | None:
    estimator = learner.grpo.kl.estimator
    measured = {name: metrics[f"kl/ref/{name}/mean"] for name in KL_ESTIMATORS if f"kl/ref/{name}/mean" in metrics}
    if estimator not in measured:
        return None
    spelled = {name: shown for name, value in measured.items() if (shown := number(value)) is not None}
    return ProbeKl(estimator=estimator, value=spelled[estimator], by_estimator=spelled)


def _samples(learner: Learner, rehearsal: Rehearsal) -> list[ProbeSample]:
    if learner.grpo.telemetry.rollouts_redact:
        return []
    return [
        ProbeSample(
            row=group.prompt.row,
            prompt=_cut(group.prompt.text),
            completion=_cut(completion.text),
            reward=None if math.isnan(completion.reward) else number(completion.reward),
            is_truncated=completion.is_truncated,
        )
        for group in rehearsal.first.rollout.groups[:SAMPLE_GROUPS]
        for completion in group.completions[:SAMPLES_PER_GROUP]
    ]


def _cut(text: str) -> str:
    """At most SAMPLE_LENGTH characters; a lone surrogate, which JSON cannot carry, becomes a question mark."""
    return text[:SAMPLE_LENGTH].encode("utf-8", "replace").decode()


def _warnings(learner: Learner, rehearsal: Rehearsal, data: Mapping[str, Any], memory: ProbeMemory) -> Iterator[JobWarning]:
    grpo, result = learner.grpo, rehearsal.first
    metrics, groups = result.metrics, rehearsal.groups
    if not rehearsal.is_whole:
        message = (
            f"a whole step of {grpo.sampling.prompts_per_step} groups would not have ended in time, so {groups} were done: seconds are "
            "scaled up, and the memory of a whole step may be more"
        )
        yield JobWarning(code="partial_probe", param=f"{_SAMPLING}.prompts_per_step", message=message)
    if result.grader_errors:
        message = f"{len(result.grader_errors)} completions could not be graded, for example: {result.grader_errors[0]}"
        yield JobWarning(code="grader_failed", param=_GRADER, message=message[:2000])
    if result.quarantine is not None:
        message = f"{result.quarantine}: no update would be made of this step, and nothing after it was measured"
        yield JobWarning(code="step_quarantined", param=_GRADER, message=message)
    if metrics.get("groups/zero_std_frac") == 1:
        message = (
            f"in each of the {groups} groups all rewards are equal (mean {metrics['reward/mean']:.4g}), so this step teaches nothing: "
            "take a grader that tells completions apart, prompts of another difficulty, or a larger group_size"
        )
        yield JobWarning(code="no_signal", param=_GRADER, message=message)
    if metrics["completion/truncated_frac"] == 1:
        message = f"every completion was cut off at {grpo.sampling.max_completion_tokens} tokens; raise max_completion_tokens"
        yield JobWarning(code="all_truncated", param=f"{_SAMPLING}.max_completion_tokens", message=message)
    if data["num_skipped_long"]:
        message = f"{data['num_skipped_long']} rows leave no room for {grpo.sampling.max_completion_tokens} tokens and are left out"
        yield JobWarning(code="long_prompts", param="training_file", message=message)
    if memory.total_bytes is not None and memory.peak_bytes > TIGHT_SHARE * memory.total_bytes:
        message = f"{memory.peak_bytes:,} of {memory.total_bytes:,} bytes were in use, and completions may grow; {SETTINGS}"
        yield JobWarning(code="memory_tight", param=f"{_RESOURCES}.micro_batch_tokens", message=message)
    for code, message in rehearsal.notes.items():
        yield JobWarning(code=code, param=_RESOURCES, message=message)
