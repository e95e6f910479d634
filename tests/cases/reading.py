"""Cases of kinds c and h that need no model: what is read, what is refused, and with which words."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from grpo_engine.contract.data import DataConfig
from grpo_engine.contract.error import InvalidRequest
from grpo_engine.grader import Sample, check_grader, check_templates, make_grader
from grpo_engine.rows import BadData, RowReport, read_rows, scan_file
from tests.cases.registry import Bench, Case, runs
from tests.engine.grader.build import grader, score

DATA8 = [json.dumps({"messages": [{"role": "user", "content": f"{k}+{k}=?"}], "reference_answer": str(2 * k)}) for k in range(1, 9)]


def written(bench: Bench, content: bytes | str | list[Any], name: str = "train.jsonl") -> Path:
    if isinstance(content, list):
        content = "\n".join(json.dumps(row) for row in content)
    path = bench.tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def read(bench: Bench, content: bytes | str | list[Any], **data: Any) -> RowReport:
    return read_rows(written(bench, content), DataConfig(**data))


@runs("C07")
def empty_prompts_are_named(case: Case, bench: Bench) -> None:
    for row in case["input"]["rows"]:
        lines = [*DATA8[:2], json.dumps(row), *DATA8[3:]]
        with pytest.raises(BadData, match=r"^line 3: ") as caught:
            read(bench, "\n".join(lines))
        assert caught.value.status == 422


@runs("C11")
def a_byte_order_mark_is_no_part_of_the_first_key(case: Case, bench: Bench) -> None:
    report = read(bench, b"\xef\xbb\xbf" + "\n".join(DATA8).encode())
    assert len(report.rows) == 8
    assert set(report.columns) == {"messages", "reference_answer"}


@runs("C13")
def references_of_any_type_grade_alike(case: Case, bench: Bench) -> None:
    """null counts as missing: refused with its line when a grader reads the field, and a fault if it is graded all the same."""
    references = case["input"]["rows_reference"]
    report = read(bench, [{"prompt": "6*7?", "reference_answer": reference} for reference in [*references, 42.0]])
    for raw in ({"type": "math"}, {"type": "string_check", "reference": "{{item.reference_answer}}"}):
        with make_grader(grader(raw), pool=bench.processes) as ready:
            scores = ready.score([Sample(row.item, "42") for row in report.rows])
        expected = [float(str(reference) in ("42", "42.0")) for reference in [*references, 42.0]]
        values = [answer.value for answer in scores]
        assert values[:6] + values[7:] == expected[:6] + expected[7:]
        assert math.isnan(values[6])
        assert scores[6].kind == "invalid_variable"
        with pytest.raises(InvalidRequest, match=r"line 7\) is missing or null"):
            check_templates(grader(raw), report.rows)


@runs("H01")
def gsm8k(case: Case, bench: Bench) -> None:
    """The preset is found by the columns; `format: gsm8k` says it outright."""
    rows = case["input"]["rows"]
    report = read(bench, rows, format="gsm8k")
    assert report.rows == read(bench, rows).rows
    items = {f"row{number}": row.item for number, row in enumerate(report.rows, start=1)}
    with make_grader(grader({"type": "math"}), pool=bench.processes) as ready:
        scores = ready.score([Sample(items[name], text) for name, text, _ in case["input"]["grade"]])
    assert [str(int(answer.value)) for answer in scores] == [verdict for _, _, verdict in case["input"]["grade"]]
    with pytest.raises(BadData, match=r"line 2: 'answer' has no '####"):
        read(bench, [rows[0], {"question": "?", "answer": "seventy"}])


@runs("H03")
def openai_rows_and_graders(case: Case, bench: Bench) -> None:
    """A grader named inside a `multi` by another's name is written out, as OpenAI's own schema has it."""
    rows = read(bench, case["input"]["rows"]).rows
    first, second, combined = case["input"]["graders"]
    by_name = {first["name"]: first, second["name"]: second}
    combined = {**combined, "graders": {key: by_name[name] for key, name in combined["graders"].items()}}
    rewards = []
    for text in ("Paris", "PARIS"):
        for raw in (first, second, combined):
            rewards.append(score(raw, text, rows[0].item).value)
    assert rewards == case["check"]["assert"][0]["value"]
    assert rows[1].messages == [{"role": "user", "content": "Capital of Italy?"}]
    unknown = {**first, "reference": "{{item.nope}}"}
    with pytest.raises(InvalidRequest, match="nope"):
        check_templates(grader(unknown), rows)
    assert score(unknown, "Paris", rows[0].item).kind == "invalid_variable"
    with pytest.raises(InvalidRequest, match="calculate_output"):
        check_grader(grader({**combined, "calculate_output": "open(a)"}))
    assert score({**combined, "calculate_output": "a / (b - 1)"}, "Paris", rows[0].item).kind == "formula"


@runs("H05")
def verl_rows(case: Case, bench: Bench) -> None:
    *good, bad = case["input"]["rows"]
    assert [row.item["reference_answer"] for row in read(bench, good).rows] == ["70", "2"]
    with pytest.raises(BadData, match=r"^line 3: reward_model\.ground_truth"):
        read(bench, [*good, bad])
    table = [{**row, "extra_info": {"index": str(row["extra_info"]["index"])}} for row in good]
    path = bench.tmp_path / "train.parquet"
    pq.write_table(pa.Table.from_pylist(table), path)
    assert read_rows(path, DataConfig()).rows == read(bench, table).rows


@runs("H07")
def trl_prompts(case: Case, bench: Bench) -> None:
    """Text stays text, a list is rendered with the template; a mixed file is accepted row by row."""
    text, messages, mixed = case["input"]["files"]
    assert read(bench, text).rows[0].text == "The sky is"
    assert read(bench, messages).rows[0].messages == messages[0]["prompt"]
    assert [row.text is None for row in read(bench, mixed).rows] == [False, True]


@runs("H09")
def what_is_no_json_lines(case: Case, bench: Bench) -> None:
    rows = [json.loads(line) for line in DATA8]
    refused = {
        "looks like a JSON array": "[\n " + ",\n ".join(DATA8) + "\n]",
        "looks like pretty-printed JSON": json.dumps(rows[0], indent=2),
        "quoted JSON": "\n".join(json.dumps(line) for line in DATA8),
        "is empty": "",
        "UTF-16": "\n".join(DATA8).encode("utf-16"),
    }
    for words, content in refused.items():
        path = written(bench, content)
        with pytest.raises(BadData, match=words) as caught:
            scan_file(path)
        assert caught.value.status == 422
    assert scan_file(written(bench, "\n".join(DATA8) + "\n\n\n")) == 8


@runs("H11")
def a_field_of_another_name(case: Case, bench: Bench) -> None:
    math_of_solution = grader({"type": "math", "reference": "{{item.solution}}"})
    with pytest.raises(InvalidRequest, match=r"item\.solution.*1 of 1 rows \(line 1\).*'solutions'"):
        check_templates(math_of_solution, read(bench, case["input"]["rows"]).rows)
    some = [{"prompt": "q", "solution": "4"} if k > 3 else {"prompt": "q"} for k in range(1, 9)]
    with pytest.raises(InvalidRequest, match=r"3 of 8 rows \(lines 1, 2, 3\)"):
        check_templates(math_of_solution, read(bench, some).rows)


@runs("H12")
def extra_columns_stay(case: Case, bench: Bench) -> None:
    """An empty `solution` beside a filled `answer` is no fault of the row; as the reference itself it is reported."""
    (row,) = read(bench, case["input"]["rows"], reference_field="answer").rows
    assert score({"type": "math"}, "4", row.item, bench.processes).value == 1.0
    for template, text in (("{{item.id}}", "17"), ("{{item.tags}}", '["a",{"b":null}]'), ("{{item.score}}", "0.5")):
        assert score({"type": "string_check", "input": template, "reference": text}, "", row.item).value == 1.0
    with pytest.raises(InvalidRequest, match=r"reference is empty"):
        check_templates(grader({"type": "math", "reference": "{{item.solution}}"}), [row])
    with pytest.raises(BadData, match="line 1: 'solution' is empty"):
        read(bench, case["input"]["rows"], reference_field="solution")
