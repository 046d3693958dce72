"""A learner from its owner's programs."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from sottovoce_client.live.connect import connect_learner
from sottovoce_client.live.learner import ConnectedLearner
from sottovoce_client.live.sender import MAX_BATCH_RECORDS, Sender, _Batch
from sottovoce_client.live.sync_learner import SyncLearner
from sottovoce_core.data.live_records import LiveRecordEncoder
from sottovoce_core.errors import DataError, FailedPrecondition, SpecError, Unavailable
from sottovoce_core.losses.linear import LogisticLoss
from sottovoce_core.spec import RunSpec, parse_spec
from sottovoce_learner.ingest.group_commit import RecordIngestor
from sottovoce_rpc.learner_status import LearnerState
from sottovoce_wire.v1 import learner_pb2
from tests.examples import made_up, small_spec
from tests.gossip import GOSSIP
from tests.services.identities import Identities
from tests.services.network import OPERATOR, PATIENCE_S, Network, network

NAMES = ["ann", "ben"]
CLOCK = {"mode": "paced", "period_s": 0.01, "deadline_s": 100.0}
SCHEMA = {
    "features": {
        "age": {"type": "number", "bounds": [0, 120]},
        "ward": {"type": "category", "categories": ["icu", "surgery"], "missing": "neutral"},
    },
    "label": {"name": "outcome", "type": "category", "categories": ["home", "died"]},
    "ignored": ["id"],
}
SECRET = 31_337
RECORD = {"age": 61, "ward": "icu", "outcome": "home"}


def spec_of(data: dict[str, Any], rounds: int = 100_000, **more: Any) -> RunSpec:
    telemetry = {"predict": True}
    return small_spec(
        rounds, NAMES, data={"source": "live", **data}, **{"clock": CLOCK, "telemetry": telemetry, **more}
    )


@asynccontextmanager
async def ann_in(folder: Path, spec: RunSpec, **more: Any) -> AsyncIterator[tuple[Network, ConnectedLearner]]:
    """A learner in a run."""
    async with network(folder, NAMES) as up:
        await up.start(spec, spec.data.width or 0)
        async with connect_learner(up.addresses["ann"], source="test", **more) as learner:
            yield up, learner


async def learned(learner: ConnectedLearner, records: int) -> None:
    async for status in learner.watch(0.01):
        if (status.records, status.records_waiting) == (records, 0):
            return


# ---- records in ------------------------------------------------------------------------------------------------------


def of_frames() -> list[Any]:
    """The same three records in every way in which they may come."""
    columns = {"age": [61, 70, 8], "ward": ["icu", None, "surgery"], "outcome": ["home", "died", "home"]}
    rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    found: list[Any] = [columns, rows, pa.table(columns)]
    pandas = pytest.importorskip("pandas")
    return [*found, pandas.DataFrame(columns)]


async def test_records_come_in_every_form_that_a_table_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with ann_in(tmp_path, spec_of({"schema": SCHEMA})) as (_, learner):
        forms = of_frames()
        encoded = [learner.records.encode(each) for each in forms]
        for each in encoded[1:]:
            np.testing.assert_array_equal(each.features, encoded[0].features)
            np.testing.assert_array_equal(each.labels, encoded[0].labels)
        assert encoded[0].features.shape == (3, learner.spec.data.width)
        assert [await learner.feed(each) for each in forms] == [3] * len(forms)
        apart = {"age": [5], "ward": ["icu"]}
        assert await learner.feed(apart, ["died"]) == await learner.feed([{"age": 5}], ["died"]) == 1
        await learned(learner, 3 * len(forms) + 2)
        assert learner.position == 3 * len(forms) + 1


@pytest.mark.parametrize("intercept", [True, False])
async def test_records_without_a_schema_are_numbers(tmp_path: Path, intercept: bool) -> None:
    async with ann_in(tmp_path, spec_of({"features": 2, "intercept": intercept})) as (_, learner):
        assert (
            await learner.feed(np.ones((2, 2)), [0, 1]) == await learner.feed([[1, 2], [3, 4]], np.array([1, 1])) == 2
        )
        assert (await learner.predict(np.ones((3, 2)))).scores.shape == (3,)
        await learned(learner, 4)


WRONG: list[tuple[Any, Any, str]] = [
    ([{**RECORD, "age": SECRET}], None, r"record 0 .* age: beyond its bounds$"),
    ([RECORD, {**RECORD, "ward": str(SECRET)}, {}], None, r"record 1 .* ward: none of its categories, and 1 more"),
    ([{**RECORD, "weight": SECRET}], None, "neither declared nor ignored"),
    ([{"age": 1, "ward": "icu"}], None, "outcome: missing"),
    ({"age": [1, 2], "ward": ["icu"], "outcome": ["home", "home"]}, None, "equally many values"),
    ({"age": 1}, None, "must be a list of values"),
    ([SECRET], None, "must be a mapping"),
    (str(SECRET), None, "must be mappings of fields to values, or a table, got str"),
    (np.ones((1, 3)), None, "must be mappings"),
    ([{"age": 1}], ["home", "died"], "labels must be one for each of 1"),
]


@pytest.mark.parametrize(("records", "labels", "text"), WRONG)
async def test_what_does_not_fit_is_refused_whole_and_not_quoted(
    tmp_path: Path, records: Any, labels: Any, text: str
) -> None:
    async with ann_in(tmp_path, spec_of({"schema": SCHEMA})) as (_, learner):
        with pytest.raises(DataError, match=text) as refused:
            await learner.feed(records, labels)
        assert str(SECRET) not in str(refused.value)
        await learner.feed([RECORD])
        assert (await learner.fetch_status()).records == 1


@pytest.mark.parametrize(
    ("records", "labels", "text"),
    [
        (np.ones((1, 3)), [0], r"shaped \(records, 2\), got \(1, 3\)"),
        (np.ones(2), [0], "shaped"),
        ([["a", "b"]], [0], "must be numbers"),
        (np.ones((2, 2)), [0], r"labels must be 2"),
        (np.ones((1, 2)), None, "labels must be 1"),
        (np.full((1, 2), np.nan), [0], "not finite"),
        (np.ones((1, 2)), [2], "the label"),
    ],
)
async def test_numbers_that_do_not_fit_are_refused(tmp_path: Path, records: Any, labels: Any, text: str) -> None:
    async with ann_in(tmp_path, spec_of({"features": 2})) as (_, learner):
        with pytest.raises(DataError, match=text):
            await learner.feed(records, labels)


async def test_positions_say_which_records_are_here_already(tmp_path: Path) -> None:
    rows = np.ones((3, 2))
    async with ann_in(tmp_path, spec_of({"features": 2})) as (up, learner):
        assert await learner.feed(rows, [0] * 3, positions=[10, 20, 30]) == 3
        assert await learner.feed(rows, [0] * 3, positions=[20, 30, 40]) == 1
        assert await learner.feed(rows, [0] * 3, positions=[1, 2, 3]) == 0
        async with connect_learner(up.addresses["ann"], source="test") as again:
            assert again.position == 40
            assert await again.feed(rows, [0] * 3, positions=[39, 40, 41]) == 1
        async with connect_learner(up.addresses["ann"], source="other") as other:
            assert other.position == -1
        for wrong in ([1, 2], [5, 4, 6], [1, 1, 2], [-1, 0, 1], ["a", "b", "c"], [2**70] * 3):
            with pytest.raises(DataError, match="positions must be whole numbers, one for each of 3 records"):
                await learner.feed(rows, [0] * 3, positions=wrong)  # type: ignore[arg-type]
        await learned(learner, 5)


async def test_many_feeds_at_once_and_one_that_is_given_up(tmp_path: Path) -> None:
    rows = np.ones((2_500, 2))
    async with ann_in(tmp_path, spec_of({"features": 2, "batch_size": 10_000})) as (_, learner):
        feeds = [asyncio.ensure_future(learner.feed(rows, np.zeros(2_500))) for _ in range(20)]
        await asyncio.sleep(0.01)
        feeds[10].cancel()
        found = await asyncio.gather(*feeds, return_exceptions=True)
        assert [each for each in found if isinstance(each, int)] == [2_500] * 19
        await learner.feed(rows[:1], [1])
        status = await learner.fetch_status()
        assert status.records == learner.position + 1 >= 19 * 2_500 + 1


async def test_records_that_have_no_stream_wait_and_say_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And are learned when another stream ends."""
    waits = asyncio.Queue[str]()
    async with ann_in(tmp_path, spec_of({"features": 2})) as (up, learner):
        await learner.feed(np.ones((1, 2)), [0])
        monkeypatch.setattr(up.learners["ann"].servicer._record_streams, "_max_streams", 1)
        async with connect_learner(up.addresses["ann"], source="other", notify=waits.put_nowait) as other:
            feeding = asyncio.ensure_future(other.feed(np.ones((2, 2)), [0, 1]))
            why = await waits.get()
            monkeypatch.setattr(up.learners["ann"].servicer._record_streams, "_max_streams", 2)
            assert await feeding == 2
    assert waits.empty()
    assert "at most 1 streams of records by callers without an identity" in why
    assert "send several sources on one, or give processes identities of their own" in why


