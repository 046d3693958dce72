"""Which record to swap: the one, among those tried, that some simulated runs tell apart best."""

from __future__ import annotations

from itertools import chain, repeat

import numpy as np

from sottovoce.audit.simulated import Share, children, overhear
from sottovoce.audit.worlds import Worlds
from sottovoce.data import PlacedData
from sottovoce.errors import DataError
from sottovoce.noise import SeededNoise
from sottovoce.running.replay import SCREENED_ROUNDS, candidates
from sottovoce.running.run import Run

PILOT = 32
"""Runs by which swaps are compared."""

_VARIANTS = ("itself with the other label", "its mirror image", "its mirror image with the other label")
_ANOTHER = "a record of another learner"
"""What `replay.candidates` lists, in words: these, then the others."""


def worst(
    run: Run, data: PlacedData, learner: int, seed: np.random.SeedSequence, *, as_they_are: bool = False
) -> Worlds:
    """The swap of a learner's first record, among those tried, that some simulated runs tell apart best.

    Tried: the candidates of `replay.worst_swap`, and records on the loss's bound against their mirror image: a spike, all of
    whose weight is in one feature, and one that spreads it over all.

    Args:
        run: the run.
        data: of all learners.
        learner: its index.
        seed: of the simulated runs.
        as_they_are: the first world is that of the records as they are, not of one that was made up.

    Raises:
        DataError: the learner has no record, or there is no other one.
    """
    if not len(data.learners[learner].order):
        raise DataError(f"learner {learner} must have a record to swap, and has none")
    costly = np.flatnonzero(run.guarantee(learner).per_round)[:SCREENED_ROUNDS]
    rounds = min(int(costly[-1]) + 1 if len(costly) else run.spec.rounds, run.spec.rounds)
    best: tuple[float, Worlds] | None = None
    tried = _tried(run, data, learner)
    if as_they_are:
        tried = [[worlds for worlds in tried[0] if worlds.first is data.learners[learner]]]
        if not tried[0]:
            raise DataError(f"learner {learner}'s first record must have another one to be swapped for, and has none")
    for group, child in zip(tried, children(seed, len(tried)), strict=True):
        heard = overhear(run, data, group[0], Share(0, PILOT, child), SeededNoise, rounds=rounds)
        for worlds in group:
            total = worlds.losses(run, heard.transcript).sum(axis=0)
            strength = float(np.nan_to_num(np.abs(total), nan=0.0, posinf=np.inf).mean())
            if best is None or strength > best[0]:
                best = strength, worlds
    assert best is not None  # noqa: S101 - there is always a swap
    return best[1]


def _tried(run: Run, data: PlacedData, learner: int) -> list[list[Worlds]]:
    """Swaps of a learner's first use of a record; those of a group share the first world."""
    own = data.learners[learner]
    shared = run.algorithm.accountant(learner).shared
    row, n = int(own.order[0]), data.n_features
    label = max(own.labels.tolist(), key=abs)
    bound = run.loss.feature_bound
    size = bound if np.isfinite(bound) else float(np.linalg.norm(own.features, axis=1).max())
    spike, spread = size * np.eye(n)[0], np.full(n, size / np.sqrt(n))
    others = [
        Worlds(learner, own, own.with_use(0, features, other), f"the first record against {what}", shared)
        for what, (features, other) in zip(chain(_VARIANTS, repeat(_ANOTHER)), candidates(data, learner), strict=False)
        if other != own.labels[row] or (features != own.features[row]).any()
    ]
    mirrored = [
        [Worlds(learner, own.with_use(0, record, label), own.with_use(0, -record, label), what, shared)]
        for record, what in (
            (spike, "a first record with all weight in one feature, against its mirror image"),
            (spread, "a first record with equal weight in all features, against its mirror image"),
        )
    ]
    return [others or mirrored[0], *mirrored]
