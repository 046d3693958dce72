"""Canaries (Steinke, Nasr, Jagielski 2023): fair coins, hidden in the records of a real run, that its messages should not reveal.

At every position, a learner's round, a coin decides which of two records replaces the first record of that round: one on the
loss's bound, with all its weight in one feature, or its mirror image (under a schema: one at its ends, or its opposite). The
positions of a learner are `window` rounds apart, so the messages of the `window` rounds after a position depend on its coin
alone, given the earlier coins. Their exact loss `log p(messages | 0) - log p(messages | 1)` is the best evidence for the coin;
below `tau` no guess is made.

The bets on the guesses, in order, are fair. Fix all coins but the k-th. The two remaining worlds are adjacent, so given all
messages up to the end of the window, and all other coins, the k-th coin is guessed correctly with probability at most
`sigmoid(epsilon)` by any method. The k-th guess is a function of these messages and of the coins before the k-th; and so is
everything known when the bet is placed. It must use no later coin: the results of earlier guesses would then carry information
about the k-th one. `tau` is from simulated runs with other coins, for the same reason.
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
"""Minimum number of coins in simulated runs from which tau is determined."""


@dataclass(frozen=True, slots=True, order=True)
class CanaryPosition:
    """Position of a coin: the first record that a learner learns in a round."""

    round: int
    learner: int


@dataclass(frozen=True, slots=True)
class Canaries:
    """Coins and everything needed to score them. Secret until the run is over.

    Attributes:
        positions: positions in order of rounds, then of learners.
        coins: 0 or 1 for each position.
        window: number of rounds whose messages are scored.
        size: weight of a record's one feature.
        label: label of all records.
        tau: minimum absolute loss of a guess.
        claim: largest epsilon claimed for the replacement at any position, by the end of its window.
        record_pair: the two records, `(features,)` each, if the run has a schema, which allows them.
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
        """Build the record `(features,)` at position k for this coin."""
        if self.record_pair is not None:
            return np.array(self.record_pair[coin])
        record = np.zeros(n_features)
        record[k % n_features] = -self.size if coin else self.size
        return record

    def insert_into(self, data: PlacedData) -> PlacedData:
        """Insert the canaries into the records."""
        by_learner: dict[int, list[int]] = {}
        for k, place in enumerate(self.positions):
            by_learner.setdefault(place.learner, []).append(k)
        for i, indices in by_learner.items():
            data = data.with_learner(i, self._insert_into_learner(data.learners[i], indices))
        return data

    def _insert_into_learner(self, own: LearnerData, indices: list[int]) -> LearnerData:
        features, labels = own.features.copy(), own.labels.copy()
        for k in indices:
            row = int(own.rows(self.positions[k].round)[0])
            features[row] = self.build_record(k, self.coins[k], features.shape[1])
            labels[row] = self.label
        return replace(own, features=features, labels=labels)


# ---- drawing ---------------------------------------------------------------------------------------------------------


def draw_canaries(run: Run, data: PlacedData, count: int, generator: np.random.Generator) -> Canaries:
    """Toss the coins, choose their positions, and determine tau by simulated runs with other coins.

    Args:
        run: run to be made.
        data: records that its learners would learn.
        count: number of canaries.
        generator: generator of positions, coins and simulated noise: for a real run seeded with entropy.

    Raises:
        SpecError: a canary would be used more than once, no finite epsilon is claimed, or there are too few positions; the run
            does not wait for late neighbours, or its schema allows one record only.
    """
    run.require_synchronous_rounds("guessing canaries")
    _require_single_use(run, data)
    window = _choose_window(run, data, count)
    available = _list_positions(run, data, window)
    if not 1 <= count <= len(available):
        raise SpecError(
            f"the number of canaries must be 1 to {len(available)}, one per learner and round with a record, got {count}"
        )
    positions = tuple(sorted(available[k] for k in generator.choice(len(available), count, replace=False)))
    claim = max(_compute_claim(run, data, position, window) for position in positions)
    if not 0.0 < claim < math.inf:
        raise SpecError(f"canaries need a finite epsilon claimed by {run.spec.algorithm.name}, got {claim:g}")
    blank = Canaries(
        positions, (0,) * count, window, *_find_extreme_record(run, data), 0.0, claim, _build_record_pair(run)
    )
    rehearsal_coins, coins = (tuple(generator.integers(0, 2, count).tolist()) for _ in range(2))
    tau = _find_tau(run, data, replace(blank, coins=rehearsal_coins), int(generator.integers(2**63)))
    return replace(blank, coins=coins, tau=tau)


