"""Attacks on the privacy claims of all algorithms: one table of runs, and one search for adjacent data that tells most.

The search trusts nothing but the replay: it draws records of one learner, what all others say, and the learner's noise, then
swaps records and climbs towards the largest loss relative to the claim. Nobody's messages need be honest: a claim holds for
whatever a learner hears.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from sottovoce_core.algorithms.interface import LocalMessages, Message, StateAxes
from sottovoce_core.arrays import FloatArray, IntArray
from sottovoce_core.data import LearnerData, PlacedData
from sottovoce_core.noise import NoiseRequest, NoiseSource, SeededNoise
from sottovoce_core.runs.replay import replay
from sottovoce_core.runs.run import Run, build_run
from sottovoce_core.runs.simulator import simulate_rounds
from sottovoce_core.runs.transcript import Transcript
from sottovoce_core.spec import parse_spec

Swapped = Literal["record", "round", "learner"]
"""What differs between adjacent worlds: one record, all records of a round, or all records of a learner."""

LOUDEST = 1e20
"""Size of the largest numbers that others say."""


@dataclass(frozen=True, slots=True)
class Setup:
    """A small run. `sections` go over the defaults of `build`."""

    algorithm: dict[str, Any]
    sections: dict[str, Any]
    n_features: int = 2
    rounds: int = 8
    swapped: Swapped = "record"
    attained: float = 0.0
    """What part of the claim a search must reach: how tight the claim is known to be."""

    def build(self) -> Run:
        common = {"learners": 3, "loss": LOGISTIC, "decision_set": BALL, "topology": RING, "durability": "process"}
        document = {**common, "rounds": self.rounds, "algorithm": self.algorithm, **self.sections}
        return build_run(parse_spec(document, allow_imports=True), self.n_features)


LOGISTIC = {"kind": "logistic", "ridge": 0.05}
PLAIN = {"kind": "logistic", "ridge": 0.0, "feature_bound": 2.0}
STIFF = {"kind": "logistic", "ridge": 2.0}
SQUARED = {"kind": "ridge", "ridge": 0.1}
CLIPPED = {"kind": "ridge", "ridge": 0.0, "feature_bound": 2.0, "label_bound": 3.0, "clip_norm": 0.7}
HINGE = {"kind": "hinge", "ridge": 0.02}
SMOOTHED = {"kind": "smoothed_hinge", "width": 0.5, "ridge": 0.1}
SOFTMAX = {"kind": "softmax", "classes": 2, "clip_norm": 0.6}
BALL = {"kind": "l2_ball", "radius": 2.0}
SMALL = {"kind": "l2_ball", "radius": 0.3}
BOX = {"kind": "box", "low": -1.0, "high": 1.5}
RING, STAR, PATH = ({"graph": kind, "weights": "metropolis"} for kind in ("ring", "star", "path"))
COMPLETE = {"graph": "complete", "weights": "max_degree"}
CYCLE = {"graph": {"kind": "edges", "edges": [[0, 1], [1, 2], [2, 0]], "directed": True}, "weights": "in_degree"}
MOVING = {"sequence": {"kind": "random", "probability": 0.6, "seed": 3}, "weights": "metropolis"}
PUSHED = {"sequence": {"kind": "random", "probability": 0.5, "seed": 1, "directed": True}, "weights": "out_degree"}


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is tried: random attacks, steps of a climb from the best, other attacks, runs of a mean, and the seed of all."""

    starts: int
    steps: int
    tries: int
    replicas: int
    seed: int


def power(sigma: Any, varsigma: Any = 0.0) -> dict[str, Any]:
    """A section `noise`."""
    return {"kind": "power", "sigma": sigma, "varsigma": varsigma}


def _setup(
    name: str,
    loss: Any = LOGISTIC,
    decision_set: Any = BALL,
    topology: Any = RING,
    learners: int = 3,
    parameters: dict[str, Any] | None = None,
    **more: Any,
) -> Setup:
    sections = {"loss": loss, "decision_set": decision_set, "topology": topology, "learners": learners}
    return Setup({"name": name, **(parameters or {})}, sections, **more)


