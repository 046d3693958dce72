"""The whole catalogue of breaks, and the whole self-test of the auditor. 40 minutes on two free cores."""

from __future__ import annotations

import pytest
from rich.console import Console

from sottovoce_lab.power import measure_power
from sottovoce_lab.selftest import run_self_test

pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.timeout(7200)]


def test_whatever_gives_enough_evidence_is_found() -> None:
    """With the seeds of docs/audit/methods.md, so that it is what that page says."""
    assert measure_power(console=Console(width=140)) == 0


def test_broken_learners_are_caught_and_correct_ones_are_let_off() -> None:
    """So many false alarms as make it fail have a probability below 0.001 for each algorithm; seeds are fixed."""
    assert run_self_test(audits=200, console=Console(width=100)) == 0