def _require_single_use(run: Run, data: PlacedData) -> None:
    if run.algorithm.accountant(0).has_shared_records:
        raise SpecError("canaries need records of one learner each, but all learners of this run hold the same records")
    for name, own in zip(run.spec.names, data.learners, strict=True):
        if own.uses().max(initial=0) > 1:
            raise SpecError(
                f"canaries need records that are used once; {name} uses some of its "
                f"{len(own.labels)} records {own.uses().max()} times: set data.reuse to false, or run fewer rounds"
            )


def _choose_window(run: Run, data: PlacedData, count: int) -> int:
    """Choose the longest window that leaves enough positions."""
    for window in range(min(_MAX_WINDOW_ROUNDS, run.spec.rounds - 1), 1, -1):
        if len(_list_positions(run, data, window)) >= count:
            return window
    return 1


def _list_positions(run: Run, data: PlacedData, window: int) -> list[CanaryPosition]:
    """List the possible positions: rounds a window apart in which a learner has a record."""
    rounds = range(0, run.spec.rounds - window, window)
    return [CanaryPosition(t, i) for i, own in enumerate(data.learners) for t in rounds if len(own.rows(t))]


def _compute_claim(run: Run, data: PlacedData, place: CanaryPosition, window: int) -> float:
    """Compute the claimed epsilon of this replacement for all messages up to the end of its window."""
    replaced = np.zeros(run.spec.rounds, dtype=np.int64)
    replaced[place.round] = 1
    counts = np.diff(data.learners[place.learner].offsets)
    return run.guarantee(place.learner, counts, replaced).epsilon(place.round + window + 1)


def _find_extreme_record(run: Run, data: PlacedData) -> tuple[float, float]:
    """Return size and label of the records that move a gradient most within the loss's bound."""
    bound = run.loss.feature_bound
    longest = max(float(np.linalg.norm(own.features, axis=1).max(initial=0.0)) for own in data.learners)
    label = max((float(b) for own in data.learners for b in np.unique(own.labels)), key=abs)
    return (bound if math.isfinite(bound) else longest), label


def _build_record_pair(run: Run) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
    """Build two records that a schema allows, far from each other; None if there is no schema."""
    if (schema := run.spec.data.schema) is None:
        return None
    first = add_intercept(run, schema.make_max_norm_record())
    if (first == (second := mirror_record(first, schema))).all():
        raise SpecError("canaries need two different records, but data.schema allows one only: widen the schema")
    return tuple(first.tolist()), tuple(second.tolist())


