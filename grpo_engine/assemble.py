"""From a dispatch to a learner ready for its next step: model, reference, data, graders, and the state to resume from."""

from __future__ import annotations

import platform
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.utils.logging import disable_progress_bar

from grpo_engine.batch import Prompt
from grpo_engine.beta import BetaRule
from grpo_engine.checkpoint import MANIFEST_FILE, read_resume, verify
from grpo_engine.commands import COMMANDS_FILE, CommandInbox, read_replays
from grpo_engine.contract.command import Dispatch
from grpo_engine.contract.error import InvalidRequest
from grpo_engine.dataset import Dataset, make_prompts, num_untemplated
from grpo_engine.device import Device, choose_device, keep_freed_memory, seed_everything
from grpo_engine.diagnostics import Detectors
from grpo_engine.environment import training_grader, with_environment_files
from grpo_engine.evaluation import Evaluator
from grpo_engine.events import EventLog
from grpo_engine.grader import GraderPool, Means, ModelPlaces, make_grader
from grpo_engine.grading import start_graders
from grpo_engine.learner import Learner
from grpo_engine.models import model_folder
from grpo_engine.optimizer import Optimizer
from grpo_engine.outcome import CheckpointDamaged, ConfigError
from grpo_engine.policy import Policy, load_policy, load_policy_folder
from grpo_engine.ranks import ALONE, Ranks
from grpo_engine.reference import Reference, load_reference
from grpo_engine.rows import RowReport, read_rows

NAMED_MODEL = "model:"
DEFAULT_CACHE = "~/.cache/grpo"
TRAINING_FILE, VALIDATION_FILE = "training_file", "validation_file"
PROGRESS_EVERY_S = 1.0
"""Provisioning events come at most this often."""


@contextmanager
def assemble(dispatch: Dispatch, run_dir: Path, log: EventLog, ranks: Ranks = ALONE) -> Iterator[Learner]:
    """Load everything the dispatch names, cheapest first, and close the graders at the end. Every rank loads for itself.

    Raises ConfigError or InvalidRequest naming the field that is wrong, CheckpointDamaged, ReferenceMismatch.
    """
    grpo = dispatch.spec.method.grpo
    resume_dir = _inside(run_dir, dispatch.resume_from)
    manifest, resume = read_resume(resume_dir) if resume_dir is not None else (None, None)
    if dispatch.epoch > 1 or resume is not None:
        to_step = resume.step if resume is not None else 0
        log.emit("run.rewound", f"attempt {dispatch.epoch} continues after step {to_step}", data={"to_step": to_step})
    device = choose_device(grpo.resources, ranks.local, ranks.hosts)
    seed_everything(dispatch.spec.seed)
    keep_freed_memory()
    _announce_start(log, device, ranks)
    disable_progress_bar()
    dispatch = ranks.first(lambda: with_environment_files(dispatch, run_dir))
    report = read_rows(_data_file(run_dir, dispatch.training_file, TRAINING_FILE), grpo.data)
    held_out = None
    if grpo.evaluation is not None:
        held_out = read_rows(_data_file(run_dir, dispatch.validation_file, VALIDATION_FILE), grpo.data, param=VALIDATION_FILE)
    means = Means(dispatch.remote_graders, ModelPlaces(_cache_dir(dispatch), _model_dir(dispatch)))
    with ExitStack() as open_graders:
        grader = open_graders.enter_context(training_grader(dispatch.spec, means))
        gold = grader
        if grpo.evaluation is not None and grpo.evaluation.grader is not None:
            gold = open_graders.enter_context(make_grader(grpo.evaluation.grader, means=means))
        grader_sha256 = start_graders(grader, gold, ranks)
        policy = _load_policy(dispatch, run_dir, device, log, ranks)
        reference = _load_reference(dispatch, run_dir, policy)
        if _is_divided(dispatch):
            policy.divide()
            if reference is not None:
                reference.divide(policy)
        evaluator, about = _load_held_out(held_out, policy, gold, dispatch)
        dataset = _load_data(report, policy, dispatch, log, about)
        learner = _learner(dispatch, policy, reference, dataset, grader, evaluator, run_dir)
        learner.grader_sha256 = grader_sha256
        _announce_model(log, learner)
        if resume is not None and manifest is not None and resume_dir is not None:
            replays = read_replays(run_dir, resume_dir, manifest.epoch, dispatch.epoch, resume.step)
            learner.restore(resume, replays)
        yield learner


def _inside(run_dir: Path, path: str | None) -> Path | None:
    """A path of the dispatch: absolute, or relative to the attempt directory."""
    return None if path is None else (run_dir / path).resolve()


