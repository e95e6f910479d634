"""Dataset rows in every accepted format, torch-free.

`read_rows(path, data)` is the front door; `scan_file(path)` checks an upload before anyone has said how its rows map.
"""

from __future__ import annotations

import hashlib
import itertools
from pathlib import Path

from grpo_engine.contract.data import DataConfig
from grpo_engine.rows.mapping import BadRow, to_row
from grpo_engine.rows.report import TRAINING_FILE, BadData, Row, RowProblem, RowReport, refusal
from grpo_engine.rows.source import file_kind, read_records

__all__ = ["BadData", "Row", "RowProblem", "RowReport", "file_kind", "read_rows", "scan_file"]


def read_rows(
    path: Path, data: DataConfig, *, filename: str | None = None, limit: int | None = None, param: str = TRAINING_FILE
) -> RowReport:
    """Read a training file, or another one whose field is `param`.

    `filename` is the name the file had when it was uploaded, where `path` does not end in it. `limit` reads only that many records.
    Raises BadData (422) naming line, field and remedy: for a file that is no row file at all, for bad rows unless `data.bad_rows` is
    `skip`, and when no row is left.
    """
    try:
        return _read_rows(path, data, filename, limit)
    except BadData as error:
        raise BadData(error.message, param=param if error.param == TRAINING_FILE else error.param) from error


def _read_rows(path: Path, data: DataConfig, filename: str | None, limit: int | None) -> RowReport:
    report = RowReport()
    seen: dict[bytes, int] = {}
    for record in itertools.islice(read_records(path, filename), limit):
        report.num_read += 1
        if isinstance(record, RowProblem):
            report.add_problem(record)
            continue
        line, columns = record
        try:
            row, kind = to_row(line, columns, data)
        except BadRow as error:
            report.add_problem(RowProblem(line, error.field, str(error)))
            continue
        _count(report, row, kind, seen)
    if report.num_bad and (data.bad_rows == "refuse" or not report.rows):
        raise refusal(report.problems, report.num_bad)
    if not report.rows:
        raise BadData("the file holds no rows; upload one JSON object per line", param=TRAINING_FILE)
    return report


def scan_file(path: Path, *, filename: str | None = None) -> int:
    """Number of records of an upload. Raises BadData for the first record that is no object, or a file that is no row file.

    Looks at the syntax alone: which column is the prompt is the job's business.
    """
    count = 0
    for record in read_records(path, filename):
        if isinstance(record, RowProblem):
            raise BadData(str(record), param="file")
        count += 1
    if not count:
        raise BadData("the file holds no rows; upload one JSON object per line", param="file")
    return count


def _count(report: RowReport, row: Row, kind: str, seen: dict[bytes, int]) -> None:
    report.rows.append(row)
    report.formats[kind] = report.formats.get(kind, 0) + 1
    for name in row.item:
        report.columns[name] = report.columns.get(name, 0) + 1
    digest = hashlib.sha256(repr((row.messages, row.text)).encode("utf-8", "replace")).digest()
    first = seen.setdefault(digest, row.line)
    if first != row.line:
        report.num_duplicates += 1
        if len(report.duplicates) < 100:
            report.duplicates.append((row.line, first))
