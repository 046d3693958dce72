"""Fixtures that all tests share."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from sottovoce_client.entry import settle

settle()  # before a test imports NumPy

# Examples have no deadline: how long one takes says more about the machine than about the code.
settings.register_profile("house", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("house")


@pytest.fixture(scope="session")
def data_folder() -> Path:
    """The folder of the real data sets, which are too large to ship: `$SOTTOVOCE_DATA`."""
    folder = Path(os.environ.get("SOTTOVOCE_DATA", "nowhere"))
    if not folder.is_dir():
        pytest.skip(f"no real data sets: {folder} is not a folder (set SOTTOVOCE_DATA)")
    return folder


@pytest.fixture(scope="module", autouse=True)
def _left_behind() -> Iterator[None]:
    """What a module leaves unclosed is told of it, not of a later one in which the collector happens to run."""
    yield
    gc.collect()