def _dol(loss: Any = LOGISTIC, decision_set: Any = BALL, topology: Any = RING, *, more: Any = None, **p: Any) -> Setup:
    return _setup("ldp-dol", loss, decision_set, topology, parameters=p, **(more or {}))


_FAST = {"kind": "power", "scale": 4.0, "exponent": 0.1}
_SLOW = {"kind": "power", "scale": 0.05, "exponent": 0.9}
_ROUND: dict[str, Any] = {"swapped": "round"}

SETUPS: dict[str, Setup] = {
    "ldp-dol": _dol(),
    "ldp-dol loose": _dol(PLAIN, BOX, COMPLETE, accounting="loose", sigma=0.5),
    "ldp-dol smooth": _dol(SMOOTHED, topology=STAR, accounting="smooth", lam0=2.0),
    "ldp-dol convex": _dol(SQUARED, BOX, PATH, accounting="convex", lam0=0.4, varsigma=0.0, sigma=[0.1, 1.0, 5.0]),
    "ldp-dol clip": _dol(CLIPPED, topology=COMPLETE, accounting="clip", lam0=3.0),
    "ldp-dol hinge": _dol(HINGE, SMALL, lam0=3.0),
    "ldp-dol stiff": _dol(STIFF, BOX, PATH, lam0=0.9, more={"n_features": 1}),
    "ldp-dol softmax": _dol(SOFTMAX, lam0=2.0),
    "dsgd": _setup("dsgd"),
    "dsgd cta": _setup("dsgd", PLAIN, BOX, STAR, parameters={"form": "combine_then_adapt", "step": _FAST}),
    "dsgd consensus": _setup("dsgd", SQUARED, topology=PATH, parameters={"form": "consensus", "step": _FAST}),
    "dsgd moving": _setup("dsgd", CLIPPED, SMALL, MOVING, parameters={"noise": power([0.3, 1.0, 4.0], -0.5)}),
    "dsgd hinge": _setup("dsgd", HINGE, topology=COMPLETE, parameters={"step": _SLOW}),
    "dola": _setup("dola"),
    "dola hinge": _setup("dola", HINGE, n_features=1, attained=0.99),
    "dola own": _setup("dola", SQUARED, BOX, parameters={"gradient_at": "own", "step": _FAST}),
    "dpdola": _setup("dpdola", HINGE, topology=STAR),
    "pdop": _setup("pdop", HINGE, swapped="learner"),
    "pdop own": _setup("pdop", STIFF, SMALL, PATH, parameters={"gradient_at": "own"}, swapped="learner"),
    "pd-ogd": _setup("pd-ogd", HINGE, n_features=1, attained=0.99),
    "pd-ogd t-fold": _setup(
        "pd-ogd",
        CLIPPED,
        BOX,
        parameters={"noise": {"kind": "calibrated", "epsilon": [1, 2, 9], "charged": "every_round"}},
    ),
    "dpsr": _setup("dpsr", topology=CYCLE),
    "dpsr fast": _setup("dpsr", SQUARED, BOX, CYCLE, parameters={"step": _FAST}),
    "dpsda-c": _setup("dpsda-c", decision_set=BOX, n_features=3, **_ROUND),
    "dpsda-c clean": _setup(
        "dpsda-c", SMOOTHED, BOX, STAR, parameters={"primal": "clean", "clip": 0.2, "step": 3.0}, n_features=4, **_ROUND
    ),
    "dpsda-c sums": _setup(
        "dpsda-c", topology=PATH, parameters={"batch": "sum", "clip": 0.3, "noise_on": "all"}, n_features=3, **_ROUND
    ),
    "dpsda-ps": _setup("dpsda-ps", decision_set=BOX, topology=PUSHED, n_features=3, **_ROUND),
    "dpsda-ps clean": _setup(
        "dpsda-ps", SQUARED, BOX, PUSHED, parameters={"primal": "clean", "epsilon": 3.0}, n_features=3, **_ROUND
    ),
    "dpps": _setup("dpps", topology=PUSHED, **_ROUND),
    "dpps hinge": _setup("dpps", HINGE, topology=PUSHED, **_ROUND),
    "dpps slow": _setup("dpps", PLAIN, BOX, PUSHED, parameters={"step": 0.05}, rounds=12, **_ROUND),
    "dpps noised": _setup("dpps", STIFF, topology=PUSHED, parameters={"primal": "noised", "step": 4.0}, **_ROUND),
    "dpcda": _setup("dpcda", HINGE, learners=1, n_features=1, attained=0.99, **_ROUND),
    "dpcda clean": _setup("dpcda", STIFF, BOX, learners=1, parameters={"primal": "clean", "step": 0.3}, **_ROUND),
    "pd-ftgl": _setup(
        "pd-ftgl", HINGE, parameters={"epsilon": 3.0, "block_length": 1}, n_features=1, rounds=9, attained=0.99
    ),
    "pd-ftgl blocks": _setup(
        "pd-ftgl", CLIPPED, topology=PATH, parameters={"epsilon": [1.0, 2.0, 8.0], "block_length": 2}, rounds=12
    ),
    "pd-ftgl plain": _setup(
        "pd-ftgl",
        HINGE,
        BOX,
        STAR,
        parameters={"noise_scale": 0.4, "block_length": 3, "gossip_steps": 2, "momentum": 0.0, "lazy": True},
        rounds=14,
    ),
    "pd-ocg": _setup("pd-ocg", SQUARED, parameters={"epsilon": 2.0, "block_length": 2, "multiplier": 0.01}, rounds=12),
    "dvp": _setup("dvp", n_features=2, rounds=6),
    "dvp exact": _setup("dvp", STIFF, parameters={"output_noise": 0.0, "alpha": [0.2, 1.0, 3.0]}, rounds=6),
    "dvp printed": _setup(
        "dvp",
        SMOOTHED,
        topology=STAR,
        parameters={"rule": "printed", "scale_rule": "printed", "alpha": 0.5, "loss_weight": 4.0},
        rounds=6,
    ),
    "pvp": _setup("pvp", topology=PATH, rounds=6),
    "pvp own": _setup("pvp", STIFF, parameters={"variant": "own_clean", "penalty": 2.0}, rounds=6),
    "pvp literal": _setup(
        "pvp", SMOOTHED, parameters={"variant": "literal", "penalty": 0.05, "scale_rule": "printed"}, rounds=6
    ),
    "pvp and dvp": _setup(
        "pvp", topology=COMPLETE, parameters={"final": "dvp", "final_alpha": 0.7, "variant": "literal"}, rounds=5
    ),
}

