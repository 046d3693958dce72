"""Numbers as people read them: four significant digits, `1.4 MB`, `5,000`, `∞`; an en dash where there is nothing."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from sottovoce_core.auditing.bounds import MIN_PRINTED_P_VALUE
from sottovoce_core.network.participation_schedule import OfflineInterval
from sottovoce_core.runs.participation import StalenessStatistics

MISSING_VALUE = "–"
SINGLE_LEARNER_NOTE = "one learner has no neighbours: it sends nothing to anybody and learns from its own records alone"
NO_ACCURACY_NOTE = (
    "not known: it is measured here where all messages were captured (capture: relay or mirror); learners answer only with "
    "telemetry: {predict: true} in the spec, and where their owners allow it"
)
NO_TEST_RECORDS_NOTE = (
    "not known: no record is held out to measure it on (where a file places its records, only its test part is)"
)


def format_number(value: float | None, digits: int = 4) -> str:
    """To significant digits; thousands separated, powers of ten only where digits would not help."""
    if value is None or math.isnan(value):
        return MISSING_VALUE
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    rounded = float(f"{value:.{digits}g}")
    if rounded and not 1e-4 <= abs(rounded) < 1e7:
        mantissa, _, power = f"{rounded:.{digits - 1}e}".partition("e")
        text = f"{mantissa.rstrip('0').rstrip('.') if '.' in mantissa else mantissa}e{int(power)}"
    else:
        text = f"{rounded:,.0f}" if abs(rounded) >= 1000 else f"{rounded:.{digits}g}"
    return text.replace("-", "−")


def format_p_value(p_value: float) -> str:
    """A p-value; one that no number is small enough for is below the least."""
    return f"< {format_number(MIN_PRINTED_P_VALUE, 1)}" if p_value < MIN_PRINTED_P_VALUE else format_number(p_value, 2)


def format_with_error(value: float, error: float, digits: int = 4) -> str:
    """`0.1234 ± 0.0012`; the error only where there is one, beyond rounding."""
    if math.isnan(error) or error <= 1e-9 * abs(value):
        return format_number(value, digits)
    return f"{format_number(value, digits)} ± {format_number(error, 2)}"


def format_count(value: int) -> str:
    """`5,000`."""
    return f"{value:,}"


def format_planned_rounds(rounds: int | None) -> str:
    """`5,000 rounds`; None: no end is planned."""
    return "rounds until it is stopped" if rounds is None else pluralize(rounds, "round")


def format_rounds_done(done: int, rounds: int | None) -> str:
    """`40 of 500 rounds`; None: no end was planned."""
    return pluralize(done, "round") if rounds is None else f"{format_count(done)} of {pluralize(rounds, 'round')}"


def describe_detections(findings: int, first: Sequence[str]) -> str:
    """What the eavesdropper noticed, on one line; empty for nothing."""
    if not findings:
        return ""
    more = " …" if findings > 1 else ""
    return (
        f"The eavesdropper noticed {pluralize(findings, 'thing')} that must never happen: {'; '.join(first[:1])}{more}"
    )


def describe_offline_interval(absence: OfflineInterval) -> str:
    """Who was away, and in which rounds."""
    if absence.missed_from_rounds:
        return f"{absence.learner} was lost before round {absence.first_round}"
    if absence.until_round is None:
        return f"{absence.learner} is away from round {absence.first_round} on"
    return f"{absence.learner} is away in rounds {absence.first_round} to {absence.until_round - 1}"


def describe_staleness(late: StalenessStatistics | None) -> str:
    """How late messages were, on one line; empty where a run waits for them."""
    if late is None:
        return ""
    if not late.max_lag_rounds:
        return "every update used the messages of its own round"
    told = f"{format_percent(late.stale_share)} of the messages that updates used were of an earlier round"
    return f"{told}, by up to {pluralize(late.max_lag_rounds, 'round')}"


def describe_measurement(cost: str) -> str:
    """How accuracies came about for which no learner was asked; empty where none did.

    Args:
        cost: of publishing them, in words.
    """
    return "" if not cost else f"measured here, by records and capture, and no learner was asked; to publish it: {cost}"


def describe_recorded_rounds(recorded: int, done: int) -> str:
    """Name the rounds that a capture recorded completely, on one line; empty where it recorded all of them."""
    return (
        "" if recorded >= done else f"rounds 0 to {recorded - 1} were recorded completely, and the losses are of these"
    )


def describe_ciphertext(connections: int, records: int, n_bytes: int) -> str:
    """What a wiretap noted, on one line."""
    return f"{pluralize(records, 'record')} of ciphertext, {format_bytes(n_bytes)}, in {pluralize(connections, 'connection')}"


def describe_max_epsilon(max_epsilon: float, needed: float, claim: float) -> str:
    """The most that so many runs show, and what fewer cannot.

    Args:
        most: the largest bound on epsilon that they could give.
        needed: runs of each world with which the claim could be refuted at all; 0: any number.
        claim: the claimed epsilon.
    """
    told = f"At best so many runs show ε {format_number(max_epsilon, 3)}."
    if not needed:
        return told
    if math.isinf(needed):
        return f"{told} No number of runs that anybody makes could refute ε {format_number(claim)}."
    return f"{told} With fewer than {pluralize(int(needed), 'run')} of each world, ε {format_number(claim)} could not be refuted."


def pluralize(value: int, noun: str) -> str:
    """`1 message`, `5,000 messages`."""
    return f"{format_count(value)} {noun}" if value == 1 else f"{format_count(value)} {noun}s"


def format_percent(value: float | None) -> str:
    """`94.2 %`."""
    return MISSING_VALUE if value is None or not math.isfinite(value) else f"{100 * value:.1f} %"


def format_percent_range(values: Iterable[float | None]) -> str:
    """Smallest to largest: `91.2–95.0 %`."""
    known = [value for value in values if value is not None and math.isfinite(value)]
    low, high = format_percent(min(known, default=None)), format_percent(max(known, default=None))
    return low if low == high else f"{low.removesuffix(' %')}{MISSING_VALUE}{high}"


def format_bytes(n_bytes: int) -> str:
    """`1.4 MB`, in powers of a thousand."""
    if n_bytes < 1000:
        return pluralize(n_bytes, "byte")
    value = float(n_bytes)
    for unit in ("kB", "MB", "GB"):
        value /= 1000
        if value < 999.5:
            return f"{value:.3g} {unit}"
    return f"{value / 1000:,.3g} TB"


def format_duration(seconds: float) -> str:
    """`1.2 s`, `3 min 20 s`, `2 h 05 min`."""
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02} min"
