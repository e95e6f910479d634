"""Steps folded together, for reading long series."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create the new table; steps that are there already are read as they are."""
    op.create_table(
        "rollups",
        sa.Column("job_id", sa.String(length=80), nullable=False),
        sa.Column("width", sa.Integer(), nullable=False, comment="steps folded together"),
        sa.Column(
            "number",
            sa.BigInteger().with_variant(sa.Integer(), "sqlite"),
            nullable=False,
            comment="holds steps number * width + 1 to number * width + width",
        ),
        sa.Column("metrics", sa.Text(), nullable=False, comment="JSON: name to count, first, last, min, max with their steps"),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_rollups_job_id")),
        sa.PrimaryKeyConstraint("job_id", "width", "number", name=op.f("pk_rollups")),
        comment="complete stretches of steps, folded for reading long series",
    )
