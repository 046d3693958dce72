"""Mutants that leak beside their numbers, and mutants whose messages should never be."""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from sottovoce_core.algorithms.interface import LatticeAlgorithm
from sottovoce_core.algorithms.run_context import broadcast_to_learners
from sottovoce_core.arrays import FloatArray
from sottovoce_core.auditing.online_checks import CapturedMessage, ExpectedTraffic, OnlineChecks
from sottovoce_core.auditing.plan import AuditPlan
from sottovoce_core.auditing.worlds import RunChunk, simulate_runs, spawn_seeds
from sottovoce_core.errors import SpecError
from sottovoce_core.losses import mean_gradient
from sottovoce_core.noise import SeededNoise
from sottovoce_core.runs.run import Run
from sottovoce_lab.mutants import (
    MAX_QUICK_RUNS,
    MAX_RUNS,
    Family,
    Fault,
    Mutant,
    WorldsFactory,
    build_spike_worlds,
    restrict_fault,
)

# ---- side channels ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Inside:
    """What an implementation knows, of some runs of one world, and may give away beside its noised numbers.

    Attributes:
        plan: the audit.
        world: 0 or 1.
        gradients: `(rounds, runs, numbers)` of the audited learner's records, at its model in use.
        generator: of anything random.
    """

    plan: AuditPlan
    world: int
    gradients: FloatArray
    generator: np.random.Generator

    @property
    def norms(self) -> FloatArray:
        """`(runs, rounds)` of the gradients."""
        norms: FloatArray = np.linalg.norm(self.gradients, axis=2).T
        return norms


def _look_inside(plan: AuditPlan, share: RunChunk) -> _Inside:
    """Some runs of the simulator, as they look from inside."""
    plan = plan.pairs[share.pair_index]
    runs, _, other = spawn_seeds(share.seed, 3)
    same, learner = RunChunk(share.world, share.runs, runs), plan.worlds.learner
    decisions = simulate_runs(plan.run, plan.data, plan.worlds, same, SeededNoise, keep_decisions=True).decisions
    assert decisions is not None  # noqa: S101 - asked for
    gradients = [_gradient(plan, share.world, t, said[learner]) for t, said in enumerate(decisions)]
    return _Inside(plan, share.world, np.stack(gradients), np.random.default_rng(other))


def _gradient(plan: AuditPlan, world: int, t: int, point: FloatArray) -> FloatArray:
    """Of a round's records, as the learner computes it, at `point (runs, dim)`."""
    batch, loss = plan.worlds.get_records(world).batch(t), plan.run.loss
    features, labels = loss.enforce_bounds(batch.features, batch.labels)
    return mean_gradient(loss, point, replace(batch, features=features, labels=labels))


def _some_are_zero(plan: AuditPlan) -> bool:
    """Whether a number of a gradient is zero in some run of some pair of worlds."""
    shares = (
        RunChunk(world, MAX_QUICK_RUNS, pair.seeds.audited_runs, k)
        for k, pair in enumerate(plan.pairs)
        for world in (0, 1)
    )
    return any(bool(np.any(_look_inside(plan, share).gradients == 0.0)) for share in shares)


def _packed(inside: _Inside) -> FloatArray:
    """Bytes of every message, which are compressed: a larger gradient costs some more, and so does chance."""
    return np.rint(200.0 + 8.0 * inside.norms + inside.generator.normal(0.0, 4.0, inside.norms.shape))


def _delays(inside: _Inside, extra: float, jitter: float) -> FloatArray:
    """Milliseconds of every round: 1, some more for a record that must be scaled down, and jitter."""
    own, bound = inside.plan.worlds.get_records(inside.world), inside.plan.run.loss.feature_bound
    rounds, runs = inside.gradients.shape[:2]
    slow = [np.count_nonzero(np.linalg.norm(own.batch(t).features, axis=1) > bound) for t in range(rounds)]
    return 1.0 + extra * np.array(slow, np.float64) + inside.generator.exponential(jitter, (runs, rounds))


def _waits(inside: _Inside, factor: float) -> FloatArray:
    """Milliseconds of every round, longer by a factor times the gradient's norm; and jitter of one."""
    return 1.0 + factor * inside.norms + inside.generator.exponential(1.0, inside.norms.shape)


def _order(inside: _Inside) -> FloatArray:
    """Which of two neighbours is told first: by the sign of the gradient's largest number, seven times in eight."""
    largest = np.take_along_axis(inside.gradients, np.abs(inside.gradients).argmax(axis=2)[..., None], axis=2)
    fair = inside.generator.random(inside.norms.shape) < 0.25
    chance = inside.generator.random(inside.norms.shape) < 0.5
    return np.where(fair, chance, largest[..., 0].T > 0.0).astype(np.float64)


