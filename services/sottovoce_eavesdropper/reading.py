"""Reading a capture back: from raw bytes to the transcript that replay and audit work on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sottovoce.arrays import FloatArray
from sottovoce.errors import CaptureError, EquivocationError, RemoteProtocolError
from sottovoce.network.network import Network
from sottovoce.running.transcript import Transcript
from sottovoce_eavesdropper.lookout import EXCHANGE
from sottovoce_eavesdropper.parts import MIB, read_part
from sottovoce_eavesdropper.records import FORMAT, part_name, part_number, schema
from sottovoce_eavesdropper.storage import Folder, open_folder
from sottovoce_rpc.codec import decode_frames, decode_round, round_length

if TYPE_CHECKING:
    import pyarrow as pa

MOST_FACTS = 16 * MIB
"""Bytes of `capture.json`."""
MOST_ROUNDS = 2**24
"""Beyond any run that is replayed: a message of a later round is made up."""

FACTS = {"capture_id": str, "run_id": str, "complete": bool, "messages": int, "bytes": int, "spec": dict}
"""What `capture.json` must say."""
OFFERED = {"noticed": list, "noticed_count": int}


@dataclass(frozen=True, slots=True)
class Capture:
    """A capture that was, or is being, written.

    Attributes:
        place: where it lies.
        facts: what `capture.json` says.
    """

    place: Folder
    facts: Mapping[str, Any]

    @property
    def name(self) -> str:
        """Path or URL."""
        return self.place.name

    @property
    def complete(self) -> bool:
        """False when the eavesdropper ended before it closed the capture; its parts are readable all the same."""
        return bool(self.facts["complete"])

    def batches(self, columns: Sequence[str] = ()) -> Iterator[pa.RecordBatch]:
        """All records, in the order in which they were overheard, in batches of bounded size.

        Args:
            columns: which ones (default: all of `records.schema()`).

        Raises:
            CaptureError: a part cannot be read or is missing, or a closed capture has another number of messages than it says.
        """
        names = tuple(columns) or tuple(schema().names)
        messages = 0
        for part in self._parts():
            for batch in read_part(self.place, part, tuple(dict.fromkeys((*names, "kind")))):
                messages += _messages_in(batch)
                yield batch.select(list(names))
        if self.complete and messages != self.facts["messages"]:
            raise CaptureError(
                f"the capture {self.name} must have {self.facts['messages']} messages, got {messages}: parts are missing"
            )

    def messages(self, columns: Sequence[str] = ()) -> Any:
        """All recorded messages, as an Arrow table: as large as they are.

        Raises:
            CaptureError: as `batches`, or there is no part.
        """
        import pyarrow as pa
        import pyarrow.compute as pc

        names = tuple(columns) or tuple(schema().names)
        found = [
            batch.filter(pc.equal(batch.column("kind"), "message")).select(list(names))
            for batch in self.batches(tuple(dict.fromkeys((*names, "kind"))))
        ]
        if not found:
            raise CaptureError(f"the capture {self.name} has no messages")
        return pa.Table.from_batches(found)

    def totals(self) -> tuple[int, int]:
        """Messages, and their bytes.

        Raises:
            CaptureError: as `batches`.
        """
        import pyarrow.compute as pc

        messages = size = 0
        for batch in self.batches(("kind", "size")):
            sizes = batch.filter(pc.equal(batch.column("kind"), "message")).column("size")
            messages, size = messages + len(sizes), size + (pc.sum(sizes).as_py() or 0)
        return messages, size

    def transcript(
        self, shapes: Mapping[str, tuple[int, ...]], learners: int, network: Network | None = None
    ) -> Transcript:
        """What every learner said, up to the last round in which all were overheard whom anybody heard.

        What nobody heard is not-a-number.

        Args:
            shapes: the fields of a message, and their shapes.
            learners: how many there are.
            network: who tells whom in which round (default: everybody is heard in every round).

        Raises:
            EquivocationError: one learner said different things to different neighbours in one round.
            CaptureError: a message cannot be decoded, or a round is missing.
        """
        said = _Said(self.name, shapes, learners)
        for batch in self.batches(("sender", "kind", "method", "payload")):
            said.take(rounds_only(batch))
        rounds = said.whole_rounds(network)
        if rounds == 0:
            raise CaptureError(f"the capture {self.name} has no round in which all {learners} learners were overheard")
        return said.transcript(rounds)

    def rounds_since(self, part: int) -> Iterator[tuple[int, pa.RecordBatch]]:
        """The rounds' messages in the parts after this one (0: in all), each batch with the number of its part.

        Columns: `sender, kind, method, payload`.

        Raises:
            CaptureError: a part cannot be read or is missing.
        """
        for name in self._parts():
            if part_number(name) > part:
                for batch in read_part(self.place, name, ("sender", "kind", "method", "payload")):
                    yield part_number(name), rounds_only(batch)

    def _parts(self) -> list[str]:
        """Names of the parts, in order.

        Raises:
            CaptureError: one is missing, or the place cannot be read.
        """
        try:
            parts = [name for name in self.place.names() if part_number(name)]
        except OSError as error:
            raise CaptureError(f"cannot read the capture {self.name}: {error}") from None
        parts.sort(key=part_number)
        for expected, name in enumerate(parts, 1):
            if part_number(name) != expected:
                raise CaptureError(f"the capture {self.name} must have {part_name(expected)}, the next one is {name}")
        return parts


class _Said:
    """Who said what, collected batch by batch: one array per batch of what was not heard before."""

    def __init__(self, name: str, shapes: Mapping[str, tuple[int, ...]], learners: int) -> None:
        self._name, self._shapes, self._learners = name, shapes, learners
        self._length = round_length(shapes)
        self._row: dict[tuple[int, int], int] = {}
        self._digests: list[bytes] = []
        self._values: dict[str, list[FloatArray]] = {field: [] for field in shapes}

    def take(self, batch: pa.RecordBatch) -> None:
        """More messages: the usual ones all at once, others one by one."""
        import pyarrow.compute as pc

        usual = pc.equal(pc.binary_length(batch.column("payload")), self._length)
        frames = batch.filter(usual)
        payloads, senders = frames.column("payload").to_pylist(), frames.column("sender").to_pylist()
        rows = np.frombuffer(b"".join(payloads), np.uint8).reshape(len(payloads), self._length)
        rounds, claimed, fields, right = decode_frames(rows, self._shapes)
        for k in np.flatnonzero(~right):
            self._one(senders[k], payloads[k])
        kept = np.flatnonzero(right).tolist()
        new = [k for k in kept if self._is_new(int(rounds[k]), senders[k], int(claimed[k]), payloads[k])]
        for field, values in fields.items():
            self._values[field].append(values[new])
        others = batch.filter(pc.invert(usual))
        for sender, payload in zip(
            others.column("sender").to_pylist(), others.column("payload").to_pylist(), strict=True
        ):
            self._one(sender, payload)

    def _one(self, sender: int, payload: bytes) -> None:
        try:
            t, claimed, message = decode_round(payload, self._shapes)
        except RemoteProtocolError as error:
            raise CaptureError(f"a message of learner {sender} in {self._name} cannot be decoded: {error}") from None
        if self._is_new(t, sender, claimed, payload):
            for field, value in message.fields.items():
                self._values[field].append(value[None])

    def _is_new(self, t: int, sender: int, claimed: int, payload: bytes) -> bool:
        if claimed != sender:
            raise CaptureError(f"learner {sender} spoke as learner {claimed} in round {t}")
        if sender >= self._learners or t >= MOST_ROUNDS:
            raise CaptureError(
                f"{self._name} has learner {sender}, round {t}: beyond {self._learners} learners, {MOST_ROUNDS} rounds"
            )
        digest = hashlib.blake2b(payload, digest_size=16).digest()
        row = self._row.setdefault((t, sender), len(self._digests))
        if row == len(self._digests):
            self._digests.append(digest)
            return True
        if self._digests[row] != digest:
            raise EquivocationError(f"learner {sender} said two different things in round {t}")
        return False

    def whole_rounds(self, network: Network | None) -> int:
        """Rounds before the first one in which somebody is missing."""
        last, rounds = max((t for t, _ in self._row), default=-1), 0
        while rounds <= last and all((rounds, i) in self._row for i in _heard_of(network, rounds, self._learners)):
            rounds += 1
        return rounds

    def transcript(self, rounds: int) -> Transcript:
        """The first rounds."""
        keys = np.array(list(self._row), dtype=np.int64)
        kept = keys[:, 0] < rounds
        all_t, all_i = keys.T
        fields = {}
        for name, shape in self._shapes.items():
            dense = np.full((rounds, self._learners, *shape), np.nan)
            begin = 0
            for values in self._values[name]:
                own = slice(begin, begin + len(values))
                dense[all_t[own][kept[own]], all_i[own][kept[own]]] = values[kept[own]]
                begin += len(values)
            fields[name] = dense[:, :, None]
        return Transcript(fields)


def _heard_of(network: Network | None, t: int, learners: int) -> Iterable[int]:
    """Those whose message of round t somebody hears."""
    return range(learners) if network is None else np.flatnonzero(network.at(t).neighbours.any(axis=0)).tolist()


def rounds_only(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The messages that are rounds."""
    import pyarrow as pa
    import pyarrow.compute as pc

    methods = pa.array(sorted(EXCHANGE))
    exchanged = pc.is_in(batch.column("method"), value_set=methods)
    return batch.filter(pc.and_(pc.equal(batch.column("kind"), "message"), exchanged))


