r"""Exact arithmetic over a small LaTeX: `\frac{12}{3}`, `2^{10}`, `21\frac{17}{20}`, `3*24-2`. Rational results only, sizes bounded."""

from __future__ import annotations

import math
import re
from fractions import Fraction

MAX_BITS = 20_000
MAX_TOKENS = 400
MAX_FACTORIAL = 500
MAX_DEPTH = 40

_TOKEN = re.compile(
    r"\s*(?:(?P<number>\d{1,3}(?:,\d{3})+(?!\d)(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)|(?P<command>\\(?:frac|times|cdot|div))(?![A-Za-z])|(?P<sign>[-+*/^!(){}]))"
)


class _NotArithmetic(Exception):
    """The text is something else, or too large."""


def evaluate(text: str) -> Fraction | None:
    """The exact value, or None for what is not rational arithmetic, has no value, or is too large."""
    try:
        parser = _Parser(_tokens(text))
        value = parser.sum(0)
        parser.end()
    except (_NotArithmetic, ZeroDivisionError):
        return None
    return value


def _tokens(text: str) -> list[str]:
    tokens: list[str] = []
    position = 0
    text = text.rstrip()
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None or len(tokens) >= MAX_TOKENS:
            raise _NotArithmetic
        tokens.append(match[match.lastgroup or "sign"])
        position = match.end()
    return tokens


class _Parser:
    def __init__(self, tokens: list[str]) -> None:
        self.tokens = tokens
        self.position = 0

    def sum(self, depth: int) -> Fraction:
        if depth > MAX_DEPTH:
            raise _NotArithmetic
        value = self.product(depth)
        while (sign := self.peek()) in ("+", "-"):
            self.position += 1
            term = self.product(depth)
            value = _bounded(value + term if sign == "+" else value - term)
        return value

    def product(self, depth: int) -> Fraction:
        value = self.unary(depth)
        while True:
            sign = self.peek()
            if sign in ("*", "\\times", "\\cdot"):
                self.position += 1
                value = _bounded(value * self.unary(depth))
            elif sign in ("/", "\\div"):
                self.position += 1
                value = _bounded(value / self.unary(depth))
            elif sign in ("(", "\\frac"):
                value = _bounded(value * self.power(depth))
            else:
                return value

    def unary(self, depth: int) -> Fraction:
        sign = self.peek()
        if sign in ("+", "-"):
            self.position += 1
            if self.peek() in ("+", "-"):
                raise _NotArithmetic
            value = self.unary(depth)
            return -value if sign == "-" else value
        return self.power(depth)

    def power(self, depth: int) -> Fraction:
        value = self.atom(depth)
        while self.peek() == "!":
            self.position += 1
            value = _factorial(value)
        if self.peek() == "^":
            self.position += 1
            value = _power(value, self.exponent(depth))
            if self.peek() == "^":
                raise _NotArithmetic
        return value

    def exponent(self, depth: int) -> Fraction:
        if self.peek() == "{":
            return self.group("{", "}", depth)
        return self.unary(depth) if self.peek() == "-" else self.atom(depth)

    def atom(self, depth: int) -> Fraction:
        token = self.take()
        if token == "\\frac":
            above, below = self.group("{", "}", depth), self.group("{", "}", depth)
            return above / below
        if token in ("(", "{"):
            self.position -= 1
            return self.group(token, {"(": ")", "{": "}"}[token], depth)
        if not token[0].isdigit() and token[0] != ".":
            raise _NotArithmetic
        value = Fraction(token.replace(",", ""))
        return value + self.mixed(depth) if value.denominator == 1 else value

    def mixed(self, depth: int) -> Fraction:
        r"""The proper fraction that follows an integer directly, as in `21\frac{17}{20}`; 0 when there is none."""
        start = self.position
        if self.peek() == "\\frac":
            value = self.atom(depth)
            if 0 < value < 1:
                return value
        elif self.peek()[:1].isdigit() and self.tokens[self.position + 1 : self.position + 2] == ["/"]:
            above, below = self.take(), (self.take(), self.take())[1]
            if above.isdecimal() and below.isdecimal() and 0 < int(above) < int(below):
                return Fraction(int(above), int(below))
        self.position = start
        return Fraction(0)

    def group(self, opening: str, closing: str, depth: int) -> Fraction:
        if self.take() != opening:
            raise _NotArithmetic
        value = self.sum(depth + 1)
        if self.take() != closing:
            raise _NotArithmetic
        return value

    def end(self) -> None:
        if self.position != len(self.tokens):
            raise _NotArithmetic

    def peek(self) -> str:
        return self.tokens[self.position] if self.position < len(self.tokens) else ""

    def take(self) -> str:
        if self.position >= len(self.tokens):
            raise _NotArithmetic
        self.position += 1
        return self.tokens[self.position - 1]


def _bounded(value: Fraction) -> Fraction:
    if value.numerator.bit_length() > MAX_BITS or value.denominator.bit_length() > MAX_BITS:
        raise _NotArithmetic
    return value


def _factorial(value: Fraction) -> Fraction:
    if value.denominator != 1 or not 0 <= value <= MAX_FACTORIAL:
        raise _NotArithmetic
    return Fraction(math.factorial(int(value)))


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1 or abs(exponent) > MAX_BITS:
        raise _NotArithmetic
    bits = max(base.numerator.bit_length(), base.denominator.bit_length()) * abs(int(exponent))
    if bits > MAX_BITS:
        raise _NotArithmetic
    return base ** int(exponent)
