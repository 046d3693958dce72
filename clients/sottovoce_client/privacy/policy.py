"""`sottovoce policy`: show a learner owner's policy, and check a run against it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.text import Text

from sottovoce_client import terminal
from sottovoce_client.formatting import format_epsilon
from sottovoce_core.privacy.loss import EpsilonLimit
from sottovoce_core.runs.policy import DAYS_PER_MONTH, Policy
from sottovoce_core.runs.run import Run, find_first_round_above


def show_policy(path: Path | None, console: Console | None = None) -> None:
    """Print a policy as YAML, with a comment for each clause.

    Args:
        path: Policy file; None: the default policy.
        console: Console (default: standard output).

    Raises:
        SpecError: The policy is invalid.
    """
    policy = Policy.load(path)
    (console or terminal.create_console()).out(policy.dump(), end="", highlight=False)
    terminal.print_json_if_requested(lambda: policy.model_dump(mode="json"))


def check_policy(run: Run, n_features: int, policy: Policy, learner: int, console: Console | None = None) -> bool:
    """Print every clause of a policy next to the value that a run requests.

    Args:
        run: Run to check.
        n_features: Number of features of a record.
        policy: Policy of the learner's owner.
        learner: Index of the learner.
        console: Console (default: standard output).

    Returns:
        Whether the learner would take part.
    """
    out = console or terminal.create_console()
    findings = policy.findings(run, n_features, learner)
    table = terminal.create_table("clause", "allows", "the run requests", "")
    for each in findings:
        table.add_row(
            each.clause, Text(each.allowed_value), Text(each.requested_value), "" if each.is_satisfied else "refused"
        )
    out.print(table)
    fits = all(each.is_satisfied for each in findings)
    verdict = "would take part" if fits else "would not take part"
    out.out(f"{run.spec.names[learner]} {verdict} in {run.spec.name}", highlight=False)
    own = {f"{DAYS_PER_MONTH} days": policy.epsilon_per_month, "all runs": policy.epsilon}
    limits = {scope: EpsilonLimit.choose(limit, policy.delta) for scope, limit in own.items() if limit is not None}
    budget = run.budget(learner)
    stops = (
        _find_stops(run, learner, limits if budget is None else {**limits, "privacy.budget": budget}) if fits else {}
    )
    limit_texts = [f"{format_epsilon(limit.epsilon, limit.delta)} in {scope}" for scope, limit in limits.items()]
    if limit_texts and fits:
        text = f"it stops when its ledger reaches epsilon {' or '.join(limit_texts)} (sottovoce ledger)"
        out.out(text, highlight=False)
    for limit_text, t in stops.items():
        text = f"this run alone reaches {limit_text}: it sends no message from round {t} of {run.spec.rounds} on (counted from 0)"
        out.out(text, highlight=False)
    terminal.print_json_if_requested(
        lambda: {
            "learner": run.spec.names[learner],
            "run": run.spec.name,
            "takes_part": fits,
            "first_round_not_sent": min(stops.values(), default=None),
            "clauses": [
                {
                    "clause": each.clause,
                    "allows": each.allowed_value,
                    "asks": each.requested_value,
                    "fits": each.is_satisfied,
                }
                for each in findings
            ],
        }
    )
    return fits


def _find_stops(run: Run, learner: int, limits: Mapping[str, EpsilonLimit]) -> dict[str, int]:
    """Find the first round in which a run alone exceeds each limit of its learner, by the description of the limit."""
    counts, accountant = run.planned_counts(learner), run.algorithm.accountant(learner)
    found = {
        f"epsilon {format_epsilon(limit.epsilon, limit.delta)} in {scope}": find_first_round_above(
            accountant.spending(counts, limit), limit.epsilon
        )
        for scope, limit in limits.items()
    }
    return {text: t for text, t in found.items() if t is not None}
