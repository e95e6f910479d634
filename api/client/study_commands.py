"""`grpo fork, compare, rollouts, validate, guardrails`: what is asked of jobs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from api.client.display import duration, number, size, sparkline
from api.client.download import choose
from api.client.errors import ClientError
from api.client.sync import DEFAULT_URL, Grpo
from api.client.terminal import (
    IdempotencyKey,
    JobId,
    Json,
    Key,
    Names,
    TrainingFile,
    Url,
    Wait,
    console,
    finish,
    follow,
    load_object,
    parse_json,
    print_json,
    reading,
    say,
    show,
    table,
    with_training_file,
)
from grpo_engine.contract.probe_view import Probe
from grpo_engine.contract.rollout import KeptCompletion
from grpo_engine.contract.study_view import ComparedJob, ComparedSeries

Axis = Literal["step", "kl"]


def fork(
    job_id: JobId,
    checkpoint: Annotated[str | None, typer.Option(help="Id, name or step to go on from; the newest by default.")] = None,
    beta: Annotated[float | None, typer.Option(min=0, help="Another fixed beta.")] = None,
    overrides: Annotated[str | None, typer.Option(help="""JSON to change, such as '{"method": {"grpo": {"beta": 0.08}}}'.""")] = None,
    suffix: Annotated[str | None, typer.Option(help="Name of the new job.")] = None,
    wait: Wait = False,
    idempotency_key: IdempotencyKey = None,
    as_json: Json = False,
    url: Url = DEFAULT_URL,
    api_key: Key = None,
) -> None:
    """Go on from a checkpoint of a job with other settings, as a new job."""
    changes = {} if overrides is None else parse_json(overrides, "--overrides")
    if not isinstance(changes, dict):
        raise ClientError("--overrides holds no JSON object")
    if beta is not None:
        changes = _with_beta(changes, beta)
    with Grpo(url, api_key) as client:
        chosen = None if checkpoint is None else choose(client.checkpoints(job_id), checkpoint).id
        job = client.fork(job_id, checkpoint=chosen, overrides=changes, suffix=suffix, idempotency_key=idempotency_key)
        if not wait:
            show(job, as_json, f"job {job.id} goes on from {job.lineage.parent_checkpoint}; follow it with: grpo watch {job.id}")
            return
        finish(follow(client, job, is_silent=as_json), as_json)


def compare(
    job_ids: Annotated[list[str], typer.Argument(metavar="JOB...", help="Two or more job ids.")],
    names: Names = None,
    align: Annotated[Axis, typer.Option(help="What curves are read over: step, or kl for reward at equal KL.")] = "step",
    as_json: Json = False,
    url: Url = DEFAULT_URL,
    api_key: Key = None,
) -> None:
    """Set jobs side by side, and their checkpoints by what reward they bought for how much KL."""
    with Grpo(url, api_key) as client:
        found = client.compare(job_ids, names, align=align)
    if as_json:
        print_json(found.model_dump(mode="json"))
        return
    table(
        ("job", "status", "steps", "metric", "first", "last", "curve"),
        [_curve_row(job, series) for job in found.data for series in job.series],
        [],
        as_json=False,
    )
    if found.frontier:
        say("\nreward for KL, by checkpoint (* = nothing earns more for as little)")
        rows = [
            (point.checkpoint_id, point.job_id, str(point.step), reading(point.ref_kl), reading(point.reward), reading(point.beta),
             "*" if point.is_on_frontier else "")
            for point in found.frontier
        ]  # fmt: skip
        table(("checkpoint", "job", "step", "kl/ref", "reward", "beta", ""), rows, [], as_json=False)


def rollouts(
    job_id: JobId,
    step: Annotated[int | None, typer.Option(min=1, help="Step; the latest kept by default.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="Completions to show.")] = 4,
    after: Annotated[int | None, typer.Option(min=0, help="Begin after the completion with this index.")] = None,
    as_json: Json = False,
    url: Url = DEFAULT_URL,
    api_key: Key = None,
) -> None:
    """Read what the model wrote in a step, and what each completion earned."""
    with Grpo(url, api_key) as client:
        page = client.rollouts(job_id, step=step, after=after, limit=limit)
    if as_json:
        print_json(page.model_dump(mode="json"))
        return
    say(f"step {page.step}, attempt {page.attempt}: {len(page.data)} of {page.num_completions} completions")
    for one in page.data:
        _print_completion(one)
    if page.has_more:
        say(f"\nmore: grpo rollouts {job_id} --step {page.step} --after {page.data[-1].index}")


def validate(
    spec: Annotated[Path, typer.Argument(help="Job as JSON.", exists=True, dir_okay=False)],
    training_file: TrainingFile = None,
    probe: Annotated[bool, typer.Option("--probe", help="Run its first step on a worker and say what the job will cost.")] = False,
    as_json: Json = False,
    url: Url = DEFAULT_URL,
    api_key: Key = None,
) -> None:
    """Check a job without making it."""
    body = load_object(spec)
    with Grpo(url, api_key) as client:
        found = client.validate(with_training_file(client, body, training_file), probe=probe)
    if as_json:
        print_json(found.model_dump(mode="json"))
        return
    disk = "size unknown" if found.disk_bytes_needed is None else f"about {size(found.disk_bytes_needed)} of disk"
    say(f"valid: {found.rows} rows, {disk}")
    if found.probe is not None:
        _print_probe(found.probe)
    for warning in [*found.warnings, *(found.probe.warnings if found.probe is not None else ())]:
        say(f"warning: {warning.param}: {warning.message}")


def guardrails(
    job_id: JobId,
    rules: Annotated[
        Path | None, typer.Option(help="JSON with `diagnostics` (thresholds to change) or `guardrails`.", exists=True, dir_okay=False)
    ] = None,
    as_json: Json = False,
    url: Url = DEFAULT_URL,
    api_key: Key = None,
) -> None:
    """Dry run: what detectors and guardrails would have done over a job's metrics, by its own rules or by others."""
    wanted = {} if rules is None else load_object(rules)
    if unknown := sorted(wanted.keys() - {"diagnostics", "guardrails"}):
        raise ClientError(f"{rules} has the key {unknown[0]!r}; it may have diagnostics and guardrails")
    with Grpo(url, api_key) as client:
        found = client.replay_guardrails(job_id, diagnostics=wanted.get("diagnostics"), guardrails=wanted.get("guardrails"))
    if as_json:
        print_json(found.model_dump(mode="json"))
        return
    for event in found.data:
        say(f"step {event.step}  {event.kind:<7}  {event.detector}  {event.message}")
    if not found.data:
        say(f"nothing would have fired in {found.num_steps} steps")


