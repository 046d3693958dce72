"""Mutants that leak by side channels, and mutants that send forbidden messages."""

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
class _SecretView:
    """Internal values of an implementation, in some runs of one world, that side channels may leak.

    Attributes:
        plan: the audit plan.
        world: 0 or 1.
        gradients: `(rounds, runs, numbers)` of the audited learner's records, at its model in use.
        generator: random number generator of the side channel.
    """

    plan: AuditPlan
    world: int
    gradients: FloatArray
    generator: np.random.Generator

    @property
    def norms(self) -> FloatArray:
        """Norms of the gradients, `(runs, rounds)`."""
        norms: FloatArray = np.linalg.norm(self.gradients, axis=2).T
        return norms


def _simulate_secrets(plan: AuditPlan, share: RunChunk) -> _SecretView:
    """Simulate runs and return their internal values."""
    plan = plan.pairs[share.pair_index]
    runs, _, other = spawn_seeds(share.seed, 3)
    same, learner = RunChunk(share.world, share.runs, runs), plan.worlds.learner
    decisions = simulate_runs(plan.run, plan.data, plan.worlds, same, SeededNoise, keep_decisions=True).decisions
    assert decisions is not None  # noqa: S101 - `keep_decisions` is set
    gradients = [_compute_gradient(plan, share.world, t, points[learner]) for t, points in enumerate(decisions)]
    return _SecretView(plan, share.world, np.stack(gradients), np.random.default_rng(other))


def _compute_gradient(plan: AuditPlan, world: int, t: int, point: FloatArray) -> FloatArray:
    """Compute the gradient of a round's records as the learner does, at `point (runs, dim)`."""
    batch, loss = plan.worlds.get_records(world).batch(t), plan.run.loss
    features, labels = loss.enforce_bounds(batch.features, batch.labels)
    return mean_gradient(loss, point, replace(batch, features=features, labels=labels))


def _has_zero_gradients(plan: AuditPlan) -> bool:
    """Return whether an entry of a gradient is zero in some run of some pair of worlds."""
    shares = (
        RunChunk(world, MAX_QUICK_RUNS, pair.seeds.audited_runs, k)
        for k, pair in enumerate(plan.pairs)
        for world in (0, 1)
    )
    return any(bool(np.any(_simulate_secrets(plan, share).gradients == 0.0)) for share in shares)


def _compute_packed_length(secrets: _SecretView) -> FloatArray:
    """Compute the length in bytes of every compressed message: it grows with the gradient, and varies by chance."""
    return np.rint(200.0 + 8.0 * secrets.norms + secrets.generator.normal(0.0, 4.0, secrets.norms.shape))


def _compute_clipping_delays(secrets: _SecretView, extra: float, jitter: float) -> FloatArray:
    """Compute the milliseconds of every round: 1, plus `extra` for each record that is scaled down, plus jitter."""
    own, bound = secrets.plan.worlds.get_records(secrets.world), secrets.plan.run.loss.feature_bound
    rounds, runs = secrets.gradients.shape[:2]
    slow = [np.count_nonzero(np.linalg.norm(own.batch(t).features, axis=1) > bound) for t in range(rounds)]
    return 1.0 + extra * np.array(slow, np.float64) + secrets.generator.exponential(jitter, (runs, rounds))


def _compute_norm_delays(secrets: _SecretView, factor: float) -> FloatArray:
    """Compute the milliseconds of every round: 1, plus `factor` times the gradient's norm, plus jitter with mean 1."""
    return 1.0 + factor * secrets.norms + secrets.generator.exponential(1.0, secrets.norms.shape)


def _choose_first_receiver(secrets: _SecretView) -> FloatArray:
    """Choose the neighbour that receives first by the sign of the gradient's largest entry, seven times in eight."""
    largest = np.take_along_axis(secrets.gradients, np.abs(secrets.gradients).argmax(axis=2)[..., None], axis=2)
    fair = secrets.generator.random(secrets.norms.shape) < 0.25
    chance = secrets.generator.random(secrets.norms.shape) < 0.5
    return np.where(fair, chance, largest[..., 0].T > 0.0).astype(np.float64)


def _count_messages(secrets: _SecretView, share: float) -> FloatArray:
    """Count the messages of a run; in a fraction of the runs of world 0 the learner fails after the first one."""
    runs = secrets.gradients.shape[1]
    failed = (secrets.generator.random((runs, 1)) < share) & (secrets.world == 0)
    return np.where(failed, 1.0, float(secrets.plan.run.spec.rounds))


def _compute_status_length(secrets: _SecretView) -> FloatArray:
    """Compute the length of the status text, which names a first record that was scaled down; half of the time it is cut."""
    own, bound = secrets.plan.worlds.get_records(secrets.world), secrets.plan.run.loss.feature_bound
    runs = secrets.gradients.shape[1]
    scaled = np.any(np.linalg.norm(own.batch(0).features, axis=1) > bound)
    cut = secrets.generator.random((runs, 1)) < 0.5
    return np.where(cut | (not scaled), 2.0, 24.0)


