"""Simulated runs that the gallery attacks: those of a spec, or over scikit-learn's digits; and membership inference in these.

Membership is inferred in dual averaging with a shared loss (`dpsda-c`, `dpsda-ps`, `dpcda`). All learners hold one record, or all
hold another one; everything else is known. Given the past, the messages of a round are independent, so the log-likelihood ratios
of all learners add up: no better guess from messages exists.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from sottovoce_client.formatting import format_number
from sottovoce_core.algorithms.dual_averaging.algorithm import DualAveraging
from sottovoce_core.arrays import FloatArray, IntArray
from sottovoce_core.auditing.bounds import compute_confidence_interval, compute_epsilon_lower_bound
from sottovoce_core.budget.calibration import BudgetTarget, calibrate
from sottovoce_core.budget.cost import LearnerCost, combine_costs
from sottovoce_core.data import LearnerData, PlacedData
from sottovoce_core.errors import SpecError
from sottovoce_core.experiment import PreparedRun, prepare
from sottovoce_core.noise import SeededNoise, no_noise
from sottovoce_core.privacy.guarantee import compose_guarantees
from sottovoce_core.runs.replay import Replay, replay
from sottovoce_core.runs.run import Run, build_run
from sottovoce_core.runs.simulator import simulate_rounds
from sottovoce_core.runs.transcript import Transcript
from sottovoce_core.spec import RunSpec, parse_spec
from sottovoce_lab.reconstruction import Reconstruction, count_attacked_rounds, reconstruct_records

# ---- membership ------------------------------------------------------------------------------------------------------

_ROUNDING = 1e-9
"""Relative distance below which decisions are equal."""

_CONFIDENCE = 0.95

_Pair = tuple[LearnerData, LearnerData]
"""Data of every learner in world 0 and in world 1."""


@dataclass(frozen=True, slots=True)
class _SimulatedRuns:
    """Runs of one world.

    Attributes:
        transcript: all messages.
        decisions: `(rounds, learners, replicas, dim)`, in use when the round's records arrived.
    """

    transcript: Transcript
    decisions: FloatArray


def _simulate_worlds(
    run: Run, data: PlacedData, pair: _Pair, runs: int, seed: int
) -> tuple[_SimulatedRuns, _SimulatedRuns]:
    """Simulate `runs` runs, each in the world of a fair coin."""
    coins, *sources = np.random.SeedSequence(seed).spawn(3)
    seconds = int(np.clip(np.random.default_rng(coins).binomial(runs, 0.5), 1, runs - 1))
    counts = (runs - seconds, seconds)
    first, second = (
        _simulate_world(run, data, own, count, source) for own, count, source in zip(pair, counts, sources, strict=True)
    )
    return first, second


def _simulate_world(
    run: Run, data: PlacedData, own: LearnerData, runs: int, seed: np.random.SeedSequence
) -> _SimulatedRuns:
    shared = PlacedData((own,) * run.spec.n_learners, data.test_features, data.test_labels)
    steps = list(simulate_rounds(run, shared, SeededNoise(seed), runs))
    return _SimulatedRuns(
        Transcript.from_rounds(step.message for step in steps), np.stack([step.decisions_before for step in steps])
    )


# ---- scores: positive for world 0, negative for world 1 --------------------------------------------------------------


def _score_messages(run: Run, transcript: Transcript, pair: _Pair) -> FloatArray:
    """Compute the log-likelihood ratio of all messages, `(replicas,)`."""
    losses = [replay(run, transcript, i, pair).total[0] for i in range(run.spec.n_learners)]
    total: FloatArray = np.sum(losses, axis=0)
    return total


def _score_decisions(run: Run, algorithm: DualAveraging, decisions: FloatArray, pair: _Pair) -> FloatArray:
    """Compute the same from the decisions of all learners, `(rounds, learners, replicas, dim)`, if computed from messages.

    A decision `Pro(-alpha_t h_t / w_t)` that the projection does not change is the message in another unit.
    """
    alphas = algorithm.step / np.sqrt(np.maximum(np.arange(len(decisions)), 1.0))
    push_weights = np.broadcast_to(algorithm.push_weights, (len(decisions), decisions.shape[1]))[:, :, None, None]
    duals = -decisions * push_weights / alphas[:, None, None, None]
    weights = np.broadcast_to(push_weights, (*decisions.shape[:3], 1))
    return _score_messages(
        run, Transcript({"h": duals, "w": weights} if algorithm.has_push_sum else {"h": duals}), pair
    )


def _score_both(run: Run, simulated: _SimulatedRuns, pair: _Pair) -> FloatArray:
    """Score messages and decisions: infinite if a decision is possible in one of the worlds only."""
    scores = _score_messages(run, simulated.transcript, pair)
    for learner in range(run.spec.n_learners):
        for t, decisions in enumerate(_replay_decisions(run, simulated.transcript, learner, pair)):
            published = simulated.decisions[t, learner]
            distance = np.abs(decisions - published).max(axis=-1)
            fits = distance <= _ROUNDING * (1.0 + np.abs(published).max(axis=-1))
            scores = np.where(fits[0] & ~fits[1], np.inf, np.where(fits[1] & ~fits[0], -np.inf, scores))
    return scores


def _replay_decisions(run: Run, transcript: Transcript, learner: int, pair: _Pair) -> Iterator[FloatArray]:
    """Yield, by round, the learner's decisions in each world given the messages, `(worlds, replicas, dim)`."""
    machine = Replay(run, learner, transcript.replicas, len(pair))
    for t in range(transcript.rounds):
        machine.step(transcript.messages(t, learner, machine.required_senders), *(own.batch(t) for own in pair))
        yield machine.decision


