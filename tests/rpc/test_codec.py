"""The codec: what is said comes back, messages have one length, and nothing malformed gets in."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from sottovoce.algorithms.interface import Message
from sottovoce.arrays import FloatArray
from sottovoce.errors import RemoteProtocolError
from sottovoce_rpc.codec import LARGEST, decode_round, encode_round, from_tensor, to_tensor
from sottovoce_wire.v1 import learner_pb2, tensor_pb2

FLOAT64 = tensor_pb2.DATA_TYPE_FLOAT64
SHAPES: dict[str, tuple[int, ...]] = {"y": (3,)}

arrays = hnp.arrays(np.float64, hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4))


def said(values: FloatArray | None = None, t: int = 4, sender: int = 2, name: str = "y") -> bytes:
    return encode_round(t, sender, Message({name: np.arange(3.0) if values is None else values}))


# ---- tensors ---------------------------------------------------------------------------------------------------------


@given(arrays)
def test_a_tensor_comes_back_bit_by_bit(values: FloatArray) -> None:
    back = from_tensor(tensor_pb2.Tensor.FromString(to_tensor(values).SerializeToString()))

    assert back.dtype == np.float64
    assert back.shape == values.shape
    assert back.tobytes() == values.tobytes()  # the bits of NaN, too


def test_a_tensor_is_little_endian_and_in_rows() -> None:
    values = np.asfortranarray(np.array([[1.0, 2.0], [3.0, 4.0]]))
    assert to_tensor(values).data == np.array([1.0, 2.0, 3.0, 4.0], "<f8").tobytes()
    assert to_tensor(values.astype(">f8")).data == to_tensor(values).data


@pytest.mark.parametrize(
    ("tensor", "text"),
    [
        (tensor_pb2.Tensor(shape=[1], data=bytes(8)), r"dtype FLOAT64 \(1\), got 0"),
        (tensor_pb2.Tensor(shape=[1], dtype=7, data=bytes(8)), r"dtype FLOAT64 \(1\), got 7"),  # type: ignore[arg-type]
        (tensor_pb2.Tensor(shape=[2], dtype=FLOAT64, data=bytes(8)), r"shape \(2,\) has 16 bytes, got 8"),
        (tensor_pb2.Tensor(shape=[1], dtype=FLOAT64, data=bytes(7)), r"shape \(1,\) has 8 bytes, got 7"),
        (tensor_pb2.Tensor(shape=[2**63, 2**63], dtype=FLOAT64), r"bytes, got 0"),
        (tensor_pb2.Tensor(shape=[0, 2**63], dtype=FLOAT64), r"a shape that NumPy can represent"),
        (tensor_pb2.Tensor(shape=[1] * 65, dtype=FLOAT64, data=bytes(8)), r"can represent, got 65 axes"),
    ],
    ids=["no type", "another type", "short", "torn", "huge", "huge and empty", "many axes"],
)
def test_a_malformed_tensor_is_the_senders_error(tensor: tensor_pb2.Tensor, text: str) -> None:
    with pytest.raises(RemoteProtocolError, match=text):
        from_tensor(tensor)


# ---- rounds ----------------------------------------------------------------------------------------------------------


@given(
    hnp.arrays(np.float64, 3, elements=st.floats(-LARGEST, LARGEST)),
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**32 - 1),
)
def test_a_round_comes_back(values: FloatArray, t: int, sender: int) -> None:
    back_t, back_sender, message = decode_round(said(values, t, sender), SHAPES)

    assert (back_t, back_sender) == (t, sender)
    assert message["y"].tobytes() == values.tobytes()


def test_several_fields_come_back() -> None:
    message = Message({"y": np.arange(3.0), "w": np.array(2.0), "M": np.eye(2)})
    _, _, back = decode_round(encode_round(0, 0, message), {"w": (), "M": (2, 2), "y": (3,)})
    assert {name: value.tolist() for name, value in back.fields.items()} == {
        "y": [0.0, 1.0, 2.0],
        "w": 2.0,
        "M": [[1.0, 0.0], [0.0, 1.0]],
    }


@given(
    hnp.arrays(np.float64, 3, elements=st.floats()),
    st.sampled_from([0, 1, 127, 128, 2**31, 2**63]),
    st.sampled_from([0, 1, 2**31]),
)
def test_a_message_has_one_length_whatever_it_says(values: FloatArray, t: int, sender: int) -> None:
    assert len(said(values, t, sender)) == len(said(np.zeros(3), 0, 0))


@given(st.binary(max_size=200))
def test_garbage_is_refused(payload: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        decode_round(payload, SHAPES)


@given(st.integers(0, 10**6), st.integers(1, 255))
def test_a_flipped_byte_is_refused_or_changes_what_was_said(position: int, flip: int) -> None:
    """Never another exception: the transport guards against accidents, this against crashes."""
    payload = bytearray(said())
    payload[position % len(payload)] ^= flip
    try:
        back = decode_round(bytes(payload), SHAPES)
    except RemoteProtocolError:
        return
    assert (back[0], back[1], back[2]["y"].tobytes()) != (4, 2, np.arange(3.0).tobytes())


def message(*fields: learner_pb2.Field, **head: Any) -> bytes:
    return learner_pb2.RoundMessage(fields=fields, **{"round": 1, "sender": 0, **head}).SerializeToString()


FIELD = learner_pb2.Field(name="y", value=to_tensor(np.zeros(3)))


@pytest.mark.parametrize(
    ("payload", "text"),
    [
        (b"\xff\xff\xff", "expected a RoundMessage, got 3 bytes that are none"),
        (b"", "must carry its round and its sender"),
        (message(FIELD, round=None), "must carry its round and its sender"),
        (message(FIELD, sender=None), "must carry its round and its sender"),
        (message(), r"must have the fields \['y'\], got \[\]"),
        (message(FIELD, FIELD), r"must have the fields \['y'\], got \['y', 'y'\]"),
        (said(name="z"), r"must have the fields \['y'\], got \['z'\]"),
        (said(np.zeros(4)), r"field 'y' must have shape \(3,\), got \(4,\)"),
        (said(np.zeros((3, 1))), r"field 'y' must have shape \(3,\), got \(3, 1\)"),
        (said(np.array([0.0, np.nan, 0.0])), "field 'y' must be finite and within 1e\\+100"),
        (said(np.array([0.0, -np.inf, 0.0])), "field 'y' must be finite and within 1e\\+100"),
        (said(np.array([0.0, 2 * LARGEST, 0.0])), "field 'y' must be finite and within 1e\\+100"),
    ],
    ids=str,
)
def test_a_refusal_says_what_a_message_must_be(payload: bytes, text: str) -> None:
    with pytest.raises(RemoteProtocolError, match=text):
        decode_round(payload, SHAPES)


def test_a_refusal_quotes_no_number() -> None:
    """A message may be an owner's record in disguise: its numbers do not go into logs."""
    with pytest.raises(RemoteProtocolError) as failure:
        decode_round(said(np.array([123456.75, np.nan, 0.0])), SHAPES)
    assert "123456" not in str(failure.value)
