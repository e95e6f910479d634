"""Lineage of forked jobs, promotions of checkpoints, webhooks with their deliveries."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create the new tables; nothing that exists changes."""
    op.create_table(
        "promotions",
        sa.Column("checkpoint_id", sa.String(length=80), nullable=False),
        sa.Column("promoted_at", sa.Double(), nullable=False),
        sa.Column("actor", sa.String(length=128), nullable=False),
        sa.Column("gates", sa.Text(), nullable=False, comment="JSON of the bounds it met"),
        sa.Column("note", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(["checkpoint_id"], ["checkpoints.id"], name=op.f("fk_promotions_checkpoint_id")),
        sa.PrimaryKeyConstraint("checkpoint_id", name=op.f("pk_promotions")),
    )
    op.create_table(
        "lineage",
        sa.Column("job_id", sa.String(length=80), nullable=False),
        sa.Column("parent_job", sa.String(length=80), nullable=False),
        sa.Column("parent_checkpoint", sa.String(length=80), nullable=False),
        sa.Column("root_model", sa.Text(), nullable=False, comment="the base model at the beginning of the line"),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_lineage_job_id")),
        sa.ForeignKeyConstraint(["parent_job"], ["jobs.id"], name=op.f("fk_lineage_parent_job")),
        sa.PrimaryKeyConstraint("job_id", name=op.f("pk_lineage")),
        comment="jobs that start from another job's checkpoint",
    )
    op.create_index(op.f("ix_lineage_parent_job"), "lineage", ["parent_job"], unique=False)
    _webhooks()


def _webhooks() -> None:
    op.create_table(
        "webhook_endpoints",
        sa.Column("id", sa.String(length=80), nullable=False),
        sa.Column("project", sa.String(length=64), nullable=False),
        sa.Column("name", sa.String(length=128), nullable=False),
        sa.Column("url", sa.Text(), nullable=False),
        sa.Column("event_types", sa.Text(), nullable=False, comment="JSON list"),
        sa.Column("secret", sa.String(length=128), nullable=False, comment="signs deliveries, so it is kept as it is"),
        sa.Column("old_secret", sa.String(length=128), nullable=True, comment="signs as well until old_secret_until"),
        sa.Column("old_secret_until", sa.Double(), nullable=True),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("updated_at", sa.Double(), nullable=False),
        sa.Column("deleted_at", sa.Double(), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_webhook_endpoints")),
    )
    op.create_index(op.f("ix_webhook_endpoints_created_at_id"), "webhook_endpoints", ["created_at", "id"], unique=False)
    op.create_table(
        "webhook_deliveries",
        sa.Column("id", sa.String(length=80), nullable=False),
        sa.Column("endpoint_id", sa.String(length=80), nullable=False),
        sa.Column(
            "event_number", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=True, comment="job_events.id; null for a test"
        ),
        sa.Column("event_id", sa.String(length=80), nullable=False, comment="the webhook-id header; the same on each try"),
        sa.Column("event_type", sa.String(length=64), nullable=False),
        sa.Column("body", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("status", sa.String(length=16), nullable=False, comment="pending, delivered, failed"),
        sa.Column("tries", sa.Integer(), nullable=False),
        sa.Column("next_try_at", sa.Double(), nullable=False),
        sa.Column("claimed_until", sa.Double(), nullable=False, comment="a dispatcher is at it until then"),
        sa.Column("last_try_at", sa.Double(), nullable=True),
        sa.Column("status_code", sa.Integer(), nullable=True, comment="of the last try; null when there was no answer"),
        sa.Column("error", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(["endpoint_id"], ["webhook_endpoints.id"], name=op.f("fk_webhook_deliveries_endpoint_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_webhook_deliveries")),
        sa.UniqueConstraint("endpoint_id", "event_number", name=op.f("uq_webhook_deliveries_endpoint_id_event_number")),
    )
    op.create_index(op.f("ix_webhook_deliveries_status_next_try_at"), "webhook_deliveries", ["status", "next_try_at"], unique=False)
    op.create_index(op.f("ix_webhook_deliveries_endpoint_id_created_at"), "webhook_deliveries", ["endpoint_id", "created_at"], unique=False)
