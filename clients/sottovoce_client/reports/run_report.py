"""The report of a run: its page, and the statements that open it. One capture can refute a promise, never prove it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
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
    LEVEL_TITLES,
    MAX_HEATMAP_SHAPE,
    build_run_figures,
    has_visible_signal,
)
from sottovoce_client.runs.summary import LearnerSummary, ObservedPrivacyLoss, RunSummary
from sottovoce_core.privacy.guarantee import WEAK_EPSILON, combine_epsilons

_MAX_LISTED_DETECTIONS = 20
_MAX_EXPLAINED_SAMPLES = 8
"""Of a run that was watched so seldom the page says why its curves have few points."""

_STATEMENTS = {
    "run": "What was run",
    "promise": "What is promised",
    "found": "What was found",
    "limits": "What it does not mean",
}
"""Titles of the statements that open the page."""

COLUMNS: tuple[tuple[str, str, Callable[[Any], str], str], ...] = (
    ("records", "held", format_count, "records"),
    ("records", "most uses", format_count, "most_uses"),
    ("accuracy", "test", format_percent, "test_accuracy"),
    ("accuracy", "own", format_percent, "prequential_accuracy"),
    ("sent", "rounds", format_count, "rounds"),
    ("sent", "messages", format_count, "messages"),
    ("sent", "bytes", format_bytes, "bytes"),
    ("budget", "spent", format_number, "epsilon_spent"),
    ("budget", "limit", lambda value: "none" if value is None else format_number(value), "epsilon_limit"),
    ("claimed ε", "paper", format_number, "epsilon_paper"),
    ("claimed ε", "record_use", format_number, "epsilon_record_use"),
    ("claimed ε", "record", format_number, "epsilon_record"),
    ("claimed ε", "forever", format_number, "epsilon_infinite_horizon"),
)
"""Of every learner: the group and the head of a column, and how it shows which attribute."""


def build_run_page(summary: RunSummary) -> Page:
    """The report of a run."""
    learners, noticed = summary.learners, summary.detections
    unpromised = [
        kind
        for kind in ("paper", "record", "record_use")
        if any(math.isinf(getattr(each, f"epsilon_{kind}")) for each in learners)
    ]
    values = {
        "run": summary,
        "late": "" if summary.capture is None else describe_staleness(summary.capture.staleness),
        "whole": ""
        if summary.capture is None
        else describe_recorded_rounds(len(summary.capture.sender_values), summary.rounds_done),
        "noticed": "" if noticed is None else describe_detections(noticed.count, noticed.first),
        "promised": any(math.isfinite(each.epsilon_record_use) for each in learners),
        "unpromised": [EPSILON_STYLES[kind][0] for kind in unpromised],
        "verdict": determine_verdict(summary),
        "statements": [(_STATEMENTS[name], text) for name, text in compose_statements(summary).items()],
        "worst": find_worst_case(summary),
        "single_use": is_single_use(summary),
        "per": LEVEL_LABELS,
        "unasked": NO_ACCURACY_NOTE if summary.test_records else NO_TEST_RECORDS_NOTE,
        "measured": describe_measurement(summary.publication_cost),
        "most_noticed": _MAX_LISTED_DETECTIONS,
        "most_heard": MAX_HEATMAP_SHAPE,
        "loud": (said := summary.capture) is not None
        and has_visible_signal(said.sender_values, max(said.first_scale, said.last_scale)),
        "few_looks": _MAX_EXPLAINED_SAMPLES,
    }
    return Page(
        "run.html.j2",
        [*build_run_figures(summary), _learners(summary), build_assumption_table(summary.guarantee.constants)],
        values,
    )


def build_assumption_table(constants: Sequence[tuple[str, Any, str]]) -> PageTable:
    """What a promise rests on: constants, their values, and what enforces them."""
    columns = (
        PageColumn("constant"),
        PageColumn("value", lambda value: value if isinstance(value, str) else format_number(value)),
    )
    return PageTable(
        "grounds", "Constants", (*columns, PageColumn("enforced by", kind="long")), constants, is_narrow=True
    )


def _learners(summary: RunSummary) -> PageTable:
    columns = [PageColumn(head, show, group=group) for group, head, show, _ in COLUMNS]
    for level in LEVEL_TITLES:
        columns += [
            PageColumn(head, format_number, group=f"loss, per {level}") for head in ("this", "largest", "claim")
        ]
    rows = [(each.name, *_figures(each)) for each in summary.learners]
    above = {
        (row, 1 + len(COLUMNS) + 3 * k + part)
        for row, each in enumerate(summary.learners)
        for k, level in enumerate(LEVEL_TITLES)
        if (swap := each.get_observed_loss(level)) is not None
        for part, value in enumerate((swap.loss, swap.supremum))
        if is_above_claim(value, swap.claimed_epsilon)
    }
    return PageTable("learners", "Learner by learner", (PageColumn("learner"), *columns), rows, frozenset(above))


def _figures(learner: LearnerSummary) -> Iterator[Any]:
    yield from (getattr(learner, attribute) for *_, attribute in COLUMNS)
    for level in LEVEL_TITLES:
        swap = learner.get_observed_loss(level)
        yield from (None,) * 3 if swap is None else (swap.loss, swap.supremum, swap.claimed_epsilon)


# ---- the statements --------------------------------------------------------------------------------------------------

_Case = tuple[LearnerSummary, str, ObservedPrivacyLoss]
"""The learner whose record is replaced, the level (`event` or `record`), and the loss of that replacement."""

LEVEL_LABELS = {"record_use": "per use of a record", "record": "per record"}
"""Levels of adjacency as reports call them."""
_OBSERVERS = {
    "wire": "an observer of every message",
    "neighbour": "one learner, which reads the messages sent to it",
    "output": "an observer of the published decisions, who sees no message",
}
"""Threat models as reports call them."""
_NOT_COVERED = "Not covered: published accuracies and predictions; number, size and timing of messages."
_NEARLY_SURE = 0.9995
"""Probabilities above it would be shown as 100 %."""


@dataclass(frozen=True, slots=True)
class _Verdict:
    """A headline, and the sentence that gives its reason; `weak`: a promise that is kept, and is above `WEAK_EPSILON`."""

    kind: Literal["consistent", "refuted", "open"]
    headline: str
    text: str
    is_weak: bool = False

    @property
    def tone(self) -> str:
        """The colour of the headline, on the page and in the terminal: amber for a weak promise."""
        return "weak" if self.is_weak else self.kind


def is_above_claim(loss: float, budget: float) -> bool:
    """Return whether a loss is above the claim by more than rounding."""
    return loss > budget * (1 + 1e-9) + 1e-12


def is_single_use(summary: RunSummary) -> bool:
    """Return whether every record was used at most once, so that both levels have the same epsilon."""
    return all(each.epsilon_record_use == each.epsilon_record for each in summary.learners)


def _cases(summary: RunSummary) -> list[_Case]:
    """Every replacement whose loss was computed."""
    return [
        (learner, level, swap)
        for learner in summary.learners
        for level in ("record_use", "record")
        if (swap := learner.get_observed_loss(level)) is not None
    ]


def find_worst_case(summary: RunSummary) -> _Case | None:
    """The replacement with the largest loss, of those above their claim if there are any; None without a capture.

    One whose claim is infinite comes last.
    """

    def rank(case: _Case) -> tuple[bool, bool, float]:
        swap = case[2]
        return is_above_claim(swap.loss, swap.claimed_epsilon), math.isfinite(swap.claimed_epsilon), swap.loss

    return max(_cases(summary), key=rank, default=None)


def determine_verdict(summary: RunSummary) -> _Verdict:
    """Compare the exact privacy losses of the capture with the claims."""
    worst = find_worst_case(summary)
    if worst is None:
        return _not_computed(summary, "") if summary.failed_parts else _untested(summary)
    learner, level, swap = worst
    if is_single_use(summary):
        when = f"when one record of {learner.name} is replaced"
    elif level == "record_use":
        when = f"when one use of a record of {learner.name} is replaced"
    else:
        when = f"when one record of {learner.name} is replaced in all its uses"
    if is_above_claim(swap.loss, swap.claimed_epsilon):
        text = f"The recorded messages have a privacy loss of {format_number(swap.loss)} {when}, above the promised "
        text += f"{format_number(swap.claimed_epsilon)}."
        return _Verdict("refuted", "Refuted: the recorded messages reveal more than was promised", text)
    if loose := [case for case in _cases(summary) if is_above_claim(case[2].supremum, case[2].claimed_epsilon)]:
        learner, level, swap = loose[0]
        text = f"Other messages could have had a privacy loss of {format_number(swap.supremum)}, above the promised "
        text += f"{format_number(swap.claimed_epsilon)} ({learner.name}, {LEVEL_LABELS[level]})."
        return _Verdict("refuted", "Refuted: the claim does not hold", text)
    found = f"The largest privacy loss of the recorded messages, of all replacements tried, is {format_number(swap.loss)}, {when}"
    if not summary.private_noise:
        text = "The noise came from a recording or a seed, so that the run can be repeated. Anyone who has them can remove the "
        text += f"noise. {found}, for an observer who does not."
        return _Verdict("open", "This run protected no record", text)
    if math.isinf(swap.claimed_epsilon):
        return _Verdict("open", "Nothing finite was promised", f"Every claimed ε is infinite. {found}.")
    if summary.failed_parts:
        return _not_computed(summary, f" {found}; the promise allows {format_number(swap.claimed_epsilon)}.")
    # A learner that left sent nothing afterwards: its later rounds are not missing from the capture.
    examined = min(
        (len(s.cumulative_loss) for who, _, s in _cases(summary) if not who.has_left), default=summary.rounds_done
    )
    if 2 * examined < summary.rounds_done:
        text = f"Only the first {examined} of {pluralize(summary.rounds_done, 'round')} could be examined: later messages are "
        text += f"missing from the capture. {found}; the promise allows {format_number(swap.claimed_epsilon)}."
        return _Verdict("open", "Too few messages were recorded to tell", text)
    text = f"{found}. The promise allows {format_number(swap.claimed_epsilon)}."
    if (
        combine_epsilons(
            (each.epsilon_record for each in summary.learners), has_shared_records=summary.guarantee.shared
        )
        > WEAK_EPSILON
    ):
        return _Verdict("consistent", "Consistent with a weak promise", text, is_weak=True)
    return _Verdict("consistent", "Consistent with the promise", text)


def _not_computed(summary: RunSummary, found: str) -> _Verdict:
    """The verdict on a run of whose summary a part is missing."""
    lines = "; ".join(summary.failed_parts)
    return _Verdict("open", "Not all could be computed", f"{lines[:1].upper()}{lines[1:]}.{found}")


def _untested(summary: RunSummary) -> _Verdict:
    """The verdict on a run whose losses are not known."""
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
    """State what was run, promised and found, and the limits of that: a sentence or two each, by the name of the statement."""
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
    if (tapped := summary.wiretap) is not None:
        return f"{ran}; the wiretap recorded {describe_ciphertext(tapped.connections, tapped.records, tapped.bytes)}."
    if (capture := summary.capture) is None:
        return f"{ran}; no messages were recorded."
    recorded = f"{pluralize(capture.messages, 'message')} ({format_bytes(capture.bytes)}, mode {capture.mode})"
    return f"{ran}; the eavesdropper recorded {recorded}."


def _promise(summary: RunSummary) -> str:
    """State the promised epsilon, the observer that it concerns, and its meaning."""
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
        together = ", all learners together, for they share their records" if promise.shared else ""
        sentences = [
            f"{epsilons}, against {_OBSERVERS[promise.threat_model]}{together}.",
            _meaning(summary.epsilon_record_use),
        ]
    elif promise.output is None:
        sentences = ["Nothing: ε is infinite for an observer of the messages."]
    if promise.output is not None and (promise.threat_model != "output" or not sentences):
        sentences += [f"ε = {format_number(promise.output)} against {_OBSERVERS['output']}.", _meaning(promise.output)]
    return " ".join(sentences)


def _meaning(epsilon: float) -> str:
    """State the strongest belief of an observer that began with even odds: `e^epsilon / (1 + e^epsilon)`."""
    sure = 1.0 / (1.0 + math.exp(-epsilon))
    if sure > _NEARLY_SURE:
        return "This rules out almost no conclusion about a record."
    return (
        f"An observer who finds two values of a record equally likely before the run can become at most {format_percent(sure)} sure "
        "of one of them."
    )
