"""Plan of an audit: the run, the two worlds, the adversary and its view, the claim, and the required confidence."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from sottovoce_core.arrays import FloatArray, IntArray, as_floats, summarize_fields
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
from sottovoce_core.privacy.loss import PURE, PrivacyLoss
from sottovoce_core.runs.replay import Replay
from sottovoce_core.runs.run import Run

# ---- adversary -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Adversary:
    """Adversary of a threat model in a given run.

    Attributes:
        threat: view of the adversary: every channel, one neighbour, or published decisions only.
        neighbour: index of the neighbour, for a neighbour only.
        can_replay: True if its view suffices for a replay, so that the exact loss of the view is known.
        visible_rounds: `(visible rounds,)` rounds that the black box uses: the first ones with a privacy cost.
    """

    threat: ThreatModel
    neighbour: int | None
    can_replay: bool
    visible_rounds: IntArray

    def extract_visible_numbers(self, part: RecordedRuns, worlds: Worlds, run: Run) -> FloatArray:
        """Extract the first numbers that the black box sees, all fields and holders concatenated: `(runs, rounds, numbers)`."""
        if self.threat is ThreatModel.OUTPUT:
            assert part.decisions is not None  # noqa: S101 - simulations for this adversary keep decisions
            fields, learners = [part.decisions], list(range(run.spec.n_learners))
        else:
            fields = list(part.transcript.fields.values())
            learners = [i for i in worlds.list_holders(run) if i != self.neighbour]
        max_numbers = max(1, MAX_NUMBERS // len(self.visible_rounds))
        flat = [
            field[self.visible_rounds].reshape(len(self.visible_rounds), *field.shape[1:3], -1)[
                :, learners, :, :max_numbers
            ]
            for field in fields
        ]
        # Holders vary fastest, so that the first numbers contain all of them.
        concatenated = np.concatenate(
            [field.transpose(2, 0, 3, 1).reshape(field.shape[2], len(field), -1) for field in flat], axis=2
        )
        # Not-a-number where a learner was offline, which is public.
        return as_floats(np.nan_to_num(concatenated[:, :, :max_numbers]))


def _build_adversary(
    run: Run, worlds: Worlds, guarantee: Guarantee, threat: ThreatModel, neighbour: int | None = None
) -> _Adversary:
    """Build the adversary of the threat model.

    Args:
        run: run to audit.
        worlds: the two worlds.
        guarantee: guarantee for this replacement.
        threat: threat model.
        neighbour: index of the neighbour that is the adversary (default: the first out-neighbour of the learner).

    Raises:
        SpecError: the learner has no out-neighbour, or the adversary holds the record itself.
    """
    is_output = threat is ThreatModel.OUTPUT
    costly = _select_published_rounds(guarantee) if is_output else np.flatnonzero(guarantee.round_losses > 0)
    rounds = costly[:MAX_ROUNDS] if len(costly) else np.arange(min(MAX_ROUNDS, run.spec.rounds))
    if threat is not ThreatModel.NEIGHBOUR:
        return _Adversary(threat, None, threat is ThreatModel.WIRE, rounds)
    if worlds.is_shared:
        raise SpecError(f"{run.algorithm.name}: all learners hold the record, so a neighbour knows it; audit the wire")
    mixings = [run.network.mixing(t) for t in range(run.spec.rounds)]
    receivers = [
        j
        for j in range(run.spec.n_learners)
        if any(worlds.learner in mixing.in_neighbour_weights(j) for mixing in mixings)
    ]
    names = run.spec.names
    if not receivers:
        raise SpecError(
            f"the audited learner must have an out-neighbour, but {run.spec.names[worlds.learner]} has none: audit the wire"
        )
    if neighbour is not None and neighbour not in receivers:
        raise SpecError(
            f"the neighbour must be an out-neighbour of {names[worlds.learner]}, one of "
            f"{', '.join(names[j] for j in receivers)}; got {names[neighbour]}"
        )
    neighbour = receivers[0] if neighbour is None else neighbour
    needed = set(find_needed_learners(run, worlds)) - {neighbour}
    return _Adversary(
        threat, neighbour, all(needed <= set(mixing.in_neighbour_weights(neighbour)) for mixing in mixings), rounds
    )


def _select_published_rounds(guarantee: Guarantee) -> IntArray:
    """Select rounds, spread over the run, after the first one with a privacy cost."""
    claim, _ = select_claim(guarantee, ThreatModel.OUTPUT)
    costly = np.flatnonzero(claim > 0)
    first = int(costly[0]) if len(costly) else 0
    return np.unique(np.linspace(first, len(claim) - 1, MAX_ROUNDS).astype(np.int64))


def _add_output_claim(
    guarantee: Guarantee, run: Run, data: PlacedData, worlds: Worlds, seed: np.random.SeedSequence
) -> Guarantee:
    """Return the guarantee for an adversary that sees published decisions.

    Decisions that follow from messages have no additional cost. For other decisions there is no claim, unless an algorithm
    states one.

    Args:
        guarantee: guarantee for this replacement.
        run: run to audit.
        data: records of all learners.
        worlds: the two worlds.
        seed: seed of the noise of the run that is checked.
    """
    if guarantee.output_epsilon is not None or _are_decisions_determined(run, data, worlds, seed):
        return guarantee
    return replace(guarantee, output_epsilon=np.full(run.spec.rounds, np.inf))


def _are_decisions_determined(run: Run, data: PlacedData, worlds: Worlds, seed: np.random.SeedSequence) -> bool:
    """Return whether equal messages give equal decisions in both worlds."""
    transcript = simulate_runs(run, data, worlds, RunChunk(0, 1, seed), SeededNoise).transcript
    for holder in worlds.list_holders(run):
        machine = Replay(run, holder, worlds=2)
        for t in range(transcript.rounds):
            machine.step(
                transcript.messages(t, holder, machine.required_senders),
                *(worlds.get_records(world).batch(t) for world in (0, 1)),
            )
            first, second = np.broadcast_to(machine.decision, (2, 1, run.algorithm.dim))
            if not np.allclose(first, second, rtol=1e-9, atol=1e-12):
                return False
    return True


def select_claim(guarantee: Guarantee, threat: ThreatModel) -> tuple[FloatArray, ThreatModel]:
    """Select the claim to test, `(rounds,)` cumulative epsilon, and the threat model it was made for.

    If there is no finite claim for messages, but one for published decisions, the messages are tested against that one: it is
    the only claim.
    """
    if guarantee.output_epsilon is None:
        return guarantee.cumulative_epsilon, guarantee.basis.threat_model
    if threat is ThreatModel.OUTPUT or not np.isfinite(guarantee.cumulative_epsilon).all():
        return guarantee.output_epsilon, ThreatModel.OUTPUT
    return guarantee.cumulative_epsilon, guarantee.basis.threat_model


# ---- plan ------------------------------------------------------------------------------------------------------------

_MAX_OTHER_PAIRS = 3
"""Maximum number of pairs of worlds besides the most revealing one."""

_MIN_PAIR_RUNS = 24
"""Minimum number of runs of each world of a pair: enough to detect a complete disclosure of the world with certainty."""


_MAX_DEPENDENCE_NUMBERS = 2**25
"""Approximate number of noise values of an audit that are tested for dependence."""


@dataclass(frozen=True, slots=True)
class _Seeds:
    """Independent randomness for every part of an audit."""

    rehearsal: np.random.SeedSequence
    audited_runs: np.random.SeedSequence
    sweep: np.random.SeedSequence
    black_box: np.random.SeedSequence
    coupled_runs: np.random.SeedSequence

    __repr__ = summarize_fields


@dataclass(frozen=True, slots=True)
class AuditPlan:
    """Plan of an audit that is ready to start.

    Attributes:
        run: claimed run.
        data: records of all learners.
        worlds: the two worlds.
        guarantee: guarantee for this replacement.
        adversary: adversary and its view.
        claim: `(rounds,)` cumulative epsilon to test.
        claim_threat_model: threat model that the claim was made for.
        runs: number of runs of each world.
        alpha_allocation: probability of a false alarm, divided among all tests and bounds.
        seeds: seeds of everything random.
        has_both_worlds: True if there are runs of both worlds. If not, all are of world 0, and nothing can be guessed.
        noise_count: number of values that all learners send in all runs of all pairs.
        other_pairs: other pairs of worlds, each an audit with runs of its own, for effects that this pair may hide.
        delta: delta at which the claim on messages is tested, too; 0: it is not.
        epsilon_at_delta: claim over the whole run at this delta.
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
    delta: float = 0.0
    epsilon_at_delta: float = math.inf

    __repr__ = summarize_fields

    @property
    def pairs(self) -> tuple[AuditPlan, ...]:
        """This pair of worlds, and the others."""
        return (self, *self.other_pairs)

    @property
    def dependence_fraction(self) -> float:
        """Fraction of the runs that is tested for dependence, the most expensive test."""
        return min(1.0, _MAX_DEPENDENCE_NUMBERS / max(1, self.noise_count))

    @property
    def total_runs(self) -> int:
        """Number of runs of each world, of all pairs."""
        return sum(pair.runs for pair in self.pairs)

    @property
    def epsilon(self) -> float:
        """Claim over the whole run."""
        return self.compute_claim_until(self.run.spec.rounds - 1)

    @property
    def visible_epsilon(self) -> float:
        """Claim over the rounds until the last one that the black box uses."""
        return self.compute_claim_until(int(self.adversary.visible_rounds[-1]))

    def compute_claim_until(self, t: int) -> float:
        """Compute the claim over the rounds 0..t; a sum is exact, as in the learners' ledgers."""
        return self.guarantee.epsilon(t + 1) if self._is_claim_on_messages else float(self.claim[t])

    @property
    def claim_per_round(self) -> FloatArray:
        """`(rounds,)` claim for single messages; a claim for published decisions has no parts, so each may be all of it."""
        return self.guarantee.round_losses if self._is_claim_on_messages else self.claim

    @property
    def _is_claim_on_messages(self) -> bool:
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
    delta: float = 0.0,
) -> AuditPlan:
    """Choose the worlds, the adversary and the claim.

    Args:
        run: run to audit.
        data: records of all learners.
        learner: index of the audited learner.
        runs: number of runs of each world, on average, of all pairs of worlds together.
        confidence: probability that a correct learner is not refuted, by all tests together.
        seed: seed of coins and noise.
        worlds: the two worlds, or several pairs, and no others (default: the most revealing replacement among those tried, and
            some others).
        counts: runs of each world of every pair, if they exist already (default: `divide_runs`).
        threat: threat model of the adversary.
        neighbour: index of the neighbour that is the adversary.
        has_both_worlds: make runs of both worlds; False: the same number of world 0 only.
        delta: delta at which the claim on messages is tested, too; 0: it is not.

    Raises:
        DataError: there is no record to replace, or the loss is not defined for a record of one of the worlds.
        SpecError: too few runs for this confidence, no possible adversary, or a delta that is not at least 0 and below 1.
    """
    levels = AlphaAllocation(1.0 - confidence)
    level = levels.compute_level("likelihood", "whole runs", 2 if delta else 1)
    if (
        has_both_worlds and compute_max_provable_epsilon(runs, level) == 0.0
    ):  # even correct guesses only would show nothing
        needed = f"an audit at confidence {1.0 - levels.alpha:g} needs at least {compute_min_runs(0.0, level)} runs of each world"
        raise SpecError(f"{needed}, got {runs}: with fewer, no result can refute the claim")
    numbers = 2 * runs * count_numbers(run)
    choice, *seeds = np.random.SeedSequence(seed).spawn(6 + 5 * _MAX_OTHER_PAIRS)
    chosen, *others = _choose_pairs(run, data, learner, worlds, choice, has_both_worlds=has_both_worlds)

    def plan_pair(each: Worlds, count: int, own: Sequence[np.random.SeedSequence]) -> AuditPlan:
        guarantee = each.compute_guarantee(run)
        if threat is ThreatModel.OUTPUT:
            guarantee = _add_output_claim(guarantee, run, data, each, own[0])
        claim, claim_threat_model = select_claim(guarantee, threat)
        adversary = _build_adversary(run, each, guarantee, threat, neighbour)
        return AuditPlan(
            run,
            data,
            each,
            guarantee,
            adversary,
            claim,
            claim_threat_model,
            count,
            levels,
            _Seeds(*own),
            has_both_worlds,
            numbers,
            delta=delta,
            epsilon_at_delta=_compute_claim_at_delta(run, each.learner, guarantee, delta),
        )

    first, *rest = counts or divide_runs(runs, len(others))
    other_pairs = [
        plan_pair(each, count, seeds[5 * k : 5 * k + 5])
        for k, (each, count) in enumerate(zip(others, rest, strict=False), 1)
    ]
    return replace(plan_pair(chosen, first, seeds[:5]), other_pairs=tuple(other_pairs))


