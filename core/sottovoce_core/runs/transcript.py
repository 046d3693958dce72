"""Transcripts: the messages of a run by sender and round, reassembled from captured messages, in memory, and on disk.

Captured messages are reassembled to rounds: in any order of arrival, and once for all recipients.

A learner sends one message in a round, to all. A learner that sends different messages reveals its noise: the mean of two noisy
copies of one state reduces the noise, and one noise on two states shows their difference. So the first captured bytes are kept,
and all others are equivocations.

Columns of the file: `run, world, replica, round, sender, field, value`; `value` is a list of float64, the tensor flattened.
The same table holds decisions (field `decision`) and recorded noise (the noise in place of the value).
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar
from zipfile import BadZipFile

import numpy as np

from sottovoce_core.algorithms.interface import Message
from sottovoce_core.arrays import BoolArray, FloatArray, summarize_fields
from sottovoce_core.errors import CaptureError
from sottovoce_core.network.network import Network
from sottovoce_core.network.participation_schedule import Participation
from sottovoce_core.optional import import_optional
from sottovoce_core.runs.participation import USED_ROUNDS_FIELD
from sottovoce_core.text import format_learner_name

if TYPE_CHECKING:
    import pyarrow as pa

# ---- assembly --------------------------------------------------------------------------------------------------------

MAX_REMEMBERED_MESSAGES = 65_536
"""Maximum number of remembered messages if memory must be bounded: of older messages nothing is known any more, and
equivocation about them is not detected."""

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class BoundedDict(OrderedDict[K, V], Generic[K, V]):
    """A dictionary that drops the entries that were set longest ago.

    Args:
        max_entries: maximum number of entries; None: unlimited.
    """

    def __init__(self, max_entries: int | None = None) -> None:
        super().__init__()
        self._max_entries = max_entries

    def __setitem__(self, key: K, value: V) -> None:
        super().__setitem__(key, value)
        self.move_to_end(key)
        if self._max_entries is not None and len(self) > self._max_entries:
            self.popitem(last=False)


class RoundReassembler(Generic[V]):
    """Reassembles the rounds of one run.

    Args:
        learners, rounds: numbers of learners and rounds of the run.
        network: network of the run; None: every learner has a recipient in every round.
        max_remembered: number of messages to remember after their round, to detect later equivocation; None: all.
        names: names of the learners, by index, for errors.

    Attributes:
        next_round: the first incomplete round.
        equivocations: learners that sent two different messages in a round, `(round, learner)`.
    """

    def __init__(
        self,
        learners: int,
        rounds: int,
        network: Network | None = None,
        max_remembered: int | None = None,
        *,
        names: Sequence[str] = (),
    ) -> None:
        self._names = names
        self.next_round, self.equivocations = 0, list[tuple[int, int]]()
        self._learners, self._rounds, self._network = learners, rounds, network
        self._versions: BoundedDict[tuple[int, int], bytes] = BoundedDict(max_remembered)
        self._pending: dict[int, dict[int, V]] = {}
        self._last = -1

    def add_message(self, sender: int, claimed: int, t: int, digest: bytes, content: V) -> None:
        """Add a captured message.

        Args:
            sender: sender by the channel of the message.
            claimed: sender stated in the message.
            t: round stated in the message.
            digest: digest of its bytes.
            content: value to keep until the round is complete.

        Raises:
            CaptureError: it is no message of this run.
        """
        if claimed != sender or sender >= self._learners or t >= self._rounds:
            late = f"in one of {self._rounds} rounds" if t >= self._rounds else "and not as another"
            raise CaptureError(
                f"each of {self._learners} learners must send as itself, {late}, "
                f"got {format_learner_name(self._names, claimed)} in round {t} from {format_learner_name(self._names, sender)}"
            )
        if self._versions.setdefault((t, sender), digest) != digest:
            self.equivocations.append((t, sender))
        elif t >= self.next_round:
            self._pending.setdefault(t, {}).setdefault(sender, content)
            self._last = max(self._last, t)

    def pop_complete_rounds(self) -> Iterator[tuple[int, Mapping[int, V]]]:
        """Yield the rounds that are complete by now: all messages with a recipient are captured. In order, each once."""
        while self.next_round <= self._last and not self.missing_senders:
            t = self.next_round
            self.next_round += 1
            yield t, self._pending.pop(t, {})

    @property
    def missing_senders(self) -> list[int]:
        """Senders whose message of the next round is not captured yet."""
        here = self._pending.get(self.next_round, {})
        return [i for i in self._senders_with_recipient() if i not in here]

    def _senders_with_recipient(self) -> Iterable[int]:
        """Return the senders of the next round that have a recipient."""
        if self._network is None:
            return range(self._learners)
        sender_indices: list[int] = np.flatnonzero(self._network.sender_mask(self.next_round)).tolist()
        return sender_indices


# ---- transcript ------------------------------------------------------------------------------------------------------

_ROWS_PER_GROUP = 20_000
"""Number of rows that are written together."""
COLUMNS = ("run", "world", "replica", "round", "sender", "field", "value")


@dataclass(frozen=True, slots=True)
class Transcript:
    """All messages of a run: field name to `(rounds, learners, replicas, dim)`, not-a-number for messages not captured."""

    fields: Mapping[str, FloatArray]

    __repr__ = summarize_fields

    @classmethod
    def from_rounds(cls, messages: Iterable[Message]) -> Transcript:
        """Stack the messages of all learners, round by round, `(learners, replicas, dim)`."""
        stacked = list(messages)
        return cls({name: np.stack([message[name] for message in stacked]) for name in stacked[0].fields})

    @classmethod
    def concatenate(cls, parts: Sequence[Transcript]) -> Transcript:
        """Concatenate all replicas of the parts, in order."""
        return cls({name: np.concatenate([part.fields[name] for part in parts], axis=2) for name in parts[0].fields})

    @property
    def rounds(self) -> int:
        """Number of complete rounds."""
        return len(next(iter(self.fields.values())))

    @property
    def replicas(self) -> int:
        """Number of repetitions."""
        return int(next(iter(self.fields.values())).shape[2])

    def truncate(self, rounds: int) -> Transcript:
        """Return the first rounds of the transcript."""
        return Transcript({name: values[:rounds] for name, values in self.fields.items()})

    def count_complete_rounds(self, learner: int, attendance: Participation | None = None) -> int:
        """Count the rounds before the first one in which this learner was not captured: later noise is unknown.

        Args:
            learner: index of the learner.
            attendance: participation of the learner (default: all rounds); in other rounds there is no message.
        """
        values = next(iter(self.fields.values()))[:, learner]
        is_missing: BoolArray = np.asarray(np.isnan(values.reshape(len(values), -1)).any(axis=1))
        if attendance is not None:
            is_missing &= attendance.mask(len(is_missing))
        return int(is_missing.argmax()) if is_missing.any() else self.rounds

    def message(self, t: int, sender: int) -> Message:
        """Return the message of one learner in round t, `(1, replicas, dim)`."""
        return Message({name: values[t, sender : sender + 1] for name, values in self.fields.items()})

    def messages(self, t: int, learner: int, concerned: Iterable[int]) -> dict[int, Message]:
        """Return the message of a learner in round t, and the messages that it used in that round, by sender.

        Those are the messages of that round; with bounded staleness, those that the learner's next message states. Not-a-number
        for a message not captured; left out if the next message was not captured.

        Args:
            t: the round.
            learner: recipient.
            concerned: senders to include, the learner itself among them.
        """
        if USED_ROUNDS_FIELD not in self.fields:
            return {sender: self.message(t, sender) for sender in concerned}
        messages = {learner: self.message(t, learner)}
        if t + 1 < self.rounds:
            used = self.fields[USED_ROUNDS_FIELD][t + 1, learner]
            others = (sender for sender in sorted(concerned) if sender != learner)
            messages |= {sender: self._message_of_rounds(used[:, k], sender) for k, sender in enumerate(others)}
        return messages

    def _message_of_rounds(self, rounds: FloatArray, sender: int) -> Message:
        """Return a learner's message of a round given by replica, `(replicas,)`; not-a-number if there is no such round."""
        known = (rounds >= 0) & (rounds < self.rounds) & (rounds == np.rint(rounds))
        at, replicas = np.where(known, rounds, 0).astype(np.int64), np.arange(self.replicas)
        there = known.reshape(-1, 1)
        return Message(
            {name: np.where(there, each[at, sender, replicas], np.nan)[None] for name, each in self.fields.items()}
        )


