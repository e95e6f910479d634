"""The training loop: at each step boundary commands and limits, then one step, then what it has to say and to save.

The order of a step's words is fixed: `step.completed` first, then what it caused (beta, grader, detectors), then
checkpoints. A resume state of step n therefore never exists before the events of step n do.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator
from typing import Any

from grpo_engine.contract.event import Level, Outcome
from grpo_engine.control import apply_commands
from grpo_engine.evaluation import Evaluation
from grpo_engine.events import EventLog
from grpo_engine.keeper import Keeper
from grpo_engine.learner import Learner
from grpo_engine.outcome import CheckpointFailed, DirectoryGone, GraderBroken, NonFinite, ReferenceMismatch
from grpo_engine.reference_answers import add_reference_answers
from grpo_engine.rescue import enforce
from grpo_engine.rollout_files import RolloutFiles
from grpo_engine.step import StepResult, train_step

MAX_UNGRADED_STEPS = 3
"""Consecutive steps in which no completion could be graded before the run gives up."""


def train(
    learner: Learner, keeper: Keeper, log: EventLog, *, clock: Callable[[], float] = time.monotonic
) -> Generator[StepResult, None, Outcome]:
    """Run from the learner's step to the end, yielding each step. Returns the verdict.

    Raises RunFailure when the run cannot go on.
    """
    started = clock()
    limits = learner.grpo.limits
    rollouts = RolloutFiles(keeper.directory.parent, learner.grpo, learner.policy.tokenizer)

    def elapsed() -> float:
        return learner.elapsed_s + clock() - started

    if keeper.may_roll_back:
        keeper.save_resume(elapsed())
    if learner.step == 0:
        _report_evaluation(log, 0, _evaluate(learner, {}))
    while learner.step < learner.num_steps:
        step = learner.step + 1
        if log.is_gone:
            raise DirectoryGone(f"the directory of this attempt has vanished after step {learner.step}")
        stop, should_save = apply_commands(learner, log, step)
        if stop is not None:
            return _stopped(learner, keeper, stop, elapsed())
        if should_save:
            keeper.publish()
            keeper.save_resume(elapsed())
        if limits.max_seconds is not None and learner.ranks.first(elapsed) >= limits.max_seconds:
            return _finished(learner, keeper, "max_seconds", f"stopped after {limits.max_seconds} s", elapsed())

        result = train_step(learner, step)
        result.metrics["time/checkpoint_s"] = keeper.take_seconds()
        learner.step, learner.readings = step, result.metrics
        if learner.evaluator is not None and learner.evaluator.is_due(step, learner.num_steps):
            result.evaluation = _evaluate(learner, result.metrics)
        add_reference_answers(learner, result)
        problem = rollouts.keep(result) if learner.ranks.is_first else None
        report(learner, log, result)
        _report_rollouts(log, step, problem)
        gate(learner, result)
        _give_up_on_grader(learner, result)
        abort_if_told(learner, result)
        rescued = enforce(learner, keeper, log, elapsed())
        if isinstance(rescued, Outcome):
            yield result
            return rescued
        if rescued == "rolled_back":
            _report_rollouts(log, learner.step, rollouts.rewind(learner.step) if learner.ranks.is_first else None)
            yield result
            continue
        _sync_reference(learner, step)
        if step < learner.num_steps:
            keeper.save_due(elapsed())
        yield result
    return _finished(learner, keeper, "completed", f"{learner.num_steps} steps done", elapsed())


def report(learner: Learner, log: EventLog, result: StepResult) -> None:
    """Emit the step's events."""
    step, metrics = result.step, result.metrics
    beta = metrics["beta/applied"]
    kl = metrics.get("kl/ref/k3/mean")
    message = f"step {step}: " + ", ".join(
        f"{name} {value:.4g}"
        for name, value in (("reward", metrics.get("reward/mean")), ("kl/ref", kl), ("beta", beta))
        if value is not None
    )
    if result.shortcut_problem is not None:
        message = f"prompts are computed once per completion: {result.shortcut_problem}"
        log.emit("shortcut.disabled", message, step=step, level="warn", data={"reason": result.shortcut_problem})
    for reason in result.slow_sampling:
        log.emit("shortcut.disabled", f"sampling takes a slower way: {reason}", step=step, level="warn", data={"reason": reason})
    for budget, name in ((learner.memory, "micro_batch_tokens"), (learner.sampling_memory, "completions_at_once")):
        if (news := budget.take_news()) is not None:
            log.emit("memory.reduced", news, step=step, level="warn", data={name: budget.size})
    data: dict[str, Any] = {"metrics": metrics, "beta": learner.rule.state()}
    if result.kl_details is not None:
        data["kl"] = result.kl_details
    log.emit("step.completed", message, step=step, data=data)
    if result.quarantine is not None:
        log.emit("step.quarantined", f"step {step}: {result.quarantine}; weights and beta hold", step=step, level="error",
                 data={"reason": result.quarantine, "policy": learner.grpo.optimizer.on_nonfinite})  # fmt: skip
    _report_evaluation(log, step, result.evaluation)
    update = result.beta_update
    if update.new != update.old:
        change: dict[str, Any] = {"old": update.old, "new": update.new, "action": update.action, "phase": update.phase}
        message = f"beta {update.old:.6g} -> {update.new:.6g}: {update.reason}"
        log.emit("beta.changed", message, step=step, data={**change, "reason": update.reason})
    if result.grader_errors:
        count = len(result.grader_errors)
        data = {"count": count, "errors": sorted(set(result.grader_errors))[:5]}
        log.emit(
            "grader.failed", f"{count} completions could not be graded: {result.grader_errors[0]}", step=step, level="error", data=data
        )
    for signal in learner.detectors.observe(step, metrics):
        data = {"detector": signal.detector, "since": signal.since, "reading": signal.reading, "threshold": signal.threshold}
        log.emit(f"detector.{signal.kind}", signal.message, step=step, level=signal.level, data=data)


