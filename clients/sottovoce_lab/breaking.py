"""The faults that a mutant is made from: changes of noise, altered algorithms, side channels and doctored messages.

The first part computes the information limit of a fault: how many runs carry enough evidence for the best of all tests. A fault
whose numbers follow Q where P is claimed gives KL(Q || P) nats each, on average. A test at a level alpha that knew the fault
beforehand would need about `ln(1/alpha)` nats (Stein), and no other test needs fewer.
"""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from sottovoce_core.algorithms.interface import OnLattice
from sottovoce_core.algorithms.setting import spread
from sottovoce_core.arrays import FloatArray
from sottovoce_core.auditing.noticing import Expected, Noticing, Said
from sottovoce_core.auditing.plan import AuditPlan
from sottovoce_core.auditing.worlds import Share, children, numbers_of, overhear
from sottovoce_core.errors import SpecError
from sottovoce_core.losses import mean_gradient
from sottovoce_core.noise import Draw, Law, Noise, SeededNoise, no_noise
from sottovoce_core.optional import import_extra
from sottovoce_core.running.run import Run
from sottovoce_core.running.simulator import simulate
from sottovoce_core.running.transcript import Transcript

# ---- evidence --------------------------------------------------------------------------------------------------------

Limit = Callable[[Run, float], float]
"""From a run and a level to the runs of each world that carry enough evidence; conformance looks at both worlds."""


FOUND = 0.9
"""The probability with which something is to be found."""


def each_number(nats: float, share: float = 1.0) -> Limit:
    """So much evidence in every number that any learner says, on average; all of it in a share of them."""
    return lambda run, alpha: _enough(alpha, nats, share, numbers_of(run))


def each_message(nats: float, share: float = 1.0) -> Limit:
    """So much in every message."""
    return lambda run, alpha: _enough(alpha, nats, share, run.spec.rounds * run.spec.n_learners)


def each_run(nats: float, share: float = 1.0) -> Limit:
    """So much in every run."""
    return lambda run, alpha: _enough(alpha, nats, share, 1)


def _enough(alpha: float, nats: float, share: float, count: int) -> float:
    """Runs of each world; there are two. What is seldom must happen once at all."""
    return max(math.log(1.0 / alpha) / nats, math.log(1.0 / (1.0 - FOUND)) / share if share < 1.0 else 0.0) / (
        2.0 * count
    )


def repeated(values: float, drawn: Callable[[Run], float]) -> Limit:
    """Something drawn from so many values comes twice, as birthdays do.

    Args:
        values: how many there are.
        drawn: in one run.
    """
    draws = math.sqrt(2.0 * values * math.log(1.0 / (1.0 - FOUND)))
    return lambda run, alpha: draws / (2.0 * drawn(run))


def event(broken: float, claimed: float) -> float:
    """Nats of whether something happens: its probability, and the claimed one."""
    return _term(broken, claimed) + _term(1.0 - broken, 1.0 - claimed)


def _term(broken: float, claimed: float) -> float:
    return 0.0 if broken == 0.0 else broken * math.log(broken / claimed)


def rescaled(factor: float) -> float:
    """Nats of a number whose scale is another one."""
    return factor - 1.0 - math.log(factor)


def shaped(density: Callable[[FloatArray], FloatArray]) -> float:
    """Nats of a number with this density of its size, in scales, where `exp(-x)` is claimed; a sum over a fine grid."""
    sizes = np.linspace(0.0, 60.0, 600_001)
    its = density(sizes)
    with np.errstate(divide="ignore", invalid="ignore"):
        terms = np.where(its > 0.0, its * (np.log(its) + sizes), 0.0)
    return float(np.trapezoid(terms, sizes))


def correlated(*correlations: float) -> float:
    """Nats of normal numbers with such correlations of each with one that was before it: `-ln(1 - rho^2)/2` each."""
    return sum(-0.5 * math.log1p(-(each**2)) for each in correlations)


