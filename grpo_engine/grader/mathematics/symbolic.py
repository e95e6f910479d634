"""Algebra through math-verify and its LaTeX grammar, for what is neither a number nor a collection.

Expressions that could take for ever are not tried: they equal only their own spelling. What still hangs is ended by the process's
deadline. math-verify's own timeouts are off, since they need signals.
"""

from __future__ import annotations

import logging
import math
import re
from functools import lru_cache
from typing import Any

from grpo_engine.grader.mathematics.domain import differs_somewhere, may_be_proportional, same_where_defined
from grpo_engine.rows.boxed import matching_braces

MAX_LENGTH = 400
MAX_BRACKETS = 60
MAX_POWER = 1000
"""Bound on the largest exponent times those of bracketed bases: `(10^{1000})^{1000}` is past it."""
_COSTLY = re.compile(r"\\(?:int|sum|prod|lim|iint|oint)(?![A-Za-z])")
_POWER = re.compile(r"([)}\]]\s*)?\^\s*\{?\s*-?(\d+)")
_NESTED_FACTORIAL = re.compile(r"[)}!]\s*!")
_TOWER = re.compile(r"\^\s*-?\w\s*\^|\^\s*\{[^{}]*\}\s*\^")
_SMALL_POWER = re.compile(r"(?<![A-Za-z])[a-z]\s*\^\s*(?:\d(?!\d)|\{\d\})")
_FACTORIAL = re.compile(r"(\d+)\s*!")
_PROSE = re.compile(r"(?<![\\A-Za-z{])[A-Za-z]{3,}")

logging.getLogger("math_verify").setLevel(logging.CRITICAL)
logging.getLogger("latex2sympy2_extended").setLevel(logging.CRITICAL)


def same_expression(reference: str, answer: str, rounded_to: int | None) -> bool:
    """Two canonical texts compared as algebra. `rounded_to`: decimals of a reference that the answer may round to."""
    if is_too_large(reference) or is_too_large(answer) or bool(_COSTLY.search(answer)) > bool(_COSTLY.search(reference)):
        return False
    if _PROSE.search(answer) or _PROSE.search(reference):
        return False
    gold, ours = _parse(reference), _parse(answer)
    if not gold or not ours:
        return False
    if rounded_to is not None and _rounds_to(gold[0], ours[0], rounded_to):
        return True
    if differs_somewhere(gold[0], ours[0]):
        return False
    if _same_equation(gold[0], ours[0]):
        return True
    from math_verify import verify

    if verify(list(gold), list(ours), allow_set_relation_comp=True, timeout_seconds=None):
        return True
    try:
        return same_where_defined(gold[0], ours[0])
    except (TypeError, ValueError, ArithmeticError):
        return False  # no value at the points tried, so no equality that could be shown


def is_too_large(text: str) -> bool:
    """Whether evaluating the text might take for ever: long, towers of powers, huge exponents or factorials."""
    if len(text) > MAX_LENGTH or text.count("(") + text.count("{") > MAX_BRACKETS or _NESTED_FACTORIAL.search(text) or _has_tower(text):
        return True
    if any(len(number) > 3 or int(number) > 200 for number in _FACTORIAL.findall(text)):
        return True
    exponents = [(bool(group), digits) for group, digits in _POWER.findall(text)]
    if any(len(digits) > 4 for _, digits in exponents):
        return True
    inner = max([1, *(int(digits) for is_outer, digits in exponents if not is_outer)])
    return inner * math.prod(max(1, int(digits)) for is_outer, digits in exponents if is_outer) > MAX_POWER


def _has_tower(text: str) -> bool:
    """Whether a power stands in an exponent; one such as `x^2` may (`e^{-x^2}`)."""
    if _TOWER.search(text):
        return True
    pairs = matching_braces(text)
    exponents = (text[match.end() : pairs.get(match.end() - 1, len(text))] for match in re.finditer(r"\^\s*\{", text))
    return any("^" in _SMALL_POWER.sub("", exponent) for exponent in exponents)


def warm_up() -> None:
    """Load the algebra system, which takes a second or more, before the first deadline runs."""
    same_expression("x", "y", None)


@lru_cache(maxsize=4096)
def _parse(latex: str) -> tuple[Any, ...]:
    from latex2sympy2_extended.latex2sympy2 import NormalizationConfig
    from math_verify import parse
    from math_verify.parser import LatexExtractionConfig

    spelling = NormalizationConfig(basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none", equations=False)
    found = parse(f"${latex}$", [LatexExtractionConfig(normalization_config=spelling)], fallback_mode="no_fallback", parsing_timeout=None)
    return tuple(found)


def _same_equation(gold: Any, ours: Any) -> bool:
    """Whether two equations in variables say the same: one is the other times a number that is not 0."""
    from sympy import Eq, Expr, simplify

    if not (isinstance(gold, Eq) and isinstance(ours, Eq) and gold.free_symbols and gold.free_symbols == ours.free_symbols):
        return False
    if not all(isinstance(side, Expr) for equation in (gold, ours) for side in equation.args):
        return False
    one, other = gold.lhs - gold.rhs, ours.lhs - ours.rhs
    if one.free_symbols != other.free_symbols or not may_be_proportional(one, other):
        return False
    one, other = simplify(one), simplify(other)
    if one == 0 or other == 0:
        return bool(one == other)
    factor = simplify(one / other)
    return bool(factor.is_number and factor.is_finite and not factor.is_zero)


def _rounds_to(gold: Any, ours: Any, decimals: int) -> bool:
    if not getattr(ours, "is_number", False) or not getattr(ours, "is_real", False) or not getattr(gold, "is_number", False):
        return False
    return bool(abs(float(ours) - float(gold)) <= 0.5 * 10.0**-decimals * (1 + 1e-9))