COMMANDS: dict[str, Callable[..., None]] = {
    "validate": validate,
    "fork": fork,
    "compare": compare,
    "rollouts": rollouts,
    "guardrails": guardrails,
}


def _with_beta(changes: dict[str, Any], beta: float) -> dict[str, Any]:
    method = changes.get("method", {})
    grpo = method.get("grpo", {}) if isinstance(method, dict) else None
    if not isinstance(grpo, dict) or "beta" in grpo:
        raise ClientError("--overrides holds a beta (or no object where one belongs); give beta in one place only")
    return {**changes, "method": {**method, "grpo": {**grpo, "beta": beta}}}


def _curve_row(job: ComparedJob, series: ComparedSeries) -> tuple[str, ...]:
    values = [number(point.model_dump()["value"]) for point in series.points]
    ends = (reading(values[0]), reading(values[-1])) if values else ("-", "-")
    return job.job_id, job.status, str(job.last_step), series.name, *ends, sparkline(values, 16, console.encoding)


def _print_completion(one: KeptCompletion) -> None:
    shown = one.model_dump()
    parts = "".join(f"  {name} {reading(value)}" for name, value in shown["parts"].items())
    end = "  cut off" if one.is_truncated else ""
    say(
        f"\n#{one.index}  reward {reading(shown['reward'])}{parts}  advantage {reading(shown['advantage'])}"
        f"  kl {reading(shown['kl'])}  {one.num_tokens} tokens{end}"
    )
    for label, text in (("prompt", one.prompt), ("completion", one.completion)):
        lines = ["(not kept)"] if text is None else text.splitlines() or [""]
        say(f"  {label:<11}{lines[0]}")
        for line in lines[1:]:
            say(f"  {'':<11}{line}")


def _print_probe(probe: Probe) -> None:
    shown = probe.model_dump()
    kl = "not measured" if shown["kl"] is None else f"{reading(shown['kl']['value'])} ({shown['kl']['estimator']})"
    of = "" if probe.memory.total_bytes is None else f" of {size(probe.memory.total_bytes)}"
    lines = {
        "step": f"{probe.seconds.step:.3g} s (sampling {reading(probe.seconds.sampling)}, update {reading(probe.seconds.update)})",
        "whole job": f"{duration(probe.estimated_seconds)} for {probe.num_steps} steps on {probe.device} ({probe.precision})",
        "memory": f"{size(probe.memory.peak_bytes)}{of} ({probe.memory.kind})",
        "kl, step 1": kl,
        "reward": f"{reading(shown['reward_mean'])} +- {reading(shown['reward_std'])}",
        "no signal": f"{reading(probe.zero_variance_share)} of the groups (all their rewards are equal)",
        "cut off": f"{probe.truncated_share:.3g} of the completions",
    }
    for label, text in lines.items():
        say(f"  {label:<11}{text}")
