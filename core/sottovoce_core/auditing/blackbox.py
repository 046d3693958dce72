"""The black box: classifiers that see numbers as they were said, and know nothing of any algorithm.

Runs are split: 60 % to learn, and to choose the view and the threshold by cross-validation; 40 % for one binomial.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from sottovoce_core.arrays import FloatArray, IntArray
from sottovoce_core.auditing.bounds import AlphaAllocation, Bound, compute_epsilon_lower_bound
from sottovoce_core.optional import import_optional

MAX_ROUNDS, MAX_NUMBERS = 16, 128
"""The first rounds, and the first numbers of them, that are looked at: of one run."""

_FOLDS = 3
"""Of the cross-validation."""

NUMBER_VIEWS = {
    "values": "the numbers, and tanh of them in units of their spread",
    "low bits": "the low bits of every number, and how many of them are zero",
    "repeats": "which numbers are said again in the next round, and which are zero",
    "lengths": "how many numbers of a message are not zero",
}
"""What a classifier may look at where all it has is numbers."""


def build_number_views(said: FloatArray) -> dict[str, FloatArray]:
    """`NUMBER_VIEWS` of numbers `(runs, rounds, numbers)`, as `(runs, features)` each."""
    spread = np.median(np.abs(said), axis=0) + np.finfo(np.float64).tiny
    bits = np.ascontiguousarray(said).view(np.uint64)
    low = (bits & np.uint64(0xFFFF)).astype(np.float64)
    trailing = np.bitwise_count((bits & (~bits + np.uint64(1))) - np.uint64(1)).astype(np.float64)
    flags = [(said == 0.0).astype(np.float64), (said[:, 1:] == said[:, :-1]).astype(np.float64)]
    with np.errstate(over="ignore"):  # infinite where nearly all are 0, and clipped
        relative = np.clip(said / spread, -20.0, 20.0)
    found = {
        "values": np.concatenate([said, np.tanh(relative)], axis=2),
        "low bits": np.concatenate([low, trailing], axis=2),
        "repeats": np.concatenate(flags, axis=1),
        "lengths": np.count_nonzero(said, axis=2).astype(np.float64)[..., None],
    }
    return {name: view.reshape(len(said), -1) for name, view in found.items()}


def _varying(views: Mapping[str, FloatArray]) -> dict[str, FloatArray]:
    """The views without features that are equal in all runs; a view in which nothing varies is left out."""
    kept = {name: view[:, (view != view[:1]).any(axis=0)] for name, view in views.items()}
    return {name: view for name, view in kept.items() if view.shape[1]}


_CLASSIFIERS = ("logistic regression", "gradient boosting")
GUESSED_FRACTION = 0.4
"""The share of the runs that classifiers guess: they learn from the others."""


_MAX_FEATURE_SIZE = 1e30
"""Maximum size of the numbers that classifiers are given; float32 ends at 3.4e38."""


def count_guessed_runs(runs: int) -> int:
    """How many of so many runs are guessed."""
    return runs - 3 * runs // 5


def split(runs: int, seed: np.random.SeedSequence) -> tuple[IntArray, IntArray]:
    """Of so many runs those that are learnt from, and those that are guessed, as `attack` with this seed has them."""
    order = np.random.default_rng(seed).permutation(runs)
    return order[: runs - count_guessed_runs(runs)], order[runs - count_guessed_runs(runs) :]


def compute_classifier_level(levels: AlphaAllocation) -> float:
    """Of every classifier's bound."""
    return levels.compute_level("black box", "classifiers", len(_CLASSIFIERS))


@dataclass(frozen=True, slots=True)
class Attack:
    """What came of a classifier.

    Attributes:
        bound: on epsilon, from its guesses.
        guessed: `(runs guessed,)` which runs it did not learn from.
        scores: `(runs guessed,)` log odds that it gives the second world in them; empty where there was nothing to learn.
    """

    bound: Bound
    guessed_runs: IntArray
    scores: FloatArray