# ---- noise -----------------------------------------------------------------------------------------------------------

Change = Callable[[FloatArray, Draw], FloatArray]
"""From correct noise to what is said in its place."""


def changed(source: Noise, change: Change) -> Noise:
    """The noise of another source, changed."""
    return lambda draw: change(source(draw), draw)


def laws(plan: AuditPlan) -> set[Law]:
    """Which noise the algorithm asks for.

    Raises:
        SpecError: none.
    """
    asked: set[Law] = set()

    def note(draw: Draw) -> FloatArray:
        asked.add(draw.law)
        return no_noise(draw)

    for _ in simulate(plan.run, plan.data, note):
        pass
    if not asked:
        raise SpecError(f"{plan.run.algorithm.name} draws no noise")
    return asked


def in_scales(change: Callable[[FloatArray], FloatArray]) -> Change:
    """A change of noise in units of its scale; what comes of it is on the lattice again."""
    return lambda noise, draw: draw.rounded(change(noise / draw.scale) * draw.scale)


def scaled(noise: FloatArray, factor: float | FloatArray, draw: Draw) -> FloatArray:
    """Noise times a factor, on the lattice.

    Half of an odd number is always rounded to an even one, so a factor of few digits would show in low bits: it gets some more.
    """
    factors = np.where(np.asarray(factor) == 1.0, 1.0, np.asarray(factor) * (1.0 - 1e-9))
    return draw.rounded(factors * noise)


def times(factor: float) -> Change:
    """Noise of another scale."""
    return lambda noise, draw: scaled(noise, factor, draw)


def sometimes(change: Change, share: float, generator: np.random.Generator, *, messages: bool = False) -> Change:
    """A change of some numbers only, or of some messages, at random."""

    def partly(noise: FloatArray, draw: Draw) -> FloatArray:
        shape = (*noise.shape[:-1], 1) if messages else noise.shape
        return np.where(generator.random(shape) < share, change(noise, draw), noise)

    return partly


def correlating(mix: Callable[[FloatArray, dict[Any, FloatArray], Draw], FloatArray]) -> Change:
    """Noise of the right law that is not independent: its normal scores are mixed with what was there before."""
    special = import_extra("scipy.special", "scipy", "a self-test")
    before: dict[Any, FloatArray] = {}

    def change(noise: FloatArray, draw: Draw) -> FloatArray:
        drawn = noise / draw.scale
        scores = np.copysign(special.ndtri(0.5 * np.exp(-np.abs(drawn))), drawn)
        scores = mix(scores, before, draw)
        sizes = -special.log_ndtr(-np.abs(scores)) - math.log(2.0)
        return draw.rounded(np.copysign(sizes, scores) * draw.scale)

    return change


# ---- algorithms and losses -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Altered:
    """An algorithm, a loss, or what is heard, but for what a subclass overrides."""

    correct: Any

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "correct"), name)


# ---- beside the numbers ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Inside:
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


def inside(plan: AuditPlan, share: Share) -> Inside:
    """Some runs of the simulator, as they look from inside."""
    plan = plan.pairs[share.pair]
    runs, _, other = children(share.seed, 3)
    same, learner = Share(share.world, share.runs, runs), plan.worlds.learner
    decisions = overhear(plan.run, plan.data, plan.worlds, same, SeededNoise, decisions=True).decisions
    assert decisions is not None  # noqa: S101 - asked for
    gradients = [_gradient(plan, share.world, t, said[learner]) for t, said in enumerate(decisions)]
    return Inside(plan, share.world, np.stack(gradients), np.random.default_rng(other))


def _gradient(plan: AuditPlan, world: int, t: int, point: FloatArray) -> FloatArray:
    """Of a round's records, as the learner computes it, at `point (runs, dim)`."""
    batch, loss = plan.worlds.of(world).batch(t), plan.run.loss
    features, labels = loss.enforce(batch.features, batch.labels)
    return mean_gradient(loss, point, replace(batch, features=features, labels=labels))


