"""The grader `math`: each rule of docs/graders.md by examples (reference, completion, verdict), and properties."""

from __future__ import annotations

import math
import re
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_engine.contract.grader import Math
from grpo_engine.grader.mathematics import math_check
from grpo_engine.grader.mathematics.arithmetic import evaluate
from grpo_engine.grader.mathematics.canonical import canonical
from grpo_engine.grader.mathematics.compare import same_answer
from grpo_engine.grader.mathematics.extract import extract
from grpo_engine.grader.mathematics.symbolic import is_too_large
from grpo_engine.grader.sample import GraderFault
from tests.engine.grader.build import score

EXAMPLES = [
    ("42", "The answer is 42.", 1),
    ("42", "The answer is 42, because 6*7=42.", 1),
    ("1,2", "\\boxed{2,1}", 1),
    ("(1,2)", "\\boxed{(2,1)}", 0),
    ("\\{1,2\\}", "\\boxed{\\{2,1\\}}", 1),
    ("[1,2)", "\\boxed{[1,2)}", 1),
    ("[1,2)", "\\boxed{[1,2]}", 0),
    ("(1,2)", "\\boxed{[1,2]}", 0),
    ("(-\\infty, 3]", "$(-\\infty,3]$", 1),
    ("(-\\infty,-3)\\cup(3,\\infty)", "\\boxed{(-\\infty,-3) \\cup (3,\\infty)}", 1),
    ("x=5", "\\boxed{5}", 1),
    ("5", "\\boxed{x=5}", 1),
    ("x=5", "\\boxed{y=5}", 0),
    ("y=2x+3", "\\boxed{2x+3}", 1),
    ("2x+3", "\\boxed{3+2x}", 1),
    ("1.5e10", "\\boxed{1.5\\times 10^{10}}", 1),
    ("150000", "1.5e5", 1),
    ("1e-3", "0.001", 1),
    ("\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}", "\\boxed{\\begin{bmatrix}1 & 2 \\\\ 3 & 4\\end{bmatrix}}", 1),
    ("\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}", "\\boxed{\\begin{pmatrix}1 & 2 \\\\ 3 & 5\\end{pmatrix}}", 0),
    ("x>5", "\\boxed{x>5}", 1),
    ("x>5", "\\boxed{5<x}", 1),
    ("x>5", "\\boxed{x\\geq 5}", 0),
    ("x>5", "\\boxed{x<5}", 0),
    ("9^{9^{9^9}}", "\\boxed{1}", 0),
    ("1", "\\boxed{9^{9^{9^9}}}", 0),
    ("1", "\\boxed{10000000000!}", 0),
    ("1", "\\boxed{2^{100000000}}", 0),
    ("2", "\\boxed{10^{10^{10}}}", 0),
    ("(x+1)^2", "\\boxed{x^2+2x+1}", 1),
    ("\\sqrt{8}", "\\boxed{2\\sqrt{2}}", 1),
    ("\\frac{\\sqrt{2}}{2}", "\\boxed{\\frac{1}{\\sqrt{2}}}", 1),
    ("\\frac{1}{2}", "one half", 0),
    ("3.14", "\\boxed{\\pi}", 1),
    ("\\pi", "\\boxed{3.14}", 0),
    ("12345678901", "12345678902", 0),
    ("20", "20%", 1),
    ("20%", "20", 1),
    ("B", "The answer is (B) 42", 1),
    ("B", "(B)", 1),
    ("B", "B.", 1),
    ("B", "\\boxed{\\textbf{(B)}}", 1),
    ("A", "The correct answer is A.", 1),
    ("Paris", "The answer is Paris.", 1),
    ("paris", "Paris", 1),
    ("Evelyn", "\\boxed{\\text{Evelyn}}", 1),
    ("yes", "Yes", 1),
    ("70", "She has 70 cups left.", 1),
    ("70", "72-2 = 70\n#### 70", 1),
    ("70", "#### 70 cups", 1),
    ("70,000", "#### 70000", 1),
    ("-3", "\\boxed{-3}", 1),
    ("-3", "The temperature is -3°C.", 1),
    ("-3", "\\boxed{(-3)}", 1),
    ("3", "\\boxed{-(-3)}", 1),
    ("2/3", "\\boxed{\\frac23}", 1),
    ("\\frac{2}{3}", "2/3", 1),
    ("\\frac{2}{3}", "0.6667", 0),
    ("0.6667", "\\boxed{\\frac{2}{3}}", 1),
    ("\\frac{2}{3}", "0.666667", 1),
    ("\\frac{3}{4}", "\\boxed{\\dfrac{3}{4}}", 1),
    ("1 1/2", "3/2", 1),
    ("11/2", "1 1/2", 0),
    ("$10", "$10.00", 1),
    ("10", "I pay $5 and then $10", 1),
    ("10", "costs \\$10", 1),
    ("10", "Total = 10 dollars", 1),
    ("3:30", "\\boxed{3:30}", 1),
    ("x^2", "\\boxed{x²}", 1),
    ("10^{-3}", "\\boxed{10⁻³}", 1),
    ("\\sqrt{2}", "\\boxed{√2}", 1),
    ("2\\pi", "2π", 1),
    ("\\pi/2", "π/2", 1),
    ("5", "Let me think. 3+2=5. Therefore 5", 1),
    ("5", "Therefore, $x = 5$.", 1),
    ("5", "so $2+3=5$", 1),
    ("6", "so $2+3=5$", 0),
    ("\\frac{1}{2}", "Thus x = \\frac{1}{2}.", 1),
    ("\\frac{1}{3}", "Thus x = \\frac{1}{2}.", 0),
    ("\\sqrt{2}", "The answer is $\\sqrt{2}$ which is about 1.414", 1),
    ("8", "**Final Answer**\n\n8", 1),
    ("8", "### Final Answer\n\\(8\\)", 1),
    ("8", "Final Answer: The final answer is $8$. I hope it is correct.", 1),
    ("8", "The final answer is \\boxed{8}", 1),
    ("0", "\\boxed{\\emptyset}", 0),
    ("\\emptyset", "\\boxed{\\varnothing}", 1),
    ("\\infty", "\\boxed{+\\infty}", 1),
    ("-\\infty", "\\boxed{\\infty}", 0),
    ("1,2,3", "1, 2, and 3", 1),
    ("1,2,3", "The answer is 1, 2 and 3.", 1),
    ("1,-2", "x=1 or x=-2", 1),
    ("1,-2", "$x=1$ or $x=-2$", 1),
    ("1,-2", "\\boxed{x=1, x=-2}", 1),
    ("1,-2", "\\boxed{1 \\text{ or } -2}", 1),
    ("1 \\pm \\sqrt{2}", "\\boxed{1+\\sqrt{2}, 1-\\sqrt{2}}", 1),
    ("6", "\\boxed{3!}", 1),
    ("120", "\\boxed{5!}", 1),
    ("10", "\\boxed{\\binom{5}{2}}", 1),
    ("5 m", "5 cm", 0),
    ("5 cm", "5 centimeters", 1),
    ("25 \\text{ cm}^2", "25", 1),
    ("25", "\\boxed{25\\text{ cm}^2}", 1),
    ("25", "\\boxed{25\\,\\mathrm{km/h}}", 1),
    ("25", "25 square meters", 1),
    ("12", "\\boxed{12x}", 0),
    ("3+4i", "\\boxed{4i+3}", 1),
    ("3", "\\boxed{3.0}", 1),
    ("3", "3.", 1),
    ("0", "-0", 1),
    ("1000", "1,000", 1),
    ("1000", "1.000", 0),
    ("1", "1.000", 1),
    ("50", "<think>\\boxed{49}</think>\\boxed{50}", 1),
    ("49", "<think>\\boxed{49}</think>\\boxed{50}", 0),
    ("49", "<think>\\boxed{49}", 0),
    ("50", "reasoning</think>50", 1),
    ("5", "", 0),
    ("5", "I don't know", 0),
    ("5", "\\boxed{}", 0),
    ("\\text{(C)}", "C", 1),
    ("(C)", "\\boxed{C}", 1),
    ("1/3", "\\boxed{0.333}", 0),
    ("0.333", "\\boxed{\\frac{1}{3}}", 1),
    ("2^{10}", "1024", 1),
    ("1024", "2^10", 1),
    ("1024", "2**10", 1),
    ("101_2", "\\boxed{101_{2}}", 1),
    ("101_2", "\\boxed{5}", 0),
    ("1,234", "\\boxed{(1,234)}", 1),
    ("(1,234)", "1234", 0),
    ("(5,\\infty)", "x>5", 1),
    ("x>5", "\\boxed{(5,\\infty)}", 1),
    ("5m", "5", 0),
    ("3+2", "The answer is 2+3=5", 1),
    ("1,-2", "so $x=1$ or $x=-2$.", 1),
    ("11", "The answer is $5 + 6 = 11$.", 1),
    ("100,200", "100, 200", 1),
    ("100200", "100,200", 1),
    ("f(x)=x^2", "\\boxed{x^2}", 1),
    ("e^{16}-1", "exp(16)-1", 1),
    ("2\\sin(x)", "2*sin(x)", 1),
    ("\\ln 2", "ln(2)", 1),
    ("log(2)", "\\log 2", 1),
    ("7", "7\n\n\n", 1),
    ("7", "So the answer is:\n\n7", 1),
    ("7", "Answer: 7 apples", 1),
    ("7", "A: 7", 1),
    ("18", "#### 18\n#### 19", 0),
    ("18", "#### 18\nlet me explain: 20", 1),
    ("42", "answer = 42", 1),
    ("-7", "The answer is −7", 1),
    ("-7", "= -7", 1),
    ("90", "90 degrees", 1),
    ("0.05", "5%", 1),
    ("5", "5 %", 1),
    ("5\\%", "0.05", 1),
    ("\\$1,000", "1000", 1),
    ("5.0", "5", 1),
    ("\\boxed{5}", "5", 1),
    ("$5$", "5", 1),
    ("There are 5.\n#### 5", "5", 1),
    ("\\frac{x}{y}", "\\boxed{x/y}", 1),
    ("a+b", "\\boxed{b+a}", 1),
    ("ab", "\\boxed{ba}", 1),
    ("\\overline{AB}", "\\boxed{\\overline{AB}}", 1),
    ("\\angle A", "\\angle A", 1),
    ("1.23", "\\boxed{1.23456}", 0),
    ("29", "29.5", 0),
    ("a", "\\boxed{A}", 0),
    ("\\frac{1}{2}\\text{ hours}", "\\boxed{0.5}", 1),
    ("0.5", "\\boxed{\\frac{1}{2}\\text{ hours}}", 1),
    ("5\\frac{1}{2}\\%", "\\boxed{5.5\\%}", 1),
    ("3:4", "\\boxed{3:4}", 1),
    ("1/2", "0.50", 1),
    ("\\$29", "29", 1),
    ("29", "€29", 1),
    ("29", "29 €", 1),
    ("29", "29€", 1),
    ("1,000", "\\boxed{1000\\text{ dollars}}", 1),
    ("0", "\\boxed{0.0}", 1),
    ("(2,3)", "\\boxed{(2, 3)}", 1),
    ("(2,3)", "\\left(2,3\\right)", 1),
    ("\\left[0,\\frac{1}{2}\\right)", "\\boxed{[0,0.5)}", 1),
    ("x=-2,1", "\\boxed{-2, 1}", 1),
    ("-2,1", "\\boxed{x=-2,1}", 1),
    ("x \\in \\{1,2\\}", "\\boxed{1,2}", 1),
    ("\\{1,2\\}", "{1, 2}", 1),
    ("{1,2}", "\\{2,1\\}", 1),
    ("2\\sqrt{3}", "2*sqrt(3)", 1),
    ("2\\sqrt{3}", "\\boxed{\\sqrt{12}}", 1),
    ("\\sqrt[3]{8}", "2", 1),
    ("\\frac{a}{b}", "a/b", 1),
    ("x^{2}+1", "x^2 + 1", 1),
    ("(x-1)(x+1)", "x^2-1", 1),
    ("y=x+1", "y = 1 + x", 1),
    ("\\text{Monday}", "monday", 1),
    ("No", "\\boxed{\\text{no}}", 1),
    ("true", "True", 1),
    ("\\text{(A)}", "\\boxed{A}", 1),
    ("A", "a", 0),
    ("D", "The answer is D) none", 1),
    ("12 cm", "\\boxed{12}", 1),
    ("12", "12cm", 1),
    ("12", "12 cm²", 1),
    ("12 cm", "12 cm^2", 0),
    ("60", "\\boxed{60^{\\circ}}", 1),
    ("60°", "60", 1),
    ("25°C", "25", 1),
    ("-\\frac{1}{2}", "\\boxed{\\frac{-1}{2}}", 1),
    ("-\\frac12", "-0.5", 1),
    ("\\frac{-1}{2}", "-(1/2)", 1),
    ("10^6", "1,000,000", 1),
    ("1000000", "10^{6}", 1),
    ("1.2\\times10^3", "1200", 1),
    ("6.02e23", "6.02 \\times 10^{23}", 1),
    ("17", "**17**", 1),
    ("17", "*17*", 1),
    ("17", "Answer: **17**.", 1),
    ("17", "**Answer: 17**", 1),
    ("17", "The answer is: 17", 1),
    ("17", "answer is 17.", 1),
    ("17", "ANSWER: 17", 1),
    ("17", "the answer is\n$$17$$", 1),
    ("17", "The final answer is:\n\n\\[17\\]", 1),
    ("17", "x = 17", 1),
    ("17", "Answer: 17 (approx)", 1),
    ("17", "Final answer: x = 17", 1),
    ("3.5", "= 7/2", 1),
    ("2", "2 or 3", 0),
    ("17", "\\boxed{17}.", 1),
    ("17", "$\\boxed{17}$", 1),
    ("17", "\\boxed{ 17 }", 1),
    ("17", "\\boxed{\\mathbf{17}}", 1),
    ("17", "\\boxed{$17$}", 1),
    ("17", "\\boxed{17\\ }", 1),
    ("5", "\\boxed{5}\\boxed{5}", 1),
    ("1234", "1 234", 1),
    ("1234", "1.234", 0),
    ("0.001", "1/1000", 1),
    ("1e3", "1000", 1),
    ("12:30", "12:30", 1),
    ("2024-01-02", "2024-01-02", 1),
    ("1/3", "33.3%", 0),
    ("1/3", "33.333333%", 1),
    ("0.25", "25\\%", 1),
    ("25", "25 percent", 1),
    ("25%", "0.25", 1),
    ("\\begin{pmatrix}1\\\\2\\end{pmatrix}", "\\begin{pmatrix}1\\\\ 2\\end{pmatrix}", 1),
    ("x<3", "x < 3", 1),
    ("x\\le 3", "x ≤ 3", 1),
    ("(-\\infty,3)", "x<3", 1),
    ("a \\leq x \\leq b", "a\\le x\\le b", 1),
    ("\\frac{n(n+1)}{2}", "n(n+1)/2", 1),
    ("2^{n}", "2^n", 1),
    ("n!", "n!", 1),
    ("\\frac{22}{7}", "\\pi", 0),
    ("\\log_{2}(8)", "3", 1),
    ("\\cos(0)", "1", 1),
    ("|{-5}|", "5", 1),
    ("\\lfloor 2.5 \\rfloor", "2", 1),
    ("42", "<answer>42</answer>", 1),
    ("42", "<answer>The answer is 42</answer>", 1),
    ("42", "<answer> \\boxed{42} </answer>", 1),
    ("42", "</think>42", 1),
    ("42", "<think>x</think>\n\n42\n", 1),
    ("42", "<think>\nso 42", 0),
    ("3", "\\boxed{3} is wrong", 1),
    ("-5", "-5.", 1),
    ("-5", "–5", 1),
    ("-5", "(-5)", 1),
    ("5", "|-5|", 1),
    ("4", "2+2", 1),
    ("4", "2+2=4", 1),
    ("5", "2+2=4", 0),
    ("all real numbers", "All real numbers", 1),
    ("\\mathbb{R}", "\\mathbb{R}", 1),
    ("\\text{no solution}", "No solution", 1),
    ("100", "\\boxed{100.}", 1),
    (".5", "0.5", 1),
    ("5.", "5", 1),
    ("½", "0.5", 1),
    ("2½", "2.5", 1),
    ("x²", "x^2", 1),
    ("1,5", "1.5", 0),
    ("1.000,50", "1000.50", 0),
]


