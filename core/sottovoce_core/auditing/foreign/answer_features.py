"""Views of a service's messages for a classifier, and the numbers in them that tell the worlds apart.

A view of answers is the part of them that their requests do not explain. A service may be asked for a gradient and a loss at
parameters that are others in every call. The loss by itself looks like noise then: it varies with the parameters a thousand
times more than with a record. So answers are regressed on polynomials of their requests, and on what else was answered; what is
left, times the request, is what a record adds to an answer. The regressions know no worlds, and are fitted to runs that are not
guessed.

A number that tells the worlds apart is named by field, index, message, round and sender, as far as they are known.
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
"""Of a request and of an answer, so many numbers are looked at."""

_MAX_DEGREE, _MAX_TERMS, _MIN_ROWS_PER_TERM = 4, 500, 5
"""Polynomials of the request: their degree and their number of terms at most, and how many answers each term needs at least."""

_MAX_TERM_NUMBERS = 2**24
"""Of all terms of all answers together, at most: 128 MiB."""

_RIDGE, _FOLDS, _MIN_ANSWERS = 1e-8, 4, 16
"""Of the regressions; and from so many answers on there is one."""


@dataclass(frozen=True, slots=True)
class _Answers:
    """All answers of one method.

    Attributes:
        run: `(rows,)` the run of each.
        asked, answered: `(rows, numbers)` of the request, and of the answer to it.
        names: of the numbers of an answer.
    """

    run: IntArray
    asked: FloatArray
    answered: FloatArray
    names: tuple[str, ...]


def build_answer_views(runs: Sequence[RunTraffic], learnt: IntArray) -> dict[str, tuple[FloatArray, tuple[str, ...]]]:
    """A view for each method whose requests and answers are decoded and vary: finite numbers `(runs, features)`, and their names.

    Args:
        runs: what passed.
        learnt: the runs that may be learnt from.
    """
    found = {}
    for method, answers in _pairs(runs).items():
        own = np.isin(answers.run, learnt)
        if int(own.sum()) < _MIN_ANSWERS:
            continue
        (asked, _), (answered, kept) = (_varying(part, own) for part in (answers.asked, answers.answered))
        if asked.shape[1] and answered.shape[1]:
            names = tuple(name for name, here in zip(answers.names, kept.tolist(), strict=True) if here)
            varying = _Answers(
                answers.run,
                asked[:, :_MAX_REQUEST_NUMBERS],
                answered[:, :_MAX_ANSWER_NUMBERS],
                names[:_MAX_ANSWER_NUMBERS],
            )
            found[f"answers of {method} beside their requests"] = _view(varying, learnt, len(runs))
    return found


def _pairs(runs: Sequence[RunTraffic]) -> dict[str, _Answers]:
    """Answers by method, each beside the last request of its stream; of a method those of the commonest lengths."""
    rows: dict[str, list[tuple[int, FloatArray, FloatArray]]] = defaultdict(list)
    names: dict[tuple[str, int], tuple[str, ...]] = {}
    for k, run in enumerate(runs):
        count = Counter[str]()
        for request, answer in _asked(run):
            count[answer.method] += 1
            if count[answer.method] <= MAX_ITEMS_PER_KIND:
                rows[answer.method].append((k, _numbers(request), _numbers(answer)))
                names.setdefault((answer.method, len(rows[answer.method][-1][2])), _names(answer))
    found = {}
    for method, all_rows in rows.items():
        [(widths, _)] = Counter((len(asked), len(answer)) for _, asked, answer in all_rows).most_common(1)
        kept = [row for row in all_rows if (len(row[1]), len(row[2])) == widths]
        numbers = np.array([k for k, _, _ in kept])
        asked, answered = (np.stack([row[k] for row in kept]) for k in (1, 2))
        found[method] = _Answers(numbers, asked, answered, names[method, widths[1]])
    return found


def _asked(run: RunTraffic) -> Iterator[tuple[CapturedFrame, CapturedFrame]]:
    """Every decoded answer, and the request before it."""
    last: dict[int, CapturedFrame] = {}
    for each in run.messages:
        if each.decoded_message is None:
            continue
        if each.direction == "out":
            last[each.stream] = each
        elif each.stream in last:
            yield last[each.stream], each


def _numbers(message: CapturedFrame) -> FloatArray:
    fields = {} if message.decoded_message is None else message.decoded_message.fields
    return np.concatenate([np.empty(0), *(fields[name] for name in sorted(fields))])


def _names(message: CapturedFrame) -> tuple[str, ...]:
    fields = {} if message.decoded_message is None else message.decoded_message.fields
    return tuple(f"number {k} of {name}" for name in sorted(fields) for k in range(len(fields[name])))


def _varying(values: FloatArray, own: BoolArray) -> tuple[FloatArray, BoolArray]:
    """The columns that vary, in units of their spread in the runs that may be learnt from; and which they are."""
    centre, spread = np.median(values[own], axis=0), values[own].std(axis=0)
    kept = np.isfinite(spread) & (spread > 0)
    varying: FloatArray = np.clip((values[:, kept] - centre[kept]) / spread[kept], -1e3, 1e3)
    return varying, kept


def _view(answers: _Answers, learnt: IntArray, runs: int) -> tuple[FloatArray, tuple[str, ...]]:
    """Sums over a run's answers of what is left of them, of its size and square, and of its products with the request."""
    alone = _left(answers, learnt)
    own = np.isin(answers.run, learnt)
    width = answers.asked.shape[1] + 3
    most = max(1, MAX_COLUMNS // (2 * width))
    clearest = np.argsort(alone[own].std(axis=0), kind="stable")[:most]  # noised ones tell little
    left = np.concatenate([alone[:, clearest], _beside_others(alone, own)[:, clearest]], axis=1)
    factors = (np.ones(len(left)), np.sign(left), left, *answers.asked.T)
    view = np.zeros((runs, width, left.shape[1]))
    for k, factor in enumerate(factors):
        np.add.at(view[:, k], answers.run, left * factor.reshape(len(left), -1))
    names = tuple(f"{answers.names[k]}, beside what its request explains" for k in clearest.tolist())
    return view.reshape(runs, -1), names * 2 * width


def _left(answers: _Answers, learnt: IntArray) -> FloatArray:
    """`(rows, numbers)`: answers without what polynomials of the request explain, fitted to other runs of those learnt from."""
    own = np.isin(answers.run, learnt)
    terms = _terms(answers.asked, int(own.sum()))
    fold = np.where(own, answers.run % _FOLDS, -1)
    left = np.empty_like(answers.answered)
    for k in range(-1, _FOLDS):
        fitted, here = own & (fold != k), fold == k
        left[here] = answers.answered[here] - terms[here] @ _solved(terms[fitted], answers.answered[fitted])
    return left


def _terms(asked: FloatArray, rows: int) -> FloatArray:
    """Polynomials of as high a degree as so many rows can tell."""
    numbers = asked.shape[1]
    most = min(_MAX_TERMS, rows // _MIN_ROWS_PER_TERM, _MAX_TERM_NUMBERS // len(asked))
    degree = max([n for n in range(1, _MAX_DEGREE + 1) if math.comb(numbers + n, n) <= most], default=1)
    columns = [np.ones(len(asked))]
    for n in range(1, degree + 1):
        columns += [
            asked[:, chosen].prod(axis=1) for chosen in map(list, combinations_with_replacement(range(numbers), n))
        ]
    return np.stack(columns, axis=1)


def _solved(terms: FloatArray, answered: FloatArray) -> FloatArray:
    """Coefficients, with a ridge so small that it matters only where terms are alike, or more than answers."""
    size = np.sqrt((terms**2).mean(axis=0)) + np.finfo(np.float64).tiny
    scaled = terms / size
    gram = scaled.T @ scaled + _RIDGE * max(len(terms), 1) * np.eye(scaled.shape[1])
    solved: FloatArray = np.linalg.solve(gram, scaled.T @ answered) / size[:, None]
    return solved


def _beside_others(left: FloatArray, own: BoolArray) -> FloatArray:
    """What is left of each number after all others of its answer, too: by the inverse of their covariances."""
    covariance = np.cov(left[own], rowvar=False).reshape(left.shape[1], left.shape[1])
    ridge = _RIDGE * np.diag(np.diag(covariance)) + np.finfo(np.float64).tiny * np.eye(len(covariance))
    inverse = np.linalg.pinv(covariance + ridge, hermitian=True)
    rest: FloatArray = left @ inverse / np.maximum(np.diag(inverse), np.finfo(np.float64).tiny)
    return np.clip(rest, -1e6, 1e6)


# ---- leaks -----------------------------------------------------------------------------------------------------------

_MIN_STANDARD_ERRORS = 4.0
"""Standard errors by which an AUC must differ from 1/2 where a classifier has told the worlds apart."""

_MAX_LEAKS = 5
"""Leaks that are named."""


@dataclass(frozen=True, slots=True, eq=False)
class Leak:
    """A number that differs between the worlds.

    Attributes:
        view: where it was seen.
        place: its name: field, index, message, round and sender, as far as known.
        auc: share of pairs of runs, one of each world, in which world 1 has the larger number; ties count half.
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
    seen: Mapping[str, FloatArray],
    worlds: IntArray,
    bounds: Sequence[Bound],
    answers: Mapping[str, Sequence[str]],
) -> tuple[Leak, ...]:
    """Find the numbers that tell the worlds apart most, in the views by which classifiers did.

    Args:
        runs: all of them.
        seen: every view, `(runs, columns)`.
        worlds: `(runs,)` 0 or 1.
        bounds: of the classifiers; those that show nothing are left out.
        answers: names of the columns of views of answers.
    """
    naming = _Naming(runs, answers)
    found: dict[str, Leak] = {}
    for bound in sorted(bounds, key=lambda each: -each.value):
        if bound.value > 0.0 and bound.view:
            for column, auc in _telling(seen[bound.view], worlds):
                place = naming.name(bound.view, column)
                found.setdefault(place, Leak(bound.view, place, auc, seen[bound.view][:, column], worlds))
    return tuple(found.values())[:_MAX_LEAKS]


def _telling(view: FloatArray, worlds: IntArray) -> list[tuple[int, float]]:
    """Columns that clearly differ, the clearest first, and their AUC."""
    ones = int(worlds.sum())
    zeros = len(worlds) - ones
    rankdata = import_optional("scipy.stats", "scipy", "an audit").rankdata
    ranks = rankdata(view, axis=0)
    aucs = (ranks[worlds == 1].sum(axis=0) - ones * (ones + 1) / 2.0) / (ones * zeros)
    # Of the ranks as they are: where most are equal, an AUC near 1/2 says as much as another one far from it.
    error = ranks.std(axis=0) * math.sqrt((zeros + ones) / (ones * zeros)) / (zeros + ones)
    scores = np.divide(np.abs(aucs - 0.5), error, out=np.zeros_like(aucs), where=error > 0.0)
    best = np.argsort(-scores, kind="stable")[: 4 * _MAX_LEAKS]
    return [(int(k), float(aucs[k])) for k in best.tolist() if scores[k] >= _MIN_STANDARD_ERRORS]


class _Naming:
    """Names of the columns of all views."""

    def __init__(self, runs: Sequence[RunTraffic], answers: Mapping[str, Sequence[str]]) -> None:
        self._runs, self._columns = runs, dict(answers)

    def name(self, view: str, column: int) -> str:
        """What a column is, in words."""
        if view in CHANNEL_VIEWS:
            return _thing(view, *locate_column(self._runs, view, column))
        if view not in self._columns:
            self._columns[view] = _columns_of(self._runs, view)
        columns = self._columns[view]
        return columns[column] if columns else view


def _columns_of(runs: Sequence[RunTraffic], view: str) -> list[str]:
    """Names of the columns of a view of decoded numbers, in the order in which the view has them; none: it is another view."""
    numbers, messages = {}, name_messages(runs)
    for field, values in collect_decoded_fields(runs).items():
        places = range(values.shape[2])
        numbers[field] = [[f"number {k} of {field}, {name}" for k in places] for name in messages[field]]
    if view == "values of all fields":
        return [name for rows in numbers.values() for name in chain(*rows)]
    found = ((kind, view.removeprefix(f"{kind} of ")) for kind in _OF_FIELDS)
    kind, field = next(((kind, field) for kind, field in found if field != view and field in numbers), ("", ""))
    rows = numbers.get(field, [])
    every, names = [*chain(*rows)], messages.get(field, ())
    match kind:
        case "values" | "low bits":  # two kinds of columns for every number, side by side in each message
            said = "low bits of " if kind == "low bits" else ""
            return [f"{said}{name}" for row in rows for name in (*row, *row)]
        case "repeats":
            zeros = [f"whether it is zero: {name}" for name in every]
            return zeros + [f"whether it is repeated in the next message: {name}" for name in every]
        case "lengths":
            return [f"how many numbers are not zero: {field}, {name}" for name in names]
        case "spread":
            return [f"size of {name}" for name in every]
        case "mean spread":
            width = len(rows[0]) if rows else 0
            alone = [f"size of number {k} of {field}, in all messages together" for k in range(width)]
            together = [f"sizes of all numbers of {field}, {name}" for name in (*names, "all messages together")]
            return alone + [name for name in together for _ in range(3)]
    return []


_OF_FIELDS = ("values", "low bits", "repeats", "lengths", "mean spread", "spread")
"""Views of a decoded field."""


def name_messages(runs: Sequence[RunTraffic]) -> dict[str, tuple[str, ...]]:
    """Of every decoded field, `message 3 (round 3, from clinic)`: round and sender where all runs have the same ones."""
    found = {}
    for field, messages in find_field_sources(runs).items():
        names = []
        for t, them in enumerate(messages):
            rounds, senders = ({getattr(each, part) for _, each in them} for part in ("round", "sender"))
            facts = [f"round {each}" for each in rounds if len(rounds) == 1 and each is not None]
            facts += [f"from {each}" for each in senders if len(senders) == 1 and each is not None]
            names.append(f"message {t} ({', '.join(facts)})" if facts else f"message {t}")
        found[field] = tuple(names)
    return found


def _thing(view: str, kind: Hashable, k: int, number: int) -> str:
    """A column of what passes beside numbers."""
    parts = kind if isinstance(kind, tuple) else (kind,)
    where = " of ".join(str(part) for part in (*parts[:1], *parts[1:2]))
    match view:
        case "sizes":
            return f"bytes of {where}, number {k}"
        case "counts" if kind == "streams":
            return "how many streams"
        case "counts":
            return f"{('how many there are', 'bytes of all', 'how many entries')[number]}: {where}"
        case "metadata":
            return f"{'length' if number == 0 else 'value'} of {parts[2]!r} in {where}, number {k}"
        case "bytes":
            return f"byte {number} of message {k}, {kind}"
        case "status":
            return f"{'length of the text' if number == 0 else 'code or text'} of the status of {kind}, number {k}"
        case "messages said again":
            return f"whether it was sent before: message {k}, {kind}"
        case _:
            return f"{view}, {where}, number {k}"
