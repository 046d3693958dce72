"""The audit of one learner on the simulator: two worlds, many runs of each, three families of tests, one verdict."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from sottovoce.audit.blackbox import Seen, attack, beginning
from sottovoce.audit.likelihood import guess, joined, ratios
from sottovoce.audit.verdict import Findings, Verdict, decide
from sottovoce.audit.worlds import NoiseOf, Worlds, overhear, worst
from sottovoce.data import PlacedData
from sottovoce.data.files import import_extra
from sottovoce.machine import Noise
from sottovoce.noise import SeededNoise
from sottovoce.run import Run
from sottovoce.simulator import simulate
from sottovoce.transcript import Transcript

REHEARSED = 500
"""Runs of each world, at most, from which the threshold is fixed."""

CONFORMING_NUMBERS, CONFORMING_RUNS = 2**21, 20
"""Of the transcript that conformance sees: numbers, and runs, at most, but at least one run."""


@dataclass(frozen=True, slots=True)
class Audit:
    """What was audited, and what came of it.

    Attributes:
        learner: whose messages.
        swap: the two worlds in words.
        threat_model, adjacency: of the claim.
        paper: epsilon by the paper's own formula.
        largest: the largest exact loss of any transcript.
        found: what the tests found.
        verdict: what may be said.
    """

    learner: int
    swap: str
    threat_model: str
    adjacency: str
    paper: float
    largest: float
    found: Findings
    verdict: Verdict


def audit(
    run: Run,
    data: PlacedData,
    learner: int,
    *,
    runs: int = 1000,
    confidence: float = 0.95,
    seed: int = 0,
    worlds: Worlds | None = None,
    noise: NoiseOf = SeededNoise,
    say: Callable[[str], None] = lambda what: None,
) -> Audit:
    """Audit one learner.

    Args:
        run: what to run.
        data: of all learners.
        learner: its index.
        runs: of each world, on average.
        confidence: with which a correct learner is not refuted, by all tests together.
        seed: of coins and noise.
        worlds: the two worlds (default: the swap that shows most, of those tried).
        noise: where the audited run's noise comes from (default: what is claimed).
        say: told what is being done.

    Raises:
        DataError: there is no record to swap.
    """
    for extra, package in (("scipy", "scipy"), ("sklearn", "scikit-learn")):
        import_extra(extra, package, "an audit")
    from sottovoce.audit.conformance import conformance  # it needs scipy from the start

    alpha = 1.0 - confidence
    choice, rehearsal, audited, single, boxed = np.random.SeedSequence(seed).spawn(5)
    say("choosing the swap")
    worlds = worlds or worst(run, data, learner, choice)
    promised = worlds.guarantee(run)
    claim = promised.cumulative
    say("fixing the threshold on the claimed mechanism")
    rehearsed = joined(
        [ratios(run, worlds, part, claim) for part in overhear(run, data, worlds, min(runs, REHEARSED), rehearsal)]
    )
    losses, heads = [], []
    for part in overhear(run, data, worlds, runs, audited, noise):
        losses.append(ratios(run, worlds, part, claim))
        heads.append(beginning(part, learner))
        say(f"{sum(len(each.total) for each in losses):,} of {2 * runs:,} runs")
    shown = joined(losses)
    said = np.concatenate(heads)
    known = data.with_learner(learner, worlds.first)
    say("conformance")
    tests = conformance(run, _transcript(run, known, noise(single)), known, learner)
    say("black box")
    found = Findings(
        runs=runs,
        alpha=alpha,
        claim=promised.epsilon(),
        claim_seen=promised.epsilon(said.shape[1]),
        conformance=tests,
        excess=shown.excess(claim),
        guessed=guess(shown, rehearsed, alpha / 3, run.spec.names[learner]),
        attempts=attack(Seen(shown.worlds, said), alpha / 3, boxed),
    )
    return Audit(
        learner,
        worlds.what,
        promised.threat_model.value,
        promised.adjacency,
        float(promised.paper[-1]),
        float(shown.largest.max()),
        found,
        decide(found),
    )


def _transcript(run: Run, data: PlacedData, noise: Noise) -> Transcript:
    """All that is said in a few runs of one world."""
    shapes = run.algorithm.field_shapes()
    numbers = run.spec.rounds * run.spec.n_learners * sum(int(np.prod(shape)) for shape in shapes.values())
    steps = list(simulate(run, data, noise, max(1, min(CONFORMING_RUNS, CONFORMING_NUMBERS // numbers))))
    return Transcript({name: np.stack([step.message[name] for step in steps]) for name in shapes})