EXPOSED: dict[str, Setup] = {
    "admm": _setup("admm", rounds=6),
    "d-ogd": _setup("d-ogd"),
    "d-ftgl": _setup("d-ftgl"),
    "dsgd without noise": _setup("dsgd", parameters={"noise": {"kind": "none"}}),
    "dpps without noise": _setup("dpps", topology=PUSHED, parameters={"sigma": 0.0}, swapped="round"),
    "pd-ftgl after gossip": _setup(
        "pd-ftgl", parameters={"epsilon": 1.0, "block_length": 2, "noise_placement": "after_gossip"}
    ),
}
"""Runs whose messages carry no noise: their claim must be infinite, and so must the loss."""


# ---- records ---------------------------------------------------------------------------------------------------------


def records(run: Run, n_features: int, count: int, generator: np.random.Generator) -> tuple[FloatArray, FloatArray]:
    """Extreme records: rows on the bound (or above: they are scaled down), along axes, signs or anywhere; extreme labels."""
    loss: Any = run.loss
    axes = np.eye(n_features)[generator.integers(n_features, size=count)] * generator.choice([-1.0, 1.0], (count, 1))
    signs = generator.choice([-1.0, 1.0], (count, n_features))
    drawn = np.stack([axes, signs, generator.normal(size=(count, n_features))])
    rows = drawn[generator.integers(3, size=count), np.arange(count)]
    rows *= loss.feature_bound / np.linalg.norm(rows, axis=1, keepdims=True)
    rows *= generator.choice([1.0, 1.0, 1.0, 5.0, 0.3], (count, 1))
    if hasattr(loss, "label_bound"):
        return rows, loss.label_bound * generator.choice([-1.0, 1.0, 3.0, 0.5], count)
    return rows, generator.integers(0, 2, count).astype(np.float64)


