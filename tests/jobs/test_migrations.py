"""A database of each released schema comes up to today's with what it holds, on SQLite and on PostgreSQL."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext

import jobs
from jobs import tables
from jobs.database import Database
from jobs.settings import Settings
from tests.postgres import PostgresServer

RELEASED = ["0001", "0002"]


def upgrade_to(database: Database, revision: str) -> None:
    config = Config()
    config.set_main_option("script_location", str(Path(jobs.__file__).parent / "migrations"))
    config.set_main_option("path_separator", "os")
    with database.write() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, revision)


@pytest.mark.parametrize("revision", RELEASED)
@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_an_older_database_comes_up_with_what_it_holds(
    request: pytest.FixtureRequest, settings: Settings, kind: str, revision: str
) -> None:
    if kind == "postgresql":
        server: PostgresServer = request.getfixturevalue("postgres")
        settings = dataclasses.replace(settings, database_url=server.new_database())
    database = Database.open(settings)
    upgrade_to(database, revision)
    with database.write() as connection:
        connection.execute(sa.insert(tables.facts).values(name="kept", value="yes"))
    database.migrate()
    with database.read() as connection:
        assert compare_metadata(MigrationContext.configure(connection, opts={"compare_type": True}), tables.metadata) == []
        assert connection.execute(sa.select(tables.facts.c.value).where(tables.facts.c.name == "kept")).scalar_one() == "yes"
    database.close()