# ---- predictions, and how it stands ----------------------------------------------------------------------------------


async def test_predictions_name_the_classes(tmp_path: Path) -> None:
    async with ann_in(tmp_path, spec_of({"schema": SCHEMA})) as (_, learner):
        found = await learner.predict([{"age": 5}, RECORD, {"age": 100, "ward": "icu", "outcome": "no label"}])
        assert set(found.labels) <= {"home", "died"} and len(found.labels) == 3
        with pytest.raises(DataError, match=r"record 0 .* age: missing"):
            await learner.predict([{"ward": "icu"}])


async def test_predictions_need_the_run_to_opt_in(tmp_path: Path) -> None:
    async with ann_in(tmp_path, spec_of({"features": 2}, telemetry={})) as (_, learner):
        with pytest.raises(FailedPrecondition, match="did not opt in"):
            await learner.predict(np.ones((1, 2)))


async def test_a_run_that_is_over_takes_nothing_more(tmp_path: Path) -> None:
    async with ann_in(tmp_path, spec_of({"features": 2}, rounds=30), patience_s=PATIENCE_S) as (up, learner):
        states = [each.state async for each in learner.watch(0.01)]
        assert states[-1] is LearnerState.FINISHED
        with pytest.raises(FailedPrecondition, match="is over for this learner"):
            await learner.feed(np.ones((1, 2)), [0])
        await up.start_another(spec_of({"schema": SCHEMA}), 4)
        with pytest.raises(FailedPrecondition, match="is over for this learner"):
            await learner.feed(np.ones((1, 2)), [0])
        async with connect_learner(up.addresses["ann"]) as anew:
            assert await anew.feed([RECORD]) == 1


