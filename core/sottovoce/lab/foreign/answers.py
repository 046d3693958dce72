"""What was answered, in the light of what was asked: what is left of an answer that its request explains.

A service may be asked for a gradient and a loss at parameters that are others in every call. The loss by itself looks like noise
then: it varies with the parameters a thousand times more than with a record. So answers are regressed on polynomials of their
requests, and on what else was answered; what is left, times the request, is what a record adds to an answer. The regressions
know no worlds, and are fitted to runs that are not guessed.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement

import numpy as np

from sottovoce.arrays import BoolArray, FloatArray, IntArray
from sottovoce.auditing.views import COLUMNS, REPEATED, Conversation, Overheard

_ASKED, _ANSWERED = 32, 64
"""Of a request and of an answer, so many numbers are looked at."""

_DEGREE, _TERMS, _ROWS_A_TERM = 4, 500, 5
"""Polynomials of the request: their degree and their number of terms at most, and how many answers each term needs at least."""

_NUMBERS = 2**24
"""Of all terms of all answers together, at most: 128 MiB."""

RIDGE, _FOLDS, _LEAST = 1e-8, 4, 16
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


def answer_views(runs: Sequence[Conversation], learnt: IntArray) -> dict[str, tuple[FloatArray, tuple[str, ...]]]:
    """A view for each method whose requests and answers are decoded and vary: finite numbers `(runs, features)`, and their names.

    Args:
        runs: what passed.
        learnt: the runs that may be learnt from.
    """
    found = {}
    for method, answers in _pairs(runs).items():
        own = np.isin(answers.run, learnt)
        if int(own.sum()) < _LEAST:
            continue
        (asked, _), (answered, kept) = (_varying(part, own) for part in (answers.asked, answers.answered))
        if asked.shape[1] and answered.shape[1]:
            names = tuple(name for name, here in zip(answers.names, kept.tolist(), strict=True) if here)
            varying = _Answers(answers.run, asked[:, :_ASKED], answered[:, :_ANSWERED], names[:_ANSWERED])
            found[f"answers of {method} beside their requests"] = _view(varying, learnt, len(runs))
    return found


def _pairs(runs: Sequence[Conversation]) -> dict[str, _Answers]:
    """Answers by method, each beside the last request of its stream; of a method those of the commonest lengths."""
    rows: dict[str, list[tuple[int, FloatArray, FloatArray]]] = defaultdict(list)
    names: dict[tuple[str, int], tuple[str, ...]] = {}
    for k, run in enumerate(runs):
        count = Counter[str]()
        for request, answer in _asked(run):
            count[answer.method] += 1
            if count[answer.method] <= REPEATED:
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


def _asked(run: Conversation) -> Iterator[tuple[Overheard, Overheard]]:
    """Every decoded answer, and the request before it."""
    last: dict[int, Overheard] = {}
    for each in run.messages:
        if each.decoded is None:
            continue
        if each.direction == "out":
            last[each.stream] = each
        elif each.stream in last:
            yield last[each.stream], each


def _numbers(message: Overheard) -> FloatArray:
    fields = {} if message.decoded is None else message.decoded.fields
    return np.concatenate([np.empty(0), *(fields[name] for name in sorted(fields))])


def _names(message: Overheard) -> tuple[str, ...]:
    fields = {} if message.decoded is None else message.decoded.fields
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
    most = max(1, COLUMNS // (2 * width))
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
    most = min(_TERMS, rows // _ROWS_A_TERM, _NUMBERS // len(asked))
    degree = max([n for n in range(1, _DEGREE + 1) if math.comb(numbers + n, n) <= most], default=1)
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
    gram = scaled.T @ scaled + RIDGE * max(len(terms), 1) * np.eye(scaled.shape[1])
    solved: FloatArray = np.linalg.solve(gram, scaled.T @ answered) / size[:, None]
    return solved


def _beside_others(left: FloatArray, own: BoolArray) -> FloatArray:
    """What is left of each number after all others of its answer, too: by the inverse of their covariances."""
    covariance = np.cov(left[own], rowvar=False).reshape(left.shape[1], left.shape[1])
    ridge = RIDGE * np.diag(np.diag(covariance)) + np.finfo(np.float64).tiny * np.eye(len(covariance))
    inverse = np.linalg.pinv(covariance + ridge, hermitian=True)
    rest: FloatArray = left @ inverse / np.maximum(np.diag(inverse), np.finfo(np.float64).tiny)
    return np.clip(rest, -1e6, 1e6)
