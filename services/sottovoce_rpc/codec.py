"""Conversion between arrays and wire tensors; only this module encodes message values for a neighbour."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import NoReturn

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError

from sottovoce_core.algorithms.interface import Message
from sottovoce_core.arrays import FloatArray, IntArray
from sottovoce_core.errors import LocalProtocolError, RemoteProtocolError, ViolationKind
from sottovoce_wire.v1 import learner_pb2, tensor_pb2

_LITTLE_ENDIAN_FLOAT64 = np.dtype("<f8")

Shapes = Mapping[str, tuple[int, ...]]
"""Fields of a message in order, with the shape of each: `Algorithm.field_shapes()`."""

MAX_AXES = 8
_MAX_CONTROL_MESSAGE_BYTES = 1024 * 1024
"""Maximum bytes of a hello or signature: parsing a larger one would take several times as much memory."""
MAX_ABS_VALUE = 1e100
"""Maximum absolute value of a number in a message: a larger one is no parameter, and its sums would overflow."""


# ---- tensors ---------------------------------------------------------------------------------------------------------


def to_tensor(values: FloatArray) -> tensor_pb2.Tensor:
    """Encode an array as a wire tensor: shape and raw little-endian float64."""
    return tensor_pb2.Tensor(shape=values.shape, dtype=tensor_pb2.DATA_TYPE_FLOAT64, data=_raw(values))


def _raw(values: FloatArray) -> bytes:
    return np.ascontiguousarray(values, dtype=_LITTLE_ENDIAN_FLOAT64).tobytes()


def from_tensor(tensor: tensor_pb2.Tensor) -> FloatArray:
    """Decode a wire tensor to a read-only array.

    Raises:
        RemoteProtocolError: the type is not float64, there are too many axes, or the length does not fit the shape.
    """
    if tensor.dtype != tensor_pb2.DATA_TYPE_FLOAT64:
        raise RemoteProtocolError(f"a tensor must have dtype FLOAT64 (1), got {tensor.dtype}")
    if len(tensor.shape) > MAX_AXES:  # before any product of dimensions is computed
        raise RemoteProtocolError(f"a tensor may have at most {MAX_AXES} axes, got {len(tensor.shape)}")
    shape = tuple(tensor.shape)
    if len(tensor.data) != 8 * math.prod(shape):
        raise RemoteProtocolError(
            f"a float64 tensor of shape {shape} must have {8 * math.prod(shape)} bytes, got {len(tensor.data)}"
        )
    try:
        return np.frombuffer(tensor.data, _LITTLE_ENDIAN_FLOAT64).reshape(shape)
    except ValueError:  # one dimension is 0, another too large
        raise RemoteProtocolError(f"a tensor must have a shape that NumPy can represent, got {shape}") from None


# ---- rounds ----------------------------------------------------------------------------------------------------------


class RoundCodec:
    """Encoder and decoder of a run's round messages.

    A round's message has exactly one encoding (learner.proto). Round, sender, and protobuf's tags and lengths before each precede
    the numbers; tags and lengths are constants, because the length of the numbers is one. So a message is packed and unpacked as
    a struct, and any other form is refused to the last bit: another encoding of the same message could carry information beside
    the numbers.

    Args:
        shapes: fields of a message in order, with their shapes.

    Attributes:
        message_bytes: length of every message in bytes.
    """

    def __init__(self, shapes: Shapes) -> None:
        self.shapes = dict(shapes)
        sizes = [math.prod(shape) for shape in self.shapes.values()]
        ends = pairwise(accumulate(sizes, initial=0))
        self._fields = [
            (name, shape, *ends_of) for (name, shape), ends_of in zip(self.shapes.items(), ends, strict=True)
        ]
        self._count = sum(sizes)
        # The single vector of most algorithms need not be sliced.
        self._only = next(iter(self.shapes)) if list(self.shapes.values()) == [(self._count,)] else None
        before_values = _VALUES + _varint(8 * self._count)
        inside = len(_ROUND) + 8 + len(_SENDER) + 4 + len(before_values) + 8 * self._count
        before_round = _MESSAGE + _varint(inside) + _ROUND
        self._constants = before_round, _SENDER, before_values
        self._head = struct.Struct(f"<{len(before_round)}sQ{len(_SENDER)}sI{len(before_values)}s")
        self.message_bytes = self._head.size + 8 * self._count

    def require_sendable(self, message: Message) -> None:
        """Refuse to send what no neighbour would accept: the noise on a number that overflowed protects no data.

        Raises:
            LocalProtocolError: a number is larger than `MAX_ABS_VALUE`, or not finite.
        """
        for name, value in message.fields.items():
            if not _is_within_bounds(value):
                raise LocalProtocolError(f"field {name!r} of a message must be finite and within {MAX_ABS_VALUE:g}")

    def encode(self, t: int, sender: int, message: Message) -> bytes:
        """Encode a round's message; every neighbour gets the same bytes.

        Raises:
            LocalProtocolError: fields or shapes differ from those of the algorithm.
        """
        shapes = {name: value.shape for name, value in message.fields.items()}
        if shapes != self.shapes:
            raise LocalProtocolError(f"a message must have the fields {self.shapes}, got {shapes}")
        first, second, third = self._constants
        values = [_raw(message.fields[name]) for name in self.shapes]
        return b"".join((self._head.pack(first, t, second, sender, third), *values))

    def decode(self, payload: bytes) -> tuple[int, int, Message]:
        """Decode round, sender and message; the arrays are read-only.

        Raises:
            RemoteProtocolError: the bytes are not a round of these fields in its one encoding, or a number is larger than
                `MAX_ABS_VALUE` or not finite.
        """
        if len(payload) != self.message_bytes:
            self._refuse(payload)
        first, t, second, sender, third = self._head.unpack_from(payload)
        if (first, second, third) != self._constants:
            self._refuse(payload)
        flat = np.frombuffer(payload, _LITTLE_ENDIAN_FLOAT64, self._count, self._head.size)
        if not _is_within_bounds(flat):
            raise self._build_bounds_error(flat)
        return t, sender, Message(self._split(flat))

    def _split(self, flat: FloatArray) -> dict[str, FloatArray]:
        if self._only is not None:
            return {self._only: flat}
        return {name: flat[a:b].reshape(shape) for name, shape, a, b in self._fields}

    def decode_many(
        self, payloads: Sequence[bytes]
    ) -> tuple[IntArray, npt.NDArray[np.uint64], npt.NDArray[np.uint32], dict[str, FloatArray]]:
        """Decode many messages at once.

        Returns:
            Positions of the valid messages; their rounds, senders, and fields `(messages, *shape)`. `decode` raises the error of
            an invalid one.
        """
        rows = np.flatnonzero([len(payload) == self.message_bytes for payload in payloads])
        frames = np.frombuffer(b"".join(payloads[k] for k in rows.tolist()), np.uint8).reshape(
            len(rows), self.message_bytes
        )
        first, second, third = (np.frombuffer(constant, np.uint8) for constant in self._constants)
        t_at, sender_at = len(first), len(first) + 8 + len(second)
        numbers = np.ascontiguousarray(frames[:, self._head.size :]).view(_LITTLE_ENDIAN_FLOAT64)
        right = ((numbers >= -MAX_ABS_VALUE) & (numbers <= MAX_ABS_VALUE)).all(axis=1)
        for at, constant in ((0, first), (t_at + 8, second), (sender_at + 4, third)):
            right &= (frames[:, at : at + len(constant)] == constant).all(axis=1)
        if not right.all():
            rows, frames, numbers = rows[right], frames[right], numbers[right]
        fields = {name: numbers[:, a:b].reshape(len(rows), *shape) for name, shape, a, b in self._fields}
        rounds = np.ascontiguousarray(frames[:, t_at : t_at + 8]).view("<u8")[:, 0]
        senders = np.ascontiguousarray(frames[:, sender_at : sender_at + 4]).view("<u4")[:, 0]
        return rows, rounds, senders, fields

    def _refuse(self, payload: bytes) -> NoReturn:
        """Raise an error for bytes of another form; quote none of them, because they may be anything."""
        wanted = f"a round of {self.message_bytes} bytes, for the fields {self.shapes}"
        text = f"expected {wanted}, got one of {len(payload)} bytes or in another encoding"
        try:
            _read_message(payload, "round", wanted)
        except RemoteProtocolError as error:
            text = str(error)
        raise RemoteProtocolError(text, ViolationKind.ENCODING)

    def _build_bounds_error(self, flat: FloatArray) -> RemoteProtocolError:
        wrong = int(np.flatnonzero(~((flat >= -MAX_ABS_VALUE) & (flat <= MAX_ABS_VALUE)))[0])
        name = next(name for name, _, a, b in self._fields if a <= wrong < b)
        text = f"field {name!r} must be finite and within {MAX_ABS_VALUE:g}, got a number that is not"
        return RemoteProtocolError(text, ViolationKind.VALUE)


def _is_within_bounds(values: FloatArray) -> bool:
    """Return whether all numbers are at most `MAX_ABS_VALUE`; NaN is not. A small sum of squares proves it in one pass."""
    return bool(np.vdot(values, values) < MAX_ABS_VALUE) or bool((np.abs(values) <= MAX_ABS_VALUE).all())


def _read_message(payload: bytes, kind: str, wanted: str) -> learner_pb2.ExchangeMessage:
    if len(payload) > _MAX_CONTROL_MESSAGE_BYTES:
        raise RemoteProtocolError(f"expected {wanted}, got {len(payload)} bytes")
    try:
        message = learner_pb2.ExchangeMessage.FromString(payload)
    except DecodeError:
        raise RemoteProtocolError(f"expected {wanted}, got {len(payload)} bytes that cannot be decoded") from None
    if message.WhichOneof("message") != kind:
        raise RemoteProtocolError(f"expected {wanted}, got another message")
    return message


_MESSAGE, _ROUND, _SENDER, _VALUES = (bytes([number << 3 | kind]) for number, kind in ((2, 2), (1, 1), (2, 5), (3, 2)))
"""Protobuf tags (field number and wire type): of the round in an ExchangeMessage, and of the round's fields."""