def import_parquet() -> Any:
    """Import `pyarrow.parquet`.

    Raises:
        SpecError: pyarrow is not installed.
    """
    return import_optional("pyarrow.parquet", "pyarrow", "reading and writing Parquet")


class TranscriptWriter:
    """Writes rounds as they come, in row groups of bounded size. Use it in a `with` block: leaving it completes the file.

    Until then, and permanently if an error or Ctrl-C ends the block, the file is called NAME.partial.
    """

    def __init__(self, path: Path, run: str) -> None:
        self._parquet = import_parquet()
        self._run = run
        self._pending: list[pa.Table] = []
        self._rows = 0
        self._path, self._partial = path, path.with_name(f"{path.name}.partial")
        self._partial.unlink(missing_ok=True)
        self._partial.touch(mode=0o600)  # noise and unpublished values are only for their user
        self._writer = self._parquet.ParquetWriter(self._partial, _build_schema(), compression="zstd")

    def write(self, t: int, field: str, values: FloatArray) -> None:
        """Add one round of one field, `(learners, replicas, dim)`."""
        self._pending.append(_build_table(self._run, t, field, values))
        self._rows += values.shape[0] * values.shape[1]
        if self._rows >= _ROWS_PER_GROUP:
            self._flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._flush()
        self._writer.close()
        if kind is None:
            self._partial.replace(self._path)

    def _flush(self) -> None:
        import pyarrow as pa

        if self._pending:
            self._writer.write_table(pa.concat_tables(self._pending))
        self._pending, self._rows = [], 0


