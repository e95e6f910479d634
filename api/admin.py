"""`grpo admin`: what an operator does to a deployment that is not running, or must not stop."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from api.own_ledger import own_ledger

app = typer.Typer(help="Back up the database, or rebuild it from the job directories.", no_args_is_help=True)
console = Console()

DataDir = Annotated[Path | None, typer.Option(help="Directory of everything the server keeps. [default: ./.grpo or GRPO_DATA_DIR]")]


@app.command("rebuild")
def rebuild_command(data_dir: DataDir = None) -> None:
    """Fill an empty database with the jobs, metrics and checkpoints found in the job directories.

    Keys and uploads are not in them: those come from a backup. Jobs that had not ended are paused; resume them.
    """
    from jobs.rebuild import rebuild

    with own_ledger(data_dir) as ledger:
        found = rebuild(ledger)
    console.print(f"{len(found.jobs)} jobs and {found.steps} steps restored", highlight=False)
    for problem in found.problems:
        console.print(f"[red]not restored:[/red] {escape(str(problem))}", highlight=False, soft_wrap=True)
    if found.problems:
        raise typer.Exit(1)


@app.command("backup")
def backup_command(
    target: Annotated[Path, typer.Argument(help="New file for the copy.", dir_okay=False)], data_dir: DataDir = None
) -> None:
    """Copy the SQLite database, consistently, while the server runs."""
    from jobs.rebuild import backup

    with own_ledger(data_dir) as ledger:
        backup(ledger, target)
    console.print(f"{target} holds the database", highlight=False, soft_wrap=True, markup=False)
