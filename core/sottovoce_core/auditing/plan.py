"""What is audited: the run, the two worlds, the adversary and its view, the claim, and the confidence that is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from sottovoce_core.arrays import FloatArray, IntArray, as_floats
from sottovoce_core.auditing.blackbox import MAX_NUMBERS, MAX_ROUNDS
from sottovoce_core.auditing.bounds import AlphaAllocation, compute_max_provable_epsilon, compute_min_runs
from sottovoce_core.auditing.worlds import (
    RecordedRuns,
    RunChunk,
    Worlds,
    count_numbers,
    find_needed_learners,
    simulate_runs,
)
from sottovoce_core.auditing.worst_case_search import build_other_worlds, find_worst_worlds
from sottovoce_core.data import PlacedData
from sottovoce_core.errors import SpecError
from sottovoce_core.noise import SeededNoise
from sottovoce_core.privacy.guarantee import Guarantee, ThreatModel
from sottovoce_core.runs.replay import Replay
from sottovoce_core.runs.run import Run

# ---- the adversary ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Adversary:
    """A threat model, made definite.

    Attributes:
        threat: on every channel, at one neighbour, or to published decisions only.
        neighbour: index of the neighbour, at a neighbour only.
        replayable: it hears all that a replay needs, so the exact loss of what it hears is known.
        rounds: `(rounds seen,)` the rounds that a black box looks at: the first ones that cost anything.
    """

    threat: ThreatModel
    neighbour: int | None
    can_replay: bool
    visible_rounds: IntArray

    def extract_visible_numbers(self, part: RecordedRuns, worlds: Worlds, run: Run) -> FloatArray:
        """The first numbers of what a black box sees, all fields and holders side by side: `(runs, rounds, numbers)`."""
        if self.threat is ThreatModel.OUTPUT:
            assert part.decisions is not None  # noqa: S101 - whoever simulates for this listener keeps them
            fields, who = [part.decisions], list(range(run.spec.n_learners))
        else:
            fields = list(part.transcript.fields.values())
            who = [i for i in worlds.list_holders(run) if i != self.neighbour]
        most = max(1, MAX_NUMBERS // len(self.visible_rounds))
        flat = [
            f[self.visible_rounds].reshape(len(self.visible_rounds), *f.shape[1:3], -1)[:, who, :, :most]
            for f in fields
        ]
        # Coordinate by coordinate, the holders side by side: the first numbers are of all of them.
        side_by_side = np.concatenate([f.transpose(2, 0, 3, 1).reshape(f.shape[2], len(f), -1) for f in flat], axis=2)
        # Not-a-number where a learner was away: that is public.
        return as_floats(np.nan_to_num(side_by_side[:, :, :most]))


def _listener(
    run: Run, worlds: Worlds, guarantee: Guarantee, threat: ThreatModel, neighbour: int | None = None
) -> _Adversary:
    """Who listens.

    Args:
        run: what is run.
        worlds: the two worlds.
        guarantee: of this swap.
        threat: the threat model.
        neighbour: index of the neighbour that listens (default: the first one that hears the learner).

    Raises:
        SpecError: nobody hears the learner, or the listener holds the record itself.
    """
    costly = np.flatnonzero(guarantee.round_losses > 0) if threat is not ThreatModel.OUTPUT else _published(guarantee)
    rounds = costly[:MAX_ROUNDS] if len(costly) else np.arange(min(MAX_ROUNDS, run.spec.rounds))
    if threat is not ThreatModel.NEIGHBOUR:
        return _Adversary(threat, None, threat is ThreatModel.WIRE, rounds)
    if worlds.is_shared:
        raise SpecError(f"{run.algorithm.name}: all learners hold the record, so a neighbour knows it; audit the wire")
    mixings = [run.network.mixing(t) for t in range(run.spec.rounds)]
    hearers = [
        j for j in range(run.spec.n_learners) if any(worlds.learner in m.in_neighbour_weights(j) for m in mixings)
    ]
    names = run.spec.names
    if not hearers:
        raise SpecError(
            f"nobody ever hears {run.spec.names[worlds.learner]}, so no neighbour can listen: audit the wire"
        )
    if neighbour is not None and neighbour not in hearers:
        raise SpecError(
            f"the neighbour must be one of {', '.join(names[j] for j in hearers)}, who ever hear {names[worlds.learner]}"
        )
    neighbour = hearers[0] if neighbour is None else neighbour
    needed = set(find_needed_learners(run, worlds)) - {neighbour}
    return _Adversary(threat, neighbour, all(needed <= set(m.in_neighbour_weights(neighbour)) for m in mixings), rounds)


def _published(guarantee: Guarantee) -> IntArray:
    """Rounds, spread over the run, after the first one that costs anything."""
    claim, _ = select_claim(guarantee, ThreatModel.OUTPUT)
    costly = np.flatnonzero(claim > 0)
    first = int(costly[0]) if len(costly) else 0
    return np.unique(np.linspace(first, len(claim) - 1, MAX_ROUNDS).astype(np.int64))


def _of_decisions(
    guarantee: Guarantee, run: Run, data: PlacedData, worlds: Worlds, seed: np.random.SeedSequence
) -> Guarantee:
    """What is promised to somebody who sees published decisions.

    Decisions that follow from messages cost nothing beside these. About others nothing is promised, unless an algorithm says so.

    Args:
        guarantee: of this swap.
        run: what is run.
        data: of all learners.
        worlds: the two worlds.
        seed: of the noise of a run in which this is looked at.
    """
    if guarantee.output_epsilon is not None or _follow(run, data, worlds, seed):
        return guarantee
    return replace(guarantee, output_epsilon=np.full(run.spec.rounds, np.inf))


def _follow(run: Run, data: PlacedData, worlds: Worlds, seed: np.random.SeedSequence) -> bool:
    """Whether decisions are the same in both worlds, if the same was said."""
    said = simulate_runs(run, data, worlds, RunChunk(0, 1, seed), SeededNoise).transcript
    for holder in worlds.list_holders(run):
        machine = Replay(run, holder, worlds=2)
        for t in range(said.rounds):
            machine.step(
                said.messages(t, holder, machine.required_senders),
                *(worlds.get_records(world).batch(t) for world in (0, 1)),
            )
            first, second = np.broadcast_to(machine.decision, (2, 1, run.algorithm.dim))
            if not np.allclose(first, second, rtol=1e-9, atol=1e-12):
                return False
    return True


def select_claim(guarantee: Guarantee, threat: ThreatModel) -> tuple[FloatArray, ThreatModel]:
    """The claim to hold against what is heard, `(rounds,)` cumulative epsilon, and for whom it was made.

    Where nothing finite is promised about messages, but something about published decisions, that is held against the
    messages, too: it is all that is claimed.
    """
    if guarantee.output_epsilon is None:
        return guarantee.cumulative_epsilon, guarantee.basis.threat_model
    if threat is ThreatModel.OUTPUT or not np.isfinite(guarantee.cumulative_epsilon).all():
        return guarantee.output_epsilon, ThreatModel.OUTPUT
    return guarantee.cumulative_epsilon, guarantee.basis.threat_model


# ---- the plan --------------------------------------------------------------------------------------------------------

_MAX_OTHER_PAIRS = 3
"""Of worlds, beside the most telling one."""

_MIN_PAIR_RUNS = 24
"""Runs of each world of a pair: the fewest with which what gives the world away completely is surely seen."""


_MAX_DEPENDENCE_NUMBERS = 2**25
"""Numbers of an audit that are looked at for dependence, about."""


@dataclass(frozen=True, slots=True)
class _Seeds:
    """Independent randomness for every part of an audit."""

    rehearsal: np.random.SeedSequence
    audited_runs: np.random.SeedSequence
    sweep: np.random.SeedSequence
    black_box: np.random.SeedSequence
    coupled_runs: np.random.SeedSequence


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
    adversary: _Adversary
    claim: FloatArray
    claim_threat_model: ThreatModel
    runs: int
    alpha_allocation: AlphaAllocation
    seeds: _Seeds
    has_both_worlds: bool = True
    noise_count: int = 0
    other_pairs: tuple[AuditPlan, ...] = ()

    @property
    def pairs(self) -> tuple[AuditPlan, ...]:
        """This pair of worlds, and the others."""
        return (self, *self.other_pairs)

    @property
    def dependence_fraction(self) -> float:
        """The share of the runs that is looked at for dependence, which costs most."""
        return min(1.0, _MAX_DEPENDENCE_NUMBERS / max(1, self.noise_count))

    @property
    def total_runs(self) -> int:
        """Runs of each world, of all pairs."""
        return sum(pair.runs for pair in self.pairs)

    @property
    def epsilon(self) -> float:
        """The claim over the whole run."""
        return self.compute_claim_until(self.run.spec.rounds - 1)

    @property
    def visible_epsilon(self) -> float:
        """The claim over the rounds until the last one that the black box looks at."""
        return self.compute_claim_until(int(self.adversary.visible_rounds[-1]))

    def compute_claim_until(self, t: int) -> float:
        """The claim over the rounds 0..t; a sum is exact, as what learners are charged."""
        return self.guarantee.epsilon(t + 1) if self._of_messages else float(self.claim[t])

    @property
    def claim_per_round(self) -> FloatArray:
        """`(rounds,)` the claim for single messages; one for published decisions has no parts, so each may be all of it."""
        return self.guarantee.round_losses if self._of_messages else self.claim

    @property
    def _of_messages(self) -> bool:
        return self.guarantee.output_epsilon is None or self.claim_threat_model is not ThreatModel.OUTPUT


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
    has_both_worlds: bool = True,
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
    levels = AlphaAllocation(1.0 - confidence)
    level = levels.compute_level("likelihood", "whole runs")
    if (
        has_both_worlds and compute_max_provable_epsilon(runs, level) == 0.0
    ):  # even right guesses only would show nothing: say how many it takes
        text = f"{runs} runs of each world show nothing at confidence {1.0 - levels.alpha:g}, however telling they are"
        raise SpecError(f"{text}: at least {compute_min_runs(0.0, level)}")
    numbers = 2 * runs * count_numbers(run)
    choice, *seeds = np.random.SeedSequence(seed).spawn(6 + 5 * _MAX_OTHER_PAIRS)
    chosen, *more = _pairs(run, data, learner, worlds, choice, paired=has_both_worlds)

    def planned(each: Worlds, count: int, own: Sequence[np.random.SeedSequence]) -> AuditPlan:
        guarantee = each.compute_guarantee(run)
        if threat is ThreatModel.OUTPUT:
            guarantee = _of_decisions(guarantee, run, data, each, own[0])
        claim, made_for = select_claim(guarantee, threat)
        hears = _listener(run, each, guarantee, threat, neighbour)
        return AuditPlan(
            run, data, each, guarantee, hears, claim, made_for, count, levels, _Seeds(*own), has_both_worlds, numbers
        )

    first, *rest = counts or divide_runs(runs, len(more))
    beside = [
        planned(each, count, seeds[5 * k : 5 * k + 5])
        for k, (each, count) in enumerate(zip(more, rest, strict=False), 1)
    ]
    return replace(planned(chosen, first, seeds[:5]), other_pairs=tuple(beside))


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
        chosen = find_worst_worlds(run, data, learner, seed, keep_first_world=not paired)
        return [chosen, *(build_other_worlds(run, data, learner, chosen) if paired else [])]
    pairs = [given] if isinstance(given, Worlds) else list(given)
    for each in pairs:
        each.require_learnable(run.loss)
    return pairs


def divide_runs(runs: int, others: int) -> list[int]:
    """Runs of each world for the most telling pair, and for as many of so many others as have enough to show a channel.

    A quarter, an eighth and an eighth are for the others, but no fewer than `_MIN_PAIR_RUNS`. The first of them, the loud record against
    the silent one, must be there wherever the most telling pair keeps as many; the rest, where that keeps half of the runs.
    """
    counts: list[int] = []
    for share, kept in ((4, _MIN_PAIR_RUNS), (8, runs / 2), (8, runs / 2))[:others]:
        count = max(runs // share, _MIN_PAIR_RUNS)
        if runs - sum(counts) - count >= kept:
            counts.append(count)
    return [runs - sum(counts), *counts]
