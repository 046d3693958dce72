"""Black-box attack: classifiers that use the numbers of messages and know nothing of any algorithm.

Runs are split: 60 % to learn, and to choose the view and the threshold by cross-validation; 40 % for one binomial test.
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
"""Maximum number of first rounds of a run, and of first numbers of a round, that the views use."""

_FOLDS = 3
"""Number of folds of the cross-validation."""

_MIN_PARALLEL_RUNS = 5_000
"""Minimum number of learned runs for a cross-validation in the processes of an audit: they must first import scikit-learn."""

NUMBER_VIEWS = {
    "values": "the numbers, and tanh of them in units of their spread",
    "low bits": "the low bits of every number, and the count of trailing zeros",
    "repeats": "numbers that recur in the next round, and numbers that are zero",
    "lengths": "number of non-zero numbers of a message",
}
"""Views that need numbers only, with their descriptions."""


def build_number_views(numbers: FloatArray) -> dict[str, FloatArray]:
    """Build `NUMBER_VIEWS` of numbers `(runs, rounds, numbers)`, as `(runs, features)` each."""
    spread = np.median(np.abs(numbers), axis=0) + np.finfo(np.float64).tiny
    bits = np.ascontiguousarray(numbers).view(np.uint64)
    low = (bits & np.uint64(0xFFFF)).astype(np.float64)
    trailing = np.bitwise_count((bits & (~bits + np.uint64(1))) - np.uint64(1)).astype(np.float64)
    flags = [(numbers == 0.0).astype(np.float64), (numbers[:, 1:] == numbers[:, :-1]).astype(np.float64)]
    with np.errstate(over="ignore"):  # the quotient overflows where nearly all numbers are 0, and is clipped
        relative = np.clip(numbers / spread, -20.0, 20.0)
    views = {
        "values": np.concatenate([numbers, np.tanh(relative)], axis=2),
        "low bits": np.concatenate([low, trailing], axis=2),
        "repeats": np.concatenate(flags, axis=1),
        "lengths": np.count_nonzero(numbers, axis=2).astype(np.float64)[..., None],
    }
    return {name: view.reshape(len(numbers), -1) for name, view in views.items()}


def _drop_constant_features(views: Mapping[str, FloatArray]) -> dict[str, FloatArray]:
    """Drop features that are equal in all runs; drop a view in which nothing varies."""
    varying = {name: view[:, (view != view[:1]).any(axis=0)] for name, view in views.items()}
    return {name: view for name, view in varying.items() if view.shape[1]}


_CLASSIFIERS = ("logistic regression", "gradient boosting")
GUESSED_FRACTION = 0.4
"""Fraction of the runs that classifiers guess; they learn from the others."""


_MAX_FEATURE_SIZE = 1e30
"""Maximum size of the numbers passed to classifiers; float32 ends at 3.4e38."""


def count_guessed_runs(runs: int) -> int:
    """Count the guessed runs among `runs`."""
    return runs - 3 * runs // 5


def split(runs: int, seed: np.random.SeedSequence) -> tuple[IntArray, IntArray]:
    """Split `runs` runs into those to learn from and those to guess, as `attack` does with this seed."""
    order = np.random.default_rng(seed).permutation(runs)
    return order[: runs - count_guessed_runs(runs)], order[runs - count_guessed_runs(runs) :]


def compute_classifier_level(levels: AlphaAllocation) -> float:
    """Compute the level of every classifier's bound."""
    return levels.compute_level("black box", "classifiers", len(_CLASSIFIERS))


