"""Captures: where they lie, what a crash leaves, and what is refused of files that anybody may have written."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sottovoce_core.algorithms.interface import Message
from sottovoce_core.errors import CaptureError, EquivocationError, SpecError
from sottovoce_eavesdropper import CAPTURE_FORMAT, capture_reader, capture_writer, parts, storage
from sottovoce_eavesdropper.capture_reader import Capture, open_capture
from sottovoce_eavesdropper.capture_session import CaptureSession, Participants, compute_sent_rounds
from sottovoce_eavesdropper.parts import build_schema
from sottovoce_rpc.tasks import Tasks
from sottovoce_wire.v1 import eavesdropper_pb2
from tests.services.capturing import METHOD, SHAPES, captured, conversation, encode_round, frame, hello, row
from tests.services.network import PATIENCE_S

pytestmark = pytest.mark.each

PART = "part-000001.parquet"


def memory_url() -> str:
    return f"memory://captures-{uuid.uuid4().hex}/cap"


async def test_what_passed_on_each_way_is_counted(tmp_path: Path) -> None:
    size = len(frame(0, 0))
    file = await captured(tmp_path / "cap", conversation(5))
    assert file.channel_traffic == {(0, 1): (5, 5 * size), (1, 0): (5, 5 * size)}
    nobody = await captured(tmp_path / "foreign", conversation(5), fields={})
    assert nobody.channel_traffic == {}


# ---- where they lie --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("remote", [False, True])
async def test_what_is_written_is_read_anywhere(tmp_path: Path, remote: bool) -> None:
    place = memory_url() if remote else str(tmp_path / "cap")
    await captured(place, conversation(5), world=1, replica=7)
    capture = open_capture(place)
    table = capture.read_messages()
    assert (capture.is_complete, capture.name) == (True, place)
    assert table.column_names == build_schema().names
    assert {name: set(table[name].to_pylist()) for name in ("run", "world", "replica", "connection", "method")} == {
        "run": {"run-1"},
        "world": {1},
        "replica": {7},
        "connection": {1},
        "method": {METHOD},
    }
    assert capture.count_messages() == (10, 10 * len(frame(0, 0)))
    said = capture.read_transcript(SHAPES, 2).fields["y"]
    np.testing.assert_array_equal(said[:, :, 0, 0], np.arange(5.0)[:, None] * [1, 1])


async def test_a_run_without_labels_says_so(tmp_path: Path) -> None:
    await captured(tmp_path, conversation(1))
    assert set(open_capture(tmp_path).read_messages()["world"].to_pylist()) == {-1}


async def test_a_path_needs_no_fsspec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fsspec", None)
    await captured(tmp_path, conversation(1))
    assert open_capture(tmp_path).count_messages()[0] == 2
    with pytest.raises(SpecError, match=r"needs fsspec: in a clone of the repository, pip install '\.\[audit\]'"):
        open_capture("memory://x")


def test_a_place_that_nobody_knows_is_refused() -> None:
    with pytest.raises(CaptureError, match="cannot open the location of captures nowhere://x"):
        storage.open_folder("nowhere://x")


@pytest.mark.parametrize("scheme", ["memory", "other"])
def test_a_file_is_there_whole_or_not_at_all(monkeypatch: pytest.MonkeyPatch, scheme: str) -> None:
    """A file system gets a rename; an object store one put, under the name itself."""
    fsspec = pytest.importorskip("fsspec")
    files = fsspec.filesystem("memory")
    done: list[tuple[str, str]] = []

    def noting(name: str, own: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: str, *arguments: Any, **more: Any) -> Any:
            done.append((name, path))
            return own(path, *arguments, **more)

        return call

    for name in ("pipe_file", "mv"):
        monkeypatch.setattr(files, name, noting(name, getattr(files, name)))
    folder = storage.RemoteFolder(files, f"/{uuid.uuid4().hex}", scheme)
    folder.write("a", b"x")
    wanted = ["a"] if scheme == "memory" else ["a.partial", "a.partial"]
    assert [(name, path.rsplit("/", 1)[1]) for name, path in done] == list(
        zip(["pipe_file", "mv"], wanted, strict=False)
    )
    assert folder.list_names() == ["a"]


def test_an_error_of_a_store_is_an_error_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    fsspec = pytest.importorskip("fsspec")

    def refuse(*arguments: Any) -> None:
        raise RuntimeError("no credentials")

    files = fsspec.filesystem("memory")
    monkeypatch.setattr(files, "pipe_file", refuse)
    with pytest.raises(OSError, match="RuntimeError: no credentials"):
        storage.RemoteFolder(files, "/x", "memory").write("a", b"x")


# ---- parts, and crashes ----------------------------------------------------------------------------------------------


def part_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("part-*.parquet"))


async def test_parts_are_of_bounded_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "MAX_PART_ROWS", 4)
    await captured(tmp_path, conversation(5))
    counts = [pq.ParquetFile(path).metadata.num_rows for path in part_files(tmp_path)]
    assert counts == [4, 4, 2]
    monkeypatch.setattr(parts, "MAX_PART_ROWS", 100)
    monkeypatch.setattr(parts, "MAX_PART_BYTES", 100)
    assert [len(own) for own in parts.split_into_parts([row(bytes(60)) for _ in range(5)])] == [2, 2, 1]


WRITER = """
import asyncio, sys
from tests.services.capturing import captured, row, frame
from sottovoce_eavesdropper import capture_writer as writing
writing._PART_INTERVAL_S, writing.parts.MAX_PART_ROWS = 0.05, 50
async def main():
    file = await captured(sys.argv[1], [], close=False)
    task = asyncio.ensure_future(file.write_parts())
    for t in range(10**9):
        file.add_row(row(frame(t, 0)))
        if t % 20 == 0:
            await asyncio.sleep(0.001)
