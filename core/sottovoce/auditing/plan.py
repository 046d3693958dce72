"""What is audited: the run, the two worlds, the listener, the claim, and how sure one wants to be."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sottovoce.arrays import FloatArray
from sottovoce.auditing.bounds import ceiling, runs_to_show
from sottovoce.auditing.levels import Levels
from sottovoce.auditing.listening import Listener, held, listener
from sottovoce.auditing.swaps import worst
from sottovoce.auditing.worlds import Worlds
from sottovoce.data import PlacedData
from sottovoce.errors import SpecError
from sottovoce.privacy.guarantee import Guarantee, ThreatModel
from sottovoce.running.run import Run


@dataclass(frozen=True, slots=True)
class _Seeds:
    """Independent randomness for every part of an audit."""

    rehearsal: np.random.SeedSequence
    audited: np.random.SeedSequence
    conformance: np.random.SeedSequence
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
    worlds: Worlds | None = None,
    threat: ThreatModel = ThreatModel.WIRE,
    neighbour: int | None = None,
    paired: bool = True,
) -> AuditPlan:
    """Choose the worlds, the listener and the claim.

    Args:
        run: what to run.
        data: of all learners.
        learner: its index.
        runs: of each world, on average.
        confidence: with which a correct learner is not refuted, by all tests together.
        seed: of coins and noise.
        worlds: the two worlds (default: the swap that shows most, of those tried).
        threat: who listens.
        neighbour: index of the neighbour that listens, at a neighbour.
        paired: there are to be runs of both worlds; False: so many of the first one.

    Raises:
        DataError: there is no record to swap.
        SpecError: too few runs for this confidence, or nobody who could listen.
    """
    levels = Levels(1.0 - confidence)
    level = levels.of("likelihood", "whole runs")
    if paired and ceiling(runs, level) == 0.0:  # even right guesses only would show nothing: say how many it takes
        text = f"{runs} runs of each world show nothing at confidence {1.0 - levels.alpha:g}, however telling they are"
        raise SpecError(f"{text}: at least {runs_to_show(0.0, level)}")
    choice, *seeds = np.random.SeedSequence(seed).spawn(6)
    worlds = worlds or worst(run, data, learner, choice, as_they_are=not paired)
    guarantee = worlds.guarantee(run)
    claim, made_for = held(guarantee, threat)
    hears = listener(run, worlds, guarantee, threat, neighbour)
    return AuditPlan(run, data, worlds, guarantee, hears, claim, made_for, runs, levels, _Seeds(*seeds), paired)
