"""The graders `math` and `number`: an answer is found in the completion and compared with the reference.

`extract` finds it, `canonical` brings it to one spelling, `value` reads numbers and collections exactly, `symbolic` leaves the rest
to math-verify. docs/graders.md states every rule.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

from grpo_engine.contract.grader import Math, NumberCheck
from grpo_engine.grader.mathematics.canonical import canonical, signs_in_words
from grpo_engine.grader.mathematics.compare import same_answer
from grpo_engine.grader.mathematics.extract import after_reasoning, extract, extract_reference, last_number
from grpo_engine.grader.mathematics.value import Number, readings
from grpo_engine.grader.sample import GraderFault

_SHOWN = 200
_SAYS_SOMETHING = re.compile(r"\w|\\\{")
"""A letter, a digit, or the brace of a set; punctuation alone is no reference."""


def unusable_reference(cfg: Math | NumberCheck, reference: str) -> str | None:
    """What keeps a reference from being compared with anything, as a sentence's end; None when nothing does."""
    if isinstance(cfg, NumberCheck):
        return "not a number" if _number_in(extract_reference(reference)) is None else None
    return None if _SAYS_SOMETHING.search(canonical(extract_reference(reference))) else "empty"


def math_check(cfg: Math, text: str, reference: str) -> tuple[float, dict[str, Any]]:
    """1.0 or 0.0, and what was compared. Raises GraderFault for an empty reference."""
    gold = extract_reference(reference)
    if not _SAYS_SOMETHING.search(canonical(gold)):
        raise GraderFault("invalid_variable", f"the reference {reference[:_SHOWN]!r} is empty; give the right answer or remove the row")
    found = extract(text, cfg.extract)
    if found is None:
        return 0.0, {"extracted": None}
    return float(same_answer(gold, found.text)), {"extracted": found.text[:_SHOWN], "found_by": found.how}


def number_check(cfg: NumberCheck, text: str, reference: str) -> tuple[float, dict[str, Any]]:
    """1.0 when the number lies within the tolerance of the reference. Raises GraderFault when the reference is no number."""
    gold = _number_in(extract_reference(reference))
    if gold is None:
        raise GraderFault("invalid_variable", f"the reference {reference[:_SHOWN]!r} is not a number; correct the row or use 'math'")
    shown = last_number(signs_in_words(after_reasoning(text))) if cfg.extract == "last_number" else text
    ours = None if shown is None else _number_in(shown)
    if ours is None:
        return 0.0, {"extracted": None}
    tolerance = max(Fraction(cfg.absolute_tolerance), Fraction(cfg.relative_tolerance) * abs(gold))
    return float(abs(ours - gold) <= tolerance), {"extracted": (shown or "")[:_SHOWN]}


def _number_in(text: str) -> Fraction | None:
    for value in readings(canonical(text)):
        if isinstance(value, Number):
            return value.value / 100 if value.is_percent else value.value
    return None
