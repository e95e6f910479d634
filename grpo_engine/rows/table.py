"""CSV and Parquet as records. Parquet values that JSON lacks are turned into text or numbers."""

from __future__ import annotations

import csv
import datetime
import decimal
import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_engine.rows.report import TRAINING_FILE, BadData, RowProblem

if TYPE_CHECKING:
    import pyarrow as pa

csv.field_size_limit(64 * 1024 * 1024)
_BATCH_ROWS = 1024


def read_csv(path: Path) -> Iterator[tuple[int, dict[str, Any]] | RowProblem]:
    """(line of the record's start, {column: text}) of each record. The first line that is not blank names the columns; every cell is text.

    Raises BadData when the header cannot be used or the file is not UTF-8.
    """
    with path.open(encoding="utf-8-sig", newline="") as stream:
        try:
            num_blank = 0
            while not (header_line := stream.readline()).strip():  # the file is not blank: `file_kind` has looked
                num_blank += 1
            reader = csv.reader(itertools.chain([header_line], stream), delimiter=_delimiter(header_line), strict=True)
            header = [name.strip() for name in next(reader)]
            _check_header(header, num_blank + 1)
            line = num_blank + reader.line_num + 1
            for cells in reader:
                if any(cell.strip() for cell in cells):
                    yield _csv_record(line, header, cells)
                line = num_blank + reader.line_num + 1
        except UnicodeDecodeError as error:
            raise BadData(f"byte {error.start + 1} of the file is not UTF-8; save it as UTF-8", param=TRAINING_FILE) from None
        except csv.Error as error:
            raise BadData(f"line {num_blank + reader.line_num}: not valid CSV: {error}; correct the quoting", param=TRAINING_FILE) from None


def _delimiter(header_line: str) -> str:
    return max(",;\t", key=header_line.count)


def _check_header(header: list[str], line: int) -> None:
    if "" in header:
        raise BadData(f"line {line}: a column of the CSV header has no name; name it or remove the column", param=TRAINING_FILE)
    if len(set(header)) != len(header):
        twice = next(name for name in header if header.count(name) > 1)
        raise BadData(f"line {line}: the column {twice!r} appears twice in the CSV header; rename one", param=TRAINING_FILE)


def _csv_record(line: int, header: list[str], cells: list[str]) -> tuple[int, dict[str, Any]] | RowProblem:
    if len(cells) != len(header):
        return RowProblem(
            line, None, f"{len(cells)} cells where the header names {len(header)} columns; quote cells that hold the separator or a quote"
        )
    return line, dict(zip(header, cells, strict=True))


def read_parquet(path: Path) -> Iterator[tuple[int, dict[str, Any]] | RowProblem]:
    """(row number from 1, {column: value}) of each row. Raises BadData when the file is damaged."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    number = 0
    try:
        with pq.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if len(set(names)) != len(names):
                twice = next(name for name in names if names.count(name) > 1)
                raise BadData(f"the column {twice!r} appears twice in the Parquet file; rename one", param=TRAINING_FILE)
            for batch in file.iter_batches(batch_size=_BATCH_ROWS):
                for record in _in_microseconds(batch).to_pylist():
                    number += 1
                    try:
                        yield number, {name: to_json_value(value) for name, value in record.items()}
                    except TypeError as error:
                        yield RowProblem(number, None, f"{error}; remove the column or store it as text")
    except (pa.ArrowException, OSError, ValueError, OverflowError, LookupError) as error:  # the last three: times Python cannot hold
        raise BadData(f"the Parquet file cannot be read after row {number}: {error}; write it again", param=TRAINING_FILE) from None


def _in_microseconds(batch: pa.RecordBatch) -> pa.RecordBatch:
    """With its times in the finest unit Python's types hold; pandas writes nanoseconds."""
    import pyarrow as pa

    for index, column in enumerate(batch.schema):
        if pa.types.is_timestamp(column.type) and column.type.unit == "ns":
            times = batch.column(index).cast(pa.timestamp("us", column.type.tz), safe=False)
            batch = batch.set_column(index, column.name, times)
    return batch


def to_json_value(value: Any) -> Any:
    """A Parquet value as JSON has it: dates as ISO text, decimals as numbers, NaN as null. Raises TypeError for bytes and infinities."""
    if isinstance(value, dict):
        return {str(key): to_json_value(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [to_json_value(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        if math.isnan(value):
            return None  # pandas writes missing numbers so
        raise TypeError("an infinite number has no place in a row")
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, decimal.Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    raise TypeError(f"a value of type {type(value).__name__} has no place in a row")
