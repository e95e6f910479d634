"""From the request for a sweep to its jobs: each variant merged over the base, checked, and held to what all must share.

An error names its field where it was written: below `spec`, or below `variants[n]`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from api.admission import RowsRead, admit
from api.deps import Services
from grpo_engine.contract.error import GrpoError, InvalidRequest
from grpo_engine.contract.job import BETA_ALIASES, JobSpec
from grpo_engine.contract.sweep import SweepSpec, Variant, merge_patch
from jobs.ledger import NewJob, NewMember

SHARED = (
    "model", "training_file", "validation_file", "seed", "method.type", "method.grpo.data", "method.grpo.environment",
    "method.grpo.reference", "method.grpo.sampling.prompts_per_step", "method.reinforcement.hyperparameters.prompts_per_step",
)  # fmt: skip
"""What no variant may change: the weights it starts from, the prompts and their order, the random numbers, the reference."""
_BETA_NAMES = ("beta", *BETA_ALIASES)
_HOLDERS = {"grpo": ("method", "grpo"), "reinforcement": ("method", "reinforcement", "hyperparameters")}
"""Where beta stands, by one of its names, for each type of method."""
_PART = re.compile(r"[^.\[\]]+")


def plan(wanted: SweepSpec, services: Services) -> list[NewMember]:
    """The jobs, checked. Raises InvalidRequest or InsufficientStorage naming the field."""
    read: RowsRead = {}
    members: list[NewMember] = []
    first: JobSpec | None = None
    promised = 0
    for number, (name, variant) in enumerate(zip(wanted.names(), wanted.variants, strict=True)):
        at = f"variants[{number}]"
        patch = _patch(variant, wanted.spec, at)
        with _named_where_written(at, name, variant, patch, wanted.spec):
            body = merge_patch(_without_beta(wanted.spec, patch, is_whole=variant.beta is not None), patch)
            admission = admit(body, services, read=read, promised_bytes=promised)
        first = first or admission.spec
        _require_shared(first, admission.spec, at)
        promised += admission.disk_bytes or 0
        job = NewJob(admission.spec, admission.training_path, admission.validation_path, admission.weights)
        members.append(NewMember(name, job))
    return members


def _patch(variant: Variant, base: dict[str, Any], at: str) -> dict[str, Any]:
    """The variant as one merge patch. Raises InvalidRequest for what must be shared, and for beta given twice."""
    for path in SHARED:
        if _depth(variant.overrides, path.split(".")) == path.count(".") + 1:
            message = f"{at}.overrides.{path}: the members of a sweep share it; set it in spec, or create a job of its own"
            raise InvalidRequest(message, param=f"{at}.overrides.{path}")
    if variant.beta is None:
        return variant.overrides
    for holder in _HOLDERS.values():
        if any(_depth(variant.overrides, [*holder, name]) > len(holder) for name in _BETA_NAMES):
            raise InvalidRequest(f"{at}.beta: the overrides change beta as well; keep one", param=f"{at}.beta")
    return _placed(variant.overrides, (*_beta_holder(base), "beta"), variant.beta, f"{at}.overrides")


def _beta_holder(base: dict[str, Any]) -> tuple[str, ...]:
    method = base.get("method")
    kind = method.get("type") if isinstance(method, dict) else None
    return _HOLDERS["reinforcement" if kind == "reinforcement" else "grpo"]


def _placed(body: dict[str, Any], path: tuple[str, ...], value: Any, at: str) -> dict[str, Any]:
    """A copy of `body` with `value` at `path`. Raises InvalidRequest when something on the way is no object."""
    head, rest = path[0], path[1:]
    if not rest:
        return {**body, head: value}
    below = body.get(head, {})
    if not isinstance(below, dict):
        raise InvalidRequest(f"{at}.{head} must be an object beside beta", param=f"{at}.{head}")
    return {**body, head: _placed(below, rest, value, f"{at}.{head}")}


def _without_beta(base: dict[str, Any], patch: dict[str, Any], *, is_whole: bool) -> dict[str, Any]:
    """The base without the names of beta that the patch replaces by another; with `is_whole` without any."""
    for path in _HOLDERS.values():
        given = [name for name in _BETA_NAMES if _depth(patch, [*path, name]) > len(path)]
        if given:
            stale = {name: None for name in _BETA_NAMES if is_whole or name not in given}
            empty: dict[str, Any] = {}
            base = merge_patch(base, _placed(empty, path, stale, "")) if _depth(base, list(path)) == len(path) else base
    return base


def _require_shared(first: JobSpec, spec: JobSpec, at: str) -> None:
    """Presets may change what no key names."""
    mine, theirs = _shared_part(spec), _shared_part(first)
    if mine != theirs:
        name = next(name for name in mine if mine[name] != theirs[name])
        message = f"{at}.overrides: the resolved {name} differs from that of variants[0], and the members of a sweep share it"
        raise InvalidRequest(message, param=f"{at}.overrides")


def _shared_part(spec: JobSpec) -> dict[str, Any]:
    grpo = spec.method.grpo
    return {
        "model": spec.model, "training_file": spec.training_file, "validation_file": spec.validation_file, "seed": spec.seed,
        "method.grpo.data": grpo.data, "method.grpo.environment": grpo.environment, "method.grpo.reference": grpo.reference,
        "method.grpo.sampling.prompts_per_step": grpo.sampling.prompts_per_step,
    }  # fmt: skip


@contextmanager
def _named_where_written(at: str, name: str, variant: Variant, patch: dict[str, Any], base: dict[str, Any]) -> Iterator[None]:
    """A refusal inside names the field below `spec`, or below the variant when that brought it."""
    try:
        yield
    except GrpoError as error:
        if error.param is None:
            error.param = at
        else:
            error.rename(_written_at(error.param, at, variant, patch, base))
        error.message = f"variant {name!r}: {error.message}"
        error.args = (error.message,)
        raise


def _written_at(param: str, at: str, variant: Variant, patch: dict[str, Any], base: dict[str, Any]) -> str:
    parts = _PART.findall(param)
    beta = ".".join((*_beta_holder(base), "beta"))
    if variant.beta is not None and f"{param}.".startswith(f"{beta}."):
        return f"{at}.beta{param.removeprefix(beta)}"
    mine = _depth(patch, parts)
    is_ours = mine == len(parts) or mine > _depth(base, parts)
    return f"{at}.overrides.{param}" if is_ours else f"spec.{param}"


def _depth(body: Any, parts: Sequence[str]) -> int:
    """How many of the parts lead down into `body`."""
    for number, part in enumerate(parts):
        if isinstance(body, dict) and part in body:
            body = body[part]
        elif isinstance(body, list) and part.isdecimal() and int(part) < len(body):
            body = body[int(part)]
        else:
            return number
    return len(parts)