def _evaluate(learner: Learner, metrics: dict[str, float]) -> Evaluation | None:
    """Grade the held-out file with the weights as they are, into `metrics`. None without a file."""
    if learner.evaluator is None:
        return None
    started = time.perf_counter()
    found = learner.evaluator.run(learner.policy, learner.sampling_memory)
    metrics["time/evaluate_s"] = time.perf_counter() - started
    if found.reward_mean is not None:
        metrics["eval/reward_mean"] = found.reward_mean
    return found


def _report_evaluation(log: EventLog, step: int, found: Evaluation | None) -> None:
    if found is None:
        return
    mean, data = found.reward_mean, {"after_step": step, **found.to_json()}
    shown = "no completion could be graded" if mean is None else f"mean reward {mean:.4g}"
    level: Level = "error" if mean is None else "warn" if found.errors else "info"
    message = f"held-out file after step {step}: {shown} over {data['num_prompts']} prompts"
    log.emit("evaluation.completed", message, step=step, level=level, data=data)


def _report_rollouts(log: EventLog, step: int, problem: str | None) -> None:
    if problem is not None:
        log.emit("rollouts.failed", f"{problem}; training goes on", step=step, level="error", data={"reason": problem})


def gate(learner: Learner, result: StepResult) -> None:
    """Step 1 begins with the reference's own weights, so its KL must read 0; anything else makes every later number wrong.

    Raises ReferenceMismatch.
    """
    gate = learner.grpo.diagnostics.ref_mismatch
    kl = result.metrics.get("kl/ref/k3/mean")
    is_first = result.step == 1 and learner.reference_sha256 == learner.policy.sha256
    if gate.enabled and is_first and kl is not None and math.isfinite(kl) and kl > gate.kl:
        raise ReferenceMismatch(
            f"kl/ref at step 1 is {kl:.3g} nats per token where policy and reference are the same weights; they do not compute alike",
            param="method.grpo.reference",
        )


def _give_up_on_grader(learner: Learner, result: StepResult) -> None:
    """Count steps without a grade; raises GraderBroken after too many in a row, earlier attempts' included."""
    learner.num_ungraded = learner.num_ungraded + 1 if result.metrics["grader/failed_frac"] == 1 else 0
    if learner.num_ungraded >= MAX_UNGRADED_STEPS:
        raise GraderBroken(f"no completion could be graded in {learner.num_ungraded} steps in a row: {result.grader_errors[0]}")


def abort_if_told(learner: Learner, result: StepResult) -> None:
    """Raises NonFinite after a step whose update was not applied, when the job asks for that."""
    if result.quarantine is not None and learner.grpo.optimizer.on_nonfinite == "abort":
        raise NonFinite(f"step {result.step}: {result.quarantine}; the weights are those of before it")


def _sync_reference(learner: Learner, step: int) -> None:
    cfg = learner.grpo.reference
    if learner.reference is not None and cfg.sync_every is not None and step % cfg.sync_every == 0:
        learner.reference.sync(learner.policy, cfg.mixup_alpha)
        learner.num_reference_syncs += 1


def _stopped(learner: Learner, keeper: Keeper, reason: str, elapsed_s: float) -> Outcome:
    if not keeper.save_resume(elapsed_s):
        raise CheckpointFailed(f"{reason} at step {learner.step}: the resume state could not be written")
    return Outcome(
        status="stopped",
        reason=reason,
        message=f"stopped by {reason} after step {learner.step}",
        retryable=True,
        last_step=learner.step,
        resume_checkpoint=keeper.newest_resume,
    )


def _finished(learner: Learner, keeper: Keeper, reason: str, message: str, elapsed_s: float) -> Outcome:
    if not keeper.publish():
        raise CheckpointFailed(f"{message}, but the final weights could not be written")
    keeper.save_resume(elapsed_s)
    return Outcome(
        status="succeeded",
        reason=reason,
        message=message,
        retryable=False,
        last_step=learner.step,
        resume_checkpoint=keeper.newest_resume,
    )
