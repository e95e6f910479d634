"""Whether an answer equals a reference. The rules are stated in docs/graders.md; each has its function here."""

from __future__ import annotations

import re
from fractions import Fraction
from functools import lru_cache
from typing import TypeGuard

from grpo_engine.grader.mathematics.canonical import canonical
from grpo_engine.grader.mathematics.symbolic import same_expression
from grpo_engine.grader.mathematics.units import split_known_unit, units_conflict
from grpo_engine.grader.mathematics.value import Collection, Number, readings, without_assignment

RELATIVE_TOLERANCE = Fraction(1, 1_000_000)
"""Between a decimal and another number, and never as much as one unit of the last digit written."""
MIN_ROUNDED_DIGITS = 3
"""A reference decimal of at least so many significant digits also matches an exact expression that rounds to it."""
_WORDS = re.compile(r"[^\W\d_][^\W\d_'-]*(?:[ -][^\W\d_][^\W\d_'-]*)*")
_CHOICE = re.compile(r"\(?([A-Z])[).:](?:\s|$)|(?:[Oo]ption|[Cc]hoice)\s*\(?([A-Z])(?![A-Za-z])")
_OR = re.compile(r",?\s+or\s+")
_RAY = re.compile(r"([A-Za-z])\s*(<|>|\\leq|\\geq)\s*([^<>=,;A-Za-z]+|[^<>=,;]*\\(?:frac|sqrt|pi)[^<>=,;A-Za-z]*)")
_MAX_DEPTH = 4
MAX_LENGTH = 2000
"""Longer references and answers are compared as text."""


@lru_cache(maxsize=16384)
def same_answer(reference: str, answer: str) -> bool:
    """Raw reference and extracted answer compared as mathematics, or as text when they are words or very long."""
    if max(len(reference), len(answer)) > MAX_LENGTH:
        return reference.strip() == answer.strip()
    return _same(canonical(reference), canonical(answer), 0)


def _same(reference: str, answer: str, depth: int) -> bool:
    if not answer or depth > _MAX_DEPTH:
        return False
    if _squeeze(reference) == _squeeze(answer):
        return True
    one, other = _bare_word(reference), _bare_word(answer)
    letter, other_letter = _choice(reference, one), _choice(answer, other)
    if letter is not None and other_letter is not None:
        return letter == other_letter
    if one is not None and other is not None and not (len(one) == len(other) == 2 and one.islower() and other.islower()):
        return one.casefold() == other.casefold() if len(one) > 1 else one == other
    verdicts = [_same_value(a, b, depth) for a in readings(reference) for b in readings(answer)]
    if verdicts:
        return any(verdicts)
    return _same_assigned(reference, answer, depth)


def _same_assigned(reference: str, answer: str, depth: int) -> bool:
    """`x = 5` is the answer 5; of a chain `2+3 = 5` the last side is the answer. Two assignments must name one variable."""
    if reference.count("=") == answer.count("=") == 1 and same_expression(reference, answer, None):
        return True
    variable, value = without_assignment(reference)
    other_variable, other_value = without_assignment(answer)
    if variable is not None and other_variable is not None:
        return variable == other_variable and _same(value, other_value, depth + 1)
    if variable is not None or other_variable is not None:
        return _same(value, other_value, depth + 1)
    if "=" in answer and "=" not in reference:
        return _same(reference, answer.rsplit("=", 1)[1].strip(), depth + 1)
    reference, answer = _as_union(reference), _as_union(answer)
    one, other = split_known_unit(reference), split_known_unit(answer)
    if units_conflict(one[1], other[1]):
        return False
    if one[1] is not None or other[1] is not None:
        return _same(one[0], other[0], depth + 1)
    return same_expression(reference, answer, _rounded_reference(reference))


def _as_union(text: str) -> str:
    """`x<2 or x>3` as a union of intervals; any other text as it is."""
    rays = [_RAY.fullmatch(part.strip()) for part in _OR.split(text)]
    if len(rays) < 2 or any(ray is None for ray in rays) or len({ray[1] for ray in rays if ray}) > 1:
        return text
    return r"\cup ".join(_interval(ray[2], ray[3]) for ray in rays if ray)


