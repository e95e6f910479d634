r"""Algebra that holds where both sides are defined: `\sqrt{1/n}` = `1/\sqrt{n}`, `e^{i\pi}` = -1.

math-verify takes every letter for a real number, so that roots and logarithms of a letter and the imaginary unit defeat it.
Nothing is assumed here that could make `|x|` equal to `x`: both signs of each letter are tried.
"""

from __future__ import annotations

import cmath
import itertools
from typing import Any

MAX_LETTERS = 3
_MAGNITUDES = ("7/5", "11/7", "17/10")


def same_where_defined(gold: Any, ours: Any) -> bool:
    """Whether two parsed expressions agree with `i` as the imaginary unit, or wherever their roots and logarithms are real."""
    from sympy import Expr, I, Pow, expand_complex, log, simplify

    if not (isinstance(gold, Expr) and isinstance(ours, Expr)):
        return False
    letters = sorted(gold.free_symbols | ours.free_symbols, key=str)
    imaginary = [letter for letter in letters if str(letter) == "i"]
    if imaginary:
        gold, ours = gold.subs(imaginary[0], I), ours.subs(imaginary[0], I)
        return bool(simplify(expand_complex(gold - ours)).is_zero)
    if not letters or len(letters) > MAX_LETTERS or gold.free_symbols != ours.free_symbols:
        return False
    has_domain = any(side.has(log) or any(not power.exp.is_integer for power in side.atoms(Pow)) for side in (gold, ours))
    return has_domain and _same_for_positive(gold, ours, letters) and _same_for_all_signs(gold, ours, letters)


def differs_somewhere(gold: Any, ours: Any) -> bool:
    """Whether two expressions in the same letters have different values at a point, which settles the matter at once."""
    from sympy import Expr

    if not (isinstance(gold, Expr) and isinstance(ours, Expr)) or not gold.free_symbols or gold.free_symbols != ours.free_symbols:
        return False
    letters = sorted(gold.free_symbols, key=str)
    one, other = _value_at(gold, letters, 0), _value_at(ours, letters, 0)
    return one is not None and other is not None and not _is_near(one, other)


def may_be_proportional(one: Any, other: Any) -> bool:
    """Whether the quotient of two expressions in the same letters is the same at two points, as far as they have values there."""
    letters = sorted(one.free_symbols, key=str)
    values = [(_value_at(one, letters, shift), _value_at(other, letters, shift)) for shift in (0, 1)]
    quotients = [left / right for left, right in values if left is not None and right]
    return len(quotients) < 2 or _is_near(*quotients)


def _value_at(expression: Any, letters: list[Any], shift: int) -> complex | None:
    """The value at a fixed point, `i` being the imaginary unit; None where there is none."""
    from sympy import I, Rational

    point = {letter: I if str(letter) == "i" else Rational(17 + 6 * index + 5 * shift, 12) for index, letter in enumerate(letters)}
    try:
        value = complex(expression.subs(point).evalf(30))
    except (TypeError, ValueError, ArithmeticError, AttributeError):
        return None
    return value if cmath.isfinite(value) else None


def _is_near(one: complex, other: complex) -> bool:
    return abs(one - other) <= 1e-4 * max(abs(one), abs(other))


def _same_for_positive(gold: Any, ours: Any, letters: list[Any]) -> bool:
    from sympy import Dummy, simplify

    positive = {letter: Dummy(str(letter), positive=True) for letter in letters}
    return bool(simplify(gold.subs(positive) - ours.subs(positive)).is_zero)


def _same_for_all_signs(gold: Any, ours: Any, letters: list[Any]) -> bool:
    """At one point of each quadrant: both sides real and equal, or both not real (outside the domain)."""
    from sympy import Rational

    for signs in itertools.product((1, -1), repeat=len(letters)):
        point = {letter: sign * Rational(size) for letter, sign, size in zip(letters, signs, _MAGNITUDES, strict=False)}
        one, other = complex(gold.subs(point).evalf()), complex(ours.subs(point).evalf())
        are_real = [abs(value.imag) <= 1e-9 * max(1.0, abs(value)) for value in (one, other)]
        if are_real[0] != are_real[1] or (are_real[0] and abs(one - other) > 1e-9 * max(1.0, abs(one))):
            return False
    return True
