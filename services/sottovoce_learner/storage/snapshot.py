"""Snapshots: files that stand in place of the beginning of a log, so that neither the log nor its replay grows with the run.

A snapshot is a value as bytes, without pickle: a tree of dataclasses, tuples, lists, dicts, numbers, texts and arrays becomes a
JSON head that describes it, and behind that the arrays' raw numbers, each aligned. What is no data, such as the loss, is written
as a name, and taken from the run again. Reading builds dataclasses alone, of modules that are imported already. No clock.
"""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from itertools import pairwise
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np

from sottovoce_core.errors import CorruptStateError
from sottovoce_core.runs.run import Run
from sottovoce_learner.ingest.record_queue import RecordQueueState
from sottovoce_learner.peers.outbox import SentDigests
from sottovoce_learner.storage.state_folder import FORMAT, require_format
from sottovoce_learner.storage.wal import LogContents

_MAGIC = b"sotto.s\0"
_HEAD, _FLOAT = struct.Struct("<8sII"), struct.Struct("<d")
_ALIGNMENT_BYTES = 64


@dataclass(frozen=True, slots=True)
class LearnerSnapshot:
    """A learner right after it has said a round.

    Attributes:
        state: of the algorithm.
        spent: epsilon of the run.
        counts: records of each round that it has learned, as 32-bit numbers.
        taken: its intake.
        frames: what was said last, by round, as much of it as a neighbour may lack.
        judged: records that it predicted before it learned them: those that it got right, and all.
        own: digests of what it said, in the blocks that it signs or may sign again.
        heard: where rounds may go on without late neighbours, the messages that it used last, as they came.
        messages: that it has said.
    """

    state: Any
    epsilon_spent: float
    record_counts: bytes
    intake_state: RecordQueueState
    frames: tuple[tuple[int, bytes], ...]
    accuracy_counts: tuple[int, int]
    sent_digests: SentDigests
    received_frames: tuple[bytes, ...] = ()
    messages_sent: int = 0

    @staticmethod
    def collect_named_objects(run: Run) -> dict[str, object]:
        """What is no data in an algorithm's state, and is there again when the run is."""
        return {"loss": run.loss, "algorithm": run.algorithm}

    @classmethod
    def read_from_log(cls, log: LogContents, names: Mapping[str, object]) -> LearnerSnapshot | None:
        """What a log goes on from; None: from the start.

        Args:
            log: what is left of it.
            names: as for `unpack`.

        Raises:
            CorruptStateError: another version wrote it.
        """
        if log.snapshot is None:
            return None
        image = unpack((log.folder / log.snapshot.file_name).read_bytes(), names)
        if not isinstance(image, cls):
            raise CorruptStateError(f"a snapshot must hold an image of a learner, got {type(image).__name__}")
        return image


# ---- values as bytes -------------------------------------------------------------------------------------------------


class UnpackableError(TypeError):
    """A value is made of something that has no bytes of its own."""


@runtime_checkable
class _Packed(Protocol):
    """What is written as something simpler: a buffer as the rows that are in use."""

    def to_packable(self) -> Any:
        """The simpler value."""
        ...

    @classmethod
    def from_packable(cls, value: Any) -> Any:
        """`packed` backwards."""
        ...


def pack(value: Any, named: Mapping[str, object]) -> bytes:
    """A value as bytes.

    Args:
        value: the value.
        named: what is written as a name, by its name.

    Raises:
        Unpackable: some part of it is of a type that is not known here.
    """
    return b"".join(_parts(value, named))


def is_packed_as(raw: bytes, value: Any, named: Mapping[str, object]) -> bool:
    """Would `pack` make these bytes of a value? Without making them anew: a state may fill half of the memory.

    Raises:
        Unpackable: as `pack`.
    """
    at, whole = 0, np.frombuffer(raw, np.uint8)
    for part in _parts(value, named):
        if not np.array_equal(whole[at : at + len(part)], np.frombuffer(part, np.uint8)):
            return False
        at += len(part)
    return at == len(raw)


def _parts(value: Any, named: Mapping[str, object]) -> list[bytes | memoryview]:
    writing = _Writing(named)
    tree = writing.node(value)
    head = json.dumps({"tree": tree, "sizes": [len(raw) for raw in writing.arrays]}, separators=(",", ":")).encode()
    parts: list[bytes | memoryview] = [_HEAD.pack(_MAGIC, FORMAT, len(head)), head]
    parts.append(bytes(-(_HEAD.size + len(head)) % _ALIGNMENT_BYTES))
    for raw in writing.arrays:
        parts += raw, bytes(-len(raw) % _ALIGNMENT_BYTES)
    return parts


def unpack(raw: bytes, named: Mapping[str, object]) -> Any:
    """`pack` backwards.

    Raises:
        CorruptStateError: the bytes are not what `pack` writes, or by another version of a class.
    """
    if len(raw) < _HEAD.size or not raw.startswith(_MAGIC):
        raise CorruptStateError("a snapshot must begin with its mark, and this one does not")
    _, form, length = _HEAD.unpack_from(raw)
    require_format("a snapshot", form)
    head = json.loads(raw[_HEAD.size : _HEAD.size + length])
    at = _HEAD.size + length
    starts = [at + -at % _ALIGNMENT_BYTES]
    for size in head["sizes"]:
        starts.append(starts[-1] + size + -size % _ALIGNMENT_BYTES)
    arrays = [memoryview(raw)[a:b] for a, b in pairwise(starts)]
    return _Reading(named, arrays).value(head["tree"])


