"""Reading a capture back: from raw bytes to the transcript that replay and audit work on."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sottovoce_core.algorithms.interface import Message
from sottovoce_core.auditing.traffic_features import digest
from sottovoce_core.errors import CaptureError, EquivocationError, RemoteProtocolError
from sottovoce_core.network.network import Network
from sottovoce_core.network.participation_schedule import resolve_learner_names
from sottovoce_core.runs.transcript import RoundReassembler, Transcript
from sottovoce_core.text import escape_control, format_learner_name
from sottovoce_eavesdropper import CAPTURE_FORMAT
from sottovoce_eavesdropper.capture_checks import EXCHANGE_METHODS
from sottovoce_eavesdropper.capture_writer import CiphertextCounts, build_schema, format_part_name, parse_part_number
from sottovoce_eavesdropper.part_reader import MIB, read_part
from sottovoce_eavesdropper.storage import Folder, open_folder
from sottovoce_rpc.codec import RoundCodec

if TYPE_CHECKING:
    import pyarrow as pa

_MAX_METADATA_BYTES = 16 * MIB
"""Bytes of `capture.json`."""
_DAMAGE_TEXT = "the capture may be damaged, or somebody changed it"
MAX_ROUNDS = 2**24
"""Beyond any run that is replayed: a message of a later round is made up."""
_MAX_MESSAGE_NUMBERS, _MAX_FIELDS = 2**24, 256
"""In a message."""
MAX_NAMES, _MAX_NAME_CHARS = 4096, 63
"""Learners that a capture may name, and letters of a name: it may be anybody's."""

_FACTS = {
    "capture_id": str,
    "run_id": str,
    "complete": bool,
    "messages": int,
    "bytes": int,
    "spec": dict,
    "fields": dict,
    "noticed": list,
    "noticed_count": int,
    "gaps": list,
    "routes": list,
    "opener": str,
    "n_features": int,
}
"""What `capture.json` must say."""
_CIPHERTEXT_COUNTS = ("connections", "records", "bytes")
"""What `ciphertext` must say, where it is there."""


