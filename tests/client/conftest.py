"""Fixtures of all tests of commands."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pytest
from typer.main import get_command


@pytest.fixture(scope="session", autouse=True)
def _commands_built_once() -> Iterator[None]:
    """Build the options of all commands once for `CliRunner`, not for every call: they take a tenth of a second."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("typer.testing._get_command", cache(get_command))
        yield