asyncio.run(main())
"""


def test_a_killed_eavesdropper_leaves_readable_files(tmp_path: Path) -> None:
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path / "cap")], cwd=Path(__file__).parents[2])
    try:
        until = time.monotonic() + PATIENCE_S
        while len(part_files(tmp_path / "cap")) < 5:
            assert time.monotonic() < until
            time.sleep(0.01)
    finally:
        writer.kill()
        writer.wait()
    capture = open_capture(tmp_path / "cap")
    assert not capture.is_complete
    said = capture.read_messages()["payload"].to_pylist()
    assert len(said) >= 5 * 20
    assert said == [frame(t, 0) for t in range(len(said))]  # from the first on, nothing left out


async def test_a_part_that_is_being_written_is_finished_before_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cancelling the writer must not leave a thread behind that writes after the capture is said to be complete."""
    file = await captured(tmp_path, [], close=False)
    own = file.storage_folder.write

    def slow(name: str, content: bytes) -> None:
        time.sleep(0.1)
        own(name, content)

    monkeypatch.setattr(file.storage_folder, "write", slow)
    for each in conversation(3):
        file.add_row(each)
    flushing = asyncio.ensure_future(file.flush())
    await asyncio.sleep(0.02)
    flushing.cancel()
    await file.close()
    assert open_capture(tmp_path).count_messages()[0] == 6


