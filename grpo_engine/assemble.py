"""From a dispatch to a learner ready for its next step: model, reference, data, graders, and the state to resume from."""

from __future__ import annotations

import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import transformers
from transformers.utils.logging import disable_progress_bar

from grpo_engine.beta import BetaRule
from grpo_engine.checkpoint import read_resume
from grpo_engine.commands import COMMANDS_FILE, CommandInbox, read_replays
from grpo_engine.contract.command import Dispatch
from grpo_engine.dataset import Dataset, make_prompts
from grpo_engine.device import Device, choose_device, keep_freed_memory, seed_everything
from grpo_engine.diagnostics import Detectors
from grpo_engine.events import EventLog
from grpo_engine.grader import GraderPool, make_grader
from grpo_engine.learner import Learner
from grpo_engine.optimizer import Optimizer
from grpo_engine.outcome import ConfigError
from grpo_engine.policy import Policy, load_policy
from grpo_engine.reference import Reference, load_reference
from grpo_engine.rows import RowReport, read_rows

DEFAULT_CACHE = "~/.cache/grpo"
PROGRESS_EVERY_S = 1.0
"""Provisioning events come at most this often."""


@contextmanager
def assemble(dispatch: Dispatch, run_dir: Path, log: EventLog) -> Iterator[Learner]:
    """Load everything the dispatch names, cheapest first, and close the graders at the end.

    Raises ConfigError or InvalidRequest naming the field that is wrong, CheckpointDamaged, ReferenceMismatch.
    """
    grpo = dispatch.spec.method.grpo
    resume_dir = _inside(run_dir, dispatch.resume_from)
    manifest, resume = read_resume(resume_dir) if resume_dir is not None else (None, None)
    if dispatch.epoch > 1 or resume is not None:
        to_step = resume.step if resume is not None else 0
        log.emit("run.rewound", f"attempt {dispatch.epoch} continues after step {to_step}", data={"to_step": to_step})
    device = choose_device(grpo.resources)
    seed_everything(dispatch.spec.seed)
    keep_freed_memory()
    _announce_start(log, device)
    disable_progress_bar()
    report = read_rows(_training_file(run_dir, dispatch), grpo.data)
    assert grpo.grader is not None, "environments are refused by contract/support.py"
    with make_grader(grpo.grader) as grader:
        policy = _load_policy(dispatch, device, log)
        reference = _load_reference(dispatch, run_dir, policy)
        dataset = _load_data(report, policy, dispatch, log)
        learner = _learner(dispatch, policy, reference, dataset, grader, run_dir)
        _announce_model(log, learner)
        if resume is not None and manifest is not None and resume_dir is not None:
            replays = read_replays(run_dir, resume_dir, manifest.epoch, dispatch.epoch, resume.step)
            learner.restore(resume, replays)
        yield learner


def _inside(run_dir: Path, path: str | None) -> Path | None:
    """A path of the dispatch: absolute, or relative to the attempt directory."""
    return None if path is None else (run_dir / path).resolve()


def _announce_start(log: EventLog, device: Device) -> None:
    data = {
        "device": str(device.device),
        "precision": device.precision,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }
    log.emit("engine.started", f"engine started on {data['device']} in {data['precision']}", data=data)


def _training_file(run_dir: Path, dispatch: Dispatch) -> Path:
    path = _inside(run_dir, dispatch.training_file)
    if path is None:
        raise ConfigError("the dispatch names no training_file; add its path", param="training_file")
    if not path.is_file():
        raise ConfigError(f"the training file {path} does not exist; check the path", param="training_file")
    return path


def _load_policy(dispatch: Dispatch, device: Device, log: EventLog) -> Policy:
    shown_at = 0.0

    def on_progress(done: int, total: int | None, what: str) -> None:
        nonlocal shown_at
        if total is None or done >= total or time.monotonic() - shown_at >= PROGRESS_EVERY_S:
            shown_at = time.monotonic()
            log.emit("model.provisioning", f"{what}: {done:,} bytes of {total or 'unknown'}", data={"bytes": done, "total_bytes": total})

    policy = load_policy(
        dispatch.spec.model,
        device,
        Path(dispatch.cache_dir) if dispatch.cache_dir else Path(DEFAULT_CACHE).expanduser(),
        Path(dispatch.model_dir) if dispatch.model_dir else None,
        on_progress,
    )
    if dispatch.spec.method.grpo.resources.activation_checkpointing:
        policy.set_activation_checkpointing(True)
    return policy


def _load_reference(dispatch: Dispatch, run_dir: Path, policy: Policy) -> Reference | None:
    """The frozen reference, or None when no step can need it: beta 0 without monitoring holds no second set of weights."""
    if not dispatch.spec.method.grpo.loads_reference:
        return None
    return load_reference(policy, _inside(run_dir, dispatch.reference_from))


def _load_data(report: RowReport, policy: Policy, dispatch: Dispatch, log: EventLog) -> Dataset:
    grpo = dispatch.spec.method.grpo
    prompts, num_long = make_prompts(
        report.rows,
        policy.tokenizer,
        grpo.data,
        context_length=policy.context_length,
        max_completion_tokens=grpo.sampling.max_completion_tokens,
    )
    longest = max(len(prompt.token_ids) for prompt in prompts)
    data = {**report.to_json(), "num_prompts": len(prompts), "num_skipped_long": num_long, "longest_prompt_tokens": longest}
    message = f"{len(prompts)} prompts, {num_long} skipped as too long, {report.num_bad} bad rows left out"
    log.emit("data.loaded", message, level="warn" if num_long or report.num_bad else "info", data=data)
    return Dataset(prompts, dispatch.spec.seed, should_shuffle=grpo.data.shuffle)


def _learner(
    dispatch: Dispatch, policy: Policy, reference: Reference | None, dataset: Dataset, grader: GraderPool, run_dir: Path
) -> Learner:
    grpo = dispatch.spec.method.grpo
    rule = BetaRule.create(grpo.beta, grpo.limits.num_steps)
    reference_sha256 = reference.sha256 if reference is not None else None
    rule.ref_sha256 = reference_sha256
    return Learner(
        job_id=dispatch.job_id,
        epoch=dispatch.epoch,
        seed=dispatch.spec.seed,
        grpo=grpo,
        policy=policy,
        reference=reference,
        dataset=dataset,
        grader=grader,
        optimizer=Optimizer(policy.masters, grpo.optimizer),
        rule=rule,
        detectors=Detectors(grpo),
        inbox=CommandInbox(run_dir / COMMANDS_FILE),
        base_learning_rate=grpo.optimizer.learning_rate,
        reference_sha256=reference_sha256,
    )


def _announce_model(log: EventLog, learner: Learner) -> None:
    policy = learner.policy
    parameters = policy.num_parameters
    data = {
        "parameters": parameters,
        "context_length": policy.context_length,
        "policy_sha256": policy.sha256,
        "reference_sha256": learner.reference_sha256,
        "has_reference": learner.reference is not None,
    }
    log.emit("model.loaded", f"policy with {parameters:,} parameters in memory", data=data)
