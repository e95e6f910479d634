"""What the client's commands share: their options, and how an answer is printed for people and for programs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import BaseModel
from rich.console import Console
from rich.table import Table
from rich.text import Text

from api.client.display import number
from api.client.errors import ClientError
from api.client.sync import Grpo
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
Wait = Annotated[bool, typer.Option("--wait", help="Follow it to its end. Exit 0: succeeded, 1: failed or cancelled, 130: interrupted.")]
IdempotencyKey = Annotated[str | None, typer.Option(help="The same key and request never make a second one.")]
TrainingFile = Annotated[Path | None, typer.Option(help="Upload this file and train on it.", exists=True, dir_okay=False)]

console = Console()


def show(item: BaseModel, as_json: bool, words: str) -> None:
    """One object: its JSON for programs, a sentence for people."""
    if as_json:
        print_json(item.model_dump(mode="json"))
    else:
        console.print(words, soft_wrap=True, highlight=False, markup=False)


def say(words: str | Text) -> None:
    """A line for people, word for word."""
    console.print(words, soft_wrap=True, highlight=False, markup=False)


def print_json(content: Any) -> None:
    """One line for programs."""
    typer.echo(json.dumps(content, ensure_ascii=False, allow_nan=False))


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], items: Sequence[BaseModel], as_json: bool) -> None:
    """A list: JSON for programs, columns for people. The first column is never cut."""
    if as_json:
        print_json([item.model_dump(mode="json") for item in items])
        return
    shown = Table(box=None, pad_edge=False)
    for place, column in enumerate(columns):
        longest = max((len(row[place]) for row in rows), default=0)
        shown.add_column(column, no_wrap=place == 0, overflow="fold", min_width=longest if place == 0 else None)
    for row in rows:
        shown.add_row(*(Text(cell) for cell in row))
    wide_enough = console if console.is_terminal else Console(width=_PIPE_WIDTH)
    wide_enough.print(shown, highlight=False)


def reading(raw: Any) -> str:
    """A metric in four digits; `-` when there is none."""
    value = number(raw)
    return "-" if value is None else f"{value:.4g}"


def load_object(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises ClientError naming the file."""
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ClientError(f"{path} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ClientError(f"{path} holds no JSON object; see examples/arithmetic.json")
    return content


def parse_json(text: str, option: str) -> Any:
    """JSON from the command line. Raises ClientError naming the option."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ClientError(f"{option} is not JSON: {error}; put the whole in single quotes") from None


def with_training_file(client: Grpo, spec: dict[str, Any], path: Path | None) -> dict[str, Any]:
    """The spec, with the file uploaded and named in it."""
    return spec if path is None else {**spec, "training_file": client.upload(path).id}


def follow(client: Grpo, job: Job, *, is_silent: bool) -> Job:
    """Stay with a job until it has ended; the job goes on when this is interrupted."""
    try:
        return client.wait(job.id) if is_silent else Follower(client, job, console).follow()
    except KeyboardInterrupt:
        Console(stderr=True).print(
            f"no longer watching; job {job.id} goes on: grpo watch {job.id} follows it, grpo cancel {job.id} ends it",
            soft_wrap=True, highlight=False, markup=False,
        )  # fmt: skip
        raise


def finish(job: Job, as_json: bool) -> None:
    """Say how a job ended and leave with its exit code."""
    words = f"job {job.id} {job.status}" + (f": {job.error.message}" if job.error else "")
    show(job, as_json, words)
    raise typer.Exit(0 if job.status == "succeeded" else 1)
