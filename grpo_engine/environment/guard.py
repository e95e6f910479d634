"""No completion is ever run as code.

Some scorers of reasoning-gym pass the completion to `eval`, by themselves or through SymPy's parser. While a scorer runs, `eval`
takes arithmetic of bounded size, plain containers and SymPy's own constructors, and `exec` nothing but the import of SymPy's names.
"""

from __future__ import annotations

import ast
import builtins
import math
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

_PLAIN = (
    ast.Expression, ast.Constant, ast.List, ast.Tuple, ast.Set, ast.Dict, ast.Load,
    ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop, ast.Compare, ast.cmpop, ast.Name, ast.Call,
)  # fmt: skip
_CALLED = frozenset({
    "Integer", "Float", "Rational", "Symbol", "Abs", "sqrt", "exp", "log", "ln", "sin", "cos", "tan", "cot", "sec", "csc",
    "asin", "acos", "atan", "sinh", "cosh", "tanh", "asinh", "acosh", "atanh",
})  # fmt: skip
_SYMPY = "sympy."
_MAX_SOURCE = 10_000
_MAX_BITS = 20_000
"""Numbers with more are not computed."""
_MAX_EXPONENT_BITS = 14
_WATCHED = ("reasoning_gym", "sympy.parsing", "__main__")
"""Modules that may hand a completion to `eval`."""
_SYMPY_NAMES = "from sympy import *"
"""What SymPy's parser executes to know its own names."""
_eval, _exec = builtins.eval, builtins.exec


class Refused(ValueError):
    """The text is more than a plain value; scorers treat it like any text they cannot read."""


@contextmanager
def guarded() -> Iterator[None]:
    """Within the block, scorers and SymPy's parser get `plain_eval` for `eval`, and an `exec` that takes one sentence.

    Other callers (the import system, dataclasses) evaluate no completion and work as ever. For single-threaded processes only.
    """
    builtins.eval, builtins.exec = _eval_of_caller, _exec_of_caller
    try:
        yield
    finally:
        builtins.eval, builtins.exec = _eval, _exec


def _eval_of_caller(source: Any, names: Any = None, local_names: Any = None, /) -> Any:
    frame = sys._getframe(1)
    if _is_watched(frame):
        return plain_eval(source, names, local_names)
    return _eval(source, *_spaces(frame, names, local_names))


def _exec_of_caller(source: Any, names: Any = None, local_names: Any = None, /, **options: Any) -> None:
    frame = sys._getframe(1)
    if _is_watched(frame) and (source != _SYMPY_NAMES or names is None):
        raise Refused("nothing is executed")
    _exec(source, *_spaces(frame, names, local_names), **options)


def _is_watched(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).startswith(_WATCHED)


def _spaces(frame: FrameType, names: Any, local_names: Any) -> tuple[Any, Any]:
    """Names as `eval` chooses them: the caller's where none are given."""
    if names is None:
        return frame.f_globals, frame.f_locals if local_names is None else local_names
    return names, names if local_names is None else local_names


def plain_eval(source: Any, names: Mapping[str, Any] | None = None, local_names: Mapping[str, Any] | None = None, /) -> Any:
    """`eval` for plain values: no attributes, no functions but mathematical ones of SymPy. Raises Refused or SyntaxError."""
    if not isinstance(source, str) or len(source) > _MAX_SOURCE:
        raise Refused("only short text is evaluated")
    try:
        tree = ast.parse(source.strip(), mode="eval")
    except (RecursionError, MemoryError, ValueError):
        raise Refused("the text is nested too deeply or holds NUL") from None
    try:
        _bits(tree.body)
    except RecursionError:
        raise Refused("the text is nested too deeply") from None
    known = {**(names or {}), **(local_names or {})}
    for node in ast.walk(tree):
        if not isinstance(node, _PLAIN):
            raise Refused(f"{type(node).__name__} is not evaluated")
        if isinstance(node, ast.Call) and not _is_mathematical(node, known):
            raise Refused("only mathematical functions are called")
        if isinstance(node, ast.Name) and node.id.startswith("_"):
            raise Refused(f"the name {node.id} is not read")
    return _eval(compile(tree, "<answer>", "eval"), {**known, "__builtins__": {}})


def _is_mathematical(node: ast.Call, known: Mapping[str, Any]) -> bool:
    if node.keywords or not isinstance(node.func, ast.Name) or node.func.id not in _CALLED:
        return False
    return str(getattr(known.get(node.func.id), "__module__", "")).startswith(_SYMPY)


def _bits(node: ast.AST) -> float:
    """An upper bound of log2 of the number an expression makes, symbols counting as 1. Raises Refused for one that would be huge."""
    if isinstance(node, ast.Constant):
        return _bits_of_constant(node.value)
    if not isinstance(node, ast.BinOp):
        return max((_bits(inner) for inner in ast.iter_child_nodes(node)), default=1.0)
    if any(isinstance(side, ast.List | ast.Tuple | ast.Set | ast.Dict) or _is_text(side) for side in (node.left, node.right)):
        raise Refused("there is no arithmetic with text or lists")
    left, right = _bits(node.left), _bits(node.right)
    found = left + right
    if isinstance(node.op, ast.Pow | ast.LShift):
        if right > _MAX_EXPONENT_BITS:
            raise Refused("the exponent is too large")
        found = max(left, 1.0) * 2.0**right
    if found > _MAX_BITS:
        raise Refused("the number would be too large")
    return found


def _bits_of_constant(value: Any) -> float:
    """SymPy's parser writes decimals as text: `Float('0.5')`."""
    if isinstance(value, int):
        return float(value.bit_length())
    try:
        number = abs(float(value))
    except (TypeError, ValueError, OverflowError):
        return 4.0 * len(value) if isinstance(value, str) and any(sign.isdigit() for sign in value) else 1.0
    return math.log2(number + 1.0) if math.isfinite(number) else math.inf


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str | bytes)
