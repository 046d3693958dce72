"""Snapshots: files that replace the beginning of a log, so that neither the log nor its replay grows with the run.

A snapshot is a value as bytes, without pickle: a tree of dataclasses, tuples, lists, dicts, numbers, texts and arrays
becomes a JSON head that describes it, followed by the arrays' raw numbers, each aligned. Objects that are not data, such
as the loss, are written as a name, and taken from the run again. Reading builds only dataclasses of modules that are
imported already. No clock.
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
    """State of a learner directly after it has committed a round.

    Attributes:
        state: state of the algorithm.
        epsilon_spent: epsilon of the run.
        record_counts: records of each learned round, as 32-bit numbers.
        intake_state: state of its record queue.
        frames: last messages by round, as many as a neighbour may lack.
        accuracy_counts: records predicted before they were learned: the correct ones, and all.
        sent_digests: digests of its messages, in the blocks that it signs or may sign again.
        received_frames: with bounded staleness, the last received messages, as received.
        messages_sent: number of sent messages.
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
        """Return the objects in an algorithm's state that are not data, and are taken from the run."""
        return {"loss": run.loss, "algorithm": run.algorithm}

    @classmethod
    def read_from_log(cls, log: LogContents, names: Mapping[str, object]) -> LearnerSnapshot | None:
        """Read the snapshot that a log continues from; None: the log is complete.

        Args:
            log: contents of the log.
            names: as for `unpack`.

        Raises:
            CorruptStateError: it was written by another version.
        """
        if log.snapshot is None:
            return None
        image = unpack((log.folder / log.snapshot.file_name).read_bytes(), names)
        if not isinstance(image, cls):
            raise CorruptStateError(f"a snapshot must hold the state of a learner, got {type(image).__name__}")
        return image


# ---- values as bytes -------------------------------------------------------------------------------------------------


class UnpackableError(TypeError):
    """A value contains an object that cannot be packed."""


@runtime_checkable
class _Packable(Protocol):
    """Class that is written as a simpler value: a buffer as the rows in use."""

    def to_packable(self) -> Any:
        """Return the simpler value."""
        ...

    @classmethod
    def from_packable(cls, value: Any) -> Any:
        """Restore from the value of `to_packable`."""
        ...


def pack(value: Any, named: Mapping[str, object]) -> bytes:
    """Encode a value as bytes.

    Args:
        value: value to encode.
        named: objects that are written as a name, by name.

    Raises:
        UnpackableError: a part of it has an unknown type.
    """
    return b"".join(_encode_parts(value, named))


def is_packed_as(raw: bytes, value: Any, named: Mapping[str, object]) -> bool:
    """Return whether `pack` gives these bytes, without building them: a state may fill half of the memory.

    Raises:
        UnpackableError: as of `pack`.
    """
    at, content = 0, np.frombuffer(raw, np.uint8)
    for part in _encode_parts(value, named):
        if not np.array_equal(content[at : at + len(part)], np.frombuffer(part, np.uint8)):
            return False
        at += len(part)
    return at == len(raw)


def _encode_parts(value: Any, named: Mapping[str, object]) -> list[bytes | memoryview]:
    encoder = _TreeEncoder(named)
    tree = encoder.node(value)
    head = json.dumps({"tree": tree, "sizes": [len(raw) for raw in encoder.arrays]}, separators=(",", ":")).encode()
    parts: list[bytes | memoryview] = [_HEAD.pack(_MAGIC, FORMAT, len(head)), head]
    parts.append(bytes(-(_HEAD.size + len(head)) % _ALIGNMENT_BYTES))
    for raw in encoder.arrays:
        parts += raw, bytes(-len(raw) % _ALIGNMENT_BYTES)
    return parts


def unpack(raw: bytes, named: Mapping[str, object]) -> Any:
    """Decode the bytes of `pack`.

    Raises:
        CorruptStateError: the bytes are not valid, or of another version of a class.
    """
    if len(raw) < _HEAD.size or not raw.startswith(_MAGIC):
        raise CorruptStateError("a snapshot must begin with its magic number, got other bytes")
    _, format_version, length = _HEAD.unpack_from(raw)
    require_format("a snapshot", format_version)
    head = json.loads(raw[_HEAD.size : _HEAD.size + length])
    at = _HEAD.size + length
    starts = [at + -at % _ALIGNMENT_BYTES]
    for size in head["sizes"]:
        starts.append(starts[-1] + size + -size % _ALIGNMENT_BYTES)
    arrays = [memoryview(raw)[a:b] for a, b in pairwise(starts)]
    return _TreeDecoder(named, arrays).value(head["tree"])


