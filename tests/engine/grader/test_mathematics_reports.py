"""The grader `math` against public reports of graders that were wrong: (reference, completion, verdict) by the report they follow.

Inputs are made for this list in the manner of the report, with the pairs the report names where it names any.
"""

from __future__ import annotations

import pytest

from grpo_engine.contract.grader import Math
from grpo_engine.grader.mathematics import math_check

REPORTS: dict[str, list[tuple[str, str, int]]] = {
    "huggingface/Math-Verify#14 (should be unequal)": [
        ("\\frac{1}{2004!}", "$\\frac{1}{2006!}$", 0),
        ("\\frac{1}{2^{99}}", "$\\frac{1}{2^{98}}$", 0),
        ("n=2, 3, 4", "$n=1, 2, 3$", 0),
        ("n=2, 3, 4", "\\boxed{2,3,4}", 1),
        ("D = (0, 1)", "$D = (0, 1.5)$", 0),
        ("19, 46, \\text{ and } 82", "$21, 36, and 82$", 0),
        ("\\frac{2^{2005}+1}{3 \\cdot 2^{2006}}", "$\\frac{1}{3 \\cdot 2^{2006}}$", 0),
        ("1 - \\frac{1}{\\mathrm{e}}", "$1 + \\frac{1}{\\mathrm{e}}$", 0),
        ("\\pm 2021", "$2021$", 0),
        ("12:00", "$1:00$", 0),
        ("1, 2, \\ldots, n", "$1, 3, 5, \\ldots, 2n-1$", 0),
        ("1,2,3,\\ldots", "\\boxed{1,2,3,\\dots}", 1),
    ],
    "huggingface/Math-Verify#26, #60 (equations)": [
        ("2x+4y-3=0", "$y = -\\frac{1}{2}x + \\frac{3}{4}$", 1),
        ("2x+4y-3=0", "\\boxed{4x+8y=6}", 1),
        ("2x+4y-3=0", "\\boxed{2x+4y=4}", 0),
        ("3*x-1*y+13=0", "3x + 4y + 14=0", 0),
        ("x^2+y^2=4", "\\boxed{x^{2}+y^{2}=2^2}", 1),
        ("x^2+y^2=1", "\\boxed{x^2+y^2-1=0}", 1),
        ("x^2+2x=3", "\\boxed{x^2+2x+3=0}", 0),
        ("5x - 7y + 11z + 4 = 0", "\\boxed{-5x+7y-11z-4=0}", 1),
        ("x=5", "\\boxed{2x=10}", 1),
        ("y=2x", "\\boxed{x=2y}", 0),
        ("F=ma", "\\boxed{a=F/m}", 1),
    ],
    "two powers in one formula are no tower": [
        ("a^2+2ab+b^2", "\\boxed{(a+b)^2}", 1),
        ("x^2+y^2", "\\boxed{y^2+x^2}", 1),
        ("x^2y^2", "\\boxed{(xy)^2}", 1),
        ("x^2+y^2+z^2", "\\boxed{x^2+y^2-z^2}", 0),
        ("a^3-b^3", "\\boxed{(a-b)(a^2+ab+b^2)}", 1),
        ("e^{-x^2}", "\\boxed{\\frac{1}{e^{x^2}}}", 1),
        ("9^{9^{9}}", "\\boxed{9^{9^{8}}}", 0),
    ],
    "huggingface/Math-Verify#64 (roots of letters)": [
        ("\\sqrt{1/n}", "\\boxed{\\frac{1}{\\sqrt{n}}}", 1),
        ("\\sqrt{\\frac{1}{n}}", "\\boxed{\\frac{\\sqrt n}{n}}", 1),
        ("\\frac{1}{\\sqrt{n}}", "\\boxed{n^{-1/2}}", 1),
        ("|x|", "\\boxed{\\sqrt{x^2}}", 1),
        ("|x|", "\\boxed{x}", 0),
        ("x", "\\boxed{\\sqrt{x^2}}", 0),
        ("\\ln(x^2)", "\\boxed{2\\ln x}", 0),
    ],
    "the imaginary unit": [
        ("-1", "\\boxed{e^{i\\pi}}", 1),
        ("5", "\\boxed{(2+i)(2-i)}", 1),
        ("e^{i\\pi/3}", "\\boxed{\\frac{1}{2}+\\frac{\\sqrt3}{2}i}", 1),
        ("i", "\\boxed{-i}", 0),
    ],
    "huggingface/Math-Verify#61 (percent in words)": [
        ("28\\%", "\\boxed{28 pct}", 1),
        ("28\\%", "\\boxed{28 percentage}", 1),
        ("28\\%", "$28$ percent", 1),
        ("28\\%", "\\boxed{29 percent}", 0),
    ],
    "huggingface/Math-Verify#37, NVIDIA-NeMo/Gym#1844 (units after any formula)": [
        ("24\\pi", "\\boxed{24\\pi\\text{ cm}^2}", 1),
        ("24\\pi\\text{ cm}^2", "\\boxed{24\\pi}", 1),
        ("24\\pi\\text{ cm}^2", "\\boxed{24\\pi\\text{ cm}^3}", 0),
        ("5\\sqrt{3} \\text{ cm}", "\\boxed{5\\sqrt{3}}", 1),
        ("5\\sqrt{3}\\text{ cm}", "\\boxed{5\\sqrt{3}\\text{ m}}", 0),
        ("\\pi", "\\boxed{\\pi \\text{ radians}}", 1),
        ("2x", "\\boxed{2x\\text{ dollars}}", 1),
        ("5x", "\\boxed{5}", 0),
        ("12", "\\boxed{12\\text{ sq. units}}", 1),
        ("12", "\\boxed{12\\text{ m/s}}", 1),
        ("9.8", "\\boxed{9.8\\ \\text{m/s}^2}", 1),
        ("12", "\\boxed{12\\ \\text{m}^{-1}}", 1),
        ("45 mph", "\\boxed{45 \\text{ miles per hour}}", 1),
        ("45 mph", "\\boxed{45 \\text{ km/h}}", 0),
        ("5", "\\boxed{5^{\\text{th}}}", 1),
        ("10:30 \\text{ am}", "\\boxed{10:30\\text{ a.m.}}", 1),
        ("10:30 \\text{ am}", "\\boxed{10:30\\text{ p.m.}}", 0),
    ],
    "repeating decimals": [
        ("0.\\overline{3}", "\\boxed{\\frac{1}{3}}", 1),
        ("\\frac{3}{11}", "\\boxed{0.\\overline{27}}", 1),
        ("0.1\\overline{6}", "\\boxed{1/6}", 1),
        ("-1.\\overline{3}", "\\boxed{-\\frac43}", 1),
        ("0.\\overline{3}", "\\boxed{0.3}", 0),
    ],
    "inequalities and unions": [
        ("(-\\infty, 2] \\cup (3, \\infty)", "\\boxed{x\\le 2 \\text{ or } x>3}", 1),
        ("(-\\infty, 2] \\cup (3, \\infty)", "\\boxed{x< 2 \\text{ or } x>3}", 0),
        ("x<2\\text{ or }x>3", "\\boxed{(-\\infty,2)\\cup(3,\\infty)}", 1),
        ("\\{1\\}", "\\boxed{1}", 1),
        ("(0,9) \\cup (9,36)", "\\boxed{(0,36)}", 0),
    ],
    "EleutherAI/lm-evaluation-harness#4030 (identical text)": [
        ("(2,4)", "(2,4)", 1),
        ("[2,5)", "[2,5)", 1),
        ("\\begin{pmatrix}1\\\\2\\end{pmatrix}", "\\boxed{\\begin{pmatrix}1\\\\2\\end{pmatrix}}", 1),
    ],
    "UKGovernmentBEIS/inspect_ai#5259 (two notations)": [
        ("x/2", "\\boxed{\\frac{x}{2}}", 1),
        ("2*pi*r", "\\boxed{2\\pi r}", 1),
        ("sqrt(x)", "\\boxed{\\sqrt{x}}", 1),
        ("n*(n+1)/2", "\\boxed{\\frac{n(n+1)}{2}}", 1),
        ("2\\sqrt{5}", "\\boxed{2sqrt5}", 1),
        ("|x|", "\\boxed{abs(x)}", 1),
        ("\\sqrt[3]{2}", "\\boxed{cbrt(2)}", 1),
        ("\\tan^{-1}(2)", "\\boxed{atan(2)}", 1),
    ],
    "UKGovernmentBEIS/inspect_ai#897, #1716 (Unicode)": [
        ("-7", "\\boxed{\u20127}", 1),
        ("-7", "\\boxed{\u20147}", 1),
        ("2", "from 9\u20147, so \\boxed{2}", 1),
        ("42", "\\boxed{4\u200b2}", 1),
        ("42", "\ufeff42", 1),
        ("x_1", "\\boxed{x\u2081}", 1),
        ("3", "\\boxed{\u2462}", 1),
        ("100", "\u20b9100", 1),
        ("0.5", "\u22480.5", 1),
    ],
    "rasbt/reasoning-from-scratch#133 (separators, bases)": [
        ("10000", "\\boxed{10\\text{,}000}", 1),
        ("10000", "\\boxed{10_000}", 1),
        ("10000", "\\boxed{10\\:000}", 1),
        ("1011_2", "\\boxed{1011_{\\text{two}}}", 1),
        ("1011_2", "\\boxed{1011_{\\text{three}}}", 0),
    ],
    "huggingface/Math-Verify#76 (Markdown)": [
        ("73", "Final Answer: __73__", 1),
        ("73", "~~72~~ 73", 1),
        ("73", "> 73", 1),
        ("73", "### 73", 1),
        ("73", "\u2022 73", 1),
        ("73", "~~73~~ 72", 0),
    ],
    "jundot/omlx#3484, stanford-crfm/helm#4337 (text after the number)": [
        ("72", "The total is 72 clips, altogether.", 1),
        ("72", "The answer is 72, in total, so the farmer earns that much.", 1),
        ("72", "#### 72, which is the sum", 1),
        ("72", "#### Answer: 72", 1),
        ("72", "#### 72 (in total)", 1),
        ("Room 5 of 7", "#### Room 5 of 7", 1),
        ("3,5", "#### 3, 5", 1),
        ("3", "#### 3, 5", 0),
    ],
    "the last word counts": [
        ("B", "The answer is A. No, the answer is B.", 1),
        ("A", "The answer is A. No, the answer is B.", 0),
        ("70", "The answer isn't 60, it is 70", 1),
        ("60", "The answer is not 60, it is 70", 0),
    ],
    "choices": [
        ("A", "(A) is wrong, so B", 0),
        ("C", "Option C", 1),
        ("C", "The correct option is C.", 1),
        ("C", "Answer: Option (C)", 1),
        ("\\textbf{(A)}\\ 5", "\\boxed{A}", 1),
        ("\\textbf{(A)}\\ 5", "\\boxed{\\textbf{(B)}\\ 5}", 0),
        ("A", "\\boxed{A or B}", 0),
        ("A", "\\boxed{A, B, C, D}", 0),
    ],
    "several guesses pay nothing": [
        ("5", "\\boxed{5 \\text{ or } 6}", 0),
        ("5", "\\boxed{1,2,3,4,5,6}", 0),
        ("5", "The answer is 5 or 6.", 0),
        ("5", "\\boxed{\\{5,6\\}}", 0),
        ("x+1", "\\boxed{x+1=0}", 0),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("reference", "completion", "expected"),
    [pytest.param(*vector, id=f"{report}-{number}") for report, vectors in REPORTS.items() for number, vector in enumerate(vectors)],
)
def test_reported(reference: str, completion: str, expected: int) -> None:
    assert math_check(Math(type="math"), completion, reference)[0] == expected