# ---- what is said ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Spoken:
    """All messages of one run, in order, and what else a broken learner could have said.

    Attributes:
        plan: the audit.
        transcript: two runs in one world with the noise that is claimed: until a learner's first noise, their states are equal.
        messages: of the first of the two.
    """

    plan: AuditPlan
    transcript: Transcript = field(init=False)
    messages: tuple[Said, ...] = field(init=False)

    def __post_init__(self) -> None:
        plan, share = self.plan, Share(0, 2, self.plan.seeds.swept)
        both = overhear(plan.run, plan.data, plan.worlds, share, SeededNoise, everybody=True).transcript
        object.__setattr__(self, "transcript", both)
        rounds = range(self.transcript.rounds)
        heard = [self.said(t, i, j) for t in rounds for i, j in _channels(self.plan.run, t)]
        object.__setattr__(self, "messages", tuple(heard))

    def said(self, t: int, sender: int, receiver: int, replica: int = 0) -> Said:
        """One message on its channel."""
        fields = {name: value[0, replica] for name, value in self.transcript.message(t, sender).fields.items()}
        body = b"".join(value.tobytes() for value in fields.values())
        return Said(sender, receiver, 1, sender, t, fields, hashlib.sha256(body).digest(), len(body))

    @property
    def first(self) -> Said:
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
    mixing, n = run.network.at(t), run.spec.n_learners
    return [(sender, receiver) for receiver in range(n) for sender in mixing.heard_by(receiver)]


Doctored = Callable[[Spoken], Sequence[Said]]
"""What is heard of a broken learner, in order."""


def retried(spoken: Spoken) -> Sequence[Said]:
    """After a reconnect a round is said once more, with fresh noise on the same state."""
    first = spoken.first
    anew = replace(spoken.said(first.round, first.sender, first.receiver, 1), stream=2)
    return [each for said in spoken.messages for each in ((said, anew) if said is first else (said,))]


def two_faced(spoken: Spoken) -> Sequence[Said]:
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


def forgetful(spoken: Spoken) -> Sequence[Said]:
    """The learner stops where its budget ends, is restarted, has forgotten what it spent, and goes on for as much again.

    Raises:
        SpecError: there is no budget, or not enough rounds to spend it twice.
    """
    plan, learner = spoken.plan, spoken.plan.worlds.learner
    budget = _budgets(plan.run)[learner]
    counts = np.diff(plan.data.learners[learner].offsets)
    spent = plan.run.guarantee(learner, counts).cumulative
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
    return tuple(spread(run.spec.privacy.budget, run.spec.n_learners, "privacy.budget"))


# ---- what is noticed -------------------------------------------------------------------------------------------------


def notices(messages: Iterable[Said], plan: AuditPlan) -> dict[Literal["notices", "ledger"], str]:
    """What is wrong with messages whatever their numbers: family to a sentence."""
    heard, noticing = list(messages), Noticing(_expected(plan.run))
    found: dict[Literal["notices", "ledger"], str] = {}
    findings = [finding.text for said in heard for finding in noticing.heard(said)]
    if findings:
        found["notices"] = findings[0]
    spent = _overspent(heard, plan)
    if spent:
        found["ledger"] = spent[0]
    return found


def _overspent(messages: Iterable[Said], plan: AuditPlan) -> list[str]:
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
        price = plan.run.guarantee(learner, counts).per_round
        total = math.fsum(float(price[t]) for t, _ in said[learner])
        if total > budget * (1.0 + 1e-9):
            name = plan.run.spec.names[learner]
            found.append(f"{name}: {len(said[learner])} messages spend {total:.4g}, above the budget of {budget:.4g}")
    return found


def _expected(run: Run) -> Expected:
    return Expected(lattice=run.algorithm.lattice) if isinstance(run.algorithm, OnLattice) else Expected()