async def test_a_part_is_due_a_second_after_the_last_one_was_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long that took to be written: what a killed eavesdropper loses is not that much more."""
    file, loop = await captured(tmp_path / "cap", [], close=False), asyncio.get_running_loop()
    begun, due, enough = [loop.time()], list[float](), asyncio.Event()

    async def flush(_: capture_writer.CaptureWriter) -> None:
        begun.append(loop.time())
        await asyncio.sleep(0.05)
        file._full.set()

    def until(when: float) -> asyncio.Timeout:
        due.append(when)
        if len(due) == 4:
            enough.set()
        return asyncio.Timeout(None)

    monkeypatch.setattr(capture_writer.CaptureWriter, "flush", flush)
    monkeypatch.setattr(asyncio, "timeout_at", until)
    file._full.set()
    async with asyncio.timeout(PATIENCE_S):
        running = asyncio.ensure_future(file.write_parts())
        await enough.wait()
        running.cancel()
        await asyncio.wait([running])
    monkeypatch.undo()
    assert all(when <= since + capture_writer._PART_INTERVAL_S for when, since in zip(due[1:], begun[1:], strict=False))
    await file.close()


# ---- hostile and mutilated -------------------------------------------------------------------------------------------


def rewritten(folder: Path, change: Callable[[pa.Table], pa.Table], **more: Any) -> None:
    table = change(pq.read_table(folder / PART))
    pq.write_table(table, folder / PART, compression="zstd", **more)


def replaced(name: str, values: Any) -> Callable[[pa.Table], pa.Table]:
    def change(table: pa.Table) -> pa.Table:
        return table.set_column(table.column_names.index(name), name, values(table) if callable(values) else values)

    return change


MUTILATED: dict[str, tuple[Callable[[Path], object], str]] = {
    "empty": (lambda folder: (folder / PART).write_bytes(b""), f"{PART}"),
    "text": (lambda folder: (folder / PART).write_text("no parquet at all"), f"{PART}"),
    "truncated": (lambda folder: (folder / PART).write_bytes((folder / PART).read_bytes()[:-40]), f"{PART}"),
    "beheaded": (lambda folder: (folder / PART).write_bytes((folder / PART).read_bytes()[400:]), f"{PART}"),
    "another table": (lambda folder: pq.write_table(pa.table({"a": [1]}), folder / PART), "is not a part of a capture"),
    "no payload": (
        lambda folder: rewritten(folder, lambda t: t.drop_columns(["payload"])),
        "column.s. payload missing",
    ),
    "another type": (
        lambda folder: rewritten(folder, replaced("size", lambda t: t["size"].cast(pa.float64()))),
        "column.s. size missing or of another type",
    ),
    "another type of a mark": (
        lambda folder: rewritten(folder, replaced("is_repeat", lambda t: t["is_repeat"].cast(pa.int8()))),
        "column.s. is_repeat missing or of another type",
    ),
    "null": (
        lambda folder: rewritten(folder, replaced("payload", pa.array([None] * 10, pa.binary()))),
        "'payload' must hold a value in every row",
    ),
    "another size": (
        lambda folder: rewritten(folder, replaced("size", pa.array([1] * 10, pa.int64()))),
        "'size' must hold the length of the payload",
    ),
    "long text": (
        lambda folder: rewritten(folder, replaced("method", pa.array(["x" * 5_000] * 10))),
        "'method' must hold text of at most 4096 bytes, got 5000",
    ),
    "no text": (
        lambda folder: rewritten(folder, replaced("method", pa.array([b"\xff\xfe"] * 10).view(pa.string()))),
        "UTF8|utf8|utf-8",
    ),
    "missing part": (
        lambda folder: (folder / PART).rename(folder / "part-000002.parquet"),
        "must have part-000001.parquet",
    ),
    "no part": (lambda folder: (folder / PART).unlink(), "must have 10 messages, got 0: parts are missing"),
    "fewer rows": (
        lambda folder: rewritten(folder, lambda t: t.slice(3)),
        "must have 10 messages, got 7: parts are missing",
    ),
    "a row twice": (
        lambda folder: rewritten(folder, lambda t: pa.concat_tables([t, t.slice(9)])),
        "must have 10 messages, got 11: it is damaged, or was changed",
    ),
}


@pytest.mark.parametrize("name", [PART, "capture.json"])
async def test_what_is_no_regular_file_is_refused_and_not_waited_for(tmp_path: Path, name: str) -> None:
    await captured(tmp_path, conversation(5))
    (tmp_path / name).unlink()
    os.mkfifo(tmp_path / name)
    with pytest.raises(CaptureError, match="not a regular file"):
        open_capture(tmp_path).count_messages()


@pytest.mark.parametrize("what", MUTILATED)
async def test_a_mutilated_capture_is_refused_in_one_line(tmp_path: Path, what: str) -> None:
    mutilate, wanted = MUTILATED[what]
    await captured(tmp_path, conversation(5))
    mutilate(tmp_path)
    with pytest.raises(CaptureError, match=wanted) as refusal:
        list(open_capture(tmp_path).read_batches())
    assert str(tmp_path) in str(refusal.value)
    assert "\n" not in str(refusal.value)


DESCRIPTIONS: dict[str, Any] = {
    "nothing": None,
    "no JSON": "{",
    "deep": "[" * 200_000,
    "a list": [],
    "another format": {"format": "x"},
    "no keys": {"format": CAPTURE_FORMAT},
    "other types": {"run_id": 3},
    "a world in words": {"world": "one"},
    "a replica in words": {"replica": "0"},
    "findings in words": {"detections": "none"},
    "fields in words": {"fields": {"y": "three numbers"}},
    "fields of less than nothing": {"fields": {"y": [-1]}},
    "fields that overflow": {"fields": {"y": [2**62, 4]}},
    "fields that overflow to nothing": {"fields": {"y": [2**30, 2**30, 2**30, 0]}},
    "fields of many axes": {"fields": {"y": [1] * 9}},
    "too many fields": {"fields": {f"y{k}": [] for k in range(257)}},
}


@pytest.mark.parametrize("what", DESCRIPTIONS)
async def test_a_description_that_says_something_else_is_refused(tmp_path: Path, what: str) -> None:
    await captured(tmp_path, conversation(1))
    path, said = tmp_path / "capture.json", DESCRIPTIONS[what]
    if isinstance(said, dict) and "format" not in said:
        said = {**json.loads(path.read_text()), **said}
    path.unlink()
    if said is not None:
        path.write_text(said if isinstance(said, str) else json.dumps(said))
    with pytest.raises(CaptureError, match=str(tmp_path)) as refusal:
        open_capture(tmp_path)
    assert "\n" not in str(refusal.value)


async def test_a_bomb_is_refused_by_its_footer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Megabytes of zeros in a file of some kilobytes: refused before any of it is unpacked."""
    monkeypatch.setattr(parts, "MAX_UNPACKED_BYTES", 8 * parts.MIB)
    await captured(tmp_path, conversation(5))
    rewritten(tmp_path, replaced("payload", pa.array([bytes(parts.MIB)] * 10, pa.binary())), use_dictionary=False)
    assert (tmp_path / PART).stat().st_size < parts.MIB / 16
    pool = pa.default_memory_pool()
    before = pool.bytes_allocated()
    with pytest.raises(CaptureError, match="must unpack to at most 8388608 bytes, its footer says 104"):
        open_capture(tmp_path).count_messages()
    assert pool.bytes_allocated() - before < parts.MIB