# ---- guesses ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _GuessSummary:
    """Guesses of the world by the sign of the score.

    Attributes:
        runs, correct: number of all guesses, and of right ones.
        low, high: Clopper-Pearson interval of the rate of right guesses.
        bound: lower bound on epsilon.
        false_alarms, detections: ROC, ascending: rates at which world 0 is guessed in runs of world 1, and of world 0.
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


def _guess(scores: Sequence[FloatArray], seed: int) -> _GuessSummary:
    """Guess the world of every run, by scores of the runs of world 0 and of world 1; a coin decides at a score of 0.

    The confidence of the interval is two-sided, that of the bound one-sided.
    """
    generator, (first, second) = np.random.default_rng(seed), scores
    coins = [generator.random(len(each)) < 0.5 for each in scores]
    right = (first > 0) | ((first == 0) & coins[0]), (second < 0) | ((second == 0) & coins[1])
    runs, correct = len(first) + len(second), int(sum(each.sum() for each in right))
    low, high = compute_confidence_interval(correct, runs, _CONFIDENCE)
    return _GuessSummary(
        runs, correct, low, high, compute_epsilon_lower_bound(correct, runs, 1.0 - _CONFIDENCE), *_roc(first, second)
    )


def _roc(first: FloatArray, second: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Compute false alarms and detections of world 0 as the threshold falls; equal scores are guessed together."""
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
"""A network loss; pixels of a digit with a norm of 4 lie between 0 and about 1."""


@dataclass(frozen=True, slots=True)
class MembershipInference:
    """Membership inference: guesses whether a record was learned.

    Attributes:
        algorithm: name of the algorithm, and the source of its decisions.
        record: the record, in words.
        view: what the guesses are based on.
        claim: epsilon of all learners together.
        is_covered: whether the claim is about all of the view.
        guesses: summary of the guesses.
    """

    algorithm: str
    record: str
    view: str
    claim: float
    is_covered: bool
    guesses: _GuessSummary


DEFAULT_EPSILONS = (100_000.0, 10_000.0, 1_000.0, 100.0, 1.0)
"""Default epsilons of the pictures, from little noise to much."""

AttackResults = Mapping[str, Reconstruction]
"""Reconstructions of the same records under one attack, by the protection of their transcript."""


@dataclass(frozen=True, slots=True)
class Gallery:
    """All results of the gallery.

    Attributes:
        attacks: results by attack; empty ones if an optional dependency of the attack is not installed.
        memberships: results of membership inference.
        source: description of the attacked spec or capture; empty: simulated runs over digits.
    """

    attacks: Mapping[str, AttackResults]
    memberships: tuple[MembershipInference, ...] = ()
    source: str = ""


def simulate_gallery(
    epsilons: Sequence[float], runs: int, seed: int, show_status: Callable[[str], AbstractContextManager[object]]
) -> Gallery:
    """Run every attack on simulated runs over scikit-learn's digits.

    Args:
        epsilons: epsilons of the pictures, per record over the whole run.
        runs: runs for membership inference.
        seed: seed of noise, coins and searches.
        show_status: context manager that shows the current step.
    """
    with show_status("rebuilding records from gradients"):
        linear = _attack_with_and_without_noise(_build_linear_spec, epsilons, seed)
    network: AttackResults = {}
    if find_spec("torch") is not None:
        with show_status("searching for records that fit a network's gradients"):
            network = _attack_with_and_without_noise(_build_network_spec, epsilons, seed)
    with show_status("rebuilding records from gossip messages"):
        gossip = _attack_gossip(epsilons, seed)
    with show_status("guessing membership"):
        guesses = tuple(_infer_membership(*case, runs, seed + k) for k, case in enumerate(_MEMBERSHIPS))
    return Gallery({"linear": linear, "network": network, "gossip": gossip}, guesses)


