"""A quick lot of hostile calls on real processes; `python -m tests.fuzz` makes as many as are asked for."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.faults.processes import chance
from tests.fuzz import houses as fuzzing
from tests.fuzz.hostile import COORDINATOR, METHODS, Known, call
from tests.fuzz.houses import fuzz, houses

pytestmark = pytest.mark.slow

INPUTS = 300


async def test_every_service_lives_through_a_lot_and_serves(tmp_path: Path) -> None:
    tried = await fuzz(tmp_path, INPUTS, seed=0)
    assert tried.broken == []
    assert {method for method, _ in tried.answers} == {
        path.rsplit("/", 1)[-1] for of in METHODS.values() for path, *_ in of
    }
    codes = {code for _, code in tried.answers}
    assert {"OK", "INVALID_ARGUMENT", "FAILED_PRECONDITION", "PERMISSION_DENIED"} <= codes
    assert tried.answers["Exchange", "PERMISSION_DENIED"]  # who is no neighbour


async def test_what_is_broken_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has ended, one that holds too much, one that has logged a bug."""
    async with houses(tmp_path) as up:
        assert await up.broken() == []
        monkeypatch.setattr(fuzzing, "MOST_MIB", 1)
        with (tmp_path / "coordinator.err").open("a", encoding="utf-8") as log:
            log.write('{"event": "bug", "where": "here"}\n')
        up.processes["learner"].signal(signal.SIGKILL)
        await up.processes["learner"].over()
        found = "\n".join(await up.broken())
        for words in ("learner has ended with -9", "coordinator has logged: ", "eavesdropper holds "):
            assert words in found


def test_a_seed_says_the_same_again() -> None:
    first, again = ([call(chance(7), COORDINATOR, Known("{}")) for _ in range(50)] for _ in range(2))
    assert first == again
