"""The audit's page: what was asked, what was looked at, what was found, and what that does not show."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from sottovoce.auditing.audit import Audit, Coins
from sottovoce.auditing.bounds import Bound, ceiling
from sottovoce.auditing.levels import Test
from sottovoce.auditing.twins import Twins
from sottovoce.auditing.verdict import Findings, decide
from sottovoce.privacy.guarantee import WEAK_EPSILON
from sottovoce.spec import dump_spec
from sottovoce_client.auditing import pictures as pictures
from sottovoce_client.auditing import plots as plots
from sottovoce_client.reports.drawing import Figure
from sottovoce_client.reports.marks import thinned
from sottovoce_client.reports.page import Column, Page, PageTable
from sottovoce_client.wording import NOTHING, chance, number

_MOST_ROUNDS = 1000
"""Rows of the table of single rounds."""
_MOST_EVIDENCE = 8
COINS: Mapping[Coins, str] = {"operating system": "the operating system’s", "not known": "not known"}
"""Whose coins are that are not the seed's, in words."""
DIGEST_LINES = """\
raw() { sha256sum "$@" | cut -c -64 | python -c 'import sys; sys.stdout.buffer.write(bytes.fromhex(sys.stdin.read()))'; }
(raw capture.json; raw part-*.parquet | raw) | sha256sum"""
"""`Capture.digests` for whoever has no Sottovoce."""

two, three = partial(number, digits=2), partial(number, digits=3)


def about(done: Audit) -> str:
    """Name of the learner whose promise the verdict is about; empty: it is about several, or all together."""
    return "" if done.about is None else done.plan.run.spec.names[done.about]


def audit_page(done: Audit, name: str, seed: int, digest: str = "") -> Page:
    """The page of an audit.

    Args:
        done: the audit.
        name: of the learner whose record was swapped.
        seed: of the audit.
        digest: SHA-256 of its `audit.json`; empty: it is not written.
    """
    found, plan = done.found, done.plan
    heard = pictures.most_different(done)
    values = {
        "done": done,
        "name": name,
        "about": about(done),
        "seed": seed,
        "coins": COINS.get(done.coins, ""),
        "digest_lines": DIGEST_LINES,
        "digest": digest,
        "names": plan.run.spec.names,
        **_families(found),
        "added_up": None
        if found.rounds is None
        else sum(ceiling(plan.runs, each.level) for each in found.rounds.bounds),
        "paper": float(plan.guarantee.paper[-1]),
        "tight": plan.guarantee.epsilon(),
        "shares": [
            (part, found.levels.of(family, part)) for family, parts in found.levels.shares.items() for part in parts
        ],
        "weak_epsilon": WEAK_EPSILON,
        "best_guess": 100.0 / (1.0 + math.exp(-plan.epsilon)),  # of a coin, in the worst case
        "most_evidence": _MOST_EVIDENCE,
        "most_rounds": _MOST_ROUNDS,
        "shown_claim": plots.SHOWN_CLAIM,
        "impossible": 0 if done.shown is None else int((~plots.possible(done.shown)).sum()),
        "drawn": [] if done.shown is None else done.shown.worlds[plots.possible(done.shown)],
        "endless": [] if done.shown is None else np.flatnonzero(np.isinf(done.shown.peak)).tolist(),
        "unclaimed": [plan.run.spec.names[each.learner] for each in done.learners if math.isinf(each.claim)],
        "heard": heard and (int(plan.listener.rounds[heard[0]]), heard[1]),
        "command": _command(done, name, seed),
        "spec_yaml": dump_spec(plan.run.spec),
    }
    return Page("audit.html.j2", [*_figures(done, heard), *_tables(done)], values)


def _families(found: Findings) -> dict[str, Any]:
    """What each family comes to as if the others had found nothing, and what it shows of itself."""
    conformance, likelihood, black_box = (found.of(family) for family in ("conformance", "likelihood", "black box"))
    tried = [bound for bound in black_box.bounds if bound.view]
    return {
        "kinds": {
            "conformance": "consistent" if (kind := decide(conformance).kind) == "unpromised" else kind,
            "likelihood": decide(likelihood).kind,
            "black_box": decide(black_box).kind,
        },
        "classes": {
            "conformance": _worst_by_class(conformance.tests),
            "likelihood": _worst_by_class(likelihood.tests),
            "black_box": _worst_by_class(black_box.tests),
        },
        "attempt": max(tried, key=lambda each: (each.value, each.correct / max(1, each.guesses)), default=None),
    }


def _worst_by_class(tests: Sequence[Test]) -> list[tuple[str, int, Test]]:
    """Every class of tests, how many there are, and the one that comes nearest to refuting the claim."""
    classes: dict[str, list[Test]] = {}
    for test in tests:
        classes.setdefault(str(test.part), []).append(test)
    return [(name, len(each), min(each, key=_nearness)) for name, each in classes.items()]


def _nearness(test: Test) -> float:
    return math.inf if math.isnan(test.p_value) else test.p_value / test.level if test.level else math.inf


