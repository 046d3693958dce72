"""How much is bet on what: the mixture of all bets, since round 0 and in blocks of rounds, for each learner and for all.

Half of the stake is on the learners, evenly, and half on all of them together: on the same sums added up over learners,
which sees what is slight in all, and on what they have in common in one round, of which nobody can say whose fault it is.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sottovoce.arrays import FloatArray
from sottovoce.lab.watch.bet import Bet
from sottovoce.lab.watch.bets import Histogram, LowBits, Repeats, Scale, Shared
from sottovoce.lab.watch.dependence import Copies, FarLag, Lag, OwnLag, Past
from sottovoce.lab.watch.seen import Seen
from sottovoce.lab.watch.sequential import Detector, mixture

BLOCKS = (16, 256)
"""Rounds of the detectors' blocks: short ones see what is gross soon, long ones what is slight at all."""

OWN: tuple[tuple[Bet, float], ...] = (
    (Scale(), 0.2),
    (Histogram(), 0.1),
    (LowBits(), 0.1),
    (Lag(), 0.25),
    (FarLag(), 0.05),
    (Past(), 0.1),
    (Repeats(), 0.2),
)
"""Bets on each learner, and their shares of its stake."""

POOLED: tuple[tuple[Bet, float], ...] = (
    (Scale(), 0.25),
    (Histogram(), 0.1),
    (LowBits(), 0.1),
    (OwnLag(), 0.15),
    (Past(), 0.05),
)
"""Bets on the sums of all learners, and their shares of the stake on all together."""

SHARED: tuple[tuple[Bet, float], ...] = ((Copies(), 0.25), (Shared(), 0.1))
"""Bets on every learner beside those before it in the same round: the mean over learners; shares as in `POOLED`."""


@dataclass(frozen=True, slots=True)
class Gain:
    """E-values now; columns: all learners together, and every learner.

    Attributes:
        e: `(1 + learners,)` logarithms, since round 0.
        change: the same of the mean of all detectors.
        tests: which bet has gained most since round 0.
        changed: which has of late.
    """

    e: FloatArray
    change: FloatArray
    tests: tuple[str, ...]
    changed: tuple[str, ...]


class Stakes:
    """The sums of all bets; row 0 since round 0, then those of the blocks.

    Args:
        learners: how many are watched.
    """

    def __init__(self, learners: int) -> None:
        self._sums: dict[type[Bet], FloatArray] = {}
        self._detectors = tuple(Detector(1 + learners) for _ in BLOCKS)
        self._rounds = 0
        self._bets = tuple({type(bet): bet for bet, _ in (*OWN, *POOLED, *SHARED)}.values())
        self._now: FloatArray = np.zeros((1 + len(BLOCKS), 1 + learners))

    def add(self, seen: Seen) -> Gain:
        """A round more."""
        self._begin_blocks()
        for bet in self._bets:
            added = bet.sums(seen)
            kept = self._sums.setdefault(type(bet), np.zeros((1 + len(BLOCKS), *added.shape)))
            kept += added
        self._rounds += 1
        return self._gain()

    def _begin_blocks(self) -> None:
        for k, (length, detector) in enumerate(zip(BLOCKS, self._detectors, strict=True), 1):
            if self._rounds and self._rounds % length == 0:
                detector.add(self._now[k])
                for kept in self._sums.values():
                    kept[k] = 0.0

    def _gain(self) -> Gain:
        own = [bet.e(self._sums[type(bet)]) for bet, _ in OWN]
        pooled = [bet.e(self._sums[type(bet)].sum(axis=1)) for bet, _ in POOLED]
        shared = [mixture(bet.e(self._sums[type(bet)])) for bet, _ in SHARED]
        on_all, on_each = np.stack([*pooled, *shared], axis=-1), np.stack(own, axis=-1)
        self._now = np.concatenate(
            [mixture(on_all, _shares(*POOLED, *SHARED))[:, None], mixture(on_each, _shares(*OWN))], axis=1
        )
        late = np.stack([each.with_next(now) for each, now in zip(self._detectors, self._now[1:], strict=True)])
        return Gain(
            e=self._now[0],
            change=mixture(late.T),
            tests=self._strongest(on_all[0], on_each[0]),
            changed=self._strongest(on_all[1:].max(axis=0), on_each[1:].max(axis=0)),
        )

    def _strongest(self, on_all: FloatArray, on_each: FloatArray) -> tuple[str, ...]:
        all_names = [bet.name for bet, _ in (*POOLED, *SHARED)]
        own_names = [bet.name for bet, _ in OWN]
        return all_names[int(on_all.argmax())], *(own_names[k] for k in on_each.argmax(axis=-1))


def _shares(*bets: tuple[Bet, float]) -> FloatArray:
    return np.array([share for _, share in bets])
