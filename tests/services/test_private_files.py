"""What services write is read by their user alone, however open the machine is by default; and a folder that is open is told."""

from __future__ import annotations

import asyncio
import os
import stat
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import structlog

from sottovoce_client.runs.local_services import LocalServices
from sottovoce_client.runs.run_client import run_on_services
from sottovoce_coordinator.service import Coordinator, CoordinatorConfig
from sottovoce_eavesdropper.service import Eavesdropper, EavesdropperConfig
from sottovoce_learner.config import LearnerConfig
from sottovoce_learner.service import Learner
from sottovoce_rpc.logs import is_open_to_others
from tests.examples import made_up, small_spec
from tests.services.network import PATIENCE_S

NAMES = ["ann", "ben"]
OTHERS = 0o077


@pytest.fixture(autouse=True)
def usual_umask() -> Iterator[None]:
    """Everybody may read what is made, as on most machines."""
    before = os.umask(0o022)
    yield
    os.umask(before)


def open_files(folder: Path) -> list[str]:
    """Whatever other users can come to from here, and have any right to."""
    mode = stat.S_IMODE(folder.stat().st_mode)
    found = [f"{folder} {mode:04o}"] if mode & OTHERS else []
    if folder.is_dir() and mode & OTHERS:
        found += [each for below in sorted(folder.iterdir()) for each in open_files(below)]
    return found


def left_lying(folder: Path) -> list[str]:
    """Whatever in a folder others have a right to, though they cannot come to it as long as the folder is closed."""
    paths = [folder, *folder.rglob("*")]
    return [f"{each} {mode:04o}" for each in paths if (mode := stat.S_IMODE(each.stat().st_mode)) & OTHERS]


@pytest.mark.slow
async def test_what_learners_and_eavesdroppers_write_is_their_users_alone(tmp_path: Path) -> None:
    """All that lies there while they are up: ledgers, logs of runs, captures; identities and logs others cannot come to."""
    spec = small_spec(5, NAMES, capture="relay", clock={"deadline_s": 100.0})
    async with LocalServices(spec, tmp_path, tls=True) as up:
        running = run_on_services(
            up.coordinator, spec, made_up(spec), lambda progress, state: None, credentials=up.credentials
        )
        outcome = await asyncio.wait_for(running, PATIENCE_S)
        assert {
            name: len(list(folder.rglob("*"))) > 2 for name, folder in folders_of(tmp_path).items()
        } == dict.fromkeys(("learner-state", "captures", "logs", "identities"), True)
        found = [each for name in ("learner-state", "captures") for each in left_lying(tmp_path / name)]
        keys = [each for each in left_lying(tmp_path / "identities") if ".key " in each]
        reached = [
            each
            for own in [tmp_path / "logs", *folders_of(tmp_path / "identities").values()]
            for each in open_files(own)
        ]
    assert outcome.state == "finished", outcome.detail
    assert (found, keys, reached) == ([], [], [])


def folders_of(folder: Path) -> dict[str, Path]:
    return {each.name: each for each in folder.iterdir() if each.is_dir()}


@asynccontextmanager
async def coordinating(state: Path) -> AsyncIterator[None]:
    """A coordinator in a process of its own."""
    command = [
        "-m",
        "sottovoce_client",
        "coordinator",
        "--listen",
        "127.0.0.1:0",
        "--stop-with-stdin",
        "--state",
        str(state),
    ]
    pipe = asyncio.subprocess.PIPE
    child = await asyncio.create_subprocess_exec(sys.executable, *command, stdin=pipe, stdout=pipe)
    try:
        assert child.stdout is not None
        assert await asyncio.wait_for(child.stdout.readline(), PATIENCE_S) != b""
        yield
    finally:
        assert child.stdin is not None
        child.stdin.close()
        await asyncio.wait_for(child.wait(), PATIENCE_S)


@pytest.mark.parametrize("made", [False, True], ids=["new", "there"])
async def test_what_a_coordinator_writes_is_its_users_alone(tmp_path: Path, made: bool) -> None:
    state = tmp_path / "state"
    if made:
        state.mkdir(mode=0o755)
    async with coordinating(state):
        found = left_lying(state)
        assert any(state.iterdir())
    assert found == ([f"{state} 0755"] if made else [])


async def started(house: str, folder: Path) -> None:
    match house:
        case "coordinator":
            coordinator = Coordinator(CoordinatorConfig(state=folder))
            await coordinator.start()
            await coordinator.stop()
        case "eavesdropper":
            eavesdropper = Eavesdropper(EavesdropperConfig(folder=folder))
            await eavesdropper.start()
            await eavesdropper.stop()
        case _:
            learner = Learner(LearnerConfig("ann", "127.0.0.1:1", state_folder=folder))
            await learner.start()
            await learner.stop()


@pytest.mark.parametrize("house", ["coordinator", "eavesdropper", "learner"])
async def test_a_folder_that_others_may_look_into_is_told_at_the_start(tmp_path: Path, house: str) -> None:
    """A warning, no refusal: a volume of a container is open to all, and nobody else is there."""
    for mode, told in ((0o700, False), (0o750, True), (0o755, True), (0o701, True)):
        folder = tmp_path / f"{mode:o}"
        folder.mkdir(mode=mode)
        with structlog.testing.capture_logs() as logs:
            await started(house, folder)
        warnings = [each for each in logs if "other users can read the" in each["event"]]
        assert [each["folder"] for each in warnings] == ([str(folder)] if told else []), oct(mode)
        assert all(each["event"].endswith("chmod 700") for each in warnings)


def test_a_folder_that_is_not_there_is_open_to_nobody(tmp_path: Path) -> None:
    assert not is_open_to_others(tmp_path / "none")