def _announce_start(log: EventLog, device: Device, ranks: Ranks) -> None:
    several = {"ranks": ranks.size, "hosts": ranks.hosts, "strategy": "ddp" if ranks.mesh is None else "fsdp"} if ranks.size > 1 else {}
    data = {
        **several,
        "device": str(device.device),
        "precision": device.precision,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }
    log.emit("engine.started", f"engine started on {data['device']} in {data['precision']}", data=data)


def _data_file(run_dir: Path, name: str | None, param: str) -> Path:
    path = _inside(run_dir, name)
    if path is None:
        raise ConfigError(f"the dispatch names no {param}; add its path", param=param)
    if not path.is_file():
        raise ConfigError(f"the {param.replace('_', ' ')} {path} does not exist; check the path", param=param)
    return path


def _weights_folder(run_dir: Path, path: str, param: str) -> Path:
    """A folder of weights the dispatch names; one with a manifest is compared with it. Raises ConfigError."""
    folder = (run_dir / path).resolve()
    if not folder.is_dir():
        raise ConfigError(f"the weights folder {folder} does not exist; check the path", param=param)
    if (folder / MANIFEST_FILE).exists():
        try:
            verify(folder)
        except CheckpointDamaged as error:
            raise ConfigError(f"the checkpoint cannot be used: {error.message}", param=param) from error
    return folder


def _load_policy(dispatch: Dispatch, run_dir: Path, device: Device, log: EventLog, ranks: Ranks) -> Policy:
    shown_at = 0.0

    def on_progress(done: int, total: int | None, what: str) -> None:
        nonlocal shown_at
        if total is None or done >= total or time.monotonic() - shown_at >= PROGRESS_EVERY_S:
            shown_at = time.monotonic()
            log.emit("model.provisioning", f"{what}: {done:,} bytes of {total or 'unknown'}", data={"bytes": done, "total_bytes": total})

    spec, is_divided = dispatch.spec, _is_divided(dispatch)
    lora, seed = spec.method.grpo.adapter, spec.seed
    if dispatch.model_from is not None:
        folder = _weights_folder(run_dir, dispatch.model_from, "model")
        policy = load_policy_folder(folder, device, lora=lora, seed=seed, name=spec.model, is_divided=is_divided)
    elif spec.model.startswith("ftckpt-"):
        raise ConfigError("the model is a checkpoint and the dispatch names no model_from; add its directory", param="model")
    else:
        cache_dir, model_dir = _cache_dir(dispatch), _model_dir(dispatch)
        if ranks.size > 1:  # fetched once; the others find it in the cache
            ranks.first(lambda: model_folder(spec.model, cache_dir, model_dir, on_progress))
        policy = load_policy(spec.model, device, cache_dir, model_dir, on_progress, lora=lora, seed=seed, is_divided=is_divided)
    policy.ranks = ranks
    if set(ranks.gather([policy.sha256])) != {policy.sha256}:
        raise ConfigError("the ranks have read different weights; give every host the same model files", param="model")
    if dispatch.spec.method.grpo.resources.activation_checkpointing:
        policy.set_activation_checkpointing(True)
    return policy


def _is_divided(dispatch: Dispatch) -> bool:
    return dispatch.spec.method.grpo.resources.strategy == "fsdp"


def _load_reference(dispatch: Dispatch, run_dir: Path, policy: Policy) -> Reference | None:
    """The frozen reference, or None when no step can need it: beta 0 without monitoring holds no second set of weights."""
    grpo, param = dispatch.spec.method.grpo, "method.grpo.reference.source"
    if not grpo.loads_reference:
        return None
    source = grpo.reference.source
    if source.startswith(NAMED_MODEL):
        return _named_reference(dispatch, policy, source.removeprefix(NAMED_MODEL), param)
    if dispatch.reference_from is None:
        if grpo.reference.source.startswith("checkpoint:"):
            raise ConfigError("the reference is a checkpoint and the dispatch names no reference_from; add its directory", param=param)
        return load_reference(policy, is_divided=_is_divided(dispatch))
    folder = _weights_folder(run_dir, dispatch.reference_from, param)
    try:
        return load_reference(policy, folder, is_divided=_is_divided(dispatch))
    except ValueError as error:
        raise ConfigError(f"{error}; name a checkpoint of the same model", param=param) from error


