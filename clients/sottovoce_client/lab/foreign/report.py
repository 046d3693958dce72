"""The page of an audit of a service that is not ours."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator
from typing import Any

import numpy as np

from sottovoce.auditing.blackbox import level, tested
from sottovoce.auditing.bounds import epsilon_lower_bound
from sottovoce.lab.foreign.audit import ForeignAudit
from sottovoce.lab.foreign.power import Power
from sottovoce.privacy.guarantee import WEAK_EPSILON
from sottovoce_client.auditing.pictures import noise_plot, quantile_plot, worlds_plot
from sottovoce_client.auditing.report import DIGEST_LINES, guesses_table, tests_table
from sottovoce_client.lab.foreign.runs import ForeignRequest, Reading
from sottovoce_client.reports.drawing import BLUE, GREEN, PINK, Figure, View, line, rule, upright
from sottovoce_client.reports.marks import Axis
from sottovoce_client.reports.page import Column, Page, PageTable
from sottovoce_client.wording import number

_RUNS = np.geomspace(16, 20_000, 40).astype(int)
"""Of each world, that the figure of power shows."""

_TALL = 3.0
"""Of the claim, how far that figure reaches."""


def foreign_page(done: ForeignAudit, reading: Reading, asked: ForeignRequest, digest: str) -> Page:
    """The page of an audit.

    Args:
        done: the audit.
        reading: what was read of the captures.
        asked: the request.
        digest: SHA-256 of its `audit.json`.
    """
    found = done.found
    kinds = {test: [str(sign) for sign in done.signs if sign.test == test] for test in ("said again", "equivocation")}
    values: dict[str, Any] = {
        "done": done,
        "found": found,
        "reading": reading,
        "asked": asked,
        "name": asked.name,
        "kinds": kinds,
        "weak_epsilon": WEAK_EPSILON,
        "best_guess": 100.0 / (1.0 + math.exp(-found.claim)),
        "failed_tests": [test for test in found.tests if test.rejects],
        "command": _command(asked),
        "centred": done.noise is not None and not math.isnan(done.noise.epsilon),
        "digest": digest,
        "digest_lines": DIGEST_LINES,
    }
    return Page("foreign.html.j2", [*_figures(done), *_tables(done)], values)


def _figures(done: ForeignAudit) -> Iterator[Figure]:
    if done.leaks:
        first = done.leaks[0]
        yield worlds_plot("leak", first.place[:1].upper() + first.place[1:], first.values, first.worlds, first.place)
    shown = done.noise.shown if done.noise is not None else np.empty(0)
    yield noise_plot(shown)
    yield quantile_plot(shown)
    yield _power(done)


def _power(done: ForeignAudit) -> Figure:
    """What guesses show with so many runs: of a service with half of its noise, and of one that keeps nothing back."""
    found, title = done.found, "What more runs would show"
    if not 0.0 < found.claim < math.inf or math.isinf(found.needed):
        return Figure("power", title, (), ())
    power = Power(found.claim, found.delta, done.messages, found.levels)
    runs = np.unique(np.append(_RUNS, max(1, found.runs)))
    halved = np.array([power.shown(2.0, 2 * int(each)) for each in runs])
    guesses = [tested(2 * int(each)) for each in runs]
    best = np.array([epsilon_lower_bound(each, each, level(found.levels), found.delta, each) for each in guesses])
    marks = [
        rule(runs, np.where(best <= _TALL * found.claim, best, math.nan), "every guess right", PINK, "dot"),
        line(runs, halved, "half of the noise, best of guessers", GREEN, width=2.2),
        rule(runs[[0, -1]], [found.claim] * 2, "claim"),
        upright(found.runs, "this audit", BLUE, "solid"),
    ]
    up = Axis("lower bound on ε", zero=True)
    return Figure("power", title, marks, (View("", Axis("runs of each world", log=True, form="count"), up),))


def _tables(done: ForeignAudit) -> Iterator[PageTable]:
    rows = [(leak.place, leak.view, leak.auc) for leak in done.leaks]
    columns = (Column("number", kind="long"), Column("seen in", kind="long"), Column("AUC", lambda auc: number(auc, 3)))
    yield PageTable("leaks", "Numbers that differ between the worlds", columns, rows)
    yield tests_table(done.found.tests)
    yield guesses_table("guesses", "Guesses that count", done.found.bounds)
    yield guesses_table("timed", "Guesses by time, which do not count", done.timed)


def _command(asked: ForeignRequest) -> str:
    """The command that makes the same audit."""
    words = ["sottovoce", "eavesdropper", "audit", str(asked.folder)]
    given = {
        "--decoder": asked.decoder,
        "--run-is": asked.run_is,
        "--claim": None if math.isinf(asked.claim) else f"{asked.claim:g}",
        "--delta": f"{asked.delta:g}" if asked.delta else None,
        "--noise-law": asked.noise,
        "--confidence": f"{asked.confidence:g}",
        "--seed": asked.seed,
    }
    words += [str(word) for flag, value in given.items() if value is not None for word in (flag, value)]
    return shlex.join(words)