def _interval(sign: str, bound: str) -> str:
    closing, opening = ("]", "[") if sign in (r"\leq", r"\geq") else (")", "(")
    return rf"(-\infty,{bound}{closing}" if sign in ("<", r"\leq") else rf"{opening}{bound},\infty)"


def _rounded_reference(reference: str) -> int | None:
    """Decimals of a reference that may stand for an irrational value rounded to it."""
    for value in readings(reference):
        if isinstance(value, Number) and value.decimals and value.digits >= MIN_ROUNDED_DIGITS:
            return value.decimals
    return None


def _same_value(reference: Number | Collection, answer: Number | Collection, depth: int) -> bool:
    if isinstance(reference, Number) and isinstance(answer, Number):
        return same_number(reference, answer)
    if isinstance(reference, Collection) and isinstance(answer, Collection):
        return _same_collection(reference, answer, depth)
    if isinstance(answer, Collection):
        return _is_singleton(answer) and any(_same_value(reference, value, depth) for value in readings(answer.items[0]))
    return _is_singleton(reference) and any(_same_value(value, answer, depth) for value in readings(reference.items[0]))


def _is_singleton(value: Number | Collection) -> TypeGuard[Collection]:
    return isinstance(value, Collection) and value.brackets == "{}" and len(value.items) == 1


def same_number(reference: Number, answer: Number) -> bool:
    """Exact, up to the stated tolerance of decimals, percent signs and units."""
    if reference.base != answer.base or units_conflict(reference.unit, answer.unit):
        return False
    if reference.is_percent != answer.is_percent:
        bare = answer if reference.is_percent else reference
        signed = reference if reference.is_percent else answer
        as_fraction = Number(signed.value / 100, None if signed.decimals is None else signed.decimals + 2, signed.digits)
        if _close(*((as_fraction, bare) if reference.is_percent else (bare, as_fraction))):
            return True
        return bare.value > 1 and _close(reference, answer)
    return _close(reference, answer)


def _close(reference: Number, answer: Number) -> bool:
    if reference.value == answer.value:
        return True
    decimals = [number.decimals for number in (reference, answer) if number.decimals is not None]
    if not decimals:
        return False
    difference = abs(reference.value - answer.value)
    if difference <= RELATIVE_TOLERANCE * abs(reference.value) and difference < Fraction(1, 10 ** min(decimals)):
        return True
    is_rounded = reference.decimals is not None and reference.digits >= MIN_ROUNDED_DIGITS and not answer.is_literal
    return is_rounded and difference <= Fraction(1, 2 * 10 ** (reference.decimals or 0))


def _same_collection(reference: Collection, answer: Collection, depth: int) -> bool:
    """Order counts between brackets and not in sets or between two bare lists; a bare list equals the same list in round brackets."""
    if len(reference.items) != len(answer.items):
        return False
    kinds = {reference.brackets, answer.brackets}
    if kinds <= {"{}", ""}:
        return _same_unordered(reference.items, answer.items, depth)
    if len(kinds) > 1 and kinds != {"", "()"}:
        return False
    return all(_same(a, b, depth + 1) for a, b in zip(reference.items, answer.items, strict=True))


def _same_unordered(items: tuple[str, ...], others: tuple[str, ...], depth: int) -> bool:
    left = list(others)
    for item in items:
        match = next((other for other in left if _same(item, other, depth + 1)), None)
        if match is None:
            return False
        left.remove(match)
    return True


def _squeeze(text: str) -> str:
    """Without blanks, except those between two digits: `1 1/2` is not `11/2`."""
    return re.sub(r"(?<!\d)\s|\s(?!\d)", "", text)


def _choice(text: str, word: str | None) -> str | None:
    """The letter of a choice: `B`, `(B)`, `B. Rome`, `(B) Rome`, `option B`; None for anything else."""
    if word is not None and len(word) == 1:
        return word if word.isupper() else None
    match = _CHOICE.match(text)
    return None if match is None else match[1] or match[2]


def _bare_word(text: str) -> str | None:
    """A word or phrase, or a letter between brackets; None for anything else."""
    inside = text[1:-1] if len(text) > 2 and text[0] == "(" and text[-1] == ")" else text
    return inside if _WORDS.fullmatch(inside) else None
