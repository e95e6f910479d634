"""The grader `math`: answers that are marked in an unusual way, and references that are sentences."""

from __future__ import annotations

import pytest

from grpo_engine.contract.grader import Math
from grpo_engine.grader.mathematics import math_check


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