async def test_a_long_value_said_often_is_refused_before_it_is_repeated(tmp_path: Path) -> None:
    """Its footer looks harmless: a dictionary of one value, and rows that all point to it."""
    await captured(tmp_path, conversation(5))
    one = pq.read_table(tmp_path / PART).slice(0, 1)
    table = pa.concat_tables([one] * 5_000).combine_chunks()
    index = pa.array(np.zeros(5_000, np.int32))
    long = pa.DictionaryArray.from_arrays(index, pa.array([bytes(parts.MIB)], pa.binary()))
    pq.write_table(table.set_column(table.column_names.index("payload"), "payload", long), tmp_path / PART)
    footer = pq.ParquetFile(tmp_path / PART).metadata
    assert sum(footer.row_group(k).total_byte_size for k in range(footer.num_row_groups)) < 2 * parts.MIB
    pool = pa.default_memory_pool()
    with pytest.raises(CaptureError, match="must unpack to at most"):
        list(open_capture(tmp_path).read_batches())
    assert pool.bytes_allocated() < 64 * parts.MIB


async def test_too_many_rows_and_too_large_a_file_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    await captured(tmp_path, conversation(5))
    monkeypatch.setattr(parts, "MAX_ROWS", 9)
    with pytest.raises(CaptureError, match="at most 9 rows"):
        open_capture(tmp_path).count_messages()
    monkeypatch.setattr(parts, "MAX_FILE_BYTES", 100)
    with pytest.raises(CaptureError, match="at most 100 bytes"):
        open_capture(tmp_path).count_messages()


