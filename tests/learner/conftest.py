"""What holds in all tests of a learner's parts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from sottovoce_learner.storage.run_log import RunLog


@pytest.fixture(autouse=True)
def _their_process_ends(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Sessions die in tests as processes do, which no file survives open: the logs that they had are closed with the test."""
    opens, opened = RunLog.__init__, list[RunLog]()

    def noted(log: RunLog, *given: Any) -> None:
        opens(log, *given)
        opened.append(log)

    monkeypatch.setattr(RunLog, "__init__", noted)
    yield
    for log in opened:
        log.close()