def _build_schema() -> pa.Schema:
    import pyarrow as pa

    kinds = (pa.string(), pa.int8(), pa.int32(), pa.int32(), pa.int32(), pa.string(), pa.list_(pa.float64()))
    return pa.schema(list(zip(COLUMNS, kinds, strict=True)))


def _build_table(run: str, t: int, field: str, values: FloatArray) -> pa.Table:
    import pyarrow as pa

    learners, replicas, dim = values.shape
    rows = learners * replicas
    offsets = np.arange(0, rows * dim + 1, dim, dtype=np.int32)
    columns = (
        pa.repeat(run, rows),
        pa.repeat(pa.scalar(0, pa.int8()), rows),
        pa.array(np.tile(np.arange(replicas, dtype=np.int32), learners)),
        pa.repeat(pa.scalar(t, pa.int32()), rows),
        pa.array(np.repeat(np.arange(learners, dtype=np.int32), replicas)),
        pa.repeat(field, rows),
        pa.ListArray.from_arrays(offsets, pa.array(np.ascontiguousarray(values).reshape(-1))),
    )
    return pa.Table.from_arrays(list(columns), schema=_build_schema())


def _read_fields(path: Path) -> dict[str, FloatArray]:
    """Read the fields of world 0 of a transcript file; every field must exist for all rounds, learners and replicas."""
    try:
        table = import_parquet().read_table(path)
    except (OSError, ValueError) as error:
        raise CaptureError(f"cannot read the transcript {path}: {error}") from None
    if missing := [name for name in COLUMNS if name not in table.column_names]:
        raise CaptureError(f"{path} is not a transcript: it must have columns {list(COLUMNS)}, and lacks {missing}")
    table = _cast_columns(path, table)
    columns = {name: table.column(name).to_numpy() for name in COLUMNS if name != "value"}
    chosen = columns["world"] == 0
    fields = {}
    for name in np.unique(columns["field"][chosen].astype(str)):
        rows = np.flatnonzero(chosen & (columns["field"] == name))
        keys = tuple(columns[key][rows].astype(np.int64) for key in ("round", "sender", "replica"))
        values = table.column("value").take(rows).combine_chunks()
        fields[str(name)] = _arrange_rows(path, str(name), keys, values)
    return fields


