"""Reader of captures: from raw bytes to the transcript that replay and audit use."""

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
from sottovoce_eavesdropper.capture_writer import CiphertextCounts
from sottovoce_eavesdropper.parts import MIB, build_schema, format_part_name, parse_part_number, read_part
from sottovoce_eavesdropper.storage import Folder, open_folder
from sottovoce_rpc.codec import RoundCodec

if TYPE_CHECKING:
    import pyarrow as pa

_MAX_METADATA_BYTES = 16 * MIB
"""Maximum bytes of `capture.json`."""
_DAMAGE_TEXT = "the capture may be damaged, or was changed"
MAX_ROUNDS = 2**24
"""Maximum number of rounds, beyond any run that is replayed: a message of a later round is forged."""
_MAX_MESSAGE_NUMBERS, _MAX_FIELDS = 2**24, 256
"""Maximum numbers of scalars and of fields in a message."""
MAX_NAMES, _MAX_NAME_CHARS = 4096, 63
"""Maximum number of learner names in a capture, and of characters of a name; captures are untrusted input."""

_REQUIRED_ENTRIES = {
    "capture_id": str,
    "run_id": str,
    "complete": bool,
    "messages": int,
    "bytes": int,
    "spec": dict,
    "fields": dict,
    "detections": list,
    "detection_count": int,
    "gaps": list,
    "routes": list,
    "opener": str,
    "n_features": int,
}
"""Required entries of `capture.json`, with their types."""
_CIPHERTEXT_COUNTS = ("connections", "records", "bytes")
"""Required entries of `ciphertext`, if it is present."""


