"""Takes what workers have to say from Redis into the histories of their jobs."""

from __future__ import annotations

import logging

from pydantic import ValidationError

from grpo_engine.contract.error import NotFound
from jobs.ledger import Ledger
from jobs.live import Live
from jobs.notices import Notice

MOST_AT_ONCE = 100

log = logging.getLogger(__name__)


def take_notices(ledger: Ledger, live: Live) -> None:
    """Write down each notice. What is no notice, or of no job of ours, is logged and gone. Raises Unavailable."""
    for _ in range(MOST_AT_ONCE):
        text = live.take_notice()
        if text is None:
            return
        try:
            notice = Notice.model_validate_json(text)
            ledger.note_notice(notice.job_id, notice)
        except ValidationError:
            log.warning("a notice is not one of ours: %.80r", text)
        except NotFound:
            log.warning("a notice is of a job that is not ours: %.80r", text)
