"""The codec: what is said comes back, messages have one length, and nothing malformed gets in."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from sottovoce_core.algorithms.interface import Message
from sottovoce_core.arrays import FloatArray
from sottovoce_core.errors import LocalProtocolError, RemoteProtocolError, ViolationKind
from sottovoce_rpc.codec import (
    MAX_ABS_VALUE,
    RoundCodec,
    Shapes,
    from_fields,
    from_tensor,
    read_hello,
    to_fields,
    to_tensor,
)
from sottovoce_wire.v1 import learner_pb2, tensor_pb2

FLOAT64 = tensor_pb2.DATA_TYPE_FLOAT64
SHAPES: dict[str, tuple[int, ...]] = {"y": (3,)}
CODEC = RoundCodec(SHAPES)

arrays = hnp.arrays(np.float64, hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4))


def said(values: FloatArray | None = None, t: int = 4, sender: int = 2) -> bytes:
    return CODEC.encode(t, sender, Message({"y": np.arange(3.0) if values is None else values}))


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
        (tensor_pb2.Tensor(shape=[2], dtype=FLOAT64, data=bytes(8)), r"shape \(2,\) must have 16 bytes, got 8"),
        (tensor_pb2.Tensor(shape=[1], dtype=FLOAT64, data=bytes(7)), r"shape \(1,\) must have 8 bytes, got 7"),
        (tensor_pb2.Tensor(shape=[2**63, 2**63], dtype=FLOAT64), r"bytes, got 0"),
        (tensor_pb2.Tensor(shape=[0, 2**63], dtype=FLOAT64), r"a shape that NumPy can represent"),
        (tensor_pb2.Tensor(shape=[1] * 65, dtype=FLOAT64, data=bytes(8)), r"may have at most 8 axes, got 65"),
        (
            tensor_pb2.Tensor(shape=[2**32] * 80_000, dtype=FLOAT64, data=bytes(8)),
            r"may have at most 8 axes, got 80000",
        ),
    ],
    ids=["no type", "another type", "short", "torn", "huge", "huge and empty", "many axes", "as many as take minutes"],
)
def test_a_malformed_tensor_is_the_senders_error(tensor: tensor_pb2.Tensor, text: str) -> None:
    with pytest.raises(RemoteProtocolError, match=text):
        from_tensor(tensor)


# ---- rounds ----------------------------------------------------------------------------------------------------------

SEVERAL: Shapes = {"y": (3,), "none": (0, 2), "w": (), "M": (2, 2)}
LONG: Shapes = {"y": (70_000,)}


def zeros(shapes: Shapes) -> Message:
    return Message({name: np.zeros(shape) for name, shape in shapes.items()})


@given(
    hnp.arrays(np.float64, 3, elements=st.floats(-MAX_ABS_VALUE, MAX_ABS_VALUE)),
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**32 - 1),
)
def test_a_round_comes_back(values: FloatArray, t: int, sender: int) -> None:
    back_t, back_sender, message = CODEC.decode(said(values, t, sender))

    assert (back_t, back_sender) == (t, sender)
    assert message["y"].tobytes() == values.tobytes()


def test_several_fields_come_back_in_the_order_that_was_agreed() -> None:
    message = Message({"M": np.eye(2), "w": np.array(2.0), "y": np.arange(3.0), "none": np.empty((0, 2))})
    payload = RoundCodec(SEVERAL).encode(0, 0, message)
    _, _, back = RoundCodec(SEVERAL).decode(payload)
    assert {name: value.tolist() for name, value in back.fields.items()} == {
        "y": [0.0, 1.0, 2.0],
        "none": [],
        "w": 2.0,
        "M": [[1.0, 0.0], [0.0, 1.0]],
    }
    numbers = np.frombuffer(learner_pb2.ExchangeMessage.FromString(payload).round.values, "<f8")
    assert numbers.tolist() == [0.0, 1.0, 2.0, 2.0, 1.0, 0.0, 0.0, 1.0]


@pytest.mark.parametrize("shapes", [SHAPES, SEVERAL, {}, {"y": (14,)}, {"y": (15,)}, {"y": (16,)}, LONG], ids=str)
@pytest.mark.parametrize(("t", "sender"), [(0, 0), (2**64 - 1, 2**32 - 1)])
def test_the_packed_struct_is_the_protobuf_message(shapes: Shapes, t: int, sender: int) -> None:
    """Lengths of one, two and three bytes; round, sender and values are there where they are zero or empty, too."""
    values = b"".join(value.tobytes() for value in zeros(shapes).fields.values())
    said = learner_pb2.ExchangeMessage(round=learner_pb2.RoundMessage(round=t, sender=sender, values=values))
    payload = RoundCodec(shapes).encode(t, sender, zeros(shapes))

    assert payload == said.SerializeToString()
    assert len(payload) == RoundCodec(shapes).message_bytes
    assert RoundCodec(shapes).decode(payload)[:2] == (t, sender)


@given(
    hnp.arrays(np.float64, 3, elements=st.floats()),
    st.sampled_from([0, 1, 127, 128, 2**31, 2**63]),
    st.sampled_from([0, 1, 2**31]),
)
def test_a_message_has_one_length_whatever_it_says(values: FloatArray, t: int, sender: int) -> None:
    assert len(said(values, t, sender)) == len(said(np.zeros(3), 0, 0)) == CODEC.message_bytes


@given(st.binary(max_size=200))
def test_garbage_is_refused(payload: bytes) -> None:
    with pytest.raises(RemoteProtocolError) as refused:
        CODEC.decode(payload)
    assert refused.value.violation is ViolationKind.ENCODING


@given(st.integers(0, 10**6), st.integers(1, 255))
def test_a_flipped_byte_is_refused_or_changes_what_was_said(position: int, flip: int) -> None:
    """Never another exception: the transport guards against accidents, this against crashes."""
    payload = bytearray(said())
    payload[position % len(payload)] ^= flip
    try:
        back = CODEC.decode(bytes(payload))
    except RemoteProtocolError:
        return
    assert (back[0], back[1], back[2]["y"].tobytes()) != (4, 2, np.arange(3.0).tobytes())


OTHER_ORDER = said()[:2] + said()[11:16] + said()[2:11] + said()[16:]
LONG_LENGTH = b"\x12" + bytes([len(said()) - 2 | 0x80, 0]) + said()[2:]
UNKNOWN = b"\x12" + bytes([len(said())]) + said()[2:] + b"\x28\x07"
ENCODINGS = {"another order": OTHER_ORDER, "a length in more bytes": LONG_LENGTH, "a number nobody knows": UNKNOWN}


@pytest.mark.parametrize("how", ENCODINGS)
def test_a_message_has_one_encoding(how: str) -> None:
    """Whatever protobuf reads the same way could tell something beside the numbers."""
    one, other = (learner_pb2.ExchangeMessage.FromString(each).round for each in (said(), ENCODINGS[how]))
    assert (one.round, one.sender, one.values) == (other.round, other.sender, other.values)
    with pytest.raises(RemoteProtocolError, match="or in another encoding"):
        CODEC.decode(ENCODINGS[how])


HELLO = learner_pb2.ExchangeMessage(
    hello=learner_pb2.Hello(run_id="r", learner=1, next_round=0, fields=to_fields(SHAPES))
).SerializeToString()


@pytest.mark.parametrize(
    ("payload", "text"),
    [
        (b"\xff\xff\xff", "expected a round of 42 bytes, .* got 3 bytes that cannot be decoded"),
        (b"", "expected a round of 42 bytes, .* got another message"),
        (HELLO, "got another message"),
        (
            RoundCodec({"y": (4,)}).encode(0, 0, zeros({"y": (4,)})),
            r"for the fields {'y': \(3,\)}, got one of 50 bytes",
        ),
        (said(np.array([0.0, np.nan, 0.0])), "field 'y' must be finite and within 1e\\+100"),
        (said(np.array([0.0, -np.inf, 0.0])), "field 'y' must be finite and within 1e\\+100"),
        (said(np.array([0.0, 2 * MAX_ABS_VALUE, 0.0])), "field 'y' must be finite and within 1e\\+100"),
        (
            said(np.array([0.0, 0.0, -np.nextafter(MAX_ABS_VALUE, np.inf)])),
            "field 'y' must be finite and within 1e\\+100",
        ),
    ],
    ids=["garbage", "nothing", "a hello", "another length", "nan", "infinite", "huge", "just too large"],
)
def test_a_refusal_says_what_a_message_must_be(payload: bytes, text: str) -> None:
    with pytest.raises(RemoteProtocolError, match=text):
        CODEC.decode(payload)


def test_a_refusal_names_the_field() -> None:
    message = zeros(SEVERAL)
    message["M"][1, 1] = np.inf
    with pytest.raises(RemoteProtocolError, match="field 'M' must be finite"):
        RoundCodec(SEVERAL).decode(RoundCodec(SEVERAL).encode(0, 0, message))


def test_a_refusal_quotes_no_number() -> None:
    """A message may be an owner's record in disguise: its numbers do not go into logs."""
    with pytest.raises(RemoteProtocolError) as failure:
        CODEC.decode(said(np.array([123456.75, np.nan, 0.0])))
    assert "123456" not in str(failure.value)
    assert failure.value.violation is ViolationKind.VALUE


