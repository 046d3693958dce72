"""What an audit writes: `audit.json`, and the page that shows what was asked, tested and found, and what that does not show."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from typing import Any

import numpy as np

from sottovoce_client.auditing import plots as plots
from sottovoce_client.auditing.worlds import digest
from sottovoce_client.reports.page import Column, Page, PageTable
from sottovoce_client.wording import NOTHING, chance, number, share
from sottovoce_core.auditing.audit import Audit, CoinSource, LearnerLoss
from sottovoce_core.auditing.bounds import Bound, Test, ceiling
from sottovoce_core.auditing.verdict import Findings, decide
from sottovoce_core.auditing.worlds import CoupledRuns
from sottovoce_core.privacy.guarantee import WEAK_EPSILON
from sottovoce_core.spec import dump_spec

# ---- audit.json ------------------------------------------------------------------------------------------------------


def build_audit_document(done: Audit, name: str, seed: int) -> dict[str, Any]:
    """An audit as a document, written now.

    Args:
        done: the audit.
        name: of the learner whose record was swapped.
        seed: of the audit.
    """
    found, plan = done.found, done.plan
    return {
        "sottovoce": version("sottovoce"),
        "written_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "data_sha256": digest(plan.data),  # equal for equal records in equal rounds
        "spec": plan.run.spec.model_dump(mode="json"),
        "learner": name,  # whose record was swapped
        "about": None
        if done.about is None
        else plan.run.spec.names[done.about],  # whose promise; null: that of several, or all
        "verdict": done.verdict,
        "source": done.source,  # where the runs came from, in words
        "captures_sha256": done.captures,  # of capture.json and the parts of every capture that was read, by its path
        "provisos": done.provisos,  # what must be known of the runs besides to judge the verdict
        "unproven": done.unproven,  # why captures do not prove what their learners said; empty: they do, or runs were made here
        "worlds": plan.worlds.what,  # what was swapped, in words
        "pairs": [
            {"worlds": each.worlds.what, "runs_of_each_world": each.runs, "epsilon": each.epsilon}
            for each in plan.pairs
        ],  # of worlds: the first is the one whose runs are guessed
        "would_have_found": found.reaches,  # the smallest violations that would have been found, nine times in ten
        "threat_model": plan.listener.threat,  # who listened
        "claim_made_for": plan.made_for,  # the listener whom the claim was made for
        "adjacency": plan.guarantee.adjacency,  # which two data sets must look alike
        "runs_of_each_world": found.runs,
        "confidence": 1.0 - found.levels.alpha,  # with which a correct learner is not refuted
        "coins": done.coins,  # what chose the world of every run
        "seed": seed,  # of simulated runs, of coins where these are the seed's, and of what tests draw
        "epsilon": {
            "promised": found.claim,  # by the algorithm, for this swap
            "paper": float(plan.guarantee.paper[-1]),  # by the paper's formula
            "largest_realised": done.largest,  # exact loss of any transcript, of the swap in `worlds`; null: not known here
            "lower_bound": found.largest,  # the largest that guesses of whole runs show
            "most_that_so_many_runs_show": found.most,  # if every guess of a whole run were right; 0: nothing was guessed
        },
        "conformance": found.of("conformance").tests,  # whether the noise is what the algorithm says
        "likelihood": _likelihood(done),
        "single_rounds": _single_rounds(done),
        "learners": [
            {
                "learner": plan.run.spec.names[each.learner],
                "swap": each.swap,  # chosen after these runs: another one than `worlds`
                "claim": each.claim,
                "largest": each.largest,
            }
            for each in done.learners
        ],  # exact losses in a few runs, for the most telling swap of each learner's first record
        "black_box": {
            "epsilon_promised_in_the_rounds_seen": done.black_box_claim,
            "numbers_that_vary_by_view": dict(done.views),  # of each view, how many are not the same in all runs
            "attempts": list_attempts(found.of("black box").bounds),
            "channel": found.of(
                "black box"
            ).tests,  # whether anything but the messages depends on the world, given these
        },
    }


def list_attempts(bounds: Iterable[Bound]) -> list[dict[str, Any]]:
    """What classifiers came to, for a file."""
    return [{"model": bound.guesser, "view": bound.view, **_guessed(bound)} for bound in bounds]


def _guessed(bound: Bound) -> dict[str, Any]:
    """Guesses, the lower bound on epsilon, and the probability with which it is above the true epsilon, at most."""
    return {"guesses": bound.guesses, "correct": bound.correct, "bound": bound.value, "level": bound.level}


def _likelihood(done: Audit) -> dict[str, Any] | None:
    """Guesses of whole runs by the sign of their exact loss; None: the listener does not hear enough to know it."""
    found, bound = done.found, done.found.guessed
    if bound is None:
        return None
    return {
        "runs": len(done.worlds),  # of both worlds
        "threshold": bound.threshold,  # fixed beforehand: a smaller loss is no guess
        **_guessed(bound),
        "calibration": found.of("likelihood").tests,  # whether coins are what the losses say of them
        "excess": found.excess,  # the first transcript above the claim; null: none is
    }


def _single_rounds(done: Audit) -> dict[str, Any] | None:
    """Guesses of single messages, each drawn anew in the world of a coin; None: rounds could not be drawn anew."""
    rounds = done.found.rounds
    if rounds is None:
        return None
    return {
        "estimate": rounds.estimate,  # single rounds, added up: an estimate of the run's epsilon, and no bound on it
        "claim": [bound.claim for bound in rounds.bounds],  # by round, as all below
        "bound": [
            bound.value for bound in rounds.bounds
        ],  # lower bounds on epsilon of each message, which hold together
        "largest": rounds.largest,  # exact loss of any message
    }


# ---- the page --------------------------------------------------------------------------------------------------------

_MAX_TABLE_ROUNDS = 1000
"""Rows of the table of single rounds."""
_MAX_SHOWN_EVIDENCE = 8
COIN_SOURCE_NAMES: Mapping[CoinSource, str] = {"operating system": "the operating system’s", "not known": "not known"}
"""Whose coins are that are not the seed's, in words."""
DIGEST_LINES = """\
raw() { sha256sum "$@" | cut -c -64 | python -c 'import sys; sys.stdout.buffer.write(bytes.fromhex(sys.stdin.read()))'; }
(raw capture.json; raw part-*.parquet | raw) | sha256sum"""
"""`Capture.digests` for whoever has no Sottovoce."""