class _Writing:
    """A tree on its way to JSON; its arrays are kept aside."""

    def __init__(self, named: Mapping[str, object]) -> None:
        self._names = {id(each): name for name, each in named.items()}
        self.arrays: list[bytes | memoryview] = []

    def node(self, value: Any) -> Any:
        """One value: as it is, or by its kind."""
        if value is None or type(value) in (bool, int, str):
            return value
        if id(value) in self._names:
            return {"=": self._names[id(value)]}
        if type(value) is float:
            return {"f": _FLOAT.pack(value).hex()}  # of one length, whatever it is
        if type(value) is bytes:
            return {"b": self._kept(value)}
        if isinstance(value, np.ndarray | np.generic):
            return self._array(value)
        if type(value) in (tuple, list):
            return {"(" if type(value) is tuple else "[": [self.node(each) for each in value]}
        if type(value) is dict:
            return {"{": [[self.node(key), self.node(each)] for key, each in value.items()]}
        if isinstance(value, _Packed):
            return {"p": _name(type(value)), "v": self.node(value.to_packable())}
        if is_dataclass(value) and not isinstance(value, type):
            return {
                "d": _name(type(value)),
                "v": {each.name: self.node(getattr(value, each.name)) for each in fields(value)},
            }
        raise UnpackableError(
            f"a state must be made of dataclasses, tuples, numbers and arrays, got {type(value).__name__}"
        )

    def _array(self, value: np.ndarray[Any, Any] | np.generic) -> dict[str, Any]:
        if value.dtype.hasobject:
            raise UnpackableError("a state must be made of numbers, got an array of objects")
        # A product of matrices may round by their order in memory.
        turned = isinstance(value, np.ndarray) and value.flags.f_contiguous and not value.flags.c_contiguous
        # The array's own memory, where that is one piece: a copy of a large state may not fit beside it.
        raw = np.ravel(value, order="F" if turned else "C").view(np.uint8).data
        kind = "n" if isinstance(value, np.generic) else "F" if turned else "C"
        return {"a": self._kept(raw), "kind": kind, "dtype": value.dtype.str, "shape": list(value.shape)}

    def _kept(self, raw: bytes | memoryview) -> list[int]:
        self.arrays.append(raw)
        return [len(self.arrays) - 1, len(raw)]


class _Reading:
    """A tree on its way back."""

    def __init__(self, named: Mapping[str, object], arrays: Sequence[memoryview]) -> None:
        self._named, self._arrays = named, arrays

    def value(self, node: Any) -> Any:
        """One value."""
        if not isinstance(node, dict):
            return node
        match next(iter(node)):
            case "=":
                return self._named[node["="]]
            case "f":
                return _FLOAT.unpack(bytes.fromhex(node["f"]))[0]
            case "b":
                return bytes(self._raw(node["b"]))
            case "a":
                return self._array(node)
            case "(":
                return tuple(map(self.value, node["("]))
            case "[":
                return list(map(self.value, node["["]))
            case "{":
                return {self.value(key): self.value(each) for key, each in node["{"]}
            case "p":
                kind = _class(node["p"])
                if not issubclass(kind, _Packed):
                    raise _another(node["p"])
                return kind.from_packable(self.value(node["v"]))
            case "d":
                return self._made(node)
            case other:
                raise CorruptStateError(f"a snapshot must be made of known kinds of values, got {other!r}")

    def _raw(self, kept: Sequence[int]) -> memoryview:
        index, size = kept
        return self._arrays[index][:size]

    def _array(self, node: Mapping[str, Any]) -> Any:
        order: Literal["C", "F"] = "F" if node["kind"] == "F" else "C"
        array = np.ndarray(node["shape"], np.dtype(node["dtype"]), self._raw(node["a"]), order=order)
        return array[()] if node["kind"] == "n" else array.copy(order=order)

    def _made(self, node: Mapping[str, Any]) -> Any:
        kind, given = _class(node["d"]), node["v"]
        if not is_dataclass(kind):
            raise _another(node["d"])
        if {each.name for each in fields(kind)} != given.keys():
            raise _another(node["d"])
        made = object.__new__(kind)  # as it was: whatever its constructor would add is in its fields
        for name, value in given.items():
            object.__setattr__(made, name, self.value(value))
        return made


def _name(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def _class(name: str) -> type:
    module, _, qualified = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in qualified.split("."):
        found = getattr(found, part, None)
    if not isinstance(found, type):
        raise _another(name)
    return found


def _another(name: str) -> CorruptStateError:
    return CorruptStateError(
        f"a snapshot holds a {name}, which is another class here: it was written by another version of Sottovoce or of the "
        "algorithm, with which alone this learner can go on"
    )
