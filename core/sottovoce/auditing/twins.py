"""Two runs that differ in one record and in nothing else, not even in noise: what the swap itself does to the messages.

A picture, no evidence: whoever listens does not know the noise. It shows the size of what noise must hide.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sottovoce.arrays import FloatArray
from sottovoce.auditing.simulated import Share, overhear
from sottovoce.auditing.worlds import Worlds
from sottovoce.data import PlacedData
from sottovoce.noise import SeededNoise, no_noise
from sottovoce.running.run import Run


@dataclass(frozen=True, slots=True)
class Twins:
    """One number of the learner's messages over all rounds, `(rounds,)` each.

    Attributes:
        field, coordinate: which number: the one that the swap moves most where there is no noise.
        swapped: the first round that learns the record.
        first, second: said in either world, with the same noise.
        bare_first, bare_second: without any noise.
        scale: of the noise.
    """

    field: str
    coordinate: int
    swapped: int
    first: FloatArray
    second: FloatArray
    bare_first: FloatArray
    bare_second: FloatArray
    scale: FloatArray

    @property
    def telling(self) -> int:
        """The round whose message the swap moves most, against the noise; without noise: most."""
        moved = np.abs(self.bare_first - self.bare_second)
        known = np.where(self.scale > 0, self.scale, np.inf)
        relative = moved / known if np.isfinite(known).any() else moved
        return int(relative.argmax())


def twins(run: Run, data: PlacedData, worlds: Worlds, seed: np.random.SeedSequence) -> Twins:
    """Simulate both worlds with the same noise, and without any."""
    learner = worlds.learner
    heard = [
        overhear(run, data, worlds, Share(world, 1, seed), noise).transcript
        for noise in (SeededNoise, lambda _: no_noise)
        for world in (0, 1)
    ]
    moved = {
        name: np.abs(values[:, learner, 0] - heard[3].fields[name][:, learner, 0]).max(axis=0)
        for name, values in heard[2].fields.items()
    }
    field = max(moved, key=lambda name: float(moved[name].max()))
    coordinate = int(moved[field].argmax())
    first, second, *bare = (np.ascontiguousarray(each.fields[field][:, learner, 0, coordinate]) for each in heard)
    scale = np.array([run.algorithm.noise_scale(learner, t) for t in range(run.spec.rounds)])
    return Twins(field, coordinate, int(worlds.replaced.argmax()), first, second, bare[0], bare[1], scale)
