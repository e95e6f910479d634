"""From a decoded JSON body to a valid `JobSpec`: translation, presets, validation, and errors a person can act on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from grpo_engine.contract.base import BROKEN_RULE
from grpo_engine.contract.error import GrpoError, InvalidRequest, UnsupportedMethod
from grpo_engine.contract.hints import meant
from grpo_engine.contract.job import BETA_ALIASES, JobSpec
from grpo_engine.contract.presets import apply_preset
from grpo_engine.contract.reinforcement import place_in_reinforcement, translate_reinforcement
from grpo_engine.contract.support import refuse_unsupported

Model = TypeVar("Model", bound=BaseModel)
_METHOD = 'method: {"type": "grpo", "grpo": {"grader": {...}}}'


def resolve_spec(raw: dict[str, Any]) -> JobSpec:
    """The job with presets applied and every default filled in.

    Raises InvalidRequest (or a subclass) naming the field in `param` and the remedy in the message.
    """
    with named_as_written(raw):
        return _resolve(raw)


@contextmanager
def named_as_written(raw: dict[str, Any]) -> Iterator[None]:
    """An error inside names its field as `raw` spells it: an alias of beta by that alias, `reinforcement` by OpenAI's places."""
    try:
        yield
    except GrpoError as error:
        if error.param is not None:
            error.rename(_as_written(error.param, raw))
        raise


def _as_written(param: str, raw: dict[str, Any]) -> str:
    method = raw.get("method")
    if not isinstance(method, dict):
        return param
    if method.get("type") == "reinforcement":
        return place_in_reinforcement(param, method)
    grpo = method.get("grpo")
    beta = "method.grpo.beta"
    if isinstance(grpo, dict) and "beta" not in grpo and (param + ".").startswith(f"{beta}."):
        alias = next((name for name in BETA_ALIASES if name in grpo), "beta")
        return f"method.grpo.{alias}{param.removeprefix(beta)}"
    return param


def _resolve(raw: dict[str, Any]) -> JobSpec:
    method = raw.get("method")
    if "hyperparameters" in raw:
        raise InvalidRequest(
            "hyperparameters beside method are for supervised jobs, which this server does not offer; remove them, and give "
            f"{_METHOD} (beta, optimizer.learning_rate, limits.num_steps stand in method.grpo)",
            param="hyperparameters",
        )
    if "method" not in raw:
        raise InvalidRequest(f"method is required, to say how the job is trained; give {_METHOD}", param="method")
    if isinstance(method, dict):
        kind = method.get("type")
        if kind in (None, "grpo") and "reinforcement" in method:
            raise InvalidRequest(
                "method.reinforcement goes with method.type 'reinforcement'; set the type to it, or move its grader to method.grpo",
                param="method.reinforcement",
            )
        if kind == "reinforcement":
            raw = {**raw, "method": translate_reinforcement(method)}
        elif kind in ("supervised", "dpo"):
            raise UnsupportedMethod(
                f"method.type {kind!r} is not offered; this server trains with GRPO: use 'grpo' (or 'reinforcement')",
                param="method.type",
            )
    spec = validate(JobSpec, apply_preset(raw))
    refuse_unsupported(spec)
    return spec


def validate(model: type[Model], raw: Any, *, prefix: str = "") -> Model:
    """Validate decoded JSON against a contract model. Raises InvalidRequest for the first problem, listing how many there are."""
    try:
        return model.model_validate_json(json.dumps(raw, allow_nan=False))
    except ValidationError as error:
        details = error.errors(include_url=False, include_context=True, include_input=False)
        first = details[0]
        param = prefix + _place(first, raw)
        message = _sentence(first, model, param, prefix)
        if len(details) > 1:
            message += f" ({len(details) - 1} more problem{'s' if len(details) > 2 else ''} after this one)"
        raise InvalidRequest(message, param=param or None) from None


def _place(detail: ErrorDetails, raw: Any) -> str:
    """The path of the field to change: below the model, where a rule of several fields names one, or where a tag is wrong."""
    kind, context, at = detail["type"], detail.get("ctx", {}), json_path(detail["loc"], raw)
    inner = ""
    if kind == BROKEN_RULE:
        inner = str(context["field"])
    elif kind in ("union_tag_invalid", "union_tag_not_found"):
        inner = str(context.get("discriminator", "")).strip("'")
    return f"{at}.{inner}" if at and inner else at + inner


def json_path(loc: tuple[int | str, ...], raw: Any) -> str:
    """The field's path as the client wrote it: union tags that pydantic adds are left out."""
    parts: list[str] = []
    here, is_new = raw, True
    for part in loc:
        if is_new and isinstance(here, dict) and here.get("rule") == part:
            is_new = False  # the tag of a beta rule always follows; rule "schedule" also has a field of that name
            continue
        is_new = True
        if isinstance(here, list) and isinstance(part, int):
            parts[-1:] = [f"{parts[-1]}[{part}]"] if parts else [f"[{part}]"]
            here = here[part] if part < len(here) else None
        elif isinstance(here, dict) and part in here:
            parts.append(str(part))
            here = here[part]
        elif isinstance(here, dict) and not _is_union_tag(part, here):
            parts.append(str(part))
            here = None
        elif not isinstance(here, dict | list):
            break
    return ".".join(parts)


def _is_union_tag(part: int | str, here: dict[str, Any]) -> bool:
    return part in (here.get("type"), here.get("rule")) or not str(part).replace("_", "").isalnum()


def _sentence(detail: ErrorDetails, model: type[BaseModel], param: str, prefix: str) -> str:
    kind, where = detail["type"], param or "the body"
    if kind == "extra_forbidden":
        hint = meant(model, detail["loc"], param.removeprefix(prefix))
        known = f"{prefix}{hint}" if hint is not None and "." in hint else hint
        return f"unknown key {where!r}; " + (f"did you mean {known!r}?" if known else "remove it")
    if kind == "missing":
        return f"{where} is required; add it"
    if kind == "value_error":
        return f"{where}: {detail['msg'].removeprefix('Value error, ')}"
    if kind == BROKEN_RULE:
        return f"{where}: {detail['msg']}"
    if kind == "union_tag_invalid":
        context = detail.get("ctx", {})
        return f"{where} is {context.get('tag')!r}; use one of {context.get('expected_tags')}"
    if kind == "union_tag_not_found":
        return f"{where} is required, to say which kind it is; add it"
    message = detail["msg"][:1].lower() + detail["msg"][1:]
    return f"{where}: {message}; change it accordingly"