def verdict(reference: str, completion: str, **settings: Any) -> float:
    return math_check(Math(type="math", **settings), completion, reference)[0]


@pytest.mark.parametrize(("reference", "completion", "expected"), EXAMPLES)
def test_example(reference: str, completion: str, expected: int) -> None:
    assert verdict(reference, completion) == expected


@pytest.mark.parametrize(
    ("how", "completion", "found"),
    [
        ("auto", "\\boxed{1} #### 2\nThe answer is 3", "1"),
        ("auto", "#### 2\nThe answer is 3", "2"),
        ("auto", "The answer is 3, as 4 + 5 is 9", "3"),
        ("auto", "4 and then 5", "5"),
        ("auto", "\\boxed{1} <answer>2</answer>", "2"),
        ("auto", "<answer>so \\boxed{2}</answer> 3", "2"),
        ("auto", "\\boxed{7", None),
        ("auto", "\\boxed{6} then \\boxed{7", "6"),
        ("auto", "a long text without any number in it, which goes on for quite a while before it ends", None),
        ("boxed", "#### 2", None),
        ("boxed", "\\boxed{a{b}c}", "a{b}c"),
        ("hash", "\\boxed{1}\n#### 2 cups", "2 cups"),
        ("last_number", "\\boxed{1} 2", "2"),
        ("xml:final", "<final>1</final><final> 2 </final>", "2"),
        ("xml:final", "<think><final>1</final></think>", None),
        ("xml:final", "2", None),
        ("none", "3 + 4", "3 + 4"),
    ],
)
def test_where_the_answer_is_found(how: str, completion: str, found: str | None) -> None:
    answer = extract(completion, how)
    assert (None if answer is None else answer.text.strip()) == found


