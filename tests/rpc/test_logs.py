"""Logs: what a log line depends on is nobody's record."""

from __future__ import annotations

import subprocess
import sys

import pytest

from sottovoce.errors import SpecError
from sottovoce_rpc.logs import configure_logs

OVERFLOW = """
import numpy as np
from sottovoce_rpc.logs import configure_logs
{configure}
np.exp(np.array([1e9]))
"""


@pytest.mark.parametrize(("configure", "told"), [("", True), ("configure_logs()", False)])
def test_no_numeric_warning_reaches_a_services_log(configure: str, told: bool) -> None:
    """Whether a number overflows depends on records."""
    code = OVERFLOW.format(configure=configure)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ("overflow" in done.stderr) is told


def test_an_unknown_level_is_refused() -> None:
    with pytest.raises(SpecError, match="got loud"):
        configure_logs("loud")
