"""The whole self-test of the auditor: every mutant, and 200 audits of every correct algorithm. 20 minutes on two free cores."""

from __future__ import annotations

import pytest
from rich.console import Console

from sottovoce_client.lab.selftest import self_test

pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.timeout(7200)]


def test_broken_learners_are_caught_and_correct_ones_are_let_off() -> None:
    """So many false alarms as make it fail have a probability below 0.001 for each algorithm; seeds are fixed."""
    assert self_test(alarms=200, console=Console(width=100)) == 0
