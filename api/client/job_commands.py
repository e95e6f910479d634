"""`grpo show, outcome, integrity, presets`: where a job stands, how it ended, whether its telemetry is whole; and named defaults."""

from __future__ import annotations

from collections.abc import Callable

import typer

from api.client.sync import DEFAULT_URL, Grpo
from api.client.terminal import JobId, Json, Key, Url, reading, show, table
from grpo_engine.contract.view import Integrity, Job


def show_job(job_id: JobId, as_json: Json = False, url: Url = DEFAULT_URL, api_key: Key = None) -> None:
    """Show one job: state, progress, KL and beta, what it comes from, and what is wrong with it."""
    with Grpo(url, api_key) as client:
        job = client.job(job_id)
    show(job, as_json, "\n".join(_lines(job)))


def outcome(job_id: JobId, as_json: Json = False, url: Url = DEFAULT_URL, api_key: Key = None) -> None:
    """Say how a job ended. Exits with 0 only when it succeeded, with 1 also while it has not ended."""
    with Grpo(url, api_key) as client:
        found = client.outcome(job_id)
    words = f"job {job_id} {found.status} after step {found.last_step}"
    if found.error is not None:
        words += f": {found.error.message}"
    if found.fine_tuned_model is not None:
        words += f"; its weights are {found.fine_tuned_model}"
    show(found, as_json, words)
    raise typer.Exit(0 if found.status == "succeeded" else 1)


def integrity(job_id: JobId, as_json: Json = False, url: Url = DEFAULT_URL, api_key: Key = None) -> None:
    """Say whether the telemetry is whole: missing steps, gaps, what is not in the database yet. Exits with 1 when it is not whole."""
    with Grpo(url, api_key) as client:
        found = client.integrity(job_id)
    show(found, as_json, _wholeness(found))
    raise typer.Exit(0 if found.is_complete else 1)


def presets(as_json: Json = False, url: Url = DEFAULT_URL, api_key: Key = None) -> None:
    """List named defaults; method.grpo.preset takes the name and, where there are sizes, one of them."""
    with Grpo(url, api_key) as client:
        found = client.presets()
    rows = [(card.name, ", ".join(card.sizes), card.description) for card in found]
    table(("preset", "sizes", "what it is"), rows, found, as_json)


COMMANDS: dict[str, Callable[..., None]] = {"show": show_job, "outcome": outcome, "integrity": integrity, "presets": presets}


def _lines(job: Job) -> list[str]:
    lines = [f"job {job.id} is {job.status} ({job.phase}), attempt {job.attempt}"]
    if job.status_reason is not None:
        lines.append(f"  reason     {job.status_reason}")
    if job.error is not None:
        lines.append(f"  error      {job.error.code}: {job.error.message}")
    lines.append(f"  model      {job.model}" + (f" -> {job.fine_tuned_model}" if job.fine_tuned_model else ""))
    lines.append(f"  step       {job.progress.step}/{job.progress.num_steps}")
    if job.kl is not None:
        kl = job.kl.model_dump()
        target = "" if kl["target"] is None else f"  target {reading(kl['target'])}"
        lines.append(f"  kl/ref     {reading(kl['ref_kl'])}  beta {reading(kl['beta'])}{target}  ({job.kl.divergence})")
    if job.queue is not None:
        lines.append(f"  queue      place {job.queue.position}" + (f": {job.queue.note}" if job.queue.note else ""))
    if job.lineage.parent_job is not None:
        lines.append(f"  from       {job.lineage.parent_checkpoint} of {job.lineage.parent_job}")
    if job.lineage.forks:
        lines.append(f"  forks      {', '.join(job.lineage.forks)}")
    if job.lineage.sweep is not None:
        lines.append(f"  sweep      {job.lineage.sweep.id}, as {job.lineage.sweep.member}")
    lines += [f"  label      {name} = {text}" for name, text in job.metadata.items()]
    return lines + [f"  warning    {warning.param}: {warning.message}" for warning in job.warnings]


def _wholeness(found: Integrity) -> str:
    lag = "how far the database is behind is unknown" if found.ingest_lag is None else f"{found.ingest_lag} events not in the database yet"
    state = "whole" if found.is_complete else f"not whole: {len(found.missing_steps)} steps missing, {found.num_gaps} gaps"
    if found.missing_steps:
        state += f", the first at step {found.missing_steps[0]}"
    return f"{state}; {found.num_steps} steps to step {found.last_step}, {found.num_superseded} superseded, {lag}"
