"""`audit.json`, and the page of an audit: request, tests, findings, and limits."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from typing import Any

import numpy as np

from sottovoce_client.auditing import plots as plots
from sottovoce_client.auditing.audit_files import hash_data
from sottovoce_client.auditing.summary import OBSERVERS, summarise_audit
from sottovoce_client.formatting import MISSING_VALUE, format_count, format_number, format_p_value, format_percent
from sottovoce_client.reports.page import Page, PageColumn, PageTable
from sottovoce_core.auditing.audit import Audit, CoinSource, LearnerLoss
from sottovoce_core.auditing.bounds import Bound, Test, compute_max_provable_epsilon
from sottovoce_core.auditing.verdict import Findings, decide
from sottovoce_core.auditing.worlds import CoupledRuns
from sottovoce_core.spec import dump_spec

# ---- audit.json ------------------------------------------------------------------------------------------------------


def build_audit_document(done: Audit, name: str, seed: int) -> dict[str, Any]:
    """Build an audit as a document, with the current time.

    Args:
        done: the audit.
        name: name of the learner whose record is replaced.
        seed: seed of the audit.
    """
    found, plan = done.findings, done.plan
    return {
        "sottovoce": version("sottovoce"),
        "written_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "data_sha256": hash_data(plan.data),  # equal for equal records in equal rounds
        "spec": plan.run.spec.model_dump(mode="json"),
        "learner": name,  # whose record is replaced
        "claim_learner": None
        if done.verdict_learner is None
        else plan.run.spec.names[done.verdict_learner],  # learner of the judged claim; null: several or all
        "verdict": done.verdict,
        "source": done.source,  # of the runs, in words
        "captures_sha256": done.captures,  # of every capture that was read, by its path
        "provisos": done.assumptions,  # assumptions about the runs that the verdict depends on
        "unproven_reason": done.unproven_reason,  # why captures do not prove the messages; empty: they do, or runs were made here
        "worlds": plan.worlds.description,
        "pairs": [
            {"worlds": each.worlds.description, "runs_of_each_world": each.runs, "epsilon": each.epsilon}
            for each in plan.pairs
        ],  # of worlds: the first is that of the guesses
        "minimum_detectable_effects": found.detectable_effects,  # found with probability 0.9
        "threat_model": plan.adversary.threat,
        "claim_made_for": plan.claim_threat_model,  # threat model of the claim
        "adjacency": plan.guarantee.adjacency_description,  # of the two data sets
        "runs_of_each_world": found.runs,
        "confidence": 1.0 - found.alpha_allocation.alpha,  # probability that a correct learner is not refuted
        "coins": done.coin_source,  # source of the world of every run
        "seed": seed,  # of simulated runs, of seeded coins, and of the tests
        "epsilon": {
            "promised": found.claim,  # by the algorithm, for these worlds
            "paper": float(plan.guarantee.paper_epsilon[-1]),  # by the paper's formula
            "largest_realised": done.largest_loss,  # exact loss of any transcript, in `worlds`; null: not known
            "lower_bound": found.epsilon_lower_bound,  # by guesses of whole runs
            "max_provable": found.max_provable_epsilon,  # if every guess of a whole run were right; 0: no guesses
        },
        "conformance": found.select_family("conformance").tests,  # of the noise
        "likelihood": _build_likelihood(done),
        "at_delta": _build_at_delta(done),
        "single_rounds": _build_single_rounds(done),
        "learners": [
            {
                "learner": plan.run.spec.names[each.learner],
                "replacement": each.replacement,  # chosen after these runs: differs from `worlds`
                "claim": each.claim,
                "largest": each.largest_loss,
            }
            for each in done.learner_losses
        ],  # exact losses in a few runs, for the worst replacement of each learner's first record
        "black_box": {
            "epsilon_claimed_in_view": done.black_box_claim,
            "varying_values_by_view": dict(done.varying_counts),  # number of values that differ between runs, by view
            "attempts": list_attempts(found.select_family("black box").bounds),
            "channel": found.select_family("black box").tests,  # of side channels, given the messages
        },
    }


def list_attempts(bounds: Iterable[Bound]) -> list[dict[str, Any]]:
    """List the results of classifiers, for a file."""
    return [{"model": bound.guesser, "view": bound.view, **_build_guesses(bound)} for bound in bounds]


def _build_guesses(bound: Bound) -> dict[str, Any]:
    """Build guesses, the lower bound on epsilon, and the maximum probability that it exceeds the true epsilon."""
    return {"guesses": bound.guesses, "correct": bound.correct_guesses, "bound": bound.value, "level": bound.level}


def _build_likelihood(done: Audit) -> dict[str, Any] | None:
    """Build guesses of whole runs by the sign of their exact loss; None if the loss is not known."""
    found, bound = done.findings, done.findings.whole_run_bound
    if bound is None:
        return None
    return {
        "runs": len(done.run_worlds),  # of both worlds
        "threshold": bound.threshold,  # fixed beforehand: runs with a smaller loss are not guessed
        **_build_guesses(bound),
        "calibration": found.select_family("likelihood").tests,  # of the coins, given the losses
        "excess": found.excess,  # the first transcript above the claim; null: none
    }


def _build_at_delta(done: Audit) -> dict[str, Any] | None:
    """Build the bound at a delta by the losses of whole runs; None: no delta, or the losses are not known."""
    bound = done.findings.loss_bound
    if bound is None:
        return None
    return {
        "delta": bound.delta,
        "promised": bound.claim,  # epsilon at this delta, for these worlds
        "runs": bound.runs,  # of both worlds
        "rank": bound.rank,  # of the loss that gives the bound, among the largest
        "loss": bound.loss,
        "bound": bound.value,
        "level": bound.level,
    }


def _build_single_rounds(done: Audit) -> dict[str, Any] | None:
    """Build guesses of single messages, each sampled again in the world of a coin; None if that was not possible."""
    rounds = done.findings.round_bounds
    if rounds is None:
        return None
    return {
        "estimate": rounds.estimate,  # sum over single rounds: an estimate of the run's epsilon, not a bound
        "claim": [bound.claim for bound in rounds.bounds],  # by round, as all below
        "bound": [bound.value for bound in rounds.bounds],  # simultaneous lower bounds on epsilon of each message
        "largest": rounds.largest_losses,  # exact loss of any message
    }


# ---- the page --------------------------------------------------------------------------------------------------------

_MAX_TABLE_ROUNDS = 1000
"""Maximum number of rows of the table of single rounds."""
_MAX_SHOWN_EVIDENCE = 8
COIN_SOURCE_NAMES: Mapping[CoinSource, str] = {"operating system": "the operating system’s", "not known": "not known"}
"""Names of sources of coins other than the seed."""
DIGEST_LINES = """\
raw() { sha256sum "$@" | cut -c -64 | python -c 'import sys; sys.stdout.buffer.write(bytes.fromhex(sys.stdin.read()))'; }
(raw capture.json; raw part-*.parquet | raw) | sha256sum"""
"""Shell commands that compute `Capture.digests` without Sottovoce."""

format_2_digits, format_3_digits = partial(format_number, digits=2), partial(format_number, digits=3)


def get_verdict_subject(done: Audit) -> str:
    """Return the name of the learner whose claim the verdict judges; empty for several learners, or all together."""
    return "" if done.verdict_learner is None else done.plan.run.spec.names[done.verdict_learner]


def build_audit_page(done: Audit, name: str, seed: int, digest: str = "") -> Page:
    """Build the page of an audit.

    Args:
        done: the audit.
        name: name of the learner whose record is replaced.
        seed: seed of the audit.
        digest: SHA-256 of its `audit.json`; empty: it is not written.
    """
    found, plan = done.findings, done.plan
    number = plots.find_most_different_number(done)
    values = {
        "done": done,
        "summary": summarise_audit(done, name),
        "observers": {threat.value: text for threat, text in OBSERVERS.items()},
        "guesses_made": _describe_guesses(done),
        "name": name,
        "claim_learner": get_verdict_subject(done),
        "seed": seed,
        "coins": COIN_SOURCE_NAMES.get(done.coin_source, ""),
        "digest_lines": DIGEST_LINES,
        "digest": digest,
        "names": plan.run.spec.names,
        **_summarise_families(found),
        "round_sum": None
        if found.round_bounds is None
        else sum(compute_max_provable_epsilon(plan.runs, each.level) for each in found.round_bounds.bounds),
        "paper": float(plan.guarantee.paper_epsilon[-1]),
        "tight": plan.guarantee.epsilon(),
        "shares": [
            (part, found.alpha_allocation.compute_level(family, part))
            for family, parts in found.alpha_allocation.fractions.items()
            for part in parts
        ],
        "max_evidence": _MAX_SHOWN_EVIDENCE,
        "max_rounds": _MAX_TABLE_ROUNDS,
        "shown_claim": plots.MAX_SHOWN_CLAIM_FACTOR,
        "impossible": 0 if done.run_losses is None else int((~plots.mask_possible_runs(done.run_losses)).sum()),
        "drawn": 0 if done.run_losses is None else int(plots.mask_possible_runs(done.run_losses).sum()),
        "infinite_rounds": []
        if done.run_losses is None
        else np.flatnonzero(np.isinf(done.run_losses.peak_by_round)).tolist(),
        "unclaimed": [plan.run.spec.names[each.learner] for each in done.learner_losses if math.isinf(each.claim)],
        "number": number and (int(plan.adversary.visible_rounds[number[0]]), number[1]),
        "command": _build_command(done, name, seed),
        "spec_yaml": dump_spec(plan.run.spec),
    }
    return Page("audit.html.j2", [*plots.build_figures(done, number), *_build_tables(done)], values)


def _describe_guesses(done: Audit) -> str:
    """Describe the guesses of whole runs, in sentences; empty if there are none."""
    bound = done.findings.whole_run_bound
    if bound is None or done.run_losses is None:
        return ""
    runs = f"of {format_count(len(done.run_losses.worlds))} runs of the first pair of worlds"
    if not bound.guesses:
        return f"None {runs} reveals enough to be guessed."
    verb, guesses = ("reveals", "this guess is") if bound.guesses == 1 else ("reveal", "of these guesses are")
    right = ("right" if bound.correct_guesses else "wrong") if bound.guesses == 1 else "right"
    count = "" if bound.guesses == 1 else f"{format_count(bound.correct_guesses)} "
    return f"{format_count(bound.guesses)} {runs} {verb} enough to be guessed; {count}{guesses} {right}."


def _summarise_families(found: Findings) -> dict[str, Any]:
    """Judge each family on its own, and select its most significant results."""
    families = {
        "conformance": found.select_family("conformance"),
        "likelihood": found.select_family("likelihood"),
        "black_box": found.select_family("black box"),
    }
    kinds: dict[str, str] = {name: decide(each).kind for name, each in families.items()}
    if kinds["conformance"] == "no-claim":
        kinds["conformance"] = "consistent"
    tried = [bound for bound in families["black_box"].bounds if bound.view]
    return {
        "kinds": kinds,
        "classes": {name: _worst_by_class(each.tests) for name, each in families.items()},
        "attempt": max(tried, key=lambda each: (each.value, each.correct_guesses / max(1, each.guesses)), default=None),
    }


def _worst_by_class(tests: Sequence[Test]) -> list[tuple[str, int, Test]]:
    """Return every class of tests, its size, and the test nearest to refuting the claim."""
    classes: dict[str, list[Test]] = {}
    for test in tests:
        classes.setdefault(str(test.part), []).append(test)
    return [(name, len(each), min(each, key=_compute_level_ratio)) for name, each in classes.items()]


def _compute_level_ratio(test: Test) -> float:
    return math.inf if math.isnan(test.p_value) else test.p_value / test.level if test.level else math.inf


# ---- tables ----------------------------------------------------------------------------------------------------------


def _build_tables(done: Audit) -> Iterator[PageTable]:
    found = done.findings
    yield build_tests_table(found.tests)
    yield build_guesses_table("guesses", "Guesses", found.bounds)
    yield _build_rounds_table(found)
    yield _build_shift_table(done.coupled_runs)
    yield _build_learners_table(done.learner_losses, done.plan.run.spec.names, done.plan.worlds.learner)


def build_tests_table(tests: Sequence[Test]) -> PageTable:
    """Build the table of all tests, with significant ones marked."""
    rows = [(t.name, t.description, t.location, t.statistic, t.p_value, t.level) for t in tests]
    heads = (
        PageColumn("what is tested", kind="long"),
        PageColumn("where it was largest", lambda where: where or MISSING_VALUE, "long"),
    )
    figures = (
        PageColumn("statistic", format_number),
        PageColumn("p-value", format_p_value),
        PageColumn("rejects below", format_2_digits),
    )
    rejected = [k for k, test in enumerate(tests) if test.is_significant]
    return _build_marked_table("tests", "Tests", (PageColumn("test"), *heads, *figures), rows, rejected)


def build_guesses_table(name: str, title: str, bounds: Sequence[Bound]) -> PageTable:
    """Build the table of guesses, with those above their claims marked."""
    guesses = [(b.name, (b.correct_guesses, b.guesses), b.value, b.claim, b.level) for b in bounds]
    shown = (_GUESSES, PageColumn("ε at least", format_3_digits), PageColumn("claimed ε", format_number))
    over = [k for k, bound in enumerate(bounds) if bound.is_above_claim]
    columns = (PageColumn("guesser"), *shown, PageColumn("may be wrong with", format_2_digits))
    return _build_marked_table(name, title, columns, guesses, over)


def _build_marked_table(
    name: str, title: str, columns: Sequence[PageColumn], rows: Sequence[Sequence[Any]], over: Sequence[int]
) -> PageTable:
    """Build a table with marked rows, in which the claim fails."""
    return PageTable(name, title, columns, rows, frozenset((row, k) for row in over for k in range(len(columns))))


def _build_rounds_table(found: Findings) -> PageTable:
    """Build the table of single rounds; if there are too many, of those with the largest bounds."""
    name, title, rounds = "rounds", "Guesses of single rounds", found.round_bounds
    if rounds is None:
        return PageTable(name, title, (), ())
    selected = sorted(sorted(range(len(rounds.bounds)), key=lambda t: -rounds.bounds[t].value)[:_MAX_TABLE_ROUNDS])
    bounds = [(t, rounds.bounds[t]) for t in selected]
    rows = [
        (
            f"round {t}",
            (bound.correct_guesses, bound.guesses),
            bound.value,
            bound.claim,
            float(rounds.largest_losses[t]),
        )
        for t, bound in bounds
    ]
    shown = (
        PageColumn("ε at least", format_3_digits),
        PageColumn("claimed ε", format_number),
        PageColumn("largest loss", format_number),
    )
    over = [k for k, (_, bound) in enumerate(bounds) if bound.is_above_claim]
    return _build_marked_table(name, title, (PageColumn("message"), _GUESSES, *shown), rows, over)


_GUESSES = PageColumn("right guesses", lambda made: f"{made[0]:,} of {made[1]:,}")


def _build_learners_table(losses: Sequence[LearnerLoss], names: Sequence[str], audited: int) -> PageTable:
    """Build the table of the largest loss of every learner, and its claim."""
    rows = [
        (
            f"{names[each.learner]}, audited" if each.learner == audited else names[each.learner],
            each.replacement,
            each.largest_loss,
            each.claim,
            each.largest_loss / each.claim if 0 < each.claim < math.inf else math.nan,
        )
        for each in losses
    ]
    above = [k for k, each in enumerate(losses) if each.largest_loss > each.claim * (1 + 1e-9) + 1e-9]
    columns = (
        PageColumn("learner"),
        PageColumn("worst replacement", kind="long"),
        PageColumn("its largest loss", format_3_digits),
        PageColumn("claimed at most", format_number),
        PageColumn("share of the claim", format_percent, kind="bar"),
    )
    return PageTable("learners", "Learner by learner", columns, rows, frozenset((row, 2) for row in above))


def _build_shift_table(pair: CoupledRuns) -> PageTable:
    """Build the table of the first messages that one record changes, and of their noise."""
    rows = [
        (
            f"round {t}",
            difference := abs(float(pair.message_0[t] - pair.message_1[t])),
            abs(float(pair.noiseless_0[t] - pair.noiseless_1[t])),
            scale := float(pair.scale[t]),
            difference / scale if scale > 0 else None,
        )
        for t in plots.find_moved_rounds(pair)[:3].tolist()
    ]
    heads = ("difference, same noise", "without noise", "noise scale")
    ratio = PageColumn("difference / scale", lambda value: "no noise" if value is None else format_3_digits(value))
    columns = (PageColumn("message"), *(PageColumn(head, format_3_digits) for head in heads), ratio)
    return PageTable("shifts", "The first messages that differ", columns, rows)


# ---- reproduction ----------------------------------------------------------------------------------------------------


def _build_command(done: Audit, name: str, seed: int) -> str:
    plan = done.plan
    options = [f"--learner {name}", f"--runs {plan.total_runs}", f"--threat {plan.adversary.threat.value}"]
    if plan.adversary.neighbour is not None:
        options.append(f"--neighbour {plan.run.spec.names[plan.adversary.neighbour]}")
    options += [f"--confidence {1 - plan.alpha_allocation.alpha:.6g}", f"--seed {seed}"]
    return f"sottovoce audit {plan.run.spec.name}.yaml {' '.join(options)}"