def _compute_claim_at_delta(run: Run, learner: int, guarantee: Guarantee, delta: float) -> float:
    """Compute epsilon at a delta of all messages, for the replacement of a guarantee.

    Raises:
        SpecError: the delta is not at least 0 and below 1.
    """
    accountant, pure = run.algorithm.accountant(learner), guarantee.epsilon()
    # Of several units that no accountant follows, sums of losses are known, which are convex for Laplace noise only.
    is_followed = accountant.can_track_replacements or guarantee.n_replaced in (None, 1)
    is_convex = accountant.has_dominating_losses and accountant.mechanism.n_coordinates > 0
    if (accountant.has_dominating_losses and is_followed) or accountant.can_track_replacements or is_convex:
        return PrivacyLoss(pure, accountant.mechanism.sum_renyi(guarantee.round_losses)).epsilon(delta)
    return PURE.loss(pure).epsilon(delta)


def _choose_pairs(
    run: Run,
    data: PlacedData,
    learner: int,
    given: Worlds | Sequence[Worlds] | None,
    seed: np.random.SeedSequence,
    *,
    has_both_worlds: bool,
) -> list[Worlds]:
    """Return the given pairs of worlds, or the most revealing one and others."""
    if given is None:
        worst = find_worst_worlds(run, data, learner, seed, keep_first_world=not has_both_worlds)
        return [worst, *(build_other_worlds(run, data, learner, worst) if has_both_worlds else [])]
    pairs = [given] if isinstance(given, Worlds) else list(given)
    for each in pairs:
        each.require_learnable(run.loss)
    return pairs


def divide_runs(runs: int, others: int) -> list[int]:
    """Divide the runs of each world among the most revealing pair and those others that get enough runs to show a channel.

    The others get a quarter, an eighth and an eighth, but at least `_MIN_PAIR_RUNS`. The first of them, the record of maximum
    norm against the one of minimum norm, is included if the most revealing pair keeps as many; the rest, if that pair keeps
    half of the runs.
    """
    counts: list[int] = []
    for divisor, min_kept in ((4, _MIN_PAIR_RUNS), (8, runs / 2), (8, runs / 2))[:others]:
        count = max(runs // divisor, _MIN_PAIR_RUNS)
        if runs - sum(counts) - count >= min_kept:
            counts.append(count)
    return [runs - sum(counts), *counts]
