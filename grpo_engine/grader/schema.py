"""JSON Schemas as functions that name a value's first fault, in bounded time.

Patterns run on RE2, so that no pattern of a job meets a completion that keeps it busy for ever. What would have no effect, or
would fail only when a completion comes, is refused when the grader is made: references that lead nowhere, in circles or outside
the schema, formats nobody checks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jsonschema
from jsonschema.exceptions import SchemaError, ValidationError
from referencing import Registry

from grpo_engine.grader.text import compile_re2, is_found

MAX_DEPTH = 64
_PATTERN_PROPERTIES = "patternProperties"
_DATA = frozenset({"const", "enum", "default", "examples"})
"""Keywords whose value is data, not a schema."""
_MAPS = frozenset({"properties", _PATTERN_PROPERTIES, "$defs", "definitions", "dependentSchemas"})
"""Keywords whose value maps names to schemas."""


def compile_schema(schema: dict[str, Any] | None) -> Callable[[Any], str | None]:
    """A function from a value to its first fault, or None. Raises ValueError for a schema that is none or cannot be carried out."""
    if schema is None:
        return lambda value: None
    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    try:
        kind.check_schema(schema)
    except SchemaError as error:
        raise ValueError(f"json_schema is not a JSON Schema: {error.message}") from None
    patterns = _Patterns()
    _examine(schema, schema, 0, set(kind.FORMAT_CHECKER.checkers), patterns)
    checked = jsonschema.validators.extend(kind, _linear_keywords(patterns))
    validator = checked(schema, registry=Registry(), format_checker=kind.FORMAT_CHECKER)

    def first_fault(value: Any) -> str | None:
        fault = next(iter(validator.iter_errors(value)), None)
        return None if fault is None else f"{fault.json_path}: {fault.message[:200]}"

    return first_fault


class _Patterns(dict[str, Any]):
    """Compiled patterns by their text."""

    def __missing__(self, pattern: str) -> Any:
        self[pattern] = compile_re2(pattern)
        return self[pattern]


def _examine(value: Any, root: dict[str, Any], depth: int, formats: set[str], patterns: _Patterns, *, is_schema: bool = True) -> None:
    """Walk the schema, compile its patterns into `patterns`, and refuse what cannot be carried out."""
    if depth > MAX_DEPTH:
        raise ValueError("json_schema is nested too deeply; flatten it")
    if isinstance(value, list):
        for inner in value:
            _examine(inner, root, depth + 1, formats, patterns)
    if not isinstance(value, dict):
        return
    if is_schema:
        _examine_schema(value, root, formats, patterns)
    for key, inner in value.items():
        if not (is_schema and key in _DATA):
            _examine(inner, root, depth + 1, formats, patterns, is_schema=not (is_schema and key in _MAPS))


def _examine_schema(value: dict[str, Any], root: dict[str, Any], formats: set[str], patterns: _Patterns) -> None:
    for key in ("$ref", "$dynamicRef"):
        if isinstance(target := value.get(key), str):
            _check_reference(target, root)
    name = value.get("format")
    if isinstance(name, str) and name not in formats:
        raise ValueError(f"json_schema's format {name!r} is not checked here; remove it, or write a pattern")
    for pattern in _patterns_of(value):
        patterns.setdefault(pattern, compile_re2(pattern))
    if _PATTERN_PROPERTIES in value and "unevaluatedProperties" in value:
        raise ValueError("json_schema has unevaluatedProperties beside patternProperties; use additionalProperties")


def _patterns_of(schema: dict[str, Any]) -> Iterator[str]:
    if isinstance(schema.get("pattern"), str):
        yield schema["pattern"]
    if isinstance(schema.get(_PATTERN_PROPERTIES), dict):
        yield from schema[_PATTERN_PROPERTIES]


def _check_reference(target: str, root: dict[str, Any]) -> None:
    """Follow a reference, and those it leads to at once, to a schema. Anchors (`#name`) are looked up when a value is checked."""
    seen: set[str] = set()
    while target.startswith("#"):
        if target in seen:
            raise ValueError(f"json_schema's reference {target!r} leads back to itself; give it a schema")
        seen.add(target)
        if target != "#" and not target.startswith("#/"):
            return
        found: Any = root
        for part in target[2:].split("/") if len(target) > 1 else []:
            part = part.replace("~1", "/").replace("~0", "~").replace("%25", "%")
            if isinstance(found, list) and part.isdecimal() and int(part) < len(found):
                found = found[int(part)]
            elif isinstance(found, dict) and part in found:
                found = found[part]
            else:
                raise ValueError(f"json_schema refers to {target!r}, which is not in it; add it or correct the reference")
        if not isinstance(found, dict) or not isinstance(found.get("$ref"), str):
            return
        target = found["$ref"]
    raise ValueError(f"json_schema refers to {target!r}; only references inside the schema ('#/...') are followed")


def _linear_keywords(patterns: _Patterns) -> dict[str, Callable[..., Iterator[ValidationError]]]:
    """The keywords that hold patterns, on RE2."""

    def pattern(validator: Any, wanted: str, instance: Any, schema: Any) -> Iterator[ValidationError]:
        if validator.is_type(instance, "string") and not is_found(patterns[wanted], instance):
            yield ValidationError(f"{instance!r} does not match {wanted!r}")

    def pattern_properties(validator: Any, wanted: dict[str, Any], instance: Any, schema: Any) -> Iterator[ValidationError]:
        if validator.is_type(instance, "object"):
            for name, inner in wanted.items():
                for key in instance:
                    if is_found(patterns[name], key):
                        yield from validator.descend(instance[key], inner, path=key, schema_path=name)

    def additional(validator: Any, wanted: Any, instance: Any, schema: Any) -> Iterator[ValidationError]:
        if not validator.is_type(instance, "object"):
            return
        named, matched = schema.get("properties", {}), [patterns[name] for name in schema.get(_PATTERN_PROPERTIES, {})]
        for key in instance:
            if key not in named and not any(is_found(one, key) for one in matched):
                if wanted is False:
                    yield ValidationError(f"the property {key!r} is not allowed")
                elif isinstance(wanted, dict):
                    yield from validator.descend(instance[key], wanted, path=key)

    return {"pattern": pattern, _PATTERN_PROPERTIES: pattern_properties, "additionalProperties": additional}
