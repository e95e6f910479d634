"""What a key that a contract model does not know was probably meant to be."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, get_args

from pydantic import BaseModel

from grpo_engine.contract.nearest import nearest

_NUMBER = re.compile(r"\[\d+\]")
Models = set[type[BaseModel]]


def meant(model: type[BaseModel], loc: Sequence[int | str], path: str) -> str | None:
    """The key for an unknown one: of the same name at another place of the model, as a path; or of a name like it at the same place.

    `loc` is pydantic's, with the tags of unions; `path` the client's. None where neither is, or where only another member of the
    same union has the key.
    """
    name, here = str(loc[-1]), _NUMBER.sub("", path)
    places = list(_paths(model))
    if here in places:
        return None
    near = nearest(name, sorted(_allowed(model, loc[:-1]) - {name}))
    return near or _shallowest([place for place in places if place.rpartition(".")[2] == name])


def _shallowest(places: Sequence[str]) -> str | None:
    """The place with the fewest steps; None when two have as few."""
    depths = Counter(place.count(".") for place in set(places))
    least = min(depths, default=0)
    return next((place for place in places if place.count(".") == least), None) if depths[least] == 1 else None


def _allowed(model: type[BaseModel], loc: Sequence[int | str]) -> set[str]:
    """Names that an object at this place may have."""
    here: Models = {model}
    for part in loc:
        fields = [(kind, field) for kind in here for field in kind.model_fields.items()]
        tagged = {kind for kind, (_, field) in fields if part in get_args(field.annotation)} if len(here) > 1 else set()
        inner = {nested for _, (name, field) in fields if name == part for nested in models_in(field.annotation)}
        here = tagged or inner or here  # neither: an index, or the key of a mapping
    return {name for kind in here for name in kind.model_fields}


def _paths(model: type[BaseModel], at: str = "", seen: frozenset[type] = frozenset()) -> Iterator[str]:
    """Dotted places of all fields, those inside lists and mappings without index or key."""
    for name, field in model.model_fields.items():
        yield at + name
        for nested in models_in(field.annotation):
            if nested not in seen:
                yield from _paths(nested, f"{at}{name}.", seen | {model, nested})


def models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """The models an annotation is made of."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from models_in(argument)
