"""Opening the database, its two kinds of transaction, and what its failures mean.

SQLite: WAL, synchronous=FULL, so that a commit survives a power cut. Writers begin with BEGIN IMMEDIATE and wait up to
`database_timeout_s`; readers begin deferred and never take the write lock. PostgreSQL needs none of this.
"""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy.exc import DBAPIError, OperationalError

from grpo_engine.contract.error import GrpoError, InsufficientStorage, Unavailable
from jobs.settings import Settings

_MIGRATION_LOCK = 7_236_411_905
"""PostgreSQL advisory lock that lets one process migrate at a time."""


class DatabaseDamaged(RuntimeError):
    """The database cannot be used as it is; the message says what to do."""


class Database:
    """A database with `read()` and `write()` transactions."""

    def __init__(self, engine: sa.Engine) -> None:
        self.engine = engine
        self.is_sqlite = engine.dialect.name == "sqlite"

    @classmethod
    def open(cls, settings: Settings) -> Database:
        """Connect; creates no table. `migrate()` does."""
        url = sa.make_url(settings.database_url)
        if url.get_backend_name() == "sqlite":
            return cls(_sqlite_engine(url, settings.database_timeout_s))
        timeout_ms = int(settings.database_timeout_s * 1000)
        options = f"-c lock_timeout={timeout_ms} -c statement_timeout={2 * timeout_ms}"
        connect = {"connect_timeout": max(2, int(settings.database_timeout_s)), "options": options}
        return cls(sa.create_engine(url, pool_size=10, max_overflow=30, pool_pre_ping=True, connect_args=connect))

    @contextmanager
    def read(self) -> Iterator[sa.Connection]:
        """A consistent view. Raises Unavailable or DatabaseDamaged."""
        with _meaning(), self.engine.connect() as connection, connection.begin():
            yield connection

    @contextmanager
    def write(self) -> Iterator[sa.Connection]:
        """A transaction that commits at the end. Raises Unavailable (locked too long), InsufficientStorage, DatabaseDamaged."""
        with _meaning(), self.engine.connect().execution_options(grpo_write=True) as connection, connection.begin():
            yield connection

    def migrate(self) -> None:
        """Bring the schema to this version; harmless when several processes do it at once. Raises DatabaseDamaged."""
        if self.is_sqlite:
            self._check_file()
        config = Config()
        config.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
        config.set_main_option("path_separator", "os")
        with self.write() as connection:
            if not self.is_sqlite:
                connection.execute(sa.text("SELECT pg_advisory_xact_lock(:key)"), {"key": _MIGRATION_LOCK})
            known = {script.revision for script in ScriptDirectory.from_config(config).walk_revisions()}
            present = MigrationContext.configure(connection).get_current_heads()
            if unknown := [head for head in present if head not in known]:
                raise DatabaseDamaged(
                    f"the database was written by a newer version (schema {unknown[0]}); start that version, or restore a backup"
                )
            config.attributes["connection"] = connection
            logging.getLogger("alembic.runtime.migration").setLevel(logging.WARNING)  # it announces itself at every start
            command.upgrade(config, "head")

    def close(self) -> None:
        """Close all connections."""
        self.engine.dispose()

    def _check_file(self) -> None:
        with self.read() as connection:
            verdict = connection.exec_driver_sql("PRAGMA quick_check(1)").scalar()
        if verdict != "ok":
            raise DatabaseDamaged(_damage(str(verdict)))


def _sqlite_engine(url: sa.URL, timeout_s: float) -> sa.Engine:
    if url.database:
        Path(url.database).parent.mkdir(parents=True, exist_ok=True)
    engine = sa.create_engine(
        url,
        connect_args={"timeout": timeout_s, "isolation_level": None},
        pool_size=10,
        max_overflow=30,
        pool_timeout=timeout_s,
    )

    @sa.event.listens_for(engine, "connect")
    def _connect(connection: sqlite3.Connection, _record: Any) -> None:
        for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON", "temp_store=MEMORY"):
            connection.execute(f"PRAGMA {pragma}")

    @sa.event.listens_for(engine, "begin")
    def _begin(connection: sa.Connection) -> None:
        immediate = connection.get_execution_options().get("grpo_write", False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if immediate else "BEGIN")

    return engine


def _damage(detail: str) -> str:
    return (
        f"the database is damaged ({detail}); stop the server, move the file away, and run `grpo admin rebuild`, "
        "which restores jobs, metrics and checkpoints from the job directories (keys and uploads come from the backup)"
    )


@contextmanager
def _meaning() -> Iterator[None]:
    """Give driver errors the meaning a caller can act on; programming errors travel as they are."""
    try:
        yield
    except DBAPIError as error:
        if (meant := _meant_by(error)) is None:
            raise
        raise meant from error
    except sa.exc.TimeoutError as error:
        raise Unavailable("all database connections are busy; try again", headers={"Retry-After": "5"}) from error


def _meant_by(error: DBAPIError) -> GrpoError | DatabaseDamaged | None:
    text = str(error.orig).lower() if isinstance(error.orig, sqlite3.Error) else ""
    state = str(getattr(error.orig, "sqlstate", "") or "")
    if "full" in text or state == "53100":
        return InsufficientStorage("the disk of the database is full; free some space and try again")
    if "malformed" in text or "not a database" in text or state in ("XX001", "XX002"):
        return DatabaseDamaged(_damage(str(error.orig)))
    if state in ("40001", "40P01", "55P03", "57014") or "locked" in text or "busy" in text:
        return Unavailable("the database is busy; try again", headers={"Retry-After": "5"})
    if isinstance(error, OperationalError) or error.connection_invalidated:
        return Unavailable(f"the database does not answer: {error.orig}", headers={"Retry-After": "5"})
    return None
