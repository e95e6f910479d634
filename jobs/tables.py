"""The schema. Times are Unix seconds (double); JSON columns are text, so that SQLite and PostgreSQL return the same bytes.

`migrations/` builds it; a test holds the two together.
"""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Double,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
)

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s",
        "pk": "pk_%(table_name)s",
    }
)

_Number = BigInteger().with_variant(Integer, "sqlite")
"""SQLite numbers rows by itself only in a column spelt INTEGER; its integers hold 64 bits anyway."""

jobs = Table(
    "jobs",
    metadata,
    Column("id", String(80), primary_key=True),
    Column("project", String(64), nullable=False),
    Column("created_at", Double, nullable=False),
    Column("updated_at", Double, nullable=False),
    Column("started_at", Double),
    Column("finished_at", Double),
    Column("state", String(16), nullable=False),
    Column("wanted", String(16), nullable=False),
    Column("epoch", _Number, nullable=False, comment="number of the latest attempt; 0 before the first"),
    Column("not_before", Double, nullable=False, comment="no attempt is dispatched before this time"),
    Column("dispatched_at", Double),
    Column("published_at", Double, comment="when the message of the current epoch was taken by the broker"),
    Column("queue", String(64), nullable=False),
    Column("spec", Text, nullable=False),
    Column("training_path", Text, comment="relative to the job directory"),
    Column("validation_path", Text),
    Column("resume_from", Text, comment="checkpoint the current attempt continues from, relative to the job directory"),
    Column("status_reason", Text, nullable=False),
    Column("error_code", String(64)),
    Column("error_message", Text),
    Column("error_param", Text),
    Column("num_steps", _Number, nullable=False),
    Column("step", _Number, nullable=False, comment="latest step that counts"),
    Column("latest", Text, nullable=False, comment="JSON of that step: time, metrics, beta"),
    Column("activity", String(64), nullable=False, comment="type of the attempt's latest telling engine event"),
    Column("ingested_epoch", _Number, nullable=False),
    Column("ingested_seq", _Number, nullable=False),
    Column("crashes", Integer, nullable=False),
    Column("worker_losses", Integer, nullable=False),
    Column("preemptions", Integer, nullable=False),
    Column("stuck_attempts", Integer, nullable=False, comment="attempts in a row that died at stuck_step"),
    Column("stuck_step", _Number, nullable=False),
    Column("settings_version", Integer, nullable=False, comment="changes with each accepted change of settings"),
    Index(None, "created_at", "id"),
    Index(None, "state", "created_at"),
)

job_metadata = Table(
    "job_metadata",
    metadata,
    Column("job_id", ForeignKey(jobs.c.id), primary_key=True),
    Column("key", String(64), primary_key=True),
    Column("value", String(512), nullable=False),
    Index(None, "key", "value"),
)

job_events = Table(
    "job_events",
    metadata,
    Column("id", _Number, primary_key=True, autoincrement=True),
    Column("job_id", ForeignKey(jobs.c.id), nullable=False),
    Column("epoch", _Number),
    Column("seq", _Number, comment="null for life-cycle events"),
    Column("time", Double, nullable=False),
    Column("type", String(64), nullable=False),
    Column("level", String(8), nullable=False),
    Column("step", _Number),
    Column("message", Text, nullable=False),
    Column("data", Text, nullable=False),
    Index(None, "job_id", "id"),
    UniqueConstraint("job_id", "epoch", "seq"),
    sqlite_autoincrement=True,
)

steps = Table(
    "steps",
    metadata,
    Column("job_id", ForeignKey(jobs.c.id), primary_key=True),
    Column("epoch", _Number, primary_key=True),
    Column("seq", _Number, primary_key=True),
    Column("step", _Number, nullable=False),
    Column("time", Double, nullable=False),
    Column("metrics", Text, nullable=False),
    Column("beta", Text, nullable=False),
    Column("superseded", Boolean, nullable=False),
    Index(None, "job_id", "superseded", "step"),
)

rollups = Table(
    "rollups",
    metadata,
    Column("job_id", ForeignKey(jobs.c.id), primary_key=True),
    Column("width", Integer, primary_key=True, comment="steps folded together"),
    Column("number", _Number, primary_key=True, comment="holds steps number * width + 1 to number * width + width"),
    Column("metrics", Text, nullable=False, comment="JSON: name to count, first, last, min, max with their steps"),
    comment="complete stretches of steps, folded for reading long series",
)

checkpoints = Table(
    "checkpoints",
    metadata,
    Column("id", String(80), primary_key=True),
    Column("job_id", ForeignKey(jobs.c.id), nullable=False),
    Column("epoch", _Number, nullable=False),
    Column("name", String(64), nullable=False),
    Column("step", _Number, nullable=False),
    Column("kind", String(16), nullable=False),
    Column("created_at", Double, nullable=False),
    Column("bytes", _Number, nullable=False),
    Column("files", Text, nullable=False),
    Column("ref_kl", Double),
    Column("reward", Double),
    Column("beta", Double),
    Column("metrics", Text, nullable=False, comment="JSON of the event's data without its files"),
    Column("superseded", Boolean, nullable=False),
    Column("damaged", Boolean, nullable=False),
    Column("pinned", Boolean, nullable=False),
    Column("deleted_at", Double),
    UniqueConstraint("job_id", "epoch", "name"),
)

