"""Sections of a spec."""

from __future__ import annotations

from typing import Annotated

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
)

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


Finite = Annotated[float, Field(allow_inf_nan=False)]


def shorthand(value: object) -> object:
    """`ring` stands for `{kind: ring}`."""
    return {"kind": value} if isinstance(value, str) else value


class Section(BaseModel):
    """Part of a spec: frozen, and an unknown field is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")
