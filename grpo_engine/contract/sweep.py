"""The request for a sweep: one base job, and what each member changes."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, model_validator

from grpo_engine.contract.base import Strict, broken_rule

MAX_MEMBERS = 20
"""As many as `compare` shows side by side."""
TAGS = ("type", "rule")
"""Keys that say which kind an object is."""

VariantName = Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9._=+-]+$")]


class Variant(Strict):
    """One member."""

    name: VariantName | None = None
    """Unique in the sweep; null = `beta=<number>` where that says it, else `variant-<n>`."""
    beta: Annotated[float, Field(ge=0)] | dict[str, Any] | None = None
    """Beta of this member: a number or a whole rule, in the place of the base's."""
    overrides: dict[str, Any] = Field(default_factory=dict)
    """JSON merge patch (RFC 7396) on the base spec; an object of another `type` or `rule` replaces the base's whole."""

    @model_validator(mode="after")
    def _changes_something(self) -> Variant:
        if self.beta is None and not self.overrides:
            raise broken_rule("beta", "a variant changes something; give beta, or overrides")
        return self


class SweepSpec(Strict):
    """Several jobs that differ in a few settings and share model, data, their order, seed and reference."""

    name: Annotated[str, Field(min_length=1, max_length=64)] | None = None
    spec: dict[str, Any]
    """The base job, as a create would have it; what each variant changes may be missing."""
    variants: Annotated[list[Variant], Field(min_length=2, max_length=MAX_MEMBERS)]

    @model_validator(mode="after")
    def _names_differ(self) -> SweepSpec:
        seen: set[str] = set()
        for number, name in enumerate(self.names()):
            if name in seen:
                raise broken_rule(f"variants[{number}].name", f"two variants are called {name!r}; give each a name of its own")
            seen.add(name)
        return self

    def names(self) -> list[str]:
        """A name for each variant."""
        return [variant.name or _usual_name(variant, number) for number, variant in enumerate(self.variants, start=1)]


def _usual_name(variant: Variant, number: int) -> str:
    if isinstance(variant.beta, float) and not variant.overrides:
        return f"beta={variant.beta:g}"
    return f"variant-{number}"


def merge_patch(target: Any, patch: Any) -> Any:
    """RFC 7396: objects are merged, null removes a key, anything else replaces. An object whose `type` or `rule` differs from the
    target's replaces it whole, since the target's other keys belong to the other kind."""
    if not isinstance(patch, dict):
        return patch
    is_same_kind = isinstance(target, dict) and all(patch[tag] == target.get(tag, patch[tag]) for tag in TAGS if tag in patch)
    result = dict(target) if is_same_kind else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = merge_patch(result.get(key), value)
    return result
