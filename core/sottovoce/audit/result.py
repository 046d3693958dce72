"""What a single test comes to."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Test:
    """One test and its result."""

    name: str
    what: str
    """What is tested, in a few words."""
    statistic: float
    p_value: float
    """How likely a statistic this extreme is where the claim holds."""
    where: str
    """The learner, round and field that the statistic was largest at; empty if it belongs to no one place."""

    __test__ = False  # pytest collects classes of this name
