"""Canaries (Steinke, Nasr, Jagielski 2023): fair coins, hidden in the records of a real run, that its messages should not tell.

At every place, a learner's round, a coin decides which of two records replaces the first record of that round: one on the
loss's bound, with all its weight in one feature, or its mirror image (under a schema: one at its ends, or its opposite). The
places of a learner are `window` rounds apart, so the messages of the `window` rounds after a place show its coin alone, given
the coins before. Their exact loss `log p(messages | 0) - log p(messages | 1)` is the best hint there is; below `tau` nobody
guesses.

Why bets on the guesses, in order, are fair. Fix all coins but the k-th. The two worlds that are left are adjacent, so given all
messages up to the end of the window, and all other coins, the k-th coin is guessed right with probability at most
`sigmoid(epsilon)`, however one guesses. The k-th guess is a function of these messages and of the coins before the k-th; and
so is everything known when it is bet on. It must use no later coin: earlier guesses, told right or wrong, would then say
something of the k-th one. `tau` is from simulated runs with other coins, for the same reason.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
from scipy import special

from sottovoce_core.algorithms.interface import Message
from sottovoce_core.arrays import Batch, FloatArray
from sottovoce_core.auditing.bounds import choose_threshold
from sottovoce_core.auditing.online.watch import Alarm
from sottovoce_core.auditing.worst_case_search import add_intercept, mirror_record
from sottovoce_core.data import LearnerData, PlacedData
from sottovoce_core.errors import SpecError
from sottovoce_core.noise import SeededNoise
from sottovoce_core.runs.replay import Replay
from sottovoce_core.runs.run import Run
from sottovoce_core.runs.simulator import simulate_rounds

_MAX_WINDOW_ROUNDS = 16
_MIN_REHEARSAL_COINS = 2000
"""Coins in simulated runs, at least, from which tau is found."""


@dataclass(frozen=True, slots=True, order=True)
class CanaryPosition:
    """Where a coin is: the first record that a learner learns in a round."""

    round: int
    learner: int


@dataclass(frozen=True, slots=True)
class Canaries:
    """Coins and all that is needed to score them. Secret until the run is over.

    Attributes:
        places: in order of rounds, then of learners.
        coins: 0 or 1 for each place.
        window: rounds whose messages are scored.
        size: weight of a record's one feature.
        label: of all records.
        tau: from which absolute loss on to guess.
        claim: the largest epsilon that is promised for the swap at any place, by the end of its window.
        pair: the two records, `(features,)` each, where the run has a schema, which allows them.
    """

    positions: tuple[CanaryPosition, ...]
    coins: tuple[int, ...]
    window: int
    size: float
    label: float
    tau: float
    claim: float
    record_pair: tuple[tuple[float, ...], tuple[float, ...]] | None = None

    def build_record(self, k: int, coin: int, n_features: int) -> FloatArray:
        """The record `(features,)` that stands at place k for this coin."""
        if self.record_pair is not None:
            return np.array(self.record_pair[coin])
        record = np.zeros(n_features)
        record[k % n_features] = -self.size if coin else self.size
        return record

    def insert_into(self, data: PlacedData) -> PlacedData:
        """All records, with the canaries in their places."""
        by_learner: dict[int, list[int]] = {}
        for k, place in enumerate(self.positions):
            by_learner.setdefault(place.learner, []).append(k)
        for i, mine in by_learner.items():
            data = data.with_learner(i, self._in_learner(data.learners[i], mine))
        return data

    def _in_learner(self, own: LearnerData, mine: list[int]) -> LearnerData:
        features, labels = own.features.copy(), own.labels.copy()
        for k in mine:
            row = int(own.rows(self.positions[k].round)[0])
            features[row] = self.build_record(k, self.coins[k], features.shape[1])
            labels[row] = self.label
        return replace(own, features=features, labels=labels)


# ---- drawing ---------------------------------------------------------------------------------------------------------


def draw_canaries(run: Run, data: PlacedData, count: int, generator: np.random.Generator) -> Canaries:
    """Toss the coins, choose their places, and fix tau by simulated runs with other coins.

    Args:
        run: what will be run.
        data: what its learners would learn.
        count: how many.
        generator: of places, coins and simulated noise: for a real run seeded with entropy.

    Raises:
        SpecError: a canary would not be one event, nothing finite is promised, or there are not so many places; the run does not
            wait for late neighbours, or its schema allows one record only.
    """
    run.require_synchronous_rounds("guessing canaries")
    _require_events(run, data)
    window = _window(run, data, count)
    free = _free(run, data, window)
    if not 1 <= count <= len(free):
        raise SpecError(f"canaries must be 1 to {len(free)}, one a learner and round that has a record, got {count}")
    places = tuple(sorted(free[k] for k in generator.choice(len(free), count, replace=False)))
    claim = max(_claim(run, data, place, window) for place in places)
    if not 0.0 < claim < math.inf:
        raise SpecError(
            f"canaries test a finite promise of {run.spec.algorithm.name}, and it promises epsilon {claim:g}"
        )
    blank = Canaries(places, (0,) * count, window, *_extreme(run, data), 0.0, claim, _pair(run))
    other, coins = (tuple(generator.integers(0, 2, count).tolist()) for _ in range(2))
    tau = _rehearsed(run, data, replace(blank, coins=other), int(generator.integers(2**63)))
    return replace(blank, coins=coins, tau=tau)


def _require_events(run: Run, data: PlacedData) -> None:
    if run.algorithm.accountant(0).has_shared_records:
        raise SpecError("canaries are records of one learner each, and here all learners hold the same records")
    for name, own in zip(run.spec.names, data.learners, strict=True):
        if own.uses().max(initial=0) > 1:
            raise SpecError(
                f"canaries need records that are used once, so that each is one event; {name} uses some of its "
                f"{len(own.labels)} records {own.uses().max()} times: set data.reuse to false, or run fewer rounds"
            )


def _window(run: Run, data: PlacedData, count: int) -> int:
    """The longest one that leaves enough places."""
    for window in range(min(_MAX_WINDOW_ROUNDS, run.spec.rounds - 1), 1, -1):
        if len(_free(run, data, window)) >= count:
            return window
    return 1


def _free(run: Run, data: PlacedData, window: int) -> list[CanaryPosition]:
    """Where a coin may be: rounds a window apart in which a learner has a record."""
    rounds = range(0, run.spec.rounds - window, window)
    return [CanaryPosition(t, i) for i, own in enumerate(data.learners) for t in rounds if len(own.rows(t))]


def _claim(run: Run, data: PlacedData, place: CanaryPosition, window: int) -> float:
    """What is promised for this swap to those who hear all messages up to the end of its window."""
    replaced = np.zeros(run.spec.rounds, dtype=np.int64)
    replaced[place.round] = 1
    counts = np.diff(data.learners[place.learner].offsets)
    return run.guarantee(place.learner, counts, replaced).epsilon(place.round + window + 1)


def _extreme(run: Run, data: PlacedData) -> tuple[float, float]:
    """Size and label of the records that move a gradient most, of those that obey the loss's bound."""
    bound = run.loss.feature_bound
    longest = max(float(np.linalg.norm(own.features, axis=1).max(initial=0.0)) for own in data.learners)
    label = max((float(b) for own in data.learners for b in np.unique(own.labels)), key=abs)
    return (bound if math.isfinite(bound) else longest), label


