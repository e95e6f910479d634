"""What no body may hold, and how the error names it."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.strict_json import MAX_DEPTH, MAX_INTEGER, loads_object, loads_strict
from grpo_engine.contract.error import InvalidRequest, MalformedJson

REFUSED: list[tuple[str, bytes, int, str]] = [
    ("NaN", b'{"a": NaN}', 422, "a"),
    ("Infinity", b'{"a": {"b": [1, Infinity]}}', 422, "a.b[1]"),
    ("-Infinity", b"[-Infinity]", 422, "[0]"),
    ("a float too large", b'{"beta": 1e400}', 422, "beta"),
    ("an integer of 2^70", b'{"a": 1180591620717411303424}', 422, "a"),
    ("an integer just beyond 2^53", b'{"a": 9007199254740993}', 422, "a"),
    ("an integer of 5000 digits", b'{"a": ' + b"9" * 5000 + b"}", 422, "a"),
    ("a lone surrogate", rb'{"name": "\ud800"}', 422, "name"),
    ("a lone surrogate in a key", rb'{"x": {"\udfff": 1}}', 422, "x"),
    ("a NUL", rb'{"name": "a\u0000b"}', 422, "name"),
    ("a duplicate key", b'{"a": {"beta": 1, "c": 2, "beta": 3}}', 422, "a.beta"),
    ("deep arrays", b"[" * 10_000 + b"]" * 10_000, 400, "body"),
    ("deep objects", b'{"a":' * 900 + b"1" + b"}" * 900, 400, "body"),
    ("UTF-16", '{"a": 1}'.encode("utf-16"), 400, "body"),
    ("a byte-order mark", b'\xef\xbb\xbf{"a": 1}', 400, "body"),
    ("UTF-32", '{"a": 1}'.encode("utf-32-le"), 400, "body"),
    ("invalid UTF-8", b'{"a": "\xff\xfe"}', 400, "body"),
    ("a surrogate in UTF-8", b'{"a": "\xed\xa0\x80"}', 400, "body"),
    ("nothing", b"", 400, "body"),
    ("half an object", b'{"a": 1', 400, "body"),
    ("two documents", b"{} {}", 400, "body"),
    ("a control character in a string", b'{"a": "\n"}', 400, "body"),
    ("a trailing comma", b'{"a": 1,}', 400, "body"),
]


@pytest.mark.parametrize(("body", "status", "param"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED])
def test_refused(body: bytes, status: int, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        loads_strict(body)
    assert caught.value.status == status
    assert caught.value.param == param
    json.dumps(caught.value.message, allow_nan=False).encode()


def test_the_deepest_allowed_body_is_read() -> None:
    assert loads_strict(b"[" * MAX_DEPTH + b"]" * MAX_DEPTH)
    with pytest.raises(MalformedJson):
        loads_strict(b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1))


def test_brackets_inside_strings_do_not_count_as_depth() -> None:
    text = "[{" * 100 + '\\"'
    assert loads_strict(json.dumps({"a": text}).encode()) == {"a": text}


@pytest.mark.parametrize("body", [b'"' + b'\\"' * 500_000, b'{"a' * 300_000, b'["' + b"\\" * 999_999])
def test_an_unfinished_text_is_refused_in_linear_time(body: bytes) -> None:
    with pytest.raises(MalformedJson):
        loads_strict(body)


def test_the_largest_integer_is_read() -> None:
    assert loads_strict(str(MAX_INTEGER).encode()) == MAX_INTEGER
    assert loads_strict(str(-MAX_INTEGER).encode()) == -MAX_INTEGER


def test_a_body_that_is_no_object_is_named() -> None:
    with pytest.raises(InvalidRequest, match="JSON object") as caught:
        loads_object(b"[1]")
    assert caught.value.param == "body"


def test_unicode_text_survives_byte_for_byte() -> None:
    text = "‮שלום 👩‍👩‍👧 é é"
    assert loads_strict(json.dumps({"suffix": text}, ensure_ascii=False).encode()) == {"suffix": text}


_text = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))
_scalars = st.none() | st.booleans() | st.integers(-MAX_INTEGER, MAX_INTEGER) | st.floats(allow_nan=False, allow_infinity=False) | _text
_json = st.recursive(_scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_text, inner), max_leaves=20)


@given(_json)
def test_every_other_document_is_read_as_python_reads_it(value: object) -> None:
    body = json.dumps(value).encode()
    assert loads_strict(body) == json.loads(body)


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused_never_worse(body: bytes) -> None:
    outcome = 200
    try:
        loads_strict(body)
    except InvalidRequest as error:
        outcome = error.status
    assert outcome in (200, 400, 422)
