"""Summary of an audit in plain sentences: the first part of its page, and what the terminal prints about it."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from sottovoce_client.formatting import format_count, format_number, pluralize
from sottovoce_core.auditing.audit import Audit
from sottovoce_core.auditing.bounds import BudgetPart
from sottovoce_core.auditing.foreign.audit import ForeignAudit
from sottovoce_core.auditing.plan import AuditPlan
from sottovoce_core.auditing.verdict import Findings, Verdict
from sottovoce_core.privacy.guarantee import WEAK_EPSILON, ThreatModel

Tone = Literal["consistent", "partial", "weak", "refuted", "open"]

OBSERVERS = {
    ThreatModel.WIRE: "an observer of every message on every channel",
    ThreatModel.NEIGHBOUR: "one neighbour, which reads the messages sent to it",
    ThreatModel.OUTPUT: "an observer of published decisions only",
}
"""Observers of an audit, by threat model."""
_CAPTURE_READER = "an observer of the captured channels"
_CIPHERTEXT_READER = "an observer of encrypted traffic, which sees sizes and times alone"

_SIMULATED = "No running service, network or timing was tested."
_QUESTIONS = {
    "conformance": "Is the noise in the messages of the claimed kind and size, and new in every message?",
    "likelihood": "How much does each run reveal about the record, computed by the algorithm itself?",
    "black box": "Can programs that know nothing of the algorithm learn to tell the two worlds apart?",
}
"""Questions of the families of tests."""
_FAMILY_COUNTS = {1: "One kind of test asks", 2: "Two kinds of tests ask", 3: "Three kinds of tests ask"}

_HEADLINES = {
    "consistent": "Consistent: no violation was found",
    "inconclusive": "Inconclusive: this audit cannot decide",
    "no-claim": "Nothing was claimed",
}
_NOT_MEANT = {
    "consistent": (
        "That the data are private.",
        "Smaller violations may remain, and other records may reveal more.",
        "Data that leave by other ways (logs, files, predictions) were not examined.",
    ),
    "refuted": (
        "That the data of any person were read, that harm was done, or that it was done on purpose: most causes are mistakes.",
    ),
    "inconclusive": ("Either that the claim holds, or that it does not.",),
    "no-claim": ("That the messages are harmless: nothing protects them, as far as anyone claims.",),
}
_PLAIN_PARTS: frozenset[BudgetPart] = frozenset({"marginal", "whole runs", "classifiers", "worlds"})
"""Parts of an audit whose minimum detectable effects a summary states; the page lists all of them further down."""
_MAX_SHOWN_SHARE = 99.5
"""Percentage of right guesses above which the exact value says nothing to a reader."""


@dataclass(frozen=True, slots=True)
class AuditSummary:
    """Claim, verdict and limits of an audit.

    Attributes:
        tone: colour of the verdict.
        headline: verdict in a line.
        finding: reason for the verdict, in sentences.
        points: title and sentences of each further part, in reading order; the first sentence stands alone on the terminal.
    """

    tone: Tone
    headline: str
    finding: str
    points: tuple[tuple[str, tuple[str, ...]], ...]


# ---- kinds of audits -------------------------------------------------------------------------------------------------


def summarise_audit(done: Audit, name: str) -> AuditSummary:
    """Summarise the audit of a run; `name` is that of the learner whose record is replaced."""
    found, plan = done.findings, done.plan
    subject = None if done.verdict_learner is None else plan.run.spec.names[done.verdict_learner]
    observer = OBSERVERS[plan.adversary.threat]
    if plan.adversary.neighbour is not None:
        observer = observer.replace("neighbour", f"neighbour ({plan.run.spec.names[plan.adversary.neighbour]})", 1)
    is_simulated = done.source == "the simulator"
    is_partial = done.verdict.kind == "consistent" and not found.has_both_worlds
    summary = _summarise(
        done.verdict,
        found,
        claim=(*_describe_claim(found, name, observer), _describe_adjacency(plan)),
        scope=tuple(_describe_scope(done, name, subject, observer)),
        runs=(_count_runs(found, "simulated"), _SIMULATED) if is_simulated else (_count_runs(found, "recorded"),),
        families=[
            *(["conformance"] if found.select_family("conformance").tests else []),
            *(["likelihood"] if done.run_losses is not None else []),
            *(["black box"] if found.has_both_worlds else []),
        ],
        assumptions=done.assumptions,
    )
    about = f" for {subject}" if subject not in (None, name) else " for the run" if subject is None else ""
    headline = f"Refuted: the claim{about} does not hold" if done.verdict.kind == "refuted" else summary.headline
    if is_partial:
        headline = "Consistent: nothing was found in the noise; the two worlds were not compared"
        summary = replace(summary, tone="partial")
    if done.unproven_reason:
        headline += f" ({done.unproven_reason})"
        summary = replace(summary, tone="weak" if done.verdict.kind == "consistent" else summary.tone)
    return replace(summary, headline=headline)


def summarise_foreign_audit(done: ForeignAudit, name: str) -> AuditSummary:
    """Summarise the audit of a foreign service; `name` is that of the service."""
    families = [*(["conformance"] if done.noise is not None and done.findings.tests else []), "black box"]
    return _summarise(
        done.verdict,
        done.findings,
        claim=_describe_claim(done.findings, "the service", _CAPTURE_READER),
        scope=(
            f"It is about {name}, and {_CAPTURE_READER}.",
            "Two copies of the service ran, on data that differ in one record; any other difference counts as well.",
        ),
        runs=(_count_runs(done.findings, "recorded"),),
        families=families,
        assumptions=_list_order_assumptions(done),
    )


def summarise_ciphertext_audit(done: ForeignAudit, plan: AuditPlan, assumptions: Sequence[str]) -> AuditSummary:
    """Summarise the audit of encrypted traffic."""
    name = plan.run.spec.names[plan.worlds.learner]
    return _summarise(
        done.verdict,
        done.findings,
        claim=(*_describe_claim(done.findings, name, _CIPHERTEXT_READER), _describe_adjacency(plan)),
        scope=(
            f"It is about the records of {name}, and {_CIPHERTEXT_READER}.",
            f"Compared: {plan.worlds.description}.",
        ),
        runs=(_count_runs(done.findings, "recorded"),),
        families=["black box"],
        assumptions=(*assumptions, *_list_order_assumptions(done)),
    )


def _list_order_assumptions(done: ForeignAudit) -> tuple[str, ...]:
    if done.is_interleaved:
        return ()
    return ("The two worlds did not alternate as by fair coins: effects of time also distinguish them.",)


# ---- parts -----------------------------------------------------------------------------------------------------------


def _summarise(
    verdict: Verdict,
    found: Findings,
    *,
    claim: tuple[str, ...],
    scope: tuple[str, ...],
    runs: tuple[str, ...],
    families: Sequence[str],
    assumptions: Sequence[str],
) -> AuditSummary:
    questions = " ".join(_QUESTIONS[family] for family in families)
    tried = (f"{_FAMILY_COUNTS[len(families)]}: {questions}",) if families else ()
    power, assumed = _describe_power(verdict, found), " ".join(assumptions)
    points = (
        ("The claim", claim),
        ("Whom the verdict concerns", scope),
        ("What was tried", (*runs, *tried, *_describe_confidence(found))),
        ("Smallest violation that would be found", (power,) if power else ()),
        ("What the verdict does not mean", _NOT_MEANT[verdict.kind]),
        ("What it assumes", (assumed,) if assumed else ()),
    )
    is_weak = verdict.kind == "consistent" and verdict.is_weak
    tones: dict[str, Tone] = {"consistent": "weak" if is_weak else "consistent", "refuted": "refuted"}
    headline = _HEADLINES.get(verdict.kind, "Refuted: the claim does not hold")
    return AuditSummary(
        tones.get(verdict.kind, "open"),
        headline.replace(":", " with a weak claim:") if is_weak else headline,
        _describe_finding(verdict, found),
        tuple((title, sentences) for title, sentences in points if sentences),
    )


def _describe_finding(verdict: Verdict, found: Findings) -> str:
    if verdict.kind == "consistent":
        return "The tests found nothing that contradicts the claim. That is no proof of it."
    if verdict.kind == "no-claim":
        return "Without a claim, nothing can fail. The details below say what the messages reveal."
    reason = _remove_remark(verdict.evidence[0]) if verdict.evidence else ""
    reason = f"{reason[:1].upper()}{reason[1:]}." if reason else verdict.text
    if verdict.kind == "inconclusive":
        return reason
    chance = "never shows this" if found.excess else f"shows this in at most {_format_odds(found)} audits"
    return f"{reason} A system that keeps its claim {chance}. Do not rely on the claim until the cause is known."


def _format_odds(found: Findings) -> str:
    return f"one of {format_count(round(1 / found.alpha_allocation.alpha))}"


def _describe_claim(found: Findings, owner: str, observer: str) -> tuple[str, ...]:
    if math.isinf(found.claim):
        return (f"None: nothing finite is promised against {observer} (ε, epsilon, is infinite).",)
    epsilon = f"ε (epsilon) is {format_number(found.claim)}"
    if found.loss_bound is not None:
        epsilon += f", and {format_number(found.stated_epsilon)}"
    if delta := _get_delta(found):
        epsilon += f" at δ (delta) {delta:g}, the probability that more is revealed"
    return (
        f"It limits how well {observer}, which knows all else, can guess which of two versions of a record {owner} used: "
        f"{epsilon}.",
        _describe_guesses(found),
    )


def _get_delta(found: Findings) -> float:
    return found.delta if found.loss_bound is None else found.loss_bound.delta


def _describe_guesses(found: Findings) -> str:
    """Describe the largest share of right guesses, `(e^epsilon + delta) / (1 + e^epsilon)`."""
    odds = math.exp(-found.stated_epsilon)
    right = 100.0 * (1.0 + _get_delta(found) * odds) / (1.0 + odds)
    if found.stated_epsilon > WEAK_EPSILON:
        return "In the worst case nearly all such guesses are right: this claim gives almost no protection."
    share = "more than 99" if right > _MAX_SHOWN_SHARE else format_number(right, 3)
    return f"In the worst case {share} of 100 such guesses are right; 50 are by chance."


def _describe_adjacency(plan: AuditPlan) -> str:
    return f"The two versions of the data, called worlds, differ by {plan.guarantee.adjacency_description}."


def _describe_scope(done: Audit, name: str, subject: str | None, observer: str) -> Iterator[str]:
    plan = done.plan
    if subject == name:
        yield f"It is about the records of {name}, and {observer}."
    else:
        yield f"It is about {subject or 'all learners together'}: the noise alone refutes the claim, against {observer}."
    others = len(plan.pairs) - 1
    more = f", and {pluralize(others, 'other pair')} of records" if others else ""
    yield f"{'Compared' if done.findings.has_both_worlds else 'Examined'}: {plan.worlds.description}{more}."
    if done.findings.select_family("conformance").tests and plan.run.spec.n_learners > 1 and subject == name:
        yield f"The noise of all {format_count(plan.run.spec.n_learners)} learners was tested; their records were not replaced."
    if plan.claim_threat_model is ThreatModel.OUTPUT and plan.adversary.threat is not ThreatModel.OUTPUT:
        yield f"The claim was made for {OBSERVERS[ThreatModel.OUTPUT]}: the verdict does not concern published decisions."


def _count_runs(found: Findings, origin: str) -> str:
    if not found.has_both_worlds:
        return f"{pluralize(found.runs, f'{origin} run')} of one world."
    return f"{pluralize(2 * found.runs, f'{origin} run')}, about half of them in each of two worlds."


def _describe_confidence(found: Findings) -> Iterator[str]:
    if math.isfinite(found.claim):
        share = format_number(100.0 * found.alpha_allocation.alpha)
        yield f"A claim that holds is called refuted with a probability of at most {share} %."


def _describe_power(verdict: Verdict, found: Findings) -> str:
    """Describe the minimum detectable effects in words; empty if nothing was claimed."""
    if math.isinf(found.claim):
        return ""
    if found.undetectable_violation and verdict.kind != "refuted":
        return f"Not even {_remove_remark(found.undetectable_violation)}: the audit is too small."
    texts = [_remove_remark(effect.text) for effect in found.detectable_effects if effect.part in _PLAIN_PARTS]
    return f"With a probability of 90 %: {'; '.join(texts)}." if texts else "Not known."


def _remove_remark(text: str) -> str:
    """Remove a remark for experts, in brackets at the end."""
    return re.sub(r" \([^()]*\)$", "", text)
