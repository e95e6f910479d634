"""How far each job has been exported, durably: one fact a job and exporter, and one for the exporter's alarm."""

from __future__ import annotations

import json
from typing import Any

import sqlalchemy as sa

from jobs.database import Database
from jobs.ledger.spelling import canonical_json
from jobs.tables import facts, jobs

ALARM = "alarm"


class Watermarks:
    """Of one exporter, by its name. Raises what the database raises."""

    def __init__(self, database: Database, exporter: str) -> None:
        self._database = database
        self._prefix = f"{exporter}:"

    def unfinished(self, limit: int, after: str = "") -> list[str]:
        """Jobs that ever began an attempt and are not wholly exported, by id after `after`."""
        mark = facts.c.name == sa.literal(self._prefix) + jobs.c.id
        is_open = sa.or_(facts.c.value.is_(None), facts.c.value.not_like('%"done":true%'))
        query = sa.select(jobs.c.id).select_from(jobs.outerjoin(facts, mark)).where(jobs.c.epoch > 0, is_open, jobs.c.id > after)
        with self._database.read() as connection:
            return list(connection.execute(query.order_by(jobs.c.id).limit(limit)).scalars())

    def read(self, job_id: str) -> dict[str, Any]:
        """What was kept of a job; empty before the first time."""
        return self._get(job_id)

    def write(self, job_id: str, mark: dict[str, Any]) -> None:
        """Keep it; when this returns it survives a crash."""
        self._put(job_id, mark)

    def alarm(self) -> str | None:
        """Why exporting is held up; None when it is not."""
        text = self._get(ALARM).get("message")
        return None if text is None else str(text)

    def set_alarm(self, message: str | None) -> None:
        """Say why exporting is held up, or that it is not."""
        if self.alarm() != message:
            self._put(ALARM, {} if message is None else {"message": message})

    def _get(self, name: str) -> dict[str, Any]:
        with self._database.read() as connection:
            text = connection.execute(sa.select(facts.c.value).where(facts.c.name == self._prefix + name)).scalar_one_or_none()
        content: dict[str, Any] = {} if text is None else json.loads(text)
        return content

    def _put(self, name: str, content: dict[str, Any]) -> None:
        key, text = self._prefix + name, canonical_json(content)
        with self._database.write() as connection:
            changed = connection.execute(sa.update(facts).where(facts.c.name == key).values(value=text)).rowcount
            if not changed:
                connection.execute(sa.insert(facts).values(name=key, value=text))
