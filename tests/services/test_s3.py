"""Captures in a store that speaks S3: a real server on loopback, with users who may do different things."""

from __future__ import annotations

import asyncio
import csv
import json
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from dataclasses import replace
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio

from sottovoce_client.runs.feeder import feed
from sottovoce_core.errors import CaptureError
from sottovoce_core.experiment import PreparedRun, prepare
from sottovoce_eavesdropper import capture_writer
from sottovoce_eavesdropper import parts as capture_parts
from sottovoce_eavesdropper.capture_reader import Capture, find_captures, open_capture
from sottovoce_eavesdropper.parts import format_part_name, parse_part_number
from sottovoce_eavesdropper.service import Eavesdropper, EavesdropperConfig
from sottovoce_eavesdropper.storage import open_folder
from sottovoce_rpc.codec import RoundCodec
from sottovoce_rpc.server import open_channel
from sottovoce_rpc.specs import spec_to_wire
from sottovoce_wire.v1 import coordinator_pb2, coordinator_pb2_grpc
from tests.brokers import free_port
from tests.examples import small_spec
from tests.faults.link import Link
from tests.services.capturing import SHAPES, captured, conversation, frame, row, said_again
from tests.services.network import PATIENCE_S
from tests.services.test_killed import ended, service
from tests.stores import BUCKET, Keys, Store, let, s3

pytestmark = pytest.mark.external

