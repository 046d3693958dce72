"""What is said to the services: bytes by chance, messages with hostile values, and valid ones that are spoilt."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from sottovoce_wire.v1 import coordinator_pb2, eavesdropper_pb2, learner_pb2, tensor_pb2

COORDINATOR, EAVESDROPPER, LEARNER = "coordinator", "eavesdropper", "learner"
_SERVICES = {
    COORDINATOR: coordinator_pb2.DESCRIPTOR.services_by_name["Coordinator"],
    EAVESDROPPER: eavesdropper_pb2.DESCRIPTOR.services_by_name["Eavesdropper"],
    LEARNER: learner_pb2.DESCRIPTOR.services_by_name["Learner"],
}
METHODS: dict[str, tuple[tuple[str, type[Message], bool], ...]] = {
    house: tuple(
        (f"/{service.full_name}/{each.name}", GetMessageClass(each.input_type), each.client_streaming)
        for each in service.methods
    )
    for house, service in _SERVICES.items()
}
"""Of each service: path, class of a request, and whether it comes as a stream."""

_WHOLE = (0, 1, 2, 255, 2**31 - 1, 2**31, 2**32 - 1, 2**53, 2**63 - 1, 2**64 - 1, -1, -(2**31), -(2**63))
_REAL = (0.0, -0.0, 1.0, -1.0, math.nan, math.inf, -math.inf, 1e99, 1e300, -1e308, 5e-324)
_TEXTS = (
    "",
    " ",
    "ann",
    "ben",
    "zoe",
    "../../etc/passwd",
    "a" * 5_000,
    "\x00",
    "\x1b[31m",
    "ä\u202e\U0001f600",
    "-",
    "[]",
)
_TENSORS = {"features": (1, 3), "labels": (1,)}
_MANY = (0, 0, 1, 1, 2, 3, 17, 1_000)
_DEEPEST = 4
_BITS: dict[int, tuple[int, int]] = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
    FieldDescriptor.CPPTYPE_ENUM: (-(2**31), 2**31 - 1),
}


@dataclass(frozen=True)
class Known:
    """What a stranger knows who has listened.

    Attributes:
        spec: of the run, JSON.
        run_id, capture_id: of the run that is under way.
        hello: that the learner would take.
        frame: a round's message of the run.
    """

    spec: str = "{}"
    run_id: str = ""
    capture_id: str = ""
    hello: bytes = b""
    frame: bytes = b""


@dataclass(frozen=True, slots=True)
class Call:
    """One call.

    Attributes:
        method: its path.
        payloads: that are sent, in their order.
        closes: the stream of requests is closed after them; else it stays open until the deadline.
        deadline_s: of the call.
    """

    method: str
    payloads: tuple[bytes, ...]
    closes: bool
    deadline_s: float


def call(random: Random, house: str, known: Known) -> Call:
    """A call of a service by chance."""
    method, kind, streams = random.choice(METHODS[house])
    many = random.choice((0, 1, 2, 3, 8)) if streams else 1
    payloads = [payload(random, kind, known) for _ in range(many)]
    if kind is coordinator_pb2.LearnerMessage and random.random() < 0.5:
        payloads = [*_introduction(random), *payloads]
    closes = random.random() < (0.5 if streams else 0.95)
    return Call(method, tuple(payloads), closes, random.choice((0.3, 3.0) if closes else (0.05, 0.3)))


def _introduction(random: Random) -> tuple[bytes, bytes]:
    """With which a learner is let in that nobody has seen before."""
    name = f"l{random.randrange(10**9)}"
    said = coordinator_pb2.Introduction(learner=name, address="127.0.0.1:9", store_id=bytes(16))
    confirmed = coordinator_pb2.IncarnationStored(incarnation=1)
    return (
        coordinator_pb2.LearnerMessage(introduction=said).SerializeToString(),
        coordinator_pb2.LearnerMessage(incarnation_stored=confirmed).SerializeToString(),
    )


def payload(random: Random, kind: type[Message], known: Known) -> bytes:
    """A request of a class, or what is none."""
    if random.random() < 0.1:
        return random.randbytes(random.choice((0, 1, 7, 200, 70_000)))
    if kind is learner_pb2.ExchangeMessage and random.random() < 0.6:
        raw = random.choice((known.hello, known.hello, known.frame))
    else:
        raw = message(random, kind, known).SerializeToString()
    return spoilt(random, raw) if random.random() < 0.3 else raw


def message(random: Random, kind: type[Message], known: Known, depth: int = 0) -> Message:
    """A message with hostile values in its fields, or with right ones."""
    made = kind()
    for field in made.DESCRIPTOR.fields:
        if random.random() < 0.35 or (field.message_type is not None and depth >= _DEEPEST):
            continue
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            key, value = (
                _value(random, field.message_type.fields_by_name[each], known, depth) for each in ("key", "value")
            )
            getattr(made, field.name)[key] = value
        elif field.is_repeated:
            getattr(made, field.name).extend(
                _value(random, field, known, depth) for _ in range(random.choice(_MANY) if depth < 2 else 1)
            )
        elif field.message_type is not None:
            getattr(made, field.name).CopyFrom(_value(random, field, known, depth))
        else:
            setattr(made, field.name, _value(random, field, known, depth))
    return made


def _value(random: Random, field: Any, known: Known, depth: int) -> Any:
    if field.name == "n_features" and random.random() < 0.6:
        return 3
    if field.name in _TENSORS and random.random() < 0.6:
        shape = _TENSORS[field.name]
        numbers = [random.choice((0.0, 0.0, 1.0, *_REAL)) for _ in range(math.prod(shape))]
        data = struct.pack(f"<{len(numbers)}d", *numbers)
        return tensor_pb2.Tensor(shape=shape, dtype=tensor_pb2.DATA_TYPE_FLOAT64, data=data)
    if field.message_type is not None:
        return message(random, GetMessageClass(field.message_type), known, depth + 1)
    if field.type == FieldDescriptor.TYPE_BYTES:
        usual = {"payload": known.frame, "data": bytes(24), "store": bytes(16), "plan_hash": bytes(32)}
        return random.choice((usual.get(field.name, b""), b"", random.randbytes(random.choice((1, 8, 16, 24, 4_096)))))
    if field.type == FieldDescriptor.TYPE_STRING:
        return _text(random, field.name, known)
    if field.cpp_type in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT):
        return random.choice(_REAL)
    if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
        return random.random() < 0.5
    low, high = _BITS[field.cpp_type]
    return random.choice([value for value in (*_WHOLE, 3, 3, 1) if low <= value <= high])


def _text(random: Random, name: str, known: Known) -> str:
    if name == "spec" and random.random() < 0.9:
        return spec(random, known.spec)
    usual = {"run_id": known.run_id, "capture_id": known.capture_id, "learner": "ann"}
    usual |= {"address": "127.0.0.1:9", "target": "127.0.0.1:9"}
    return usual[name] if name in usual and random.random() < 0.6 else random.choice(_TEXTS)


def spoilt(random: Random, raw: bytes) -> bytes:
    """Bytes with some of them changed, left out, doubled, or with fields that nobody knows, nested deeply."""
    at = random.randrange(len(raw) + 1)
    ways: Sequence[Callable[[], Iterable[bytes]]] = (
        lambda: (raw[:at], random.randbytes(1), raw[at + 1 :]),
        lambda: (raw[:at],),
        lambda: (raw[:at], random.randbytes(random.choice((1, 2, 9))), raw[at:]),
        lambda: (raw, raw),
        lambda: (raw, b"\xfa\x3f\x03abc", b"\xc0\xff\xff\xff\x0f\x01"),
        lambda: (raw, b"\x0b" * 20_000),
        lambda: (raw, b"\x0a\xff\xff\xff\xff\x07"),
    )
    return b"".join(random.choice(ways)())


def spec(random: Random, text: str) -> str:
    """A run spec with one or more values changed, or what is none."""
    odd = ("[" * 100_000, '{"a":' * 50_000, "1e999", "9" * 5_000, "[1]", "null", '"x"', "{", "{}", '{"learners": 1e9}')
    if random.random() < 0.15:
        return random.choice(odd)
    document = json.loads(text)
    if random.random() < 0.6:
        document["learners"] = ["cleo"]  # who is in no run
    for _ in range(random.choice((0, 1, 1, 2))):
        _change(random, document)
    return json.dumps(document)


def _change(random: Random, section: Any) -> None:
    """Change one value, somewhere in a document."""
    keys: list[Any] = list(section) if isinstance(section, dict) else list(range(len(section)))
    if not keys:
        return
    key = random.choice(keys)
    if isinstance(section[key], dict | list) and section[key] and random.random() < 0.7:
        _change(random, section[key])
        return
    values: list[Any] = [*_WHOLE, *_REAL, *_TEXTS, None, True, [], {}, [[]], {"kind": "complete"}, {"kind": "ring"}]
    values += [2_000_000, ["x"] * 2_000, [f"l{k}" for k in range(3_000)], {"kind": "os:system"}, 1e-9, [[0, 1]] * 2_000]
    section[key] = random.choice(values)
