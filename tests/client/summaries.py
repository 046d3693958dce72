"""Run summaries made up for the tests of whatever shows them: they look like a run, and no run made them."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from sottovoce_client.runs.summary import (
    CaptureSummary,
    GuaranteeSummary,
    LearnerSummary,
    ObservedPrivacyLoss,
    RunProgress,
    RunSummary,
    WiretapSummary,
)
from sottovoce_core.arrays import FloatArray

PLACES = ("Aarhus", "Bergen", "Cork", "Delft", "Espoo")
WARNINGS = (
    ("GAMMA0_LARGE", "gam0 exceeds 1/(3 |delta_m|): only the large-time theorems apply"),
    (
        "LAMBDA0_LARGE",
        "lam0 is above the limit of Theorem 1: its convergence bound holds only after round t0 = 3.1e+19",
    ),
)
SPEC = "name: mushrooms\nrounds: 500\ntopology:\n  graph: {kind: ring}\n  weights: {kind: constant, value: 0.3}\n"


PROMISE = GuaranteeSummary(
    algorithm="ldp-dol",
    threat_model="wire",
    adjacency="1 record of one learner replaced",
    accounting="best",
    proof="Theorem 5",
    constants=(("diameter", 20.0, "projection onto the decision set"),),
)


def growing(rounds: int, total: float, power: float = 1.24) -> FloatArray:
    """A cumulative curve from 0 that flattens, like a budget with a finite horizon."""
    curve = np.concatenate([[0.0], np.cumsum(np.arange(1, rounds) ** -power)])
    return np.asarray(total * curve / max(curve[-1], 1e-12))


def swap(rng: np.random.Generator, claim: FloatArray, rounds: int, share: float = 0.3) -> ObservedPrivacyLoss:
    """A loss that wanders within a share of the claim."""
    largest = share * np.diff(claim[:rounds], prepend=0.0)
    by_round = np.cumsum(largest * rng.uniform(-0.6, 1.0, rounds))
    return ObservedPrivacyLoss(abs(float(by_round[-1])), float(largest.sum()), float(claim[rounds - 1]), by_round)


def learner(name: str, rounds: int = 500, seed: int = 0, **more: Any) -> LearnerSummary:
    """One that did all rounds."""
    rng = np.random.default_rng(seed)
    paper, event = growing(rounds, 23.34 - seed % 5, 0.9), growing(rounds, 7.312 - 0.4 * (seed % 5))
    record = 3.2 * event
    accuracy = 0.931 + 0.004 * (seed % 7)
    made = LearnerSummary(
        name=name,
        records=1_300 + 7 * seed,
        max_uses=4,
        rounds_done=rounds,
        test_accuracy=accuracy,
        prequential_accuracy=accuracy - 0.021,
        messages=2 * rounds,
        bytes=2 * rounds * 1_012,
        epsilon_spent=float(event[-1]),
        epsilon_limit=10.0,
        epsilon_paper=float(paper[-1]),
        epsilon_record_use=float(event[-1]),
        epsilon_record=float(record[-1]),
        epsilon_infinite_horizon=12.41,
        epsilon_paper_curve=paper,
        epsilon_record_use_curve=event,
        epsilon_record_curve=record,
        record_use_loss=swap(rng, event, rounds),
        record_loss=swap(rng, record, rounds, 0.2),
    )
    return replace(made, **more)


def looks(learners: int, rounds: int, seconds: float, count: int = 60) -> tuple[RunProgress, ...]:
    """What would have been seen of the running learners; nothing has been predicted at the first look."""
    rng, seen = np.random.default_rng(1), []
    for part in np.linspace(0, 1, count):
        done = np.clip((part * rounds + rng.integers(-3, 4, learners)).astype(int), 0, rounds)
        right = 0.94 - 0.4 * np.exp(-done / rounds * 6) + rng.normal(0, 0.004, learners)
        accuracy = tuple(float(a) if d else None for a, d in zip(right, done, strict=True))
        seen.append(RunProgress(part * seconds, tuple(done), accuracy, tuple(7.0 * done / rounds), tuple(2 * done)))
    return tuple(seen)


def capture(rounds: int = 500, dim: int = 117, messages: int = 5_000, **more: Any) -> CaptureSummary:
    """Noise that grows, on a message that slowly takes shape."""
    rng, t = np.random.default_rng(2), np.arange(rounds)[:, None] + 1.0
    said = rng.normal(0, 2, dim) * (1 - np.exp(-t / 80)) + rng.laplace(0, 1, (rounds, dim)) * t**0.11
    made = CaptureSummary("relay", "runs/mushrooms/capture", messages, 1_431_200, PLACES[0], said, 1.0, 1.981)
    return replace(made, **more)


def summary(learners: int = 5, rounds: int = 500, **more: Any) -> RunSummary:
    """A finished run of learners in a ring."""
    names = [*PLACES, *(f"learner-{k}" for k in range(5, learners))][:learners]
    ring = tuple((i, (i + 1) % learners) for i in range(learners)) if learners > 2 else ((0, 1),) * (learners - 1)
    made = RunSummary(
        name="mushrooms",
        run_id="7f3a9c1e",
        data="mushrooms",
        state="finished",
        detail="",
        rounds=rounds,
        seconds=1.2135,
        n_features=117,
        test_records=1_624,
        edges=ring,
        guarantee=PROMISE,
        learners=tuple(learner(name, rounds, seed) for seed, name in enumerate(names)),
        disagreement=0.0312 if learners > 1 else None,
        central_accuracy=0.9655,
        capture=capture(rounds),
        warnings=WARNINGS,
        spec_yaml=SPEC,
        version="0.1.0",
        started_at="2025-11-03T09:12:44+00:00",
        progress=looks(learners, rounds, 1.2135),
    )
    return replace(made, **more)


def summary_of(*learners: LearnerSummary) -> RunSummary:
    """A run of these learners."""
    return replace(summary(len(learners), learners[0].rounds_done), learners=learners)


def unheard(made: RunSummary) -> RunSummary:
    """The same without a capture."""
    learners = tuple(replace(each, record_use_loss=None, record_loss=None) for each in made.learners)
    return replace(made, learners=learners, capture=None)


def tapped(made: RunSummary) -> RunSummary:
    """The same with ciphertext alone."""
    return replace(unheard(made), wiretap=WiretapSummary("captures/cap", 3, 1204, 96_000))


def boundless(made: RunSummary) -> RunSummary:
    """The same where nothing finite is promised: every epsilon is infinite from the second message on."""
    assert made.rounds is not None
    curve = np.where(np.arange(made.rounds) > 0, math.inf, 0.0)
    infinite: dict[str, Any] = dict.fromkeys(
        ("epsilon_spent", "epsilon_paper", "epsilon_record_use", "epsilon_record", "epsilon_infinite_horizon"), math.inf
    )
    infinite |= dict.fromkeys(("epsilon_paper_curve", "epsilon_record_use_curve", "epsilon_record_curve"), curve)
    for level in ("record_use_loss", "record_loss"):
        infinite[level] = ObservedPrivacyLoss(1.234, math.inf, math.inf, np.linspace(0, -1.234, made.rounds))
    return replace(made, learners=tuple(replace(each, epsilon_limit=None, **infinite) for each in made.learners))


def unasked(made: RunSummary) -> RunSummary:
    """The same without any accuracy."""
    silent = tuple(replace(look, accuracy=(None,) * len(made.learners)) for look in made.progress)
    learners = tuple(replace(each, test_accuracy=None, prequential_accuracy=None) for each in made.learners)
    return replace(made, learners=learners, progress=silent, central_accuracy=None, disagreement=None)


def unstarted(made: RunSummary) -> RunSummary:
    """A run that failed before its first round."""
    none: dict[str, Any] = {
        "rounds_done": 0,
        "messages": 0,
        "bytes": 0,
        "epsilon_spent": 0.0,
        "epsilon_paper": 0.0,
        "epsilon_record_use": 0.0,
    }
    learners = tuple(replace(each, epsilon_record=0.0, **none) for each in made.learners)
    failed = replace(
        made, learners=learners, state="failed", detail="Bergen could not be reached", seconds=0.0, progress=()
    )
    return unasked(unheard(failed))
