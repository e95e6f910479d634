"""What every answer of the server is made of: the strict base, spelled numbers, pages, deletions and errors."""

from __future__ import annotations

from typing import Generic, Literal, TypeVar

from pydantic import BaseModel, ConfigDict

Item = TypeVar("Item")


class View(BaseModel):
    """An answer; unlike a request it may gain fields."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)


class NonFinite(View):
    """A number JSON cannot spell."""

    value: None = None
    nonfinite: Literal["nan", "inf", "-inf"]


Number = float | NonFinite


class JobWarning(View):
    """A legal setting that is known to disappoint."""

    code: str
    """Stable; the name of the detector where there is one."""
    param: str
    message: str


class Deleted(View):
    """Something is gone."""

    id: str
    object: str
    deleted: Literal[True] = True


class ProblemError(View):
    """OpenAI's error object."""

    message: str
    type: str
    param: str | None
    """JSON path of the field, or the name of the parameter or header."""
    code: str


class Problem(View):
    """The body of every error: RFC 9457, with OpenAI's object inside."""

    type: str
    title: str
    status: int
    detail: str
    instance: str
    error: ProblemError


class Page(View, Generic[Item]):
    """A list."""

    object: Literal["list"] = "list"
    data: list[Item]
    has_more: bool = False
    first_id: str | None = None
    last_id: str | None = None
