"""Values to bytes and back: what a snapshot is made of."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from sottovoce_core.arrays import Batch
from sottovoce_core.errors import CorruptStateError
from sottovoce_learner.ingest.record_queue import RecordQueueState
from sottovoce_learner.storage import state_folder
from sottovoce_learner.storage.snapshot import UnpackableError, is_packed_as, pack, unpack


@dataclass(frozen=True, slots=True)
class Leaf:
    value: Any


@dataclass(frozen=True)
class Branch:
    left: Any
    right: Any


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary()
NUMBERS = arrays.arrays(
    st.sampled_from([np.float64, np.float32, np.int64, np.uint8, np.bool_]), arrays.array_shapes(min_dims=0, min_side=0)
)
VALUES = st.recursive(
    SCALARS | NUMBERS | NUMBERS.map(lambda array: array.T),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.integers() | st.text(), inner, max_size=3)
        | inner.map(Leaf)
        | st.builds(Branch, inner, inner)
    ),
    max_leaves=8,
)


def require_same(one: Any, other: Any) -> None:
    """To the last bit, the order in memory included."""
    assert type(one) is type(other)
    if isinstance(one, np.ndarray):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert one.flags.c_contiguous == other.flags.c_contiguous
        assert one.tobytes() == other.tobytes()
        assert other.flags.writeable
    elif isinstance(one, Leaf | Branch):
        for name in type(one).__dataclass_fields__:
            require_same(getattr(one, name), getattr(other, name))
    elif isinstance(one, tuple | list):
        assert len(one) == len(other)
        for pair in zip(one, other, strict=True):
            require_same(*pair)
    elif isinstance(one, dict):
        require_same(list(one.items()), list(other.items()))
    else:
        assert one == other or (math.isnan(one) and math.isnan(other))


@given(VALUES)
def test_what_is_packed_comes_back(value: Any) -> None:
    require_same(value, unpack(pack(value, {}), {}))


def test_a_number_is_as_long_as_any_other() -> None:
    """The size of a snapshot decides when the next one is taken, which takes time: it must not depend on records."""
    assert len({len(pack(Leaf(value), {})) for value in (0.0, -1 / 3, 1e-300, math.inf, math.nan)}) == 1


def test_what_is_no_data_is_taken_from_the_run() -> None:
    loss, again = object(), object()
    raw = pack(Branch(loss, (loss, 1)), {"loss": loss})
    assert unpack(raw, {"loss": again}) == Branch(again, (again, 1))


@pytest.mark.parametrize("value", [object(), {1, 2}, lambda: 0, np.array([object()]), Leaf, 1j])
def test_what_has_no_bytes_is_refused(value: Any) -> None:
    with pytest.raises(UnpackableError, match="a state must consist of"):
        pack(Leaf(value), {})


def test_a_class_that_has_changed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass(frozen=True)
    class Other:
        value: Any
        more: int

    raw = pack(Leaf(1), {})
    for changed in (Other, int, None, "text"):
        monkeypatch.setattr(f"{__name__}.Leaf", changed)
        with pytest.raises(
            CorruptStateError, match=r"test_packing:Leaf, which differs from the class here: it was written by another"
        ):
            unpack(raw, {})


def test_nothing_is_imported_to_read_it() -> None:
    raw = pack(Leaf(1), {}).replace(__name__.encode(), b"x" * len(__name__))
    with pytest.raises(CorruptStateError, match="which differs from the class here"):
        unpack(raw, {})


def test_other_bytes_and_newer_ones_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CorruptStateError, match="must begin with its magic number"):
        unpack(b"something else", {})
    raw = pack(1, {})
    monkeypatch.setattr(state_folder, "FORMAT", 0)
    with pytest.raises(CorruptStateError, match="format 1, and this version reads up to 0"):
        unpack(raw, {})


@pytest.mark.parametrize("sizes", [[], [0], [2, 0, 3]])
def test_records_that_wait(sizes: list[int]) -> None:
    generator = np.random.default_rng(1)
    waiting = tuple(Batch(generator.normal(size=(size, 2)), np.ones(size)) for size in sizes)
    rounds = 3 * np.arange(len(sizes))
    taken = RecordQueueState({"a": 3}, 7, 4, waiting, rounds, np.array(sizes, np.int64), {}, 0)
    again = unpack(pack(taken, {}), {})
    assert (again.next_sequences, again.filled_rounds, again.batch_count) == ({"a": 3}, 7, 4)
    assert (again.rounds.tolist(), again.sizes.tolist()) == (rounds.tolist(), sizes)
    for name in ("features", "labels"):
        said, heard = (
            [value for each in part for value in getattr(each, name).tolist()]
            for part in (waiting, again.queued_batches)
        )
        assert heard == said


@pytest.mark.parametrize(
    "value",
    [
        np.arange(6.0).reshape(2, 3),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.arange(12.0).reshape(3, 4)[:, ::2],
        np.array(3.5),
        np.float64(3.5),
        np.empty((0, 3)),
        np.array([True, False]),
        np.array([1 + 2j]),
        (b"raw", "text", [1, None, 2.5], {"a": np.int32(7)}),
    ],
    ids=str,
)
def test_what_comes_back_packs_as_it_was_and_nothing_else_does(value: Any) -> None:
    raw = pack(value, {})
    assert is_packed_as(raw, unpack(raw, {}), {})
    for other in (
        raw + b"\0",
        raw[:-1],
        raw[:-64],
        bytes([raw[0] ^ 1]) + raw[1:],
        raw[:-64] + bytes([raw[-64] ^ 1]) + raw[-63:],
    ):
        assert not is_packed_as(other, value, {})
    assert not is_packed_as(raw, (value, 1), {})