_LOW_EPSILON_BASE = "ldp-dol, epsilon 1"
"""Base of side channels: the smaller the claim, the fewer runs show that more is leaked."""

_OUT_OF_BOUNDS_WORLDS = build_spike_worlds(2.0, 0.0)
"""Worlds for leaks that only a record above the bound shows; no audit chooses such a record."""


def _make_leak(
    name: str,
    description: str,
    leak: Callable[[_SecretView], FloatArray],
    max_runs: int = MAX_RUNS,
    *,
    build_worlds: WorldsFactory | None = None,
    quick: bool = False,
) -> Mutant:
    def build_fault(plan: AuditPlan) -> Fault:
        return Fault(compute_leak=lambda plan, share: leak(_simulate_secrets(plan, share)))

    return Mutant(
        name,
        description,
        build_fault,
        "black box",
        max_runs,
        _LOW_EPSILON_BASE,
        build_worlds,
        "side channels",
        quick=quick,
    )


_length = _make_leak(
    "length",
    "zero gradients are not sent",
    lambda secrets: 16.0 + 9.0 * np.count_nonzero(secrets.gradients, axis=2).T,
    500,
    quick=True,
)

# ---- messages --------------------------------------------------------------------------------------------------------


class _RunMessages:
    """All messages of one run, in order, and alternatives of a faulty learner.

    Args:
        plan: the audit plan.

    Attributes:
        messages: messages of the first of two runs in one world with the claimed noise. Until a learner's first noise, the states
            of both runs are equal.
    """

    def __init__(self, plan: AuditPlan) -> None:
        self.plan = plan
        share = RunChunk(0, 2, plan.seeds.sweep)
        self._both = simulate_runs(
            plan.run, plan.data, plan.worlds, share, SeededNoise, keep_all_learners=True
        ).transcript
        rounds = range(self._both.rounds)
        self.messages = [self.build_message(t, i, j) for t in rounds for i, j in _list_channels(plan.run, t)]

    def build_message(self, t: int, sender: int, receiver: int, replica: int = 0) -> CapturedMessage:
        """Build one message on its channel."""
        fields = {name: value[0, replica] for name, value in self._both.message(t, sender).fields.items()}
        body = b"".join(value.tobytes() for value in fields.values())
        return CapturedMessage(sender, receiver, 1, sender, t, fields, hashlib.sha256(body).digest(), len(body))

    @property
    def first(self) -> CapturedMessage:
        """First message of the audited learner with noise.

        Raises:
            SpecError: There is none, or it has no receiver.
        """
        learner = self.plan.worlds.learner
        for message in self.messages:
            other = self.build_message(message.round, learner, message.receiver, 1)
            if message.sender == learner and other.digest != message.digest:
                return message
        raise SpecError("the learner must send messages with noise, and sends none")


def _list_channels(run: Run, t: int) -> list[tuple[int, int]]:
    """List the senders and receivers of a round."""
    mixing, n = run.network.mixing(t), run.spec.n_learners
    return [(sender, receiver) for receiver in range(n) for sender in mixing.in_neighbour_weights(receiver)]


def _retry_round(messages: _RunMessages) -> list[CapturedMessage]:
    """Repeat a round after a reconnect, with fresh noise on the same state."""
    first = messages.first
    retry = replace(messages.build_message(first.round, first.sender, first.receiver, 1), stream=2)
    return [each for message in messages.messages for each in ((message, retry) if message is first else (message,))]


def _equivocate(messages: _RunMessages) -> list[CapturedMessage]:
    """Send one neighbour other noise than the rest.

    Raises:
        SpecError: The learner has fewer than two neighbours that receive its messages.
    """
    first = messages.first
    alike = [each for each in messages.messages if (each.sender, each.round) == (first.sender, first.round)]
    if len(alike) < 2:
        raise SpecError("the audited learner must send to two neighbours or more, and sends to one")
    last = alike[-1]
    other = messages.build_message(last.round, last.sender, last.receiver, 1)
    return [other if each is last else each for each in messages.messages]


def _forget_spent_budget(messages: _RunMessages) -> list[CapturedMessage]:
    """Stop at the end of the budget, restart without knowing the spent budget, and spend it again.

    Raises:
        SpecError: There is no budget, or there are too few rounds to spend it twice.
    """
    plan, learner = messages.plan, messages.plan.worlds.learner
    budget = _get_budgets(plan.run)[learner]
    counts = np.diff(plan.data.learners[learner].offsets)
    spent = plan.run.guarantee(learner, counts).cumulative_epsilon
    if spent[-1] <= budget:
        raise SpecError("privacy.budget must end before the run does, and is enough for the whole run")
    stopped = int(np.searchsorted(spent, budget, side="right"))
    before = spent[stopped - 1] if stopped else 0.0
    ended = int(np.searchsorted(spent - before, budget, side="right"))
    if ended == stopped:
        raise SpecError("privacy.budget must be enough for a round after a restart, and is enough for none")
    return [each for each in messages.messages if each.sender != learner or each.round < ended]


