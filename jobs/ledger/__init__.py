"""The ledger: everything that is true about jobs, files and keys, in one object made of parts.

`open_ledger(settings)` prepares the directories and the schema.
"""

from __future__ import annotations

from jobs.artifacts import Artifacts
from jobs.database import Database
from jobs.ledger.attempts import AttemptBook, Lost, Void
from jobs.ledger.book import Budgets, IllegalTransition
from jobs.ledger.control import Request
from jobs.ledger.creation import NewJob
from jobs.ledger.credentials import CredentialBook
from jobs.ledger.deliveries import DeliveryBook, DeliveryRecord
from jobs.ledger.files import FileBook
from jobs.ledger.folding import Sampled, SamplingBook
from jobs.ledger.ingest import IngestBook, Ingested
from jobs.ledger.lineage import LineageRecord
from jobs.ledger.listing import ListingBook
from jobs.ledger.promotions import PromotionBook, PromotionRecord
from jobs.ledger.records import (
    ApiKeyRecord,
    CheckpointRecord,
    CommandRecord,
    EventRecord,
    FileRecord,
    IdempotencyKey,
    Integrity,
    JobError,
    JobRecord,
    Order,
    Page,
    StepRecord,
)
from jobs.ledger.spelling import body_sha256, canonical_json, new_id
from jobs.ledger.sweeps import MemberRecord, NewMember, SweepBook, SweepRecord
from jobs.ledger.webhooks import EndpointRecord, WebhookBook
from jobs.settings import Settings

__all__ = [
    "ApiKeyRecord",
    "Budgets",
    "CheckpointRecord",
    "CommandRecord",
    "DeliveryRecord",
    "EndpointRecord",
    "EventRecord",
    "FileRecord",
    "IdempotencyKey",
    "IllegalTransition",
    "Ingested",
    "Integrity",
    "JobError",
    "JobRecord",
    "Ledger",
    "LineageRecord",
    "Lost",
    "MemberRecord",
    "NewJob",
    "NewMember",
    "Order",
    "Page",
    "PromotionRecord",
    "Request",
    "Sampled",
    "StepRecord",
    "SweepRecord",
    "Void",
    "body_sha256",
    "canonical_json",
    "new_id",
    "open_ledger",
]


class Ledger(
    SweepBook, ListingBook, AttemptBook, IngestBook, SamplingBook, FileBook, PromotionBook, CredentialBook,
    WebhookBook, DeliveryBook,
):  # fmt: skip
    """Thread-safe; every method is one transaction."""

    def close(self) -> None:
        """Close the database's connections."""
        self.database.close()


def open_ledger(settings: Settings) -> Ledger:
    """The ledger of a deployment, directories and schema brought up to date. Raises DatabaseDamaged, Unavailable."""
    artifacts = Artifacts(settings.data_dir)
    artifacts.prepare()
    database = Database.open(settings)
    database.migrate()
    budgets = Budgets(settings.max_crashes, settings.max_worker_losses, settings.max_stuck_attempts, settings.retry_backoff_s)
    return Ledger(database, artifacts, budgets=budgets)
