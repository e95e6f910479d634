"""The deployment's ledger for commands of the operator, imported when one of them runs: SQLAlchemy and Alembic take longer than all else
a `grpo` command does."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from api.complaint import complain
from grpo_engine.contract.error import GrpoError
from jobs.settings import Settings

if TYPE_CHECKING:
    from jobs.ledger import Ledger


@contextmanager
def own_ledger(data_dir: Path | None) -> Iterator[Ledger]:
    """Opened, and closed afterwards; an error meant for people ends the command with exit code 1."""
    from jobs.database import DatabaseDamaged
    from jobs.ledger import open_ledger

    try:
        ledger = open_ledger(Settings.from_env(data_dir=data_dir))
        try:
            yield ledger
        finally:
            ledger.close()
    except (GrpoError, DatabaseDamaged, sqlite3.Error) as error:
        complain(error)
        raise typer.Exit(1) from error
