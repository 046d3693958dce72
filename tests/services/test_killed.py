"""Processes that are killed with -9."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager, contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from sottovoce_client.live.connect import connect_learner
from sottovoce_client.live.learner import ConnectedLearner
from sottovoce_client.runs.run_client import Outcome, run_on_services
from sottovoce_client.runs.summary import RunProgress
from sottovoce_core.runs.placement import create_empty_live_data
from sottovoce_core.spec import RunSpec
from sottovoce_eavesdropper.capture_reader import open_capture
from sottovoce_eavesdropper.service import Eavesdropper, EavesdropperConfig
from sottovoce_learner.storage.ledger import StoredState
from sottovoce_learner.storage.state_folder import LearnerPaths
from sottovoce_learner.storage.wal import EntryKind
from sottovoce_rpc.codec import RoundCodec
from sottovoce_rpc.learner_status import LearnerStatus
from sottovoce_rpc.server import open_channel
from sottovoce_wire.v1 import coordinator_pb2, coordinator_pb2_grpc
from sottovoce_wire.v1.learner_pb2 import SampleBatch
from tests.examples import ALLOWING_FILE, made_up, small_spec
from tests.services.network import PATIENCE_S, said_rounds
from tests.services.test_run import SHAPES

pytestmark = pytest.mark.slow

NAMES = ["ann", "ben", "cleo"]

Started = tuple[subprocess.Popen[str], str]
"""A process and its address."""


@contextmanager
def service(*arguments: str, log: Path = Path(os.devnull)) -> Iterator[Started]:
    """A process of ours and its address; killed at the end, if it still lives."""
    command = [sys.executable, "-m", "sottovoce_client", *arguments]
    environment = {**os.environ, "SOTTOVOCE_POLICY": str(ALLOWING_FILE)}
    with (
        log.open("ab") as errors,
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True) as process,
    ):
        try:
            assert process.stdout is not None
            yield process, json.loads(process.stdout.readline())["address"]
        finally:
            process.kill()


def spec_of() -> RunSpec:
    """Paced, so that there is a middle to be killed in."""
    clock = {"mode": "paced", "period_s": 0.02, "window": 5, "deadline_s": 100.0}
    return small_spec(200, NAMES, clock=clock, capture="relay")


@asynccontextmanager
async def eavesdropping(folder: Path) -> AsyncIterator[str]:
    """An eavesdropper of one deployment: what it recorded of a learner counts for whoever comes by that name later."""
    eavesdropper = Eavesdropper(EavesdropperConfig(folder=folder / "captures"))
    try:
        yield await eavesdropper.start()
    finally:
        await eavesdropper.stop()


async def run(folder: Path, *, kill: bool = False, lose: bool = False) -> tuple[Outcome, bool]:
    """`run_by`, with an eavesdropper of its own."""
    async with eavesdropping(folder) as address:
        return await run_by(folder, address, kill=kill, lose=lose)


async def run_by(folder: Path, eavesdropper: str, *, kill: bool, lose: bool) -> tuple[Outcome, bool]:
    """A run, in the middle of which its coordinator may be killed and started again; and whether the client saw that.

    Its state may be lost then, and another client has the run taken up.
    """
    spec, halfway, seen = spec_of(), asyncio.Event(), []

    def look(progress: RunProgress, state: str) -> None:
        seen.append("the coordinator" in progress.offline_learners)
        if min(progress.rounds) >= 20:
            halfway.set()

    arguments = ["coordinator", "--eavesdropper", eavesdropper, "--state", str(folder / "coordinator"), "--listen"]
    names = [part for name in NAMES for part in ("--name", name)]
    with service(*arguments, "127.0.0.1:0") as (coordinator, address):
        learners = ["--coordinator", address, "--state", str(folder / "learners"), "--noise-seed", "same"]
        with service("learner", *names, *learners):
            running = asyncio.ensure_future(run_on_services(address, spec, made_up(spec), look))
            if not (kill or lose):
                return await asyncio.wait_for(running, PATIENCE_S), any(seen)
            await asyncio.wait_for(halfway.wait(), PATIENCE_S)
            (run_id,) = await known(address)
            coordinator.send_signal(signal.SIGKILL)
            await asyncio.to_thread(coordinator.wait)
            if lose:
                running.cancel()
                shutil.rmtree(folder / "coordinator")
            with service(*arguments, address):
                if lose:
                    running = asyncio.ensure_future(run_on_services(address, spec, made_up(spec), look, recover=run_id))
                return await asyncio.wait_for(running, PATIENCE_S), any(seen)


async def known(coordinator: str) -> list[str]:
    """The runs that a coordinator knows."""
    async with open_channel(coordinator) as to:
        ask = coordinator_pb2_grpc.CoordinatorStub(to).ListRuns
        answer = await ask(coordinator_pb2.ListRunsRequest(), timeout=PATIENCE_S)
    return [each.run_id for each in answer.runs]


def said(outcome: Outcome) -> dict[tuple[int, int], bytes]:
    """What was said, by sender and round; a round that was said twice must be the same."""
    codec, found = RoundCodec(SHAPES), dict[tuple[int, int], bytes]()
    table = open_capture(outcome.capture_location or "").read_messages()
    for payload in table["payload"].to_pylist():
        t, sender, _ = codec.decode(payload)
        assert found.setdefault((sender, t), payload) == payload
    return found


async def test_a_run_survives_the_death_of_its_coordinator_with_the_same_trajectory(tmp_path: Path) -> None:
    """Also where the coordinator's state folder is lost with it."""
    (calm, unseen), (lost, _), (killed, seen) = await asyncio.gather(
        run(tmp_path / "calm"), run(tmp_path / "lost", lose=True), run(tmp_path / "killed", kill=True)
    )
    assert [(each.state, each.detail) for each in (calm, killed, lost)] == 3 * [("finished", "")]
    assert (unseen, seen) == (False, True)
    assert said(killed) == said(lost) == said(calm)
    assert len(said(killed)) == 3 * 200
    for old, new in pairwise(killed.progress):  # what a person watches does not go back
        assert all(a <= b for a, b in zip((*old.rounds, *old.messages), (*new.rounds, *new.messages), strict=True))
    spent = [[status.epsilon_spent for status in each.statuses] for each in (calm, killed, lost)]
    assert spent[0] == spent[1] == spent[2]