def _failures(inside: _Inside, share: float) -> FloatArray:
    """Messages of a run: in some runs of one world the learner fails after the first."""
    runs = inside.gradients.shape[1]
    failed = (inside.generator.random((runs, 1)) < share) & (inside.world == 0)
    return np.where(failed, 1.0, float(inside.plan.run.spec.rounds))


def _status(inside: _Inside) -> FloatArray:
    """Characters of the status text, which names a first record that had to be scaled down; half of the time it is cut."""
    own, bound = inside.plan.worlds.get_records(inside.world), inside.plan.run.loss.feature_bound
    runs = inside.gradients.shape[1]
    scaled = np.any(np.linalg.norm(own.batch(0).features, axis=1) > bound)
    cut = inside.generator.random((runs, 1)) < 0.5
    return np.where(cut | (not scaled), 2.0, 24.0)


_QUIET = "ldp-dol, epsilon 1"
"""The less is claimed, the fewer runs show that more is given away."""

_BEYOND = build_spike_worlds(2.0, 0.0)
"""For what only a record shows that must be scaled down; no audit has one of its own."""


def _leak(
    name: str,
    what: str,
    leak: Callable[[_Inside], FloatArray],
    runs: int = MAX_RUNS,
    *,
    swap: WorldsFactory | None = None,
    quick: bool = False,
) -> Mutant:
    def breaks(plan: AuditPlan) -> Fault:
        return Fault(compute_leak=lambda plan, share: leak(_look_inside(plan, share)))

    return Mutant(name, what, breaks, "black box", runs, _QUIET, swap, "beside the numbers", quick=quick)


_length = _leak(
    "length",
    "zero gradients are not sent",
    lambda inside: 16.0 + 9.0 * np.count_nonzero(inside.gradients, axis=2).T,
    500,
    quick=True,
)

# ---- what is said ----------------------------------------------------------------------------------------------------


class _Spoken:
    """All messages of one run, in order, and what else a broken learner could have said.

    Args:
        plan: the audit.

    Attributes:
        messages: of the first of two runs in one world with the noise that is claimed. Until a learner's first noise, their
            states are equal.
    """

    def __init__(self, plan: AuditPlan) -> None:
        self.plan = plan
        share = RunChunk(0, 2, plan.seeds.sweep)
        self._both = simulate_runs(
            plan.run, plan.data, plan.worlds, share, SeededNoise, keep_all_learners=True
        ).transcript
        rounds = range(self._both.rounds)
        self.messages = [self.said(t, i, j) for t in rounds for i, j in _channels(plan.run, t)]

    def said(self, t: int, sender: int, receiver: int, replica: int = 0) -> CapturedMessage:
        """One message on its channel."""
        fields = {name: value[0, replica] for name, value in self._both.message(t, sender).fields.items()}
        body = b"".join(value.tobytes() for value in fields.values())
        return CapturedMessage(sender, receiver, 1, sender, t, fields, hashlib.sha256(body).digest(), len(body))

    @property
    def first(self) -> CapturedMessage:
        """The audited learner's first message with noise.

        Raises:
            SpecError: there is none, or nobody hears it.
        """
        learner = self.plan.worlds.learner
        for said in self.messages:
            if said.sender == learner and self.said(said.round, learner, said.receiver, 1).digest != said.digest:
                return said
        raise SpecError("the learner says nothing that carries noise")


def _channels(run: Run, t: int) -> list[tuple[int, int]]:
    """Senders and receivers of a round."""
    mixing, n = run.network.mixing(t), run.spec.n_learners
    return [(sender, receiver) for receiver in range(n) for sender in mixing.in_neighbour_weights(receiver)]


def _retried(spoken: _Spoken) -> list[CapturedMessage]:
    """After a reconnect a round is said once more, with fresh noise on the same state."""
    first = spoken.first
    anew = replace(spoken.said(first.round, first.sender, first.receiver, 1), stream=2)
    return [each for said in spoken.messages for each in ((said, anew) if said is first else (said,))]


def _two_faced(spoken: _Spoken) -> list[CapturedMessage]:
    """One neighbour hears other noise than the rest.

    Raises:
        SpecError: the learner has one hearer only.
    """
    first = spoken.first
    alike = [said for said in spoken.messages if (said.sender, said.round) == (first.sender, first.round)]
    if len(alike) < 2:
        raise SpecError("only one learner hears the audited one")
    other = alike[-1]
    anew = spoken.said(other.round, other.sender, other.receiver, 1)
    return [anew if said is other else said for said in spoken.messages]


