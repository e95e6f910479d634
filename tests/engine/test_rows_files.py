"""Files people really upload: byte order marks, line ends, arrays, tables, and what is not a row file at all."""

from __future__ import annotations

import datetime
import decimal
import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_engine.contract.data import DataConfig
from grpo_engine.rows import BadData, RowProblem, read_rows, scan_file
from grpo_engine.rows.jsonl import decode_line

LINES = [json.dumps({"messages": [{"role": "user", "content": f"{k}+{k}=?"}], "reference_answer": str(2 * k)}) for k in range(1, 9)]
TEXT = "\n".join(LINES) + "\n"


def file(tmp_path: Path, content: bytes, name: str = "train.jsonl") -> Path:
    path = tmp_path / name
    path.write_bytes(content)
    return path


@pytest.mark.parametrize(
    "content",
    [
        TEXT.encode(),
        b"\xef\xbb\xbf" + TEXT.encode(),
        TEXT.replace("\n", "\r\n").encode(),
        (TEXT + "\n\n").encode(),
        ("\n" + TEXT.replace("\n", "\n\n")).encode(),
        TEXT.rstrip("\n").encode(),
        (TEXT + "   \n\t\n").encode(),
    ],
    ids=["plain", "bom", "crlf", "blank lines at the end", "blank lines between", "no line end", "lines of blanks"],
)
def test_eight_rows_are_eight_rows(tmp_path: Path, content: bytes) -> None:
    path = file(tmp_path, content)
    assert scan_file(path) == 8
    report = read_rows(path, DataConfig())
    assert len(report.rows) == 8
    assert report.columns == {"messages": 8, "reference_answer": 8}


PRETTY = json.dumps(json.loads(LINES[0]), indent=2)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "empty"),
        (b"\xef\xbb\xbf \r\n", "empty"),
        (("[\n " + ",\n ".join(LINES) + "\n]").encode(), "looks like a JSON array"),
        (("[" + ",".join(LINES) + "]").encode(), "looks like a JSON array"),
        (PRETTY.encode(), "looks like pretty-printed JSON"),
        ((PRETTY + "\n" + PRETTY).encode(), "looks like pretty-printed JSON"),
        ((TEXT[1:-2]).encode(), "line 1: not valid JSON"),
        ("\n".join(json.dumps(line) for line in LINES).encode(), "line 1: the line is quoted JSON"),
        (TEXT.encode("utf-16"), "UTF-16"),
        (TEXT.encode("utf-16-le"), "UTF-16"),
        (TEXT.encode("utf-32"), "UTF-"),
        (gzip.compress(TEXT.encode()), "gzip"),
        (b"PK\x03\x04 not a sheet", "zip archive or a spreadsheet"),
        ((LINES[0] + '\n{"prompt": "caf').encode() + b'\xe9"}\n', "line 2: byte 16 is not UTF-8"),
    ],
)
def test_what_is_not_json_lines_is_called_by_its_name(tmp_path: Path, content: bytes, sentence: str) -> None:
    path = file(tmp_path, content)
    with pytest.raises(BadData, match=sentence):
        read_rows(path, DataConfig())
    with pytest.raises(BadData, match=sentence) as caught:
        scan_file(path)
    assert caught.value.status == 422


def test_csv_cells_are_text_and_lines_are_counted_through_quoted_breaks(tmp_path: Path) -> None:
    path = file(tmp_path, b'\xef\xbb\xbfprompt,reference_answer\r\n"two\r\nlines, one cell",4\r\n\r\nplain,007\r\n', "train.csv")
    report = read_rows(path, DataConfig())
    assert [(row.line, row.text, row.item["reference_answer"]) for row in report.rows] == [
        (2, "two\r\nlines, one cell", "4"),
        (5, "plain", "007"),
    ]


@pytest.mark.parametrize("separator", [",", ";", "\t"])
def test_csv_separators_are_recognised(tmp_path: Path, separator: str) -> None:
    path = file(tmp_path, f"prompt{separator}gold\nhi{separator}1\n".encode(), "train.csv")
    assert read_rows(path, DataConfig()).rows[0].item == {"prompt": "hi", "gold": "1"}


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"prompt,gold\nhi,1\nhi,there,1\n", "line 3: 3 cells where the header names 2"),
        (b"prompt,prompt\nhi,1\n", "appears twice"),
        (b"prompt,\nhi,1\n", "no name"),
        (b'prompt,gold\n"hi,1\n', "not valid CSV"),
        (b"prompt,gold\ncaf\xe9,1\n", "not UTF-8"),
        (b"prompt,gold\n", "no rows"),
        (b"prompt,gold\n,1\n", "line 2: 'prompt' is empty"),
        (b"\n \nprompt,gold\nhi,1\n,1\n", "line 5: 'prompt' is empty"),
        (b"\nprompt,prompt\nhi,1\n", "line 2: the column 'prompt' appears twice"),
    ],
)
def test_a_faulty_table_is_refused_with_its_line(tmp_path: Path, content: bytes, sentence: str) -> None:
    with pytest.raises(BadData, match=sentence):
        read_rows(file(tmp_path, content, "train.csv"), DataConfig())


