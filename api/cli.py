"""The `grpo` command: processes of the server here, everything a client does in `api.client.commands`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from api import admin, keys
from api.client import commands
from api.client.errors import ClientError
from api.complaint import complain
from api.demo import EXAMPLES, demo
from api.embedded.lock import DataDirBusy
from api.embedded.stack import StackFailed
from api.embedded.valkey import NoEmbeddedRedis
from api.up import up
from grpo_engine.contract.error import GrpoError
from jobs.settings import Settings, SettingsError, bare_environment

app = typer.Typer(
    name="grpo",
    help="A GRPO training server with first-class control of the KL divergence and its coefficient beta.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
console = Console()

DataDir = Annotated[Path | None, typer.Option(help="Directory of everything the server keeps. [default: ./.grpo or GRPO_DATA_DIR]")]
Port = Annotated[int | None, typer.Option(min=0, max=65535, help="Port of the API on 127.0.0.1, 0 for any free one. [default: 8000]")]
Host = Annotated[str | None, typer.Option(help="Address to listen on; beyond loopback only with an API key. [default: 127.0.0.1]")]


@app.command("up", rich_help_panel="Server")
def up_command(data_dir: DataDir = None, port: Port = None) -> None:
    """Start the whole server in this terminal: Valkey, API, dispatcher and one worker, on loopback."""
    up(Settings.from_env(data_dir=data_dir, port=port, host="127.0.0.1"), console)


@app.command("demo", rich_help_panel="Server")
def demo_command(
    exit_: Annotated[bool, typer.Option("--exit", help="End with the job; the exit code tells how it went.")] = False,
    data_dir: DataDir = None,
    port: Port = None,
    spec: Annotated[Path, typer.Option(help="Job to run.", exists=True, dir_okay=False)] = EXAMPLES / "arithmetic.json",
    rows: Annotated[Path, typer.Option(help="Its training file.", exists=True, dir_okay=False)] = EXAMPLES / "arithmetic.jsonl",
) -> None:
    """Start the server, train the example on it, and show every step."""
    settings = Settings.from_env(data_dir=data_dir, port=port, host="127.0.0.1")
    raise typer.Exit(demo(settings, console, should_exit=exit_, spec_path=spec, rows_path=rows))


@app.command("api", rich_help_panel="Server")
def api_command(data_dir: DataDir = None, host: Host = None, port: Port = None) -> None:
    """Run the HTTP API alone."""
    _become("api", Settings.from_env(data_dir=data_dir, host=host, port=port))


@app.command("dispatcher", rich_help_panel="Server")
def dispatcher_command(data_dir: DataDir = None) -> None:
    """Run the dispatcher alone: it hands out jobs and takes in what engines report."""
    _become("jobs.dispatcher", Settings.from_env(data_dir=data_dir))


@app.command("worker", rich_help_panel="Server")
def worker_command(
    data_dir: DataDir = None,
    queues: Annotated[
        str | None, typer.Option(help="Comma-separated queues to serve. [default: grpo-cpu, and grpo-gpu with a GPU]")
    ] = None,
    slots: Annotated[int | None, typer.Option(min=1, help="Jobs at once. [default: 1]")] = None,
) -> None:
    """Run a worker alone. SIGTERM lets a running job end its step, save, and be queued again."""
    names = None if queues is None else tuple(name.strip() for name in queues.split(",") if name.strip())
    _become("worker", Settings.from_env(data_dir=data_dir, queues=names, slots=slots))


def _become(module: str, settings: Settings) -> None:
    """Replace this process, so that signals and the pid belong to the part itself."""
    sys.stdout.flush()
    os.execve(sys.executable, [sys.executable, "-m", module], {**bare_environment(), **settings.to_env()})


commands.register(app)
app.add_typer(keys.app, name="keys", rich_help_panel="Server")
app.add_typer(admin.app, name="admin", rich_help_panel="Server")


def main() -> None:
    """Entry point. 0 done, 1 failed, 2 wrong usage, 130 interrupted."""
    try:
        app()
    except (ClientError, DataDirBusy, StackFailed, NoEmbeddedRedis, SettingsError, GrpoError, OSError) as error:
        complain(error)
        sys.exit(1)


if __name__ == "__main__":
    main()
