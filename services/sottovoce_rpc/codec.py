"""The one place where arrays become wire tensors and back. Nothing un-noised is encoded for a neighbour but here."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from google.protobuf.message import DecodeError

from sottovoce.arrays import FloatArray
from sottovoce.errors import RemoteProtocolError
from sottovoce.machine import Message
from sottovoce_wire.v1 import learner_pb2, tensor_pb2

_LITTLE = np.dtype("<f8")

LARGEST = 1e100
"""Of a number in a message: what is larger is no parameter, and its sums would overflow."""


def to_tensor(values: FloatArray) -> tensor_pb2.Tensor:
    """An array as a wire tensor: shape and raw little-endian float64."""
    data = np.ascontiguousarray(values, dtype=_LITTLE).tobytes()
    return tensor_pb2.Tensor(shape=values.shape, dtype=tensor_pb2.DATA_TYPE_FLOAT64, data=data)


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


def encode_round(t: int, sender: int, message: Message) -> bytes:
    """A round's message as the bytes that every neighbour gets: encoded once, of the same length in every round."""
    fields = [learner_pb2.Field(name=name, value=to_tensor(value)) for name, value in message.fields.items()]
    return learner_pb2.RoundMessage(round=t, sender=sender, fields=fields).SerializeToString()


def decode_round(payload: bytes, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, int, Message]:
    """Round, sender and message of bytes that a neighbour sent.

    Args:
        payload: what came.
        shapes: the fields that a message must have, and their shapes.

    Raises:
        RemoteProtocolError: not a round message, or other fields, shapes, or a NaN or infinity.
    """
    try:
        said = learner_pb2.RoundMessage.FromString(payload)
    except DecodeError:
        raise RemoteProtocolError(f"expected a RoundMessage, got {len(payload)} bytes that are none") from None
    if not (said.HasField("round") and said.HasField("sender")):
        raise RemoteProtocolError("a RoundMessage must carry its round and its sender")
    fields = {field.name: from_tensor(field.value) for field in said.fields}
    if len(fields) != len(said.fields) or fields.keys() != shapes.keys():
        raise RemoteProtocolError(
            f"a message must have the fields {sorted(shapes)}, got {[f.name for f in said.fields]}"
        )
    for name, value in fields.items():
        if value.shape != shapes[name]:
            raise RemoteProtocolError(f"field {name!r} must have shape {shapes[name]}, got {value.shape}")
        if value.size and not np.abs(value).max() <= LARGEST:  # false for NaN, too
            raise RemoteProtocolError(f"field {name!r} must be finite and within {LARGEST:g}, got a number that is not")
    return said.round, said.sender, Message(fields)
