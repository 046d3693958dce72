"""Report of a run: its page, and the statements at its top. One capture can refute a promise, never prove it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from sottovoce_client.formatting import (
    NO_ACCURACY_NOTE,
    NO_TEST_RECORDS_NOTE,
    describe_ciphertext,
    describe_detections,
    describe_measurement,
    describe_recorded_rounds,
    describe_staleness,
    format_bytes,
    format_count,
    format_number,
    format_percent,
    format_rounds_done,
    pluralize,
)
from sottovoce_client.reports.page import Page, PageColumn, PageTable
from sottovoce_client.reports.run_figures import (
    EPSILON_STYLES,
    MAX_HEATMAP_SHAPE,
    build_run_figures,
    get_level_titles,
    has_visible_signal,
    is_single_use,
)
from sottovoce_client.runs.summary import LearnerSummary, ObservedPrivacyLoss, RunSummary
from sottovoce_core.privacy.guarantee import WEAK_EPSILON, combine_epsilons

_MAX_LISTED_DETECTIONS = 20
_MAX_EXPLAINED_SAMPLES = 8
"""Maximum number of progress samples for which the page explains why the curves have few points."""

_STATEMENTS = {
    "run": "What was run",
    "promise": "What is promised",
    "found": "What was found",
    "limits": "What it does not mean",
}
"""Titles of the statements at the top of the page."""


def _format_limit(limit: float | None) -> str:
    return "none" if limit is None else format_number(limit)


COLUMNS: tuple[tuple[str, str, Callable[[Any], str], str], ...] = (
    ("records", "held", format_count, "records"),
    ("records", "most uses", format_count, "max_uses"),
    ("accuracy", "test", format_percent, "test_accuracy"),
    ("accuracy", "own", format_percent, "prequential_accuracy"),
    ("sent", "rounds", format_count, "rounds_done"),
    ("sent", "messages", format_count, "messages"),
    ("sent", "bytes", format_bytes, "bytes"),
    ("budget", "spent", format_number, "epsilon_spent"),
    ("budget", "limit", _format_limit, "epsilon_limit"),
    ("claimed ε", "paper", format_number, "epsilon_paper"),
    ("claimed ε", "record use", format_number, "epsilon_record_use"),
    ("claimed ε", "record", format_number, "epsilon_record"),
    ("claimed ε", "∞ rounds", format_number, "epsilon_infinite_horizon"),
)
"""Columns of the table of learners: group, heading, format, and attribute of `LearnerSummary`."""


def build_run_page(summary: RunSummary) -> Page:
    """Build the report of a run."""
    learners, detections, capture = summary.learners, summary.detections, summary.capture
    infinite_epsilons = [
        kind
        for kind in ("paper", "record", "record_use")
        if any(math.isinf(getattr(each, f"epsilon_{kind}")) for each in learners)
    ]
    values = {
        "run": summary,
        "staleness": "" if capture is None else describe_staleness(capture.staleness),
        "recorded_rounds": ""
        if capture is None
        else describe_recorded_rounds(len(capture.sender_values), summary.rounds_done),
        "detections": "" if detections is None else describe_detections(detections.count, detections.first),
        "has_finite_epsilon": any(math.isfinite(each.epsilon_record_use) for each in learners),
        "infinite_epsilons": [EPSILON_STYLES[kind][0] for kind in infinite_epsilons],
        "verdict": determine_verdict(summary),
        "statements": [(_STATEMENTS[name], text) for name, text in compose_statements(summary).items()],
        "worst_case": find_worst_case(summary),
        "single_use": is_single_use(summary),
        "level_labels": LEVEL_LABELS,
        "no_accuracy_note": NO_ACCURACY_NOTE if summary.test_records else NO_TEST_RECORDS_NOTE,
        "measurement_note": describe_measurement(summary.publication_cost),
        "max_listed_detections": _MAX_LISTED_DETECTIONS,
        "max_heatmap_shape": MAX_HEATMAP_SHAPE,
        "has_visible_signal": capture is not None
        and has_visible_signal(capture.sender_values, max(capture.first_scale, capture.last_scale)),
        "max_explained_samples": _MAX_EXPLAINED_SAMPLES,
    }
    return Page(
        "run.html.j2",
        [
            *build_run_figures(summary),
            _learners(summary),
            _learners_in_full(summary),
            build_assumption_table(summary.guarantee.constants),
        ],
        values,
    )


def build_assumption_table(constants: Sequence[tuple[str, Any, str]]) -> PageTable:
    """Build the table of a guarantee's constants: name, value, and the component that enforces it."""
    columns = (
        PageColumn("constant"),
        PageColumn("value", lambda value: value if isinstance(value, str) else format_number(value)),
    )
    return PageTable(
        "grounds", "Constants", (*columns, PageColumn("enforced by", kind="long")), constants, is_narrow=True
    )


