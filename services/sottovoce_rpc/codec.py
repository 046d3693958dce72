"""The one place where arrays become wire tensors and back. Nothing un-noised is encoded for a neighbour but here."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError

from sottovoce.algorithms.interface import Message
from sottovoce.arrays import FloatArray
from sottovoce.errors import RemoteProtocolError
from sottovoce_wire.v1 import learner_pb2, tensor_pb2

_LITTLE = np.dtype("<f8")

Shapes = tuple[tuple[str, tuple[int, ...]], ...]

LARGEST = 1e100
"""Of a number in a message: what is larger is no parameter, and its sums would overflow."""


def to_tensor(values: FloatArray) -> tensor_pb2.Tensor:
    """An array as a wire tensor: shape and raw little-endian float64."""
    return _tensor(values.shape, _raw(values))


def _raw(values: FloatArray) -> bytes:
    return np.ascontiguousarray(values, dtype=_LITTLE).tobytes()


def _tensor(shape: tuple[int, ...], data: bytes) -> tensor_pb2.Tensor:
    return tensor_pb2.Tensor(shape=shape, dtype=tensor_pb2.DATA_TYPE_FLOAT64, data=data)


def _within_bounds(values: FloatArray) -> bool:
    """False for NaN, too."""
    if not values.size:
        return True
    return bool(np.minimum.reduce(values) >= -LARGEST and np.maximum.reduce(values) <= LARGEST)


def from_tensor(tensor: tensor_pb2.Tensor) -> FloatArray:
    """A wire tensor as a (read-only) array.

    Raises:
        RemoteProtocolError: another type than float64, or a length that does not fit the shape.
    """
    if tensor.dtype != tensor_pb2.DATA_TYPE_FLOAT64:
        raise RemoteProtocolError(f"a tensor must have dtype FLOAT64 (1), got {tensor.dtype}")
    shape = tuple(tensor.shape)
    if len(tensor.data) != 8 * math.prod(shape):
        raise RemoteProtocolError(
            f"a float64 tensor of shape {shape} has {8 * math.prod(shape)} bytes, got {len(tensor.data)}"
        )
    try:
        return np.frombuffer(tensor.data, _LITTLE).reshape(shape)
    except ValueError:  # empty along one axis and absurd along another, or too many axes
        raise RemoteProtocolError(
            f"a tensor must have a shape that NumPy can represent, got {len(shape)} axes"
        ) from None


@dataclass(frozen=True, slots=True)
class _Layout:
    """Where everything stands in a message of given fields: only round, sender and the fields' numbers ever change.

    Attributes:
        blank: the message of round 0 and learner 0, all numbers zero.
        numbers: where the numbers of each field begin and end.
        fixed: where the bytes begin and end that are the same in every message.
    """

    blank: bytes
    numbers: tuple[tuple[str, tuple[int, ...], int, int], ...]
    fixed: tuple[tuple[int, int], ...]

    def fill(self, t: int, sender: int, message: Message) -> bytes:
        """The bytes of a message of this layout."""
        frame = bytearray(self.blank)
        _ROUND.pack_into(frame, _ROUND_AT, t)
        _SENDER.pack_into(frame, _SENDER_AT, sender)
        for name, _, begin, end in self.numbers:
            frame[begin:end] = _raw(message[name])
        return bytes(frame)

    def read(self, payload: bytes) -> tuple[int, int, Message] | None:
        """Round, sender and message of bytes of this layout with numbers within `LARGEST`; None for all others."""
        if len(payload) != len(self.blank):
            return None
        for begin, end in self.fixed:
            if payload[begin:end] != self.blank[begin:end]:
                return None
        fields = {}
        for name, shape, begin, end in self.numbers:
            values = np.frombuffer(payload, _LITTLE, (end - begin) // 8, begin)
            if not _within_bounds(values):
                return None
            fields[name] = values if len(shape) == 1 else values.reshape(shape)
        return _ROUND.unpack_from(payload, _ROUND_AT)[0], _SENDER.unpack_from(payload, _SENDER_AT)[0], Message(fields)

    def read_many(
        self, frames: npt.NDArray[np.uint8]
    ) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint32], dict[str, FloatArray], npt.NDArray[np.bool_]]:
        """`read`, of messages of this length, a row each; and which rows are of this layout."""
        right, blank = np.ones(len(frames), bool), np.frombuffer(self.blank, np.uint8)
        for begin, end in self.fixed:
            right &= (frames[:, begin:end] == blank[begin:end]).all(axis=1)
        fields = {}
        for name, shape, begin, end in self.numbers:
            values = np.ascontiguousarray(frames[:, begin:end]).view(_LITTLE).reshape(len(frames), *shape)
            flat = values.reshape(len(frames), math.prod(shape))
            right &= ((flat >= -LARGEST) & (flat <= LARGEST)).all(axis=1)
            fields[name] = values
        rounds = np.ascontiguousarray(frames[:, _ROUND_AT : _ROUND_AT + _ROUND.size]).view("<u8")[:, 0]
        senders = np.ascontiguousarray(frames[:, _SENDER_AT : _SENDER_AT + _SENDER.size]).view("<u4")[:, 0]
        return rounds, senders, fields, right


_ROUND, _SENDER = struct.Struct("<Q"), struct.Struct("<I")
_ROUND_AT, _SENDER_AT = 1, 10  # each stands behind its tag, a byte


@lru_cache(maxsize=64)
def _layout(shapes: Shapes) -> _Layout:
    """Found by comparing two messages of which one has zeros where the other has ones, bit by bit."""
    zeros, ones = (
        learner_pb2.RoundMessage(
            round=bit * (2**64 - 1),
            sender=bit * (2**32 - 1),
            fields=[
                learner_pb2.Field(name=name, value=_tensor(shape, bytes([255 * bit]) * 8 * math.prod(shape)))
                for name, shape in shapes
            ],
        ).SerializeToString()
        for bit in (0, 1)
    )
    numbers, fixed, at = [], [], _SENDER_AT + _SENDER.size
    fixed += [(0, _ROUND_AT), (_ROUND_AT + _ROUND.size, _SENDER_AT)]
    for name, shape in shapes:
        size = 8 * math.prod(shape)
        begin = next((k for k in range(at, len(zeros)) if zeros[k] != ones[k]), len(zeros)) if size else at
        numbers.append((name, shape, begin, begin + size))
        fixed.append((at, begin))
        at = begin + size
    return _Layout(zeros, tuple(numbers), (*fixed, (at, len(zeros))))


def encode_round(t: int, sender: int, message: Message) -> bytes:
    """A round's message as the bytes that every neighbour gets: encoded once, of the same length in every round."""
    return _layout(tuple([(name, value.shape) for name, value in message.fields.items()])).fill(t, sender, message)


