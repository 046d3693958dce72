"""Numbers as people read them."""

from __future__ import annotations

import math

import pytest

from sottovoce_client.formatting import (
    describe_max_epsilon,
    format_bytes,
    format_count,
    format_duration,
    format_number,
    format_p_value,
    format_percent,
    format_percent_range,
    pluralize,
)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (math.nan, "–"),
        (math.inf, "∞"),
        (-math.inf, "−∞"),
        (0.0, "0"),
        (7.31249, "7.312"),
        (-0.5, "−0.5"),
        (999.96, "1,000"),
        (10_190.4, "10,190"),
        (1_234_567.0, "1,235,000"),
        (3.14159e19, "3.142e19"),
        (0.000012345, "1.234e−5"),
        (0.00012345, "0.0001234"),
    ],
)
def test_number(value: float | None, text: str) -> None:
    assert format_number(value) == text


def test_a_chance_that_no_number_is_small_enough_for_is_below_the_least() -> None:
    assert [format_p_value(p) for p in (0.046, 4.4e-7, 0.0, math.nan)] == ["0.046", "4.4e−7", "< 1e−300", "–"]


@pytest.mark.parametrize(
    ("value", "digits", "text"), [(187.3, 2, "190"), (99.6, 2, "100"), (25.1, 1, "30"), (1234, 2, "1,200")]
)
def test_few_digits_of_a_large_number_are_no_power_of_ten(value: float, digits: int, text: str) -> None:
    assert format_number(value, digits) == text


def test_number_has_no_zeros_at_its_end() -> None:
    told = [format_number(value) for value in (8e-6, 1.43e-6, 1.2e9, -3e-12)]
    assert told == ["8e−6", "1.43e−6", "1.2e9", "−3e−12"]


def test_number_with_fewer_digits() -> None:
    assert [format_number(value, 3) for value in (0.059271, 15.58, 3.14159e19)] == ["0.0593", "15.6", "3.14e19"]


@pytest.mark.parametrize(
    ("n_bytes", "text"),
    [(0, "0 bytes"), (1, "1 byte"), (999, "999 bytes"), (1_000, "1 kB"), (1_431_200, "1.43 MB"), (999_600, "1 MB"),
     (5 * 10**9, "5 GB"), (2 * 10**12, "2 TB")],
)  # fmt: skip
def test_size(n_bytes: int, text: str) -> None:
    assert format_bytes(n_bytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.0, "0 s"), (1.2135, "1.21 s"), (59.99, "60 s"), (200, "3 min 20 s"), (7_500, "2 h 05 min")]
)
def test_duration(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


def test_shares() -> None:
    assert [format_percent(value) for value in (None, math.nan, 0.0, 0.9423, 1.0)] == [
        "–",
        "–",
        "0.0 %",
        "94.2 %",
        "100.0 %",
    ]
    assert format_percent_range([0.95, None, 0.912]) == "91.2–95.0 %"
    assert format_percent_range([0.95]) == "95.0 %"
    assert format_percent_range([None]) == "–"


def test_counts() -> None:
    assert (format_count(5_000), pluralize(1, "edge"), pluralize(0, "edge")) == ("5,000", "1 edge", "0 edges")


def test_what_so_many_runs_cannot_show() -> None:
    assert describe_max_epsilon(0.8, 0, 2.0) == "With this number of runs, the largest provable ε is 0.8."
    few, never = describe_max_epsilon(0.8, 1_234, 2.0), describe_max_epsilon(0.8, math.inf, 955.0)
    assert "fewer than 1,234 runs of each world" in few and "ε 2 could not" in few
    assert never.endswith("No feasible number of runs could refute ε 955.")