def _learners(summary: RunSummary) -> PageTable:
    """Tabulate for each learner what a reader asks first."""
    columns = (
        PageColumn("learner"),
        PageColumn("records", format_count),
        PageColumn("test accuracy", format_percent),
        PageColumn("own accuracy", format_percent),
        PageColumn("ε spent", format_number),
        PageColumn("ε limit", _format_limit),
        PageColumn("privacy loss found", format_number),
        PageColumn("of the promised ε", format_number),
    )
    rows, above = [], set()
    for k, each in enumerate(summary.learners):
        worst = find_worst_case(replace(summary, learners=(each,)))
        observed = None if worst is None else worst[2]
        loss = (None, None) if observed is None else (observed.loss, observed.claimed_epsilon)
        accuracies = each.test_accuracy, each.prequential_accuracy
        rows.append((each.name, each.records, *accuracies, each.epsilon_spent, each.epsilon_limit, *loss))
        if observed is not None and is_above_claim(observed.loss, observed.claimed_epsilon):
            above.add((k, len(columns) - 2))
    return PageTable("learners", "Learner by learner", columns, rows, frozenset(above))


def _learners_in_full(summary: RunSummary) -> PageTable:
    """Tabulate everything that is known of each learner; what is equal for a record and its use stands once."""
    levels = get_level_titles(summary)
    kept = [each for each in COLUMNS if len(levels) > 1 or each[3] != "epsilon_record_use"]
    columns = [PageColumn(head, show, group=group) for group, head, show, _ in kept]
    for level in levels:
        columns += [
            PageColumn(head, format_number, group=f"loss, {LEVEL_LABELS[level]}")
            for head in ("this", "largest", "claim")
        ]
    rows = [(each.name, *_figures(each, [name for *_, name in kept], levels)) for each in summary.learners]
    above = {
        (row, 1 + len(kept) + 3 * k + part)
        for row, each in enumerate(summary.learners)
        for k, level in enumerate(levels)
        if (observed := each.get_observed_loss(level)) is not None
        for part, value in enumerate((observed.loss, observed.supremum))
        if is_above_claim(value, observed.claimed_epsilon)
    }
    title = "Learner by learner, all figures"
    return PageTable("learners-in-full", title, (PageColumn("learner"), *columns), rows, frozenset(above))


def _figures(learner: LearnerSummary, attributes: Iterable[str], levels: Iterable[str]) -> Iterator[Any]:
    yield from (getattr(learner, attribute) for attribute in attributes)
    for level in levels:
        observed = learner.get_observed_loss(level)
        yield from (None,) * 3 if observed is None else (observed.loss, observed.supremum, observed.claimed_epsilon)


# ---- the statements --------------------------------------------------------------------------------------------------

_Case = tuple[LearnerSummary, str, ObservedPrivacyLoss]
"""The learner whose record is replaced, the level (`record_use` or `record`), and the loss of that replacement."""

LEVEL_LABELS = {"record_use": "per record use", "record": "per record"}
"""Names of the levels of adjacency in reports."""
_OBSERVERS = {
    "wire": "an observer of every message",
    "neighbour": "one learner, which reads the messages sent to it",
    "output": "an observer of the published decisions, who sees no message",
}
"""Names of the threat models in reports."""
_NOT_COVERED = "Not covered: published accuracies and predictions; number, size and timing of messages."
_NEARLY_SURE = 0.9995
"""Probability above which reports would show 100 %."""


@dataclass(frozen=True, slots=True)
class _Verdict:
    """A headline and its reason; `is_weak`: the run is consistent with its promise, which exceeds `WEAK_EPSILON`."""

    kind: Literal["consistent", "refuted", "open"]
    headline: str
    text: str
    is_weak: bool = False

    @property
    def tone(self) -> str:
        """Colour of the headline, on the page and in the terminal: amber for a weak promise."""
        return "weak" if self.is_weak else self.kind


def is_above_claim(loss: float, budget: float) -> bool:
    """Return whether a loss is above the claim by more than rounding."""
    return loss > budget * (1 + 1e-9) + 1e-12