@pytest.mark.parametrize("reference", ["", "  ", "$$", "\\boxed{}", "####"])
def test_an_empty_reference_is_a_fault_never_a_verdict(reference: str) -> None:
    with pytest.raises(GraderFault, match="reference") as caught:
        verdict(reference, "\\boxed{1}")
    assert caught.value.kind == "invalid_variable"


@pytest.mark.parametrize(
    "bomb",
    ["9^{9^{9^{9}}}", "9^9^9^9", "2^{100000000}", "10^{-99999999}", "(10^{1000})^{1000}", "99999999!", "((9!)!)!", "9" * 5000, "(" * 3000,
     "{" * 3000, "\\frac{" * 500, "\\sqrt{" * 1000, "\\int_0^1 x^x dx", "\\sum_{k=1}^{10^9} k", "x" + "+x" * 900, "\\text{" * 900,
     "1,000" * 600, "$" * 3000, "\\[" * 1000, "\\boxed{" * 2000, "1" + ",1" * 2000, "\\left(" * 800, "^" * 2000, "-" * 2000 + "1"],
)  # fmt: skip
@pytest.mark.parametrize("frame", ["%s", "\\boxed{%s}", "The answer is %s", "$%s$"])
def test_what_would_take_for_ever_is_answered_without_a_process(bomb: str, frame: str) -> None:
    assert verdict("7", frame % bomb) == 0.0


