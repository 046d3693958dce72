"""All noise of some runs, side by side, with its places in words: what every test of conformance looks at."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt
from scipy import special

from sottovoce_core.arrays import BoolArray, FloatArray, IntArray
from sottovoce_core.auditing.bounds import BudgetPart, Test
from sottovoce_core.auditing.conformance.residuals import (
    RUN_INDEPENDENT_NAMES,
    UNKNOWN_VALUES,
    ByteArray,
    Residuals,
    create_unknown_arrays,
)

# ---- places ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Layout:
    """What all blocks of an audit have in common.

    Attributes:
        learners: names of the learners, in order.
        rounds: how many.
        fields: names and widths.
    """

    learners: tuple[str, ...]
    rounds: int
    fields: tuple[tuple[str, int], ...]

    @property
    def numbers_per_message(self) -> int:
        """In a message."""
        return sum(width for _, width in self.fields)

    @property
    def numbers_per_run(self) -> int:
        """Numbers of a run."""
        return len(self.learners) * self.rounds * self.numbers_per_message

    @property
    def max_width(self) -> int:
        """Numbers of the widest field."""
        return max(width for _, width in self.fields)

    @property
    def sequence_count(self) -> int:
        """Fields of learners: what says one sequence of vectors each."""
        return len(self.learners) * len(self.fields)

    def iterate_field_slices(self) -> Iterator[tuple[str, slice]]:
        """Fields, and where they stand along the last axis."""
        start = 0
        for name, width in self.fields:
            yield name, slice(start, start + width)
            start += width

    def stack_sequences(self, numbers: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """`(learners, rounds, runs, numbers)` as `(voices, rounds, runs, widest)`: zeros follow the numbers of a narrow field."""
        if len(self.fields) == 1:
            return numbers
        found = np.zeros((self.sequence_count, *numbers.shape[1:3], self.max_width), numbers.dtype)
        for f, (_, part) in enumerate(self.iterate_field_slices()):
            found[f :: len(self.fields), ..., : part.stop - part.start] = numbers[..., part]
        return found

    def name_sequence(self, v: int) -> str:
        """The learner, and the field where there are several."""
        i, f = divmod(v, len(self.fields))
        return f"{self.learners[i]}, field {self.fields[f][0]!r}" if len(self.fields) > 1 else self.learners[i]

    @property
    def sequence_names(self) -> list[str]:
        """Of every voice the learner and the field, in words."""
        return [f"{learner}, field {name!r}" for learner in self.learners for name, _ in self.fields]

    @property
    def coordinates(self) -> list[str]:
        """Of every number of a message the field and the coordinate, in words."""
        return [f"field {name!r}, coordinate {k}" for name, width in self.fields for k in range(width)]

    def name_coordinate(self, k: int) -> str:
        """The coordinate, and its field where there are several."""
        return self.coordinates[k] if len(self.fields) > 1 else f"coordinate {k}"

    def name_place(self, index: int) -> str:
        """Of a number, by its index in `(learners, rounds, numbers)`."""
        i, t, k = np.unravel_index(index, (len(self.learners), self.rounds, self.numbers_per_message))
        return f"{self.learners[int(i)]}, round {t}, {self.name_coordinate(int(k))}"


# ---- blocks of noise -------------------------------------------------------------------------------------------------

_MAX_PIECE_NUMBERS = 2**17
"""Numbers of a piece, at most, or those of one run: a megabyte of each array."""

MAX_NORMAL_SCORE = 38.0
"""Of a normal score: what lies farther has a probability that no double holds."""


@dataclass(frozen=True, eq=False)
class Block:
    """The noise of all learners in some whole runs; fields stand side by side along the last axis.

    Arrays are `(learners, rounds, runs, numbers)`.

    Attributes:
        layout: of all blocks of the audit, also where this is a piece of one.
        values: independent standard Laplace numbers under the claim; NaN where no noise is known.
        steps: noise in lattice spacings, K'; a whole number within one of what was drawn. 0 where nothing is judged.
        said: the message in lattice spacings, a. 0 where nothing is judged.
        lost: low bits of `steps` and `said` that float64 does not resolve, so that nothing can be said of them; `ALL`: every one.
        off: whether the message is off its lattice.
        scale: `(learners, rounds, numbers)` of the noise; NaN where there is none.
        grid: the same of the spacing.
        past: what every learner had before it drew the noise, by name; 0 where nothing is known. Empty: nobody asked. Of what is
            the same in all runs, that axis has the length 1.
    """

    layout: Layout
    values: FloatArray
    steps: IntArray
    message_steps: IntArray
    lost_bits: ByteArray
    is_off_lattice: BoolArray
    scale: FloatArray
    grid: FloatArray
    past: Mapping[str, FloatArray]

    @property
    def has_past(self) -> bool:
        """Whether to look at what costs most: dependence, of numbers on each other and on what was before."""
        return bool(self.past)

    @classmethod
    def create_blank(cls, layout: Layout, runs: int) -> Block:
        """Room for all noise of so many runs, none of it known yet."""
        learners, rounds, numbers = len(layout.learners), layout.rounds, layout.numbers_per_message
        return cls(
            layout, **create_unknown_arrays((learners, rounds, runs, numbers), (learners, rounds, numbers)), past={}
        )

    def get_residuals(self, learner: int) -> dict[str, Residuals]:
        """The room of one learner, by field: views."""
        found = {}
        for name, where in self.layout.iterate_field_slices():
            rows = {part: getattr(self, part)[learner, ..., where] for part in UNKNOWN_VALUES}
            found[name] = Residuals(learner, name, **rows)
        return found

    def reuse_memory(self, runs: int) -> Block:
        """The same memory for so many runs or fewer, to be filled anew (`residuals`): it still holds what was known of others."""
        shape = (*self.values.shape[:2], runs, self.values.shape[3])
        rows = {part: getattr(self, part) for part in RUN_INDEPENDENT_NAMES}
        for part in UNKNOWN_VALUES.keys() - rows.keys():
            rows[part] = getattr(self, part).reshape(-1)[: math.prod(shape)].reshape(shape)
        return Block(self.layout, **rows, past={})

    def add_past(self, found: Sequence[Sequence[Residuals]]) -> Block:
        """The same noise, and what the learners had before they drew it, which is taken out of what was found: it is large."""
        learners, rounds, _, numbers = self.values.shape
        runs: dict[str, int] = {}
        for own in found:
            for each in own:
                for what, values in each.past.items():
                    runs[what] = max(values.shape[1], runs.get(what, 1))
        before = {what: np.zeros((learners, rounds, length, numbers)) for what, length in runs.items()}
        places = dict(self.layout.iterate_field_slices())
        for own in found:
            for each in own:
                for what in list(each.past):
                    before[what][each.learner, :, :, places[each.field]] = each.past.pop(what)
        return replace(self, past=before)

    def iterate_pieces(self) -> Iterator[tuple[int, slice, Block]]:
        """The same noise of one learner and some runs at a time: the learner, the runs, and the piece, whose arrays are views.

        Memory is slower than what is done with a number, so each piece fits into a processor's cache.
        """
        for i in range(len(self.values)):
            for some, piece in self.iterate_run_pieces(slice(i, i + 1)):
                yield i, some, piece

    def iterate_run_pieces(self, learners: slice = slice(None)) -> Iterator[tuple[slice, Block]]:
        """The same of these learners together: as many runs at a time as fit, or one; which, and their noise."""
        by_scale = {part: getattr(self, part)[learners] for part in RUN_INDEPENDENT_NAMES}
        own = {part: getattr(self, part)[learners] for part in UNKNOWN_VALUES if part not in RUN_INDEPENDENT_NAMES}
        runs = self.values.shape[2]
        step = max(1, _MAX_PIECE_NUMBERS * runs // own["values"].size)
        for start in range(0, runs, step):
            some = slice(start, min(start + step, runs))
            rows = by_scale | {part: values[:, :, some] for part, values in own.items()}
            past = {what: x[learners] if x.shape[2] == 1 else x[learners, :, some] for what, x in self.past.items()}
            yield some, Block(self.layout, **rows, past=past)

    @property
    def runs(self) -> int:
        """How many."""
        runs: int = self.values.shape[2]
        return runs

    @cached_property
    def is_known(self) -> BoolArray:
        """Where noise is known."""
        known: BoolArray = np.isfinite(self.values)
        return known

    @cached_property
    def is_resolved(self) -> BoolArray:
        """Where noise is known, and float64 resolves it to the last bit."""
        resolved: BoolArray = self.is_known & (self.lost_bits == 0)
        return resolved

    @cached_property
    def count(self) -> int:
        """Numbers of known noise."""
        return int(np.count_nonzero(self.is_known))

    @cached_property
    def sizes(self) -> FloatArray:
        """|values|: independent standard exponential numbers; NaN where unknown."""
        sizes: FloatArray = np.abs(self.values)
        return sizes

    @cached_property
    def tail(self) -> FloatArray:
        """`exp(-|r|)`: how likely a size is to be larger, uniform in (0, 1]; NaN where unknown."""
        tail: FloatArray = np.exp(-self.sizes)
        return tail

    @cached_property
    def normal_scores(self) -> FloatArray:
        """Normal scores of the values, z: independent standard normal numbers; 0 where unknown.

        Of the small probability, never of one minus it: far out that rounds to one.
        """
        return self._scores(0.5 * self.tail, self.values)

    @cached_property
    def normal_size_scores(self) -> FloatArray:
        """Normal scores of the sizes, m: standard normal, and independent of the signs; 0 where unknown."""
        return self._scores(self.tail, 1.0)

    def _scores(self, above: FloatArray, signs: FloatArray | float) -> FloatArray:
        """The normal number that is exceeded as often as this; no infinity for what is exceeded never, or always."""
        scores: FloatArray = np.clip(-special.ndtri(above), -MAX_NORMAL_SCORE, MAX_NORMAL_SCORE)
        scores *= np.sign(signs)
        scores[~self.is_known] = 0.0
        return scores

    @cached_property
    def signs(self) -> ByteArray:
        """-1, 0 or 1; 0 where unknown."""
        signs: ByteArray = np.sign(np.where(self.is_known, self.values, 0.0)).astype(np.int8)
        return signs


# ---- instruments -----------------------------------------------------------------------------------------------------


class ConformanceTest(ABC):
    """One class of tests: sees every run once, in whole runs, and keeps what adds up.

    Args:
        layout: of the blocks that it will see.
        share: of all runs of the audit that it will see, to be merged with what sees the others.

    Attributes:
        part: of the error budget, which all of its tests share.
        summed: names of what it keeps and only adds up.
    """

    part: ClassVar[BudgetPart]
    additive_names: ClassVar[tuple[str, ...]] = ()

    def __init__(self, layout: Layout, share: float = 1.0) -> None:
        self._layout = layout

    @abstractmethod
    def add(self, block: Block) -> None:
        """Look at some more runs."""

    def merge(self, other: Self) -> None:
        """Take in what another one keeps of other runs."""
        for name in self.additive_names:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def compute_tests(self) -> list[Test]:
        """What all runs come to; no level is set yet."""
        return list(self._every())

    @abstractmethod
    def _every(self) -> Iterator[Test]:
        """All tests, one after the other."""