def _figures(done: Audit, heard: tuple[int, int] | None) -> Iterator[Figure]:
    found, plan, shown, pair = done.found, done.plan, done.shown, done.twins
    if shown is not None:
        yield plots.cumulative_plot(shown, plan.claim)
        yield plots.single_plot(found.rounds)
        if found.guessed is not None:
            yield plots.loss_plot(shown, found.claim, float(plan.guarantee.paper[-1]))
            yield plots.roc_plot(shown, found.claim, found.guessed.value)
            yield plots.progress_plot(shown, found.guessed, found.claim)
    yield pictures.noise_plot(done.noise)
    yield pictures.quantile_plot(done.noise)
    rounds, near = len(pair.first), pictures.close_rounds(pair)
    yield pictures.twins_plot("twins", "The whole run", pair, thinned(rounds))
    close = pictures.twins_plot("twins-close", "Around the swap", pair, near)
    yield close if len(near) < rounds else replace(close, marks=())
    yield pictures.said_plot(done, heard)


# ---- tables ----------------------------------------------------------------------------------------------------------


def _tables(done: Audit) -> Iterator[PageTable]:
    found = done.found
    yield tests_table(found.tests)
    yield guesses_table("guesses", "Guesses", found.bounds)
    yield _single(found)
    yield _moved(done.twins)
    yield pictures.learners_table(done.learners, done.plan.run.spec.names, done.plan.worlds.learner)


def tests_table(tests: Sequence[Test]) -> PageTable:
    """All tests, those that fail marked."""
    rows = [(t.name, t.what, t.where, t.statistic, t.p_value, t.level) for t in tests]
    heads = (
        Column("what is tested", kind="long"),
        Column("where it was largest", lambda where: where or NOTHING, "long"),
    )
    figures = (Column("statistic", number), Column("p-value", chance), Column("rejects below", two))
    rejected = [k for k, test in enumerate(tests) if test.rejects]
    return _marked("tests", "Tests", (Column("test"), *heads, *figures), rows, rejected)


def guesses_table(name: str, title: str, bounds: Sequence[Bound]) -> PageTable:
    """What guessers came to, those above their claims marked."""
    guesses = [(b.name, (b.correct, b.guesses), b.value, b.claim, b.level) for b in bounds]
    shown = (_GUESSES, Column("ε at least", three), Column("claimed ε", number))
    over = [k for k, bound in enumerate(bounds) if bound.rejects]
    columns = (Column("who guesses"), *shown, Column("may be wrong with", two))
    return _marked(name, title, columns, guesses, over)


def _marked(
    name: str, title: str, columns: Sequence[Column], rows: Sequence[Sequence[Any]], over: Sequence[int]
) -> PageTable:
    """A table in some rows of which the claim fails."""
    return PageTable(name, title, columns, rows, frozenset((row, k) for row in over for k in range(len(columns))))


def _single(found: Findings) -> PageTable:
    """Guesses of every round; where there are too many, of those that show most."""
    name, title, rounds = "rounds", "Guesses of single rounds", found.rounds
    if rounds is None:
        return PageTable(name, title, (), ())
    most = sorted(sorted(range(len(rounds.bounds)), key=lambda t: -rounds.bounds[t].value)[:_MOST_ROUNDS])
    told = [(t, rounds.bounds[t]) for t in most]
    rows = [
        (f"round {t}", (bound.correct, bound.guesses), bound.value, bound.claim, float(rounds.largest[t]))
        for t, bound in told
    ]
    shown = (Column("ε at least", three), Column("claimed ε", number), Column("largest loss", number))
    over = [k for k, (_, bound) in enumerate(told) if bound.rejects]
    return _marked(name, title, (Column("message"), _GUESSES, *shown), rows, over)


_GUESSES = Column("right guesses", lambda made: f"{made[0]:,} of {made[1]:,}")


def _moved(pair: Twins) -> PageTable:
    """The first messages that the swap moves, against their noise."""
    rows = [
        (
            f"round {t}",
            difference := abs(float(pair.first[t] - pair.second[t])),
            abs(float(pair.bare_first[t] - pair.bare_second[t])),
            scale := float(pair.scale[t]),
            difference / scale if scale > 0 else None,
        )
        for t in pictures.moving(pair)[:3].tolist()
    ]
    heads = ("difference, same noise", "without noise", "noise scale")
    ratio = Column("difference / scale", lambda value: "no noise" if value is None else three(value))
    columns = (Column("message"), *(Column(head, three) for head in heads), ratio)
    return PageTable("moved", "The first messages that differ", columns, rows)


# ---- how to repeat it ------------------------------------------------------------------------------------------------


def _command(done: Audit, name: str, seed: int) -> str:
    plan = done.plan
    options = [f"--learner {name}", f"--runs {plan.all_runs}", f"--threat {plan.listener.threat.value}"]
    if plan.listener.neighbour is not None:
        options.append(f"--neighbour {plan.run.spec.names[plan.listener.neighbour]}")
    options += [f"--confidence {1 - plan.levels.alpha:.6g}", f"--seed {seed}"]
    return f"sottovoce audit {plan.run.spec.name}.yaml {' '.join(options)}"
