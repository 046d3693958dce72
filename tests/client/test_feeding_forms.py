"""What a feeder makes of bytes and fields, without a learner."""

from __future__ import annotations

import csv
import io
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sottovoce_client.feeding.formats import (
    INVALID_QUOTES,
    MAX_RECORD_BYTES,
    UNCLOSED_QUOTE,
    Csv,
    JsonLines,
    ParsedRecord,
    RecordFormat,
)
from sottovoce_client.feeding.records import (
    DUPLICATE_FIELD,
    EMPTY_MESSAGE,
    NO_NUMBERS,
    NO_OBJECT,
    NO_POSITION,
    NOT_UTF8,
    FieldMap,
    PositionCounter,
    RecordConverter,
    SourceMessage,
    UnfitRecordError,
)
from sottovoce_core.data.columns import WRONG_VALUE_COUNT_REASON
from sottovoce_core.data.encoding import UNDECLARED_FIELD_REASON
from sottovoce_core.data.live_records import LiveRecordEncoder
from sottovoce_core.errors import DataError, SpecError
from tests.client.test_live_learner import RECORD, SCHEMA, spec_of

DATA = spec_of({"schema": SCHEMA}).data
LOSS = spec_of({"schema": SCHEMA}).loss
RECORDS = LiveRecordEncoder.from_spec(DATA, LOSS)


def all_of(form: RecordFormat, text: bytes, sizes: list[int]) -> list[ParsedRecord]:
    """Records of a text that comes in stretches of these sizes, over and over; places count from the begin of the text."""
    rest, at, found, headed, turn = b"", 0, list[ParsedRecord](), False, 0
    coming = text
    while True:
        size = sizes[turn % len(sizes)]
        turn += 1
        stretch, coming = coming[:size], coming[size:]
        rest += stretch
        whole = not stretch
        if not headed:
            used = form.read_header(rest, is_complete=whole)
            if used is None:
                continue
            rest, at, headed = rest[used:], at + used, True
        cuts, used = form.split_records(rest, is_complete=whole)
        found += [ParsedRecord(at + each.begin, at + each.end, each.body, each.reason) for each in cuts]
        rest, at = rest[used:], at + used
        if whole:
            return found


# ---- lines -----------------------------------------------------------------------------------------------------------

VALUES = st.text(st.sampled_from('ab,;"\n\r é'), max_size=6)
ROWS = st.lists(st.tuples(VALUES, VALUES), max_size=8)
SIZES = st.lists(st.integers(1, 40), min_size=1, max_size=5)


@given(ROWS, SIZES, st.sampled_from(["\n", "\r\n"]), st.booleans())
def test_csv_is_what_was_written_however_it_comes(
    rows: list[tuple[str, str]], sizes: list[int], end: str, last_line_ends: bool
) -> None:
    made = io.StringIO(newline="")
    writer = csv.writer(made, lineterminator=end, quoting=csv.QUOTE_ALL)
    writer.writerows([("one", "two"), *rows])
    text = made.getvalue().encode()
    found = all_of(Csv(), text if last_line_ends else text.removesuffix(end.encode()), sizes)
    assert [each.reason for each in found] == [""] * len(rows)
    assert [tuple(each.body.values()) for each in found if isinstance(each.body, dict)] == rows
    for each, (one, two) in zip(found, rows, strict=True):  # each stands where it says
        again = csv.reader(io.StringIO(text[each.begin : each.end].decode(), newline=""))
        assert list(again) == [[one, two]]


@given(st.lists(st.binary(max_size=12).map(lambda line: line.replace(b"\n", b"")), max_size=8), SIZES)
def test_json_lines_are_lines_however_they_come(lines: list[bytes], sizes: list[int]) -> None:
    lines = [b"{}", *lines]  # else some begin as other formats do, and are refused as those
    text = b"\n".join(lines)
    found = all_of(JsonLines(), text, sizes)
    wanted = [line.removesuffix(b"\r") for line in lines]
    assert [text[each.begin : each.end] for each in found] == [line for line in wanted if line.strip()]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"1", WRONG_VALUE_COUNT_REASON),
        (b"1,2,3", WRONG_VALUE_COUNT_REASON),
        (b"\xff,2", NOT_UTF8),
        (b'"a"b,"2"', INVALID_QUOTES),
        (b'"a,2', UNCLOSED_QUOTE),
        (b'1,5" pipe', ""),
    ],
)
def test_what_is_no_csv_is_one_record_that_cannot_be_read(line: bytes, reason: str) -> None:
    found = all_of(Csv(), b"one,two\n" + line + b"\n7,8\n", [5])
    assert [(each.reason, each.begin) for each in found] == [(reason, 8), ("", 9 + len(line))]
    assert found[0].body == line if reason else isinstance(found[0].body, dict)


