"""Runs of two worlds on the simulator: a fair coin for every run, some runs at a time, each share with noise of its own."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import islice

import numpy as np

from sottovoce.arrays import FloatArray
from sottovoce.auditing.views import Features
from sottovoce.auditing.worlds import Worlds
from sottovoce.data import PlacedData
from sottovoce.noise import Noise
from sottovoce.running.run import Run
from sottovoce.running.simulator import simulate
from sottovoce.running.transcript import Transcript

NoiseOf = Callable[[np.random.SeedSequence], Noise]
"""How an audited learner draws its noise."""

Tell = Callable[[float], None]
"""Is told, while something is done, what share of it is done."""

BYTES = 2**27
"""Of the messages that are held at a time."""


@dataclass(frozen=True, slots=True)
class Recording:
    """Some runs of one world.

    Attributes:
        world: 0 or 1.
        transcript: what was said.
        decisions: `(rounds, learners, replicas, dim)` in use when a round's records arrived; None: not published.
        channel: what else crossed the wire, of every run, by view: sizes, times, metadata. Only real services have any.
    """

    world: int
    transcript: Transcript
    decisions: FloatArray | None = None
    channel: tuple[Mapping[str, Features], ...] = ()


def nobody(done: float) -> None:
    """Is told, and nothing comes of it."""


def within(tell: Tell, start: float, stop: float) -> Tell:
    """Is told how far a part of something is that reaches from one share of it to another."""
    return lambda done: tell(start + (stop - start) * done)


@dataclass(frozen=True, slots=True)
class Share:
    """Some of the runs to be made.

    Attributes:
        world: of all of them.
        runs: how many.
        seed: of their noise.
        pair: of worlds, by its place in `AuditPlan.pairs`.
        tell: is told how far they are, wherever they are made.
    """

    world: int
    runs: int
    seed: np.random.SeedSequence
    pair: int = 0
    tell: Tell = nobody


def children(seed: np.random.SeedSequence, count: int) -> list[np.random.SeedSequence]:
    """Independent seeds from one, the same ones whenever asked (`SeedSequence.spawn` counts)."""
    return np.random.SeedSequence(seed.entropy, spawn_key=seed.spawn_key, pool_size=seed.pool_size).spawn(count)


def shares(runs: int, most: int, seed: np.random.SeedSequence, pair: int = 0) -> list[Share]:
    """`2 runs` runs, each in a world that a fair coin chose, at most so many in a share; worlds take turns."""
    coins, *sources = children(seed, 3)
    seconds = int(np.random.default_rng(coins).binomial(2 * runs, 0.5))
    by_world = []
    for world, (count, source) in enumerate(zip((2 * runs - seconds, seconds), sources, strict=True)):
        sizes = [min(most, count - done) for done in range(0, count, most)]
        seeds = children(source, len(sizes))
        by_world.append([Share(world, size, own, pair) for size, own in zip(sizes, seeds, strict=True)])
    longest = max(map(len, by_world))
    return [own[k] for k in range(longest) for own in by_world if k < len(own)]


def overhear(
    run: Run,
    data: PlacedData,
    worlds: Worlds,
    share: Share,
    noise: NoiseOf,
    *,
    rounds: int | None = None,
    everybody: bool = False,
    decisions: bool = False,
) -> Recording:
    """Simulate a share of the runs.

    Args:
        run: what runs.
        data: of all learners; the holders' records are those of the world.
        worlds: the two worlds.
        share: of which world, and how many.
        noise: where the noise comes from.
        rounds: only the first ones (default: all).
        everybody: keep what all learners say, not only what a replay needs.
        decisions: keep all decisions, too.
    """
    kept = slice(None) if everybody else concerned(run, worlds)
    rounds = run.spec.rounds if rounds is None else rounds
    lead = (rounds, run.spec.n_learners, share.runs)
    # All else is left at zero, whose pages take no memory.
    said = {name: np.zeros((*lead, *shape)) for name, shape in run.field_shapes.items()}
    decided = np.empty((*lead, run.algorithm.dim)) if decisions else None
    known = worlds.data(data, share.world)
    for step in islice(simulate(run, known, noise(share.seed), share.runs), rounds):
        for name, values in said.items():
            values[step.t, kept] = step.message[name][kept]
        if decided is not None:
            decided[step.t] = step.before
        share.tell((step.t + 1) / rounds)
    return Recording(share.world, Transcript(said), decided)


def concerned(run: Run, worlds: Worlds) -> list[int]:
    """The learners whose messages a replay needs: the holders, and those that they ever hear."""
    holders = worlds.holders(run)
    mixings = [run.network.at(t) for t in range(run.spec.rounds)]
    heard = {j for mixing in mixings for i in holders for j in mixing.heard_by(i)}
    return sorted(heard.union(holders))


def numbers_of(run: Run) -> int:
    """Numbers that all learners say in a run."""
    said = sum(math.prod(shape) for shape in run.field_shapes.values())
    return run.spec.rounds * run.spec.n_learners * said


def at_a_time(run: Run, *, decisions: bool = False) -> int:
    """Of how many runs the messages fit into `BYTES`."""
    decided = run.spec.rounds * run.spec.n_learners * run.algorithm.dim if decisions else 0
    return max(1, BYTES // (8 * (numbers_of(run) + decided)))