def judged(folder: Path) -> str:
    """How reading ends: in words or well, never otherwise."""
    try:
        open_capture(folder).read_transcript(SHAPES, 2)
    except (CaptureError, EquivocationError) as error:
        return str(error)
    return ""


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sound")
    asyncio.run(captured(folder, conversation(5)))
    return folder


@given(st.integers(0, 1 << 30), st.integers(1, 255), st.booleans())
def test_any_flipped_byte_is_refused_or_harmless(sound: Path, at: int, flip: int, cut: bool) -> None:
    """No crash, no other error."""
    path = sound / PART
    whole = path.read_bytes()
    broken = bytearray(whole[: at % len(whole)] if cut else whole)
    if not cut:
        broken[at % len(whole)] ^= flip
    try:
        path.write_bytes(bytes(broken))
        assert "\n" not in judged(sound)
    finally:
        path.write_bytes(whole)


# ---- messages --------------------------------------------------------------------------------------------------------


async def transcript_of(folder: Path, rows: list[Any], learners: int = 2) -> Any:
    await captured(folder, rows)
    return open_capture(folder).read_transcript(SHAPES, learners)


async def test_the_order_of_records_does_not_matter(tmp_path: Path) -> None:
    rows = conversation(6)
    usual = await transcript_of(tmp_path / "a", rows)
    turned = await transcript_of(tmp_path / "b", rows[::-1])
    np.testing.assert_array_equal(usual.fields["y"], turned.fields["y"])


async def test_hellos_are_neither_rounds_nor_messages(tmp_path: Path) -> None:
    """They are recorded, and counted apart."""
    greetings = [row(hello(i), i, 1 - i, kind="hello") for i in range(2)]
    await captured(tmp_path, [*greetings, *conversation(3)])
    capture = open_capture(tmp_path)
    assert (
        (capture.metadata["messages"], capture.metadata["bytes"])
        == capture.count_messages()
        == (6, 6 * len(frame(0, 0)))
    )
    assert capture.read_messages().num_rows == 6 and capture.shapes == SHAPES
    assert [kind for batch in capture.read_batches(["kind"]) for kind in batch["kind"].to_pylist()].count("hello") == 2
    assert capture.read_transcript(SHAPES, 2).rounds == 3


async def test_a_capture_of_an_older_format_is_refused(tmp_path: Path) -> None:
    await captured(tmp_path, conversation(1))
    path = tmp_path / "capture.json"
    path.write_text(path.read_text().replace(CAPTURE_FORMAT, "sottovoce-capture-2"))
    with pytest.raises(CaptureError, match="is not a capture of a known format \\(sottovoce-capture-3\\)"):
        open_capture(tmp_path)


async def test_other_methods_are_no_rounds(tmp_path: Path) -> None:
    rows = [*conversation(2), row(b"\x00 no round", method="/grpc.health.v1.Health/Check")]
    assert (await transcript_of(tmp_path, rows)).rounds == 2


