"""The grader `math`: answers that are marked in an unusual way, and references that are sentences."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

from grpo_engine.contract.grader import Math, NumberCheck
from grpo_engine.grader.mathematics import math_check, number_check


@pytest.mark.parametrize(
    ("completion", "reference", "expected"),
    [
        ("<answer>42", "42", 1),
        ("the answer is 7. <answer>42", "42", 1),
        ("the answer is 7. <answer>42", "7", 0),
        ("5 <answer>", "5", 0),
        ("<answer>7</answer> and <answer>8", "7", 1),
        (r"\boxed{]2,\infty[}", r"(2,\infty)", 1),
        (r"]-\infty,3]", r"(-\infty,3]", 1),
        (r"\boxed{[1,2[}", "[1,2)", 1),
        (r"\boxed{]1,2[}", "[1,2]", 0),
        (r"\boxed{[1,2]}", "(1,2)", 0),
        ("42", "The answer is 42.", 1),
        ("42", "Answer: 42", 1),
        ("41", "The answer is 42.", 0),
        (r"\boxed{3} then \boxed{4}", "4", 1),
        (r"\boxed{3} then \boxed{4}", "3", 0),
        (r"\boxed{\text{yes}}", "Yes", 1),
        ("True", "true", 1),
        (r"\boxed{x \in [1,3]}", "[1,3]", 1),
        (r"\boxed{10\,\text{km/h}}", "10", 1),
        (r"\{1,2\}", r"\{2,1\}", 1),
        ("(1,2)", "(2,1)", 0),
        (r"\boxed{\begin{pmatrix}1\\2\end{pmatrix}}", r"\begin{pmatrix}1\\2\end{pmatrix}", 1),
    ],
)
def test_verdicts(completion: str, reference: str, expected: int) -> None:
    assert math_check(Math(type="math"), completion, reference)[0] == expected


WORDS_AND_MARKS = [
    ("-8", "The answer is negative 8.", 1),
    ("8", "The answer is negative 8.", 0),
    ("-8", "so it is minus 8.", 1),
    ("minus 8", "\\boxed{-8}", 1),
    ("-2.5", "negative 2.5", 1),
    ("3", "5 minus 2 is 3", 1),
    ("24\\pi", "\\boxed{24\\pi\\text{ square inches}}", 1),
    ("24\\pi", "\\boxed{24\\pi\\text{ cubic cm}}", 1),
    ("2\\sqrt{3}", "2\\sqrt{3} cm", 1),
    ("72", "72</s>", 1),
    ("72", "#### 72 <|im_end|>\n", 1),
    ("72", "\\boxed{72}<|eot_id|><|eot_id|>", 1),
    ("25000", "\\boxed{25\\ 000}", 1),
    ("37", "\\boxed{\u0663\u0667}", 1),
    ("-4", "\u20134", 1),
    ("100000", "\\boxed{1,00,000}", 0),
    ("6.02\\times10^{23}", "\\boxed{6.02e23}", 1),
    ("9007199254740993", "9007199254740992", 0),
    ("-\\frac{2}{3}", "\\boxed{\\frac{2}{-3}}", 1),
    ("0", "-0.0", 1),
]


@pytest.mark.parametrize(("reference", "completion", "verdict"), WORDS_AND_MARKS)
def test_signs_in_words_units_and_marks_left_behind(reference: str, completion: str, verdict: int) -> None:
    assert math_check(Math(type="math"), completion, reference)[0] == verdict


def test_a_number_in_words_keeps_its_sign() -> None:
    for text, verdict in (("It fell to negative 8 degrees", 1.0), ("It is 8", 0.0)):
        assert number_check(NumberCheck(type="number"), text, "-8")[0] == verdict


@pytest.mark.parametrize("marks", [r"\text{a} ", "#### ", r"\boxed{", "<answer>", r"\boxed{1} #### <answer>", "( "])
def test_a_long_text_full_of_marks_is_never_rewritten_whole(marks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rewriting costs more than a text's length, so what is rewritten is bounded."""
    value = importlib.import_module("grpo_engine.grader.mathematics.value")
    lengths = _lengths_read(monkeypatch, value, "canonical")
    for text in (f"#### 1{marks * 20_000}", f"\\boxed{{1{marks * 20_000}}}", f"<answer>{marks * 20_000}</answer>"):
        assert math_check(Math(type="math"), text, "5")[0] == 0.0
    assert max(lengths, default=0) <= 2000


def test_text_marks_are_taken_off_in_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    canonical = importlib.import_module("grpo_engine.grader.mathematics.canonical")
    lengths = _lengths_read(monkeypatch, canonical, "matching_braces")
    assert canonical.canonical(r"\text{a}" * 500 + "1") == "a " * 500 + "1"
    assert len(lengths) == 1


def _lengths_read(monkeypatch: pytest.MonkeyPatch, module: Any, name: str) -> list[int]:
    """The lengths of the texts that a function of a module is given from now on."""
    lengths: list[int] = []
    real = getattr(module, name)

    def counting(text: str) -> Any:
        lengths.append(len(text))
        return real(text)

    monkeypatch.setattr(module, name, counting)
    return lengths