def decode_round(payload: bytes, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, int, Message]:
    """Round, sender and message of bytes that a neighbour sent.

    Args:
        payload: what came.
        shapes: the fields that a message must have, and their shapes.

    Raises:
        RemoteProtocolError: not a round message, or other fields, shapes, or a NaN or infinity.
    """
    return _layout(tuple(shapes.items())).read(payload) or _parse_round(payload, shapes)


def round_length(shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Bytes of every round's message with these fields."""
    return len(_layout(tuple(shapes.items())).blank)


def parse_round(payload: bytes) -> tuple[int, int, Message]:
    """As `decode_round`, where nothing is known of the fields.

    Raises:
        RemoteProtocolError: not a round message, or numbers that are not finite.
    """
    said, fields = _parsed(payload)
    return _message(said, fields, {name: value.shape for name, value in fields.items()})


def _parse_round(payload: bytes, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, int, Message]:
    """`decode_round` of bytes in any order that protobuf allows, and to say what is wrong with them."""
    return _message(*_parsed(payload), shapes)


def _parsed(payload: bytes) -> tuple[learner_pb2.RoundMessage, dict[str, FloatArray]]:
    try:
        said = learner_pb2.RoundMessage.FromString(payload)
    except DecodeError:
        raise RemoteProtocolError(f"expected a RoundMessage, got {len(payload)} bytes that are none") from None
    if not (said.HasField("round") and said.HasField("sender")):
        raise RemoteProtocolError("a RoundMessage must carry its round and its sender")
    return said, {field.name: from_tensor(field.value) for field in said.fields}


def _message(
    said: learner_pb2.RoundMessage, fields: dict[str, FloatArray], shapes: Mapping[str, tuple[int, ...]]
) -> tuple[int, int, Message]:
    if len(fields) != len(said.fields) or fields.keys() != shapes.keys():
        names = [f.name for f in said.fields][:20]
        raise RemoteProtocolError(f"a message must have the fields {sorted(shapes)}, got {names}")
    for name, value in fields.items():
        if value.shape != shapes[name]:
            raise RemoteProtocolError(f"field {name!r} must have shape {shapes[name]}, got {value.shape}")
        if not _within_bounds(value.ravel()):
            raise RemoteProtocolError(f"field {name!r} must be finite and within {LARGEST:g}, got a number that is not")
    return said.round, said.sender, Message(fields)


def decode_frames(
    frames: npt.NDArray[np.uint8], shapes: Mapping[str, tuple[int, ...]]
) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint32], dict[str, FloatArray], npt.NDArray[np.bool_]]:
    """`decode_round` of many messages at once.

    Args:
        frames: `(messages, round_length(shapes))`, a message a row.
        shapes: as in `decode_round`.

    Returns:
        Rounds, senders and fields `(messages, *shape)`; and which messages these are right for: `decode_round` has to say of
        the others whether they are in another order, or wrong.
    """
    return _layout(tuple(shapes.items())).read_many(frames)
