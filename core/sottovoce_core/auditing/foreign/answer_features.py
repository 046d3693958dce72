"""Answer features of a service's messages for a classifier, and the numbers that differ between the worlds.

A view of answers is the part of them that their requests do not explain. A service may be asked for a gradient and a loss at
parameters that change in every call. The loss alone then looks like noise: it varies with the parameters a thousand times more
than with a record. So answers are regressed on polynomials of their requests, and on the other numbers of the answer; the
residual, times the request, is the effect of a record on an answer. The regressions do not use the worlds, and are fitted to
runs that are not guessed.

A number that differs between the worlds is named by field, index, message, round and sender, as far as they are known.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, combinations_with_replacement

import numpy as np

from sottovoce_core.arrays import BoolArray, FloatArray, IntArray
from sottovoce_core.auditing.bounds import Bound
from sottovoce_core.auditing.traffic_features import (
    CHANNEL_VIEWS,
    MAX_COLUMNS,
    MAX_ITEMS_PER_KIND,
    CapturedFrame,
    RunTraffic,
    collect_decoded_fields,
    find_field_sources,
    locate_column,
)
from sottovoce_core.optional import import_optional

# ---- answers ---------------------------------------------------------------------------------------------------------

_MAX_REQUEST_NUMBERS, _MAX_ANSWER_NUMBERS = 32, 64
"""Maximum count of numbers used of a request, and of an answer."""

_MAX_DEGREE, _MAX_TERMS, _MIN_ROWS_PER_TERM = 4, 500, 5
"""Polynomials of the request: maximum degree, maximum number of terms, and minimum number of answers per term."""

_MAX_TERM_NUMBERS = 2**24
"""Maximum count of numbers in all terms of all answers together: 128 MiB."""

_RIDGE, _FOLDS, _MIN_ANSWERS = 1e-8, 4, 16
"""Ridge and number of folds of the regressions, and minimum number of answers for one."""


@dataclass(frozen=True, slots=True)
class _Answers:
    """All answers of one method.

    Attributes:
        run: `(rows,)` run of each.
        requests, answers: `(rows, numbers)` numbers of the request, and of the answer to it.
        names: names of the numbers of an answer.
    """

    run: IntArray
    requests: FloatArray
    answers: FloatArray
    names: tuple[str, ...]


def build_answer_views(
    runs: Sequence[RunTraffic], learned_runs: IntArray
) -> dict[str, tuple[FloatArray, tuple[str, ...]]]:
    """Build a view for each method with decoded, varying requests and answers.

    Args:
        runs: captured runs.
        learned_runs: indices of the runs that may be used for learning.

    Returns:
        Finite numbers `(runs, features)`, and their names, by view.
    """
    views = {}
    for method, pairs in _pair_requests(runs).items():
        own = np.isin(pairs.run, learned_runs)
        if int(own.sum()) < _MIN_ANSWERS:
            continue
        (requests, _), (answers, is_kept) = (
            _scale_varying_columns(part, own) for part in (pairs.requests, pairs.answers)
        )
        if requests.shape[1] and answers.shape[1]:
            names = tuple(name for name, keep in zip(pairs.names, is_kept.tolist(), strict=True) if keep)
            varying = _Answers(
                pairs.run,
                requests[:, :_MAX_REQUEST_NUMBERS],
                answers[:, :_MAX_ANSWER_NUMBERS],
                names[:_MAX_ANSWER_NUMBERS],
            )
            views[f"answers of {method} beside their requests"] = _build_view(varying, learned_runs, len(runs))
    return views


def _pair_requests(runs: Sequence[RunTraffic]) -> dict[str, _Answers]:
    """Pair answers, by method, with the last request of their stream; only those of the most common lengths."""
    rows: dict[str, list[tuple[int, FloatArray, FloatArray]]] = defaultdict(list)
    names: dict[tuple[str, int], tuple[str, ...]] = {}
    for k, run in enumerate(runs):
        count = Counter[str]()
        for request, answer in _iterate_answers(run):
            count[answer.method] += 1
            if count[answer.method] <= MAX_ITEMS_PER_KIND:
                rows[answer.method].append((k, _concatenate_numbers(request), _concatenate_numbers(answer)))
                names.setdefault((answer.method, len(rows[answer.method][-1][2])), _name_numbers(answer))
    answers = {}
    for method, all_rows in rows.items():
        [(widths, _)] = Counter(
            (len(request_numbers), len(answer)) for _, request_numbers, answer in all_rows
        ).most_common(1)
        same_width = [row for row in all_rows if (len(row[1]), len(row[2])) == widths]
        numbers = np.array([k for k, _, _ in same_width])
        request_numbers, answer_numbers = (np.stack([row[k] for row in same_width]) for k in (1, 2))
        answers[method] = _Answers(numbers, request_numbers, answer_numbers, names[method, widths[1]])
    return answers


def _iterate_answers(run: RunTraffic) -> Iterator[tuple[CapturedFrame, CapturedFrame]]:
    """Iterate over decoded answers and the request before each."""
    last: dict[int, CapturedFrame] = {}
    for each in run.messages:
        if each.decoded_message is None:
            continue
        if each.direction == "out":
            last[each.stream] = each
        elif each.stream in last:
            yield last[each.stream], each


def _concatenate_numbers(message: CapturedFrame) -> FloatArray:
    fields = {} if message.decoded_message is None else message.decoded_message.fields
    return np.concatenate([np.empty(0), *(fields[name] for name in sorted(fields))])


def _name_numbers(message: CapturedFrame) -> tuple[str, ...]:
    fields = {} if message.decoded_message is None else message.decoded_message.fields
    return tuple(f"number {k} of {name}" for name in sorted(fields) for k in range(len(fields[name])))


def _scale_varying_columns(values: FloatArray, is_learned: BoolArray) -> tuple[FloatArray, BoolArray]:
    """Scale the varying columns by their spread in the learning runs; return them and their mask."""
    centre, spread = np.median(values[is_learned], axis=0), values[is_learned].std(axis=0)
    mask = np.isfinite(spread) & (spread > 0)
    varying: FloatArray = np.clip((values[:, mask] - centre[mask]) / spread[mask], -1e3, 1e3)
    return varying, mask


def _build_view(answers: _Answers, learned_runs: IntArray, runs: int) -> tuple[FloatArray, tuple[str, ...]]:
    """Sum over a run's answers their residuals, the sizes and squares of these, and their products with the request."""
    alone = _compute_residuals(answers, learned_runs)
    is_learned = np.isin(answers.run, learned_runs)
    width = answers.requests.shape[1] + 3
    max_numbers = max(1, MAX_COLUMNS // (2 * width))
    clearest = np.argsort(alone[is_learned].std(axis=0), kind="stable")[
        :max_numbers
    ]  # noisy ones carry little information
    residuals = np.concatenate([alone[:, clearest], _remove_other_numbers(alone, is_learned)[:, clearest]], axis=1)
    factors = (np.ones(len(residuals)), np.sign(residuals), residuals, *answers.requests.T)
    view = np.zeros((runs, width, residuals.shape[1]))
    for k, factor in enumerate(factors):
        np.add.at(view[:, k], answers.run, residuals * factor.reshape(len(residuals), -1))
    names = tuple(f"{answers.names[k]}, after regression on its request" for k in clearest.tolist())
    return view.reshape(runs, -1), names * 2 * width


def _compute_residuals(answers: _Answers, learned_runs: IntArray) -> FloatArray:
    """Compute residuals `(rows, numbers)` of answers after polynomials of the request, fitted to other learning runs."""
    is_learned = np.isin(answers.run, learned_runs)
    terms = _build_terms(answers.requests, int(is_learned.sum()))
    fold = np.where(is_learned, answers.run % _FOLDS, -1)
    residuals = np.empty_like(answers.answers)
    for k in range(-1, _FOLDS):
        is_fitted, is_in_fold = is_learned & (fold != k), fold == k
        residuals[is_in_fold] = answers.answers[is_in_fold] - terms[is_in_fold] @ _solve_ridge(
            terms[is_fitted], answers.answers[is_fitted]
        )
    return residuals


def _build_terms(requests: FloatArray, rows: int) -> FloatArray:
    """Build polynomials of the highest degree that the number of rows allows."""
    numbers = requests.shape[1]
    max_terms = min(_MAX_TERMS, rows // _MIN_ROWS_PER_TERM, _MAX_TERM_NUMBERS // len(requests))
    degree = max([n for n in range(1, _MAX_DEGREE + 1) if math.comb(numbers + n, n) <= max_terms], default=1)
    columns = [np.ones(len(requests))]
    for n in range(1, degree + 1):
        columns += [
            requests[:, columns_of_term].prod(axis=1)
            for columns_of_term in map(list, combinations_with_replacement(range(numbers), n))
        ]
    return np.stack(columns, axis=1)


def _solve_ridge(terms: FloatArray, answers: FloatArray) -> FloatArray:
    """Compute coefficients, with a ridge so small that it matters only if terms are collinear, or more than answers."""
    size = np.sqrt((terms**2).mean(axis=0)) + np.finfo(np.float64).tiny
    scaled = terms / size
    gram = scaled.T @ scaled + _RIDGE * max(len(terms), 1) * np.eye(scaled.shape[1])
    coefficients: FloatArray = np.linalg.solve(gram, scaled.T @ answers) / size[:, None]
    return coefficients


def _remove_other_numbers(residuals: FloatArray, is_learned: BoolArray) -> FloatArray:
    """Compute residuals of each number after all others of its answer, too: by the inverse of their covariances."""
    covariance = np.cov(residuals[is_learned], rowvar=False).reshape(residuals.shape[1], residuals.shape[1])
    ridge = _RIDGE * np.diag(np.diag(covariance)) + np.finfo(np.float64).tiny * np.eye(len(covariance))
    inverse = np.linalg.pinv(covariance + ridge, hermitian=True)
    remainder: FloatArray = residuals @ inverse / np.maximum(np.diag(inverse), np.finfo(np.float64).tiny)
    return np.clip(remainder, -1e6, 1e6)


# ---- leaks -----------------------------------------------------------------------------------------------------------

_MIN_STANDARD_ERRORS = 4.0
"""Minimum difference of an AUC from 1/2, in standard errors, for a number to be named."""

_MAX_LEAKS = 5
"""Maximum number of leaks that are named."""


@dataclass(frozen=True, slots=True, eq=False)
class Leak:
    """Number that differs between the worlds.

    Attributes:
        view: view that contains it.
        place: its name: field, index, message, round and sender, as far as known.
        auc: fraction of pairs of runs, one of each world, in which world 1 has the larger number; ties count half.
        values: `(runs,)` the number in every run.
        worlds: `(runs,)` 0 or 1.
    """

    view: str
    place: str
    auc: float
    values: FloatArray
    worlds: IntArray

    def __str__(self) -> str:
        return f"{self.place} (AUC {self.auc:.2g})"


def find_leaks(
    runs: Sequence[RunTraffic],
    views: Mapping[str, FloatArray],
    worlds: IntArray,
    bounds: Sequence[Bound],
    answers: Mapping[str, Sequence[str]],
) -> tuple[Leak, ...]:
    """Find the numbers that differ most between the worlds, in the views that classifiers used successfully.

    Args:
        runs: all runs.
        views: every view, `(runs, columns)`.
        worlds: `(runs,)` 0 or 1.
        bounds: bounds of the classifiers; those without effect are ignored.
        answers: names of the columns of views of answers.
    """
    names = _ColumnNames(runs, answers)
    leaks: dict[str, Leak] = {}
    for bound in sorted(bounds, key=lambda each: -each.value):
        if bound.value > 0.0 and bound.view:
            for column, auc in _rank_columns(views[bound.view], worlds):
                place = names.name(bound.view, column)
                leaks.setdefault(place, Leak(bound.view, place, auc, views[bound.view][:, column], worlds))
    return tuple(leaks.values())[:_MAX_LEAKS]


def _rank_columns(view: FloatArray, worlds: IntArray) -> list[tuple[int, float]]:
    """Return the columns that clearly differ, the clearest first, and their AUC."""
    ones = int(worlds.sum())
    zeros = len(worlds) - ones
    rankdata = import_optional("scipy.stats", "scipy", "an audit").rankdata
    ranks = rankdata(view, axis=0)
    aucs = (ranks[worlds == 1].sum(axis=0) - ones * (ones + 1) / 2.0) / (ones * zeros)
    # The error uses the actual ranks: with many ties, an AUC near 1/2 may be significant.
    error = ranks.std(axis=0) * math.sqrt((zeros + ones) / (ones * zeros)) / (zeros + ones)
    scores = np.divide(np.abs(aucs - 0.5), error, out=np.zeros_like(aucs), where=error > 0.0)
    best = np.argsort(-scores, kind="stable")[: 4 * _MAX_LEAKS]
    return [(int(k), float(aucs[k])) for k in best.tolist() if scores[k] >= _MIN_STANDARD_ERRORS]


class _ColumnNames:
    """Names of the columns of all views."""

    def __init__(self, runs: Sequence[RunTraffic], answers: Mapping[str, Sequence[str]]) -> None:
        self._runs, self._columns = runs, dict(answers)

    def name(self, view: str, column: int) -> str:
        """Name a column."""
        if view in CHANNEL_VIEWS:
            return _name_channel_column(view, *locate_column(self._runs, view, column))
        if view not in self._columns:
            self._columns[view] = _name_columns(self._runs, view)
        columns = self._columns[view]
        return columns[column] if columns else view


def _name_columns(runs: Sequence[RunTraffic], view: str) -> list[str]:
    """Name the columns of a view of decoded numbers, in their order; return nothing for other views."""
    numbers, messages = {}, name_messages(runs)
    for field, values in collect_decoded_fields(runs).items():
        places = range(values.shape[2])
        numbers[field] = [[f"number {k} of {field}, {name}" for k in places] for name in messages[field]]
    if view == "values of all fields":
        return [name for rows in numbers.values() for name in chain(*rows)]
    candidates = ((kind, view.removeprefix(f"{kind} of ")) for kind in _FIELD_VIEWS)
    kind, field = next(((kind, field) for kind, field in candidates if field != view and field in numbers), ("", ""))
    rows = numbers.get(field, [])
    all_names, names = [*chain(*rows)], messages.get(field, ())
    match kind:
        case "values" | "low bits":  # two kinds of columns for every number, one after the other in each message
            prefix = "low bits of " if kind == "low bits" else ""
            return [f"{prefix}{name}" for row in rows for name in (*row, *row)]
        case "repeats":
            zeros = [f"whether it is zero: {name}" for name in all_names]
            return zeros + [f"whether it is repeated in the next message: {name}" for name in all_names]
        case "lengths":
            return [f"count of non-zero numbers: {field}, {name}" for name in names]
        case "spread":
            return [f"size of {name}" for name in all_names]
        case "mean spread":
            width = len(rows[0]) if rows else 0
            by_number = [f"size of number {k} of {field}, in all messages together" for k in range(width)]
            by_message = [f"sizes of all numbers of {field}, {name}" for name in (*names, "all messages together")]
            return by_number + [name for name in by_message for _ in range(3)]
    return []


_FIELD_VIEWS = ("values", "low bits", "repeats", "lengths", "mean spread", "spread")
"""Views of a decoded field."""


def name_messages(runs: Sequence[RunTraffic]) -> dict[str, tuple[str, ...]]:
    """Name the messages of every decoded field, such as `message 3 (round 3, from clinic)`.

    Round and sender are included if they are the same in all runs.
    """
    names_by_field = {}
    for field, messages in find_field_sources(runs).items():
        names = []
        for t, occurrences in enumerate(messages):
            rounds, senders = ({getattr(each, part) for _, each in occurrences} for part in ("round", "sender"))
            facts = [f"round {each}" for each in rounds if len(rounds) == 1 and each is not None]
            facts += [f"from {each}" for each in senders if len(senders) == 1 and each is not None]
            names.append(f"message {t} ({', '.join(facts)})" if facts else f"message {t}")
        names_by_field[field] = tuple(names)
    return names_by_field


def _name_channel_column(view: str, kind: Hashable, k: int, number: int) -> str:
    """Name a column of a channel view."""
    parts = kind if isinstance(kind, tuple) else (kind,)
    where = " of ".join(str(part) for part in (*parts[:1], *parts[1:2]))
    match view:
        case "sizes":
            return f"bytes of {where}, number {k}"
        case "counts" if kind == "streams":
            return "count of streams"
        case "counts":
            return f"{('count', 'total bytes', 'count of entries')[number]}: {where}"
        case "metadata":
            return f"{'length' if number == 0 else 'value'} of {parts[2]!r} in {where}, number {k}"
        case "bytes":
            return f"byte {number} of message {k}, {kind}"
        case "status":
            return f"{'length of the text' if number == 0 else 'code or text'} of the status of {kind}, number {k}"
        case "repeated messages":
            return f"whether it was sent before: message {k}, {kind}"
        case _:
            return f"{view}, {where}, number {k}"
