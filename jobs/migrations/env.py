"""Runs inside `Database.migrate`, on the connection it hands over. There is no offline mode."""

from __future__ import annotations

from alembic import context

from jobs.tables import metadata

context.configure(connection=context.config.attributes["connection"], target_metadata=metadata, transactional_ddl=False)
context.run_migrations()
