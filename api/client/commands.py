"""The client half of the `grpo` command: submit, watch, steer and fetch, over HTTP only."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from api.client import checkpoint_commands, grader_commands, job_commands, study_commands, sweep_commands, webhook_commands
from api.client.display import event_line
from api.client.download import choose, download, fetch_file
from api.client.errors import ClientError
from api.client.sync import DEFAULT_URL, Grpo
from api.client.terminal import (
    PANEL,
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
    print_json,
    reading,
    show,
    table,
    with_training_file,
)
from grpo_engine.contract.view import Job


def register(app: typer.Typer) -> None:
    """Put the commands on the application."""
    named: dict[str, Callable[..., None]] = {
        "submit": submit,
        "list": list_jobs,
        "watch": watch,
        "metrics": metrics,
        "events": events,
        "logs": logs,
        "control": control,
        "pause": pause,
        "resume": resume,
        "cancel": cancel,
        "pull": pull,
        "files": files,
        "models": models,
    }
    named.update(job_commands.COMMANDS)
    named.update(study_commands.COMMANDS)
    named.update(checkpoint_commands.COMMANDS)
    for name, command in named.items():
        app.command(name, rich_help_panel=PANEL)(command)
    for group in (grader_commands.app, sweep_commands.app, webhook_commands.app):
        app.add_typer(group, rich_help_panel=PANEL)


def submit(
    spec: Annotated[Path, typer.Argument(help="Job as JSON.", exists=True, dir_okay=False)],
    training_file: TrainingFile = None,
    wait: Wait = False,
    idempotency_key: IdempotencyKey = None,
    as_json: Json = False,
    url: Url = DEFAULT_URL,
    api_key: Key = None,
) -> None:
    """Submit a job."""
    body = load_object(spec)
    with Grpo(url, api_key) as client:
        job = client.create_job(with_training_file(client, body, training_file), idempotency_key=idempotency_key)
        if not wait:
            show(job, as_json, f"job {job.id} is {job.status}; follow it with: grpo watch {job.id}")
            return
        finish(follow(client, job, is_silent=as_json), as_json)


def list_jobs(
    limit: Annotated[int, typer.Option(min=1, max=100)] = 20,
    status: Annotated[str | None, typer.Option(help="queued, running, paused, succeeded, failed or cancelled.")] = None,
    as_json: Json = False,
    url: Url = DEFAULT_URL,
    api_key: Key = None,
) -> None:
    """List jobs, newest first."""
    with Grpo(url, api_key) as client:
        page = client.jobs(limit=limit, status=status)
    rows = [(job.id, job.status, _progress(job), *_readings(job), job.model) for job in page.data]
    table(("job", "status", "step", "kl/ref", "beta", "model"), rows, page.data, as_json)


def watch(job_id: JobId, as_json: Json = False, url: Url = DEFAULT_URL, api_key: Key = None) -> None:
    """Follow a job until it ends: a line a step, and what happens beside. Exits with 0 only when it succeeded."""
    with Grpo(url, api_key) as client:
        finish(follow(client, client.job(job_id), is_silent=as_json), as_json)


def metrics(
    job_id: JobId,
    names: Names = None,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV.")] = False,
    as_json: Json = False,
    url: Url = DEFAULT_URL,
    api_key: Key = None,
) -> None:
    """Telemetry by step."""
    with Grpo(url, api_key) as client:
        if as_csv:
            typer.echo(client.metrics_csv(job_id, names), nl=False)
            return
        rows = client.metrics(job_id, names)
        if names is None and not as_json:
            estimator = client.job(job_id).resolved["kl"]["estimator"]
            names = [f"kl/ref/{estimator}/mean", "beta/applied", "reward/mean", "completion/length_mean", "loss/total", "time/step_s"]
    shown = [(str(row.step), *(reading(row.model_dump()["metrics"].get(name)) for name in names or [])) for row in rows]
    table(("step", *(names or [])), shown, rows, as_json)


def events(
    job_id: JobId,
    limit: Annotated[int, typer.Option(min=1, max=1000)] = 100,
    as_json: Json = False,
    url: Url = DEFAULT_URL,
    api_key: Key = None,
) -> None:
    """What happened to a job, oldest first."""
    with Grpo(url, api_key) as client:
        page = client.events(job_id, limit=limit)
    if as_json:
        print_json([event.model_dump(mode="json") for event in page.data])
        return
    for event in page.data:
        line = event_line(event.event, event.level, event.message, event.created_at)
        console.print(line, soft_wrap=True, highlight=False)


def logs(
    job_id: JobId,
    tail: Annotated[int, typer.Option(min=1, help="Last lines to show.")] = 200,
    attempt: Annotated[int | None, typer.Option(min=1, help="Which attempt; the latest by default.")] = None,
    should_follow: Annotated[bool, typer.Option("--follow", "-f", help="Stay, and print what it prints until the job ends.")] = False,
    as_json: Json = False,
    url: Url = DEFAULT_URL,
    api_key: Key = None,
) -> None:
    """What the engine printed."""
    if should_follow and attempt is not None:
        raise ClientError("--follow goes from the latest attempt to the next; leave --attempt out")
    with Grpo(url, api_key) as client:
        if should_follow:
            _follow_log(client, job_id, tail, as_json)
            return
        printed = client.logs(job_id, tail=tail, attempt=attempt)
    if as_json:
        print_json({"object": "fine_tuning.job.log", "job_id": job_id, "lines": printed.splitlines()})
    elif printed:
        typer.echo(printed, nl=False)
    else:
        typer.echo("the engine has printed nothing", err=True)


def control(
    job_id: JobId,
    beta: Annotated[float | None, typer.Option(min=0, help="New coefficient of the KL term.")] = None,
    target: Annotated[float | None, typer.Option(help="New target KL of an adaptive rule.")] = None,
    learning_rate: Annotated[float | None, typer.Option(help="New learning rate.")] = None,
    as_json: Json = False,
    url: Url = DEFAULT_URL,
    api_key: Key = None,
) -> None:
    """Show the settings that can be changed while a job runs, or change them from the next step on."""
    with Grpo(url, api_key) as client:
        if beta is None and target is None and learning_rate is None:
            settings = client.control(job_id)
            shown = {name: settings.model_dump()[name] for name in ("beta", "target", "learning_rate")}
            show(settings, as_json, "  ".join(f"{name} {reading(value)}" for name, value in shown.items()))
            return
        command = client.set_control(job_id, beta=beta, target=target, learning_rate=learning_rate)
        show(command, as_json, f"change {command.number} is {command.status}; `grpo events {job_id}` tells the step it takes effect at")


def pause(job_id: JobId, as_json: Json = False, url: Url = DEFAULT_URL, api_key: Key = None) -> None:
    """Let a job finish its step, save, and free the worker."""
    with Grpo(url, api_key) as client:
        _show_state(client.pause(job_id), as_json)


def resume(job_id: JobId, as_json: Json = False, url: Url = DEFAULT_URL, api_key: Key = None) -> None:
    """Let a paused job go on from its checkpoint."""
    with Grpo(url, api_key) as client:
        _show_state(client.resume(job_id), as_json)


def cancel(job_id: JobId, as_json: Json = False, url: Url = DEFAULT_URL, api_key: Key = None) -> None:
    """End a job now."""
    with Grpo(url, api_key) as client:
        _show_state(client.cancel(job_id), as_json)


def pull(
    job_id: JobId,
    checkpoint: Annotated[str | None, typer.Option(help="Id, name or step; the newest by default.")] = None,
    to: Annotated[Path | None, typer.Option(help="Folder to write; <job>-<checkpoint> by default.")] = None,
    as_json: Json = False,
    url: Url = DEFAULT_URL,
    api_key: Key = None,
) -> None:
    """Download a checkpoint as a folder that transformers loads. Goes on where an earlier try broke off."""
    with Grpo(url, api_key) as client:
        chosen = choose(client.checkpoints(job_id), checkpoint)
        folder = to or Path(f"{job_id}-{chosen.name}")
        with Progress(console=Console(stderr=True), disable=as_json) as progress:
            task = progress.add_task(chosen.name, total=sum(file.bytes for file in chosen.files))
            download(client, chosen, folder, lambda count: progress.advance(task, count))
    show(chosen, as_json, f"{folder}\nAutoModelForCausalLM.from_pretrained({str(folder)!r}) loads it")


def files(
    upload: Annotated[Path | None, typer.Option(help="Upload this training file.", exists=True, dir_okay=False)] = None,
    delete: Annotated[str | None, typer.Option(help="Forget the file with this id.")] = None,
    content: Annotated[str | None, typer.Option(help="Print the file with this id as it was uploaded, or write it with --to.")] = None,
    to: Annotated[Path | None, typer.Option(help="Where --content is written.", dir_okay=False)] = None,
    as_json: Json = False,
    url: Url = DEFAULT_URL,
    api_key: Key = None,
) -> None:
    """List uploaded files, upload one, fetch one, or delete one."""
    if sum(option is not None for option in (upload, delete, content)) > 1:
        raise ClientError("--upload, --delete and --content are given together; give one of them")
    if to is not None and content is None:
        raise ClientError("--to says where --content is written; name a file with --content")
    if content is not None and to is None and as_json:
        raise ClientError("--content prints the file itself; say with --to where it is written, to get JSON")
    with Grpo(url, api_key) as client:
        if upload is not None:
            file = client.upload(upload)
            show(file, as_json, f"{file.id}  {file.filename}  {file.rows} rows")
        elif delete is not None:
            show(client.delete_file(delete), as_json, f"{delete} is gone; jobs made from it keep their own copy")
        elif content is not None and to is not None:
            show(fetch_file(client, content, to), as_json, str(to))
        elif content is not None:
            for piece in client.read_file(content):
                sys.stdout.buffer.write(piece)
        else:
            found = client.files()
            rows = [(file.id, file.filename, str(file.rows), str(file.bytes)) for file in found]
            table(("file", "name", "rows", "bytes"), rows, found, as_json)


def models(as_json: Json = False, url: Url = DEFAULT_URL, api_key: Key = None) -> None:
    """Models a job may start from."""
    with Grpo(url, api_key) as client:
        found = client.models()
    table(("model", "kind"), [(model.id, model.kind) for model in found], found, as_json)


def _follow_log(client: Grpo, job_id: str, tail: int, as_json: bool) -> None:
    shown: int | None = None
    for event in client.stream_logs(job_id, tail=tail):
        attempt, text = event.data["attempt"], event.data["text"]
        if as_json:
            print_json({"object": "fine_tuning.job.log", "job_id": job_id, "attempt": attempt, "text": text})
            continue
        if shown not in (None, attempt):
            typer.echo(f"attempt {attempt} begins", err=True)
        typer.echo(text, nl=False)
        shown = attempt


def _show_state(job: Job, as_json: bool) -> None:
    show(job, as_json, f"job {job.id} is {job.status} ({job.phase})")


def _progress(job: Job) -> str:
    return f"{job.progress.step}/{job.progress.num_steps}"


def _readings(job: Job) -> tuple[str, str]:
    kl = job.model_dump()["kl"] or {}
    return reading(kl.get("ref_kl")), reading(kl.get("beta"))