def _forgetful(spoken: _Spoken) -> list[CapturedMessage]:
    """The learner stops where its budget ends, is restarted, has forgotten what it spent, and goes on for as much again.

    Raises:
        SpecError: there is no budget, or not enough rounds to spend it twice.
    """
    plan, learner = spoken.plan, spoken.plan.worlds.learner
    budget = _budgets(plan.run)[learner]
    counts = np.diff(plan.data.learners[learner].offsets)
    spent = plan.run.guarantee(learner, counts).cumulative_epsilon
    if spent[-1] <= budget:
        raise SpecError("privacy.budget is enough for the whole run")
    stopped = int(np.searchsorted(spent, budget, side="right"))
    before = spent[stopped - 1] if stopped else 0.0
    ended = int(np.searchsorted(spent - before, budget, side="right"))
    if ended == stopped:
        raise SpecError("the budget is enough for no round after a restart")
    return [said for said in spoken.messages if said.sender != learner or said.round < ended]


def _budgets(run: Run) -> tuple[float, ...]:
    """Of all learners.

    Raises:
        SpecError: the spec has none.
    """
    if run.spec.privacy.budget is None:
        raise SpecError("the spec has no privacy.budget")
    return tuple(broadcast_to_learners(run.spec.privacy.budget, run.spec.n_learners, "privacy.budget"))


# ---- what is noticed -------------------------------------------------------------------------------------------------


def _notices(heard: Sequence[CapturedMessage], plan: AuditPlan) -> dict[Family, str]:
    """What is wrong with messages whatever their numbers: family to a sentence."""
    algorithm, found = plan.run.algorithm, dict[Family, str]()
    noticing = OnlineChecks(
        ExpectedTraffic(lattice_spacings=algorithm.lattice_spacings)
        if isinstance(algorithm, LatticeAlgorithm)
        else ExpectedTraffic()
    )
    if findings := [finding.text for said in heard for finding in noticing.check_message(said)]:
        found["notices"] = findings[0]
    if spent := _overspent(heard, plan):
        found["ledger"] = spent[0]
    return found


def _overspent(messages: Sequence[CapturedMessage], plan: AuditPlan) -> list[str]:
    """Learners whose messages claim more epsilon than their budget, whatever they remember of it; none without a budget.

    A message costs what the claim says of its round; other bytes in the same round are another message.
    """
    if plan.run.spec.privacy.budget is None:
        return []
    said: dict[int, set[tuple[int, bytes]]] = defaultdict(set)
    for each in messages:
        said[each.sender].add((each.round, each.digest))
    found = []
    for learner, budget in enumerate(_budgets(plan.run)):
        counts = np.diff(plan.data.learners[learner].offsets)
        price = plan.run.guarantee(learner, counts).round_losses
        total = math.fsum(float(price[t]) for t, _ in said[learner])
        if total > budget * (1.0 + 1e-9):
            name = plan.run.spec.names[learner]
            found.append(f"{name}: {len(said[learner])} messages spend {total:.4g}, above the budget of {budget:.4g}")
    return found


def _protocol(
    name: str,
    what: str,
    doctored: Callable[[_Spoken], Sequence[CapturedMessage]],
    family: Family = "notices",
    base: str = "ldp-dol",
) -> Mutant:
    """A mutant of whose messages something else is heard, in order."""

    def breaks(plan: AuditPlan) -> Fault:
        return Fault(detect=lambda plan: _notices(doctored(_Spoken(plan)), plan))

    return Mutant(name, what, breaks, family, 1, base, kind="beside the numbers")


SIDE_CHANNEL_MUTANTS = (
    _leak("norm in metadata", "gradient norm beside messages", lambda inside: inside.norms, 500, quick=True),
    replace(
        _length, build_fault=restrict_fault(_length.build_fault, _some_are_zero, "no number of a gradient is ever zero")
    ),
    _leak(
        "slow path",
        "clipping takes half a millisecond",
        partial(_delays, extra=0.5, jitter=0.3),
        swap=_BEYOND,
        quick=True,
    ),
    _leak(
        "slow path, 0.2 ms",
        "clipping takes less than the jitter",
        partial(_delays, extra=0.2, jitter=0.3),
        swap=_BEYOND,
    ),
    _leak("one digit", "the first gradient norm in tenths", lambda inside: np.rint(10.0 * inside.norms[:, :1])),
    _leak("packed", "length of compressed messages", _packed),
    _leak("20 ms a norm", "delays grow with the norm", partial(_waits, factor=20.0)),
    _leak("3 ms a norm", "delays grow by little more than the jitter", partial(_waits, factor=3.0)),
    _leak("order", "who is told first follows a sign", _order),
    _leak("status", "a status text names a clipped record", _status, swap=_BEYOND),
    *(
        _leak(f"{100 * share:g} % fail", "runs of one world end early", partial(_failures, share=share))
        for share in (0.5, 0.1)
    ),
    _protocol("retry", "a round said again, fresh noise", _retried),
    _protocol("two faces", "one neighbour hears other bytes", _two_faced),
    _protocol("forgetful", "a restart forgets what was spent", _forgetful, "ledger", "ldp-dol, budget"),
)
"""What is given away beside the numbers, and messages that should never be."""