def _find_tau(run: Run, data: PlacedData, canaries: Canaries, seed: int) -> float:
    """Find tau, the minimum loss at which guesses give the largest bound, if everything is as claimed."""
    replicas = -(-_MIN_REHEARSAL_COINS // len(canaries.positions))
    data_with_canaries = canaries.insert_into(data)
    scorer, strengths = _Scorer(run, data_with_canaries, canaries, replicas), []
    last = canaries.positions[-1].round + canaries.window + 1
    for step in islice(simulate_rounds(run, data_with_canaries, SeededNoise(seed), replicas), last):
        strengths += [np.abs(loss) for _, loss in scorer.take(step.t, step.split_by_sender())]
    all_strengths, guesses = np.nan_to_num(np.concatenate(strengths)), len(canaries.positions)
    tau = choose_threshold(all_strengths, guesses, 0.05)
    while tau > all_strengths.max() * (1.0 - 1e-6) and guesses < 2**20:  # too few coins show nothing: assume more
        guesses *= 2
        tau = choose_threshold(all_strengths, guesses, 0.05)
    return tau


# ---- scoring ---------------------------------------------------------------------------------------------------------


class _Trial:
    """Scoring of one coin: the learner's state in both worlds."""

    def __init__(self, k: int, replay: Replay) -> None:
        self.k, self.worlds = k, (copy(replay), copy(replay))
        self.loss: FloatArray = np.zeros(1)

    def take(self, messages: Mapping[int, Message], batches: tuple[Batch, Batch]) -> None:
        first, second = (world.step(messages, batch) for world, batch in zip(self.worlds, batches, strict=True))
        if first is None or second is None:
            self.loss = np.full_like(self.loss, np.nan)
            return
        with np.errstate(invalid="ignore"):  # not-a-number where neither world could have produced the message
            self.loss = self.loss + (first - second)[0]


class _Scorer:
    """Scorer that replays a run and gives the exact loss of every coin at the end of its window.

    Args:
        run: run to score.
        data: records with the canaries.
        canaries: canaries; a coin is scored with earlier positions only.
        replicas: number of parallel runs.
    """

    def __init__(self, run: Run, data: PlacedData, canaries: Canaries, replicas: int = 1) -> None:
        self._canaries, self._data = canaries, data
        self._replays = {i: Replay(run, i, replicas) for i in {place.learner for place in canaries.positions}}
        self._trials: list[_Trial] = []
        self._started_count = 0

    def take(self, t: int, messages: Mapping[int, Message]) -> list[tuple[int, FloatArray]]:
        """Process the messages of round t, by sender, fields `(1, replicas, dim)`.

        Returns:
            The positions whose window ends, in order, and their losses `(replicas,)`; not-a-number where messages are missing,
            or neither world could have produced them.
        """
        for trial in self._trials:
            batch = self._get_batch(trial, t)
            trial.take(messages, (batch, batch))
        self._start_trials(t, messages)
        for i, replay in list(self._replays.items()):
            replay.step(messages, self._data.learners[i].batch(t))
            if not replay.is_known:
                del self._replays[i]
        done = [trial for trial in self._trials if self._canaries.positions[trial.k].round + self._canaries.window == t]
        self._trials = [trial for trial in self._trials if trial not in done]
        return [(trial.k, trial.loss) for trial in done]

    def _start_trials(self, t: int, messages: Mapping[int, Message]) -> None:
        positions = self._canaries.positions
        while self._started_count < len(positions) and positions[self._started_count].round == t:
            k, i = self._started_count, positions[self._started_count].learner
            self._started_count += 1
            if i in self._replays:
                trial = _Trial(k, self._replays[i])
                batch = self._get_batch(trial, t)
                trial.take(messages, (self._insert_canary(batch, k, 0), self._insert_canary(batch, k, 1)))
                self._trials.append(trial)

    def _get_batch(self, trial: _Trial, t: int) -> Batch:
        return self._data.learners[self._canaries.positions[trial.k].learner].batch(t)

    def _insert_canary(self, batch: Batch, k: int, coin: int) -> Batch:
        features = batch.features.copy()
        features[0] = self._canaries.build_record(k, coin, features.shape[1])
        return replace(batch, features=features)


class EpsilonBound:
    """Confidence sequence for epsilon: the claims that no bet has refuted so far.

    The bet is that guesses of fair coins are correct more often than `p = sigmoid(epsilon)`: `M_n = prod (q_i/p)^{Z_i}
    ((1-q_i)/(1-p))^{1-Z_i}`, with Z_i = 1 for a correct guess and `q_i = max(p, (c + 1/2)/i)` for c correct ones before the
    i-th.

    Args:
        epsilons: `(claims,)` increasing; possible values of the bound.
    """

    def __init__(self, epsilons: FloatArray | None = None) -> None:
        self.epsilons = np.linspace(0.0, 10.0, 1001) if epsilons is None else epsilons
        self.log_e_values: FloatArray = np.zeros(len(self.epsilons))
        """`(claims,)` logarithms of the current e-values."""
        self._highest: FloatArray = np.zeros(len(self.epsilons))
        self._right, self._count = 0.0, 0

    def add(self, values: FloatArray) -> None:
        """Add `values (guesses,)`: 1.0 for a correct guess, 0.0 for a wrong one."""
        correct = np.asarray(values, dtype=np.float64)
        correct_before = self._right + np.cumsum(correct) - correct
        estimates = (correct_before + 0.5) / (self._count + 1.0 + np.arange(len(correct)))
        epsilons = self.epsilons[:, None]
        odds = np.maximum(special.logit(estimates) - epsilons, 0.0) + epsilons  # log odds of q, never below those of p
        gains = special.log_expit(odds) - special.log_expit(epsilons)
        losses = special.log_expit(-odds) - special.log_expit(-epsilons)  # accurate even where 1 - p underflows float64
        stakes = np.cumsum(np.where(correct > 0, gains, losses), axis=1)
        if len(correct):
            self._highest = np.maximum(self._highest, self.log_e_values + stakes.max(axis=1))
            self.log_e_values = self.log_e_values + stakes[:, -1]
        self._right, self._count = self._right + float(correct.sum()), self._count + len(correct)

    def compute_lower_bound(self, alpha: float) -> float:
        """Compute a bound that exceeds epsilon with probability at most `alpha`, at any time; 0: none."""
        refuted = np.flatnonzero(self._highest >= -math.log(alpha))
        return float(self.epsilons[refuted[-1]]) if refuted.size else 0.0


class CanaryTest:
    """Test that guesses the coins of a running run, and bets that more guesses are correct than claimed.

    Args:
        run: run to test.
        data: records with the canaries.
        canaries: canaries of the run.
        alpha: probability of a false alarm.

    Attributes:
        scored_count, guessed_count, correct_count: numbers of coins so far.
    """

    def __init__(self, run: Run, data: PlacedData, canaries: Canaries, alpha: float) -> None:
        self.canaries = canaries
        self.scored_count = self.guessed_count = self.correct_count = 0
        self._alpha, self._alarmed = alpha, False
        self._scorer = _Scorer(run, data, canaries)
        self._claim, self._bound = EpsilonBound(np.array([canaries.claim])), EpsilonBound()

    @property
    def log_e_value(self) -> float:
        """Logarithm of the e-value against the claim."""
        return float(self._claim.log_e_values[0])

    @property
    def bound(self) -> float:
        """Lower bound on epsilon, with confidence `1 - alpha` at any time."""
        return self._bound.compute_lower_bound(self._alpha)

    def take(self, t: int, messages: Mapping[int, Message]) -> list[Alarm]:
        """Process the messages of round t, as `Watch.take` does."""
        threshold = -math.log(self._alpha)
        alarms = []
        for k, loss in self._scorer.take(t, messages):
            self._guess(k, float(loss[0]))
            if self.log_e_value >= threshold and not self._alarmed:
                self._alarmed = True
                alarms.append(Alarm(None, t, "canaries", self.log_e_value, threshold))
        return alarms

    def _guess(self, k: int, loss: float) -> None:
        self.scored_count += 1
        if math.isnan(loss) or loss == 0.0 or abs(loss) < self.canaries.tau:
            return
        is_correct = (loss < 0.0) == bool(self.canaries.coins[k])
        self.guessed_count, self.correct_count = self.guessed_count + 1, self.correct_count + is_correct
        for process in (self._claim, self._bound):
            process.add(np.array([float(is_correct)]))