@pytest.mark.parametrize(
    ("payload", "wanted"),
    [
        (b"", "expected a round of 42 bytes, .* got another message"),
        (hello(0), "expected a round of 42 bytes, .* got another message"),
        (b"\xff" * 42, "got 42 bytes that cannot be decoded"),
        (frame(0, 1), "must send as itself, .* got learner 1 in round 0 from learner 0"),
        (frame(2**60, 0), f"in one of {capture_reader.MAX_ROUNDS} rounds, got learner 0 in round {2**60}"),
        (encode_round(0, 0, Message({"y": np.zeros(4)})), "got one of 50 bytes"),
    ],
)
async def test_a_message_of_another_kind_is_named(tmp_path: Path, payload: bytes, wanted: str) -> None:
    with pytest.raises(CaptureError, match=wanted) as refused:
        await transcript_of(tmp_path, [*conversation(2), row(payload)])
    assert str(tmp_path) in str(refused.value) and "may be damaged, or was changed" in str(refused.value)


async def test_two_different_messages_of_one_round(tmp_path: Path) -> None:
    with pytest.raises(EquivocationError, match="learner 0 sent two different messages in round 1"):
        await transcript_of(tmp_path, [*conversation(2), row(frame(1, 0, 7.0))])


async def test_a_learner_that_there_is_not(tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match=r"each of 2 learners must send as itself, .* got learner 5"):
        await transcript_of(tmp_path, [*conversation(2), row(frame(0, 5), 5, 1)])


async def test_memory_does_not_grow_with_what_is_repeated(tmp_path: Path) -> None:
    """Each message to many neighbours, in many parts: batches of `parts.BATCH` rows, and each round kept once."""
    rows = [each for each in conversation(40) for _ in range(100)]
    await captured(tmp_path, rows)
    capture: Capture = open_capture(tmp_path)
    sizes = [batch.num_rows for batch in capture.read_batches(("payload",))]
    assert max(sizes) <= parts.BATCH_ROWS
    assert sum(sizes) == 8_000
    assert capture.read_transcript(SHAPES, 2).rounds == 40


async def test_relays_are_led_though_whoever_asked_gave_up_before() -> None:
    """The disk was slow, and the coordinator asks again: addresses are written down by then, and relays lead elsewhere."""
    written, led = asyncio.Event(), list[str]()

    async def lead(target: str) -> None:
        led.append(target)

    file: Any = SimpleNamespace(
        routes=[{"caller": 0, "callee": 1, "target": "", "address": "a:1"}], write_metadata=written.wait
    )
    relay: Any = SimpleNamespace(redirect=lead)
    recording = CaptureSession(file, [relay], Tasks(), Participants.from_spec("{}"))
    routes = [eavesdropper_pb2.Route(caller=0, callee=1, target="b:2")]
    asked = asyncio.ensure_future(recording.redirect_routes(routes))
    await asyncio.sleep(0)
    asked.cancel()
    await asyncio.wait([asked])
    await recording.redirect_routes(routes)
    assert led == ["b:2"]


@pytest.mark.parametrize("close", [True, False])
async def test_a_capture_knows_how_far_each_learner_was(tmp_path: Path, *, close: bool) -> None:
    """By its last round, though older ones were sent again behind it; not by what is no message of the run, or of another one."""
    spec = json.dumps({"learners": ["ann", "ben", "cleo"], "rounds": 20})
    talk = conversation(9)
    file = await captured(tmp_path / "c", talk[:-1], close=False, spec=spec)
    for each in (
        row(frame(7, 0), 0, 1, stream=2, at=99),
        row(frame(15, 0), 1, 0, at=99),
        row(frame(25, 1), 1, 0, at=99),
        row(frame(16, 1), 1, 0, at=99, method="/other"),
        row(b"nothing", 0, 1, at=99),
    ):
        file.add_row(each)
    await (file.close() if close else file.flush())
    assert compute_sent_rounds(open_capture(tmp_path / "c")) == {0: (9, 8 * 10**9), 1: (8, 7 * 10**9)}