def test_a_quote_that_is_never_closed_swallows_no_file() -> None:
    form = Csv(names=["one", "two"])
    line = b"3," + b"4" * 4_000 + b"\n"
    text = b'"a,2\n' + line * (MAX_RECORD_BYTES // 4_000)
    found, used = form.split_records(text, is_complete=False)
    assert found[0].reason == UNCLOSED_QUOTE and used == len(text) and len(found) == 1 + MAX_RECORD_BYTES // 4_000
    assert form.split_records(text[:1000], is_complete=False) == ([], 0)


@pytest.mark.parametrize("text", [b"", b"\n\n", b"a,a\n1,2\n", b"a,\n", b"\xff\n", b'"a\n1,2\n'])
def test_a_csv_begins_with_a_header(text: bytes) -> None:
    with pytest.raises(DataError, match="must begin with a line of column names"):
        all_of(Csv(), text, [100])


def test_a_delimiter_is_a_character() -> None:
    assert [each.body for each in all_of(Csv(";"), b"\xef\xbb\xbfa;b\n1,5;2\n", [3])] == [{"a": "1,5", "b": "2"}]
    for wrong in ("", ";;", '"', "\n"):
        with pytest.raises(DataError, match="--delimiter must be one character"):
            Csv(wrong)


# ---- fields ----------------------------------------------------------------------------------------------------------


def record(body: Any, *maps: str, **more: Any) -> Any:
    body = body if isinstance(body, bytes) else json.dumps(body).encode()
    try:
        return FieldMap(DATA.schema, maps, **more).extract_record(body)
    except UnfitRecordError as why:
        return str(why)


PATIENT = {"patient": {"age": 61, "name": "x"}, "ward": "icu", "id": 7}


def test_a_map_reaches_into_objects() -> None:
    assert record(PATIENT, "age=patient.age", ignore_unknown=True) == {"age": 61, "ward": "icu", "id": 7}
    assert record({"patient.age": 5}, "age=patient.age") == {"age": 5}
    assert record({"a": {"b": {"c": 1, "d": 2}}}, "age=a.b.c", "ward=a.b.d") == {"age": 1, "ward": 2}
    assert record({"x": "icu"}, "ward=x", "outcome=x") == {"ward": "icu", "outcome": "icu"}
    assert record({"patient": None}, "age=patient.age") == {}
    assert record({" age ": 1}) == {" age ": 1}  # the encoder compares names


def test_what_nobody_knows_is_refused_unless_it_is_ignored() -> None:
    assert record(PATIENT, "age=patient.age") == UNDECLARED_FIELD_REASON
    assert record({"patient": 5}, "age=patient.age") == UNDECLARED_FIELD_REASON
    assert record({"age": 1, "years": 2}, "age=years") == UNDECLARED_FIELD_REASON
    assert record({"age": 1, "years": 2}, "age=years", ignore_unknown=True) == {"age": 2}
    assert record({"seq": 1, "age": 2}, position="seq") == {"age": 2}
    assert record({"seq": 1, "age": 2, "x": 3}, position="seq") == UNDECLARED_FIELD_REASON
    assert record({"patient.age": 5, "patient": {"age": 6}}, "age=patient.age") == DUPLICATE_FIELD


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"[1]", NO_OBJECT),
        (b"{", NO_OBJECT),
        (b"", EMPTY_MESSAGE),
        (b"[" * 100_000, NO_OBJECT),
        (b"\xff", NOT_UTF8),
        (b'{"age": 1, "age": 2}', DUPLICATE_FIELD),
        (b'{"age": ' + b"1" * 5000 + b"}", NO_OBJECT),
    ],
)
def test_what_is_no_object_is_refused(body: bytes, reason: str) -> None:
    assert record(body) == reason


@pytest.mark.parametrize(
    ("maps", "text"),
    [
        (["age"], "must be FIELD=PATH"),
        (["age=a..b"], "must be FIELD=PATH"),
        (["weight=w"], "fields? that the run's records do not have: 'weight'"),
        (["id=x"], "do not have: 'id'"),
        (["age=a", "age=b"], "must name 'age' once, got it twice"),
    ],
)
def test_a_map_that_does_not_fit_is_refused(maps: list[str], text: str) -> None:
    with pytest.raises(SpecError, match=text):
        FieldMap(DATA.schema, maps)


@given(st.binary(max_size=40) | st.recursive(st.none() | st.integers() | st.text("ap.", max_size=3),
    lambda inner: st.dictionaries(st.sampled_from(["age", "ward", "a", "b", "a.b"]), inner, max_size=3)).map(
    lambda value: json.dumps(value).encode()), st.booleans())  # fmt: skip