@dataclass(frozen=True, slots=True)
class Capture:
    """A capture that was, or is being, written.

    Attributes:
        folder: folder of the capture.
        metadata: content of `capture.json`.
    """

    folder: Folder
    metadata: Mapping[str, Any]

    def __repr__(self) -> str:
        state = "complete" if self.is_complete else "incomplete"
        return f"Capture {escape_control(self.name)!r}: {self.metadata['messages']:,} messages, {state}"

    @property
    def name(self) -> str:
        """Path or URL."""
        return self.folder.name

    @property
    def is_complete(self) -> bool:
        """Return False if the eavesdropper ended before it closed the capture; its parts can be read all the same."""
        return bool(self.metadata["complete"])

    @property
    def world(self) -> int | None:
        """World of the run, in an audit of two; None if unknown."""
        world: int | None = self.metadata.get("world")
        return world

    @property
    def replica(self) -> int | None:
        """Replica number of the run, if one spec is run repeatedly; None if it has none."""
        replica: int | None = self.metadata.get("replica")
        return replica

    @property
    def ciphertext(self) -> CiphertextCounts | None:
        """Counts of a wiretap; None for a capture with messages."""
        counts = self.metadata.get("ciphertext")
        return None if counts is None else CiphertextCounts(**counts)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Fields of a round in order, with their shapes; empty if the capture is not of a run of ours."""
        return {name: tuple(shape) for name, shape in self.metadata["fields"].items()}

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the run's learners by index, escaped for a terminal; empty if the capture has none."""
        learners = self.metadata["spec"].get("learners")
        if isinstance(learners, list):
            return tuple(escape_control(str(each))[:_MAX_NAME_CHARS] for each in learners[:MAX_NAMES])
        return resolve_learner_names(min(max(learners, 0), MAX_NAMES)) if type(learners) is int else ()

    def read_batches(self, columns: Sequence[str] = ()) -> Iterator[pa.RecordBatch]:
        """Yield all rows in the order of recording, in batches of bounded size.

        Args:
            columns: names of columns (default: all of `build_schema()`).

        Raises:
            CaptureError: a part cannot be read or is missing, or a closed capture has another number of messages than recorded.
        """
        names = tuple(columns) or tuple(build_schema().names)
        ciphertext = self.ciphertext
        kind, due = ("message", self.metadata["messages"]) if ciphertext is None else ("ciphertext", ciphertext.records)
        found = 0
        for part in self._list_parts():
            for batch in read_part(self.folder, part, tuple(dict.fromkeys((*names, "kind")))):
                found += _count(batch, kind)
                yield batch.select(list(names))
        if self.is_complete and found != due:
            why = "parts are missing, or it was changed" if found < due else "it is damaged, or was changed"
            raise CaptureError(f"the capture {self.name} must have {due} {kind}s, got {found}: {why}")

    def read_messages(self, columns: Sequence[str] = ()) -> Any:
        """Return all messages as one Arrow table, which holds all of them in memory.

        Raises:
            CaptureError: as of `read_batches`, or there is no part.
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
        """Require a capture with readable messages.

        Raises:
            CaptureError: it is a wiretap's.
        """
        if self.ciphertext is not None:
            raise CaptureError(
                f"{self.name} is by wiretap: it has sizes and times of ciphertext, and no message. `sottovoce audit --captures` "
                "looks for what they give away; for the rest take `capture: relay` or `mirror`"
            )

    def count_messages(self) -> tuple[int, int]:
        """Return the number of messages, and of their bytes.

        Raises:
            CaptureError: as of `read_batches`.
        """
        import pyarrow.compute as pc

        messages = size = 0
        for batch in self.read_batches(("kind", "size")):
            sizes = batch.filter(pc.equal(batch.column("kind"), "message")).column("size")
            messages, size = messages + len(sizes), size + (pc.sum(sizes).as_py() or 0)
        return messages, size

    def compute_digests(self) -> tuple[str, str]:
        """Return the SHA-256 of the capture, and of its parts only, which identifies copies under another name.

        Raises:
            CaptureError: a part cannot be read or is missing.
        """
        parts = hashlib.sha256()
        for name in self._list_parts():
            parts.update(self._compute_file_digest(name))
        whole = hashlib.sha256(self._compute_file_digest("capture.json") + parts.digest())
        return whole.hexdigest(), parts.hexdigest()

    def _compute_file_digest(self, name: str) -> bytes:
        try:
            with self.folder.open(name) as file:
                return hashlib.file_digest(file, "sha256").digest()
        except OSError as error:
            raise CaptureError(f"cannot read {self.name}/{name}: {error}") from None

    def read_transcript(
        self, shapes: Mapping[str, tuple[int, ...]], learners: int, network: Network | None = None
    ) -> Transcript:
        """Return what every learner sent, up to the last round in which all senders with a recipient were recorded.

        Messages without a recipient are NaN. A wiretap capture has no transcript.

        Args:
            shapes: fields of a message, with their shapes.
            learners: number of learners.
            network: recipients of each round (default: every learner is received in every round).

        Raises:
            EquivocationError: a learner sent different messages to different neighbours in one round.
            CaptureError: a message cannot be decoded, a round is missing, or the capture is a wiretap's.
        """
        self.require_messages()
        codec, rounds = RoundCodec(shapes), list[Message]()
        assembly = RoundReassembler[Message](learners, MAX_ROUNDS, network, names=self.names)
        allowed_channels = _AllowedChannels(network, self.names)
        for batch in self.read_batches(("caller", "callee", "sender", "kind", "method", "payload")):
            self.assemble_rounds(batch, codec, assembly, allowed_channels)
            if assembly.equivocations:
                t, sender = assembly.equivocations[0]
                raise EquivocationError(
                    f"{format_learner_name(self.names, sender)} sent two different messages in round {t}, "
                    "or the capture was changed"
                )
            rounds += [_combine_messages(messages, shapes, learners) for _, messages in assembly.pop_complete_rounds()]
        if not rounds:
            raise CaptureError(f"the capture {self.name} has no round in which all {learners} learners were recorded")
        return Transcript({name: np.stack([each[name] for each in rounds])[:, :, None] for name in shapes})

    def assemble_rounds(
        self,
        batch: pa.RecordBatch,
        codec: RoundCodec,
        into: RoundReassembler[Message],
        allowed_channels: _AllowedChannels | None = None,
    ) -> None:
        """Add the rounds of a batch to those recorded before; fields have the shape `(1, 1, *shape)`, as in replay.

        Args:
            batch: rows of this capture, with the columns `sender, kind, method, payload`, and `caller, callee` for
                `allowed_channels`.
            codec: codec of the run's rounds.
            into: rounds recorded before.
            allowed_channels: channels of each round; None: all.

        Raises:
            CaptureError: a message is not of this run.
        """
        messages = filter_rounds(batch)
        senders, payloads = messages.column("sender").to_pylist(), messages.column("payload").to_pylist()
        rows, rounds, claimed, fields = codec.decode_many(payloads)
        if wrong := set(range(len(payloads))) - set(rows.tolist()):
            try:
                codec.decode(payloads[min(wrong)])
            except RemoteProtocolError as error:
                where = f"a message of {format_learner_name(self.names, senders[min(wrong)])} in {self.name}"
                raise CaptureError(f"{where} cannot be decoded: {error}; {_DAMAGE_TEXT}") from None
        if allowed_channels is not None:
            ends = [messages.column(name).to_pylist() for name in ("caller", "callee")]
            for sender, caller, callee, t in zip(senders, *ends, rounds.tolist(), strict=True):
                allowed_channels.require(sender, caller, callee, t, self.name)
        for k, (t, claimed_sender) in enumerate(zip(rounds.tolist(), claimed.tolist(), strict=True)):
            content = Message({name: each[k : k + 1, None] for name, each in fields.items()})
            try:
                into.add_message(senders[k], claimed_sender, t, digest(payloads[k]), content)
            except CaptureError as error:
                raise CaptureError(f"{self.name}: {error}; {_DAMAGE_TEXT}") from None

    def read_parts(
        self, columns: Sequence[str], wanted: Callable[[int], bool] = lambda _: True
    ) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Yield the rows of some parts, each batch with its part number.

        Args:
            columns: names of columns of `build_schema()`.
            wanted: predicate on part numbers, which count from 1 (default: all).

        Raises:
            CaptureError: a part cannot be read or is missing.
        """
        for name in self._list_parts():
            if wanted(parse_part_number(name)):
                for batch in read_part(self.folder, name, columns):
                    yield parse_part_number(name), batch

    def _list_parts(self) -> list[str]:
        """Return the names of the parts, in order.

        Raises:
            CaptureError: a part is missing, or the folder cannot be read.
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


class _AllowedChannels:
    """Channels of the network in each round: a message on any other channel is forged."""

    def __init__(self, network: Network | None, names: Sequence[str] = ()) -> None:
        self._network, self._names = network, names
        self._round, self._has_channel = -1, np.empty((0, 0), dtype=bool)

    def require(self, sender: int, caller: int, callee: int, t: int, where: str) -> None:
        """Require that a message was sent on a channel of its round.

        Raises:
            CaptureError: its sender is at neither end, or the other end is not its recipient in this round.
        """
        if sender not in (caller, callee) or caller == callee:
            who, *ends = (format_learner_name(self._names, i) for i in (sender, caller, callee))
            raise CaptureError(f"{where}: {who} cannot send on the edge of {' and '.join(ends)}")
        if self._network is None:
            return
        if t != self._round:
            # Planned weights: a message of a learner that was lost may have arrived without being used.
            self._round, self._has_channel = t, self._network.planned_mixing(t).neighbour_weights != 0.0
        receiver = callee if sender == caller else caller
        if not (min(sender, receiver) >= 0 and max(sender, receiver) < len(self._has_channel)):
            raise CaptureError(
                f"{where}: there are {len(self._has_channel)} learners, got one on the edge {caller}, {callee}"
            )
        if not self._has_channel[receiver, sender]:
            recipient, who = (format_learner_name(self._names, i) for i in (receiver, sender))
            raise CaptureError(f"{where}: {recipient} does not receive from {who} in round {t}")


def _combine_messages(messages: Mapping[int, Message], shapes: Mapping[str, tuple[int, ...]], learners: int) -> Message:
    """Combine one round: each field has the shape `(learners, *shape)`, NaN for learners that were not recorded."""
    fields = {name: np.full((learners, *shape), np.nan) for name, shape in shapes.items()}
    for sender, message in messages.items():
        for name, values in message.fields.items():
            fields[name][sender] = values[0, 0]
    return Message(fields)


def filter_rounds(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return the rows that are messages of rounds."""
    import pyarrow as pa
    import pyarrow.compute as pc

    methods = pa.array(sorted(EXCHANGE_METHODS))
    exchanged = pc.is_in(batch.column("method"), value_set=methods)
    return batch.filter(pc.and_(pc.equal(batch.column("kind"), "message"), exchanged))