promotions = Table(
    "promotions",
    metadata,
    Column("checkpoint_id", ForeignKey(checkpoints.c.id), primary_key=True),
    Column("promoted_at", Double, nullable=False),
    Column("actor", String(128), nullable=False),
    Column("gates", Text, nullable=False, comment="JSON of the bounds it met"),
    Column("note", Text),
)

lineage = Table(
    "lineage",
    metadata,
    Column("job_id", ForeignKey(jobs.c.id), primary_key=True),
    Column("parent_job", ForeignKey(jobs.c.id), nullable=False),
    Column("parent_checkpoint", String(80), nullable=False),
    Column("root_model", Text, nullable=False, comment="the base model at the beginning of the line"),
    Index(None, "parent_job"),
    comment="jobs that start from another job's checkpoint",
)

sweeps = Table(
    "sweeps",
    metadata,
    Column("id", String(80), primary_key=True),
    Column("project", String(64), nullable=False),
    Column("created_at", Double, nullable=False),
    Column("name", String(64)),
    Column("request", Text, nullable=False, comment="JSON of the request: base spec and variants as they were posted"),
    Index(None, "created_at", "id"),
    comment="jobs that differ in a few settings and share everything else",
)

sweep_members = Table(
    "sweep_members",
    metadata,
    Column("job_id", ForeignKey(jobs.c.id), primary_key=True),
    Column("sweep_id", ForeignKey(sweeps.c.id), nullable=False),
    Column("number", Integer, nullable=False, comment="1, 2, 3 ... in the order of the request"),
    Column("name", String(64), nullable=False),
    UniqueConstraint("sweep_id", "number"),
    UniqueConstraint("sweep_id", "name"),
)

commands = Table(
    "commands",
    metadata,
    Column("job_id", ForeignKey(jobs.c.id), primary_key=True),
    Column("number", _Number, primary_key=True),
    Column("created_at", Double, nullable=False),
    Column("body", Text, nullable=False),
    Column("status", String(16), nullable=False, comment="pending, applied, refused"),
    Column("answered_at", Double),
    Column("effective_step", _Number),
    Column("answer", Text, nullable=False),
)

idempotency_keys = Table(
    "idempotency_keys",
    metadata,
    Column("scope", String(128), primary_key=True),
    Column("key", String(256), primary_key=True),
    Column("body_sha256", String(64), nullable=False),
    Column("job_id", ForeignKey(jobs.c.id), nullable=False),
    Column("created_at", Double, nullable=False),
)

files = Table(
    "files",
    metadata,
    Column("id", String(80), primary_key=True),
    Column("project", String(64), nullable=False),
    Column("filename", Text, nullable=False),
    Column("purpose", String(64), nullable=False),
    Column("bytes", _Number, nullable=False),
    Column("sha256", String(64), nullable=False),
    Column("created_at", Double, nullable=False),
    Column("rows", _Number),
    Column("deleted_at", Double),
    Index(None, "created_at", "id"),
)

api_keys = Table(
    "api_keys",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("sha256", String(64), nullable=False),
    Column("name", String(128), nullable=False),
    Column("project", String(64), nullable=False),
    Column("scopes", Text, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("expires_at", Double),
    Column("last_used_at", Double),
    Column("revoked_at", Double),
)

facts = Table(
    "facts",
    metadata,
    Column("name", String(64), primary_key=True),
    Column("value", Text, nullable=False),
    comment="single facts about this deployment, for example the generation of its Redis",
)

webhook_endpoints = Table(
    "webhook_endpoints",
    metadata,
    Column("id", String(80), primary_key=True),
    Column("project", String(64), nullable=False),
    Column("name", String(128), nullable=False),
    Column("url", Text, nullable=False),
    Column("event_types", Text, nullable=False, comment="JSON list"),
    Column("secret", String(128), nullable=False, comment="signs deliveries, so it is kept as it is"),
    Column("old_secret", String(128), comment="signs as well until old_secret_until"),
    Column("old_secret_until", Double),
    Column("created_at", Double, nullable=False),
    Column("updated_at", Double, nullable=False),
    Column("deleted_at", Double),
    Index(None, "created_at", "id"),
)

webhook_deliveries = Table(
    "webhook_deliveries",
    metadata,
    Column("id", String(80), primary_key=True),
    Column("endpoint_id", ForeignKey(webhook_endpoints.c.id), nullable=False),
    Column("event_number", _Number, comment="job_events.id; null for a test"),
    Column("event_id", String(80), nullable=False, comment="the webhook-id header; the same on each try"),
    Column("event_type", String(64), nullable=False),
    Column("body", Text, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("status", String(16), nullable=False, comment="pending, delivered, failed"),
    Column("tries", Integer, nullable=False),
    Column("next_try_at", Double, nullable=False),
    Column("claimed_until", Double, nullable=False, comment="a dispatcher is at it until then"),
    Column("last_try_at", Double),
    Column("status_code", Integer, comment="of the last try; null when there was no answer"),
    Column("error", Text),
    UniqueConstraint("endpoint_id", "event_number"),
    Index(None, "status", "next_try_at"),
    Index(None, "endpoint_id", "created_at"),
)
