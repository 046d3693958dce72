"""Formatting of values for readers: four significant digits, `1.4 MB`, `5,000`, `∞`; an en dash for a missing value."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from sottovoce_core.auditing.bounds import MIN_PRINTED_P_VALUE
from sottovoce_core.network.participation_schedule import OfflineInterval
from sottovoce_core.runs.participation import StalenessStatistics

MISSING_VALUE = "–"
SINGLE_LEARNER_NOTE = "a single learner has no neighbours: it sends no messages and learns only from its own records"
NO_ACCURACY_NOTE = (
    "not known: it can be measured here only if all messages were captured (capture: relay or mirror); learners answer "
    "predictions only with telemetry: {predict: true} in the spec, and if their owners allow it"
)
NO_TEST_RECORDS_NOTE = (
    "not known: no record is held out to measure it (of a file that places its records, only the test part is held out)"
)


def format_epsilon(epsilon: float, delta: float) -> str:
    """Format an epsilon with the delta at which it holds, if it is not pure."""
    return format_number(epsilon) + (f" at delta {delta:g}" if delta else "")


def format_number(value: float | None, digits: int = 4) -> str:
    """Round to significant digits, with separators for thousands; powers of ten only for very small or large numbers."""
    if value is None or math.isnan(value):
        return MISSING_VALUE
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    rounded = float(f"{value:.{digits}g}")
    if rounded and not 1e-4 <= abs(rounded) < 1e7:
        mantissa, _, power = f"{rounded:.{digits - 1}e}".partition("e")
        text = f"{mantissa.rstrip('0').rstrip('.') if '.' in mantissa else mantissa}e{int(power)}"
    else:
        text = f"{rounded:,.0f}" if abs(rounded) >= min(1000, 10**digits) else f"{rounded:.{digits}g}"
    return text.replace("-", "−")


def format_p_value(p_value: float) -> str:
    """Format a p-value; one below `MIN_PRINTED_P_VALUE` is shown as an upper bound."""
    return f"< {format_number(MIN_PRINTED_P_VALUE, 1)}" if p_value < MIN_PRINTED_P_VALUE else format_number(p_value, 2)


def format_with_error(value: float, error: float, digits: int = 4) -> str:
    """Format `0.1234 ± 0.0012`; an error that is missing or mere rounding is left out."""
    if math.isnan(error) or error <= 1e-9 * abs(value):
        return format_number(value, digits)
    return f"{format_number(value, digits)} ± {format_number(error, 2)}"


def format_count(value: int) -> str:
    """Format `5,000`."""
    return f"{value:,}"


def format_planned_rounds(rounds: int | None) -> str:
    """Format `5,000 rounds`; None: no end is planned."""
    return "rounds until it is stopped" if rounds is None else pluralize(rounds, "round")


def format_rounds_done(done: int, rounds: int | None) -> str:
    """Format `40 of 500 rounds`; None: no end was planned."""
    return pluralize(done, "round") if rounds is None else f"{format_count(done)} of {pluralize(rounds, 'round')}"


def describe_detections(count: int, first: Sequence[str]) -> str:
    """Summarise the protocol violations that the eavesdropper detected, on one line; empty if there are none."""
    if not count:
        return ""
    more = " …" if count > 1 else ""
    return f"The eavesdropper detected {pluralize(count, 'protocol violation')}: {'; '.join(first[:1])}{more}"


def describe_offline_interval(interval: OfflineInterval) -> str:
    """Name the learner and the rounds of an offline interval, on one line."""
    if interval.missed_from_rounds:
        return f"{interval.learner} was lost before round {interval.first_round}"
    if interval.until_round is None:
        return f"{interval.learner} is offline from round {interval.first_round} on"
    return f"{interval.learner} is offline in rounds {interval.first_round} to {interval.until_round - 1}"


def describe_staleness(staleness: StalenessStatistics | None) -> str:
    """Describe the age of the messages that updates used, on one line; empty for a synchronous run."""
    if staleness is None:
        return ""
    if not staleness.max_lag_rounds:
        return "every update used the messages of its own round"
    share = f"{format_percent(staleness.stale_share)} of the messages that updates used were of an earlier round"
    return f"{share}, by up to {pluralize(staleness.max_lag_rounds, 'round')}"


def describe_measurement(cost: str) -> str:
    """Describe accuracies that were measured without queries to learners; empty if there are none.

    Args:
        cost: Privacy cost of publishing them, in words.
    """
    return (
        ""
        if not cost
        else f"measured here from records and capture, without queries to learners; to publish it: {cost}"
    )


def describe_recorded_rounds(recorded: int, done: int) -> str:
    """Name the rounds that a capture recorded completely, on one line; empty if it recorded all of them."""
    return (
        "" if recorded >= done else f"rounds 0 to {recorded - 1} were recorded completely, and the losses are of these"
    )


def describe_ciphertext(connections: int, records: int, n_bytes: int) -> str:
    """Summarise the ciphertext that a wiretap recorded, on one line."""
    return f"{pluralize(records, 'record')} of ciphertext, {format_bytes(n_bytes)}, in {pluralize(connections, 'connection')}"


def describe_max_epsilon(max_epsilon: float, needed: float, claim: float) -> str:
    """State the largest lower bound on epsilon that this number of runs can prove, and how many runs a refutation needs.

    Args:
        max_epsilon: Largest provable lower bound on epsilon.
        needed: Minimum number of runs of each world that can refute the claim; 0: any number.
        claim: The claimed epsilon.
    """
    text = f"With this number of runs, the largest provable ε is {format_number(max_epsilon, 3)}."
    if not needed:
        return text
    if math.isinf(needed):
        return f"{text} No feasible number of runs could refute ε {format_number(claim)}."
    return f"{text} With fewer than {pluralize(int(needed), 'run')} of each world, ε {format_number(claim)} could not be refuted."


def pluralize(value: int, noun: str) -> str:
    """Format `1 message`, `5,000 messages`."""
    return f"{format_count(value)} {noun}" if value == 1 else f"{format_count(value)} {noun}s"


def format_percent(value: float | None) -> str:
    """Format `94.2 %`."""
    return MISSING_VALUE if value is None or not math.isfinite(value) else f"{100 * value:.1f} %"


def format_percent_range(values: Iterable[float | None]) -> str:
    """Format the smallest and the largest value: `91.2–95.0 %`."""
    known = [value for value in values if value is not None and math.isfinite(value)]
    low, high = format_percent(min(known, default=None)), format_percent(max(known, default=None))
    return low if low == high else f"{low.removesuffix(' %')}{MISSING_VALUE}{high}"


def format_bytes(n_bytes: int) -> str:
    """Format `1.4 MB`, in powers of 1000."""
    if n_bytes < 1000:
        return pluralize(n_bytes, "byte")
    value = float(n_bytes)
    for unit in ("kB", "MB", "GB"):
        value /= 1000
        if value < 999.5:
            return f"{value:.3g} {unit}"
    return f"{value / 1000:,.3g} TB"


def format_duration(seconds: float) -> str:
    """Format `1.2 s`, `3 min 20 s`, `2 h 05 min`."""
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02} min"