# ---- pictures --------------------------------------------------------------------------------------------------------


def _build_linear_spec(epsilon: float) -> dict[str, Any]:
    """Build the spec of a linear model of ten classes."""
    return {"rounds": _ROUNDS, "algorithm": _build_descent(epsilon), "loss": {"kind": "softmax", "classes": 10}}


def _build_network_spec(epsilon: float) -> dict[str, Any]:
    """Build the spec of a small network, attacked in the one round with untrained parameters."""
    return {"rounds": 2, "algorithm": _build_descent(epsilon), "loss": _NETWORK, "data": {"intercept": False}}


def _build_descent(epsilon: float) -> dict[str, Any]:
    noise = {"kind": "none"} if math.isinf(epsilon) else {"kind": "calibrated", "epsilon": epsilon}
    return {"name": "pd-ogd", "step": _STEP, "noise": noise}


def _attack_with_and_without_noise(
    build_spec: Callable[[float], dict[str, Any]], epsilons: Sequence[float], seed: int
) -> AttackResults:
    """Run one attack without noise, and with noise of every epsilon.

    Args:
        build_spec: builds the spec of the run from epsilon.
        epsilons: epsilons of the noise.
        seed: seed of noise and searches.
    """
    return {_format_label(each): _attack(_prepare(build_spec(each)), seed) for each in (math.inf, *epsilons)}


def _attack_gossip(epsilons: Sequence[float], seed: int) -> AttackResults:
    """Attack PD-FTGL as published, with the smallest epsilon for its decisions, and with noise before gossip."""

    def build_spec(epsilon: float, placement: str) -> dict[str, Any]:
        # Strong regularisation towards the start: a record that is fitted exactly would have a gradient of zero.
        tree = {"epsilon": epsilon, "noise_placement": placement, "block_length": 1, "regularization": 1000.0}
        return {
            "rounds": _ROUNDS + 2,
            "algorithm": {"name": "pd-ftgl", **tree},
            "loss": {"kind": "softmax", "classes": 10},
        }

    smallest = min(epsilons)
    published = _attack(_prepare(build_spec(smallest, "after_gossip")), seed)
    noised = {_format_label(each): _attack(_prepare(build_spec(each, "before_gossip")), seed) for each in epsilons}
    return {f"as published, ε = {format_number(smallest)} for decisions": published, **noised}


def _format_label(epsilon: float) -> str:
    return "no noise" if math.isinf(epsilon) else f"ε = {format_number(epsilon)}"


def _prepare(document: Mapping[str, Any]) -> PreparedRun:
    data = {"source": "digits", **document.get("data", {})}
    return prepare(parse_spec({**_COMMON, **document, "data": data}, source="gallery", allow_imports=True))


def _attack(prepared: PreparedRun, seed: int, *, has_noise: bool | None = None) -> Reconstruction:
    """Simulate the first rounds of a run, without noise if `has_noise` is False, and attack their messages."""
    run, data = prepared.run, prepared.data
    noise = no_noise if has_noise is False else SeededNoise(seed)
    rounds = islice(simulate_rounds(run, data, noise), count_attacked_rounds(run))
    transcript = Transcript.from_rounds(step.message for step in rounds)
    return reconstruct_records(run, data, transcript, seed=seed, has_noise=has_noise)


# ---- spec ------------------------------------------------------------------------------------------------------------