def _messages_in(batch: pa.RecordBatch) -> int:
    import pyarrow.compute as pc

    return int(pc.sum(pc.equal(batch.column("kind"), "message")).as_py() or 0)


def open_capture(place: str | Path | Folder) -> Capture:
    """Open a capture.

    Args:
        place: its folder: a path, or a URL for fsspec.

    Raises:
        CaptureError: there is none in this folder, or it does not say what a capture says.
    """
    folder = open_folder(place) if isinstance(place, str | Path) else place
    try:
        if (size := folder.size("capture.json")) > MOST_FACTS:
            raise CaptureError(f"{folder.name}/capture.json must have at most {MOST_FACTS} bytes, got {size}")
        with folder.open("capture.json") as file:
            facts = json.loads(file.read(MOST_FACTS))
    except (OSError, ValueError, RecursionError) as error:
        raise CaptureError(f"{folder.name} is not a capture: {str(error) or type(error).__name__}") from None
    if not isinstance(facts, dict) or facts.get("format") != FORMAT:
        raise CaptureError(f"{folder.name} is not a capture of a known format ({FORMAT})")
    wrong = [name for name, kind in FACTS.items() if type(facts.get(name)) is not kind]
    wrong += [name for name, kind in OFFERED.items() if name in facts and type(facts[name]) is not kind]
    wrong += [name for name in ("world", "replica") if type(facts.get(name, None)) not in (int, type(None))]
    if wrong:
        raise CaptureError(f"{folder.name}/capture.json must say {', '.join(wrong)}, of the types that a capture has")
    return Capture(folder, facts)


DEPTH = 3
"""Folders below each other in which captures are looked for: results, captures, one capture."""


def find_captures(place: Folder, depth: int = DEPTH) -> Iterator[Capture]:
    """All captures in a folder and below.

    Raises:
        CaptureError: one is not what it says it is, or a folder cannot be read.
    """
    try:
        names = place.names()
    except OSError as error:
        raise CaptureError(f"cannot read {place.name}: {error}") from None
    if "capture.json" in names:
        yield open_capture(place)
    elif depth:
        for name in names:
            yield from find_captures(place.below(name), depth - 1)
