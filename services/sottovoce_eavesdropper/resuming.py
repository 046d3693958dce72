"""Captures that an eavesdropper left open when it died, taken up again: same folder, same ports, the gap named.

Of a capture by wiretap nobody knows which rounds lay in memory then: all of its ways are named, and it is never complete.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sottovoce.auditing.noticing import Notice
from sottovoce.errors import CaptureError
from sottovoce.registry import ENDLESS
from sottovoce.running.transcript import KEPT
from sottovoce_eavesdropper.lookout import EXCHANGE
from sottovoce_eavesdropper.reading import Capture, open_capture
from sottovoce_eavesdropper.records import CaptureFile, Ciphertext, part_number
from sottovoce_eavesdropper.storage import open_folder
from sottovoce_rpc.codec import RoundCodec

if TYPE_CHECKING:
    import pyarrow as pa


def left_open(place: str | Path, run_id: str) -> Capture | None:
    """The capture of a run that was not closed; None: there is none."""
    folder = open_folder(place)
    for name in folder.names():
        if not name.startswith(f"{run_id}-"):
            continue
        try:
            capture = open_capture(folder.below(name))
        except CaptureError:
            continue
        if capture.facts["run_id"] == run_id and not capture.complete and isinstance(capture.facts.get("routes"), list):
            return capture
    return None


def sent_in(capture: Capture) -> dict[int, tuple[int, int]]:
    """How far each learner was in a capture, by its index: one more than its last round, and when that passed, in nanoseconds.

    Of what was sent again a capture may have an older round last; so the newest parts are read until every learner was seen, and
    as many messages as a learner may have to send again.

    Raises:
        CaptureError: a part cannot be read.
    """
    found = dict[int, tuple[int, int]]()
    if not capture.shapes or capture.ciphertext is not None:  # of no run of ours, or nothing that can be read
        return found
    codec, rounds, read = RoundCodec(capture.shapes), capture.facts["spec"].get("rounds"), 0
    most = rounds if isinstance(rounds, int) else ENDLESS
    for part in sorted(filter(None, map(part_number, capture.place.names())), reverse=True):
        columns = ("caller", "callee", "sender", "kind", "method", "wall_ns", "payload")
        for _, batch in capture.by_part(columns, part.__eq__):
            read += len(batch)
            for sender, t, at in _said(codec, batch):
                if t < most and t + 1 > found.get(sender, (0, 0))[0]:
                    found[sender] = t + 1, at
        if read >= KEPT and len(found) == len(capture.names):
            break
    return found


def _said(codec: RoundCodec, batch: pa.RecordBatch) -> Iterator[tuple[int, int, int]]:
    """Messages that a learner sent as itself: who, round, and when."""
    import pyarrow.compute as pc

    said = batch.filter(pc.equal(batch.column("kind"), "message"))
    rows, rounds, claimed, _ = codec.decode_many(said.column("payload").to_pylist())
    senders, walls = (said.column(name).to_numpy()[rows] for name in ("sender", "wall_ns"))
    methods = said.column("method").to_pylist()
    told = zip(rows.tolist(), senders.tolist(), claimed.tolist(), rounds.tolist(), walls.tolist(), strict=True)
    yield from ((sender, t, at) for row, sender, name, t, at in told if sender == name and methods[row] in EXCHANGE)


def resumed(capture: Capture, *, allow_imports: bool) -> tuple[CaptureFile, Mapping[tuple[int, int], int]]:
    """A capture to be written on, and how many streams of each edge it has; by wiretap, how many connections.

    Raises:
        CaptureError: what stands of it cannot be read.
        OSError: it cannot be written.
    """
    facts = capture.facts
    file = CaptureFile(
        capture.name,
        facts["capture_id"],
        facts["run_id"],
        json.dumps(facts["spec"]),
        facts.get("n_features", 0),
        facts["world"],
        facts["replica"],
        allow_imports,
        capture.shapes,
        facts["routes"],
        parts=max(map(part_number, capture.place.names()), default=0),
    )
    file.opener = facts.get("opener", "")
    file.lookout.count = facts.get("noticed_count", 0)
    file.lookout.first = [Notice(**finding) for finding in facts.get("noticed", ())]
    file.lookout.contradiction = next((each.text for each in file.lookout.first if each.contradicts), "")
    for gap in facts.get("gaps", ()):  # of channels; those of copies follow from the rounds that came
        if "receiver" in gap and gap["to"] is not None:
            file.gaps.resumed(gap["sender"], gap["receiver"], due=gap["from"], t=gap["to"])
    before = _take_up(file, capture) if file.ciphertext is None else _count_on(file, file.ciphertext, capture)
    return file, before


def _count_on(file: CaptureFile, counts: Ciphertext, capture: Capture) -> dict[tuple[int, int], int]:
    """Count what a wiretap noted."""
    import pyarrow.compute as pc

    file.interrupted = True
    connections = dict[tuple[int, int], int]()
    for _, batch in capture.by_part(("caller", "callee", "sender", "kind", "connection", "size"), lambda _: True):
        for each in _groups(batch, ("caller", "callee"), [("connection", "max")]):
            way = each["caller"], each["callee"]
            connections[way] = max(connections.get(way, 0), each["connection_max"])
        for each in _groups(batch, ("kind",), [("size", "sum"), ("size", "count")]):
            counts.count(each["kind"], each["size_sum"], each["size_count"])
        tapped = batch.filter(pc.equal(batch.column("kind"), "ciphertext"))
        for each in _groups(tapped, ("caller", "callee", "sender"), [("size", "sum"), ("size", "count")]):
            file.passed(each["caller"], each["callee"], each["sender"], each["size_sum"], each["size_count"])
    return connections


def _take_up(file: CaptureFile, capture: Capture) -> dict[tuple[int, int], int]:
    """Count what was recorded, note up to which round, and recall what was said last: it may be said again.

    Payloads are read only where they say something: a long run's relays must not wait until all of it was read.
    """
    seen = _count(file, capture)
    latest = _latest(seen.rows)
    needed = latest | set(seen.last.values()) if file.routes else set(seen.rows)  # copies: each round that is missing
    _note_rounds(file, capture, needed, latest)
    return seen.streams


@dataclass(slots=True)
class _Seen:
    """What stands in the parts: rows of each, streams of each edge, and in which part a sender was last heard on an edge."""

    rows: dict[int, int] = field(default_factory=dict)
    streams: dict[tuple[int, int], int] = field(default_factory=dict)
    last: dict[tuple[int, int, int], int] = field(default_factory=dict)


def _count(file: CaptureFile, capture: Capture) -> _Seen:
    import pyarrow.compute as pc

    seen = _Seen()
    for part, batch in capture.by_part(("caller", "callee", "sender", "kind", "stream", "size"), lambda _: True):
        seen.rows[part] = seen.rows.get(part, 0) + len(batch)
        for each in _groups(batch, ("caller", "callee"), [("stream", "max")]):
            way = each["caller"], each["callee"]
            seen.streams[way] = max(seen.streams.get(way, 0), each["stream_max"])
        said = batch.filter(pc.equal(batch.column("kind"), "message"))
        for each in _groups(said, ("caller", "callee", "sender"), [("size", "sum"), ("size", "count")]):
            seen.last[each["caller"], each["callee"], each["sender"]] = part
            file.messages, file.bytes = file.messages + each["size_count"], file.bytes + each["size_sum"]
            file.passed(each["caller"], each["callee"], each["sender"], each["size_sum"], each["size_count"])
    return seen


def _groups(batch: pa.RecordBatch, keys: Sequence[str], sums: Sequence[tuple[str, str]]) -> list[dict[str, Any]]:
    import pyarrow as pa

    found: list[dict[str, Any]] = pa.Table.from_batches([batch]).group_by(list(keys)).aggregate(list(sums)).to_pylist()
    return found


def _latest(rows: Mapping[int, int]) -> set[int]:
    """The last parts, with as many rows as messages are remembered where memory is bounded."""
    found, held = set[int](), 0
    for part in sorted(rows, reverse=True):
        if held >= KEPT:
            break
        found.add(part)
        held += rows[part]
    return found


def _note_rounds(file: CaptureFile, capture: Capture, needed: Collection[int], latest: Collection[int]) -> None:
    import pyarrow.compute as pc

    codec = RoundCodec(file.fields)
    for route in file.routes:
        way = route["caller"], route["callee"]
        file.awaited |= {way: 0, way[::-1]: 0}
    for part, batch in capture.by_part(("caller", "callee", "sender", "kind", "payload"), needed.__contains__):
        said = batch.filter(pc.equal(batch.column("kind"), "message"))
        payloads = said.column("payload").to_pylist()
        rows, rounds, _, _ = codec.decode_many(payloads)
        caller, callee, sender = (said.column(name).to_numpy()[rows] for name in ("caller", "callee", "sender"))
        ways = zip(sender.tolist(), (caller + callee - sender).tolist(), strict=True)
        for row, way, t in zip(rows.tolist(), ways, rounds.tolist(), strict=True):
            if part in latest:
                file.lookout.recall(*way, t, payloads[row])
            _note_round(file, way, t)


def _note_round(file: CaptureFile, way: tuple[int, int], t: int) -> None:
    if file.routes:
        file.awaited[way] = max(file.awaited[way], t + 1)
    else:
        file.gaps.known(way[0])
        file.gaps.came(way[0], t=t)