@pytest.mark.parametrize(
    "message",
    [{"y": np.zeros(4)}, {"y": np.zeros((3, 1))}, {"z": np.zeros(3)}, {}, {"y": np.zeros(3), "z": np.zeros(1)}],
    ids=["longer", "another shape", "another name", "nothing", "more"],
)
def test_an_algorithm_that_says_what_it_did_not_announce_is_not_encoded(message: dict[str, FloatArray]) -> None:
    with pytest.raises(LocalProtocolError, match="a message must have the fields"):
        CODEC.encode(0, 0, Message(message))


def test_many_are_decoded_as_one_by_one_and_the_wrong_ones_left_out() -> None:
    right = {k: said(np.full(3, float(k)), t=10 + k, sender=k) for k in (0, 2, 5)}
    wrong = {1: b"\xff", 3: said(np.array([0.0, np.nan, 0.0])), 4: HELLO, 6: said()[:1] + b"\x29" + said()[2:]}
    payloads = [{**right, **wrong}[k] for k in range(7)]
    rows, rounds, senders, fields = CODEC.decode_many(payloads)

    assert rows.tolist() == list(right)
    for k, t, sender, values in zip(rows, rounds, senders, fields["y"], strict=True):
        alone = CODEC.decode(payloads[k])
        assert (alone[0], alone[1], alone[2]["y"].tobytes()) == (t, sender, values.tobytes())
    for k in wrong:
        with pytest.raises(RemoteProtocolError):
            CODEC.decode(payloads[k])
    none = CODEC.decode_many([])
    assert [len(each) for each in (*none[:3], none[3]["y"])] == [0, 0, 0, 0]


