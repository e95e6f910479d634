"""The strict base of every contract model.

Unknown keys, NaN, infinities and wrong types are errors. Models are built from JSON text
(`model_validate_json`), so that strictness and JSON's own types agree.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field
from pydantic_core import PydanticCustomError

PositiveInt = Annotated[int, Field(gt=0, le=2**53)]
NonNegativeInt = Annotated[int, Field(ge=0, le=2**53)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]

BROKEN_RULE = "broken_rule"
"""Type of the errors that `broken_rule` makes."""


def broken_rule(field: str, message: str) -> PydanticCustomError:
    """What a validator of several fields raises: `field` is the path, from the model down, of the one to change."""
    return PydanticCustomError(BROKEN_RULE, "{message}", {"field": field, "message": message})


class Strict(BaseModel):
    """A model that refuses what it does not know."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        validate_default=True,
        frozen=True,
    )
