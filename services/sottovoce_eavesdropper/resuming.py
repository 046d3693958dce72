"""Captures that an eavesdropper left open when it died, taken up again: same folder, same ports, the gap named."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from sottovoce.auditing.noticing import Notice
from sottovoce.errors import CaptureError
from sottovoce_eavesdropper.reading import Capture, open_capture
from sottovoce_eavesdropper.records import CaptureFile, part_number
from sottovoce_eavesdropper.storage import open_folder
from sottovoce_rpc.codec import RoundCodec

if TYPE_CHECKING:
    import pyarrow as pa

COLUMNS = ("caller", "callee", "sender", "kind", "stream", "size", "payload")


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


def resumed(capture: Capture, *, allow_imports: bool) -> tuple[CaptureFile, Mapping[tuple[int, int], int]]:
    """A capture to be written on, and how many streams of each edge it has.

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
    file.lookout.count = facts.get("noticed_count", 0)
    file.lookout.first = [Notice(**finding) for finding in facts.get("noticed", ())]
    for gap in facts.get("gaps", ()):  # of channels; those of copies follow from the rounds that came
        if "receiver" in gap and gap["to"] is not None:
            file.gaps.resumed(gap["sender"], gap["receiver"], due=gap["from"], t=gap["to"])
    streams = _take_up(file, capture)
    file.describe()
    return file, streams


def _take_up(file: CaptureFile, capture: Capture) -> dict[tuple[int, int], int]:
    """Count what was recorded, note up to which round, and recall it: it may be said again."""
    import pyarrow as pa
    import pyarrow.compute as pc

    codec, streams = RoundCodec(file.fields), dict[tuple[int, int], int]()
    for route in file.routes:
        way = route["caller"], route["callee"]
        file.awaited |= {way: 0, way[::-1]: 0}
    for batch in capture.batches(COLUMNS):
        edges = pa.Table.from_batches([batch]).group_by(["caller", "callee"]).aggregate([("stream", "max")])
        for edge in edges.to_pylist():
            way = edge["caller"], edge["callee"]
            streams[way] = max(streams.get(way, 0), edge["stream_max"])
        said = batch.filter(pc.equal(batch.column("kind"), "message"))
        file.messages, file.bytes = file.messages + len(said), file.bytes + (pc.sum(said.column("size")).as_py() or 0)
        _note_rounds(file, codec, said)
    return streams


def _note_rounds(file: CaptureFile, codec: RoundCodec, said: pa.RecordBatch) -> None:
    payloads = said.column("payload").to_pylist()
    rows, rounds, _, _ = codec.decode_many(payloads)
    caller, callee, sender = (said.column(name).to_numpy()[rows] for name in ("caller", "callee", "sender"))
    ways = zip(sender.tolist(), (caller + callee - sender).tolist(), strict=True)
    for row, way, t in zip(rows.tolist(), ways, rounds.tolist(), strict=True):
        file.lookout.recall(*way, t, payloads[row])
        if file.routes:
            file.awaited[way] = max(file.awaited[way], t + 1)
        else:
            file.gaps.known(way[0])
            file.gaps.came(way[0], t=t)
