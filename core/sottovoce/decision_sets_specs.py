"""Decision sets as a spec names them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import (
    BeforeValidator,
    Field,
    PositiveInt,
)

from sottovoce.registry import Finite, Positive, Section, shorthand


class L2BallSpec(Section):
    """All theta with l2 norm at most `radius`."""

    kind: Literal["l2_ball"]
    radius: Positive


class BoxSpec(Section):
    """All theta with every coordinate in [low, high]."""

    kind: Literal["box"]
    low: Finite
    high: Finite


class L1BallSpec(Section):
    """All theta with l1 norm at most `radius`."""

    kind: Literal["l1_ball"]
    radius: Positive


class SimplexSpec(Section):
    """All theta without negative coordinates whose sum is `radius`. The origin is not among them."""

    kind: Literal["simplex"]
    radius: Positive = 1.0


class TraceNormSpec(Section):
    """Matrices whose singular values have a sum of at most `radius`, flattened row by row: of `softmax`, one a class."""

    kind: Literal["trace_norm"]
    rows: PositiveInt
    columns: PositiveInt
    radius: Positive


SimpleSetSpec = Annotated[
    L2BallSpec | BoxSpec | L1BallSpec | SimplexSpec | TraceNormSpec,
    Field(discriminator="kind"),
]


class BlockSpec(Section):
    """The next `size` parameters, and the set that they lie in."""

    size: PositiveInt
    set: SimpleSetSpec


class ProductSpec(Section):
    """Consecutive blocks of parameters, each with a set of its own."""

    kind: Literal["product"]
    blocks: Annotated[tuple[BlockSpec, ...], Field(min_length=1)]


DecisionSetSpec = Annotated[
    L2BallSpec | BoxSpec | L1BallSpec | SimplexSpec | TraceNormSpec | ProductSpec,
    Field(discriminator="kind"),
    BeforeValidator(shorthand),
]