async def run_with_a_death(folder: Path, eavesdropper: str, *noise: str, victim: str = "") -> Outcome:
    """A run in which one learner, in a process of its own, may be killed in the middle and started again."""
    spec, halfway = spec_of(), asyncio.Event()

    def look(progress: RunProgress, state: str) -> None:
        if min(progress.rounds) >= 20:
            halfway.set()

    def learners(names: Sequence[str], to: str, listen: str = "127.0.0.1:0") -> AbstractContextManager[Started]:
        named = [part for name in names for part in ("--name", name)]
        return service("learner", *named, "--coordinator", to, "--listen", listen, "--state", str(folder), *noise)

    with ExitStack() as stack:
        _, to = stack.enter_context(service("coordinator", "--eavesdropper", eavesdropper, "--listen", "127.0.0.1:0"))
        stack.enter_context(learners([name for name in NAMES if name != victim], to))
        if not victim:
            return await asyncio.wait_for(run_on_services(to, spec, made_up(spec), look), PATIENCE_S)
        process, address = stack.enter_context(learners([victim], to))
        running = asyncio.ensure_future(run_on_services(to, spec, made_up(spec), look))
        await asyncio.wait_for(halfway.wait(), PATIENCE_S)
        process.send_signal(signal.SIGKILL)
        await asyncio.to_thread(process.wait)
        stack.enter_context(learners([victim], to, address))
        return await asyncio.wait_for(running, PATIENCE_S)


async def run_calmly(folder: Path) -> Outcome:
    async with eavesdropping(folder) as address:
        return await run_with_a_death(folder / "calm", address, "--noise-seed", "same")


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """A run in which nobody dies, for all that one is compared with."""
    return asyncio.run(run_calmly(tmp_path_factory.mktemp("calm")))


@pytest.mark.parametrize("victim", ["ann", "ben", "cleo"])
async def test_a_run_survives_the_death_of_a_learner(calm: Outcome, tmp_path: Path, victim: str) -> None:
    """Who opens its streams, who accepts them, and who does both. With the system's noise a round that is drawn again shows."""
    async with eavesdropping(tmp_path / "killed") as one, eavesdropping(tmp_path / "drawn") as other:
        killed, drawn = await asyncio.gather(
            run_with_a_death(tmp_path / "killed", one, "--noise-seed", "same", victim=victim),
            run_with_a_death(tmp_path / "drawn", other, victim=victim),
        )
    assert [(each.state, each.detail) for each in (calm, killed, drawn)] == 3 * [("finished", "")]
    assert said(killed) == said(calm)
    assert len(said(drawn)) == 3 * 200
    told = [[(status.messages_sent, status.bytes_sent) for status in each.statuses] for each in (calm, killed, drawn)]
    assert told[0] == told[1] == told[2]
    spent = [[status.epsilon_spent for status in each.statuses] for each in (calm, killed, drawn)]
    assert spent[0] == spent[1] == spent[2]