@dataclass(frozen=True, slots=True)
class Attack:
    """Result of one classifier.

    Attributes:
        bound: bound on epsilon, from its guesses.
        guessed_runs: `(runs guessed,)` indices of the runs that it did not learn from.
        scores: `(runs guessed,)` its log odds of world 1 in them; empty if there was nothing to learn.
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
    """Train every classifier to tell the worlds apart, each at its level.

    Args:
        views: views of the runs, by name: finite numbers `(runs, features)`.
        worlds: `(runs,)` 0 or 1, by a fair coin each.
        levels: alpha allocation of the audit.
        claim: claimed epsilon for the visible part of the runs.
        seed: seed of the split and the classifiers.
        delta: delta at which epsilon is bounded.

    Raises:
        SpecError: scikit-learn is not installed.
    """
    learned_runs, guessed_runs = split(len(worlds), seed)
    varying = {name: _scale_to_float32(view) for name, view in _drop_constant_features(views).items()}
    if any(len(np.unique(fold)) < 2 for fold in np.array_split(worlds[learned_runs], _FOLDS)):
        varying = {}  # too few runs to learn from
    blank = Bound(
        "black box",
        "",
        "",
        0,
        0,
        claim,
        compute_classifier_level(levels),
        delta=delta,
        guessable_runs=len(guessed_runs),
    )
    sklearn = import_optional("sklearn", "scikit-learn", "an audit")
    # Views are finite. Checks of settings and numbers, once for each of sixty small trees, take a sixth of the time.
    with sklearn.config_context(assume_finite=True, skip_parameter_validation=True):
        return tuple(
            _run_classifier(model, varying, worlds, learned_runs, guessed_runs, replace(blank, guesser=name))
            for name, model in _build_models(int(seed.generate_state(1)[0])).items()
        )


def _scale_to_float32(features: FloatArray) -> FloatArray:
    """Scale columns whose numbers exceed float32, the type that trees use."""
    largest = np.abs(features).max(axis=0, initial=0.0)
    scaled: FloatArray = features / np.maximum(largest / _MAX_FEATURE_SIZE, 1.0)
    return scaled


def _build_models(seed: int) -> dict[str, Any]:
    """Build the models by the names in `_CLASSIFIERS`, in their order."""
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


def _run_classifier(
    model: Any,
    views: Mapping[str, FloatArray],
    worlds: IntArray,
    learned_runs: IntArray,
    guessed_runs: IntArray,
    blank: Bound,
) -> Attack:
    """Choose the view and the threshold with the largest expected bound, and guess the held-out runs.

    The classifier learns from all other runs.
    """
    if not views:
        return Attack(blank, guessed_runs, np.empty(0))
    selection = import_optional("sklearn.model_selection", "scikit-learn", "an audit")
    predict_held_out = partial(
        selection.cross_val_predict,
        model,
        cv=selection.KFold(_FOLDS),
        method="decision_function",
        n_jobs=1 if len(learned_runs) < _MIN_PARALLEL_RUNS else None,  # None: as joblib is configured
    )
    expected = {
        view: _choose_threshold(
            predict_held_out(features[learned_runs], worlds[learned_runs]), worlds[learned_runs], blank
        )
        for view, features in views.items()
    }
    view = max(expected, key=lambda each: expected[each][1])
    features, threshold = views[view], expected[view][0]
    scores = model.fit(features[learned_runs], worlds[learned_runs]).decision_function(features[guessed_runs])
    is_guess = np.abs(scores) >= threshold
    is_correct = (scores > 0) == (worlds[guessed_runs] == 1)
    bound = replace(
        blank,
        view=view,
        correct_guesses=int(is_correct[is_guess].sum()),
        guesses=int(is_guess.sum()),
        threshold=threshold,
    )
    return Attack(bound, guessed_runs, scores)


def _choose_threshold(scores: FloatArray, worlds: IntArray, blank: Bound) -> tuple[float, float]:
    """Choose the score above which to guess; return it with the bound expected for the guessed runs."""
    is_correct = (scores > 0) == (worlds == 1)
    best = (0.0, -1.0)
    for fraction in (0.05, 0.1, 0.2, 0.35, 0.5, 0.7, 1.0):
        threshold = float(np.quantile(np.abs(scores), 1.0 - fraction))
        is_guess = np.abs(scores) >= threshold
        scale = blank.guessable_runs / len(scores)
        correct, guesses = int(scale * is_correct[is_guess].sum()), int(scale * is_guess.sum())
        expected = compute_epsilon_lower_bound(correct, guesses, blank.level, blank.delta, blank.guessable_runs)
        if expected > best[1]:
            best = (threshold, expected)
    return best