class _TreeEncoder:
    """Encoder of a tree to JSON; its arrays are collected separately."""

    def __init__(self, named: Mapping[str, object]) -> None:
        self._names = {id(each): name for name, each in named.items()}
        self.arrays: list[bytes | memoryview] = []

    def node(self, value: Any) -> Any:
        """Encode one value, as it is or by its kind."""
        if value is None or type(value) in (bool, int, str):
            return value
        if id(value) in self._names:
            return {"=": self._names[id(value)]}
        if type(value) is float:
            return {"f": _FLOAT.pack(value).hex()}  # of constant length
        if type(value) is bytes:
            return {"b": self._store_array(value)}
        if isinstance(value, np.ndarray | np.generic):
            return self._array(value)
        if type(value) in (tuple, list):
            return {"(" if type(value) is tuple else "[": [self.node(each) for each in value]}
        if type(value) is dict:
            return {"{": [[self.node(key), self.node(each)] for key, each in value.items()]}
        if isinstance(value, _Packable):
            return {"p": _qualified_name(type(value)), "v": self.node(value.to_packable())}
        if is_dataclass(value) and not isinstance(value, type):
            return {
                "d": _qualified_name(type(value)),
                "v": {each.name: self.node(getattr(value, each.name)) for each in fields(value)},
            }
        raise UnpackableError(
            f"a state must consist of dataclasses, tuples, numbers and arrays, got {type(value).__name__}"
        )

    def _array(self, value: np.ndarray[Any, Any] | np.generic) -> dict[str, Any]:
        if value.dtype.hasobject:
            raise UnpackableError("a state must consist of numbers, got an array of objects")
        # The rounding of a matrix product may depend on the memory order.
        is_column_major = isinstance(value, np.ndarray) and value.flags.f_contiguous and not value.flags.c_contiguous
        # The array's own memory, if contiguous: a copy of a large state may not fit in memory.
        raw = np.ravel(value, order="F" if is_column_major else "C").view(np.uint8).data
        kind = "n" if isinstance(value, np.generic) else "F" if is_column_major else "C"
        return {"a": self._store_array(raw), "kind": kind, "dtype": value.dtype.str, "shape": list(value.shape)}

    def _store_array(self, raw: bytes | memoryview) -> list[int]:
        self.arrays.append(raw)
        return [len(self.arrays) - 1, len(raw)]


class _TreeDecoder:
    """Decoder of a tree."""

    def __init__(self, named: Mapping[str, object], arrays: Sequence[memoryview]) -> None:
        self._named, self._arrays = named, arrays

    def value(self, node: Any) -> Any:
        """Decode one value."""
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
                kind = _find_class(node["p"])
                if not issubclass(kind, _Packable):
                    raise _build_mismatch_error(node["p"])
                return kind.from_packable(self.value(node["v"]))
            case "d":
                return self._build_dataclass(node)
            case other:
                raise CorruptStateError(f"a snapshot must consist of known kinds of values, got {other!r}")

    def _raw(self, kept: Sequence[int]) -> memoryview:
        index, size = kept
        return self._arrays[index][:size]

    def _array(self, node: Mapping[str, Any]) -> Any:
        order: Literal["C", "F"] = "F" if node["kind"] == "F" else "C"
        array = np.ndarray(node["shape"], np.dtype(node["dtype"]), self._raw(node["a"]), order=order)
        return array[()] if node["kind"] == "n" else array.copy(order=order)

    def _build_dataclass(self, node: Mapping[str, Any]) -> Any:
        kind, given = _find_class(node["d"]), node["v"]
        if not is_dataclass(kind):
            raise _build_mismatch_error(node["d"])
        if {each.name for each in fields(kind)} != given.keys():
            raise _build_mismatch_error(node["d"])
        instance = object.__new__(kind)  # without its constructor: the fields are complete
        for name, value in given.items():
            object.__setattr__(instance, name, self.value(value))
        return instance


def _qualified_name(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def _find_class(name: str) -> type:
    module, _, qualified = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in qualified.split("."):
        found = getattr(found, part, None)
    if not isinstance(found, type):
        raise _build_mismatch_error(name)
    return found


def _build_mismatch_error(name: str) -> CorruptStateError:
    return CorruptStateError(
        f"a snapshot has a {name}, which differs from the class here: it was written by another version of Sottovoce or of the "
        "algorithm, with which alone this learner can go on"
    )