def _cast_columns(path: Path, table: pa.Table) -> pa.Table:
    """Cast columns to the types of our files, from equivalent types of other programs, without nulls."""
    import pyarrow as pa

    columns = {}
    for expected in _build_schema():
        column = table.column(expected.name)
        try:
            if column.null_count or _get_type_family(column.type) != _get_type_family(expected.type):
                raise pa.ArrowTypeError
            columns[expected.name] = column.cast(expected.type)
        except pa.ArrowException:
            raise CaptureError(
                f"{path} is not a transcript: column {expected.name!r} must be {expected.type} without nulls, "
                f"got {column.type} with {column.null_count}"
            ) from None
    return pa.table(columns)


def _get_type_family(kind: pa.DataType) -> str:
    """Return a name common to all types of a text, an integer, or a list of numbers: pandas and Polars use other types."""
    from pyarrow import types

    if types.is_dictionary(kind):
        return _get_type_family(kind.value_type)
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return "row" if types.is_floating(kind.value_type) else str(kind)
    text = types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)
    return "text" if text else "whole" if types.is_integer(kind) else str(kind)


def _arrange_rows(path: Path, name: str, keys: tuple[np.ndarray[Any, Any], ...], values: Any) -> FloatArray:
    """Arrange rows as one array `(rounds, learners, replicas, dim)`."""
    rows, shape = len(keys[0]), tuple(int(key.max()) + 1 for key in keys)
    flat = values.flatten().to_numpy(zero_copy_only=False)
    lengths = np.unique(values.value_lengths().to_numpy(zero_copy_only=False))
    distinct = len(np.unique(np.stack(keys), axis=1).T)
    if min(int(key.min()) for key in keys) < 0 or not rows == distinct == math.prod(shape) or len(lengths) != 1:
        raise CaptureError(
            f"{path}: field {name!r} must have one row of equal length for each of {shape} (rounds, learners, replicas), "
            f"got {rows} rows ({distinct} different ones) with {len(flat)} numbers"
        )
    dense = np.empty((*shape, int(lengths[0])))
    dense[keys] = flat.reshape(rows, -1)
    return dense


def read_noise(path: Path) -> dict[str, FloatArray]:
    """Read recorded noise: field name to `(rounds, learners, replicas, dim)`, replicas 1 if the file has none.

    A `.npz` file holds one array per field, `(rounds, learners, dim)` or `(rounds, learners, replicas, dim)`; a `.parquet`
    file is a transcript with the noise as value, without rows for rounds without noise.

    Raises:
        CaptureError: unreadable, or of another shape.
    """
    if path.suffix not in (".npz", ".parquet") or not path.is_file():
        raise CaptureError(f"cannot read the noise file {path}: it must be a .npz or .parquet file that exists")
    arrays = _read_arrays(path) if path.suffix == ".npz" else _read_fields(path)
    for name, array in arrays.items():
        if array.ndim not in (3, 4) or not np.isfinite(array).all():
            raise CaptureError(
                f"{path}: {name!r} must be finite and shaped (rounds, learners, dim) or (rounds, learners, replicas, dim), "
                f"got shape {array.shape}"
            )
    return {name: array[:, :, None] if array.ndim == 3 else array for name, array in arrays.items()}


def _read_arrays(path: Path) -> dict[str, FloatArray]:
    """Read the arrays of a `.npz` file."""
    try:
        with path.open("rb") as file:
            archive = np.load(file, allow_pickle=False)
            if not isinstance(archive, Mapping):
                raise ValueError("it is not a .npz archive")
            return {name: np.asarray(archive[name], dtype=np.float64) for name in archive}
    except (OSError, ValueError, EOFError, BadZipFile) as error:  # errors of NumPy for other files
        raise CaptureError(f"cannot read the noise file {path}: {error}") from None
