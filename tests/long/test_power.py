"""The whole catalogue of breaks: whatever gives enough evidence is found. 20 minutes on two free cores."""

from __future__ import annotations

import pytest
from rich.console import Console

from sottovoce_client.lab.power import measure_power

pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.timeout(7200)]


def test_whatever_gives_enough_evidence_is_found() -> None:
    """With the seeds of docs/power.md, so that it is what that page says."""
    assert measure_power(console=Console(width=140)) == 0