def _get_budgets(run: Run) -> tuple[float, ...]:
    """Return the budgets of all learners.

    Raises:
        SpecError: The spec has none.
    """
    if run.spec.privacy.budget is None:
        raise SpecError("the spec must have a privacy.budget, and has none")
    return tuple(broadcast_to_learners(run.spec.privacy.budget, run.spec.n_learners, "privacy.budget"))


# ---- detection -------------------------------------------------------------------------------------------------------


def _detect(messages: Sequence[CapturedMessage], plan: AuditPlan) -> dict[Family, str]:
    """Return what online checks and the ledger find in messages, independent of their values: a sentence by family."""
    algorithm, found = plan.run.algorithm, dict[Family, str]()
    checks = OnlineChecks(
        ExpectedTraffic(lattice_spacings=algorithm.lattice_spacings)
        if isinstance(algorithm, LatticeAlgorithm)
        else ExpectedTraffic()
    )
    if detections := [each.text for message in messages for each in checks.check_message(message)]:
        found["detections"] = detections[0]
    if overspent := _list_overspent(messages, plan):
        found["ledger"] = overspent[0]
    return found


def _list_overspent(messages: Sequence[CapturedMessage], plan: AuditPlan) -> list[str]:
    """List learners whose messages cost more epsilon than their budget, independent of their own ledger; none without a budget.

    A message costs the claimed epsilon of its round; other bytes in the same round are another message.
    """
    if plan.run.spec.privacy.budget is None:
        return []
    sent: dict[int, set[tuple[int, bytes]]] = defaultdict(set)
    for each in messages:
        sent[each.sender].add((each.round, each.digest))
    found = []
    for learner, budget in enumerate(_get_budgets(plan.run)):
        counts = np.diff(plan.data.learners[learner].offsets)
        losses = plan.run.guarantee(learner, counts).round_losses
        total = math.fsum(float(losses[t]) for t, _ in sent[learner])
        if total > budget * (1.0 + 1e-9):
            name = plan.run.spec.names[learner]
            found.append(f"{name}: {len(sent[learner])} messages spend {total:.4g}, above the budget of {budget:.4g}")
    return found


def _make_protocol_fault(
    name: str,
    description: str,
    change: Callable[[_RunMessages], Sequence[CapturedMessage]],
    family: Family = "detections",
    base: str = "ldp-dol",
) -> Mutant:
    """Make a mutant that sends other messages."""

    def build_fault(plan: AuditPlan) -> Fault:
        return Fault(detect=lambda plan: _detect(change(_RunMessages(plan)), plan))

    return Mutant(name, description, build_fault, family, 1, base, kind="side channels")


SIDE_CHANNEL_MUTANTS = (
    _make_leak("norm in metadata", "gradient norm in metadata", lambda secrets: secrets.norms, 500, quick=True),
    replace(
        _length,
        build_fault=restrict_fault(
            _length.build_fault, _has_zero_gradients, "a gradient must have entries that are zero, and none has"
        ),
    ),
    _make_leak(
        "slow path",
        "clipping takes half a millisecond",
        partial(_compute_clipping_delays, extra=0.5, jitter=0.3),
        build_worlds=_OUT_OF_BOUNDS_WORLDS,
        quick=True,
    ),
    _make_leak(
        "slow path, 0.2 ms",
        "clipping takes less than the jitter",
        partial(_compute_clipping_delays, extra=0.2, jitter=0.3),
        build_worlds=_OUT_OF_BOUNDS_WORLDS,
    ),
    _make_leak("one digit", "the first gradient norm in tenths", lambda secrets: np.rint(10.0 * secrets.norms[:, :1])),
    _make_leak("packed", "length of compressed messages", _compute_packed_length),
    _make_leak("20 ms a norm", "delays grow with the norm", partial(_compute_norm_delays, factor=20.0)),
    _make_leak("3 ms a norm", "delays grow by little more than the jitter", partial(_compute_norm_delays, factor=3.0)),
    _make_leak("order", "the sending order depends on a sign", _choose_first_receiver),
    _make_leak(
        "status", "a status text names a clipped record", _compute_status_length, build_worlds=_OUT_OF_BOUNDS_WORLDS
    ),
    *(
        _make_leak(f"{100 * share:g} % fail", "runs of one world end early", partial(_count_messages, share=share))
        for share in (0.5, 0.1)
    ),
    _make_protocol_fault("retry", "a round sent again with fresh noise", _retry_round),
    _make_protocol_fault("equivocation", "one neighbour receives other bytes", _equivocate),
    _make_protocol_fault(
        "forgetful", "a restart forgets the spent budget", _forget_spent_budget, "ledger", "ldp-dol, budget"
    ),
)
"""Mutants that leak by side channels, or send forbidden messages."""