def _count(batch: pa.RecordBatch, kind: str) -> int:
    import pyarrow.compute as pc

    return int(pc.sum(pc.equal(batch.column("kind"), kind)).as_py() or 0)


def open_capture(location: str | Path | Folder) -> Capture:
    """Open a capture.

    Args:
        location: its folder: a path, or a URL for fsspec.

    Raises:
        CaptureError: the folder has no capture, or `capture.json` is not valid.
    """
    folder = open_folder(location) if isinstance(location, str | Path) else location
    try:
        if (size := folder.get_size("capture.json")) > _MAX_METADATA_BYTES:
            raise CaptureError(f"{folder.name}/capture.json must have at most {_MAX_METADATA_BYTES} bytes, got {size}")
        with folder.open("capture.json") as file:
            facts = json.loads(file.read(_MAX_METADATA_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise CaptureError(f"{folder.name} is not a capture: {str(error) or type(error).__name__}") from None
    if not isinstance(facts, dict) or facts.get("format") != CAPTURE_FORMAT:
        raise CaptureError(f"{folder.name} is not a capture of a known format ({CAPTURE_FORMAT})")
    wrong = [name for name, kind in _REQUIRED_ENTRIES.items() if type(facts.get(name)) is not kind]
    wrong += [] if "fields" in wrong or _are_fields(facts["fields"]) else ["fields"]
    wrong += [] if _are_counts(facts.get("ciphertext")) else ["ciphertext"]
    wrong += [name for name in ("world", "replica") if type(facts.get(name, None)) not in (int, type(None))]
    if wrong:
        raise CaptureError(f"{folder.name}/capture.json must have {', '.join(wrong)}, of the types that a capture has")
    return Capture(folder, facts)


def _are_counts(counts: Any) -> bool:
    """Return whether these are counts of a wiretap, or None."""
    return counts is None or (
        isinstance(counts, dict)
        and sorted(counts) == sorted(_CIPHERTEXT_COUNTS)
        and all(type(each) is int for each in counts.values())
    )


def _are_fields(fields: Mapping[str, Any]) -> bool:
    """Return whether these are fields within the limits, with shapes that an array can have."""
    numbers = 0
    for shape in fields.values():
        if not isinstance(shape, list) or len(shape) > 8 or not all(type(n) is int and n >= 0 for n in shape):
            return False
        numbers += math.prod(max(n, 1) for n in shape)
    return numbers <= _MAX_MESSAGE_NUMBERS and len(fields) <= _MAX_FIELDS


_MAX_DEPTH = 3
"""Maximum depth of folders in which captures are searched: results, captures, one capture."""


def find_captures(folder: Folder, depth: int = _MAX_DEPTH) -> Iterator[Capture]:
    """Find all captures in a folder and below.

    Raises:
        CaptureError: a capture is not valid, or a folder cannot be read.
    """
    try:
        names = folder.list_names()
    except OSError as error:
        raise CaptureError(f"cannot read {folder.name}: {error}") from None
    if "capture.json" in names:
        yield open_capture(folder)
    elif depth:
        for name in names:
            yield from find_captures(folder.get_subfolder(name), depth - 1)