@dataclass(frozen=True, slots=True)
class Capture:
    """A capture that was, or is being, written.

    Attributes:
        place: where it lies.
        facts: what `capture.json` says.
    """

    folder: Folder
    metadata: Mapping[str, Any]

    @property
    def name(self) -> str:
        """Path or URL."""
        return self.folder.name

    @property
    def is_complete(self) -> bool:
        """False when the eavesdropper ended before it closed the capture; its parts are readable all the same."""
        return bool(self.metadata["complete"])

    @property
    def world(self) -> int | None:
        """Which world the run lived in, where there are several; None: nobody said."""
        world: int | None = self.metadata.get("world")
        return world

    @property
    def replica(self) -> int | None:
        """The number of the run, where one spec is run again and again; None: it has none."""
        replica: int | None = self.metadata.get("replica")
        return replica

    @property
    def ciphertext(self) -> CiphertextCounts | None:
        """What a wiretap noted, as `capture.json` counts it; None: the capture is by none, and has messages."""
        told = self.metadata.get("ciphertext")
        return None if told is None else CiphertextCounts(**told)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The fields of a round, in their order, and their shapes; none: the capture is of no run of ours."""
        return {name: tuple(shape) for name, shape in self.metadata["fields"].items()}

    @property
    def names(self) -> tuple[str, ...]:
        """Of the run's learners, by index, plain enough for a terminal; none where the capture does not say."""
        learners = self.metadata["spec"].get("learners")
        if isinstance(learners, list):
            return tuple(escape_control(str(each))[:_MAX_NAME_CHARS] for each in learners[:MAX_NAMES])
        return resolve_learner_names(min(max(learners, 0), MAX_NAMES)) if type(learners) is int else ()

    def read_batches(self, columns: Sequence[str] = ()) -> Iterator[pa.RecordBatch]:
        """All records, in the order in which they were overheard, in batches of bounded size.

        Args:
            columns: which ones (default: all of `records.schema()`).

        Raises:
            CaptureError: a part cannot be read or is missing, or a closed capture has another number of messages than it says.
        """
        names = tuple(columns) or tuple(build_schema().names)
        tapped = self.ciphertext
        kind, due = ("message", self.metadata["messages"]) if tapped is None else ("ciphertext", tapped.records)
        found = 0
        for part in self._parts():
            for batch in read_part(self.folder, part, tuple(dict.fromkeys((*names, "kind")))):
                found += _count(batch, kind)
                yield batch.select(list(names))
        if self.is_complete and found != due:
            why = "parts are missing, or it was changed" if found < due else "it is damaged, or somebody changed it"
            raise CaptureError(f"the capture {self.name} must have {due} {kind}s, got {found}: {why}")

    def read_messages(self, columns: Sequence[str] = ()) -> Any:
        """All recorded messages, as an Arrow table: as large as they are.

        Raises:
            CaptureError: as `batches`, or there is no part.
        """
        import pyarrow as pa
        import pyarrow.compute as pc

        names = tuple(columns) or tuple(build_schema().names)
        found = [
            batch.filter(pc.equal(batch.column("kind"), "message")).select(list(names))
            for batch in self.read_batches(tuple(dict.fromkeys((*names, "kind"))))
        ]
        if not found:
            raise CaptureError(f"the capture {self.name} has no messages")
        return pa.Table.from_batches(found)

    def require_messages(self) -> None:
        """Refuse a capture without messages, for whoever needs what they say.

        Raises:
            CaptureError: it is by wiretap.
        """
        if self.ciphertext is not None:
            raise CaptureError(
                f"{self.name} is by wiretap: it has sizes and times of ciphertext, and no message. `sottovoce audit --captures` "
                "looks for what they give away; for the rest take `capture: relay` or `mirror`"
            )

    def count_messages(self) -> tuple[int, int]:
        """Messages, and their bytes.

        Raises:
            CaptureError: as `batches`.
        """
        import pyarrow.compute as pc

        messages = size = 0
        for batch in self.read_batches(("kind", "size")):
            sizes = batch.filter(pc.equal(batch.column("kind"), "message")).column("size")
            messages, size = messages + len(sizes), size + (pc.sum(sizes).as_py() or 0)
        return messages, size

    def compute_digests(self) -> tuple[str, str]:
        """SHA-256 of the whole capture, and of its parts alone, by which copies are known whatever they are called.

        Raises:
            CaptureError: a part cannot be read or is missing.
        """
        parts = hashlib.sha256()
        for name in self._parts():
            parts.update(self._file_digest(name))
        whole = hashlib.sha256(self._file_digest("capture.json") + parts.digest())
        return whole.hexdigest(), parts.hexdigest()

    def _file_digest(self, name: str) -> bytes:
        try:
            with self.folder.open(name) as file:
                return hashlib.file_digest(file, "sha256").digest()
        except OSError as error:
            raise CaptureError(f"cannot read {self.name}/{name}: {error}") from None

    def read_transcript(
        self, shapes: Mapping[str, tuple[int, ...]], learners: int, network: Network | None = None
    ) -> Transcript:
        """What every learner said, up to the last round in which all were overheard whom anybody heard.

        What nobody heard is not-a-number. A wiretap hears no numbers: its captures have no transcript.

        Args:
            shapes: the fields of a message, and their shapes.
            learners: how many there are.
            network: who tells whom in which round (default: everybody is heard in every round).

        Raises:
            EquivocationError: one learner said different things to different neighbours in one round.
            CaptureError: a message cannot be decoded, a round is missing, or the capture is by wiretap.
        """
        self.require_messages()
        codec, rounds = RoundCodec(shapes), list[Message]()
        assembly = RoundReassembler[Message](learners, MAX_ROUNDS, network, names=self.names)
        listening = _Listening(network, self.names)
        for batch in self.read_batches(("caller", "callee", "sender", "kind", "method", "payload")):
            self.assemble_rounds(batch, codec, assembly, listening)
            if assembly.equivocations:
                t, sender = assembly.equivocations[0]
                raise EquivocationError(
                    f"{format_learner_name(self.names, sender)} said two different things in round {t}, or the capture was changed"
                )
            rounds += [_side_by_side(said, shapes, learners) for _, said in assembly.pop_complete_rounds()]
        if not rounds:
            raise CaptureError(f"the capture {self.name} has no round in which all {learners} learners were overheard")
        return Transcript({name: np.stack([each[name] for each in rounds])[:, :, None] for name in shapes})

    def assemble_rounds(
        self,
        batch: pa.RecordBatch,
        codec: RoundCodec,
        into: RoundReassembler[Message],
        listening: _Listening | None = None,
    ) -> None:
        """Put the rounds of a batch together with what was overheard before; fields are shaped `(1, 1, *shape)`, as in replay.

        Args:
            batch: of this capture, with the columns `sender, kind, method, payload`, and `caller, callee` for `listening`.
            codec: of the run's rounds.
            into: what was overheard before.
            listening: who may hear whom; None: anybody.

        Raises:
            CaptureError: a message is none of this run.
        """
        said = filter_rounds(batch)
        senders, payloads = said.column("sender").to_pylist(), said.column("payload").to_pylist()
        rows, rounds, claimed, fields = codec.decode_many(payloads)
        if wrong := set(range(len(payloads))) - set(rows.tolist()):
            try:
                codec.decode(payloads[min(wrong)])
            except RemoteProtocolError as error:
                where = f"a message of {format_learner_name(self.names, senders[min(wrong)])} in {self.name}"
                raise CaptureError(f"{where} cannot be decoded: {error}; {_DAMAGE_TEXT}") from None
        if listening is not None:
            ends = [said.column(name).to_pylist() for name in ("caller", "callee")]
            for sender, caller, callee, t in zip(senders, *ends, rounds.tolist(), strict=True):
                listening.require(sender, caller, callee, t, self.name)
        for k, (t, speaker) in enumerate(zip(rounds.tolist(), claimed.tolist(), strict=True)):
            content = Message({name: each[k : k + 1, None] for name, each in fields.items()})
            try:
                into.add_message(senders[k], speaker, t, digest(payloads[k]), content)
            except CaptureError as error:
                raise CaptureError(f"{self.name}: {error}; {_DAMAGE_TEXT}") from None

    def read_parts(
        self, columns: Sequence[str], wanted: Callable[[int], bool] = lambda _: True
    ) -> Iterator[tuple[int, pa.RecordBatch]]:
        """The records of some parts, each batch with the number of its part.

        Args:
            columns: which ones, of `records.schema()`.
            wanted: the number of a part (they count from 1) to whether it is read (default: all).

        Raises:
            CaptureError: a part cannot be read or is missing.
        """
        for name in self._parts():
            if wanted(parse_part_number(name)):
                for batch in read_part(self.folder, name, columns):
                    yield parse_part_number(name), batch

    def _parts(self) -> list[str]:
        """Names of the parts, in order.

        Raises:
            CaptureError: one is missing, or the place cannot be read.
        """
        try:
            parts = [name for name in self.folder.list_names() if parse_part_number(name)]
        except OSError as error:
            raise CaptureError(f"cannot read the capture {self.name}: {error}") from None
        parts.sort(key=parse_part_number)
        for expected, name in enumerate(parts, 1):
            if parse_part_number(name) != expected:
                raise CaptureError(
                    f"the capture {self.name} must have {format_part_name(expected)}, the next one is {name}"
                )
        return parts


