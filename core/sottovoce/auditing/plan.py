"""What is audited: the run, the two worlds, the listener, the claim, and how sure one wants to be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from sottovoce.arrays import FloatArray
from sottovoce.auditing.bounds import ceiling, runs_to_show
from sottovoce.auditing.levels import Levels
from sottovoce.auditing.listening import Listener, held, listener, of_decisions
from sottovoce.auditing.simulated import numbers_of
from sottovoce.auditing.swaps import others, worst
from sottovoce.auditing.worlds import Worlds
from sottovoce.data import PlacedData
from sottovoce.errors import SpecError
from sottovoce.privacy.guarantee import Guarantee, ThreatModel
from sottovoce.running.run import Run

_MOST_PAIRS = 3
"""Of worlds, beside the most telling one."""

_FEWEST = 24
"""Runs of each world of a pair: the fewest with which what gives the world away completely is surely seen."""


_CLOSE = 2**25
"""Numbers of an audit that are looked at for dependence, about."""


@dataclass(frozen=True, slots=True)
class _Seeds:
    """Independent randomness for every part of an audit."""

    rehearsal: np.random.SeedSequence
    audited: np.random.SeedSequence
    swept: np.random.SeedSequence
    black_box: np.random.SeedSequence
    twins: np.random.SeedSequence


@dataclass(frozen=True, slots=True)
class AuditPlan:
    """An audit that may start.

    Attributes:
        run: what is claimed to run.
        data: of all learners.
        worlds: the two worlds.
        guarantee: of this very swap.
        listener: who hears what.
        claim: `(rounds,)` cumulative epsilon that is held against what is heard.
        made_for: the threat model that the claim was made for.
        runs: of each world.
        levels: the chance of a false alarm, divided among all that is looked at.
        seeds: of everything random.
        paired: there are runs of both worlds. If not, all are of the first one, and nothing can be guessed.
        numbers: that all learners say in all runs of all pairs.
        beside: other pairs of worlds, each an audit with runs of its own, for what this pair may hide.
    """

    run: Run
    data: PlacedData
    worlds: Worlds
    guarantee: Guarantee
    listener: Listener
    claim: FloatArray
    made_for: ThreatModel
    runs: int
    levels: Levels
    seeds: _Seeds
    paired: bool = True
    numbers: int = 0
    beside: tuple[AuditPlan, ...] = ()

    @property
    def pairs(self) -> tuple[AuditPlan, ...]:
        """This pair of worlds, and the others."""
        return (self, *self.beside)

    @property
    def close(self) -> float:
        """The share of the runs that is looked at for dependence, which costs most."""
        return min(1.0, _CLOSE / max(1, self.numbers))

    @property
    def all_runs(self) -> int:
        """Runs of each world, of all pairs."""
        return sum(pair.runs for pair in self.pairs)

    @property
    def epsilon(self) -> float:
        """The claim over the whole run."""
        return self.claim_until(self.run.spec.rounds - 1)

    @property
    def epsilon_seen(self) -> float:
        """The claim over the rounds until the last one that the black box looks at."""
        return self.claim_until(int(self.listener.rounds[-1]))

    def claim_until(self, t: int) -> float:
        """The claim over the rounds 0..t; a sum is exact, as what learners are charged."""
        return self.guarantee.epsilon(t + 1) if self._of_messages else float(self.claim[t])

    @property
    def per_round(self) -> FloatArray:
        """`(rounds,)` the claim for single messages; one for published decisions has no parts, so each may be all of it."""
        return self.guarantee.per_round if self._of_messages else self.claim

    @property
    def _of_messages(self) -> bool:
        return self.guarantee.output is None or self.made_for is not ThreatModel.OUTPUT


def plan_audit(
    run: Run,
    data: PlacedData,
    learner: int,
    *,
    runs: int = 1000,
    confidence: float = 0.95,
    seed: int = 0,
    worlds: Worlds | Sequence[Worlds] | None = None,
    counts: Sequence[int] = (),
    threat: ThreatModel = ThreatModel.WIRE,
    neighbour: int | None = None,
    paired: bool = True,
) -> AuditPlan:
    """Choose the worlds, the listener and the claim.

    Args:
        run: what to run.
        data: of all learners.
        learner: its index.
        runs: of each world, on average, of all pairs of worlds together.
        confidence: with which a correct learner is not refuted, by all tests together.
        seed: of coins and noise.
        worlds: the two worlds, or several pairs, and no others (default: the swap that shows most, of those tried, and some
            others beside it).
        counts: runs of each world of every pair, where they are made already (default: `divided`).
        threat: who listens.
        neighbour: index of the neighbour that listens, at a neighbour.
        paired: there are to be runs of both worlds; False: so many of the first one.

    Raises:
        DataError: there is no record to swap, or the loss is not defined for one of the worlds'.
        SpecError: too few runs for this confidence, or nobody who could listen.
    """
    levels = Levels(1.0 - confidence)
    level = levels.of("likelihood", "whole runs")
    if paired and ceiling(runs, level) == 0.0:  # even right guesses only would show nothing: say how many it takes
        text = f"{runs} runs of each world show nothing at confidence {1.0 - levels.alpha:g}, however telling they are"
        raise SpecError(f"{text}: at least {runs_to_show(0.0, level)}")
    numbers = 2 * runs * numbers_of(run)
    choice, *seeds = np.random.SeedSequence(seed).spawn(6 + 5 * _MOST_PAIRS)
    chosen, *more = _pairs(run, data, learner, worlds, choice, paired=paired)

    def planned(each: Worlds, count: int, own: Sequence[np.random.SeedSequence]) -> AuditPlan:
        guarantee = each.guarantee(run)
        if threat is ThreatModel.OUTPUT:
            guarantee = of_decisions(guarantee, run, data, each, own[0])
        claim, made_for = held(guarantee, threat)
        hears = listener(run, each, guarantee, threat, neighbour)
        return AuditPlan(
            run, data, each, guarantee, hears, claim, made_for, count, levels, _Seeds(*own), paired, numbers
        )

    first, *rest = counts or divided(runs, len(more))
    beside = [
        planned(each, count, seeds[5 * k : 5 * k + 5])
        for k, (each, count) in enumerate(zip(more, rest, strict=False), 1)
    ]
    return replace(planned(chosen, first, seeds[:5]), beside=tuple(beside))


def _pairs(
    run: Run,
    data: PlacedData,
    learner: int,
    given: Worlds | Sequence[Worlds] | None,
    seed: np.random.SeedSequence,
    *,
    paired: bool,
) -> list[Worlds]:
    """Pairs of worlds: those given, or the most telling one and others beside it."""
    if given is None:
        chosen = worst(run, data, learner, seed, as_they_are=not paired)
        return [chosen, *(others(run, data, learner, chosen) if paired else [])]
    pairs = [given] if isinstance(given, Worlds) else list(given)
    for each in pairs:
        each.require_learnable(run.loss)
    return pairs


def divided(runs: int, others: int) -> list[int]:
    """Runs of each world for the most telling pair, and for as many of so many others as have enough to show a channel.

    A quarter, an eighth and an eighth are for the others, but no fewer than `_FEWEST`. The first of them, the loud record against
    the silent one, must be there wherever the most telling pair keeps as many; the rest, where that keeps half of the runs.
    """
    counts: list[int] = []
    for share, kept in ((4, _FEWEST), (8, runs / 2), (8, runs / 2))[:others]:
        count = max(runs // share, _FEWEST)
        if runs - sum(counts) - count >= kept:
            counts.append(count)
    return [runs - sum(counts), *counts]
