"""Where numbers stand in a block, in words and in other orders."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from sottovoce.auditing.conformance.block import Block


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

    @classmethod
    def of(cls, block: Block) -> Layout:
        """That of a block."""
        return cls(block.learners, block.values.shape[1], block.fields)

    @property
    def numbers(self) -> int:
        """In a message."""
        return sum(width for _, width in self.fields)

    @property
    def places(self) -> int:
        """Numbers of a run."""
        return len(self.learners) * self.rounds * self.numbers

    @property
    def widest(self) -> int:
        """Numbers of the widest field."""
        return max(width for _, width in self.fields)

    @property
    def voices(self) -> int:
        """Fields of learners: what says one sequence of vectors each."""
        return len(self.learners) * len(self.fields)

    def by_voice(self, numbers: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """`(learners, rounds, runs, numbers)` as `(voices, rounds, runs, widest)`: zeros follow the numbers of a narrow field."""
        if len(self.fields) == 1:
            return numbers
        found = np.zeros((self.voices, *numbers.shape[1:3], self.widest), numbers.dtype)
        start = 0
        for f, (_, width) in enumerate(self.fields):
            found[f :: len(self.fields), ..., :width] = numbers[..., start : start + width]
            start += width
        return found

    def learner(self, i: int) -> str:
        """The learner at a place of the first axis."""
        return self.learners[i]

    def voice(self, v: int) -> str:
        """The learner, and the field where there are several."""
        i, f = divmod(v, len(self.fields))
        return f"{self.learner(i)}, field {self.fields[f][0]!r}" if len(self.fields) > 1 else self.learner(i)

    def number(self, k: int) -> str:
        """The coordinate, and its field where there are several."""
        for name, width in self.fields:
            if k < width:
                return f"field {name!r}, coordinate {k}" if len(self.fields) > 1 else f"coordinate {k}"
            k -= width
        raise IndexError(k)

    def place(self, index: int) -> str:
        """Of a number, by its index in `(learners, rounds, numbers)`."""
        i, t, k = np.unravel_index(index, (len(self.learners), self.rounds, self.numbers))
        return f"{self.learner(int(i))}, round {t}, {self.number(int(k))}"
