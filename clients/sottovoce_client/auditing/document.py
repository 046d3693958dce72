"""`audit.json`: what an auditor's file must say."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

from sottovoce.auditing.audit import Audit
from sottovoce.auditing.bounds import Bound
from sottovoce_client.auditing.worlds import digest


def audit_file(done: Audit, name: str, seed: int) -> dict[str, Any]:
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
            "epsilon_promised_in_the_rounds_seen": done.claim_seen,
            "numbers_that_vary_by_view": dict(done.views),  # of each view, how many are not the same in all runs
            "attempts": attempts_of(found.of("black box").bounds),
            "channel": found.of(
                "black box"
            ).tests,  # whether anything but the messages depends on the world, given these
        },
    }


def attempts_of(bounds: Iterable[Bound]) -> list[dict[str, Any]]:
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