two, three = partial(number, digits=2), partial(number, digits=3)


def about(done: Audit) -> str:
    """Name of the learner whose promise the verdict is about; empty: it is about several, or all together."""
    return "" if done.about is None else done.plan.run.spec.names[done.about]


def build_audit_page(done: Audit, name: str, seed: int, digest: str = "") -> Page:
    """The page of an audit.

    Args:
        done: the audit.
        name: of the learner whose record was swapped.
        seed: of the audit.
        digest: SHA-256 of its `audit.json`; empty: it is not written.
    """
    found, plan = done.found, done.plan
    heard = plots.find_most_different_number(done)
    values = {
        "done": done,
        "name": name,
        "about": about(done),
        "seed": seed,
        "coins": COIN_SOURCE_NAMES.get(done.coins, ""),
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
        "most_evidence": _MAX_SHOWN_EVIDENCE,
        "most_rounds": _MAX_TABLE_ROUNDS,
        "shown_claim": plots.MAX_SHOWN_CLAIM_FACTOR,
        "impossible": 0 if done.shown is None else int((~plots.possible(done.shown)).sum()),
        "drawn": [] if done.shown is None else done.shown.worlds[plots.possible(done.shown)],
        "endless": [] if done.shown is None else np.flatnonzero(np.isinf(done.shown.peak)).tolist(),
        "unclaimed": [plan.run.spec.names[each.learner] for each in done.learners if math.isinf(each.claim)],
        "heard": heard and (int(plan.listener.rounds[heard[0]]), heard[1]),
        "command": _command(done, name, seed),
        "spec_yaml": dump_spec(plan.run.spec),
    }
    return Page("audit.html.j2", [*plots.figures(done, heard), *_tables(done)], values)