def _pair(run: Run) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
    """Two records that a schema allows, far from each other; None: there is no schema."""
    if (schema := run.spec.data.schema) is None:
        return None
    first = add_intercept(run, schema.make_max_norm_record())
    if (first == (second := mirror_record(first, schema))).all():
        raise SpecError("canaries are two different records, and data.schema allows one only")
    return tuple(first.tolist()), tuple(second.tolist())


def _rehearsed(run: Run, data: PlacedData, canaries: Canaries, seed: int) -> float:
    """Tau: from which loss on guesses give the largest bound, if all is as claimed."""
    replicas = -(-_MIN_REHEARSAL_COINS // len(canaries.positions))
    known = canaries.insert_into(data)
    scorer, strengths = _Scorer(run, known, canaries, replicas), []
    last = canaries.positions[-1].round + canaries.window + 1
    for step in islice(simulate_rounds(run, known, SeededNoise(seed), replicas), last):
        strengths += [np.abs(loss) for _, loss in scorer.take(step.t, step.split_by_sender())]
    known_strengths, guesses = np.nan_to_num(np.concatenate(strengths)), len(canaries.positions)
    tau = choose_threshold(known_strengths, guesses, 0.05)
    while tau > known_strengths.max() * (1.0 - 1e-6) and guesses < 2**20:  # so few coins show nothing: as if of more
        guesses *= 2
        tau = choose_threshold(known_strengths, guesses, 0.05)
    return tau


# ---- scoring ---------------------------------------------------------------------------------------------------------


class _Trial:
    """One coin: the learner's state in both worlds."""

    def __init__(self, k: int, known: Replay) -> None:
        self.k, self.worlds = k, (copy(known), copy(known))
        self.loss: FloatArray = np.zeros(1)

    def hear(self, messages: Mapping[int, Message], batches: tuple[Batch, Batch]) -> None:
        first, second = (world.step(messages, batch) for world, batch in zip(self.worlds, batches, strict=True))
        if first is None or second is None:
            self.loss = np.full_like(self.loss, np.nan)
            return
        with np.errstate(invalid="ignore"):  # neither world could have said it
            self.loss = self.loss + (first - second)[0]


class _Scorer:
    """Follows a run, and gives the exact loss of every coin at the end of its window.

    Args:
        run: the run.
        data: with the canaries in it.
        canaries: those; of a coin only what comes before its own place is used to score it.
        replicas: runs side by side.
    """

    def __init__(self, run: Run, data: PlacedData, canaries: Canaries, replicas: int = 1) -> None:
        self._canaries, self._data = canaries, data
        self._known = {i: Replay(run, i, replicas) for i in {place.learner for place in canaries.positions}}
        self._trials: list[_Trial] = []
        self._begun = 0

    def take(self, t: int, messages: Mapping[int, Message]) -> list[tuple[int, FloatArray]]:
        """Take the messages of round t, by sender, fields `(1, replicas, dim)`.

        Returns:
            The places whose window ends, in order, and their losses `(replicas,)`; not-a-number where somebody was not
            overheard, or neither world could have said it.
        """
        for trial in self._trials:
            batch = self._batch(trial, t)
            trial.hear(messages, (batch, batch))
        self._begin(t, messages)
        for i, known in list(self._known.items()):
            known.step(messages, self._data.learners[i].batch(t))
            if not known.is_known:
                del self._known[i]
        done = [trial for trial in self._trials if self._canaries.positions[trial.k].round + self._canaries.window == t]
        self._trials = [trial for trial in self._trials if trial not in done]
        return [(trial.k, trial.loss) for trial in done]

    def _begin(self, t: int, messages: Mapping[int, Message]) -> None:
        places = self._canaries.positions
        while self._begun < len(places) and places[self._begun].round == t:
            k, i = self._begun, places[self._begun].learner
            self._begun += 1
            if i in self._known:
                trial = _Trial(k, self._known[i])
                batch = self._batch(trial, t)
                trial.hear(messages, (self._with(batch, k, 0), self._with(batch, k, 1)))
                self._trials.append(trial)

    def _batch(self, trial: _Trial, t: int) -> Batch:
        return self._data.learners[self._canaries.positions[trial.k].learner].batch(t)

    def _with(self, batch: Batch, k: int, coin: int) -> Batch:
        features = batch.features.copy()
        features[0] = self._canaries.build_record(k, coin, features.shape[1])
        return replace(batch, features=features)


class EpsilonBound:
    """Confidence sequence for epsilon: the claims that no bet has refuted so far.

    The bet is that guesses of fair coins are right more often than `p = sigmoid(epsilon)`:
    `M_n = prod (q_i/p)^{Z_i} ((1-q_i)/(1-p))^{1-Z_i}`, with Z_i = 1 for a right guess and `q_i = max(p, (c + 1/2)/i)` for c
    right ones before the i-th.

    Args:
        epsilons: `(claims,)` increasing; what the bound may be.
    """

    def __init__(self, epsilons: FloatArray | None = None) -> None:
        self.epsilons = np.linspace(0.0, 10.0, 1001) if epsilons is None else epsilons
        self.log_e_values: FloatArray = np.zeros(len(self.epsilons))
        """`(claims,)` e-values now."""
        self._highest: FloatArray = np.zeros(len(self.epsilons))
        self._right, self._count = 0.0, 0

    def add(self, values: FloatArray) -> None:
        """`values (guesses,)`: 1.0 for a right guess, 0.0 for a wrong one."""
        right = np.asarray(values, dtype=np.float64)
        before = self._right + np.cumsum(right) - right
        learned = (before + 0.5) / (self._count + 1.0 + np.arange(len(right)))
        epsilons = self.epsilons[:, None]
        odds = np.maximum(special.logit(learned) - epsilons, 0.0) + epsilons  # of q: never below those of p
        gained = special.log_expit(odds) - special.log_expit(epsilons)
        lost = special.log_expit(-odds) - special.log_expit(-epsilons)  # where 1 - p is too small for float64, too
        stakes = np.cumsum(np.where(right > 0, gained, lost), axis=1)
        if len(right):
            self._highest = np.maximum(self._highest, self.log_e_values + stakes.max(axis=1))
            self.log_e_values = self.log_e_values + stakes[:, -1]
        self._right, self._count = self._right + float(right.sum()), self._count + len(right)

    def compute_lower_bound(self, alpha: float) -> float:
        """A bound that epsilon is below with probability at most `alpha`, at whatever time one asks; 0: none."""
        refuted = np.flatnonzero(self._highest >= -math.log(alpha))
        return float(self.epsilons[refuted[-1]]) if refuted.size else 0.0


class CanaryTest:
    """Guesses the coins of a run that is under way, and bets that more guesses are right than is promised.

    Args:
        run: the run.
        data: with the canaries in it.
        canaries: those.
        alpha: the chance of a false alarm.

    Attributes:
        scored, guessed, right: how many coins so far.
    """

    def __init__(self, run: Run, data: PlacedData, canaries: Canaries, alpha: float) -> None:
        self.canaries = canaries
        self.scored_count = self.guessed_count = self.correct_count = 0
        self._alpha, self._alarmed = alpha, False
        self._scorer = _Scorer(run, data, canaries)
        self._claim, self._bound = EpsilonBound(np.array([canaries.claim])), EpsilonBound()

    @property
    def log_e_value(self) -> float:
        """Logarithm of the e-value of the claim."""
        return float(self._claim.log_e_values[0])

    @property
    def bound(self) -> float:
        """Lower bound on epsilon, with confidence `1 - alpha` at whatever time one asks."""
        return self._bound.compute_lower_bound(self._alpha)

    def take(self, t: int, messages: Mapping[int, Message]) -> list[Alarm]:
        """Take the messages of round t, as `Watch.take` does."""
        line = -math.log(self._alpha)
        alarms = []
        for k, loss in self._scorer.take(t, messages):
            self._guess(k, float(loss[0]))
            if self.log_e_value >= line and not self._alarmed:
                self._alarmed = True
                alarms.append(Alarm(None, t, "canaries", self.log_e_value, line))
        return alarms

    def _guess(self, k: int, loss: float) -> None:
        self.scored_count += 1
        if math.isnan(loss) or loss == 0.0 or abs(loss) < self.canaries.tau:
            return
        right = (loss < 0.0) == bool(self.canaries.coins[k])
        self.guessed_count, self.correct_count = self.guessed_count + 1, self.correct_count + right
        for process in (self._claim, self._bound):
            process.add(np.array([float(right)]))