# ---- hellos ----------------------------------------------------------------------------------------------------------


def test_fields_come_back_in_their_order() -> None:
    assert list(from_fields(to_fields(SEVERAL)).items()) == list(SEVERAL.items())


@pytest.mark.parametrize(
    "fields",
    [to_fields(SHAPES) * 2, [tensor_pb2.Field(name="y", shape=[3])]],
    ids=["twice", "of no type"],
)
def test_fields_that_nobody_can_tell_apart_or_read_are_refused(fields: list[tensor_pb2.Field]) -> None:
    with pytest.raises(RemoteProtocolError, match="fields must differ in name and be FLOAT64"):
        from_fields(fields)


def test_a_hello_comes_back() -> None:
    back = read_hello(HELLO)
    assert (back.run_id, back.learner, back.next_round, from_fields(back.fields)) == ("r", 1, 0, SHAPES)


@pytest.mark.parametrize(
    ("payload", "text"),
    [
        (b"\xff\xff\xff", "expected a Hello first, got 3 bytes that cannot be decoded"),
        (b"", "expected a Hello first, got another message"),
        (said(), "expected a Hello first, got another message"),
        (learner_pb2.ExchangeMessage(hello=learner_pb2.Hello(learner=1)).SerializeToString(), "learner and next_round"),
        (
            learner_pb2.ExchangeMessage(hello=learner_pb2.Hello(next_round=1)).SerializeToString(),
            "learner and next_round",
        ),
    ],
    ids=["garbage", "nothing", "a round", "no round", "no learner"],
)
def test_what_is_no_hello_is_refused(payload: bytes, text: str) -> None:
    """And is no misconduct of a neighbour: nobody has said yet who it is."""
    with pytest.raises(RemoteProtocolError, match=text) as refused:
        read_hello(payload)
    assert refused.value.violation is None