def counts_of(rounds: int, kind: int, generator: np.random.Generator) -> IntArray:
    """Records of every round: one; a few, or none; many in one round; none at first."""
    if kind == 0:
        return np.ones(rounds, np.int64)
    counts = generator.integers(0, 4, rounds)
    counts[generator.integers(rounds)] += 8 if kind == 2 else 1
    if kind == 3:
        counts[: rounds // 3] = 0
        counts[-1] += not counts.any()
    return counts.astype(np.int64)


def learner_data(rows: FloatArray, labels: FloatArray, counts: IntArray) -> LearnerData:
    """Every record is used once, in order."""
    return LearnerData(rows, labels, np.arange(len(labels)), np.concatenate([[0], np.cumsum(counts)]).astype(np.int64))


# ---- messages --------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Times:
    """Noise of another source times a power of two: still on its lattice."""

    source: NoiseSource
    factor: float

    def __call__(self, draw: NoiseRequest) -> FloatArray:
        finer = None if draw.spacing is None else draw.spacing / min(self.factor or 1.0, 1.0)
        return self.factor * self.source(replace(draw, spacing=finer))


def adversary(
    name: str, shape: tuple[int, ...], generator: np.random.Generator, loudest: float | None = None
) -> FloatArray:
    """What somebody may say in place of a message: nothing, what honest learners may say, or very much (always, if given)."""
    most = loudest or generator.choice([10.0, 10.0, LOUDEST])
    size = np.exp(generator.uniform(np.log(loudest or 1e-3), np.log(most), (1, shape[1], 1)))
    said: FloatArray = np.where(generator.random(size.shape) < 0.2, 0.0, size) * generator.normal(size=shape)
    return said * 1e-9 if name == "w" and most < LOUDEST else said


def overhear(
    run: Run,
    own: LearnerData,
    learner: int,
    noise: NoiseSource,
    replicas: int,
    generator: np.random.Generator,
    loudest: float | None = None,
) -> Transcript:
    """Drive one learner by itself; whatever its neighbours say is made up."""
    algorithm, shapes = run.algorithm, run.algorithm.field_shapes()
    state, n = algorithm.init(StateAxes((learner,), replicas)), run.spec.n_learners
    said = {name: np.zeros((run.spec.rounds, n, replicas, *shape)) for name, shape in shapes.items()}
    for t in range(run.spec.rounds):
        state, message = algorithm.emit(state, noise)
        mixing = run.network.mixing(t)
        weights = mixing.in_neighbour_weights(learner)
        messages = {
            j: Message(
                {name: adversary(name, (1, replicas, *shape), generator, loudest) for name, shape in shapes.items()}
            )
            for j in weights
        }
        for name in shapes:
            said[name][t, learner] = message[name][0]
            for j in weights:
                said[name][t, j] = messages[j][name][0]
        batch = own.batch(t)
        stacked = replace(batch, features=batch.features[None], labels=batch.labels[None])
        state = algorithm.update(state, LocalMessages(weights, messages, float(mixing.own_weights[learner])), stacked)
    return Transcript(said)


# ---- the search ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Attack:
    """Two adjacent data sets of one learner: D, and which of its records are others in D'."""

    learner: int
    counts: IntArray
    rows: FloatArray
    labels: FloatArray
    swapped: IntArray
    new_rows: FloatArray
    new_labels: FloatArray

    @property
    def own(self) -> LearnerData:
        return learner_data(self.rows, self.labels, self.counts)

    @property
    def other(self) -> LearnerData:
        rows, labels = self.rows.copy(), self.labels.copy()
        rows[self.swapped], labels[self.swapped] = self.new_rows[self.swapped], self.new_labels[self.swapped]
        return learner_data(rows, labels, self.counts)

    @property
    def replaced(self) -> IntArray:
        """`(rounds,)` how many records of each round differ."""
        rounds = np.repeat(np.arange(len(self.counts)), self.counts)[self.swapped]
        return np.bincount(rounds, minlength=len(self.counts)).astype(np.int64)


def drawn(setup: Setup, run: Run, generator: np.random.Generator) -> Attack:
    """A random one; in some, records of several rounds are swapped together (a record that is used again)."""
    counts = counts_of(setup.rounds, int(generator.integers(4)), generator)
    rows, labels = records(run, setup.n_features, int(counts.sum()), generator)
    new_rows, new_labels = records(run, setup.n_features, len(rows), generator)
    opposite = generator.random(len(rows)) < 0.5
    new_rows[opposite] = rows[opposite] * generator.choice([-1.0, 1.0], (int(opposite.sum()), 1))
    learner = int(generator.integers(run.spec.n_learners))
    attack = Attack(learner, counts, rows, labels, np.zeros(0, np.int64), new_rows, new_labels)
    return replace(attack, swapped=_swap(setup, counts, generator))


def _swap(setup: Setup, counts: IntArray, generator: np.random.Generator) -> IntArray:
    total = int(counts.sum())
    if setup.swapped == "learner":
        return np.arange(total)
    uses = 1 if generator.random() < 0.7 else 3
    if setup.swapped == "record":
        return np.unique(generator.integers(total, size=uses))
    chosen = generator.choice(np.flatnonzero(counts), uses)
    return np.flatnonzero(np.isin(np.repeat(np.arange(len(counts)), counts), chosen))


def moved(setup: Setup, run: Run, attack: Attack, generator: np.random.Generator) -> Attack:
    """A neighbour of an attack in the search: some records are others, or what is swapped is."""
    rows, labels = records(run, setup.n_features, len(attack.rows), generator)
    nudge = generator.random() < 0.5
    if nudge:
        rows = attack.rows + 0.2 * generator.normal(size=attack.rows.shape)
    kept = (generator.random(len(rows)) < 0.7)[:, None]
    new = generator.random(len(rows)) < 0.5
    return replace(
        attack,
        rows=np.where(kept, attack.rows, rows),
        labels=np.where(kept[:, 0] | nudge, attack.labels, labels),
        new_rows=np.where(kept | new[:, None], attack.new_rows, -rows),
        new_labels=np.where(kept[:, 0] | new, attack.new_labels, labels),
        swapped=_swap(setup, attack.counts, generator) if generator.random() < 0.3 else attack.swapped,
    )


def ratio(loss: FloatArray, claim: FloatArray) -> float:
    """The largest of `loss (rounds, ...) / claim (rounds,)`; losses at the level of rounding are none."""
    claim = claim.reshape(-1, *[1] * (loss.ndim - 1))
    counted = (np.abs(loss) > 1e-9) & (claim < np.inf)
    return float(np.divide(np.abs(loss), claim, out=np.zeros_like(loss), where=counted).max(initial=0.0))


def told(run: Run, attack: Attack, generator: np.random.Generator, loudest: float | None = None) -> float:
    """The largest ratio of loss to claim after any round of some transcripts, realised or largest possible."""
    noise = Times(SeededNoise(int(generator.integers(2**31))), float(generator.choice([0.0, 0.5, 1.0, 64.0])))
    transcript = overhear(run, attack.own, attack.learner, noise, 4, generator, loudest)
    losses = replay(run, transcript, attack.learner, [attack.own, attack.other])
    claim = run.guarantee(attack.learner, attack.counts, attack.replaced).cumulative_epsilon
    return max(ratio(np.cumsum(each, axis=0), claim) for each in (losses.max_losses, losses.realised_losses))


def search(setup: Setup, generator: np.random.Generator, *, starts: int, steps: int) -> tuple[float, Attack]:
    """Climb from the best of random attacks. The largest ratio of loss to claim that was found, and where."""
    run = setup.build()
    where = drawn(setup, run, generator)
    best = told(run, where, generator)
    for _ in range(starts):
        attack = drawn(setup, run, generator)
        found = told(run, attack, generator)
        if found > best:
            best, where = found, attack
    for _ in range(steps):
        attack = moved(setup, run, where, generator)
        found = told(run, attack, generator)
        if found >= best:
            best, where = found, attack
    return best, where


def undercharged(setup: Setup, run: Run, attack: Attack) -> float:
    """How much of what one swap costs, by any round, the accountant has not charged by then."""
    charged, accountant = np.zeros(setup.rounds), run.algorithm.accountant(attack.learner)
    for t, count in enumerate(attack.counts.tolist()):
        charged[t] = accountant.next_loss()
        accountant.advance(count)
    spent = run.guarantee(attack.learner, attack.counts, attack.replaced).cumulative_epsilon
    finite = np.isfinite(spent)
    return float((spent - np.cumsum(charged))[finite].max(initial=0.0) / max(1.0, spent[finite].max(initial=0.0)))


# ---- honest learners -------------------------------------------------------------------------------------------------


def shared(run: Run) -> bool:
    """Do all learners hold the same records?"""
    return run.algorithm.accountant(0).has_shared_records


def placed(setup: Setup, run: Run, attack: Attack, generator: np.random.Generator) -> PlacedData:
    """Records for all learners: those of the attack for its learner, or for all where records are shared."""
    everybody = []
    for i in range(run.spec.n_learners):
        others = learner_data(*records(run, setup.n_features, len(attack.rows), generator), attack.counts)
        everybody.append(attack.own if i == attack.learner or shared(run) else others)
    return PlacedData(tuple(everybody), attack.rows[:1], attack.labels[:1])


def losses_of(
    setup: Setup, run: Run, attacks: Sequence[Attack], noise: NoiseSource, replicas: int, generator: np.random.Generator
) -> tuple[FloatArray, FloatArray]:
    """Realised and largest losses `(rounds, attacks, replicas)` among honest learners, for attacks on the same data.

    Where learners share records, the losses of all of them together.
    """
    first = attacks[0]
    data = placed(setup, run, first, generator)
    transcript = Transcript.from_rounds(step.message for step in simulate_rounds(run, data, noise, replicas))
    learners = range(run.spec.n_learners) if shared(run) else [first.learner]
    worlds = [first.own, *(attack.other for attack in attacks)]
    parts = [replay(run, transcript, i, worlds) for i in learners]
    return np.sum([part.realised_losses for part in parts], axis=0), np.sum([part.max_losses for part in parts], axis=0)


def counted(losses: FloatArray, largest: FloatArray, most: float) -> FloatArray:
    """Sum of the losses of all rounds until one could carry it above `most`: known before that round's message."""
    total: FloatArray = np.sum(losses, axis=0, where=np.cumsum(largest, axis=0) <= most)
    return total


def mild(setup: Setup, run: Run, generator: np.random.Generator, most: float) -> Attack:
    """All records of a learner are moved, by so much that the losses counted up to `most` are large, and in many rounds."""
    tried = []
    for _ in range(3):
        attack = drawn(setup, run, generator)
        everything = replace(attack, swapped=np.arange(len(attack.rows)), new_labels=attack.labels)
        moved = [replace(everything, new_rows=attack.rows * (1.0 - 2.0 * 1.3**-k)) for k in range(16)]
        _, largest = losses_of(setup, run, moved, SeededNoise(0), 30, generator)
        told = counted(np.sqrt(np.maximum(largest, 0.0)), largest, most).mean(axis=-1)
        tried.append((float(told.max()), moved[int(told.argmax())]))
    return max(tried, key=lambda each: each[0])[1]
