"""Transcripts: the messages of a run, with senders and rounds. Put together from recorded messages, in memory, and on disk.

Rounds put together from messages as they were overheard: in whatever order, and once for everybody who heard them.

A learner says one thing in a round, to all. Whoever says another one gives its noise away: two noisy copies of one state
average the noise out, and one noise on two states shows their difference. So the bytes that were heard first stand, and all
others are contradictions.

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
from sottovoce_core.arrays import BoolArray, FloatArray
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
"""Messages that are remembered where memory must be bounded: of those said longest ago nothing is known any more, and
nothing that contradicts them is seen."""

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class BoundedDict(OrderedDict[K, V], Generic[K, V]):
    """A dictionary that forgets what was set longest ago.

    Args:
        most: entries that it keeps; None: all.
    """

    def __init__(self, most: int | None = None) -> None:
        super().__init__()
        self._most = most

    def __setitem__(self, key: K, value: V) -> None:
        super().__setitem__(key, value)
        self.move_to_end(key)
        if self._most is not None and len(self) > self._most:
            self.popitem(last=False)


class RoundReassembler(Generic[V]):
    """Rounds of one run.

    Args:
        learners, rounds: of the run.
        network: who hears whom in which round; None: everybody is heard in every round.
        kept: messages that are remembered after their round, to notice whoever says something else later; None: all.
        names: of the learners, by index, for errors.

    Attributes:
        next: the first round that is not whole.
        equivocations: who said two different things in which round, `(round, learner)`.
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
        """A message that was overheard.

        Args:
            sender: by the channel that it came on.
            claimed: who it says is speaking.
            t: the round that it says it is for.
            digest: of its bytes.
            content: what is wanted of it when its round is whole.

        Raises:
            CaptureError: it is no message of this run.
        """
        if claimed != sender or sender >= self._learners or t >= self._rounds:
            late = f"in one of {self._rounds} rounds" if t >= self._rounds else "and as nobody else"
            raise CaptureError(
                f"each of {self._learners} learners must speak as itself, {late}, "
                f"got {format_learner_name(self._names, claimed)} in round {t} from {format_learner_name(self._names, sender)}"
            )
        if self._versions.setdefault((t, sender), digest) != digest:
            self.equivocations.append((t, sender))
        elif t >= self.next_round:
            self._pending.setdefault(t, {}).setdefault(sender, content)
            self._last = max(self._last, t)

    def pop_complete_rounds(self) -> Iterator[tuple[int, Mapping[int, V]]]:
        """The rounds in which all were overheard by now whom anybody hears, in order, each once."""
        while self.next_round <= self._last and not self.missing_senders:
            t = self.next_round
            self.next_round += 1
            yield t, self._pending.pop(t, {})

    @property
    def missing_senders(self) -> list[int]:
        """Who has yet to be overheard in the next round."""
        here = self._pending.get(self.next_round, {})
        return [i for i in self._heard() if i not in here]

    def _heard(self) -> Iterable[int]:
        """Those whose message of the next round somebody hears."""
        if self._network is None:
            return range(self._learners)
        heard: list[int] = np.flatnonzero(self._network.sender_mask(self.next_round)).tolist()
        return heard


# ---- transcript ------------------------------------------------------------------------------------------------------

_ROWS_PER_GROUP = 20_000
"""Rows that are written together."""
COLUMNS = ("run", "world", "replica", "round", "sender", "field", "value")