def attack_spec(
    prepared: PreparedRun,
    epsilons: Sequence[float] | None,
    factors: Sequence[float],
    seed: int,
    show_status: Callable[[str], AbstractContextManager[object]],
) -> Gallery:
    """Rebuild records from the messages of a simulated run with the noise of its spec, without noise, and at other levels.

    Args:
        prepared: the run of the spec.
        epsilons: budgets of every learner's messages over the whole run, for which the noise is calibrated; None:
            `DEFAULT_EPSILONS` if there are no factors, and the messages have a finite epsilon.
        factors: factors on the noise of the spec.
        seed: seed of noise and searches.
        show_status: context manager that shows the current step.

    Raises:
        SpecError: The spec's noise cannot be scaled, an epsilon cannot be met, or no attack fits the algorithm.
    """
    spec, data = prepared.run.spec, prepared.data
    epsilon = _compute_epsilon(prepared)
    if epsilons is None:
        epsilons = () if factors or math.isinf(epsilon) else DEFAULT_EPSILONS
    results = dict[str, Reconstruction]()

    def add(label: str, run: PreparedRun, has_noise: bool | None = None) -> None:
        with show_status(f"rebuilding records: {label}"):
            results[label] = _attack(run, seed, has_noise=has_noise)

    add(f"as in the spec, {_format_claim(epsilon)}", prepared)
    if _has_noise(spec):
        add("no noise", prepared, has_noise=False)
    for factor in (each for each in factors if each != 1.0):
        scaled = _scale_noise(prepared, (factor,) * spec.n_learners)
        add(f"noise × {format_number(factor)}, {_format_claim(_compute_epsilon(scaled))}", scaled)
    for each in epsilons:
        found = calibrate(spec, data, BudgetTarget((each,) * spec.n_learners))
        add(_format_label(each), _scale_noise(prepared, found.factors))
    name, count = Path(str(spec.data.source)).name, f"{spec.n_learners} learner{'s' * (spec.n_learners != 1)}"
    return Gallery({"spec": results}, source=f"{spec.algorithm.name}, {name}, {count}, simulated")


def _compute_epsilon(prepared: PreparedRun) -> float:
    """Compute the largest epsilon of a learner over the whole run; with shared records that of all learners together."""
    return combine_costs([LearnerCost(prepared.run, i, own) for i, own in enumerate(prepared.data.learners)])


def _format_claim(epsilon: float) -> str:
    return f"ε = {format_number(epsilon)}" if math.isfinite(epsilon) else "no claim"


def _has_noise(spec: RunSpec) -> bool:
    try:
        spec.algorithm.scale_noise((1.0,) * spec.n_learners)
    except SpecError:
        return False
    return True


def _scale_noise(prepared: PreparedRun, factors: tuple[float, ...]) -> PreparedRun:
    """Return the run with every learner's noise multiplied by its factor."""
    spec = prepared.run.spec
    scaled = spec.model_copy(update={"algorithm": spec.algorithm.scale_noise(factors)})
    return replace(prepared, run=build_run(scaled, prepared.data.n_features))


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
"""Algorithm, source of decisions, epsilon of all learners together, pair of records, and view of each case."""


def _infer_membership(
    name: str, primal: str, epsilon: float, record: str, view: str, runs: int, seed: int
) -> MembershipInference:
    document: dict[str, Any] = {
        "rounds": 4,
        "learners": 4,
        "algorithm": {"name": name, "epsilon": epsilon, "clip": 0.25, "primal": primal},
        "decision_set": {"kind": "box", "low": -1e6, "high": 1e6},
        "data": {"partition": "shared"},
        "topology": {"weights": "out_degree"} if name == "dpsda-ps" else {},
    }
    prepared = _prepare(document)
    run, algorithm, pair = prepared.run, prepared.run.algorithm, _choose_pair(prepared, record)
    assert isinstance(algorithm, DualAveraging)  # noqa: S101 - _MEMBERSHIPS names no other
    worlds = _simulate_worlds(run, prepared.data, pair, runs, seed)
    if view == "messages":
        scores = [_score_messages(run, world.transcript, pair) for world in worlds]
    elif view == "decisions":
        scores = [_score_decisions(run, algorithm, world.decisions, pair) for world in worlds]
    else:
        scores = [_score_both(run, world, pair) for world in worlds]
    claim = compose_guarantees([run.guarantee(i) for i in range(run.spec.n_learners)]).epsilon()
    is_covered = primal == "noised" or view == "messages"
    return MembershipInference(f"{name}, {primal}", record, view, claim, is_covered, _guess(scores, seed))


def _choose_pair(prepared: PreparedRun, record: str) -> _Pair:
    """Choose the first record and one with another label; or a record with equal features, and its mirror image."""
    own = prepared.data.learners[0]
    if record == _DIGIT:
        first = int(own.order[0])
        other = int(np.flatnonzero(own.labels != own.labels[first])[0])
        return own, own.with_use(0, own.features[other], float(own.labels[other]))
    spread: FloatArray = np.full(prepared.data.n_features, prepared.data.n_features**-0.5)
    return own.with_use(0, spread, 1.0), own.with_use(0, -spread, 1.0)
