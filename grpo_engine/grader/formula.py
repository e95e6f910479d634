"""OpenAI's `calculate_output`: arithmetic over grader names, parsed by hand. Nothing is evaluated as Python.

sum = product (("+" | "-") product)*        product = unary (("*" | "/") unary)*
unary = "-" unary | power                   power = atom (("^" | "**") unary)?
atom = number | name | function "(" sum ("," sum)* ")" | "(" sum ")"
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Set
from typing import Final

from grpo_engine.grader.sample import GraderFault

Scores = Mapping[str, float]
Evaluate = Callable[[Scores], float]

MAX_DEPTH: Final = 50
_TOKEN = re.compile(r"\s*(?:(?P<number>(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)|(?P<name>[A-Za-z_][A-Za-z0-9_]*)|(?P<sign>\*\*|[-+*/^(),]))")
FUNCTIONS: Final[dict[str, tuple[Callable[..., float], int, int]]] = {
    "min": (min, 1, 64),
    "max": (max, 1, 64),
    "abs": (abs, 1, 1),
    "floor": (math.floor, 1, 1),
    "ceil": (math.ceil, 1, 1),
    "exp": (math.exp, 1, 1),
    "sqrt": (math.sqrt, 1, 1),
    "log": (math.log, 1, 1),
}
"""Name, callable, least and most arguments."""


def parse_formula(text: str, names: Set[str]) -> Evaluate:
    """A function from scores to the result.

    Raises ValueError with a sentence for anything but arithmetic over `names` and FUNCTIONS. The function raises GraderFault when
    the arithmetic has no finite result (division by zero, log of 0).
    """
    parser = _Parser(text, names)
    tree = parser.sum(0)
    parser.expect_end()

    def evaluate(scores: Scores) -> float:
        try:
            result = float(tree(scores))
        except (ArithmeticError, ValueError, TypeError) as error:
            raise GraderFault("formula", f"calculate_output {text!r} has no result for {dict(scores)}: {error}") from None
        return result

    return evaluate


class _Parser:
    def __init__(self, text: str, names: Set[str]) -> None:
        self.text = text
        self.names = names
        self.tokens = _tokens(text)
        self.position = 0

    def sum(self, depth: int) -> Evaluate:
        left = self.product(depth)
        while sign := self._take("+", "-"):
            left = _binary(sign, left, self.product(depth))
        return left

    def product(self, depth: int) -> Evaluate:
        left = self.unary(depth)
        while sign := self._take("*", "/"):
            left = _binary(sign, left, self.unary(depth))
        return left

    def unary(self, depth: int) -> Evaluate:
        if depth > MAX_DEPTH:
            raise ValueError("calculate_output is nested too deeply; simplify it")
        if sign := self._take("-", "+"):
            inner = self.unary(depth + 1)
            return inner if sign == "+" else (lambda scores: -inner(scores))
        base = self.atom(depth)
        if self._take("^", "**"):
            return _binary("^", base, self.unary(depth + 1))
        return base

    def atom(self, depth: int) -> Evaluate:
        kind, token = self._next()
        if kind == "number":
            number = float(token)
            return lambda scores: number
        if kind == "name":
            return self._function(token, depth) if self._take("(") else self._variable(token)
        if token == "(":
            inner = self.sum(depth + 1)
            self._expect(")")
            return inner
        raise ValueError(f"calculate_output {self.text!r}: {token or 'the end'!r} stands where a number, a grader or '(' is expected")

    def expect_end(self) -> None:
        if self.position < len(self.tokens):
            raise ValueError(f"calculate_output {self.text!r}: {self.tokens[self.position][1]!r} is not expected there")

    def _variable(self, name: str) -> Evaluate:
        if name not in self.names:
            raise ValueError(f"calculate_output names {name!r}, which is no grader here; the graders are {', '.join(sorted(self.names))}")
        return lambda scores: scores[name]

    def _function(self, name: str, depth: int) -> Evaluate:
        if name not in FUNCTIONS:
            raise ValueError(f"calculate_output calls {name!r}; only {', '.join(FUNCTIONS)} may be called")
        function, least, most = FUNCTIONS[name]
        arguments = [self.sum(depth + 1)]
        while self._take(","):
            arguments.append(self.sum(depth + 1))
        self._expect(")")
        if not least <= len(arguments) <= most:
            raise ValueError(
                f"calculate_output gives {name} {len(arguments)} arguments; it takes {least if least == most else 'one or more'}"
            )
        if name in ("min", "max"):
            return lambda scores: function([argument(scores) for argument in arguments])
        return lambda scores: function(arguments[0](scores))

    def _next(self) -> tuple[str, str]:
        if self.position == len(self.tokens):
            return "sign", ""
        self.position += 1
        return self.tokens[self.position - 1]

    def _take(self, *signs: str) -> str | None:
        if self.position < len(self.tokens) and self.tokens[self.position] in [("sign", sign) for sign in signs]:
            return self._next()[1]
        return None

    def _expect(self, sign: str) -> None:
        if not self._take(sign):
            raise ValueError(f"calculate_output {self.text!r}: {sign!r} is missing")


def _tokens(text: str) -> list[tuple[str, str]]:
    tokens: list[tuple[str, str]] = []
    position = 0
    text = text.rstrip()
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None or match.lastgroup is None:
            raise ValueError(f"calculate_output {text!r}: {text[position:].strip()[:1]!r} is not arithmetic; use + - * / ^ ( ) and names")
        tokens.append((match.lastgroup, match[match.lastgroup]))
        position = match.end()
    return tokens


def _binary(sign: str, left: Evaluate, right: Evaluate) -> Evaluate:
    match sign:
        case "+":
            return lambda scores: left(scores) + right(scores)
        case "-":
            return lambda scores: left(scores) - right(scores)
        case "*":
            return lambda scores: left(scores) * right(scores)
        case "/":
            return lambda scores: left(scores) / right(scores)
        case _:
            return lambda scores: _power(left(scores), right(scores))


def _power(base: float, exponent: float) -> float:
    result = base**exponent
    if isinstance(result, complex):
        raise ValueError(f"{base} to the power of {exponent} is not a real number")
    return float(result)