def ended(*arguments: str) -> tuple[int, str]:
    """A service that is refused: its exit code, and what it says."""
    command = [sys.executable, "-m", "sottovoce_client", *arguments, "--log-level", "error"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    return done.returncode, done.stderr.strip().splitlines()[-1]


async def test_only_one_may_be_a_learner_or_a_coordinator(tmp_path: Path) -> None:
    """Others are refused, the learner that dies comes back, and the coordinator serves the next run, too."""
    state, folder = str(tmp_path / "coordinator"), str(tmp_path / "learners")
    with service("coordinator", "--listen", "127.0.0.1:0", "--state", state) as (_, address):
        ben, ann = (("learner", "--name", name, "--coordinator", address, "--state") for name in ("ben", "ann"))
        with service(*ben, folder):
            with service(*ann, folder) as (first, listens):
                spec = small_spec(300, ["ann", "ben"], clock={"mode": "paced", "period_s": 0.02, "deadline_s": 100.0})
                begun = asyncio.Event()
                watch = partial(_tell_when_begun, begun)
                running = asyncio.ensure_future(run_on_services(address, spec, made_up(spec), watch))
                await asyncio.wait_for(begun.wait(), PATIENCE_S)
                elsewhere = await asyncio.to_thread(ended, *ann, str(tmp_path / "elsewhere"))
                second = await asyncio.to_thread(ended, "coordinator", "--listen", "127.0.0.1:0", "--state", state)
                first.send_signal(signal.SIGKILL)
                await asyncio.to_thread(first.wait)
            with service(*ann, folder, "--listen", listens):
                outcome = await asyncio.wait_for(running, PATIENCE_S)
                short = small_spec(5, ["ann", "ben"])
                again = await asyncio.wait_for(
                    run_on_services(address, short, made_up(short), lambda *_: None), PATIENCE_S
                )
    assert elsewhere[0] == 2 and "'ann' has joined with another state folder than this one" in elsewhere[1]
    assert second == (
        2,
        f"sottovoce: another coordinator uses the state folder {state}: stop it, or take another folder",
    )
    assert (outcome.state, outcome.detail) == ("finished", "")
    assert again.state == "finished"


def commanded(*arguments: str) -> tuple[int, str]:
    """A command: its exit code, and what it prints."""
    command = [sys.executable, "-m", "sottovoce_client", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    return done.returncode, done.stdout


@pytest.mark.slow
async def test_a_learner_is_moved_and_restored_as_the_page_says(tmp_path: Path) -> None:
    """docs/operate/backup.md: moved within its run, which goes on; the folder that it left, and a backup, do not speak again."""
    old, new = tmp_path / "old", tmp_path / "new"
    spec = small_spec(150, ["ann", "ben"], clock={"mode": "paced", "period_s": 0.05, "deadline_s": 100.0})
    begun = asyncio.Event()
    with service("coordinator", "--listen", "127.0.0.1:0") as (_, address):
        ann = "learner", "--name", "ann", "--coordinator", address, "--state"
        with service("learner", "--name", "ben", "--coordinator", address, "--state", str(tmp_path / "ben")):
            with service(*ann, str(old)) as (first, listens):
                running = asyncio.ensure_future(
                    run_on_services(address, spec, made_up(spec), partial(_tell_when_begun, begun))
                )
                await asyncio.wait_for(begun.wait(), PATIENCE_S)
                first.send_signal(signal.SIGTERM)
                await asyncio.to_thread(first.wait)
            shutil.copytree(old, new)
            copied = await asyncio.to_thread(ended, *ann, str(new))
            before = await asyncio.to_thread(commanded, "ledger", "--state", str(old), "--json")
            told = await asyncio.to_thread(commanded, "ledger", "--adopt-copy", "--state", str(new), "--learner", "ann")
            after = await asyncio.to_thread(commanded, "ledger", "--state", str(new), "--json")
            with service(*ann, str(new), "--listen", listens):
                outcome = await asyncio.wait_for(running, PATIENCE_S)
            left = await asyncio.to_thread(ended, *ann, str(old))
            charge = "ledger", "--repair", "--state", str(old), "--learner", "ann", "--charge", "1000"
            charged = await asyncio.to_thread(commanded, *charge)
            restored = await asyncio.to_thread(commanded, "ledger", "--state", str(old), "--json")
    assert copied[0] == 2 and "this state folder is a copy" in copied[1]
    assert f"`sottovoce ledger --adopt-copy --state {new} --learner ann`" in copied[1]
    assert told[0] == 0 and f"ann continues from {new}: 1 run," in told[1]
    assert before == after and before[0] == 0
    assert (outcome.state, outcome.detail) == ("finished", "")
    assert outcome.statuses[0].rounds_committed == 150
    assert left[0] == 2 and "the state folder of learner 'ann' is outdated" in left[1]
    assert charged[0] == 0
    spent = [each["epsilon"] for each in json.loads(restored[1])]
    assert spent == [json.loads(before[1])[0]["epsilon"] + 1000]


async def test_a_state_that_was_set_back_where_it_stands_is_refused(tmp_path: Path) -> None:
    """As by a snapshot of the disk: every file has the content that it had some rounds before, and the same incarnation."""
    begun, later, folder = asyncio.Event(), asyncio.Event(), tmp_path / "learners"
    spec = small_spec(2_000, ["ann", "ben"], clock={"mode": "paced", "period_s": 0.02, "deadline_s": 100.0})

    def look(progress: RunProgress, state: str) -> None:
        if min(progress.rounds) >= 5:
            begun.set()
        if min(progress.rounds) >= 40:
            later.set()

    with service("coordinator", "--listen", "127.0.0.1:0") as (_, address):
        ben, ann = (
            ("learner", "--name", name, "--coordinator", address, "--state", str(folder / name))
            for name in ("ben", "ann")
        )
        with service(*ben), service(*ann) as (first, _):
            running = asyncio.ensure_future(run_on_services(address, spec, made_up(spec), look))
            await asyncio.wait_for(begun.wait(), PATIENCE_S)
            earlier = {file: file.read_bytes() for file in (folder / "ann").rglob("*") if file.is_file()}
            await asyncio.wait_for(later.wait(), PATIENCE_S)
            first.send_signal(signal.SIGKILL)
            await asyncio.to_thread(first.wait)
            for file, content in earlier.items():
                file.write_bytes(content)
            code, text = await asyncio.to_thread(ended, *ann)
            running.cancel()
    assert code == 2 and re.search(
        r"'ann' is outdated: it has incarnation 1 and \d+ rounds, and must have 1 and \d\d", text
    )


def _tell_when_begun(begun: asyncio.Event, progress: RunProgress, state: str) -> None:
    if min(progress.rounds) >= 5:
        begun.set()


# ---- live records ----------------------------------------------------------------------------------------------------


async def until_learned(learner: ConnectedLearner) -> AsyncIterator[LearnerStatus]:
    """Looks at a learner until some rounds after the one that took its last record are over, too."""
    last = None
    async for status in learner.watch(0.02):
        yield status
        if last is None and status.records_waiting == 0:
            last = status.rounds_done
        if last is not None and status.rounds_done >= last + 3:
            return


async def test_live_records_are_learned_once_by_a_learner_that_is_killed_while_they_come(tmp_path: Path) -> None:
    """By its log: so many records in all rounds together, and each in one batch that is in keeping."""
    wanted, deaths, state = 600, 3, tmp_path / "state"
    clock = {"mode": "paced", "period_s": 0.02, "window": 5, "deadline_s": 100.0}
    data = {"source": "live", "features": 2, "batch_size": 3}
    spec = small_spec(100_000, NAMES, clock=clock, data=data)
    with ExitStack() as stack:
        _, to = stack.enter_context(service("coordinator", "--listen", "127.0.0.1:0"))
        others = [part for name in ("ann", "cleo") for part in ("--name", name)]
        where = ("--coordinator", to, "--state", str(state))
        stack.enter_context(service("learner", *others, *where))
        own = ("learner", "--name", "ben", *where, "--listen")
        process, address = stack.enter_context(service(*own, "127.0.0.1:0"))
        running = asyncio.ensure_future(run_on_services(to, spec, create_empty_live_data(spec), lambda *_: None))
        async with connect_learner(address, source="stream", patience_s=PATIENCE_S) as learner:

            async def feed() -> None:
                rows = np.arange(2.0 * wanted).reshape(wanted, 2) / wanted
                for first in range(0, wanted, 5):
                    await learner.feed(rows[first : first + 5], rows[first : first + 5, 0] > 1.0)

            feeding = asyncio.ensure_future(feed())
            for death in range(deaths):
                while learner.position < (death + 1) * wanted // (deaths + 1):  # noqa: ASYNC110 - a number is no event
                    await asyncio.sleep(0.005)
                process.send_signal(signal.SIGKILL)
                await asyncio.to_thread(process.wait)
                process, _ = stack.enter_context(service(*own, address))
            await asyncio.wait_for(feeding, PATIENCE_S)
            taken = [each async for each in until_learned(learner)]
            assert taken[-1].records == wanted
    await asyncio.gather(running, return_exceptions=True)  # all were killed
    log = StoredState.read(LearnerPaths(state, "ben")).log
    assert log is not None
    kept = [SampleBatch.FromString(entry.body).positions for entry in log.entries if entry.kind is EntryKind.BATCH]
    assert [place for places in kept for place in places] == list(range(wanted))
    assert sum(said.records for _, said in said_rounds(state, "ben")) == wanted
