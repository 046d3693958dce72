"""The black box: classifiers that see numbers as they were said, and know nothing of any algorithm.

Runs are split: 40 % to learn, 20 % to choose the view and the threshold, 40 % for one binomial.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from sottovoce.arrays import FloatArray, IntArray
from sottovoce.audit.bounds import epsilon_lower_bound
from sottovoce.audit.worlds import Overheard
from sottovoce.data.files import import_extra

ROUNDS, WIDTH = 16, 128
"""The first rounds, and the first numbers of them, that are looked at: of one run."""

VIEWS = {
    "values": "the numbers",
    "squashed": "tanh of the numbers, in units of their spread",
    "low bits": "the low bits of every number, and how many of them are zero",
    "repeats": "which numbers are said again in the next round, and which are zero",
    "lengths": "how many numbers of a message are not zero",
}
"""What a classifier may look at."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What was seen of the audited runs.

    Attributes:
        worlds: `(runs,)` 0 or 1.
        said: `(runs, rounds, numbers)`.
    """

    worlds: IntArray
    said: FloatArray


def beginning(part: Overheard, learner: int) -> FloatArray:
    """The first numbers that a learner said in the first rounds, all fields side by side: `(runs, rounds, numbers)`."""
    fields = [values[:ROUNDS, learner].swapaxes(0, 1) for values in part.transcript.fields.values()]
    everything = np.concatenate([field.reshape(*field.shape[:2], -1) for field in fields], axis=2)
    return np.ascontiguousarray(everything[:, :, : max(1, WIDTH // everything.shape[1])])


def views(said: FloatArray) -> Mapping[str, FloatArray]:
    """`VIEWS` as `(runs, features)`, without features that never vary; a view in which nothing varies is left out."""
    spread = np.median(np.abs(said), axis=0) + np.finfo(np.float64).tiny
    bits = np.ascontiguousarray(said).view(np.uint64)
    low = (bits & np.uint64(0xFFFF)).astype(np.float64)
    trailing = np.bitwise_count((bits & (~bits + np.uint64(1))) - np.uint64(1)).astype(np.float64)
    flags = [(said == 0.0).astype(np.float64), (said[:, 1:] == said[:, :-1]).astype(np.float64)]
    found = {
        "values": said,
        "squashed": np.tanh(np.clip(said / spread, -20.0, 20.0)),
        "low bits": np.concatenate([low, trailing], axis=2),
        "repeats": np.concatenate(flags, axis=1),
        "lengths": np.count_nonzero(said, axis=2).astype(np.float64)[..., None],
    }
    flat = {name: view.reshape(len(said), -1) for name, view in found.items()}
    varying = {name: view[:, (view != view[:1]).any(axis=0)] for name, view in flat.items()}
    return {name: view for name, view in varying.items() if view.shape[1]}


@dataclass(frozen=True, slots=True)
class Attempt:
    """What one classifier came to.

    Attributes:
        model: its name.
        view: the one, of `VIEWS`, that was chosen on runs of its own; empty: there was nothing to look at.
        guesses, correct: how many, and how many of them right, on the last 40 % of the runs.
        bound: lower bound on epsilon.
    """

    model: str
    view: str
    guesses: int
    correct: int
    bound: float


def attack(runs: Seen, alpha: float, seed: np.random.SeedSequence) -> tuple[Attempt, ...]:
    """Learn to tell the worlds apart: every classifier at its share of alpha."""
    count = len(runs.worlds)
    order = np.random.default_rng(seed).permutation(count)
    parts = np.split(order, [2 * count // 5, 3 * count // 5])
    known = views(runs.said)
    models = _models(int(seed.generate_state(1)[0]))
    return tuple(
        _attempt(name, model, known, runs.worlds, parts, alpha / len(models)) for name, model in models.items()
    )


def _models(seed: int) -> dict[str, Any]:
    ensemble, linear, pipeline, scaling = (
        import_extra(f"sklearn.{name}", "scikit-learn", "an audit")
        for name in ("ensemble", "linear_model", "pipeline", "preprocessing")
    )
    return {
        "logistic regression": pipeline.make_pipeline(
            scaling.StandardScaler(), linear.LogisticRegression(C=0.1, max_iter=1000)
        ),
        # Not HistGradientBoostingClassifier: its threads wait for each other by spinning, minutes on a busy machine.
        "gradient boosting": ensemble.GradientBoostingClassifier(
            n_estimators=60, max_depth=3, subsample=0.5, max_features="sqrt", random_state=seed
        ),
    }


def _attempt(
    name: str, model: Any, known: Mapping[str, FloatArray], worlds: IntArray, parts: list[IntArray], alpha: float
) -> Attempt:
    learnt, chosen, tested = parts
    best: tuple[float, str, float, FloatArray] | None = None
    for view, features in known.items():
        if len(np.unique(worlds[learnt])) < 2 or not len(chosen):
            break  # too few runs to learn from
        model.fit(features[learnt], worlds[learnt])
        scores = _log_odds(model, features)
        least, promise = _least(scores[chosen], worlds[chosen], len(tested), alpha)
        if best is None or promise > best[0]:
            best = promise, view, least, scores
    if best is None:
        return Attempt(name, "", 0, 0, 0.0)
    _, view, least, scores = best
    guessed = np.abs(scores[tested]) >= least
    right = (scores[tested] > 0) == (worlds[tested] == 1)
    guesses, correct = int(guessed.sum()), int(right[guessed].sum())
    return Attempt(name, view, guesses, correct, epsilon_lower_bound(correct, guesses, alpha))


def _log_odds(model: Any, features: FloatArray) -> FloatArray:
    odds: FloatArray = np.asarray(model.decision_function(features), dtype=np.float64)
    return odds


def _least(scores: FloatArray, worlds: IntArray, tested: int, alpha: float) -> tuple[float, float]:
    """The score from which on to guess, and the bound that it promises for so many runs."""
    right = (scores > 0) == (worlds == 1)
    best = (0.0, -1.0)
    for share in (0.05, 0.1, 0.2, 0.35, 0.5, 0.7, 1.0):
        least = float(np.quantile(np.abs(scores), 1.0 - share))
        guessed = np.abs(scores) >= least
        scale = tested / len(scores)
        promise = epsilon_lower_bound(int(scale * right[guessed].sum()), int(scale * guessed.sum()), alpha)
        if promise > best[1]:
            best = (least, promise)
    return best
