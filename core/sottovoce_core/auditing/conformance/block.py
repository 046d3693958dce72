"""Blocks of noise from several runs, with names of their positions: the input of every conformance test."""

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

# ---- positions -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Layout:
    """Layout of all blocks of an audit.

    Attributes:
        learners: names of the learners, in order.
        rounds: number of rounds.
        fields: names and widths of the fields.
    """

    learners: tuple[str, ...]
    rounds: int
    fields: tuple[tuple[str, int], ...]

    @property
    def numbers_per_message(self) -> int:
        """Count of numbers in a message."""
        return sum(width for _, width in self.fields)

    @property
    def numbers_per_run(self) -> int:
        """Count of numbers in a run."""
        return len(self.learners) * self.rounds * self.numbers_per_message

    @property
    def max_width(self) -> int:
        """Count of numbers in the widest field."""
        return max(width for _, width in self.fields)

    @property
    def sequence_count(self) -> int:
        """Count of fields of learners: each sends one sequence of vectors."""
        return len(self.learners) * len(self.fields)

    def iterate_field_slices(self) -> Iterator[tuple[str, slice]]:
        """Iterate over the fields and their slices of the last axis."""
        start = 0
        for name, width in self.fields:
            yield name, slice(start, start + width)
            start += width

    def stack_sequences(self, numbers: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Stack `(learners, rounds, runs, numbers)` as `(sequences, rounds, runs, max_width)`, padded with zeros."""
        if len(self.fields) == 1:
            return numbers
        stacked = np.zeros((self.sequence_count, *numbers.shape[1:3], self.max_width), numbers.dtype)
        for f, (_, part) in enumerate(self.iterate_field_slices()):
            stacked[f :: len(self.fields), ..., : part.stop - part.start] = numbers[..., part]
        return stacked

    def name_sequence(self, v: int) -> str:
        """Name the learner of a sequence, and the field if there are several."""
        i, f = divmod(v, len(self.fields))
        return f"{self.learners[i]}, field {self.fields[f][0]!r}" if len(self.fields) > 1 else self.learners[i]

    @property
    def sequence_names(self) -> list[str]:
        """Names of the learner and the field of every sequence."""
        return [f"{learner}, field {name!r}" for learner in self.learners for name, _ in self.fields]

    @property
    def coordinates(self) -> list[str]:
        """Names of the field and the coordinate of every number of a message."""
        return [f"field {name!r}, coordinate {k}" for name, width in self.fields for k in range(width)]

    def name_coordinate(self, k: int) -> str:
        """Name a coordinate, and its field if there are several."""
        return self.coordinates[k] if len(self.fields) > 1 else f"coordinate {k}"

    def name_place(self, index: int) -> str:
        """Name the place of a number, by its index in `(learners, rounds, numbers)`."""
        i, t, k = np.unravel_index(index, (len(self.learners), self.rounds, self.numbers_per_message))
        return f"{self.learners[int(i)]}, round {t}, {self.name_coordinate(int(k))}"


# ---- blocks of noise -------------------------------------------------------------------------------------------------

_MAX_PIECE_NUMBERS = 2**17
"""Maximum count of numbers in a piece, or those of one run: a megabyte of each array."""

MAX_NORMAL_SCORE = 38.0
"""Maximum normal score: float64 cannot represent the probability of a larger one."""


@dataclass(frozen=True, eq=False)
class Block:
    """Noise of all learners in some whole runs; fields are concatenated along the last axis.

    Arrays are `(learners, rounds, runs, numbers)`.

    Attributes:
        layout: layout of all blocks of the audit, also for a piece of one.
        values: independent standard Laplace numbers under the claim; NaN where no noise is known.
        steps: noise in lattice spacings, K'; an integer within one of the number drawn. 0 where not tested.
        message_steps: message in lattice spacings, a. 0 where not tested.
        lost_bits: count of low bits of `steps` and `message_steps` that float64 does not resolve; `ALL_BITS`: every one.
        is_off_lattice: whether the message is off its lattice.
        scale: `(learners, rounds, numbers)` noise scale; NaN where there is no noise.
        grid: `(learners, rounds, numbers)` lattice spacing.
        past: state of every learner before it drew the noise, by name; 0 where not known. Empty: not requested. Values that
            are equal in all runs have length 1 along that axis.
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
        """True if the most expensive tests are run: dependence of numbers on each other and on the past."""
        return bool(self.past)

    @classmethod
    def create_blank(cls, layout: Layout, runs: int) -> Block:
        """Allocate a block for `runs` runs, without known noise."""
        learners, rounds, numbers = len(layout.learners), layout.rounds, layout.numbers_per_message
        return cls(
            layout, **create_unknown_arrays((learners, rounds, runs, numbers), (learners, rounds, numbers)), past={}
        )

    def get_residuals(self, learner: int) -> dict[str, Residuals]:
        """Return views of the arrays of one learner, by field."""
        residuals = {}
        for name, where in self.layout.iterate_field_slices():
            rows = {part: getattr(self, part)[learner, ..., where] for part in UNKNOWN_VALUES}
            residuals[name] = Residuals(learner, name, **rows)
        return residuals

    def reuse_memory(self, runs: int) -> Block:
        """Return a block on the same memory for at most as many runs; its old values must be overwritten (`residuals`)."""
        shape = (*self.values.shape[:2], runs, self.values.shape[3])
        rows = {part: getattr(self, part) for part in RUN_INDEPENDENT_NAMES}
        for part in UNKNOWN_VALUES.keys() - rows.keys():
            rows[part] = getattr(self, part).reshape(-1)[: math.prod(shape)].reshape(shape)
        return Block(self.layout, **rows, past={})

    def add_past(self, residuals: Sequence[Sequence[Residuals]]) -> Block:
        """Attach the past of the learners to the block; moves it out of the residuals, because it is large."""
        learners, rounds, _, numbers = self.values.shape
        runs: dict[str, int] = {}
        for own in residuals:
            for each in own:
                for name, values in each.past.items():
                    runs[name] = max(values.shape[1], runs.get(name, 1))
        past = {name: np.zeros((learners, rounds, length, numbers)) for name, length in runs.items()}
        places = dict(self.layout.iterate_field_slices())
        for own in residuals:
            for each in own:
                for name in list(each.past):
                    past[name][each.learner, :, :, places[each.field]] = each.past.pop(name)
        return replace(self, past=past)

    def iterate_pieces(self) -> Iterator[tuple[int, slice, Block]]:
        """Iterate over pieces of one learner and some runs: the learner, the runs, and the piece, whose arrays are views.

        Each piece fits into a processor's cache, because memory is slower than the work on a number.
        """
        for i in range(len(self.values)):
            for runs, piece in self.iterate_run_pieces(slice(i, i + 1)):
                yield i, runs, piece

    def iterate_run_pieces(self, learners: slice = slice(None)) -> Iterator[tuple[slice, Block]]:
        """Iterate over pieces of several learners: as many runs at a time as fit, or one; yields the runs and their noise."""
        by_scale = {part: getattr(self, part)[learners] for part in RUN_INDEPENDENT_NAMES}
        own = {part: getattr(self, part)[learners] for part in UNKNOWN_VALUES if part not in RUN_INDEPENDENT_NAMES}
        runs = self.values.shape[2]
        step = max(1, _MAX_PIECE_NUMBERS * runs // own["values"].size)
        for start in range(0, runs, step):
            part_runs = slice(start, min(start + step, runs))
            rows = by_scale | {part: values[:, :, part_runs] for part, values in own.items()}
            past = {
                name: x[learners] if x.shape[2] == 1 else x[learners, :, part_runs] for name, x in self.past.items()
            }
            yield part_runs, Block(self.layout, **rows, past=past)

    @property
    def runs(self) -> int:
        """Count of runs."""
        runs: int = self.values.shape[2]
        return runs

    @cached_property
    def is_known(self) -> BoolArray:
        """Mask of the known noise."""
        mask: BoolArray = np.isfinite(self.values)
        return mask

    @cached_property
    def is_resolved(self) -> BoolArray:
        """Mask of the known noise that float64 resolves to the last bit."""
        mask: BoolArray = self.is_known & (self.lost_bits == 0)
        return mask

    @cached_property
    def count(self) -> int:
        """Count of known noise values."""
        return int(np.count_nonzero(self.is_known))

    @cached_property
    def sizes(self) -> FloatArray:
        """|values|: independent standard exponential numbers; NaN where unknown."""
        sizes: FloatArray = np.abs(self.values)
        return sizes

    @cached_property
    def tail(self) -> FloatArray:
        """`exp(-|r|)`: probability of a larger size, uniform in (0, 1]; NaN where unknown."""
        tail: FloatArray = np.exp(-self.sizes)
        return tail

    @cached_property
    def normal_scores(self) -> FloatArray:
        """Normal scores of the values, z: independent standard normal numbers; 0 where unknown.

        They use the smaller tail probability: one minus it would round to one for large values.
        """
        return self._compute_scores(0.5 * self.tail, self.values)

    @cached_property
    def normal_size_scores(self) -> FloatArray:
        """Normal scores of the sizes, m: standard normal, and independent of the signs; 0 where unknown."""
        return self._compute_scores(self.tail, 1.0)

    def _compute_scores(self, above: FloatArray, signs: FloatArray | float) -> FloatArray:
        """Compute the normal score with this upper tail probability; probabilities of 0 and 1 are clipped."""
        scores: FloatArray = np.clip(-special.ndtri(above), -MAX_NORMAL_SCORE, MAX_NORMAL_SCORE)
        scores *= np.sign(signs)
        scores[~self.is_known] = 0.0
        return scores

    @cached_property
    def signs(self) -> ByteArray:
        """Signs -1, 0 or 1; 0 where unknown."""
        signs: ByteArray = np.sign(np.where(self.is_known, self.values, 0.0)).astype(np.int8)
        return signs


# ---- tests -----------------------------------------------------------------------------------------------------------


class ConformanceTest(ABC):
    """Class of tests that receives every run once, in whole runs, and keeps additive statistics.

    Args:
        layout: layout of the blocks.
        fraction: fraction of all runs of the audit that will be added here, to be merged with the others.

    Attributes:
        part: part of the alpha allocation that all of its tests share.
        additive_names: names of the attributes that are merged by addition.
    """

    part: ClassVar[BudgetPart]
    additive_names: ClassVar[tuple[str, ...]] = ()

    def __init__(self, layout: Layout, fraction: float = 1.0) -> None:
        self._layout = layout

    @abstractmethod
    def add(self, block: Block) -> None:
        """Add a block of runs."""

    def merge(self, other: Self) -> None:
        """Merge the statistics of other runs."""
        for name in self.additive_names:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def compute_tests(self) -> list[Test]:
        """Compute the tests over all runs; levels are not assigned yet."""
        return list(self._iterate_tests())

    @abstractmethod
    def _iterate_tests(self) -> Iterator[Test]:
        """Iterate over all tests."""
