"""The client half of the `grpo` command: submit, watch, steer and fetch, over HTTP only."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import BaseModel
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from api.client.display import event_line, number
from api.client.download import choose, download
from api.client.errors import ClientError
from api.client.sync import DEFAULT_URL, Grpo
from api.client.watch import Follower
from grpo_engine.contract.view import Job

PANEL = "Client"
_PIPE_WIDTH = 1000
"""Columns of a table that no person looks at: nothing is cut for want of room."""

Url = Annotated[str, typer.Option("--url", envvar="GRPO_BASE_URL", help="Address of the server.")]
Key = Annotated[str | None, typer.Option("--api-key", envvar="GRPO_API_KEY", help="API key.", show_envvar=True)]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
JobId = Annotated[str, typer.Argument(metavar="JOB", help="Job id, ftjob-...")]
Names = Annotated[list[str] | None, typer.Option("--name", help="Metric to show, for example reward/mean; repeat for more.")]

console = Console()


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
    for name, command in named.items():
        app.command(name, rich_help_panel=PANEL)(command)


def submit(
    spec: Annotated[Path, typer.Argument(help="Job as JSON.", exists=True, dir_okay=False)],
    training_file: Annotated[Path | None, typer.Option(help="Upload this file and train on it.", exists=True, dir_okay=False)] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Follow the job. Exit 0: succeeded, 1: failed or cancelled.")] = False,
    idempotency_key: Annotated[str | None, typer.Option(help="The same key and body never make a second job.")] = None,
    as_json: Json = False,
    url: Url = DEFAULT_URL,
    api_key: Key = None,
) -> None:
    """Submit a job."""
    body = load_spec(spec)
    with Grpo(url, api_key) as client:
        if training_file is not None:
            body = {**body, "training_file": client.upload(training_file).id}
        job = client.create_job(body, idempotency_key=idempotency_key)
        if not wait:
            show(job, as_json, f"job {job.id} is {job.status}; follow it with: grpo watch {job.id}")
            return
        _finish(_follow(client, job, is_silent=as_json), as_json)


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
    _table(("job", "status", "step", "kl/ref", "beta", "model"), rows, page.data, as_json)


def watch(job_id: JobId, as_json: Json = False, url: Url = DEFAULT_URL, api_key: Key = None) -> None:
    """Follow a job until it ends: a line a step, and what happens beside. Exits with 0 only when it succeeded."""
    with Grpo(url, api_key) as client:
        _finish(_follow(client, client.job(job_id), is_silent=as_json), as_json)


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
    shown = [(str(row.step), *(_reading(row.model_dump()["metrics"].get(name)) for name in names or [])) for row in rows]
    _table(("step", *(names or [])), shown, rows, as_json)


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
        _print_json([event.model_dump(mode="json") for event in page.data])
        return
    for event in page.data:
        line = event_line(event.event, event.level, event.message, event.created_at)
        console.print(line, soft_wrap=True, highlight=False)


def logs(
    job_id: JobId,
    tail: Annotated[int, typer.Option(min=1, help="Last lines to show.")] = 200,
    attempt: Annotated[int | None, typer.Option(min=1, help="Which attempt; the latest by default.")] = None,
    url: Url = DEFAULT_URL,
    api_key: Key = None,
) -> None:
    """What the engine printed."""
    with Grpo(url, api_key) as client:
        printed = client.logs(job_id, tail=tail, attempt=attempt)
    if printed:
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
            show(settings, as_json, "  ".join(f"{name} {_reading(value)}" for name, value in shown.items()))
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
    as_json: Json = False,
    url: Url = DEFAULT_URL,
    api_key: Key = None,
) -> None:
    """List uploaded files, upload one, or delete one."""
    with Grpo(url, api_key) as client:
        if upload is not None:
            file = client.upload(upload)
            show(file, as_json, f"{file.id}  {file.filename}  {file.rows} rows")
        elif delete is not None:
            show(client.delete_file(delete), as_json, f"{delete} is gone; jobs made from it keep their own copy")
        else:
            found = client.files()
            rows = [(file.id, file.filename, str(file.rows), str(file.bytes)) for file in found]
            _table(("file", "name", "rows", "bytes"), rows, found, as_json)


def models(as_json: Json = False, url: Url = DEFAULT_URL, api_key: Key = None) -> None:
    """Models a job may start from."""
    with Grpo(url, api_key) as client:
        found = client.models()
    _table(("model", "kind"), [(model.id, model.kind) for model in found], found, as_json)


def show(item: BaseModel, as_json: bool, words: str) -> None:
    """One object: its JSON for programs, a sentence for people."""
    if as_json:
        _print_json(item.model_dump(mode="json"))
    else:
        console.print(words, soft_wrap=True, highlight=False, markup=False)


def load_spec(path: Path) -> dict[str, Any]:
    """A job file. Raises ClientError naming the file."""
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ClientError(f"{path} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ClientError(f"{path} holds no JSON object; see examples/arithmetic.json")
    return content


def _follow(client: Grpo, job: Job, *, is_silent: bool) -> Job:
    return client.wait(job.id) if is_silent else Follower(client, job, console).follow()


def _finish(job: Job, as_json: bool) -> None:
    words = f"job {job.id} {job.status}" + (f": {job.error.message}" if job.error else "")
    show(job, as_json, words)
    raise typer.Exit(0 if job.status == "succeeded" else 1)


def _show_state(job: Job, as_json: bool) -> None:
    show(job, as_json, f"job {job.id} is {job.status} ({job.phase})")


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]], items: Sequence[BaseModel], as_json: bool) -> None:
    if as_json:
        _print_json([item.model_dump(mode="json") for item in items])
        return
    table = Table(*columns, box=None, pad_edge=False)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    wide_enough = console if console.is_terminal else Console(width=_PIPE_WIDTH)
    wide_enough.print(table, highlight=False)


def _print_json(content: Any) -> None:
    typer.echo(json.dumps(content, ensure_ascii=False, allow_nan=False))


def _progress(job: Job) -> str:
    return f"{job.progress.step}/{job.progress.num_steps}"


def _readings(job: Job) -> tuple[str, str]:
    kl = job.model_dump()["kl"] or {}
    return _reading(kl.get("ref_kl")), _reading(kl.get("beta"))


def _reading(raw: Any) -> str:
    value = number(raw)
    return "-" if value is None else f"{value:.4g}"
