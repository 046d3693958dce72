"""Signed rounds over real channels: what a capture then proves, and what becomes of a forgery."""

from __future__ import annotations

import asyncio
import itertools
import json
import shutil
from collections import Counter
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from sottovoce_client.runs.run_client import Outcome
from sottovoce_client.transcripts.verify import EXIT_NOT_ALL_SIGNED, read_signatures, verify
from sottovoce_core.errors import CaptureError, NotFound, ViolationKind
from sottovoce_core.spec import RunSpec
from sottovoce_eavesdropper.capture_reader import open_capture
from sottovoce_eavesdropper.capture_writer import CaptureWriter
from sottovoce_eavesdropper.http2 import GrpcDecoder
from sottovoce_eavesdropper.proxy import Connection
from sottovoce_learner import session
from sottovoce_learner.peers.outbox import Outbox
from sottovoce_learner.session import Session
from sottovoce_rpc.certificates import AUTHORITIES_FILE
from sottovoce_rpc.learner_status import LearnerState
from sottovoce_rpc.signatures import ROUNDS_PER_BLOCK, SignedStatement, Statement, compute_frame_digest, is_signature
from sottovoce_rpc.tasks import Tasks
from tests.examples import made_up, small_spec
from tests.gossip import gossip_spec
from tests.services.identities import Identities
from tests.services.network import PATIENCE_S, network
from tests.services.test_changing import ways

NAMES = ["ann", "ben", "cleo"]
ROUNDS = 2 * ROUNDS_PER_BLOCK + 6


@pytest.fixture(autouse=True)
def _signatures_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy the machine is: nobody finishes without them because they took too long."""
    monkeypatch.setattr(session, "_SIGNATURE_TIMEOUT_S", PATIENCE_S)


def read_messages() -> Callable[[Any, bytes], list[bytes]]:
    """Return a function that reads the messages which end in bytes of one end of a relayed connection."""
    decoders = dict[Any, GrpcDecoder]()

    def read(end: Any, data: bytes) -> list[bytes]:
        decoder = decoders.setdefault(end._connection, GrpcDecoder(2**20, itertools.count(1).__next__))
        return [event.payload for event in decoder.decode(end.direction, data) if event.kind == "message"]

    return read


def spec_of(capture: str = "relay") -> RunSpec:
    return small_spec(ROUNDS, NAMES, capture=capture, clock={"deadline_s": PATIENCE_S})


def shown(outcome: Outcome, ids: Identities) -> tuple[int, str]:
    console = Console(file=StringIO(), width=120)
    code = verify(outcome.capture_location or "", ids.authority.folder / AUTHORITIES_FILE, console)
    return code, console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize("capture", ["relay", "mirror"])
async def test_a_capture_proves_what_was_said(tmp_path: Path, capture: str) -> None:
    ids, spec = Identities(tmp_path / "identities"), spec_of(capture)
    async with network(tmp_path, NAMES, identities=ids) as up:
        outcome = await up.run(spec, made_up(spec))
    assert outcome.state == "finished", outcome.detail
    found = open_capture(outcome.capture_location or "")
    words = read_signatures(found, (ids.authority.folder / AUTHORITIES_FILE).read_bytes())
    assert found.metadata["detection_count"] == 0 and found.is_complete
    assert {name: own.message_rounds_count for name, own in words.items()} == dict.fromkeys(NAMES, ROUNDS)
    assert {name: own.signed_rounds_count for name, own in words.items()} == dict.fromkeys(NAMES, ROUNDS)
    assert not any(own.equivocated_rounds or own.mismatched_rounds or own.refusals for own in words.values())
    code, text = shown(outcome, ids)
    assert code == 0 and "no learner signed two messages of one round" in text
    code = verify(
        outcome.capture_location or "", Identities(tmp_path / "others").authority.folder / AUTHORITIES_FILE, Console()
    )
    assert code == 1


async def test_without_identities_nothing_is_signed(tmp_path: Path) -> None:
    spec, ids = spec_of(), Identities(tmp_path / "identities")
    async with network(tmp_path, NAMES) as up:
        outcome = await up.run(spec, made_up(spec))
    code, text = shown(outcome, ids)
    assert code == EXIT_NOT_ALL_SIGNED and "no signatures here: never made, or removed" in text
    with pytest.raises(NotFound, match="no authorities in"):
        verify(outcome.capture_location or "", tmp_path / "none.crt")
    with pytest.raises(NotFound, match="it holds no certificates"):
        verify(outcome.capture_location or "", Path(__file__))
    with pytest.raises(CaptureError, match=r"must have captures or a transcript\.parquet"):
        verify(str(ids.folder), ids.authority.folder / AUTHORITIES_FILE)
    hostile = tmp_path / "hostile"
    shutil.copytree(outcome.capture_location or "", hostile)
    facts = json.loads((hostile / "capture.json").read_text())
    for learners in (2**40, "ann", [1, 2], None):
        (hostile / "capture.json").write_text(json.dumps({**facts, "spec": {**facts["spec"], "learners": learners}}))
        with pytest.raises(
            CaptureError, match="must be of a Sottovoce run to have signatures, and is of another service"
        ):
            verify(str(hostile), ids.authority.folder / AUTHORITIES_FILE)
    for name in ("one", "two"):
        shutil.copytree(outcome.capture_location or "", tmp_path / "copies" / name)
    with pytest.raises(CaptureError, match="must hold one capture, got 2"):
        verify(str(tmp_path / "copies"), ids.authority.folder / AUTHORITIES_FILE)


async def test_a_learner_that_was_stopped_signs_what_it_said_before(tmp_path: Path) -> None:
    """In the middle of a block, of which its log has the first half."""
    ids, spec = Identities(tmp_path / "identities"), spec_of()
    async with network(tmp_path, NAMES, identities=ids) as up:
        running = asyncio.ensure_future(up.run(spec, made_up(spec)))
        await up.until("ben", LearnerState.RUNNING, ROUNDS_PER_BLOCK // 2)
        await up.leave("ben")
        await up.until_gone("ben")
        await up.join("ben")
        outcome = await running
    assert outcome.state == "finished", outcome.detail
    words = read_signatures(
        open_capture(outcome.capture_location or ""), (ids.authority.folder / AUTHORITIES_FILE).read_bytes()
    )
    assert {name: own.signed_rounds_count for name, own in words.items()} == dict.fromkeys(NAMES, ROUNDS)
    assert not any(own.equivocated_rounds or own.mismatched_rounds or own.refusals for own in words.values())


async def test_a_run_is_over_when_its_last_signatures_have_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of ben are late: who has done all rounds waits for them, for they would be cut off with the channels."""
    ids, spec, states = Identities(tmp_path / "identities"), spec_of(), list[list[LearnerState]]()
    forward, messages, late = Connection.forward, read_messages(), Tasks()

    async def pass_on_late(connection: Connection, end: Any, data: bytes) -> None:
        while True:
            if all(up.learners[name].status.rounds_done == ROUNDS for name in NAMES):
                break
            await asyncio.sleep(0)
        for _ in range(20):  # enough to finish in, for whoever does not wait
            await asyncio.sleep(0.001)
        states.append([up.learners[name].status.state for name in ("ann", "cleo")])
        forward(connection, end, data)
        end.release("late")

    def hold(connection: Connection, end: Any, data: bytes) -> None:
        for payload in filter(is_signature, messages(end, data)):
            statement = SignedStatement.decode(up.learners["ben"].status.run_id, payload).statement
            if NAMES[statement.sender] == "ben" and statement.block == ROUNDS // ROUNDS_PER_BLOCK:
                at = data.index(payload) - 14  # the frame's header, and the message's
                end.hold("late")
                late.start(pass_on_late(connection, end, data[at:]), "signatures are lost")
                data = data[:at]
                break
        forward(connection, end, data)

    monkeypatch.setattr(Connection, "forward", hold)
    async with network(tmp_path, NAMES, identities=ids) as up:
        outcome = await up.run(spec, made_up(spec))
    assert outcome.state == "finished", outcome.detail
    assert states[0] == [LearnerState.RUNNING, LearnerState.RUNNING]
    words = read_signatures(
        open_capture(outcome.capture_location or ""), (ids.authority.folder / AUTHORITIES_FILE).read_bytes()
    )
    assert {name: own.signed_rounds_count for name, own in words.items()} == dict.fromkeys(NAMES, ROUNDS)