# ---- on their way ----------------------------------------------------------------------------------------------------


async def test_of_records_that_go_together_the_refused_are_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The learner refuses whole messages, and says not which of their records it was."""
    wrong, sizes, feed = (3, 20, 21, 49), list[int](), RecordIngestor.feed

    async def noted(self: RecordIngestor, batch: learner_pb2.SampleBatch) -> None:
        sizes.append(len(batch.positions))
        await feed(self, batch)

    monkeypatch.setattr(RecordIngestor, "feed", noted)
    async with ann_in(tmp_path, spec_of({"features": 2})) as (_, learner):
        kept = []
        for k in range(50):
            label = np.array([7.0 if k in wrong else k % 2])
            kept += await learner._sender.put(np.ones((1, 3)), label, np.array([k]))
        ends = await asyncio.gather(*kept, return_exceptions=True)
        assert [k for k, end in enumerate(ends) if end is not None] == list(wrong)
        assert all(isinstance(ends[k], DataError) for k in wrong)
        assert max(sizes) > 10
        await learned(learner, 50 - len(wrong))


async def test_records_behind_the_ones_before_go_apart(tmp_path: Path) -> None:
    """What jumps back is passed over, as if it came alone."""
    async with ann_in(tmp_path, spec_of({"features": 2})) as (_, learner):
        places = [0, 1, 5, 2, 6, 7]
        kept = [
            each
            for place in places
            for each in await learner._sender.put(np.ones((1, 3)), np.zeros(1), np.array([place]))
        ]
        await asyncio.wait_for(asyncio.gather(*kept), 100.0)
        await learned(learner, 5)


def test_a_message_has_no_more_than_fits() -> None:
    def batch(first: int, records: int, width: int = 3) -> _Batch:
        kept: Any = None
        return _Batch(np.zeros((records, width)), np.zeros(records), list(range(first, first + records)), kept)

    sender = object.__new__(Sender)
    sender._batches, sender._sends_single_batches = deque(batch(k, 1) for k in range(3_000)), False
    assert [len(each) for each in sender._group_batches(-1)] == [
        MAX_BATCH_RECORDS,
        MAX_BATCH_RECORDS,
        3_000 - 2 * MAX_BATCH_RECORDS,
    ]
    assert sum(len(each) for each in sender._group_batches(999)) == 2_000
    sender._batches = deque([batch(0, 600), batch(600, 600), batch(1_200, 424), batch(1_624, 1)])
    assert [[each.positions[0] for each in group] for group in sender._group_batches(-1)] == [
        [0],
        [600, 1_200],
        [1_624],
    ]
    sender._batches = deque(batch(k, 1, 200_000) for k in range(5))  # 1.6 MB each
    assert [len(each) for each in sender._group_batches(-1)] == [2, 2, 1]
    sender._sends_single_batches = True
    assert [len(each) for each in sender._group_batches(-1)] == [1] * 5


# ---- without await ---------------------------------------------------------------------------------------------------


async def test_a_plain_program_does_the_same(tmp_path: Path) -> None:
    async with network(tmp_path, NAMES) as up:
        await up.start(spec_of({"schema": SCHEMA}), 4)

        def program() -> tuple[int, SyncLearner]:
            with connect_learner(up.addresses["ann"]) as learner:
                learner.feed([RECORD, RECORD])
                threads = [threading.Thread(target=learner.feed, args=([RECORD],)) for _ in range(5)]
                for each in threads:
                    each.start()
                for each in threads:
                    each.join()
                for status in learner.watch(0.01):
                    if status.records_waiting == 0:
                        break
                assert learner.predict([RECORD]).labels[0] in ("home", "died")
                return learner.fetch_status().records, learner

        records, learner = await asyncio.to_thread(program)
    assert (records, learner.position) == (7, 6)


# ---- who is not there ------------------------------------------------------------------------------------------------


async def test_who_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match=r"cannot reach the learner at 127\.0\.0\.1:1 within 0\.5 s"):
        async with connect_learner("127.0.0.1:1", patience_s=0.5):
            pass
    with pytest.raises(Unavailable, match="cannot reach"), connect_learner("127.0.0.1:1", patience_s=0.5):
        pass
    async with network(tmp_path, NAMES) as up:
        with pytest.raises(FailedPrecondition, match="not in a run"):
            async with connect_learner(up.addresses["ann"], patience_s=0.5):
                pass
        spec = small_spec(2, NAMES)
        over = await up.run(spec, made_up(spec))
        first = rf"no run is active at {up.addresses['ann']}: {over.run_id} \(finished\) is over for this learner; "
        second = "a run must have data.source live to take records, got breast_cancer, where its records come from$"
        with pytest.raises(SpecError, match=f"^{first}{second}"):
            async with connect_learner(up.addresses["ann"]):
                pass
        await up.start(small_spec(10, NAMES), 3)
        with pytest.raises(SpecError, match=r"^a run must have data.source live to take records, got"):
            async with connect_learner(up.addresses["ann"]):
                pass


async def test_code_that_a_spec_names_is_imported_here_only_where_that_is_allowed(tmp_path: Path) -> None:
    """Whoever starts runs says what stands in it."""
    data = {"source": "live", "features": 2}
    spec = parse_spec({"rounds": 1000, "learners": NAMES, "algorithm": GOSSIP, "data": data}, allow_imports=True)
    async with network(tmp_path, NAMES) as up:
        await up.start(spec, 3)
        with pytest.raises(SpecError, match="code named in a spec from elsewhere, got"):
            async with connect_learner(up.addresses["ann"]):
                pass
        async with connect_learner(up.addresses["ann"], allow_imports=True) as learner:
            assert await learner.feed(np.ones((1, 2)), [0]) == 1


def test_what_pandas_does_not_have_is_missing() -> None:
    pandas = pytest.importorskip("pandas")
    flagged = {
        "features": {"age": {"type": "number", "bounds": [0, 120], "missing": "neutral"}},
        "label": SCHEMA["label"],
    }
    records = LiveRecordEncoder.from_spec(spec_of({"schema": flagged, "intercept": False}).data, LogisticLoss())
    for gap in (None, float("nan"), pandas.NA):
        found = records.encode(pandas.DataFrame({"age": [60, gap], "outcome": ["home", "died"]}))
        assert (found.features.tolist(), found.refusals) == ([[0.0], [0.0]], {})


async def test_only_whom_the_owner_has_named_brings_records(tmp_path: Path) -> None:
    ids = Identities(tmp_path / "ids")
    async with network(tmp_path, NAMES, identities=ids) as up:
        await up.start(spec_of({"features": 2}), 3)
        async with connect_learner(up.addresses["ann"], identity=ids.at(OPERATOR)) as learner:
            await learner.feed(np.ones((1, 2)), [0])
        own = ids.at("learner/ben")
        with pytest.raises(Exception, match="must be authorised for this by the owner of 'ann'"):
            async with connect_learner(up.addresses["ann"], identity=own):
                pass