def _varint(value: int) -> bytes:
    """Encode a length as protobuf does: seven bits a byte, the lowest first."""
    rest = value >> 7
    return bytes([value & 0x7F | 0x80]) + _varint(rest) if rest else bytes([value])


# ---- hello and signature ---------------------------------------------------------------------------------------------


def to_fields(shapes: Shapes) -> list[tensor_pb2.Field]:
    """Encode the fields of a round's values."""
    return [
        tensor_pb2.Field(name=name, shape=shape, dtype=tensor_pb2.DATA_TYPE_FLOAT64) for name, shape in shapes.items()
    ]


def from_fields(fields: Iterable[tensor_pb2.Field]) -> dict[str, tuple[int, ...]]:
    """Decode the fields of a round's values.

    Raises:
        RemoteProtocolError: a name comes twice, a type is not float64, or there are too many axes.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for field in fields:
        if field.name in shapes or field.dtype != tensor_pb2.DATA_TYPE_FLOAT64:
            raise RemoteProtocolError(
                f"fields must differ in name and be FLOAT64 (1), got {field.name!r}, {field.dtype}"
            )
        if len(field.shape) > MAX_AXES:
            raise RemoteProtocolError(f"a field may have at most {MAX_AXES} axes, got {len(field.shape)}")
        shapes[field.name] = tuple(field.shape)
    return shapes


def read_hello(payload: bytes) -> learner_pb2.Hello:
    """Read the first message of a stream.

    Raises:
        RemoteProtocolError: it is not a Hello, or lacks a required field.
    """
    message = _read_message(payload, "hello", "a Hello first")
    if not (message.hello.HasField("learner") and message.hello.HasField("next_round")):
        raise RemoteProtocolError("a Hello must carry learner and next_round")
    return message.hello


def read_signature(payload: bytes) -> learner_pb2.Signature:
    """Read the signature of a block of rounds.

    Raises:
        RemoteProtocolError: it is another message, or lacks a required field.
    """
    message = _read_message(payload, "signature", "a Signature").signature
    if not (message.HasField("block") and message.HasField("sender")):
        raise RemoteProtocolError("a Signature must carry block and sender")
    return message
