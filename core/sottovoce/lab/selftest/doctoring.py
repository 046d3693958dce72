"""Broken learners whose numbers are as they should be: what they say twice, to some, or too often; and who notices that."""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from sottovoce.algorithms.interface import OnLattice
from sottovoce.algorithms.setting import spread
from sottovoce.auditing.noticing import Expected, Noticing, Said
from sottovoce.auditing.plan import AuditPlan
from sottovoce.auditing.worlds import Share, overhear
from sottovoce.errors import SpecError
from sottovoce.noise import SeededNoise
from sottovoce.running.run import Run
from sottovoce.running.transcript import Transcript

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
    spent = overspent(heard, plan)
    if spent:
        found["ledger"] = spent[0]
    return found


def overspent(messages: Iterable[Said], plan: AuditPlan) -> list[str]:
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
