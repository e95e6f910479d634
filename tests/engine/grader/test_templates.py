"""Templates are paths into the row and the completion, and nothing else."""

from __future__ import annotations

import math
from typing import Any

import pytest

from grpo_engine.contract.error import InvalidRequest
from grpo_engine.grader import Sample, check_templates, make_grader
from grpo_engine.grader.compiled import compile_grader
from grpo_engine.grader.sample import View
from grpo_engine.rows import Row
from tests.engine.grader.build import grader, score

ITEM = {
    "label": "Paris",
    "id": 17,
    "ratio": 42.0,
    "half": 0.5,
    "yes": True,
    "tags": ["a", {"b": None}],
    "meta": {"ids": [1, 2]},
    "a b": "blank",
    "x.y": 1,
}


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{item.label}}", "Paris"),
        ("{{ item.label }}", "Paris"),
        ("{{\titem.label\n}}", "Paris"),
        ("<{{item.label}}-{{item.id}}>", "<Paris-17>"),
        ("{{item.ratio}}", "42"),
        ("{{item.half}}", "0.5"),
        ("{{item.yes}}", "true"),
        ("{{item.tags}}", '["a",{"b":null}]'),
        ("{{item.meta.ids[1]}}", "2"),
        ("{{item.meta.ids.0}}", "1"),
        ("{{item.meta.ids[-1]}}", "2"),
        ("{{item['a b']}}", "blank"),
        ('{{item["x.y"]}}', "1"),
        ("no braces {x}", "no braces {x}"),
        ("{{sample.output_json.cities[0]}}", "Paris"),
        ("{{sample.choices[0].message.content}}", '{"cities": ["Paris"]}'),
    ],
)
def test_a_template_renders(template: str, text: str) -> None:
    assert score({"type": "string_check", "input": template, "reference": text}, '{"cities": ["Paris"]}', ITEM).value == 1.0


@pytest.mark.parametrize(
    "template",
    ["{{nope}}", "{{items.label}}", "{{item.label", "{{item.label | upper}}", "{{item.f()}}", "{{item.a + 1}}", "{{sample.text}}",
     "{{sample}}", "{{}}", "{{sample.output_text.x}}", "{{sample.output_tools}}", "{{sample.choices[1].message.content}}", "{{item..x}}",
     "{{item.__class__()}}"],
)  # fmt: skip
def test_what_is_no_path_is_refused_before_anything_runs(template: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        make_grader(grader({"type": "string_check", "reference": template}))
    assert caught.value.param == "grader.reference"


@pytest.mark.parametrize(
    "template", ["{{item.nope}}", "{{item.label.nope}}", "{{item.tags[1].b}}", "{{item.meta.ids[2]}}", "{{item.__class__}}"]
)
def test_a_field_the_row_lacks_is_a_fault_never_a_zero(template: str) -> None:
    answer = score({"type": "string_check", "reference": template}, "x", ITEM)
    assert math.isnan(answer.value)
    assert answer.kind == "invalid_variable"
    assert "'label'" in (answer.error or "")


@pytest.mark.parametrize("output", ["no json", "[]", "{}", '{"name": NaN}'])
def test_a_completion_without_the_json_that_is_asked_for_scores_zero(output: str) -> None:
    answer = score({"type": "string_check", "input": "{{sample.output_json.name}}", "reference": "x"}, output)
    assert answer.value == 0.0
    assert "completion" in answer.detail["fault"]


def rows(*items: dict[str, Any]) -> list[Row]:
    return [Row(line=number, messages=None, text="q", item=item) for number, item in enumerate(items, start=1)]


MATH = {"type": "math", "reference": "{{item.solution}}"}


def test_a_field_no_row_has_is_refused_with_the_columns_there_are() -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_templates(grader(MATH), rows({"prompt": "q", "solutions": "4"}))
    assert caught.value.param == "method.grpo.grader.reference"
    assert "{{item.solution}}" in caught.value.message
    assert "'solutions'" in caught.value.message


def test_rows_that_lack_a_field_are_counted_and_the_first_lines_named() -> None:
    items = [{"prompt": "q", "solution": None if n in (3, 5, 8) else "4"} for n in range(1, 9)]
    with pytest.raises(InvalidRequest, match=r"in 3 of 8 rows \(lines 3, 5, 8\)"):
        check_templates(grader(MATH), rows(*items))


def test_a_blank_reference_is_refused_with_its_line() -> None:
    with pytest.raises(InvalidRequest, match=r"1 of 2 rows \(line 2\) is blank"):
        check_templates(grader(MATH), rows({"solution": "4"}, {"solution": " "}))


def test_good_rows_pass() -> None:
    check_templates(grader(MATH), rows({"solution": 4}, {"solution": "x"}))


def test_a_grader_that_skips_needs_its_field_in_some_row() -> None:
    raw = {"type": "multi", "graders": {"m": {**MATH, "if_missing": "skip"}}, "weights": {"m": 1.0}}
    check_templates(grader(raw), rows({"solution": "4"}, {"keyword": "x"}))
    with pytest.raises(InvalidRequest) as caught:
        check_templates(grader(raw), rows({"keyword": "x"}))
    assert caught.value.param == "method.grpo.grader.graders.m.reference"


@pytest.mark.parametrize(
    ("raw", "bad", "sentence"),
    [
        ({"type": "math"}, "\\boxed{}", "empty"),
        ({"type": "math"}, "$$", "empty"),
        ({"type": "math"}, {"target": ["42"]}, "must name one value"),
        ({"type": "math"}, ["42", "43"], "must name one value"),
        ({"type": "number"}, "forty-two", "not a number"),
        ({"type": "number"}, [1, 2], "not a number"),
    ],
)
def test_a_reference_that_nothing_could_equal_is_refused_with_its_line(raw: dict[str, Any], bad: Any, sentence: str) -> None:
    """https://github.com/huggingface/cookbook/issues/335: a gold answer without content must not pay, nor cost the run its grades."""
    good = {"reference_answer": "42"}
    check_templates(grader(raw), rows(good, good))
    with pytest.raises(InvalidRequest, match=rf"{sentence}.*1 of 3 rows \(line 2\)"):
        check_templates(grader(raw), rows(good, {"reference_answer": bad}, good))


@pytest.mark.parametrize(
    ("reference", "completion", "expected"),
    [(["$42$"], "42", 1.0), ([42], "42", 1.0), ([1, 2], r"\boxed{[1,2]}", 1.0), ([1, 2], r"\boxed{[2,1]}", 0.0)],
)
def test_a_list_of_one_is_its_element_and_numbers_are_a_list(reference: Any, completion: str, expected: float) -> None:
    """OlympiadBench keeps its gold answers as lists, most of one text."""
    item = {"reference_answer": reference}
    check_templates(grader({"type": "math"}), rows(item))
    assert compile_grader(grader({"type": "math"}))(View(Sample(item, completion))).value == expected


@pytest.mark.parametrize("reference", [["42", "43"], {"target": ["42"]}, [["42"], ["43"]], [["42", "43"]]])
def test_a_reference_that_no_answer_could_equal_is_a_fault_and_no_zero(reference: Any) -> None:
    answer = compile_grader(grader({"type": "math"}))(View(Sample({"reference_answer": reference}, "42")))
    assert math.isnan(answer.value)
    assert "{{item.reference_answer}}" in (answer.error or "")