def _cases(summary: RunSummary) -> list[_Case]:
    """Return every replacement whose loss was computed."""
    return [
        (learner, level, observed)
        for learner in summary.learners
        for level in ("record_use", "record")
        if (observed := learner.get_observed_loss(level)) is not None
    ]


def find_worst_case(summary: RunSummary) -> _Case | None:
    """Return the replacement with the largest loss, preferring losses above their claim; None without a capture.

    Replacements with an infinite claim rank last.
    """

    def rank(case: _Case) -> tuple[bool, bool, float]:
        observed = case[2]
        exceeds = is_above_claim(observed.loss, observed.claimed_epsilon)
        return exceeds, math.isfinite(observed.claimed_epsilon), observed.loss

    return max(_cases(summary), key=rank, default=None)


def determine_verdict(summary: RunSummary) -> _Verdict:
    """Compare the exact privacy losses of the capture with the claims."""
    worst = find_worst_case(summary)
    if worst is None:
        return _make_incomplete_verdict(summary, "") if summary.failed_parts else _make_untested_verdict(summary)
    learner, level, observed = worst
    if is_single_use(summary):
        when = f"when one record of {learner.name} is replaced"
    elif level == "record_use":
        when = f"when one use of a record of {learner.name} is replaced"
    else:
        when = f"when one record of {learner.name} is replaced in all its uses"
    if is_above_claim(observed.loss, observed.claimed_epsilon):
        text = (
            f"The recorded messages have a privacy loss of {format_number(observed.loss)} {when}, above the promised "
        )
        text += f"{format_number(observed.claimed_epsilon)}."
        return _Verdict("refuted", "Refuted: the recorded messages reveal more than was promised", text)
    if loose := [case for case in _cases(summary) if is_above_claim(case[2].supremum, case[2].claimed_epsilon)]:
        learner, level, observed = loose[0]
        text = (
            f"Other messages could have had a privacy loss of {format_number(observed.supremum)}, above the promised "
        )
        text += f"{format_number(observed.claimed_epsilon)} ({learner.name}, {LEVEL_LABELS[level]})."
        return _Verdict("refuted", "Refuted: the claim does not hold", text)
    loss = format_number(observed.loss)
    found = f"The largest privacy loss of the recorded messages, of all replacements tried, is {loss}, {when}"
    if not summary.private_noise:
        text = "The noise came from a recording or a seed, so that the run can be repeated. Anyone who has them can remove the "
        text += f"noise. {found}, for an observer who does not."
        return _Verdict("open", "This run protected no record", text)
    if math.isinf(observed.claimed_epsilon):
        return _Verdict("open", "Nothing finite was promised", f"Every claimed ε is infinite. {found}.")
    if summary.failed_parts:
        return _make_incomplete_verdict(
            summary, f" {found}; the promise allows {format_number(observed.claimed_epsilon)}."
        )
    # A learner that left sent nothing afterwards: its later rounds are not missing from the capture.
    examined = min(
        (len(loss.cumulative_loss) for learner, _, loss in _cases(summary) if not learner.has_left),
        default=summary.rounds_done,
    )
    if 2 * examined < summary.rounds_done:
        text = f"Only the first {examined} of {pluralize(summary.rounds_done, 'round')} could be examined: later messages are "
        text += f"missing from the capture. {found}; the promise allows {format_number(observed.claimed_epsilon)}."
        return _Verdict("open", "Too few messages were recorded to tell", text)
    text = f"{found}. The promise allows {format_number(observed.claimed_epsilon)}."
    if (
        combine_epsilons(
            (each.epsilon_record for each in summary.learners), has_shared_records=summary.guarantee.shared
        )
        > WEAK_EPSILON
    ):
        return _Verdict("consistent", "Consistent with a weak promise", text, is_weak=True)
    return _Verdict("consistent", "Consistent with the promise", text)


def _make_incomplete_verdict(summary: RunSummary, found: str) -> _Verdict:
    """Return the verdict on a run whose summary is incomplete."""
    lines = "; ".join(summary.failed_parts)
    return _Verdict("open", "Not all could be computed", f"{lines[:1].upper()}{lines[1:]}.{found}")


