"""`audit.json`: what an auditor's file must say."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

from sottovoce.auditing.audit import Audit
from sottovoce.auditing.bounds import Bound
from sottovoce.auditing.levels import Test
from sottovoce.auditing.likelihood import Excess
from sottovoce.auditing.verdict import Verdict
from sottovoce_client.auditing.worlds import digest
from sottovoce_client.documents import Document


class _Epsilons(Document):
    """Claimed, and shown."""

    promised: float
    """By the algorithm, for this swap."""
    paper: float
    """By the paper's formula."""
    largest_realised: float
    """The largest exact loss of any transcript; null: not known to this listener."""
    lower_bound: float
    """The largest that any family shows."""
    most_that_so_many_runs_show: float
    """If every guess of a whole run were right; 0: there was one world, and nothing was guessed."""


class _Likelihood(Document):
    """Guesses of whole runs by the sign of their exact loss."""

    runs: int
    """Of both worlds."""
    threshold: float
    """Fixed beforehand: a smaller loss is no guess."""
    guesses: int
    correct: int
    bound: float
    """Lower bound on epsilon."""
    level: float
    """The probability with which the bound is above the true epsilon, at most."""
    overconfident: Test
    """Whether more guesses are right than the claimed densities allow."""
    excess: Excess | None
    """The first transcript above the claim; null: none is."""


class _SingleRounds(Document):
    """Guesses of single messages, each drawn anew in the world of a coin. Lists are by round."""

    composed: float
    """Lower bound on epsilon of the whole run: the sum."""
    claim: list[float]
    bound: list[float]
    """Lower bounds on epsilon, which hold together."""
    largest: list[float]
    """Largest exact loss of any message."""


class _Learner(Document):
    """Exact losses of one learner in a few runs, for the most telling swap of its first record."""

    learner: str
    claim: float
    largest: float


class Attempt(Document):
    """What a classifier came to."""

    model: str
    view: str
    """What it looked at, of what it could choose from."""
    guesses: int
    correct: int
    bound: float
    """Lower bound on epsilon."""
    level: float
    """The probability with which the bound is above the true epsilon, at most."""


class _BlackBox(Document):
    """Classifiers that know nothing of the algorithm."""

    epsilon_promised_in_the_rounds_seen: float
    numbers_that_vary_by_view: dict[str, int]
    """What they could look at: of each view, how many numbers are not the same in all runs."""
    attempts: tuple[Attempt, ...]


class AuditFile(Document):
    """An audit of one learner."""

    sottovoce: str
    """The version that wrote it."""
    written_at: str
    """In ISO 8601."""
    data_sha256: str
    """Of all records: equal for equal records in equal rounds."""
    spec: dict[str, Any]
    """Of the run, as `sottovoce` reads it."""
    learner: str
    verdict: Verdict
    source: str
    """Where the runs came from, in words."""
    worlds: str
    """What was swapped, in words."""
    threat_model: str
    """Who listened: `wire`, `neighbour` or `output`."""
    claim_made_for: str
    """The listener whom the claim was made for."""
    adjacency: str
    """Which two data sets must look alike."""
    runs_of_each_world: int
    confidence: float
    """With which a correct learner is not refuted."""
    seed: int
    """Of coins and noise."""
    epsilon: _Epsilons
    conformance: tuple[Test, ...]
    """Whether the noise is what the algorithm says."""
    likelihood: _Likelihood | None
    """Null: the listener does not hear enough to know exact losses."""
    single_rounds: _SingleRounds | None
    """Null: rounds could not be drawn anew."""
    learners: list[_Learner]
    black_box: _BlackBox


def audit_file(done: Audit, name: str, seed: int) -> AuditFile:
    """An audit as a file, written now.

    Args:
        done: the audit.
        name: of the learner.
        seed: of the audit.
    """
    found, plan = done.found, done.plan
    return AuditFile(
        sottovoce=version("sottovoce"),
        written_at=datetime.now(UTC).isoformat(timespec="seconds"),
        data_sha256=digest(plan.data),
        spec=plan.run.spec.model_dump(mode="json"),
        learner=name,
        verdict=done.verdict,
        source=done.source,
        worlds=plan.worlds.what,
        threat_model=plan.listener.threat.value,
        claim_made_for=plan.made_for.value,
        adjacency=plan.guarantee.adjacency,
        runs_of_each_world=found.runs,
        confidence=1.0 - found.levels.alpha,
        seed=seed,
        epsilon=_Epsilons(
            promised=found.claim,
            paper=float(plan.guarantee.paper[-1]),
            largest_realised=done.largest,
            lower_bound=found.largest,
            most_that_so_many_runs_show=found.most,
        ),
        conformance=found.of("conformance").tests,
        likelihood=_likelihood(done),
        single_rounds=_single_rounds(done),
        learners=[
            _Learner(learner=plan.run.spec.names[each.learner], claim=each.claim, largest=each.largest)
            for each in done.learners
        ],
        black_box=_BlackBox(
            epsilon_promised_in_the_rounds_seen=done.claim_seen,
            numbers_that_vary_by_view=dict(done.views),
            attempts=attempts_of(found.of("black box").bounds),
        ),
    )


def attempts_of(bounds: Iterable[Bound]) -> tuple[Attempt, ...]:
    """Guesses of classifiers, for a file."""
    return tuple(
        Attempt(
            model=bound.guesser,
            view=bound.view,
            guesses=bound.guesses,
            correct=bound.correct,
            bound=bound.value,
            level=bound.level,
        )
        for bound in bounds
    )


def _likelihood(done: Audit) -> _Likelihood | None:
    found, bound = done.found, done.found.guessed
    if bound is None:
        return None
    (test,) = found.of("likelihood").tests
    return _Likelihood(
        runs=len(done.worlds),
        threshold=bound.threshold,
        guesses=bound.guesses,
        correct=bound.correct,
        bound=bound.value,
        level=bound.level,
        overconfident=test,
        excess=found.excess,
    )


def _single_rounds(done: Audit) -> _SingleRounds | None:
    rounds = done.found.rounds
    if rounds is None:
        return None
    return _SingleRounds(
        composed=rounds.composed,
        claim=[bound.claim for bound in rounds.bounds],
        bound=[bound.value for bound in rounds.bounds],
        largest=rounds.largest.tolist(),
    )