@pytest.mark.parametrize("text", ["9^{9^{9}}", "x^{5000}", "500!", "(" * 500, "(10^{1000})^{1000}", "((x^9)^9)^{99}", "(9!)!"])
def test_what_is_too_large_for_algebra(text: str) -> None:
    assert is_too_large(text)


def test_a_long_reference_is_compared_as_text() -> None:
    proof = "line of proof; " * 300
    assert verdict(proof, proof, extract="none") == 1.0
    assert verdict(proof, proof + "x", extract="none") == 0.0


def test_the_grader_tells_what_it_compared() -> None:
    answer = score({"type": "math"}, "It is \\boxed{5}", {"reference_answer": 6})
    assert (answer.value, answer.detail) == (0.0, {"extracted": "5", "found_by": "boxed"})
    assert score({"type": "math"}, "\\boxed{5", {"reference_answer": 5}).detail == {"extracted": None}


FRACTIONS = st.fractions(min_value=-1000, max_value=1000, max_denominator=500)
SPELLINGS = (
    lambda f: f"{f.numerator}/{f.denominator}",
    lambda f: ("-" if f < 0 else "") + f"\\frac{{{abs(f.numerator)}}}{{{f.denominator}}}",
    lambda f: ("-" if f < 0 else "") + f"\\dfrac{{{2 * abs(f.numerator)}}}{{{2 * f.denominator}}}",
    lambda f: f"$\\left({f.numerator} \\div {f.denominator}\\right)$",
    lambda f: f"{f.numerator}\\,\\cdot\\, {f.denominator}^{{-1}}",
)