def _families(found: Findings) -> dict[str, Any]:
    """What each family comes to as if the others had found nothing, and what it shows of itself."""
    families = {
        "conformance": found.of("conformance"),
        "likelihood": found.of("likelihood"),
        "black_box": found.of("black box"),
    }
    kinds: dict[str, str] = {name: decide(each).kind for name, each in families.items()}
    if kinds["conformance"] == "unpromised":
        kinds["conformance"] = "consistent"
    tried = [bound for bound in families["black_box"].bounds if bound.view]
    return {
        "kinds": kinds,
        "classes": {name: _worst_by_class(each.tests) for name, each in families.items()},
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


# ---- tables ----------------------------------------------------------------------------------------------------------


def _tables(done: Audit) -> Iterator[PageTable]:
    found = done.found
    yield build_tests_table(found.tests)
    yield build_guesses_table("guesses", "Guesses", found.bounds)
    yield _single(found)
    yield _moved(done.twins)
    yield _learners(done.learners, done.plan.run.spec.names, done.plan.worlds.learner)


def build_tests_table(tests: Sequence[Test]) -> PageTable:
    """All tests, those that fail marked."""
    rows = [(t.name, t.what, t.where, t.statistic, t.p_value, t.level) for t in tests]
    heads = (
        Column("what is tested", kind="long"),
        Column("where it was largest", lambda where: where or NOTHING, "long"),
    )
    figures = (Column("statistic", number), Column("p-value", chance), Column("rejects below", two))
    rejected = [k for k, test in enumerate(tests) if test.rejects]
    return _marked("tests", "Tests", (Column("test"), *heads, *figures), rows, rejected)


def build_guesses_table(name: str, title: str, bounds: Sequence[Bound]) -> PageTable:
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
    most = sorted(sorted(range(len(rounds.bounds)), key=lambda t: -rounds.bounds[t].value)[:_MAX_TABLE_ROUNDS])
    told = [(t, rounds.bounds[t]) for t in most]
    rows = [
        (f"round {t}", (bound.correct, bound.guesses), bound.value, bound.claim, float(rounds.largest[t]))
        for t, bound in told
    ]
    shown = (Column("ε at least", three), Column("claimed ε", number), Column("largest loss", number))
    over = [k for k, (_, bound) in enumerate(told) if bound.rejects]
    return _marked(name, title, (Column("message"), _GUESSES, *shown), rows, over)


_GUESSES = Column("right guesses", lambda made: f"{made[0]:,} of {made[1]:,}")


def _learners(losses: Sequence[LearnerLoss], names: Sequence[str], audited: int) -> PageTable:
    """The largest loss that was seen of every learner, against its claim."""
    rows = [
        (
            f"{names[each.learner]}, audited" if each.learner == audited else names[each.learner],
            each.swap,
            each.largest,
            each.claim,
            each.largest / each.claim if 0 < each.claim < math.inf else math.nan,
        )
        for each in losses
    ]
    above = [k for k, each in enumerate(losses) if each.largest > each.claim * (1 + 1e-9) + 1e-9]
    columns = (
        Column("learner"),
        Column("swap that shows most", kind="long"),
        Column("its largest loss", three),
        Column("claimed at most", number),
        Column("so much of the claim", share, kind="bar"),
    )
    return PageTable("learners", "Learner by learner", columns, rows, frozenset((row, 2) for row in above))


def _moved(pair: CoupledRuns) -> PageTable:
    """The first messages that the swap moves, against their noise."""
    rows = [
        (
            f"round {t}",
            difference := abs(float(pair.first[t] - pair.second[t])),
            abs(float(pair.noiseless_0[t] - pair.noiseless_1[t])),
            scale := float(pair.scale[t]),
            difference / scale if scale > 0 else None,
        )
        for t in plots.find_moved_rounds(pair)[:3].tolist()
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