def _named_reference(dispatch: Dispatch, policy: Policy, name: str, param: str) -> Reference:
    """A base model as the reference: what a job that goes on from a checkpoint is measured against."""
    try:
        folder = model_folder(name, _cache_dir(dispatch), _model_dir(dispatch), lambda done, total, what: None)
        return load_reference(policy, folder, is_divided=_is_divided(dispatch))
    except InvalidRequest as error:
        raise ConfigError(error.message, param=param) from error
    except ValueError as error:
        raise ConfigError(f"{error}; name the model the job's checkpoint comes from", param=param) from error


def _cache_dir(dispatch: Dispatch) -> Path:
    return Path(dispatch.cache_dir) if dispatch.cache_dir else Path(DEFAULT_CACHE).expanduser()


def _model_dir(dispatch: Dispatch) -> Path | None:
    return Path(dispatch.model_dir) if dispatch.model_dir else None


def _load_held_out(
    report: RowReport | None, policy: Policy, grader: GraderPool, dispatch: Dispatch
) -> tuple[Evaluator | None, dict[str, Any]]:
    """The evaluator, and what `data.loaded` says about its file. Raises ConfigError with `param` validation_file."""
    cfg = dispatch.spec.method.grpo.evaluation
    if report is None or cfg is None:
        return None, {}
    try:
        prompts, about = _prompts(report, policy, dispatch)
    except ConfigError as error:
        raise ConfigError(error.message, param=VALIDATION_FILE if error.param == TRAINING_FILE else error.param) from error
    chosen = prompts[: cfg.max_prompts]
    evaluator = Evaluator(chosen, grader, dispatch.spec.method.grpo.sampling, dispatch.spec.seed, cfg.every)
    return evaluator, {"validation": {**about, "num_evaluated": len(chosen)}}


def _prompts(report: RowReport, policy: Policy, dispatch: Dispatch) -> tuple[list[Prompt], dict[str, Any]]:
    grpo = dispatch.spec.method.grpo
    prompts, num_long = make_prompts(
        report.rows,
        policy.tokenizer,
        grpo.data,
        context_length=policy.context_length,
        max_completion_tokens=grpo.sampling.max_completion_tokens,
    )
    longest = max(len(prompt.token_ids) for prompt in prompts)
    counts = {
        "num_prompts": len(prompts),
        "num_skipped_long": num_long,
        "longest_prompt_tokens": longest,
        "num_untemplated": num_untemplated(report.rows, policy.tokenizer, grpo.data),
    }
    return prompts, {**report.to_json(), **counts}


def _load_data(report: RowReport, policy: Policy, dispatch: Dispatch, log: EventLog, about: dict[str, Any]) -> Dataset:
    grpo = dispatch.spec.method.grpo
    prompts, found = _prompts(report, policy, dispatch)
    num_long, data = found["num_skipped_long"], {**found, **about}
    message = f"{len(prompts)} prompts, {num_long} skipped as too long, {report.num_bad} bad rows left out"
    if data["num_untemplated"]:
        message += (
            f"; {data['num_untemplated']} rows are plain text and are fed without the model's chat template: set data.prompt_as to 'user' "
            "to make them user messages, or to 'text' when this is meant"
        )
    is_doubtful = num_long or report.num_bad or data["num_untemplated"]
    log.emit("data.loaded", message, level="warn" if is_doubtful else "info", data=data)
    return Dataset(prompts, dispatch.spec.seed, should_shuffle=grpo.data.shuffle)


def _learner(
    dispatch: Dispatch, policy: Policy, reference: Reference | None, dataset: Dataset, grader: GraderPool,
    evaluator: Evaluator | None, run_dir: Path,
) -> Learner:  # fmt: skip
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
        optimizer=Optimizer(policy.masters, grpo.optimizer, policy.sharding),
        rule=rule,
        detectors=Detectors(grpo),
        inbox=CommandInbox(run_dir / COMMANDS_FILE, policy.ranks.first),
        base_learning_rate=grpo.optimizer.learning_rate,
        reference_sha256=reference_sha256,
        evaluator=evaluator,
    )


def _announce_model(log: EventLog, learner: Learner) -> None:
    policy = learner.policy
    parameters, trained = policy.num_in_memory, policy.num_parameters
    data = {
        "parameters": parameters,
        "trained_parameters": trained,
        "adapted_layers": len(policy.adapter.layers) if policy.adapter is not None else 0,
        "context_length": policy.context_length,
        "policy_sha256": policy.sha256,
        "reference_sha256": learner.reference_sha256,
        **({"grader_sha256": learner.grader_sha256} if learner.grader_sha256 else {}),
        "has_reference": learner.reference is not None,
    }
    log.emit("model.loaded", f"policy with {parameters:,} parameters in memory, {trained:,} of them trained", data=data)