def test_the_uploaded_name_decides_where_the_path_has_none(tmp_path: Path) -> None:
    path = file(tmp_path, b"prompt,gold\nhi,1\n", "content")
    assert read_rows(path, DataConfig(), filename="Train.CSV").rows[0].text == "hi"
    with pytest.raises(BadData, match="line 1"):
        read_rows(path, DataConfig())


def parquet(tmp_path: Path, columns: dict[str, Any]) -> Path:
    path = tmp_path / "train.parquet"
    pq.write_table(pa.table(columns), path)
    return path


def test_parquet_is_known_by_its_bytes_and_gives_the_same_rows(tmp_path: Path) -> None:
    rows = [
        {
            "data_source": "gsm8k",
            "prompt": [{"role": "user", "content": "3*24-2?"}],
            "reward_model": {"style": "rule", "ground_truth": "70"},
        },
        {"data_source": "gsm8k", "prompt": [{"role": "user", "content": "1+1?"}], "reward_model": {"style": "rule", "ground_truth": "2"}},
    ]
    path = parquet(tmp_path, {name: [row[name] for row in rows] for name in rows[0]})
    unnamed = path.rename(tmp_path / "content")
    jsonl = file(tmp_path, "\n".join(json.dumps(row) for row in rows).encode())
    assert read_rows(unnamed, DataConfig()).rows == read_rows(jsonl, DataConfig()).rows
    assert scan_file(unnamed) == 2


def test_parquet_values_become_json(tmp_path: Path) -> None:
    day = datetime.date(2024, 2, 29)
    path = parquet(
        tmp_path, {"prompt": ["q"], "day": [day], "price": [decimal.Decimal("1.50")], "count": [decimal.Decimal("3")], "none": [None]}
    )
    assert read_rows(path, DataConfig()).rows[0].item == {"prompt": "q", "day": "2024-02-29", "price": 1.5, "count": 3, "none": None}


def test_bytes_in_a_parquet_column_are_a_problem_of_the_row(tmp_path: Path) -> None:
    with pytest.raises(BadData, match="line 1: a value of type bytes"):
        read_rows(parquet(tmp_path, {"prompt": ["q"], "image": [b"\x89PNG"]}), DataConfig())


def test_parquet_times_in_nanoseconds_are_cut_to_microseconds(tmp_path: Path) -> None:
    """pandas writes them; one that is no whole microsecond has no type in Python."""
    times = pa.array([1_234_567_890_123_456_789], pa.timestamp("ns"))
    (row,) = read_rows(parquet(tmp_path, {"prompt": ["q"], "made": times}), DataConfig()).rows
    assert row.item["made"] == "2009-02-13T23:31:30.123456"


@pytest.mark.parametrize("times", [pa.array([[1_234_567]], pa.list_(pa.timestamp("ns"))), pa.array([2**62], pa.timestamp("ms"))])
def test_parquet_times_that_python_cannot_hold_are_refused(tmp_path: Path, times: pa.Array) -> None:
    with pytest.raises(BadData, match="Parquet file cannot be read after row 0"):
        read_rows(parquet(tmp_path, {"prompt": ["q"], "made": times}), DataConfig())


def test_a_parquet_column_that_appears_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "train.parquet"
    pq.write_table(pa.table([pa.array(["q"]), pa.array(["other"])], names=["prompt", "prompt"]), path)
    with pytest.raises(BadData, match="'prompt' appears twice"):
        read_rows(path, DataConfig())


def test_a_truncated_parquet_file_is_refused(tmp_path: Path) -> None:
    path = parquet(tmp_path, {"prompt": ["q"] * 100})
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(BadData, match="Parquet file cannot be read"):
        read_rows(path, DataConfig())