@dataclass(frozen=True, slots=True)
class Transcript:
    """All messages of a run: field name to `(rounds, learners, replicas, dim)`, not-a-number where nobody heard them."""

    fields: Mapping[str, FloatArray]

    @classmethod
    def from_rounds(cls, messages: Iterable[Message]) -> Transcript:
        """Of what all learners said, round after round, `(learners, replicas, dim)`."""
        said = list(messages)
        return cls({name: np.stack([message[name] for message in said]) for name in said[0].fields})

    @classmethod
    def concatenate(cls, parts: Sequence[Transcript]) -> Transcript:
        """All replicas of the parts, in order."""
        return cls({name: np.concatenate([part.fields[name] for part in parts], axis=2) for name in parts[0].fields})

    @property
    def rounds(self) -> int:
        """Number of rounds in which all messages are known that somebody heard."""
        return len(next(iter(self.fields.values())))

    @property
    def replicas(self) -> int:
        """Number of repetitions."""
        return int(next(iter(self.fields.values())).shape[2])

    def truncate(self, rounds: int) -> Transcript:
        """The first rounds of it."""
        return Transcript({name: values[:rounds] for name, values in self.fields.items()})

    def count_complete_rounds(self, learner: int, attendance: Participation | None = None) -> int:
        """Number of rounds before the first one in which nobody heard this learner: its noise is unknown from there on.

        Args:
            learner: its index.
            attendance: the rounds in which it takes part (default: all); in others there is nothing to hear.
        """
        values = next(iter(self.fields.values()))[:, learner]
        unheard: BoolArray = np.asarray(np.isnan(values.reshape(len(values), -1)).any(axis=1))
        if attendance is not None:
            unheard &= attendance.mask(len(unheard))
        return int(unheard.argmax()) if unheard.any() else self.rounds

    def message(self, t: int, sender: int) -> Message:
        """What one learner said in round t, `(1, replicas, dim)`."""
        return Message({name: values[t, sender : sender + 1] for name, values in self.fields.items()})

    def messages(self, t: int, learner: int, concerned: Iterable[int]) -> dict[int, Message]:
        """What a learner said in round t, and what it took in from others in that round, by sender.

        That is what they said in it; where rounds go on without late neighbours, what the learner's next message says that it
        used. Not-a-number where nobody heard that; left out where nobody heard that next message.

        Args:
            t: the round.
            learner: who said and took in.
            concerned: whose messages are asked for, the learner's own among them.
        """
        if USED_ROUNDS_FIELD not in self.fields:
            return {sender: self.message(t, sender) for sender in concerned}
        messages = {learner: self.message(t, learner)}
        if t + 1 < self.rounds:
            used = self.fields[USED_ROUNDS_FIELD][t + 1, learner]
            others = (sender for sender in sorted(concerned) if sender != learner)
            messages |= {sender: self._said_in(used[:, k], sender) for k, sender in enumerate(others)}
        return messages

    def _said_in(self, rounds: FloatArray, sender: int) -> Message:
        """What a learner said in a round of every replica, `(replicas,)`; not-a-number where there is no such round."""
        known = (rounds >= 0) & (rounds < self.rounds) & (rounds == np.rint(rounds))
        at, replicas = np.where(known, rounds, 0).astype(np.int64), np.arange(self.replicas)
        there = known.reshape(-1, 1)
        return Message(
            {name: np.where(there, each[at, sender, replicas], np.nan)[None] for name, each in self.fields.items()}
        )


def import_parquet() -> Any:
    """The module `pyarrow.parquet`, or an error that says how to get it.

    Raises:
        SpecError: pyarrow is not installed.
    """
    return import_optional("pyarrow.parquet", "pyarrow", "reading and writing Parquet")


class TranscriptWriter:
    """Writes rounds as they come, in row groups of bounded size. Use it in a `with` block: leaving it completes the file.

    Until then, and for good where an error or Ctrl-C ends the block, the file is called NAME.partial.
    """

    def __init__(self, path: Path, run: str) -> None:
        self._parquet = import_parquet()
        self._run = run
        self._pending: list[pa.Table] = []
        self._rows = 0
        self._path, self._partial = path, path.with_name(f"{path.name}.partial")
        self._partial.unlink(missing_ok=True)
        self._partial.touch(mode=0o600)  # noise, and what learners keep to themselves, is their user's alone
        self._writer = self._parquet.ParquetWriter(self._partial, _schema(), compression="zstd")

    def write(self, t: int, field: str, values: FloatArray) -> None:
        """Add one round of one field, `(learners, replicas, dim)`."""
        self._pending.append(_table(self._run, t, field, values))
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


def _schema() -> pa.Schema:
    import pyarrow as pa

    kinds = (pa.string(), pa.int8(), pa.int32(), pa.int32(), pa.int32(), pa.string(), pa.list_(pa.float64()))
    return pa.schema(list(zip(COLUMNS, kinds, strict=True)))


