"""The parameters of an algorithm, as a spec gives them."""

from __future__ import annotations

from typing import Any, ClassVar

from sottovoce.algorithms.interface import Algorithm
from sottovoce.algorithms.setting import Caveat, Setting
from sottovoce.errors import SpecError
from sottovoce.registry import Section


class AlgorithmSpec(Section):
    """The parameters of an algorithm. Each has its own class, beside the algorithm: see `sottovoce.algorithms`."""

    name: str
    """Of a built-in algorithm, of one that an installed package offers, or `module:Class`."""

    def build(self, setting: Setting) -> tuple[Algorithm[Any], tuple[Caveat, ...]]:
        """The algorithm in its surroundings, checked; and the conditions that only void a theorem.

        Raises:
            SpecError: a parameter does not fit the surroundings.
            CheckFailed: a condition does not hold without which there is no guarantee.
        """
        raise NotImplementedError

    one_noise: ClassVar[bool] = False
    """Do all learners share one number for their noise?"""

    def noisier(self, factors: tuple[float, ...]) -> AlgorithmSpec:
        """The same with every learner's noise multiplied: by `factors`, one for each.

        Raises:
            SpecError: there is no noise, or no way to scale it.
        """
        raise SpecError("this algorithm's noise cannot be calibrated: its class of parameters has no method `noisier`")