PLACE = f"s3://{BUCKET}/ward"
NAMES = ["ann", "ben", "cleo"]
PORTION = 64
"""Rounds of a batch of a feeder's."""
ROUNDS = 3 * PORTION
_OPENED = "capture opened"
WAYS = [*permutations(range(len(NAMES)), 2)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def store() -> AsyncIterator[Store]:
    async with s3() as up:
        yield up


async def test_what_is_written_there_is_read_there(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    let(monkeypatch, store.writer, store.endpoint)
    monkeypatch.setattr(capture_parts, "MAX_PART_ROWS", 4)
    await captured(f"{PLACE}/one", conversation(5))
    let(monkeypatch, store.reader, store.endpoint)
    (capture,) = await asyncio.to_thread(lambda: list(find_captures(open_folder(PLACE))))
    assert (capture.is_complete, capture.name) == (True, f"{PLACE}/one")
    assert capture.count_messages() == (10, 10 * len(frame(0, 0)))
    whole, parts = await asyncio.to_thread(capture.compute_digests)
    assert whole != parts
    said = (await asyncio.to_thread(capture.read_transcript, SHAPES, 2)).fields["y"]
    np.testing.assert_array_equal(said[:, :, 0, 0], np.arange(5.0)[:, None] * [1, 1])


async def test_what_grew_meanwhile_is_seen(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that was listed or sized a moment ago is taken for what stands there now."""
    let(monkeypatch, store.writer, store.endpoint)
    file = await captured(f"{PLACE}-grows/one", conversation(2), close=False)
    place = open_folder(f"{PLACE}-grows")
    (before,) = list(find_captures(place))
    assert (before.is_complete, before.count_messages()[0]) == (False, 4)
    file.gaps.resume_channel(0, 1, next_round=2, t=9)  # capture.json becomes longer
    for each in conversation(3):
        file.add_row(each)
    await file.close()
    (after,) = list(find_captures(place))
    assert after.count_messages()[0] == 10 and len(after.metadata["gaps"]) == 1


# ---- what is wrong from the start ------------------------------------------------------------------------------------


async def refused(place: str, secret: str) -> str:
    """In which words an eavesdropper does not start."""
    eavesdropper = Eavesdropper(EavesdropperConfig(folder=place))
    with pytest.raises(CaptureError) as said:
        await eavesdropper.start()
    await eavesdropper.stop()
    words = str(said.value)
    assert words.startswith(f"cannot write captures to {place}: ") and "\n" not in words
    assert secret not in words
    return words


async def test_a_bucket_that_is_not_there_is_said_and_not_made(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    let(monkeypatch, store.writer, store.endpoint)
    for _ in range(2):
        assert "bucket does not exist" in await refused("s3://nowhere/captures", store.writer.secret)


async def test_who_may_only_read_is_told_so(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    let(monkeypatch, store.reader, store.endpoint)
    assert "Access Denied" in await refused(PLACE, store.reader.secret)


async def test_credentials_that_are_not_known_are_said(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    let(monkeypatch, Keys("AKIANOBODY", store.writer.secret), store.endpoint)
    assert "Access Key Id" in await refused(PLACE, store.writer.secret)
    let(monkeypatch, Keys(store.writer.key, "another secret"), store.endpoint)
    assert "signature" in await refused(PLACE, "another secret")


def asked_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that is away is asked again once, by other processes, too; boto's usual four times take ten seconds."""
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "2")


async def test_a_store_that_nobody_reaches_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    asked_twice(monkeypatch)
    let(monkeypatch, Keys("AKIA", "secret"), "http://127.0.0.1:9")
    assert "127.0.0.1:9" in await refused(PLACE, "secret")


async def test_a_store_that_may_be_written_is_left_as_it_was(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    let(monkeypatch, store.writer, store.endpoint)
    eavesdropper = Eavesdropper(EavesdropperConfig(folder=f"{PLACE}-empty"))
    await eavesdropper.start()
    await eavesdropper.stop()
    assert open_folder(f"{PLACE}-empty").list_names() == []


# ---- a store that goes away, and comes back --------------------------------------------------------------------------


class Way:
    """To the store, and it can be cut. In a loop of its own: a capture is begun by a call that waits for the store."""

    def __init__(self, target: int) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._link = Link(free_port(), target)
        self.address = self._link.address
        self.mend()

    def mend(self) -> None:
        asyncio.run_coroutine_threadsafe(self._link.start(), self._loop).result()

    def cut(self) -> None:
        asyncio.run_coroutine_threadsafe(self._link.stop(), self._loop).result()

    def end(self) -> None:
        self.cut()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@pytest.fixture
def way(store: Store, monkeypatch: pytest.MonkeyPatch) -> Iterator[Way]:
    """The only one to the store."""
    asked_twice(monkeypatch)
    found = Way(store.port)
    let(monkeypatch, store.writer, f"http://{found.address}")
    yield found
    found.end()


@pytest.mark.slow
async def test_what_a_store_missed_is_written_when_it_is_back(
    store: Store, way: Way, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = conversation(9)
    file = await captured(f"{PLACE}-back/one", rows[:4], close=False)
    way.cut()
    for each in rows[4:6]:  # twice: what waits is not looked at, or counted, again
        file.add_row(each)
        await file.flush()
    assert file.is_open and file.write_error is None
    way.mend()
    for each in rows[6:]:
        file.add_row(each)
    await file.close()
    assert file.write_error is None
    let(monkeypatch, store.reader, store.endpoint)
    capture = open_capture(f"{PLACE}-back/one")
    assert capture.is_complete and capture.read_messages()["payload"].to_pylist() == [each.payload for each in rows]
    assert not any(capture.read_messages()["is_repeat"].to_pylist())
    said = capsys.readouterr()
    assert store.writer.secret not in said.out + said.err


@pytest.mark.slow
async def test_what_waits_for_a_store_is_bounded(store: Store, way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture_writer, "_MAX_BUFFERED_ROWS", 2)
    rows = conversation(4)
    file = await captured(f"{PLACE}-gone/one", rows[:4], close=False)
    way.cut()
    for each in rows[4:]:
        file.add_row(each)
        await file.flush()
    assert not file.is_open and file.write_error is not None and way.address in file.write_error
    assert (file._rows, file._due) == ([], [])
    way.mend()
    await file.close()
    let(monkeypatch, store.reader, store.endpoint)
    capture = open_capture(f"{PLACE}-gone/one")
    assert not capture.is_complete and capture.read_messages()["payload"].to_pylist() == [
        each.payload for each in rows[:4]
    ]


@pytest.mark.slow
async def test_a_store_that_stays_away_ends_a_capture(store: Store, way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    file = await captured(f"{PLACE}-away/one", conversation(2), close=False)
    way.cut()
    file.add_row(row(frame(2, 0)))
    await file.close()
    assert file.write_error is not None and way.address in file.write_error
    let(monkeypatch, store.reader, store.endpoint)
    assert not open_capture(f"{PLACE}-away/one").is_complete


# ---- runs of real processes ------------------------------------------------------------------------------------------


def to_record(capture: str) -> PreparedRun:
    """A run that goes as far as there are records, and its records."""
    clock, data = {"mode": "data", "deadline_s": 100.0}, {"reuse": True}
    return prepare(small_spec(ROUNDS, NAMES, capture=capture, clock=clock, data=data))


class Ward:
    """A coordinator and learners in processes of their own, and an eavesdropper that keeps captures in a store."""

    def __init__(self, stack: ExitStack, folder: Path, place: str) -> None:
        self._stack, self.place, self.log = stack, place, folder / "ear.log"
        self.ear, self._listens = self._overhear("127.0.0.1:0")
        _, self.coordinator = stack.enter_context(
            service("coordinator", "--eavesdropper", self._listens, "--listen", "127.0.0.1:0")
        )
        names = [part for name in NAMES for part in ("--name", name)]
        where = ("--coordinator", self.coordinator, "--state", str(folder), "--noise-seed", "captured")
        stack.enter_context(service("learner", *names, *where))

    def _overhear(self, listen: str) -> tuple[subprocess.Popen[str], str]:
        own = service("eavesdropper", "--folder", self.place, "--listen", listen, log=self.log)
        return self._stack.enter_context(own)

    async def kill_ear(self) -> None:
        """With -9; another one takes its place, and takes the capture up."""
        self.ear.send_signal(signal.SIGKILL)
        await asyncio.to_thread(self.ear.wait)
        before = self.log.read_text().count(_OPENED)
        self.ear, _ = self._overhear(self._listens)
        await self.until_logged(_OPENED, before + 1)

    async def start(self, prepared: PreparedRun) -> coordinator_pb2.Run:
        """Start a run."""
        async with open_channel(self.coordinator) as to:
            told = spec_to_wire(prepared.run.spec)
            request = coordinator_pb2.StartRunRequest(spec=told, n_features=prepared.data.n_features)
            return await coordinator_pb2_grpc.CoordinatorStub(to).StartRun(request, timeout=PATIENCE_S)

    async def feed(self, run: coordinator_pb2.Run, prepared: PreparedRun, rounds: int = ROUNDS) -> None:
        """Bring the records of so many first rounds to all learners, which pass over what they have."""
        learners = zip(run.learners, prepared.data.learners, strict=True)
        parts = ((i.address, replace(own, offsets=own.offsets[: rounds + 1])) for i, own in learners)
        await asyncio.gather(*(feed(address, run.run_id, part) for address, part in parts))

    async def over(self, run: coordinator_pb2.Run) -> coordinator_pb2.Run:
        """The last word on a run."""
        async with open_channel(self.coordinator) as to:
            request = coordinator_pb2.WatchRunRequest(run_id=run.run_id)
            *_, last = [each async for each in coordinator_pb2_grpc.CoordinatorStub(to).WatchRun(request)]
            return last

    async def until_written(self) -> None:
        """Wait until a part is in the store."""

        def written() -> bool:
            captures = find_captures(open_folder(self.place))
            return any(parse_part_number(name) for each in captures for name in each.folder.list_names())

        async with asyncio.timeout(PATIENCE_S):
            while not await asyncio.to_thread(written):  # noqa: ASYNC110 - nobody tells of an object
                await asyncio.sleep(0.1)

    async def until_logged(self, words: str, times: int = 1) -> None:
        """Wait until eavesdroppers have said something so often."""
        async with asyncio.timeout(PATIENCE_S):
            while self.log.read_text().count(words) < times:  # noqa: ASYNC110 - a line in a file is no event
                await asyncio.sleep(0.01)


def heard(capture: Capture) -> dict[tuple[int, int], set[int]]:
    """The rounds that stand in a capture, by sender and receiver."""
    codec, found = RoundCodec(capture.shapes), {way: set[int]() for way in WAYS}
    for said in capture.read_messages(("caller", "callee", "sender", "payload")).to_pylist():
        t, sender, _ = codec.decode(said["payload"])
        found[sender, said["caller"] + said["callee"] - sender].add(t)
    return found


def missing(capture: Capture) -> dict[tuple[int, int], set[int]]:
    """The rounds that it says are missing."""
    found = {way: set[int]() for way in WAYS}
    for gap in capture.metadata["gaps"]:
        for sender, receiver in WAYS:
            if sender == gap["sender"] and receiver == gap.get("receiver", receiver):
                found[sender, receiver] |= set(range(gap["from"], ROUNDS if gap["to"] is None else gap["to"]))
    return found


def require_whole(place: str, *captures: Capture) -> None:
    """Nothing else lies there, and nothing by half."""
    root = open_folder(place)
    assert root.list_names() == sorted(each.name.rsplit("/", 1)[-1] for each in captures)
    for each in captures:
        parts = [name for name in each.folder.list_names() if name != "capture.json"]
        assert parts == [format_part_name(number) for number in range(1, len(parts) + 1)]
        assert each.count_messages()[0] == each.metadata["messages"]  # all parts can be read


async def ours(*arguments: str) -> subprocess.CompletedProcess[str]:
    """What a command of ours says."""
    command = [sys.executable, "-m", "sottovoce_client", *arguments]
    return await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=PATIENCE_S)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["relay", "mirror"])
async def test_a_run_whose_eavesdropper_is_killed_is_there_but_for_gaps_that_are_named(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Beside it lies a run in which nothing happened; an audit and a query read both.

    Their noise has one seed. So an audit refutes both together, for noise that is said again, and where the first is not whole it
    finds nothing against the second: under a fresh seed it would be wrong in that at most once in a hundred times.
    """
    prepared, place = to_record(kind), f"{PLACE}-killed-{kind}"
    let(monkeypatch, store.writer, store.endpoint)
    with ExitStack() as stack:
        ward = Ward(stack, tmp_path, place)
        run = await ward.start(prepared)
        await ward.feed(run, prepared, PORTION)
        await ward.until_written()
        await ward.feed(run, prepared, 2 * PORTION)
        await ward.kill_ear()
        await ward.feed(run, prepared)
        last = [await ward.over(run)]
        run = await ward.start(prepared)
        await ward.feed(run, prepared)
        last.append(await ward.over(run))
    assert [(each.state, each.capture_error) for each in last] == 2 * [(coordinator_pb2.RUN_STATE_FINISHED, "")]

    let(monkeypatch, store.reader, store.endpoint)
    killed, calm = (open_capture(each.capture_location) for each in last)
    require_whole(place, killed, calm)
    every = {way: set(range(ROUNDS)) for way in WAYS}
    assert heard(calm) == every and calm.is_complete and calm.metadata["gaps"] == []
    assert missing(killed) == {way: every[way] - rounds for way, rounds in heard(killed).items()}
    assert killed.is_complete == (not killed.metadata["gaps"])
    assert not said_again(calm)
    said_again(killed)

    sql = "SELECT run, count(*) AS messages FROM messages WHERE kind = 'message' GROUP BY run"
    asked = await ours("transcript", "query", place, sql, "--csv")
    counted = {line["run"]: int(line["messages"]) for line in csv.DictReader(asked.stdout.splitlines())}
    assert counted == {each.metadata["run_id"]: each.metadata["messages"] for each in (killed, calm)}, asked.stderr
    said = {sender: set[int]().union(*(heard(killed)[way] for way in WAYS if way[0] == sender)) for sender, _ in WAYS}
    sent = len(WAYS) * ROUNDS  # an audit leaves a run out of which less was heard
    whole = killed.count_messages()[0] >= sent and all(len(rounds) == ROUNDS for rounds in said.values())
    audit = await ours("audit", "--captures", place, "--out", str(tmp_path / "audit"))
    assert audit.returncode == int(whole), audit.stdout + audit.stderr
    told = json.loads((tmp_path / "audit" / "audit.json").read_text())
    assert told["captures_sha256"] == {
        each.name.removeprefix(f"{place}/"): each.compute_digests()[0] for each in (killed, calm)
    }
    assert ("1 other left out, of which rounds are missing" in told["source"]) != whole


@pytest.mark.slow
async def test_a_store_that_goes_away_in_a_run_and_comes_back_misses_nothing(
    store: Store, way: Way, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared, place = to_record("relay"), f"{PLACE}-away-in-a-run"
    with ExitStack() as stack:
        ward = Ward(stack, tmp_path, place)
        run = await ward.start(prepared)
        await ward.feed(run, prepared, PORTION)
        await ward.until_written()
        way.cut()
        await ward.feed(run, prepared, 2 * PORTION)
        await ward.until_logged("the store of a capture does not answer")
        way.mend()
        await ward.until_logged("the store of a capture answers again")
        await ward.feed(run, prepared)
        last = await ward.over(run)
    assert (last.state, last.capture_error) == (coordinator_pb2.RUN_STATE_FINISHED, "")

    let(monkeypatch, store.reader, store.endpoint)
    capture = open_capture(last.capture_location)
    require_whole(place, capture)
    assert capture.is_complete and not said_again(capture)
    assert heard(capture) == {way: set(range(ROUNDS)) for way in WAYS}
    assert store.writer.secret not in ward.log.read_text()


@pytest.mark.slow
async def test_an_eavesdropper_whose_store_nobody_reaches_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    asked_twice(monkeypatch)
    let(monkeypatch, Keys("AKIA", "secret"), "http://127.0.0.1:9")
    code, line = await asyncio.to_thread(ended, "eavesdropper", "--folder", PLACE, "--listen", "127.0.0.1:0")
    assert code == 2
    assert line.startswith(f"sottovoce: cannot write captures to {PLACE}: ") and "127.0.0.1:9" in line
