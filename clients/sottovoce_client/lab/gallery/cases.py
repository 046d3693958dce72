"""What the gallery attacks: runs over scikit-learn's digits, simulated and overheard."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sottovoce.algorithms.dual_averaging.algorithm import DualAveraging
from sottovoce.arrays import FloatArray
from sottovoce.experiment import Prepared, prepare
from sottovoce.lab.attacks import membership
from sottovoce.lab.attacks.rebuild import Rebuilt, rebuild
from sottovoce.noise import SeededNoise
from sottovoce.privacy.guarantee import joint
from sottovoce.running.simulator import simulate
from sottovoce.running.transcript import Transcript
from sottovoce.spec import parse_spec
from sottovoce_client.wording import number

_LEARNERS, _ROUNDS = 8, 9
_COMMON: Mapping[str, Any] = {
    "learners": _LEARNERS,
    "durability": "process",
    "decision_set": {"kind": "l2_ball", "radius": 1000.0},
}
STEP = {"kind": "power", "scale": 1.0, "exponent": 0.5}
_NETWORK = {
    "kind": "torch",
    "module": "sottovoce.lab.attacks.inversion:SmoothNet",
    "shape": [1, 8, 8],
    "feature_bound": 4.0,
    "clip_norm": 2.0,
    "ridge": 0.0,
}
"""Pixels of a digit whose norm is 4 lie between 0 and about 1."""


@dataclass(frozen=True, slots=True)
class Strip:
    """One transcript attacked: a row of pictures.

    Attributes:
        label: what protects it.
        rebuilt: what the attack made of it.
    """

    label: str
    rebuilt: Rebuilt


@dataclass(frozen=True, slots=True)
class Exhibit:
    """One attack on several transcripts of the same records.

    Attributes:
        name: a key of `exhibits.WORDS`.
        strips: all of them; without any, what the attack needs is not installed.
    """

    name: str
    strips: tuple[Strip, ...]


@dataclass(frozen=True, slots=True)
class Membership:
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
    seen: str
    claim: float
    covered: bool
    guessed: membership.GuessingRate


@dataclass(frozen=True, slots=True)
class Gallery:
    """All that is shown."""

    exhibits: tuple[Exhibit, ...]
    memberships: tuple[Membership, ...] = ()
    source: str = ""


# ---- pictures --------------------------------------------------------------------------------------------------------


def linear(epsilon: float) -> dict[str, Any]:
    """A linear model of ten classes."""
    return {"rounds": _ROUNDS, "algorithm": _descent(epsilon), "loss": {"kind": "softmax", "classes": 10}}


def network(epsilon: float) -> dict[str, Any]:
    """A small network, in the one round whose parameters are not trained."""
    return {"rounds": 2, "algorithm": _descent(epsilon), "loss": _NETWORK, "data": {"intercept": False}}


def _descent(epsilon: float) -> dict[str, Any]:
    noise = {"kind": "none"} if math.isinf(epsilon) else {"kind": "calibrated", "epsilon": epsilon}
    return {"name": "pd-ogd", "step": STEP, "noise": noise}


def exhibit(
    name: str, spec_of: Callable[[float], dict[str, Any]], epsilons: Sequence[float], seed: int, rounds: int = 8
) -> Exhibit:
    """One attack without noise, and with noise of every epsilon.

    Args:
        name: of the attack.
        spec_of: the run, given epsilon.
        epsilons: of the noise.
        seed: of noise and searches.
        rounds: records of every learner to rebuild.
    """
    strips = []
    for epsilon in (math.inf, *epsilons):
        prepared = _prepared(spec_of(epsilon))
        strips.append(Strip(_label(epsilon), _attacked(prepared, seed, rounds)))
    return Exhibit(name, tuple(strips))


def gossip(epsilons: Sequence[float], seed: int) -> Exhibit:
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
    published = _attacked(_prepared(spec(smallest, "after_gossip")), seed, 8)
    strips = [Strip(f"as published, ε = {number(smallest)} for decisions", published)]
    strips += [Strip(_label(each), _attacked(_prepared(spec(each, "before_gossip")), seed, 8)) for each in epsilons]
    return Exhibit("gossip", tuple(strips))


def _label(epsilon: float) -> str:
    return "no noise" if math.isinf(epsilon) else f"ε = {number(epsilon)}"


def _prepared(document: Mapping[str, Any]) -> Prepared:
    data = {"source": "digits", **document.get("data", {})}
    return prepare(parse_spec({**_COMMON, **document, "data": data}, source="gallery", imports=True))


def _attacked(prepared: Prepared, seed: int, rounds: int) -> Rebuilt:
    """Simulate, overhear, attack."""
    heard = Transcript.of(step.message for step in simulate(prepared.run, prepared.data, SeededNoise(seed)))
    return rebuild(prepared.run, prepared.data, heard, rounds=rounds, seed=seed)


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


def memberships(runs: int, seed: int) -> tuple[Membership, ...]:
    """Guess, in every setting, whether all learners held a record or another one."""
    return tuple(_guessed(*setting, runs, seed + k) for k, setting in enumerate(_MEMBERSHIPS))


def _guessed(name: str, primal: str, epsilon: float, record: str, seen: str, runs: int, seed: int) -> Membership:
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
    worlds = membership.simulate_worlds(run, prepared.data, pair, runs, seed)
    if seen == "messages":
        scores = [membership.from_messages(run, world.transcript, pair) for world in worlds]
    elif seen == "decisions":
        scores = [membership.from_decisions(run, algorithm, world.decisions, pair) for world in worlds]
    else:
        scores = [membership.from_both(run, world, pair) for world in worlds]
    promised = joint([run.guarantee(i) for i in range(run.spec.n_learners)]).epsilon()
    covered = primal == "noised" or seen == "messages"
    return Membership(f"{name}, {primal}", record, seen, promised, covered, membership.guess(scores, seed))


def _pair(prepared: Prepared, record: str) -> membership.Pair:
    """The first record as it is, or another one; or a record that weighs equally in all features, against its mirror image."""
    own = prepared.data.learners[0]
    if record == _DIGIT:
        first = int(own.order[0])
        other = int(np.flatnonzero(own.labels != own.labels[first])[0])
        return own, own.with_use(0, own.features[other], float(own.labels[other]))
    spread: FloatArray = np.full(prepared.data.n_features, prepared.data.n_features**-0.5)
    return own.with_use(0, spread, 1.0), own.with_use(0, -spread, 1.0)