@given(FRACTIONS, st.sampled_from(SPELLINGS), st.sampled_from(SPELLINGS))
def test_a_fraction_equals_itself_in_every_spelling_and_no_other(value: Fraction, one: Any, other: Any) -> None:
    assert same_answer(one(value), other(value))
    assert not same_answer(one(value), other(value + Fraction(1, 7)))


@given(st.integers(-(10**15), 10**15), st.sampled_from([",", "{,}", ",\\!", "\\,", " ", "\u2009", "\u00a0"]))
def test_thousands_separators_vanish(value: int, separator: str) -> None:
    assert same_answer(str(value), f"{value:,}".replace(",", separator))
    assert not same_answer(str(value + 1), f"{value:,}".replace(",", separator))


@given(st.lists(st.integers(0, 99), min_size=2, max_size=5))
def test_a_list_of_small_numbers_never_becomes_one_number(numbers: list[int]) -> None:
    assert not same_answer("".join(map(str, numbers)), ",".join(map(str, numbers)))
    assert same_answer(",".join(map(str, numbers)), ", ".join(map(str, reversed(numbers))))


TREES = st.recursive(
    st.integers(0, 20).map(str),
    lambda inner: st.tuples(inner, st.sampled_from("+-*/"), inner).map(lambda parts: f"({parts[0]}{parts[1]}{parts[2]})"),
    max_leaves=8,
)


@given(TREES)
def test_arithmetic_agrees_with_exact_fractions(expression: str) -> None:
    try:
        expected = eval(re.sub(r"(\d+)", r"Fraction(\1)", expression), {"Fraction": Fraction})
    except ZeroDivisionError:
        expected = None
    assert evaluate(expression) == expected


@given(st.text(max_size=60), st.text(max_size=60))
def test_no_text_raises_and_a_spelling_equals_itself(reference: str, completion: str) -> None:
    assert canonical(canonical(reference)) is not None
    value = extract(completion, "auto")
    assert value is None or isinstance(value.text, str)
    if canonical(reference):
        assert same_answer(reference, reference)


MATHS = st.text(alphabet="0123456789+-*/^!(){}[],.=\\$%_ xpi<>", max_size=24)


@given(MATHS, MATHS)
def test_verdicts_are_zero_or_one_whatever_the_signs(reference: str, completion: str) -> None:
    try:
        value = verdict(reference, completion)
    except GraderFault:
        assert not re.search(r"[0-9xpi]", reference)
        return
    assert value in (0.0, 1.0)


def test_a_nan_is_never_a_verdict() -> None:
    assert verdict("nan", "nan") == 1.0
    assert not math.isnan(verdict("1", "nan"))
