"""`grpo sweep`: one job at several betas, side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from api.client.errors import ClientError
from api.client.sync import DEFAULT_URL, Grpo
from api.client.terminal import (
    IdempotencyKey,
    Json,
    Key,
    TrainingFile,
    Url,
    Wait,
    load_object,
    print_json,
    reading,
    say,
    show,
    table,
    with_training_file,
)
from grpo_engine.contract.sweep_view import Sweep

app = typer.Typer(name="sweep", help="One job at several betas, or with several rules.", no_args_is_help=True)

SweepId = Annotated[str, typer.Argument(metavar="SWEEP", help="Sweep id.")]


@app.command("create")
def create(
    spec: Annotated[Path, typer.Argument(help="Job as JSON; or a whole sweep, with spec and variants.", exists=True, dir_okay=False)],
    beta: Annotated[list[float] | None, typer.Option(min=0, help="A fixed beta; repeat for each member.")] = None,
    name: Annotated[str | None, typer.Option(help="Name of the sweep.")] = None,
    training_file: TrainingFile = None,
    wait: Wait = False,
    idempotency_key: IdempotencyKey = None,
    as_json: Json = False,
    url: Url = DEFAULT_URL,
    api_key: Key = None,
) -> None:
    """Submit one job for each beta; they share model, data, its order, seed and reference."""
    body = load_object(spec)
    is_whole = "variants" in body
    if is_whole == bool(beta):
        raise ClientError(
            f"give --beta for each member, or a file with spec and variants{' (it has variants already)' if is_whole else ''}"
        )
    base = body.get("spec") if is_whole else body
    if not isinstance(base, dict):
        raise ClientError(f"{spec} has variants but no object `spec`, the job they change")
    request: dict[str, Any] = body if is_whole else {"variants": [{"beta": value} for value in beta or ()]}
    if name is not None:
        request = {**request, "name": name}
    with Grpo(url, api_key) as client:
        request = {**request, "spec": with_training_file(client, base, training_file)}
        made = client.create_sweep(request, idempotency_key=idempotency_key)
        if not wait:
            show(made, as_json, f"sweep {made.id} has {len(made.data)} jobs; look at it with: grpo sweep show {made.id}")
            return
        for member in made.data:
            client.wait(member.job_id)
        made = client.sweep(made.id)
    _print(made, as_json)
    raise typer.Exit(0 if made.status == "succeeded" else 1)


@app.command("list")
def list_sweeps(
    limit: Annotated[int, typer.Option(min=1, max=100)] = 20, as_json: Json = False, url: Url = DEFAULT_URL, api_key: Key = None
) -> None:
    """List sweeps, newest first."""
    with Grpo(url, api_key) as client:
        found = client.sweeps(limit=limit).data
    rows = [(one.id, one.name or "-", one.status, str(len(one.data)), _best(one)) for one in found]
    table(("sweep", "name", "status", "jobs", "best checkpoint"), rows, found, as_json)


@app.command("show")
def show_sweep(sweep_id: SweepId, as_json: Json = False, url: Url = DEFAULT_URL, api_key: Key = None) -> None:
    """Show where each job of a sweep is, and which checkpoint is best."""
    with Grpo(url, api_key) as client:
        _print(client.sweep(sweep_id), as_json)


@app.command("cancel")
def cancel(sweep_id: SweepId, as_json: Json = False, url: Url = DEFAULT_URL, api_key: Key = None) -> None:
    """End every job of it that has not ended."""
    with Grpo(url, api_key) as client:
        _print(client.cancel_sweep(sweep_id), as_json)


@app.command("pause")
def pause(sweep_id: SweepId, as_json: Json = False, url: Url = DEFAULT_URL, api_key: Key = None) -> None:
    """Pause every job of it that can be paused."""
    with Grpo(url, api_key) as client:
        _print(client.pause_sweep(sweep_id), as_json)


@app.command("resume")
def resume(sweep_id: SweepId, as_json: Json = False, url: Url = DEFAULT_URL, api_key: Key = None) -> None:
    """Let its paused jobs go on."""
    with Grpo(url, api_key) as client:
        _print(client.resume_sweep(sweep_id), as_json)


def _print(sweep: Sweep, as_json: bool) -> None:
    if as_json:
        print_json(sweep.model_dump(mode="json"))
        return
    say(f"sweep {sweep.id} {sweep.status}" + ("" if sweep.name is None else f" ({sweep.name})"))
    rows = []
    for member in sweep.data:
        shown = member.model_dump()
        readings = (reading(shown[name]) for name in ("ref_kl", "reward", "applied_beta"))
        rows.append((member.job_id, member.name, member.status, f"{member.progress.step}/{member.progress.num_steps}", *readings))
    table(("job", "variant", "status", "step", "kl/ref", "reward", "beta"), rows, [], as_json=False)
    for member in sweep.data:
        if member.error is not None:
            say(f"{member.job_id}: {member.error.message}")
    if sweep.best is not None:
        say(f"best: {_best(sweep)}")


def _best(sweep: Sweep) -> str:
    if sweep.best is None:
        return "-"
    return f"{sweep.best.checkpoint_id} (reward {reading(sweep.best.reward)} at KL {reading(sweep.best.ref_kl)})"