async def test_a_last_signature_that_never_comes_holds_no_run_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, spec, true_sign = Identities(tmp_path / "identities"), spec_of(), Outbox._sign

    def sign(self: Outbox, t: int) -> None:
        if self._role.name != "ben" or t < ROUNDS - 1:
            true_sign(self, t)

    monkeypatch.setattr(Outbox, "_sign", sign)
    monkeypatch.setattr(session, "_SIGNATURE_TIMEOUT_S", 0.1)
    async with network(tmp_path, NAMES, identities=ids) as up:
        outcome = await up.run(spec, made_up(spec))
    assert outcome.state == "finished", outcome.detail
    words = read_signatures(
        open_capture(outcome.capture_location or ""), (ids.authority.folder / AUTHORITIES_FILE).read_bytes()
    )
    assert (words["ben"].message_rounds_count, words["ben"].signed_rounds_count) == (ROUNDS, 2 * ROUNDS_PER_BLOCK)


def seldom() -> RunSpec:
    """Dan hears ann in rounds 3 and 68 alone."""
    usual, all_of_them = ways((0, 1), (1, 2), (2, 0)), ways((0, 1), (1, 2), (2, 0), (0, 3), (3, 0))
    graphs = [all_of_them if t in (3, 68) else usual for t in range(ROUNDS)]
    topology = {"sequence": {"kind": "periodic", "graphs": graphs}, "weights": "out_degree"}
    clock = {"mode": "paced", "period_s": 0.02, "window": 7, "deadline_s": PATIENCE_S}
    return gossip_spec(topology, ROUNDS, [*NAMES, "dan"], capture="relay", clock=clock)


