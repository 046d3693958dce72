"""Feeders into a real learner: each record once, what is none written down, and nothing lost."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import stat
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import structlog.testing
from rich.console import Console
from typer.testing import CliRunner

from sottovoce_client import terminal
from sottovoce_client.cli import app
from sottovoce_client.feeding.feeder import (
    MAX_LEADING_REFUSALS,
    FeedOptions,
    FeedTarget,
    _open_dead_letters,
    feed,
    watch_run,
)
from sottovoce_client.feeding.files import build_file_partitions
from sottovoce_client.feeding.progress import FeedCounters, _build_facts, _render, _render_summary, run_feeder
from sottovoce_client.feeding.records import SourceMessage, SourcePartition
from sottovoce_client.live.connect import connect_learner
from sottovoce_client.live.learner import ConnectedLearner
from sottovoce_core.errors import DataError, FailedPrecondition, SottovoceError, SpecError, Unavailable
from sottovoce_learner.storage.ledger import StoredState
from sottovoce_learner.storage.state_folder import LearnerPaths
from sottovoce_learner.storage.wal import EntryKind
from sottovoce_rpc.learner_status import LearnerStatus
from sottovoce_wire.v1 import coordinator_pb2, coordinator_pb2_grpc
from sottovoce_wire.v1.learner_pb2 import SampleBatch
from tests.client.test_live_learner import NAMES, RECORD, SCHEMA, ann_in, learned, spec_of
from tests.services.network import PATIENCE_S, Network, network

SECRET = 31_337
LINE = json.dumps(RECORD)


class Told:
    """A part that gives what it is told to, and remembers what it may forget."""

    name = "told"

    def __init__(self, *messages: SourceMessage, then: SottovoceError | None = None, ends: bool = True) -> None:
        self.messages, self.then, self.ends, self.kept = messages, then, ends, list[int]()
        self.after = -2

    async def read(self, after: int) -> AsyncIterator[Sequence[SourceMessage]]:
        self.after = after
        for each in self.messages:
            yield [each]
        if self.then is not None:
            raise self.then
        if not self.ends:
            await asyncio.Event().wait()

    async def acknowledge(self, position: int) -> None:
        self.kept.append(position)


async def fed(up: Network, *parts: SourcePartition, terms: FeedOptions | None = None, **more: Any) -> FeedCounters:
    account = FeedCounters()
    target = FeedTarget(up.addresses["ann"], **{"patience_s": 20.0, **more})
    await feed(parts, target, terms or FeedOptions(), account, asyncio.Event())
    return account


@asynccontextmanager
async def ann(folder: Path) -> AsyncIterator[tuple[Network, ConnectedLearner]]:
    async with ann_in(folder, spec_of({"schema": SCHEMA})) as found:
        yield found


def good(*positions: int) -> list[SourceMessage]:
    return [SourceMessage(dict(RECORD), position) for position in positions]


def letters(path: Path) -> list[tuple[str, int, str, Any]]:
    """Source, position, reason and message of each."""
    found = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [(each["source"], each["position"], each["reason"], each["message"]) for each in found]


def kept_positions(state: Path, name: str, source: str) -> list[int]:
    """Of a source's records, as they stand in a learner's log."""
    log = StoredState.read(LearnerPaths(state, name)).log
    assert log is not None
    batches = [SampleBatch.FromString(each.body) for each in log.entries if each.kind is EntryKind.BATCH]
    return [place for batch in batches if batch.source == source for place in batch.positions]


# ---- the pump --------------------------------------------------------------------------------------------------------


async def test_records_are_fed_once_and_the_rest_is_written_down_once(tmp_path: Path) -> None:
    dead = tmp_path / "dead.jsonl"
    terms = FeedOptions(dead_letters=dead)
    messages = [
        *good(1),
        SourceMessage({**RECORD, "age": SECRET}, 4),
        SourceMessage(b"\xff\x00", 5),
        *good(7),
        SourceMessage({**RECORD, "age": float("nan")}, 9),
    ]
    async with ann(tmp_path) as (up, learner):
        first, again = Told(*messages), Told(*messages, *good(12), SourceMessage(b"[]", 13))
        account = await fed(up, first, terms=terms)
        assert (account.records_fed, account.duplicate_count, account.dropped_count, account.messages_waiting) == (
            2,
            0,
            0,
            0,
        )
        assert account.refusals == {"age: beyond its bounds": 1, "not UTF-8": 1, "age: not a finite number": 1}
        assert first.kept == sorted(first.kept) and first.kept[-1] == 9
        account = await fed(up, again, terms=terms)
        assert (again.after, account.records_fed, account.duplicate_count, account.already_written_count) == (
            7,
            1,
            4,
            1,
        )
        await learned(learner, 3)
    assert letters(dead) == [
        ("told", 4, "age: beyond its bounds", {**RECORD, "age": SECRET}),
        ("told", 5, "not UTF-8", {"base64": "/wA="}),
        ("told", 9, "age: not a finite number", {**RECORD, "age": "nan"}),
        ("told", 13, "not a JSON object", "[]"),
    ]
    assert stat.S_IMODE(dead.stat().st_mode) == 0o600


async def test_without_a_file_what_is_none_is_dropped_and_counted(tmp_path: Path) -> None:
    async with ann(tmp_path) as (up, _):
        part = Told(*good(1), SourceMessage(b"", 2), *good(3), SourceMessage(b"", 4))
        account = await fed(up, part)
        assert (account.records_fed, account.dropped_count) == (2, 2)
        assert part.kept[-1] == 4
        account = await fed(up, part)
        assert (account.records_fed, account.duplicate_count, account.dropped_count) == (0, 3, 1)


async def test_a_source_of_which_nothing_fits_keeps_all_of_it(tmp_path: Path) -> None:
    async with ann(tmp_path) as (up, _):
        few, many = (
            Told(SourceMessage({"age": SECRET}, 0)),
            Told(*(SourceMessage({"age": SECRET}, n) for n in range(2 * MAX_LEADING_REFUSALS))),
        )
        assert (await fed(up, few)).dropped_count == 1 and few.kept == []
        with pytest.raises(
            DataError, match=r"none of the first \d+ messages of told .* age: beyond its bounds"
        ) as error:
            await fed(up, many)
        assert many.kept == [] and str(SECRET) not in str(error.value)
        assert (
            await fed(up, many, terms=FeedOptions(dead_letters=tmp_path / "dead"))
        ).refusals.total() == 2 * MAX_LEADING_REFUSALS
        assert many.kept[-1] == 2 * MAX_LEADING_REFUSALS - 1


async def test_what_was_read_before_a_source_failed_is_fed(tmp_path: Path) -> None:
    async with ann(tmp_path) as (up, learner):
        endless, failing = Told(*good(1), ends=False), Told(*good(1, 2, 3), then=Unavailable("the broker is away"))
        endless.name = "endless"
        with pytest.raises(Unavailable, match="the broker is away"):
            await fed(up, endless, failing)
        assert (failing.kept[-1], endless.kept) == (3, [1])
        await learned(learner, 4)


async def test_a_feeder_that_is_told_to_end_feeds_what_it_has_read(tmp_path: Path) -> None:
    async with ann(tmp_path) as (up, learner):
        part, account, stop = Told(*good(*range(3_000)), ends=False), FeedCounters(), asyncio.Event()
        feeding = asyncio.ensure_future(feed([part], FeedTarget(up.addresses["ann"]), FeedOptions(), account, stop))
        await learned_some(learner)
        stop.set()
        await feeding
        status = await learner.fetch_status()
        assert (account.messages_waiting, account.records_fed) == (0, status.records) and part.kept[
            -1
        ] == status.records - 1


async def learned_some(learner: ConnectedLearner, least: int = 1) -> None:
    async for status in learner.watch(0.01):
        if status.records >= least:
            return


async def test_what_cannot_be_fed_is_said(tmp_path: Path) -> None:
    async with ann(tmp_path) as (up, _):
        with pytest.raises(SpecError, match="got two named 'a/told'"):
            await fed(up, Told(), Told(), source="a")
        paths = [tmp_path / f"{n}.csv" for n in range(257)]
        for each in paths:
            each.touch()
        with pytest.raises(SpecError, match="at most 256 sources"):
            await fed(up, *build_file_partitions(paths))
        with pytest.raises(SpecError, match="--map names a field"):
            await fed(up, Told(), terms=FeedOptions(maps=["weight=w"]))
        with (
            _open_dead_letters(tmp_path / "dead"),
            pytest.raises(FailedPrecondition, match="another feeder writes dead letters"),
        ):
            await fed(up, Told(), terms=FeedOptions(dead_letters=tmp_path / "dead"))
        (tmp_path / "mine").write_text("precious\n")
        with pytest.raises(DataError, match="has a line 1 that no feeder wrote"):
            await fed(up, Told(), terms=FeedOptions(dead_letters=tmp_path / "mine"))
        assert (tmp_path / "mine").read_text() == "precious\n"


async def test_half_a_dead_letter_is_cut_off(tmp_path: Path) -> None:
    with _open_dead_letters(tmp_path / "dead") as dead:
        assert await dead.write("run", "a", [(SourceMessage(b"1", 3), "why"), (SourceMessage(b"2", 3), "why")]) == 0
    with (tmp_path / "dead").open("a") as file:
        file.write('{"run": "ru' + "n" * 100_000)
    with _open_dead_letters(tmp_path / "dead") as dead:
        for run, source, written in (("run", "b", 0), ("other", "a", 0), ("run", "a", 2), ("run", "a", 0)):
            assert (
                await dead.write(run, source, [(SourceMessage(b"2", 3), "why"), (SourceMessage(b"1", 3), "why")])
                == written
            )
    assert len(letters(tmp_path / "dead")) == 2 + 6


async def test_what_waits_at_the_learner_is_said_in_the_end(tmp_path: Path) -> None:
    """As it is then, and not when it was last looked at."""
    clock = {"mode": "paced", "period_s": 100.0, "deadline_s": 1_000.0}
    async with network(tmp_path, NAMES) as up:
        await up.start(spec_of({"schema": SCHEMA, "batch_size": 1}, clock=clock), 4)
        account = await fed(up, Told(*good(1, 2, 3)))
    assert account.status is not None and account.status.records_waiting >= 2
    lines = [line.plain for line in _render_summary(account, 1.0)]
    assert any(re.search(r"At ann \d records still wait for a round", line) for line in lines)


async def test_a_run_that_ends_ends_its_feeders(tmp_path: Path) -> None:
    async with network(tmp_path, NAMES) as up:
        spec = spec_of({"schema": SCHEMA}, rounds=100)
        await up.start(spec, 4)
        with pytest.raises(FailedPrecondition, match=r"takes no more records: finished"):
            await fed(up, Told(*good(1), ends=False))
        await up.start_another(spec_of({"schema": SCHEMA}), 4)
        part = Told(*good(1))
        assert ((await fed(up, part)).records_fed, part.after) == (1, -1)


async def test_a_learner_that_stays_away_ends_its_feeders(tmp_path: Path) -> None:
    async with ann(tmp_path) as (up, learner):
        feeding = asyncio.ensure_future(fed(up, Told(*good(1), ends=False), patience_s=0.5))
        await learned_some(learner)
        await up.leave("ann")
        with pytest.raises(Unavailable):
            await feeding


async def test_many_files_and_a_map(tmp_path: Path) -> None:
    lines = [{"patient": {"age": n}, "ward": "icu", "outcome": "home", "seen": n} for n in range(30)]
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    async with ann(tmp_path) as (up, learner):
        terms = FeedOptions(maps=["age=patient.age"], ignore_unknown=True)
        parts = build_file_partitions([tmp_path / "a.jsonl", tmp_path / "b.jsonl"])
        account = await fed(up, *parts, terms=terms, source="ward")
        assert (account.records_fed, account.sources) == (60, {"ward/a.jsonl", "ward/b.jsonl"})
        assert (await fed(up, *parts, terms=terms, source="ward")).records_fed == 0
        await learned(learner, 60)


# ---- the command -----------------------------------------------------------------------------------------------------


def command(up: Network, *arguments: str, **more: Any) -> subprocess.Popen[str]:
    line = [sys.executable, "-m", "sottovoce_client", "feed", *arguments, "--learner", up.addresses["ann"]]
    pipe = subprocess.PIPE
    return subprocess.Popen(line, stdin=pipe, stdout=pipe, stderr=pipe, text=True, **more)


async def ended(process: subprocess.Popen[str], given: str | None = None) -> tuple[int, str, str]:
    out, error = await asyncio.to_thread(process.communicate, given, 300)
    return process.returncode, out, error


async def test_who_is_waited_for_is_said_at_once_and_why() -> None:
    account, why = FeedCounters(), "no service listens there: is it running, and is the address right?"
    with structlog.testing.capture_logs() as logs:
        work = feed([Told()], FeedTarget("127.0.0.1:1", patience_s=1_000.0), FeedOptions(), account, asyncio.Event())
        feeding = asyncio.ensure_future(work)
        async with asyncio.timeout(PATIENCE_S):
            while not logs:  # noqa: ASYNC110 - a log is no event
                await asyncio.sleep(0.01)
        assert not feeding.done()
        feeding.cancel()
        await asyncio.wait([feeding])
    assert [(each["event"], each["address"], each["reason"]) for each in logs] == [
        ("waiting for the learner", "127.0.0.1:1", why)
    ]
    assert account.awaited_condition == f"the learner at 127.0.0.1:1 to be in a run: {why}"


def test_a_bug_is_told_by_its_place_alone(capsys: pytest.CaptureFixture[str]) -> None:
    async def work(account: FeedCounters, stop: asyncio.Event) -> None:
        raise ValueError(f"could not convert {SECRET}")

    try:
        assert run_feeder(work) == 2
    finally:
        structlog.reset_defaults()  # it logs to what is standard error now
    told = "".join(capsys.readouterr())
    assert "ValueError" in told and str(SECRET) not in told


def test_what_was_fed_is_told_to_programs(capsys: pytest.CaptureFixture[str]) -> None:
    async def work(account: FeedCounters, stop: asyncio.Event) -> None:
        account.run_id, account.records_fed, account.duplicate_count = "run-1", 3, 1
        account.refusals["age: beyond its bounds"] = 2
        account.refusal_destination = "written to d"

    try:
        with terminal.reserve_stdout_for_json():
            run_feeder(work)
    finally:
        structlog.reset_defaults()
    told = json.loads(capsys.readouterr().out)
    assert (told["run"], told["records_delivered"], told["duplicates"], told["pending"]) == ("run-1", 3, 1, 0)
    assert told["refused"] == {"age: beyond its bounds": 2}


def test_an_endpoint_needs_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "starlette"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "starlette", None)
    result = CliRunner().invoke(app, ["feed", "http://127.0.0.1:0", "--learner", "127.0.0.1:1"])
    assert re.search(r"feeding from HTTP needs starlette: .*, pip install '\.\[feed\]'", str(result.exception))


def test_a_display_says_how_it_goes_and_nothing_of_records() -> None:
    account = FeedCounters({"a"}, 1_200, 3, 40, Counter({"age: beyond its bounds": 12}))
    console = Console(width=80, force_terminal=False)

    def seen() -> str:
        with console.capture() as shown:
            console.print(_render(account, 310.4))
        return shown.get()

    assert "waiting for the learner" in seen()
    account.run_id = "run-1"
    assert "1,200 fed  310 records/s  40 waiting  3 came again\nthe learner does not answer\n" in seen()
    assert "12 messages refused and DROPPED:\n  12  age: beyond its bounds\n" in seen()
    account.refusal_destination, account.status = (
        "written to d",
        LearnerStatus("ann", rounds_done=7, epsilon_budget=4.0),
    )
    assert "ann: round 7  ε 0 of 4  0 wait for their round\n12 messages refused, and written to d:\n" in seen()
    assert _build_facts(account)["dropped"] == 0


@pytest.mark.slow
async def test_standard_input_is_fed_by_a_command(tmp_path: Path) -> None:
    async with ann(tmp_path) as (up, learner):
        code, out, error = await ended(command(up, "-", "--source", "ward"), f'{LINE}\n{LINE}\n{{"age": {SECRET}}}')
        assert code == 1 and re.search(r"Fed 2 records of 1 source to run run-\w+ in", out), (out, error)
        assert "1 message refused and DROPPED" in out and str(SECRET) not in out + error
        lines = [json.dumps({**RECORD, "at": at}) for at in (3, 4, 4, 9)]
        arguments = ("-", "--source", "seq", "--position", "at", "--dead-letters", str(tmp_path / "dead"))
        code, out, _ = await ended(command(up, *arguments), "\n".join(lines))
        assert code == 0 and f"1 message refused, and written to {tmp_path / 'dead'}" in out
        code, out, _ = await ended(command(up, *arguments), "\n".join([*lines, json.dumps({**RECORD, "at": 10})]))
        assert code == 0 and "Fed 1 record" in out and "3 messages came again, and were skipped" in out
        await learned(learner, 2 + 3 + 1)
    assert [each[1] for each in letters(tmp_path / "dead")] == [4]


@pytest.mark.slow
async def test_a_command_ends_well_when_it_is_told_to(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("age,ward,outcome\n61,icu,home\n62,ic")
    async with ann(tmp_path) as (up, learner):
        for count, number in enumerate((signal.SIGTERM, signal.SIGINT), 1):
            process = command(up, str(path), "--follow", "--log-level", "error")
            await learned_some(learner, count)
            process.send_signal(number)
            code, out, error = await ended(process)
            assert (code, error) == (0, ""), out
            with path.open("a") as file:
                file.write("u,home\n63,ic")
        await learned(learner, 2)
        os.mkfifo(tmp_path / "pipe.csv")
        code, out, error = await ended(command(up, str(tmp_path / "pipe.csv")))
        assert (code, error.splitlines()[-1]) == (2, f"sottovoce: {tmp_path / 'pipe.csv'} is not a file: feed a pipe by "
        "`sottovoce feed -`")  # fmt: skip


@pytest.mark.slow
async def test_each_record_is_learned_once_by_a_feeder_that_is_killed_while_a_file_grows(tmp_path: Path) -> None:
    """By the learner's log: every position of the file once; and every dead letter once."""
    wanted, deaths, path, dead = 200, 3, tmp_path / "a.csv", tmp_path / "dead.jsonl"
    path.write_text("age,ward,outcome\n")
    clock = {"mode": "paced", "period_s": 0.1, "deadline_s": 100.0}  # few rounds, so that the log holds all of them
    spec = spec_of({"schema": SCHEMA, "batch_size": 1_000}, clock=clock)
    arguments = (str(path), "--follow", "--dead-letters", str(dead), "--log-level", "error")
    async with ann_in(tmp_path, spec) as (up, learner):
        process = command(up, *arguments)
        with path.open("a", buffering=1) as file:
            for number in range(wanted):
                row = f"{number % 100},icu,home\n" if number % 10 else f'{number},"no\nward",home\n'
                file.write(row[:5])
                if number in range(wanted // (deaths + 1), wanted, wanted // (deaths + 1)):
                    await learned_some(learner, number // 2)
                    process.kill()
                    await ended(process)
                    process = command(up, *arguments)
                file.write(row[5:])
                await asyncio.sleep(0.005)
            file.write("100,icu,home\n")
        await learned(learner, wanted * 9 // 10 + 1)
        process.terminate()
        assert (await ended(process))[0] == 0
        assert (await learner.fetch_status()).records == wanted * 9 // 10 + 1
        (part,) = build_file_partitions([path])
        messages = [message async for each in part.read(-1) for message in each]
        fits = [each.position for each in messages if isinstance(each.body, dict) and each.body["ward"] == "icu"]
        assert kept_positions(tmp_path / "journals", "ann", "a.csv") == fits
    assert [each[1] for each in letters(dead)] == [each.position for each in messages if each.position not in fits]


# ---- what is not there, or no longer ---------------------------------------------------------------------------------


async def test_a_learner_is_held_to_the_name_that_it_should_have(tmp_path: Path) -> None:
    async with ann(tmp_path) as (up, learner):
        with pytest.raises(FailedPrecondition, match=rf"at {up.addresses['ann']} is the learner 'ann', not 'ben'"):
            await fed(up, Told(*good(1)), name="ben")
        assert (await fed(up, Told(*good(1)), name="ann")).records_fed == 1
        await learned(learner, 1)


async def test_another_learner_that_comes_in_its_place_gets_nothing(tmp_path: Path) -> None:
    """At an address that two learners of one run have, one after the other: its receipts are not those of the first one."""
    async with ann(tmp_path) as (_, learner):
        sender = learner._sender
        sender._endpoint = replace(sender._endpoint, name="ben")
        with pytest.raises(FailedPrecondition, match="is the learner 'ann', not 'ben'"):
            await sender._send_on_stream(None)


async def test_a_learner_that_is_told_to_end_with_its_run_is_believed(tmp_path: Path) -> None:
    """As `sottovoce up` does it: the run is over, and the process gone before anybody could ask it again."""
    async with network(tmp_path, NAMES) as up:
        run = await up.start(spec_of({"schema": SCHEMA}), 4)
        async with connect_learner(up.addresses["ann"], patience_s=10_000.0) as learner:
            account = FeedCounters()
            await learner.feed([RECORD])
            async with up._to_coordinator() as to:
                stop = coordinator_pb2.StopRunRequest(run_id=run.run_id, reason="enough")
                await coordinator_pb2_grpc.CoordinatorStub(to).StopRun(stop)
            while learner.run_end is None:  # noqa: ASYNC110 - what a stream brings is no event here
                await asyncio.sleep(0.01)
            await up.leave("ann")
            with pytest.raises(FailedPrecondition, match=rf"run {run.run_id} takes no more records: stopped"):
                await watch_run(learner, account, 10_000.0)
            with pytest.raises(FailedPrecondition, match=r"is over for this learner \(stopped\)"):
                await learner.feed([RECORD])


async def test_a_learner_that_is_gone_is_said_to_be_gone(tmp_path: Path) -> None:
    """It was told to end, and not that its run is over: it may come back, and go on."""
    async with ann(tmp_path) as (up, learner):
        feeding = asyncio.ensure_future(fed(up, Told(*good(1), ends=False), patience_s=0.5))
        await learned_some(learner)
        await up.leave("ann")
        with structlog.testing.capture_logs() as logs, pytest.raises(Unavailable) as gone:
            await feeding
    words = rf"the learner at .* was in run {learner.run_id}, and has not answered for 0.5 s; `sottovoce up` ends"
    assert re.match(words, str(gone.value))
    assert [each["event"] for each in logs].count("the learner does not answer") <= 1


@pytest.mark.parametrize("kind", ["learner", "broker"])
def test_what_could_not_be_reached_is_named(kind: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(LINE, encoding="utf-8")
    what = {
        "learner": [str(tmp_path / "a.jsonl"), "--learner-timeout", "0.2"],
        "broker": ["nats://127.0.0.1:1/WARDS", "--broker-timeout", "0.2"],
    }
    if kind == "broker":
        pytest.importorskip("nats")
    line = [sys.executable, "-m", "sottovoce_client", "feed", *what[kind], "--learner", "127.0.0.1:1"]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    named = {"learner": "cannot reach the learner at 127.0.0.1:1", "broker": "127.0.0.1:1 was unreachable for 0.2 s"}
    assert done.returncode == 2 and named[kind] in done.stderr.splitlines()[-1]
    assert done.stdout == "Nothing was fed.\n"


def test_whoever_ends_a_feeder_that_waits_is_told_for_what() -> None:
    account = FeedCounters(awaited_condition="the learner at 127.0.0.1:1 to be in a run")
    (line,) = _render_summary(account, 1.0)
    assert line.plain == f"Nothing was fed: stopped while waiting for {account.awaited_condition}."
    console = Console(width=200)
    with console.capture() as shown:
        console.print(_render(account, 0.0))
    assert shown.get() == f"waiting for {account.awaited_condition}\n"