class _Listening:
    """Who hears whom: a message on an edge that is none was put there by somebody else."""

    def __init__(self, network: Network | None, names: Sequence[str] = ()) -> None:
        self._network, self._names = network, names
        self._round, self._heard = -1, np.empty((0, 0), dtype=bool)

    def require(self, sender: int, caller: int, callee: int, t: int, where: str) -> None:
        """Refuse a message that nobody could have heard.

        Raises:
            CaptureError: its sender is at neither end, or the other end does not hear it in this round.
        """
        if sender not in (caller, callee) or caller == callee:
            who, *ends = (format_learner_name(self._names, i) for i in (sender, caller, callee))
            raise CaptureError(f"{where}: {who} cannot speak on the edge of {' and '.join(ends)}")
        if self._network is None:
            return
        if t != self._round:
            # Of who was lost something may have come that its hearer did not use any more.
            self._round, self._heard = t, self._network.planned_mixing(t).neighbour_weights != 0.0
        receiver = callee if sender == caller else caller
        if not (min(sender, receiver) >= 0 and max(sender, receiver) < len(self._heard)):
            raise CaptureError(
                f"{where}: there are {len(self._heard)} learners, got one on the edge {caller}, {callee}"
            )
        if not self._heard[receiver, sender]:
            deaf, who = (format_learner_name(self._names, i) for i in (receiver, sender))
            raise CaptureError(f"{where}: {deaf} does not hear {who} in round {t}")