def _table(run: str, t: int, field: str, values: FloatArray) -> pa.Table:
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
    return pa.Table.from_arrays(list(columns), schema=_schema())


def _read(path: Path) -> dict[str, FloatArray]:
    """The fields of world 0 of a transcript file; every field must be there for all rounds, learners and replicas."""
    try:
        table = import_parquet().read_table(path)
    except (OSError, ValueError) as error:
        raise CaptureError(f"cannot read the transcript {path}: {error}") from None
    if missing := [name for name in COLUMNS if name not in table.column_names]:
        raise CaptureError(f"{path} is not a transcript: it must have columns {list(COLUMNS)}, and lacks {missing}")
    table = _as_written(path, table)
    columns = {name: table.column(name).to_numpy() for name in COLUMNS if name != "value"}
    chosen = columns["world"] == 0
    fields = {}
    for name in np.unique(columns["field"][chosen].astype(str)):
        rows = np.flatnonzero(chosen & (columns["field"] == name))
        keys = tuple(columns[key][rows].astype(np.int64) for key in ("round", "sender", "replica"))
        values = table.column("value").take(rows).combine_chunks()
        fields[str(name)] = _dense(path, str(name), keys, values)
    return fields


def _as_written(path: Path, table: pa.Table) -> pa.Table:
    """Columns of the types that they are written with, from those that others write for the same, without holes."""
    import pyarrow as pa

    columns = {}
    for expected in _schema():
        column = table.column(expected.name)
        try:
            if column.null_count or _family(column.type) != _family(expected.type):
                raise pa.ArrowTypeError
            columns[expected.name] = column.cast(expected.type)
        except pa.ArrowException:
            raise CaptureError(
                f"{path} is not a transcript: column {expected.name!r} must be {expected.type} without nulls, "
                f"got {column.type} with {column.null_count}"
            ) from None
    return pa.table(columns)


def _family(kind: pa.DataType) -> str:
    """What is alike in all types of a text, a whole number, or numbers in a row: pandas and Polars have others than we."""
    from pyarrow import types

    if types.is_dictionary(kind):
        return _family(kind.value_type)
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return "row" if types.is_floating(kind.value_type) else str(kind)
    text = types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)
    return "text" if text else "whole" if types.is_integer(kind) else str(kind)


def _dense(path: Path, name: str, keys: tuple[np.ndarray[Any, Any], ...], values: Any) -> FloatArray:
    """Rows as one array `(rounds, learners, replicas, dim)`."""
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
    """Recorded noise: field name to `(rounds, learners, replicas, dim)`, replicas 1 where the file has none.

    A `.npz` file holds one array per field, `(rounds, learners, dim)` or `(rounds, learners, replicas, dim)`; a `.parquet`
    file is a transcript with the noise as value, without rows where nothing was drawn.

    Raises:
        CaptureError: unreadable, or of another shape.
    """
    if path.suffix not in (".npz", ".parquet") or not path.is_file():
        raise CaptureError(f"cannot read the noise file {path}: it must be a .npz or .parquet file that exists")
    arrays = _arrays(path) if path.suffix == ".npz" else _read(path)
    for name, array in arrays.items():
        if array.ndim not in (3, 4) or not np.isfinite(array).all():
            raise CaptureError(
                f"{path}: {name!r} must be finite and shaped (rounds, learners, dim) or (rounds, learners, replicas, dim), "
                f"got shape {array.shape}"
            )
    return {name: array[:, :, None] if array.ndim == 3 else array for name, array in arrays.items()}


def _arrays(path: Path) -> dict[str, FloatArray]:
    """The arrays of a `.npz` file."""
    try:
        with path.open("rb") as file:
            archive = np.load(file, allow_pickle=False)
            if not isinstance(archive, Mapping):
                raise ValueError("it is not a .npz archive")
            return {name: np.asarray(archive[name], dtype=np.float64) for name in archive}
    except (OSError, ValueError, EOFError, BadZipFile) as error:  # what NumPy raises for other files
        raise CaptureError(f"cannot read the noise file {path}: {error}") from None
