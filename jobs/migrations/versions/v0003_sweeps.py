"""Sweeps and their members."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create the new tables; nothing that exists changes."""
    op.create_table(
        "sweeps",
        sa.Column("id", sa.String(length=80), nullable=False),
        sa.Column("project", sa.String(length=64), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("name", sa.String(length=64), nullable=True),
        sa.Column("request", sa.Text(), nullable=False, comment="JSON of the request: base spec and variants as they were posted"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_sweeps")),
        comment="jobs that differ in a few settings and share everything else",
    )
    op.create_index(op.f("ix_sweeps_created_at_id"), "sweeps", ["created_at", "id"], unique=False)
    op.create_table(
        "sweep_members",
        sa.Column("job_id", sa.String(length=80), nullable=False),
        sa.Column("sweep_id", sa.String(length=80), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False, comment="1, 2, 3 ... in the order of the request"),
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_sweep_members_job_id")),
        sa.ForeignKeyConstraint(["sweep_id"], ["sweeps.id"], name=op.f("fk_sweep_members_sweep_id")),
        sa.PrimaryKeyConstraint("job_id", name=op.f("pk_sweep_members")),
        sa.UniqueConstraint("sweep_id", "number", name=op.f("uq_sweep_members_sweep_id_number")),
        sa.UniqueConstraint("sweep_id", "name", name=op.f("uq_sweep_members_sweep_id_name")),
    )
