"""Captures that an eavesdropper left open when it died, taken up again: same folder, same ports, the gap named."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sottovoce.auditing.noticing import Notice
from sottovoce.errors import CaptureError, RemoteProtocolError
from sottovoce_eavesdropper.reading import Capture, open_capture
from sottovoce_eavesdropper.records import CaptureFile, part_number
from sottovoce_eavesdropper.storage import open_folder
from sottovoce_rpc.codec import RoundCodec

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
    codec, streams = RoundCodec(file.fields), dict[tuple[int, int], int]()
    for route in file.routes:
        way = route["caller"], route["callee"]
        file.awaited |= {way: 0, way[::-1]: 0}
    for batch in capture.batches(COLUMNS):
        for row in batch.to_pylist():
            edge = row["caller"], row["callee"]
            streams[edge] = max(streams.get(edge, 0), row["stream"])
            if row["kind"] == "message":
                file.messages, file.bytes = file.messages + 1, file.bytes + row["size"]
                _note_round(file, codec, row)
    return streams


def _note_round(file: CaptureFile, codec: RoundCodec, row: Mapping[str, Any]) -> None:
    sender, receiver = row["sender"], row["caller"] + row["callee"] - row["sender"]
    try:
        t, _, _ = codec.decode(row["payload"])
    except RemoteProtocolError:
        return
    file.lookout.recall(sender, receiver, t, row["payload"])
    if file.routes:
        way = sender, receiver
        file.awaited[way] = max(file.awaited[way], t + 1)
    else:
        file.gaps.known(sender)
        file.gaps.came(sender, t=t)