def test_no_message_breaks_the_reading_of_fields(body: bytes, ignore: bool) -> None:
    for maps in ([], ["age=a.b"]):
        found = record(body, *maps, ignore_unknown=ignore)
        assert found in (UNDECLARED_FIELD_REASON, NO_OBJECT, NOT_UTF8, DUPLICATE_FIELD, EMPTY_MESSAGE) or isinstance(
            found, dict
        )
        if maps and isinstance(found, dict):
            assert found.keys() <= {"age", "ward"}


# ---- a sieve ---------------------------------------------------------------------------------------------------------


def test_a_sieve_tells_records_from_what_is_none() -> None:
    sieve = RecordConverter(RECORDS, FieldMap(DATA.schema))
    good = json.dumps(RECORD).encode()
    messages = [
        SourceMessage(good, 3),
        SourceMessage({**RECORD, "age": 121}, 5),
        SourceMessage(good, 5),
        SourceMessage(b"x", 8, "unreadable"),
        SourceMessage({**RECORD, "more": 1}, 9),
        SourceMessage(b"no", 10),
        SourceMessage({**RECORD, "age": "61"}, 11),
    ]
    sifted = sieve.convert(messages, 2)
    assert sifted.fitting_records is not None
    encoded, positions = sifted.fitting_records
    assert (positions, len(encoded.labels), sifted.duplicate_count, sifted.last_position) == ([3, 11], 2, 1, 11)
    np.testing.assert_array_equal(encoded.features[0], encoded.features[1])
    reasons = [(messages[place].position, why) for place, why in sifted.refusals.items()]
    assert reasons == [(5, "age: beyond its bounds"), (8, "unreadable"), (9, UNDECLARED_FIELD_REASON), (10, NO_OBJECT)]
    assert sieve.convert(messages[:1], 3).fitting_records is None


@given(st.lists(st.tuples(st.integers(-1, 130), st.booleans(), st.integers(0, 9)), max_size=30), st.integers(-1, 9))
def test_every_message_is_counted_once(told: list[tuple[int, bool, int]], after: int) -> None:
    """Fitting, refused or come again; and what fits has positions that rise."""
    sieve = RecordConverter(RECORDS, FieldMap(DATA.schema))
    messages = [
        SourceMessage({**RECORD, "age": age}, place) if readable else SourceMessage(b"", place, "why")
        for age, readable, place in told
    ]
    sifted = sieve.convert(messages, after)
    positions = [] if sifted.fitting_records is None else sifted.fitting_records[1]
    assert len(positions) + len(sifted.refusals) + sifted.duplicate_count == len(messages)
    assert all(a < b for a, b in zip([after, *positions], positions, strict=False))
    assert sifted.last_position == max([after, *(each.position for each in messages)])


def test_a_run_without_a_schema_takes_lists_of_numbers() -> None:
    spec = spec_of({"features": 2, "intercept": True})
    sieve = RecordConverter(LiveRecordEncoder.from_spec(spec.data, spec.loss), FieldMap(None))
    rows: list[Any] = [
        {"features": [1, 2.5], "label": 1},
        {"features": [1], "label": 1},
        {"features": [1, "2"], "label": 1},
        {"features": [1, True], "label": 1},
        {"features": [1, 2], "label": 1, "more": 1},
        {"features": [1, 10**400], "label": 1},
        {"features": [1, 2]},
        {"features": 3, "label": 1},
        {"features": [1, float("nan")], "label": 1},
        {"features": [1, 2], "label": 7},
    ]
    sifted = sieve.convert([SourceMessage(row, at) for at, row in enumerate(rows)], -1)
    assert sifted.fitting_records is not None and sifted.fitting_records[0].features.tolist() == [[1.0, 2.5, 1.0]]
    reasons = list(sifted.refusals.values())
    assert reasons[:7] == [NO_NUMBERS] * 7
    assert reasons[7:] == ["a number that is not finite", "the label: not one of the loss"]


# ---- positions of a stream -------------------------------------------------------------------------------------------


def test_positions_are_counted_on_or_said_by_a_field() -> None:
    counted = PositionCounter("", 6)
    assert [counted.number_message(b"", why).position for why in ("", "no", "")] == [7, 8, 9]
    said = PositionCounter("seq", 6)
    bodies = [
        b'{"seq": 3}',
        b'{"seq": "9"}',
        b'{"seq": 9}',
        b'{"seq": true}',
        b"{}",
        b"x",
        b'{"seq": 1e3}',
        b'{"seq": 10}',
    ]
    found = [said.number_message(body) for body in bodies]
    assert [each.position for each in found] == [3, 9, 9, 9, 9, 9, 9, 10]
    reasons = [each.reason for each in found]
    assert reasons == ["", "", NO_POSITION, NO_POSITION, NO_POSITION, NO_OBJECT, NO_POSITION, ""]