def _make_untested_verdict(summary: RunSummary) -> _Verdict:
    """Return the verdict on a run whose losses are not known."""
    if summary.wiretap is not None:
        text = "A wiretap reads no messages, so the promise was not tested. Whether sizes and times of ciphertext depend on "
        text += "records shows in many runs only: sottovoce audit --on wiretap."
        return _Verdict("open", "Only ciphertext was recorded", text)
    if summary.is_live and summary.capture is not None:
        text = "Privacy losses are computed from the records, which only their learners have. With sottovoce up --keep-log they "
        text += "are computed here; sottovoce watch --state examines the noise."
        return _Verdict("open", "Recorded, but not tested", text)
    return _Verdict("open", "Not recorded", "The promise was not tested, because no messages were recorded.")


def compose_statements(summary: RunSummary) -> dict[str, str]:
    """State what was run, promised and found, and the limits of the result: one or two sentences each, by statement name."""
    verdict = determine_verdict(summary)
    limits = _NOT_COVERED
    if verdict.kind == "consistent":
        limits = (
            f"One recorded run can refute a promise, never prove it; sottovoce audit SPEC examines many runs. {limits}"
        )
    return {"run": _run(summary), "promise": _promise(summary), "found": verdict.text, "limits": limits}


def _run(summary: RunSummary) -> str:
    """State what was run and recorded."""
    done, planned = summary.rounds_done, summary.rounds
    rounds = pluralize(done, "round") if done == planned else format_rounds_done(done, planned)
    learners, data = pluralize(len(summary.learners), "learner"), "live records" if summary.is_live else summary.data
    ran = f"{learners} ran {summary.guarantee.algorithm} on {data} for {rounds}"
    if (wiretap := summary.wiretap) is not None:
        return (
            f"{ran}; the wiretap recorded {describe_ciphertext(wiretap.connections, wiretap.records, wiretap.bytes)}."
        )
    if (capture := summary.capture) is None:
        return f"{ran}; no messages were recorded."
    recorded = f"{pluralize(capture.messages, 'message')} ({format_bytes(capture.bytes)}, mode {capture.mode})"
    return f"{ran}; the eavesdropper recorded {recorded}."


def _promise(summary: RunSummary) -> str:
    """State the promised epsilon, its observer, and its meaning."""
    promise, sentences = summary.guarantee, list[str]()
    if math.isfinite(summary.epsilon_record_use):
        single = is_single_use(summary)
        epsilons = (
            f"ε = {format_number(summary.epsilon_record_use)} {LEVEL_LABELS['record' if single else 'record_use']}"
        )
        if not single:
            record = combine_epsilons(
                (each.epsilon_record for each in summary.learners), has_shared_records=promise.shared
            )
            epsilons += f", {format_number(record)} per record in all its uses"
        if promise.record_use_at_delta is not None and promise.record_at_delta is not None:
            label = LEVEL_LABELS["record" if single else "record_use"]
            at_delta = f"ε = {format_number(promise.record_use_at_delta)} {label}"
            if not single:
                at_delta += f", {format_number(promise.record_at_delta)} per record in all its uses"
            epsilons = f"{at_delta}, at delta {promise.delta:g} (at delta 0: {epsilons})"
        together = ", all learners together, for they share their records" if promise.shared else ""
        sentences = [
            f"{epsilons}, against {_OBSERVERS[promise.threat_model]}{together}.",
            _meaning(summary.epsilon_record_use)
            if promise.record_use_at_delta is None
            else _meaning(promise.record_use_at_delta, promise.delta),
        ]
    elif promise.output is None:
        sentences = ["Nothing: ε is infinite for an observer of the messages."]
    if promise.output is not None and (promise.threat_model != "output" or not sentences):
        sentences += [f"ε = {format_number(promise.output)} against {_OBSERVERS['output']}.", _meaning(promise.output)]
    return " ".join(sentences)


def _meaning(epsilon: float, delta: float = 0.0) -> str:
    """State the strongest belief of an observer that began with even odds, `e^epsilon / (1 + e^epsilon)`.

    At a delta, a belief has no bound; the share of right guesses is at most `(e^epsilon + delta) / (1 + e^epsilon)`.
    """
    sure = (1.0 + delta * math.exp(-epsilon)) / (1.0 + math.exp(-epsilon))
    if sure > _NEARLY_SURE:
        return "This rules out almost no conclusion about a record."
    if delta:
        return (
            "An observer who finds two values of a record equally likely before the run, and guesses which of them it is, is "
            f"right in at most {format_percent(sure)} of all runs."
        )
    return (
        "An observer who finds two values of a record equally likely before the run can become at most "
        f"{format_percent(sure)} sure of one of them."
    )
