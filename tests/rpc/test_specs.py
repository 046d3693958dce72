"""Run specs on the wire: what an older service says of a newer document, and messages that no channel carries."""

from __future__ import annotations

import json

import pytest
import structlog.testing

from sottovoce_core.errors import SpecError
from sottovoce_core.spec_versions import FORMAT, FORMAT_FIELD
from sottovoce_rpc.server import MAX_MESSAGE_BYTES
from sottovoce_rpc.specs import check_size, resolve_run_id, spec_from_wire, spec_to_wire
from tests.examples import small_spec

SPEC = small_spec(7)


def test_there_and_back() -> None:
    assert spec_from_wire(spec_to_wire(SPEC), imports=False) == SPEC
    assert json.loads(spec_to_wire(SPEC))[FORMAT_FIELD] == FORMAT


def test_the_log_names_the_fields_that_were_left_out_and_not_their_values() -> None:
    newer = {**json.loads(spec_to_wire(SPEC)), FORMAT_FIELD: FORMAT + 1, "participation": "half of ward 7"}
    with structlog.testing.capture_logs() as logs:
        assert spec_from_wire(json.dumps(newer), imports=False) == SPEC
    assert [event["fields"] for event in logs] == [("participation",)]
    assert "ward 7" not in str(logs)


@pytest.mark.parametrize("text", ["{", "[" * 200_000, '{"rounds": ' + "9" * 5000 + "}"], ids=len)
def test_what_is_not_json_is_refused(text: str) -> None:
    with pytest.raises(SpecError, match="the run spec must be JSON"):
        spec_from_wire(text, imports=False)


def test_messages_have_room_in_a_channel_or_are_refused() -> None:
    check_size({"y": (MAX_MESSAGE_BYTES // 8,)})
    with pytest.raises(
        SpecError, match=f"a message may have at most {MAX_MESSAGE_BYTES} bytes, got {MAX_MESSAGE_BYTES + 8}"
    ):
        check_size({"y": (MAX_MESSAGE_BYTES // 16, 2), "weight": (1,)})


def test_a_run_is_named_by_as_much_of_its_id_as_tells_it_from_others() -> None:
    known = ["wards-1a", "wards-1b", "wards-1", *(f"x-{i}" for i in range(12))]
    told = {"wards-1a": "wards-1a", "wards-1": "wards-1", "x-11": "x-11", "x-3": "x-3", "": "", "none": "none"}
    assert {given: resolve_run_id(given, [*known, "wards-1a"]) for given in told} == told
    for given, names in (("wards", "wards-1a, wards-1b, wards-1$"), ("x", "x-0, .*x-9 and 2 more$")):
        with pytest.raises(SpecError, match=f"got '{given}', the prefix of several: {names}"):
            resolve_run_id(given, known)