def _side_by_side(said: Mapping[int, Message], shapes: Mapping[str, tuple[int, ...]], learners: int) -> Message:
    """One round: each field `(learners, *shape)`, not-a-number where nobody was overheard."""
    fields = {name: np.full((learners, *shape), np.nan) for name, shape in shapes.items()}
    for sender, message in said.items():
        for name, values in message.fields.items():
            fields[name][sender] = values[0, 0]
    return Message(fields)


def filter_rounds(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The messages that are rounds."""
    import pyarrow as pa
    import pyarrow.compute as pc

    methods = pa.array(sorted(EXCHANGE_METHODS))
    exchanged = pc.is_in(batch.column("method"), value_set=methods)
    return batch.filter(pc.and_(pc.equal(batch.column("kind"), "message"), exchanged))


def _count(batch: pa.RecordBatch, kind: str) -> int:
    import pyarrow.compute as pc

    return int(pc.sum(pc.equal(batch.column("kind"), kind)).as_py() or 0)


def open_capture(place: str | Path | Folder) -> Capture:
    """Open a capture.

    Args:
        place: its folder: a path, or a URL for fsspec.

    Raises:
        CaptureError: there is none in this folder, or it does not say what a capture says.
    """
    folder = open_folder(place) if isinstance(place, str | Path) else place
    try:
        if (size := folder.get_size("capture.json")) > _MAX_METADATA_BYTES:
            raise CaptureError(f"{folder.name}/capture.json must have at most {_MAX_METADATA_BYTES} bytes, got {size}")
        with folder.open("capture.json") as file:
            facts = json.loads(file.read(_MAX_METADATA_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise CaptureError(f"{folder.name} is not a capture: {str(error) or type(error).__name__}") from None
    if not isinstance(facts, dict) or facts.get("format") != CAPTURE_FORMAT:
        raise CaptureError(f"{folder.name} is not a capture of a known format ({CAPTURE_FORMAT})")
    wrong = [name for name, kind in _FACTS.items() if type(facts.get(name)) is not kind]
    wrong += [] if "fields" in wrong or _are_fields(facts["fields"]) else ["fields"]
    wrong += [] if _are_counts(facts.get("ciphertext")) else ["ciphertext"]
    wrong += [name for name in ("world", "replica") if type(facts.get(name, None)) not in (int, type(None))]
    if wrong:
        raise CaptureError(f"{folder.name}/capture.json must say {', '.join(wrong)}, of the types that a capture has")
    return Capture(folder, facts)


def _are_counts(told: Any) -> bool:
    """What a wiretap counts; or nothing, of a capture by none."""
    return told is None or (
        isinstance(told, dict)
        and sorted(told) == sorted(_CIPHERTEXT_COUNTS)
        and all(type(each) is int for each in told.values())
    )


def _are_fields(fields: Mapping[str, Any]) -> bool:
    """Few enough, and with shapes that an array can have."""
    numbers = 0
    for shape in fields.values():
        if not isinstance(shape, list) or len(shape) > 8 or not all(type(n) is int and n >= 0 for n in shape):
            return False
        numbers += math.prod(max(n, 1) for n in shape)
    return numbers <= _MAX_MESSAGE_NUMBERS and len(fields) <= _MAX_FIELDS


_MAX_DEPTH = 3
"""Folders below each other in which captures are looked for: results, captures, one capture."""


def find_captures(place: Folder, depth: int = _MAX_DEPTH) -> Iterator[Capture]:
    """All captures in a folder and below.

    Raises:
        CaptureError: one is not what it says it is, or a folder cannot be read.
    """
    try:
        names = place.list_names()
    except OSError as error:
        raise CaptureError(f"cannot read {place.name}: {error}") from None
    if "capture.json" in names:
        yield open_capture(place)
    elif depth:
        for name in names:
            yield from find_captures(place.get_subfolder(name), depth - 1)
