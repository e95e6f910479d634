"""Rows of every accepted format: where the prompt is and where the reference is. Each test is one idea."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from grpo_engine.contract.data import DataConfig
from grpo_engine.rows import BadData, Row, RowReport, read_rows

GSM8K = {"question": "A shop has 3 shelves with 24 cups and sells 2. How many are left?", "answer": "3*24=<<3*24=72>>72, 72-2=70\n#### 70"}
MATH = {"problem": "Half of one?", "solution": r"It is \fbox{no}, rather \boxed{\frac{1}{2}}.", "level": "Level 1"}
VERL = {"data_source": "openai/gsm8k", "prompt": [{"role": "user", "content": "3*24-2?"}], "reward_model": {"ground_truth": "70"}}
RFT = {"messages": [{"role": "developer", "content": "One word."}, {"role": "user", "content": "Capital?"}], "meta": {"ids": [1, 2]}}


def write(path: Path, *rows: Any) -> Path:
    """JSON Lines; a str is written as it stands."""
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows), encoding="utf-8")
    return path


def read(tmp_path: Path, *rows: Any, **config: Any) -> RowReport:
    return read_rows(write(tmp_path / "train.jsonl", *rows), DataConfig(**config))


def only(tmp_path: Path, row: Any, **config: Any) -> Row:
    (found,) = read(tmp_path, row, **config).rows
    return found


def refusal(tmp_path: Path, *rows: Any, **config: Any) -> str:
    with pytest.raises(BadData) as caught:
        read(tmp_path, *rows, **config)
    assert caught.value.status == 422
    assert caught.value.param == "training_file"
    return caught.value.message


def test_messages_keep_every_column_and_developer_means_system(tmp_path: Path) -> None:
    row = only(tmp_path, RFT)
    assert row.messages == [{"role": "system", "content": "One word."}, {"role": "user", "content": "Capital?"}]
    assert row.text is None
    assert row.item["meta"] == {"ids": [1, 2]}


def test_text_parts_are_joined(tmp_path: Path) -> None:
    content = [{"type": "text", "text": "Capital of "}, {"type": "text", "text": "Italy?"}]
    assert only(tmp_path, {"messages": [{"role": "user", "content": content}]}).messages == [
        {"role": "user", "content": "Capital of Italy?"}
    ]


def test_a_prompt_column_is_text_or_messages_row_by_row(tmp_path: Path) -> None:
    report = read(tmp_path, {"prompt": "The sky is"}, {"prompt": [{"role": "user", "content": "Colour?"}]})
    assert [(row.text, row.messages) for row in report.rows] == [("The sky is", None), (None, [{"role": "user", "content": "Colour?"}])]
    assert report.formats == {"prompt": 2}


def test_gsm8k_reference_is_what_follows_the_last_mark(tmp_path: Path) -> None:
    row = only(tmp_path, GSM8K)
    assert row.item["reference_answer"] == "70"
    assert row.item["answer"] == GSM8K["answer"]
    assert row.messages == [{"role": "user", "content": GSM8K["question"]}]


def test_math_reference_is_the_last_box_with_its_braces(tmp_path: Path) -> None:
    assert only(tmp_path, MATH).item["reference_answer"] == r"\frac{1}{2}"


def test_a_filled_answer_column_wins_over_an_empty_solution(tmp_path: Path) -> None:
    row = {"problem": "2+2?", "solution": "", "answer": "4", "id": 17, "tags": ["a", {"b": None}], "score": 0.5}
    item = only(tmp_path, row).item
    assert item == {**row, "reference_answer": "4"}


def test_verl_reference_is_nested(tmp_path: Path) -> None:
    assert only(tmp_path, VERL).item["reference_answer"] == "70"


def test_columns_of_other_names_are_mapped(tmp_path: Path) -> None:
    row = {"meta": {"ask": "2+2?", "gold": 4}}
    mapped = only(tmp_path, row, prompt_field="meta.ask", reference_field="meta.gold")
    assert mapped.text == "2+2?"
    assert mapped.item["reference_answer"] == 4


def test_a_column_whose_name_holds_dots_is_found(tmp_path: Path) -> None:
    assert only(tmp_path, {"meta.ask": "2+2?", "meta": {"ask": "no"}}, prompt_field="meta.ask").text == "2+2?"


def test_reference_field_wins_over_the_format(tmp_path: Path) -> None:
    assert only(tmp_path, {**VERL, "gold": "71"}, reference_field="gold").item["reference_answer"] == "71"
    assert only(tmp_path, GSM8K, reference_field="answer").item["reference_answer"] == "70"


@pytest.mark.parametrize(
    ("config", "expected"),
    [({}, "messages"), ({"prompt_as": "text"}, "text"), ({"prompt_as": "user"}, "messages"), ({"chat_template": "none"}, "text")],
)
def test_a_question_becomes_a_user_message_or_stays_text(tmp_path: Path, config: dict[str, Any], expected: str) -> None:
    row = only(tmp_path, GSM8K, **config)
    assert (row.messages is not None) == (expected == "messages")
    assert (row.text or row.messages[0]["content"]) == GSM8K["question"]  # type: ignore[index]


def test_a_text_prompt_can_be_made_a_user_message(tmp_path: Path) -> None:
    assert only(tmp_path, {"prompt": "hi"}, prompt_as="user").messages == [{"role": "user", "content": "hi"}]


def test_without_a_chat_template_messages_are_their_text(tmp_path: Path) -> None:
    assert only(tmp_path, RFT, chat_template="none").text == "One word.\n\nCapital?"


def test_without_a_chat_template_a_dialogue_is_refused(tmp_path: Path) -> None:
    turns = [{"role": role, "content": role} for role in ("user", "assistant", "user")]
    assert "chat_template" in refusal(tmp_path, {"messages": turns}, chat_template="none")


@pytest.mark.parametrize("reference", [42, 42.0, "42", -7, ["42"], {"label": "x"}, None])
def test_a_reference_may_be_any_json(tmp_path: Path, reference: Any) -> None:
    assert only(tmp_path, {"prompt": "q", "reference_answer": reference}).item["reference_answer"] == reference


@pytest.mark.parametrize(
    ("row", "field"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": " \n"}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": 7}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": [{"role": "user", "content": ""}]}, "messages"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "oracle", "content": "x"}]}, "messages[0].role"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]}, "reference_answer"),
        ({"question": "2+2?", "answer": "four"}, "answer"),
        ({"problem": "2+2?", "solution": "four"}, "solution"),
        ({"data_source": "openai/gsm8k", "prompt": [{"role": "user", "content": "no gold"}]}, "reward_model.ground_truth"),
        ({"text": "2+2?"}, "'text'"),
        ({"prompt": "half a pair: \ud800"}, "surrogate"),
        ("[1, 2]", "array"),
        ("42", "number"),
        ("null", "null"),
        ('{"prompt": NaN}', "NaN"),
        ('{"prompt": "a", "prompt": "b"}', "twice"),
        ('{"prompt": "a"', "column"),
        ('"{\\"prompt\\": \\"a\\"}"', "quoted JSON"),
        ("[" * 100_000, "nested"),
    ],
)
def test_one_bad_line_is_named_with_its_field(tmp_path: Path, row: Any, field: str) -> None:
    good = {"prompt": "2+2?"}
    message = refusal(tmp_path, good, "", row, good)
    assert message.startswith("line 3: ")
    assert field in message


def test_a_malformed_row_17_is_named(tmp_path: Path) -> None:
    rows = [{"prompt": f"{n}+{n}?"} for n in range(1, 31)]
    assert refusal(tmp_path, *rows[:16], '{"prompt": "17+17?",}', *rows[17:]).startswith("line 17: not valid JSON")


def test_further_bad_lines_are_counted(tmp_path: Path) -> None:
    message = refusal(tmp_path, {"prompt": ""}, {"prompt": "ok"}, {"prompt": ""}, {"x": 1})
    assert message.endswith("(2 more bad lines: 3, 4)")


def test_bad_rows_can_be_left_out_and_are_reported(tmp_path: Path) -> None:
    report = read(tmp_path, {"prompt": "a"}, {"prompt": ""}, "nonsense", {"prompt": "b"}, bad_rows="skip")
    assert [row.line for row in report.rows] == [1, 4]
    assert [(problem.line, problem.field) for problem in report.problems] == [(2, "prompt"), (3, None)]
    assert (report.num_read, report.num_bad) == (4, 2)
    assert report.to_json()["problems"][0] == {
        "line": 2,
        "field": "prompt",
        "message": "'prompt' is empty; give the prompt or remove the line",
    }


def test_a_file_without_a_usable_row_is_refused_even_when_skipping(tmp_path: Path) -> None:
    assert refusal(tmp_path, {"prompt": ""}, bad_rows="skip").startswith("line 1: ")


def test_a_reference_field_must_be_in_every_row(tmp_path: Path) -> None:
    assert refusal(tmp_path, {"prompt": "a", "gold": 1}, {"prompt": "b", "gold": None}, reference_field="gold").startswith("line 2: 'gold'")
    assert refusal(tmp_path, {"prompt": "a", "gold": "  "}, reference_field="gold").startswith("line 1: 'gold' is empty")


def test_duplicates_are_kept_and_counted_by_prompt(tmp_path: Path) -> None:
    report = read(tmp_path, {"prompt": "a", "n": 1}, {"prompt": "b"}, {"prompt": "a", "n": 2})
    assert len(report.rows) == 3
    assert report.duplicates == [(3, 1)]
    assert report.num_duplicates == 1


def test_limit_reads_only_the_beginning(tmp_path: Path) -> None:
    path = write(tmp_path / "train.jsonl", {"prompt": "a"}, {"prompt": "b"}, "nonsense")
    assert len(read_rows(path, DataConfig(), limit=2).rows) == 2
