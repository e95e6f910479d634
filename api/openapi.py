"""The OpenAPI document, with what FastAPI cannot read off signatures: bodies that are read strictly, query parameters with
brackets, the one error body, and who may call what.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from api.examples import BODIES, PARAMETERS
from grpo_engine.contract.view import Problem

Endpoint = TypeVar("Endpoint", bound=Callable[..., object])

_REF = "#/components/schemas/{model}"
_bodies: list[type[BaseModel]] = []


def json_request(model: type[BaseModel]) -> dict[str, Any]:
    """`openapi_extra` of an endpoint whose body `json_body` reads."""
    if model not in _bodies:
        _bodies.append(model)
    schema = {"$ref": _REF.format(model=model.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def produces(*media_types: str, status: int = 200) -> dict[int | str, dict[str, Any]]:
    """`responses` of an endpoint that answers with these media types; use it with `response_class=Response` unless JSON is one."""
    return {status: {"description": "Successful Response", "content": {media_type: {} for media_type in media_types}}}


def accepts_query(*names: str) -> Callable[[Endpoint], Endpoint]:
    """Decorator: query parameters the endpoint reads by itself; `metadata[]` stands for `metadata[anything]`."""

    def mark(endpoint: Endpoint) -> Endpoint:
        endpoint.__grpo_query__ = frozenset(names)  # type: ignore[attr-defined]
        return endpoint

    return mark


def extra_query(endpoint: object) -> frozenset[str]:
    """What `accepts_query` noted."""
    names: frozenset[str] = getattr(endpoint, "__grpo_query__", frozenset())
    return names


def describe(app: FastAPI, public_paths: frozenset[str]) -> dict[str, Any]:
    """The document."""
    document = get_openapi(title=app.title, version=app.version, routes=app.routes, description=_ABOUT)
    components = document.setdefault("components", {})
    schemas = components.setdefault("schemas", {})
    models: list[type[BaseModel]] = [*_bodies, Problem]
    _, extra = models_json_schema([(model, "validation") for model in models], ref_template=_REF)
    for name, schema in extra.get("$defs", {}).items():
        schemas.setdefault(name, schema)
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    problem = {
        "description": "What is wrong, where (`error.param`), and what to do.",
        "content": {"application/problem+json": {"schema": {"$ref": _REF.format(model=Problem.__name__)}}},
    }
    for path, operations in document["paths"].items():
        for operation in operations.values():
            operation["responses"].pop("422", None)
            operation["responses"]["default"] = problem
            _show_by_example(operation)
            if path not in public_paths:
                operation["security"] = [{"key": []}, {}]
    return document


def _show_by_example(operation: dict[str, Any]) -> None:
    for parameter in operation.get("parameters", ()):
        if parameter["name"] in PARAMETERS:
            parameter["example"] = PARAMETERS[parameter["name"]]
    for content in operation.get("requestBody", {}).get("content", {}).values():
        name = content["schema"].get("$ref", "").rpartition("/")[2]
        if name in BODIES:
            content["example"] = BODIES[name]


_ABOUT = (
    "GRPO training jobs with the KL divergence and its coefficient under control. Shaped like OpenAI's fine-tuning API. "
    "A server without API keys answers on loopback only."
)
