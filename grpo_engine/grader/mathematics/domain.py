r"""Algebra that holds where both sides are defined: `\sqrt{1/n}` = `1/\sqrt{n}`, `e^{i\pi}` = -1.

math-verify takes every letter for a real number, so that roots and logarithms of a letter and the imaginary unit defeat it.
Nothing is assumed here that could make `|x|` equal to `x`: both signs of each letter are tried.
"""

from __future__ import annotations

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
