"""Canonical text as a value: exact numbers, and collections of parts. What needs algebra is left to `symbolic`.

Numbers are fractions, so nothing is rounded. Sizes are bounded: `9^9^9` is no number here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from grpo_engine.grader.mathematics.arithmetic import evaluate
from grpo_engine.grader.mathematics.canonical import CURRENCY_SIGNS, canonical
from grpo_engine.grader.mathematics.units import split_unit


@dataclass(frozen=True)
class Number:
    """An exact number and how it was written."""

    value: Fraction
    decimals: int | None = None
    """Digits after the decimal point; None when there is no point (integers, fractions, arithmetic)."""
    digits: int = 0
    """Significant digits of a decimal."""
    is_literal: bool = True
    """Written as one number rather than as a fraction or a calculation."""
    is_percent: bool = False
    unit: str | None = None
    base: int | None = None
    """The subscript of a numeral such as 52_8; its value is that of the digits read in this base."""


@dataclass(frozen=True)
class Collection:
    """Parts between brackets, or a bare list."""

    brackets: str
    """`()`, `[]`, `(]`, `[)`, `{}` for sets, or `` for a bare list."""
    items: tuple[str, ...]


Value = Number | Collection

_LITERAL = re.compile(r"([-+]?)\s*(?:(\d{1,3}(?:,\d{3})+|\d+)(?:\.(\d*))?|\.(\d+))(?:[eE]([-+]?\d{1,3}))?")
_BASED = re.compile(r"\(?([0-9A-Fa-f]+)\)?_(\d{1,2})")
_SPACED = re.compile(r"([-+]?\d{1,3})((?: \d{3})+)(\.\d+)?")
_ASSIGNED = re.compile(r"[A-Za-z]\w?(?:_\w|\([A-Za-z]\))?\s*(?:=|\\in(?![A-Za-z]))\s*")
_CONJUNCTION = re.compile(r",?\s+(?:and|or)\s+|;", re.IGNORECASE)
_REPEATING = re.compile(r"([-+]?)\s*(\d{0,50})\.(\d{0,50})\s*\\(?:overline|bar|dot)\s*\{?(\d{1,50})\}?")
_MAX_LENGTH = 2000
_CURRENCY = re.compile(rf"(?P<before>[-+]?)\s*(?:\\?\$|[{CURRENCY_SIGNS}]|USD|EUR)\s*")


@lru_cache(maxsize=8192)
def readings(text: str) -> tuple[Value, ...]:
    """Every value a canonical text may stand for: `100,200` is a number and a list. Empty when it needs algebra or is no value."""
    if len(text) > _MAX_LENGTH:
        return ()
    number = _number(text)
    collection = _collection(text)
    return tuple(value for value in (number, collection) if value is not None)


def is_value(text: str) -> bool:
    """Whether a raw text is nothing but a number or a collection whose parts are numbers. A text of more than 2000 characters is none."""
    if len(text) > _MAX_LENGTH:  # before it is rewritten, which costs more than its length
        return False
    form = canonical(text)
    values = readings(form)
    return any(isinstance(value, Number) or all(is_value(item) for item in value.items) for value in values)


def without_assignment(text: str) -> tuple[str | None, str]:
    r"""(variable, rest) of `x = 5` or `x \in [1, 2]`; (None, text) otherwise."""
    match = _ASSIGNED.match(text)
    if match is None or "=" in text[match.end() :]:
        return None, text
    return re.split(r"[\s=\\]", match.group(), maxsplit=1)[0], text[match.end() :].strip()


def _number(text: str) -> Number | None:
    based = _BASED.fullmatch(text)
    if based is not None:
        return _based(based[1], int(based[2]))
    currency = _CURRENCY.match(text)
    unit = None
    if currency is not None:
        unit, text = "currency", currency["before"] + text[currency.end() :]
    found = _plain(text)
    if found is None:
        body, unit_after = split_unit(text)
        if unit_after is None:
            return None
        found, unit = _plain(body), unit_after
    if found is None:
        return None
    return found if unit is None else Number(found.value, found.decimals, found.digits, found.is_literal, found.is_percent, unit)


def _plain(text: str) -> Number | None:
    """A number with nothing but a percent sign behind it."""
    text = text.strip()
    is_percent = text.endswith("%")
    body = text.removesuffix("%").strip()
    spaced = _SPACED.fullmatch(body)
    if spaced is not None:
        body = spaced[1] + spaced[2].replace(" ", "") + (spaced[3] or "")
    literal = _LITERAL.fullmatch(body)
    if literal is not None:
        return _literal(literal, is_percent)
    value = _repeating(body)
    if value is None and not ("," in body and body[:1] in "(["):
        value = evaluate(body)
    return None if value is None else Number(value, is_literal=False, is_percent=is_percent)


def _repeating(text: str) -> Fraction | None:
    r"""The exact value of `0.1\overline{6}`; None for anything else."""
    match = _REPEATING.fullmatch(text)
    if match is None:
        return None
    sign, whole, fixed, period = match.groups()
    value = Fraction(f"{whole or 0}.{fixed or 0}") + Fraction(int(period), (10 ** len(period) - 1) * 10 ** len(fixed))
    return -value if sign == "-" else value


def _literal(match: re.Match[str], is_percent: bool) -> Number:
    sign, whole, after, only, exponent = match.groups()
    whole = (whole or "0").replace(",", "")
    fraction = after if after is not None else only
    value = Fraction(f"{sign}{whole}.{fraction or '0'}") * Fraction(10) ** int(exponent or 0)
    if not fraction or exponent:
        return Number(value, is_percent=is_percent)
    return Number(value, len(fraction), len((whole + fraction).lstrip("0")), is_percent=is_percent)


def _based(digits: str, base: int) -> Number | None:
    if not 2 <= base <= 16:
        return None
    try:
        return Number(Fraction(int(digits, base)), base=base)
    except ValueError:
        return None


def _collection(text: str) -> Collection | None:
    if "\\begin" in text or "\\cup" in text or "\\cap" in text:
        return None
    brackets, inside = _brackets(text)
    items = split_top(_CONJUNCTION.sub(",", inside)) if inside else []
    if items is None or (len(items) < 2 and brackets != "{}"):
        return None
    if brackets == "" and (len(items) < 2 or any(not item for item in items)):
        return None
    return Collection(brackets, tuple(item.strip() for item in items))


def _brackets(text: str) -> tuple[str, str]:
    if text.startswith("\\{") and text.endswith("\\}"):
        return "{}", text[2:-2].strip()
    if len(text) > 1 and text[0] in "([" and text[-1] in ")]" and _closes_at_end(text):
        return text[0] + text[-1], text[1:-1].strip()
    return "", text


def _closes_at_end(text: str) -> bool:
    depth = 0
    for index, character in enumerate(text):
        if character in "([{":
            depth += 1
        elif character in ")]}":
            depth -= 1
            if depth == 0:
                return index == len(text) - 1
    return False


def split_top(text: str) -> list[str] | None:
    """The parts between commas outside all brackets; None when the brackets do not balance."""
    parts, depth, start = [], 0, 0
    for index, character in enumerate(text):
        if character in "([{":
            depth += 1
        elif character in ")]}":
            depth -= 1
            if depth < 0:
                return None
        elif character == "," and depth == 0:
            parts.append(text[start:index])
            start = index + 1
    return None if depth else [*parts, text[start:]]
