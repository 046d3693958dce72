"""The runs that the gallery attacks, over scikit-learn's digits, and guesses of membership in them.

Membership is guessed in dual averaging with a shared loss (`dpsda-c`, `dpsda-ps`, `dpcda`). All learners hold a record or all
hold another one, and everything else is known. Given the past, the messages of a round are independent, so the log-likelihood
ratios of all learners add up: no better guess from messages exists.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np

from sottovoce_client.formatting import format_number
from sottovoce_core.algorithms.dual_averaging.algorithm import DualAveraging
from sottovoce_core.arrays import FloatArray, IntArray
from sottovoce_core.auditing.bounds import compute_confidence_interval, compute_epsilon_lower_bound
from sottovoce_core.data import LearnerData, PlacedData
from sottovoce_core.experiment import PreparedRun, prepare
from sottovoce_core.noise import SeededNoise
from sottovoce_core.privacy.guarantee import compose_guarantees
from sottovoce_core.runs.replay import Replay, replay
from sottovoce_core.runs.run import Run
from sottovoce_core.runs.simulator import simulate_rounds
from sottovoce_core.runs.transcript import Transcript
from sottovoce_core.spec import parse_spec
from sottovoce_lab.reconstruction import Reconstruction, reconstruct_records

# ---- membership ------------------------------------------------------------------------------------------------------

_ROUNDING = 1e-9
"""Decisions closer than this, relative to the largest, are equal."""

_CONFIDENCE = 0.95

_Pair = tuple[LearnerData, LearnerData]
"""What every learner holds in world 0 and in world 1."""


@dataclass(frozen=True, slots=True)
class _HeardRuns:
    """Runs of one world.

    Attributes:
        transcript: what was said.
        decisions: `(rounds, learners, replicas, dim)`, in use when the round's records came.
    """

    transcript: Transcript
    decisions: FloatArray


def _simulate_worlds(run: Run, data: PlacedData, pair: _Pair, runs: int, seed: int) -> tuple[_HeardRuns, _HeardRuns]:
    """Simulate `runs` runs, each in a world that a fair coin chose."""
    coins, *sources = np.random.SeedSequence(seed).spawn(3)
    seconds = int(np.clip(np.random.default_rng(coins).binomial(runs, 0.5), 1, runs - 1))
    counts = (runs - seconds, seconds)
    first, second = (
        _world(run, data, own, count, source) for own, count, source in zip(pair, counts, sources, strict=True)
    )
    return first, second


def _world(run: Run, data: PlacedData, own: LearnerData, runs: int, seed: np.random.SeedSequence) -> _HeardRuns:
    shared = PlacedData((own,) * run.spec.n_learners, data.test_features, data.test_labels)
    steps = list(simulate_rounds(run, shared, SeededNoise(seed), runs))
    return _HeardRuns(
        Transcript.from_rounds(step.message for step in steps), np.stack([step.decisions_before for step in steps])
    )


# ---- scores: above 0 speaks for world 0, below for world 1 -----------------------------------------------------------


def _from_messages(run: Run, transcript: Transcript, pair: _Pair) -> FloatArray:
    """`(replicas,)` log-likelihood ratio of all that was said."""
    losses = [replay(run, transcript, i, pair).total[0] for i in range(run.spec.n_learners)]
    total: FloatArray = np.sum(losses, axis=0)
    return total


def _from_decisions(run: Run, algorithm: DualAveraging, decisions: FloatArray, pair: _Pair) -> FloatArray:
    """The same from the decisions of all learners, `(rounds, learners, replicas, dim)`, where they are made from messages.

    A decision `Pro(-alpha_t h_t / w_t)` that the projection leaves alone is the message in another unit.
    """
    alphas = algorithm.step / np.sqrt(np.maximum(np.arange(len(decisions)), 1.0))
    pushed = np.broadcast_to(algorithm.push_weights, (len(decisions), decisions.shape[1]))[:, :, None, None]
    duals = -decisions * pushed / alphas[:, None, None, None]
    weights = np.broadcast_to(pushed, (*decisions.shape[:3], 1))
    return _from_messages(run, Transcript({"h": duals, "w": weights} if algorithm.has_push_sum else {"h": duals}), pair)


def _from_both(run: Run, heard: _HeardRuns, pair: _Pair) -> FloatArray:
    """From messages and decisions: infinite where a decision could only have been made in one of the worlds."""
    scores = _from_messages(run, heard.transcript, pair)
    for learner in range(run.spec.n_learners):
        for t, decided in enumerate(_decided(run, heard.transcript, learner, pair)):
            published = heard.decisions[t, learner]
            apart = np.abs(decided - published).max(axis=-1)
            fits = apart <= _ROUNDING * (1.0 + np.abs(published).max(axis=-1))
            scores = np.where(fits[0] & ~fits[1], np.inf, np.where(fits[1] & ~fits[0], -np.inf, scores))
    return scores


def _decided(run: Run, transcript: Transcript, learner: int, pair: _Pair) -> Iterator[FloatArray]:
    """By round, `(worlds, replicas, dim)`: what the learner would have decided in each world, given what was said."""
    machine = Replay(run, learner, transcript.replicas, len(pair))
    for t in range(transcript.rounds):
        machine.step(transcript.messages(t, learner, machine.required_senders), *(own.batch(t) for own in pair))
        yield machine.decision


# ---- what guessing comes to ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _GuessingRate:
    """Guesses of the world by the sign of the score.

    Attributes:
        runs, correct: all of them, and those guessed right.
        low, high: Clopper-Pearson interval of the rate of right guesses.
        bound: lower bound on epsilon.
        false_alarms, detections: the ROC, ascending: world 0 is called when it is not, and when it is.
    """

    runs: int
    correct: int
    low: float
    high: float
    bound: float
    false_alarms: FloatArray
    detections: FloatArray

    @property
    def rate(self) -> float:
        """Share of right guesses."""
        return self.correct / self.runs


def _guess(scores: Sequence[FloatArray], seed: int) -> _GuessingRate:
    """Guess the world of every run, by scores of the runs of world 0 and of world 1; a score of 0 is met by a coin.

    The confidence of the interval is two-sided, that of the bound one-sided.
    """
    generator, (first, second) = np.random.default_rng(seed), scores
    coins = [generator.random(len(each)) < 0.5 for each in scores]
    right = (first > 0) | ((first == 0) & coins[0]), (second < 0) | ((second == 0) & coins[1])
    runs, correct = len(first) + len(second), int(sum(each.sum() for each in right))
    low, high = compute_confidence_interval(correct, runs, _CONFIDENCE)
    return _GuessingRate(
        runs, correct, low, high, compute_epsilon_lower_bound(correct, runs, 1.0 - _CONFIDENCE), *_roc(first, second)
    )


def _roc(first: FloatArray, second: FloatArray) -> tuple[FloatArray, FloatArray]:
    """False alarms and detections of "world 0" as the threshold falls; equal scores are called together."""
    levels: FloatArray = np.unique(np.concatenate([first, second]))[::-1]
    shares: list[FloatArray] = []
    for scores in (second, first):
        below: IntArray = np.searchsorted(np.sort(scores), levels, side="left").astype(np.int64)
        shares.append(np.concatenate([[0.0], 1.0 - below / len(scores)]))
    return shares[0], shares[1]


# ---- cases -----------------------------------------------------------------------------------------------------------

_LEARNERS, _ROUNDS = 8, 9
_COMMON: Mapping[str, Any] = {
    "learners": _LEARNERS,
    "durability": "process",
    "decision_set": {"kind": "l2_ball", "radius": 1000.0},
}
_STEP = {"kind": "power", "scale": 1.0, "exponent": 0.5}
_NETWORK = {
    "kind": "torch",
    "module": "sottovoce_lab.inversion:SmoothNet",
    "shape": [1, 8, 8],
    "feature_bound": 4.0,
    "clip_norm": 2.0,
    "ridge": 0.0,
}
"""Pixels of a digit whose norm is 4 lie between 0 and about 1."""


@dataclass(frozen=True, slots=True)
class MembershipInference:
    """Guesses whether a record was learned.

    Attributes:
        algorithm: its name, and where its decisions come from.
        record: which one, in words.
        seen: what the guesser sees.
        claim: epsilon of all learners together.
        covered: is all that is seen part of the claim?
        guessed: what guessing came to.
    """

    algorithm: str
    record: str
    view: str
    claim: float
    is_covered: bool
    guesses: _GuessingRate


AttackResults = Mapping[str, Reconstruction]
"""Transcripts of the same records under one attack: what protects each, and what the attack made of it."""


@dataclass(frozen=True, slots=True)
class Gallery:
    """All that is shown.

    Attributes:
        attacks: by name; without any transcript, what the attack needs is not installed.
        memberships: guesses whether a record was learned.
        source: what was overheard; empty: simulated runs.
    """

    attacks: Mapping[str, AttackResults]
    memberships: tuple[MembershipInference, ...] = ()
    source: str = ""


def simulate_gallery(
    epsilons: Sequence[float], runs: int, seed: int, show_status: Callable[[str], AbstractContextManager[object]]
) -> Gallery:
    """Run every attack on simulated runs over scikit-learn's digits.

    Args:
        epsilons: noise of the pictures, per record over the whole run.
        runs: for the guesses of membership.
        seed: of noise, coins and searches.
        during: shows what is being done, while it is.
    """
    with show_status("reading records off gradients"):
        read = _with_and_without_noise(_linear, epsilons, seed)
    searched: AttackResults = {}
    if find_spec("torch") is not None:
        with show_status("searching for records that fit a network's gradients"):
            searched = _with_and_without_noise(_network, epsilons, seed, rounds=1)
    with show_status("reading records off gossip"):
        overheard = _gossip(epsilons, seed)
    with show_status("guessing what was learned"):
        guesses = tuple(_guessed(*setting, runs, seed + k) for k, setting in enumerate(_MEMBERSHIPS))
    return Gallery({"linear": read, "network": searched, "gossip": overheard}, guesses)


# ---- pictures --------------------------------------------------------------------------------------------------------


def _linear(epsilon: float) -> dict[str, Any]:
    """A linear model of ten classes."""
    return {"rounds": _ROUNDS, "algorithm": _descent(epsilon), "loss": {"kind": "softmax", "classes": 10}}


def _network(epsilon: float) -> dict[str, Any]:
    """A small network, in the one round whose parameters are not trained."""
    return {"rounds": 2, "algorithm": _descent(epsilon), "loss": _NETWORK, "data": {"intercept": False}}


def _descent(epsilon: float) -> dict[str, Any]:
    noise = {"kind": "none"} if math.isinf(epsilon) else {"kind": "calibrated", "epsilon": epsilon}
    return {"name": "pd-ogd", "step": _STEP, "noise": noise}


def _with_and_without_noise(
    spec_of: Callable[[float], dict[str, Any]], epsilons: Sequence[float], seed: int, rounds: int = 8
) -> AttackResults:
    """One attack without noise, and with noise of every epsilon.

    Args:
        spec_of: the run, given epsilon.
        epsilons: of the noise.
        seed: of noise and searches.
        rounds: records of every learner to rebuild.
    """
    return {_label(each): _attacked(spec_of(each), seed, rounds) for each in (math.inf, *epsilons)}


def _gossip(epsilons: Sequence[float], seed: int) -> AttackResults:
    """PD-FTGL as published, with the smallest epsilon for its decisions, and with its noise on the wire."""

    def spec(epsilon: float, placement: str) -> dict[str, Any]:
        # A strong pull towards the start: a record that is fitted exactly would have no gradient.
        tree = {"epsilon": epsilon, "noise_placement": placement, "block_length": 1, "regularization": 1000.0}
        return {
            "rounds": _ROUNDS + 2,
            "algorithm": {"name": "pd-ftgl", **tree},
            "loss": {"kind": "softmax", "classes": 10},
        }

    smallest = min(epsilons)
    published = _attacked(spec(smallest, "after_gossip"), seed)
    noised = {_label(each): _attacked(spec(each, "before_gossip"), seed) for each in epsilons}
    return {f"as published, ε = {format_number(smallest)} for decisions": published, **noised}


def _label(epsilon: float) -> str:
    return "no noise" if math.isinf(epsilon) else f"ε = {format_number(epsilon)}"


def _prepared(document: Mapping[str, Any]) -> PreparedRun:
    data = {"source": "digits", **document.get("data", {})}
    return prepare(parse_spec({**_COMMON, **document, "data": data}, source="gallery", allow_imports=True))


def _attacked(document: Mapping[str, Any], seed: int, rounds: int = 8) -> Reconstruction:
    """Simulate, overhear, attack."""
    prepared = _prepared(document)
    heard = Transcript.from_rounds(
        step.message for step in simulate_rounds(prepared.run, prepared.data, SeededNoise(seed))
    )
    return reconstruct_records(prepared.run, prepared.data, heard, max_rounds=rounds, seed=seed)


# ---- membership ------------------------------------------------------------------------------------------------------

_DIGIT, _WORST = "two digits", "worst pair"
_MEMBERSHIPS = (
    ("dpsda-c", "noised", 1.0, _DIGIT, "messages"),
    ("dpsda-c", "noised", 1.0, _WORST, "messages"),
    ("dpsda-c", "noised", 10.0, _DIGIT, "messages"),
    ("dpsda-c", "noised", 10.0, _WORST, "messages"),
    ("dpsda-c", "noised", 10.0, _WORST, "decisions"),
    ("dpsda-ps", "noised", 10.0, _WORST, "messages"),
    ("dpsda-c", "clean", 1.0, _DIGIT, "messages"),
    ("dpsda-c", "clean", 1.0, _DIGIT, "messages and decisions"),
)
"""Algorithm, where decisions come from, epsilon of all learners together, the pair of records, what is seen."""


def _guessed(
    name: str, primal: str, epsilon: float, record: str, seen: str, runs: int, seed: int
) -> MembershipInference:
    document: dict[str, Any] = {
        "rounds": 4,
        "learners": 4,
        "algorithm": {"name": name, "epsilon": epsilon, "clip": 0.25, "primal": primal},
        "decision_set": {"kind": "box", "low": -1e6, "high": 1e6},
        "data": {"partition": "shared"},
        "topology": {"weights": "out_degree"} if name == "dpsda-ps" else {},
    }
    prepared = _prepared(document)
    run, algorithm, pair = prepared.run, prepared.run.algorithm, _pair(prepared, record)
    assert isinstance(algorithm, DualAveraging)  # noqa: S101 - _MEMBERSHIPS names no other
    worlds = _simulate_worlds(run, prepared.data, pair, runs, seed)
    if seen == "messages":
        scores = [_from_messages(run, world.transcript, pair) for world in worlds]
    elif seen == "decisions":
        scores = [_from_decisions(run, algorithm, world.decisions, pair) for world in worlds]
    else:
        scores = [_from_both(run, world, pair) for world in worlds]
    promised = compose_guarantees([run.guarantee(i) for i in range(run.spec.n_learners)]).epsilon()
    covered = primal == "noised" or seen == "messages"
    return MembershipInference(f"{name}, {primal}", record, seen, promised, covered, _guess(scores, seed))


def _pair(prepared: PreparedRun, record: str) -> _Pair:
    """The first record as it is, or another one; or a record that weighs equally in all features, against its mirror image."""
    own = prepared.data.learners[0]
    if record == _DIGIT:
        first = int(own.order[0])
        other = int(np.flatnonzero(own.labels != own.labels[first])[0])
        return own, own.with_use(0, own.features[other], float(own.labels[other]))
    spread: FloatArray = np.full(prepared.data.n_features, prepared.data.n_features**-0.5)
    return own.with_use(0, spread, 1.0), own.with_use(0, -spread, 1.0)
