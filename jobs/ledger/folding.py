"""Keeping folds of steps beside the steps, and reading long series from both. See `jobs.rollups`."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from pydantic_core import from_json, to_json

from jobs.ledger.history import HistoryBook, readings, steps_between
from jobs.rollups import WIDTHS, Fold, add_fold, add_step, bucket_width, fold_of, fold_steps
from jobs.tables import rollups, steps


@dataclass(frozen=True)
class Sampled:
    """Thinned series."""

    width: int
    """Steps in a bucket."""
    buckets: list[Fold]
    """In step order; those without a reading are left out."""


class SamplingBook(HistoryBook):
    """Long series, thinned."""

    def sampled(
        self,
        job_id: str,
        names: Collection[str] | None = None,
        step_from: int | None = None,
        step_to: int | None = None,
        *,
        time_from: float | None = None,
        time_to: float | None = None,
        resolution: int,
    ) -> Sampled:
        """At most `resolution` buckets of equal width in steps, a power of two, from steps that count. Raises NotFound for the job."""
        among = steps_between(step_from, step_to, time_from, time_to)
        bounds = [steps.c.job_id == job_id, steps.c.superseded.is_(False), *among]
        with self.database.read() as connection:
            self._job(connection, job_id)
            # Two queries: SQLite takes each end from the index, and reads every row for both at once.
            first = connection.execute(sa.select(sa.func.min(steps.c.step)).where(*bounds)).scalar_one()
            last = connection.execute(sa.select(sa.func.max(steps.c.step)).where(*bounds)).scalar_one()
            if first is None or last is None:
                return Sampled(1, [])
            width = bucket_width(first, last, resolution)
            buckets: dict[int, Fold] = {}
            unread = [(first, last)]
            if time_from is None and time_to is None and (fold_width := fold_of(width)) > 1:
                unread = self._read_folds(connection, job_id, names, fold_width, width, (first, last), buckets)
            for low, high in unread:
                self._read_steps(connection, [*bounds, steps.c.step >= low, steps.c.step <= high], names, width, buckets)
        return Sampled(width, [buckets[number] for number in sorted(buckets)])

    def _read_folds(
        self, connection: sa.Connection, job_id: str, names: Collection[str] | None, fold_width: int, width: int,
        span: tuple[int, int], buckets: dict[int, Fold],
    ) -> list[tuple[int, int]]:  # fmt: skip
        """Fill the buckets that consist of folds alone; the ranges of steps that are left.

        A bucket is filled from folds or from steps, never from both, so that its order is right.
        """
        first, last = span
        picked = self.picked(names, rollups.c.metrics)
        columns = [rollups.c.metrics] if picked is None else picked
        inside = sa.and_(
            rollups.c.job_id == job_id, rollups.c.width == fold_width, rollups.c.number >= (first - 1) // fold_width,
            rollups.c.number <= (last - 1) // fold_width,
        )  # fmt: skip
        per_bucket = width // fold_width
        seen: dict[int, int] = {}
        for row in connection.execute(sa.select(rollups.c.number, *columns).where(inside).order_by(rollups.c.number)):
            number = row[0] // per_bucket
            seen[number] = seen.get(number, 0) + 1
            add_fold(buckets.setdefault(number, {}), readings(row[1:], names, is_picked=picked is not None))
        unread: list[tuple[int, int]] = []
        for number in range((first - 1) // width, (last - 1) // width + 1):
            low, high = number * width + 1, number * width + width
            if seen.get(number) == per_bucket and first <= low and high <= last:
                continue
            buckets.pop(number, None)
            if unread and unread[-1][1] == low - 1:
                unread[-1] = (unread[-1][0], high)
            else:
                unread.append((low, high))
        return unread

    def _read_steps(
        self, connection: sa.Connection, bounds: list[Any], names: Collection[str] | None, width: int, buckets: dict[int, Fold]
    ) -> None:
        picked = self.picked(names, steps.c.metrics)
        query = sa.select(steps.c.step, *([steps.c.metrics] if picked is None else picked)).where(*bounds).order_by(steps.c.step)
        for row in connection.execute(query):
            metrics = readings(row[1:], names, is_picked=picked is not None)
            add_step(buckets.setdefault((row[0] - 1) // width, {}), row[0], metrics)


def forget(connection: sa.Connection, job_id: str, to_step: int) -> None:
    """Delete the folds that hold a step after this one."""
    holds_later = (rollups.c.number + 1) * rollups.c.width > to_step
    connection.execute(sa.delete(rollups).where(rollups.c.job_id == job_id, holds_later))


def fold(connection: sa.Connection, job_id: str, folded: int, step: int) -> None:
    """Fold what has become complete: steps up to `folded` were before, those up to `step` are now in the database."""
    for below, width in zip((1, *WIDTHS), WIDTHS, strict=False):
        start, end = folded // width, step // width
        if start == end:
            return
        if below == 1:
            counts = sa.and_(
                steps.c.job_id == job_id, steps.c.superseded.is_(False), steps.c.step > start * width, steps.c.step <= end * width
            )
            rows = connection.execute(sa.select(steps.c.step, steps.c.metrics).where(counts).order_by(steps.c.step))
            folds = fold_steps(width, ((row.step, from_json(row.metrics)) for row in rows))
        else:
            folds = {}
            whole: dict[int, int] = {}
            ratio = width // below
            inside = sa.and_(
                rollups.c.job_id == job_id, rollups.c.width == below, rollups.c.number >= start * ratio, rollups.c.number < end * ratio
            )
            for row in connection.execute(sa.select(rollups.c.number, rollups.c.metrics).where(inside).order_by(rollups.c.number)):
                number = row.number // ratio
                whole[number] = whole.get(number, 0) + 1
                add_fold(folds.setdefault(number, {}), from_json(row.metrics))
            folds = {number: found for number, found in folds.items() if whole[number] == ratio}
        if below == 1:
            folds = {number: folds.get(number, {}) for number in range(start, end)}
        rows_to_write = [
            {"job_id": job_id, "width": width, "number": number, "metrics": to_json(found).decode()} for number, found in folds.items()
        ]
        if rows_to_write:
            connection.execute(sa.insert(rollups), rows_to_write)