async def test_who_is_heard_seldom_signs_what_was_heard_also_after_a_death(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By then ann has long forgotten the message that it signs."""
    ids, spec = Identities(tmp_path / "identities"), seldom()
    async with network(tmp_path, spec.names, identities=ids) as up:
        running = asyncio.ensure_future(up.run(spec, made_up(spec)))
        await up.until("ann", LearnerState.RUNNING, 12)
        with monkeypatch.context() as dying:
            dying.setattr(
                up.learners["ann"].require_session().outbox, "_sign", lambda t: None
            )  # as it would when it is told to end
            await up.leave("ann")
        await up.until_gone("ann")
        await up.join("ann")
        outcome = await running
    assert outcome.state == "finished", outcome.detail
    words = read_signatures(
        open_capture(outcome.capture_location or ""), (ids.authority.folder / AUTHORITIES_FILE).read_bytes()
    )
    assert words["ann"].message_rounds_count == ROUNDS and words["ann"].signed_rounds_count >= 2 * ROUNDS_PER_BLOCK
    assert not any(own.equivocated_rounds or own.mismatched_rounds or own.refusals for own in words.values())


def refused(monkeypatch: pytest.MonkeyPatch, stop: asyncio.Event) -> list[str]:
    """Why a learner did not take in what came, as it comes about; then the run is stopped."""
    found, true_hear = list[str](), Session.receive

    def hear(self: Session, neighbour: int, payload: bytes) -> None:
        try:
            true_hear(self, neighbour, payload)
        except Exception as error:
            found.append(str(error))
            stop.set()
            raise

    monkeypatch.setattr(Session, "receive", hear)
    return found


@pytest.mark.misbehaves
async def test_a_relay_that_says_something_else_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It forwards, in the name of ann, what she has not said; with its own copy of that it fools nobody either."""
    ids, spec, stop = Identities(tmp_path / "identities"), spec_of(), asyncio.Event()
    refusals = refused(monkeypatch, stop)

    def forged(payload: bytes) -> bytes:
        return payload[:-1] + bytes([payload[-1] ^ 0x80])  # the sign of the last number

    forward, messages, passed = Connection.forward, read_messages(), Counter[Any]()

    def forge(connection: Connection, end: Any, data: bytes) -> None:
        for payload in messages(end, data):
            passed[end] += 1
            if passed[end] == 5 and not is_signature(payload):
                assert data.count(payload) == 1
                data = data.replace(payload, forged(payload))
        forward(connection, end, data)

    monkeypatch.setattr(Connection, "forward", forge)
    async with network(tmp_path, NAMES, identities=ids) as up:
        outcome = await up.run(spec, made_up(spec), stop)
    code, text = shown(outcome, ids)

    assert outcome.state != "finished"
    assert "signed another message of round 3 than arrived here in its name" in refusals[0]
    assert code == 1 and "has signed another message of round 3 than was captured: a forgery" in text


@pytest.mark.misbehaves
async def test_who_does_not_sign_is_not_heard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And is told of at once: the run fails before any deadline."""
    ids, spec = Identities(tmp_path / "identities"), spec_of()
    true_sign, refusals = Outbox._sign, refused(monkeypatch, asyncio.Event())

    def sign(self: Outbox, t: int) -> None:
        if self._role.name != "ben":
            true_sign(self, t)

    monkeypatch.setattr(Outbox, "_sign", sign)
    async with network(tmp_path, NAMES, identities=ids) as up:
        outcome = await up.run(spec, made_up(spec))
    assert set(refusals) == {
        f"ben must sign its messages from round 0 on before it sends round {ROUNDS_PER_BLOCK}: is it older than this learner?"
    }
    said = (
        f"ben, or the relay in between, sent {ViolationKind.SIGNATURE.value} when round {ROUNDS_PER_BLOCK} was due, as "
    )
    assert outcome.state == "failed" and outcome.detail.startswith(said)


async def test_two_signatures_of_one_round_prove_that_two_things_were_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever records them, and whatever else: nobody but the learner can have made them."""
    ids, spec = Identities(tmp_path / "identities"), spec_of()
    true_add, added = CaptureWriter.add_row, list[str]()

    def add(self: CaptureWriter, row: Any) -> None:
        true_add(self, row)
        if row.kind == "signature" and row.sender == 0 and not added:
            said = SignedStatement.decode(self.run_id, row.payload).statement
            other = Statement(said.run_id, 0, said.block, compute_frame_digest(b"another") + said.digests[32:])
            strangers = ids.of("learner/cleo").sign_statement(other)
            for each in (ids.of("learner/ann").sign_statement(other), strangers):
                true_add(self, row._replace(payload=each.encode()))
            added.append(self.run_id)

    monkeypatch.setattr(CaptureWriter, "add_row", add)
    async with network(tmp_path, NAMES, identities=ids) as up:
        outcome = await up.run(spec, made_up(spec))
    code, text = shown(outcome, ids)
    assert added and code == 1
    assert "ann has signed two messages of round 0: it sent two messages of one round, and cannot deny it" in text
    assert "ann: 1x refused: a signature of learner/cleo in the name of ann" in text
