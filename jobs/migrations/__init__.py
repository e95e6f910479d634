"""Alembic migrations; `Database.migrate` runs them at start."""