def test_a_parquet_name_on_other_bytes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadData, match="not Parquet"):
        read_rows(file(tmp_path, TEXT.encode(), "train.parquet"), DataConfig())


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(), JSON, max_size=4), st.booleans())
def test_a_line_gives_back_the_object_it_was_made_from(record: dict[str, Any], is_ascii: bool) -> None:
    line = json.dumps(record, ensure_ascii=is_ascii).encode("utf-8", "surrogatepass")
    assert decode_line(3, line) == (3, record)


@given(st.binary(max_size=200))
def test_no_line_of_bytes_raises(line: bytes) -> None:
    found = decode_line(1, line)
    assert isinstance(found, RowProblem) or isinstance(found[1], dict)


@pytest.mark.parametrize(
    "content",
    [
        TEXT.replace("\n", "\r").encode(),
        b"\xef\xbb\xbf" + "\n".join(LINES[:4]).encode() + b"\n\xef\xbb\xbf" + "\n".join(LINES[4:]).encode(),
        b"\xef\xbb\xbf\xef\xbb\xbf" + TEXT.encode(),
    ],
    ids=["lone carriage returns", "files joined with their marks", "mark written twice"],
)
def test_odd_line_ends_and_marks_lose_no_row(tmp_path: Path, content: bytes) -> None:
    """https://github.com/langchain-ai/langchain-community/issues/138, https://github.com/wbolster/jsonlines/issues/68"""
    report = read_rows(file(tmp_path, content), DataConfig())
    assert [row.line for row in report.rows] == list(range(1, 9))
    assert report.columns == {"messages": 8, "reference_answer": 8}


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"BZh91AY&SY", "bzip2"),
        (b"\xfd7zXZ\x00\x00", "xz"),
        (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", "Excel"),
        (b"%PDF-1.7\n", "PDF"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "LFS"),
        (b"<!DOCTYPE html><html></html>", "web page"),
        (b'{"prompt": "a", "score": 1e999}', "too large"),
        (b'{"prompt": "a", "id": ' + b"9" * 4001 + b"}", "a number of 4001 digits is too long"),
        (TEXT.encode("utf-32"), "UTF-32"),
    ],
)
def test_other_things_that_are_no_rows(tmp_path: Path, content: bytes, sentence: str) -> None:
    with pytest.raises(BadData, match=sentence):
        scan_file(file(tmp_path, content))


@pytest.mark.parametrize("prompt", ["\u200b", "\ufeff", "\u3000", " \u2060\n"])
@pytest.mark.parametrize("as_messages", [True, False])
def test_a_prompt_of_invisible_signs_is_empty(tmp_path: Path, prompt: str, as_messages: bool) -> None:
    """https://github.com/huggingface/trl/issues/2087 with what editors leave behind."""
    row = {"messages": [{"role": "user", "content": prompt}]} if as_messages else {"prompt": prompt}
    with pytest.raises(BadData, match=r"line 1.*empty"):
        read_rows(file(tmp_path, json.dumps(row).encode()), DataConfig())


def test_numbers_that_pandas_had_missing_are_null(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    table = pa.table({"prompt": ["a", "b"], "gold": [1.0, float("nan")]})
    pq.write_table(table, path)
    assert [row.item["gold"] for row in read_rows(path, DataConfig()).rows] == [1.0, None]
    with pytest.raises(BadData, match=r"line 2.*gold"):
        read_rows(path, DataConfig(reference_field="gold"))


@pytest.mark.parametrize(
    ("line", "name"),
    [
        (rb'{"prompt": "q", "reference_answer": "\udc00"}', "'reference_answer'"),
        (rb'{"prompt": "q", "meta": {"a": ["\ud800"]}}', "'meta'"),
        (rb'{"prompt": "q", "\ud800": 1}', r"'\\ud800'"),
    ],
)
def test_half_of_a_surrogate_pair_in_any_column_is_a_bad_row(tmp_path: Path, line: bytes, name: str) -> None:
    """Neither graders nor logs could write it as UTF-8."""
    with pytest.raises(BadData, match=rf"^line 1: {name} holds half of a surrogate pair"):
        read_rows(file(tmp_path, line), DataConfig())
    assert len(read_rows(file(tmp_path, rb'{"prompt": "q", "gold": "\ud83d\ude00"}'), DataConfig()).rows) == 1


def test_a_parquet_time_in_an_unknown_zone_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "train.parquet"
    pq.write_table(pa.table({"prompt": ["q"], "when": pa.array([1], pa.timestamp("us", "Mars/Utopia"))}), path)
    with pytest.raises(BadData, match="Mars/Utopia"):
        scan_file(path)
