"""Strict JSON intake: what Python's parser lets through, and no spec should hold, is an error that names the field.

Refused: invalid UTF-8, UTF-16 and byte-order marks, duplicate keys, NaN and infinities (also spelled 1e400), integers
beyond 2^53, lone surrogates, NUL characters, and nesting deeper than 32.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

from grpo_engine.contract.error import InvalidRequest, MalformedJson

MAX_DEPTH = 32
MAX_INTEGER = 2**53
BODY = "body"
"""What an error about the whole body names."""

_STRING_OR_BRACKET = re.compile(rb'"(?:[^"\\]|\\.)*+"?|[\[\]{}]', re.DOTALL)
"""A string may lack its end: otherwise each quote in an unfinished one would be tried as a beginning, in quadratic time."""
_MARKS = (b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff")
_FORBIDDEN = re.compile("[\x00\ud800-\udfff]")


class _HugeInteger:
    """Stands for an integer literal that is too long to keep."""


class _DuplicateKeys(dict[str, Any]):
    """An object in which `key` came twice."""

    key = ""


def loads_strict(body: bytes) -> Any:
    """Decode one JSON document.

    Raises MalformedJson (400) when the bytes are no JSON, InvalidRequest (422) when a value in them is not allowed: `param` is its
    JSON path, and `body` when it is the whole.
    """
    if body.startswith(_MARKS):
        raise MalformedJson("the body begins with a byte-order mark; send plain UTF-8 without one", param=BODY)
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise MalformedJson(f"the body is not valid UTF-8 (byte {error.start}); send UTF-8", param=BODY) from None
    _check_depth(body)
    try:
        value = json.loads(text, parse_int=_integer, object_pairs_hook=_object)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise MalformedJson(f"the body is not valid JSON: {error.msg} at {where}; correct it", param=BODY) from None
    _check(value, "")
    return value


def loads_object(body: bytes) -> dict[str, Any]:
    """`loads_strict` for bodies that must be an object."""
    value = loads_strict(body)
    if not isinstance(value, dict):
        raise InvalidRequest("the body must be a JSON object; send one", param=BODY)
    return value


def _check_depth(body: bytes) -> None:
    depth = 0
    for match in _STRING_OR_BRACKET.finditer(body):
        token = match.group()
        if token in (b"[", b"{"):
            depth += 1
            if depth > MAX_DEPTH:
                raise MalformedJson(f"the body nests deeper than {MAX_DEPTH} levels; flatten it", param=BODY)
        elif token in (b"]", b"}"):
            depth -= 1


def _integer(literal: str) -> int | _HugeInteger:
    return int(literal) if len(literal) <= 20 else _HugeInteger()


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    plain = dict(pairs)
    if len(plain) == len(pairs):
        return plain
    seen: set[str] = set()
    marked = _DuplicateKeys(plain)
    for key, _ in pairs:
        if key in seen:
            marked.key = key
            break
        seen.add(key)
    return marked


def _check(value: Any, path: str) -> None:
    if isinstance(value, dict):
        _check_object(value, path)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            _check(item, f"{path}[{index}]")
    elif isinstance(value, str):
        if _FORBIDDEN.search(value):
            raise InvalidRequest(f"{path or 'the body'} holds a NUL character or a lone surrogate; remove it", param=path or BODY)
    elif isinstance(value, _HugeInteger) or (isinstance(value, int) and abs(value) > MAX_INTEGER):
        raise InvalidRequest(f"{path or 'the body'} is an integer beyond 2^53; use a smaller one", param=path or BODY)
    elif isinstance(value, float) and not math.isfinite(value):
        raise InvalidRequest(f"{path or 'the body'} is not a finite number; send one that is", param=path or BODY)


def _check_object(value: dict[str, Any], path: str) -> None:
    if isinstance(value, _DuplicateKeys):
        param = _join(path, value.key) if not _FORBIDDEN.search(value.key) else path
        raise InvalidRequest(f"the key {param!r} is given twice; keep one", param=param or BODY)
    for key, item in value.items():
        if _FORBIDDEN.search(key):
            raise InvalidRequest(f"a key in {path or 'the body'} holds a NUL character or a lone surrogate; remove it", param=path or BODY)
        _check(item, _join(path, key))


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key
