"""Some of the faults of `python -m tests.faults`, once each: what takes least, and what nothing else tries on processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.catalogue import EVERY
from tests.faults.promises import promises
from tests.faults.trial import Calm, tried

pytestmark = pytest.mark.slow

SECONDS = 2.0
CHEAP = {  # and a seed: of either clock, and of either noise
    "learner killed": 1,
    "coordinator killed": 3,
    "dies when it has journaled": 2,
    "dies when it has told one neighbour": 3,
    "torn at the mark": 3,
    "learner's disk full": 2,
    "links reset": 1,
    "one leaves and dies meanwhile": 1,
    "lost by an operator, another dies meanwhile": 1,
    "late: frozen": 2,
}


@pytest.mark.parametrize("name", CHEAP)
async def test_a_promise_holds(tmp_path: Path, name: str) -> None:
    (fault,) = (each for each in EVERY if each.name == name)
    calm = Calm(tmp_path, SECONDS)
    assert promises(await tried(fault, CHEAP[name], tmp_path / "tried", SECONDS, calm)) == []