def attack(
    views: Mapping[str, FloatArray],
    worlds: IntArray,
    levels: AlphaAllocation,
    claim: float,
    seed: np.random.SeedSequence,
    delta: float = 0.0,
) -> tuple[Attack, ...]:
    """Learn to tell the worlds apart: every classifier at its level.

    Args:
        views: what was seen of the runs, by name: finite numbers `(runs, features)`.
        worlds: `(runs,)` 0 or 1, by a fair coin each.
        levels: of the audit.
        claim: epsilon that is promised for what was seen.
        seed: of the split and the classifiers.
        delta: at which epsilon is bounded.

    Raises:
        SpecError: scikit-learn is not installed.
    """
    learnt, guessed = split(len(worlds), seed)
    varying = {name: _in_range(view) for name, view in _varying(views).items()}
    if any(len(np.unique(fold)) < 2 for fold in np.array_split(worlds[learnt], _FOLDS)):
        varying = {}  # too few runs to learn from
    blank = Bound(
        "black box", "", "", 0, 0, claim, compute_classifier_level(levels), delta=delta, guessable_runs=len(guessed)
    )
    sklearn = import_optional("sklearn", "scikit-learn", "an audit")
    # Views are finite. Checks of settings and numbers, once for each of sixty small trees, take a sixth of the time.
    with sklearn.config_context(assume_finite=True, skip_parameter_validation=True):
        return tuple(
            _attempt(model, varying, worlds, learnt, guessed, replace(blank, guesser=name))
            for name, model in _models(int(seed.generate_state(1)[0])).items()
        )


def _in_range(features: FloatArray) -> FloatArray:
    """Scale columns whose numbers float32, in which trees hold them, cannot hold."""
    largest = np.abs(features).max(axis=0, initial=0.0)
    scaled: FloatArray = features / np.maximum(largest / _MAX_FEATURE_SIZE, 1.0)
    return scaled


def _models(seed: int) -> dict[str, Any]:
    """By the names in `_CLASSIFIERS`, in their order."""
    ensemble, linear, pipeline, scaling = (
        import_optional(f"sklearn.{name}", "scikit-learn", "an audit")
        for name in ("ensemble", "linear_model", "pipeline", "preprocessing")
    )
    models = (
        pipeline.make_pipeline(scaling.StandardScaler(), linear.LogisticRegression(C=0.1, max_iter=1000)),
        # Not HistGradientBoostingClassifier: its threads wait for each other by spinning, minutes on a busy machine.
        ensemble.GradientBoostingClassifier(
            n_estimators=60, max_depth=3, subsample=0.5, max_features="sqrt", random_state=seed
        ),
    )
    return dict(zip(_CLASSIFIERS, models, strict=True))


def _attempt(
    model: Any, views: Mapping[str, FloatArray], worlds: IntArray, learnt: IntArray, guessed: IntArray, blank: Bound
) -> Attack:
    """Choose the view and the threshold that promise most, learn from all runs that are for it, and guess the others."""
    if not views:
        return Attack(blank, guessed, np.empty(0))
    selection = import_optional("sklearn.model_selection", "scikit-learn", "an audit")
    held_out = partial(selection.cross_val_predict, model, cv=selection.KFold(_FOLDS), method="decision_function")
    promises = {
        view: _least(held_out(features[learnt], worlds[learnt]), worlds[learnt], blank)
        for view, features in views.items()
    }
    view = max(promises, key=lambda each: promises[each][1])
    features, threshold = views[view], promises[view][0]
    scores = model.fit(features[learnt], worlds[learnt]).decision_function(features[guessed])
    made = np.abs(scores) >= threshold
    right = (scores > 0) == (worlds[guessed] == 1)
    bound = replace(
        blank, view=view, correct_guesses=int(right[made].sum()), guesses=int(made.sum()), threshold=threshold
    )
    return Attack(bound, guessed, scores)


def _least(scores: FloatArray, worlds: IntArray, blank: Bound) -> tuple[float, float]:
    """The score from which on to guess, and the bound that it promises for the runs that are guessed."""
    right = (scores > 0) == (worlds == 1)
    best = (0.0, -1.0)
    for share in (0.05, 0.1, 0.2, 0.35, 0.5, 0.7, 1.0):
        least = float(np.quantile(np.abs(scores), 1.0 - share))
        guessed = np.abs(scores) >= least
        scale = blank.guessable_runs / len(scores)
        correct, guesses = int(scale * right[guessed].sum()), int(scale * guessed.sum())
        promise = compute_epsilon_lower_bound(correct, guesses, blank.level, blank.delta, blank.guessable_runs)
        if promise > best[1]:
            best = (least, promise)
    return best
