"""From the bytes of a file to records: which kind of file it is, and one dict a record with its line number.

Reads forward only and keeps one record at a time (Parquet: one batch). Compressed files and spreadsheets are left out and
refused by name.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from grpo_engine.rows.jsonl import read_jsonl
from grpo_engine.rows.report import TRAINING_FILE, BadData, RowProblem
from grpo_engine.rows.table import read_csv, read_parquet

Record = tuple[int, dict[str, Any]]
FileKind = Literal["jsonl", "csv", "parquet"]

_REFUSED_STARTS: tuple[tuple[bytes, str], ...] = (
    (b"\x1f\x8b", "is compressed with gzip; unpack it and upload the file inside"),
    (b"\x28\xb5\x2f\xfd", "is compressed with zstd; unpack it and upload the file inside"),
    (b"BZh", "is compressed with bzip2; unpack it and upload the file inside"),
    (b"\xfd7zXZ", "is compressed with xz; unpack it and upload the file inside"),
    (b"7z\xbc\xaf", "is a 7z archive; unpack it and upload the file inside"),
    (b"PK\x03\x04", "is a zip archive or a spreadsheet; upload JSONL, CSV or Parquet"),
    (b"\xd0\xcf\x11\xe0", "is an Excel or Word file; upload JSONL, CSV or Parquet"),
    (b"%PDF-", "is a PDF; upload JSONL, CSV or Parquet"),
    (b"version https://git-lfs", "is a Git LFS pointer, not the data; fetch it with `git lfs pull` and upload the result"),
    (b"ARROW1", "is an Arrow file; write it as Parquet or JSONL"),
    (b"\xff\xfe\x00\x00", "is encoded in UTF-32; save it as UTF-8"),
    (b"\xff\xfe", "is encoded in UTF-16; save it as UTF-8"),
    (b"\xfe\xff", "is encoded in UTF-16; save it as UTF-8"),
    (b"\x00\x00\xfe\xff", "is encoded in UTF-32; save it as UTF-8"),
)
_BOM = b"\xef\xbb\xbf"
_CSV_ENDINGS = (".csv", ".tsv")


def file_kind(path: Path, filename: str | None = None) -> FileKind:
    """What the file is, by its first bytes and then by the ending of its name. Raises BadData for what cannot be read."""
    with path.open("rb") as stream:
        head = stream.read(4096)
    for start, sentence in _REFUSED_STARTS:
        if head.startswith(start):
            raise BadData(f"the file {sentence}", param=TRAINING_FILE)
    if head.removeprefix(_BOM).lstrip()[:14].lower().startswith((b"<!doctype html", b"<html")):
        raise BadData("the file is a web page (perhaps an error page saved instead of the data); download it again", param=TRAINING_FILE)
    if head.startswith(b"PAR1"):
        return "parquet"
    if not head.removeprefix(_BOM).strip():
        raise BadData("the file is empty; upload one JSON object per line", param=TRAINING_FILE)
    if b"\x00" in head[:256]:
        raise BadData("the file holds NUL bytes, so it is binary or UTF-16; save it as UTF-8 text", param=TRAINING_FILE)
    name = (filename or path.name).lower()
    if name.endswith(".parquet"):
        raise BadData("the file's name ends in .parquet and its content is not Parquet; check the upload", param=TRAINING_FILE)
    if name.endswith(_CSV_ENDINGS) and not head.removeprefix(_BOM).lstrip().startswith(b"{"):
        return "csv"
    return "jsonl"


def read_records(path: Path, filename: str | None = None) -> Iterator[Record | RowProblem]:
    """Each record with its line number, or the problem of a line that holds none.

    Raises BadData when the file as a whole cannot be read: wrong encoding, a JSON array, compressed, empty.
    """
    kind = file_kind(path, filename)
    if kind == "parquet":
        yield from read_parquet(path)
    elif kind == "csv":
        yield from read_csv(path)
    else:
        yield from read_jsonl(path)
