"""Audits of traffic that was overheard earlier: of two worlds, of one, and of what cannot be used."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from sottovoce_client.auditing.audit import AuditRequest
from sottovoce_client.auditing.audit_files import WORLDS_FILE, WorldsFile, restore_worlds, write_worlds
from sottovoce_client.auditing.audit_runs import find_difference
from sottovoce_client.auditing.captures import (
    ObservedChannels,
    audit_captures,
    load_captured_runs,
    read_conversation,
    select_channels,
)
from sottovoce_client.auditing.network import interleave_pairs
from sottovoce_client.terminal import ignore_progress
from sottovoce_core.algorithms.interface import Message
from sottovoce_core.auditing.audit import Audit
from sottovoce_core.auditing.plan import AuditPlan, plan_audit
from sottovoce_core.auditing.traffic_features import (
    CHANNEL_VIEWS,
    TIMING_VIEWS,
    RunFeatures,
    build_features_by_view,
    build_tables,
)
from sottovoce_core.auditing.worlds import build_worlds
from sottovoce_core.errors import CaptureError, DataError, EquivocationError, SottovoceError, SpecError
from sottovoce_core.experiment import PreparedRun
from sottovoce_core.noise import SeededNoise
from sottovoce_core.privacy.guarantee import ThreatModel
from sottovoce_core.runs.run import Run, build_run
from sottovoce_core.runs.simulator import simulate_rounds
from sottovoce_core.spec import RunSpec
from sottovoce_eavesdropper.capture_checks import CaptureRow
from sottovoce_eavesdropper.capture_reader import open_capture
from sottovoce_eavesdropper.capture_writer import CaptureWriter
from tests.examples import made_up, small_spec
from tests.services.capturing import METHOD, encode_round, hello, row

ROUNDS, RUNS = 4, 8
Change = Callable[[CaptureRow, int], CaptureRow]


def spec_of(**more: Any) -> RunSpec:
    return small_spec(ROUNDS, 3, **{"algorithm": {"sigma": 30.0}, "capture": "relay", **more})


def planned(spec: RunSpec | None = None, runs: int = RUNS, **more: Any) -> AuditPlan:
    spec = spec or spec_of()
    data = made_up(spec, batch=2)
    return plan_audit(build_run(spec, 3), data, 1, runs=runs, **more)


def rows_of(run: Run, plan: AuditPlan, world: int, seed: int, rounds: int) -> list[CaptureRow]:
    """What a relay keeps of one run."""
    edges = run.network.edges
    rows = [
        CaptureRow(i, j, sender, direction, "metadata", 1, 1, METHOD, 0, k, len(payload), payload)
        for k, (i, j) in enumerate(edges)
        for sender, direction, payload in ((i, "out", b'{"metadata": [["size", "1"]]}'), (j, "back", b"{}"))
    ]
    for step in simulate_rounds(run, plan.worlds.build_data(plan.data, world), SeededNoise(seed)):
        if step.t == rounds:
            break
        for i, j in edges:
            for sender, direction in ((i, "out"), (j, "back")):
                fields = {name: values[sender, 0] for name, values in step.message.fields.items()}
                said = encode_round(step.t, sender, Message(fields))
                at = 10**6 * (step.t + 1) + sender
                rows.append(CaptureRow(i, j, sender, direction, "message", 1, 1, METHOD, at, at, len(said), said))
    return rows


def keep(
    folder: Path,
    plan: AuditPlan,
    world: int | None,
    replica: int,
    *,
    actual: Run | None = None,
    rounds: int = ROUNDS,
    change: Change = lambda row, world: row,
) -> Path:
    """One run as a capture."""
    run, lived = actual or plan.run, world or 0
    spec = json.dumps(plan.run.spec.model_dump(mode="json"))
    place = folder / f"run-{replica}"

    async def write() -> None:
        file = CaptureWriter(place, place.name, place.name, spec, 3, world, replica)
        for each in rows_of(run, plan, lived, 1000 + replica, rounds):
            file.add_row(change(each, lived))
        await file.close()

    asyncio.run(write())
    return place


def two_worlds(folder: Path, plan: AuditPlan, **more: Any) -> Path:
    """Runs of both, taking turns."""
    folder.mkdir(exist_ok=True)
    write_worlds(folder, plan)
    for k in range(2 * plan.runs):
        keep(folder, plan, k % 2, k, **more)
    return folder


def audited(folder: Path, plan: AuditPlan, spec: RunSpec | None = None, **asked: Any) -> Audit:
    def prepare(told: RunSpec) -> PreparedRun:
        return PreparedRun(build_run(told, 3), plan.data)

    return audit_captures(
        *load_captured_runs(str(folder), AuditRequest(**asked), prepare, ignore_progress, spec=spec), ignore_progress
    )


def channel(table: pa.Table, lines: ObservedChannels, run_id: str) -> dict[str, RunFeatures]:
    return build_features_by_view(read_conversation(table, lines, run_id), {**CHANNEL_VIEWS, **TIMING_VIEWS})


# ---- of two worlds ---------------------------------------------------------------------------------------------------


def test_captures_of_two_worlds_are_audited_as_if_just_overheard(tmp_path: Path) -> None:
    plan = planned()
    captures = two_worlds(tmp_path / "captures", plan)
    done = audited(tmp_path, plan)  # found below the folder, in the order of replicas
    assert done.source == f"16 captures in {tmp_path.name}"
    assert sorted(done.run_worlds.tolist()) == [0] * RUNS + [1] * RUNS
    assert done.plan.worlds.learner == 1 and done.plan.worlds.description == plan.worlds.description
    assert done.plan.runs == RUNS and done.findings.has_both_worlds and done.findings.whole_run_bound is not None
    assert done.verdict.kind == "consistent"
    first = open_capture(captures / "run-0").read_transcript({"y": (3,)}, 3)
    assert done.run_losses is not None
    assert done.run_losses.total[0] == pytest.approx(plan.worlds.compute_losses(plan.run, first).sum())


@pytest.mark.statistics
@pytest.mark.parametrize("place", ["metadata", "replies"])
def test_what_numbers_do_not_show_is_refuted_by_name(tmp_path: Path, place: str) -> None:
    """Epsilon is below one; a channel that tells the world of every run shows more than that with 32 runs of each."""

    def leak(row: CaptureRow, world: int) -> CaptureRow:
        if place == "metadata" and row.kind == "metadata" and row.sender == 1:
            payload = json.dumps({"metadata": [["gradient-norm", str(0.5 + world)]]}).encode()
            return row._replace(payload=payload, size=len(payload))
        late = 5_000 * world if place == "replies" and row.kind == "message" and row.sender == 1 else 0
        return row._replace(mono_ns=row.mono_ns + late)

    plan = planned(runs=32)
    assert plan.epsilon < 1.0
    done = audited(two_worlds(tmp_path, plan, change=leak), plan)
    assert done.verdict.kind == "refuted" and done.black_box_claim == plan.epsilon
    assert all(test.p_value > 1e-3 for test in done.findings.select_family("conformance").tests)
    views = {bound.view for bound in done.findings.bounds if bound.value > plan.epsilon}
    assert views and views <= ({"metadata"} if place == "metadata" else {"replies", "gaps", "order"})


@pytest.mark.parametrize("kind", ["use", "row"])
def test_worlds_come_back_as_they_were(tmp_path: Path, kind: str) -> None:
    plan = planned()
    if kind == "row":  # a record that is learned twice
        own = plan.data.learners[1]
        own = replace(own, order=np.where(np.arange(len(own.order)) == 5, 2, own.order))
        data = plan.data.with_learner(1, own)
        worlds = build_worlds(data, 1, 2, -own.features[2], 1.0)
        plan = plan_audit(plan.run, data, 1, runs=RUNS, worlds=worlds)
    write_worlds(tmp_path, plan)
    document = json.loads((tmp_path / WORLDS_FILE).read_text())
    assert kind in document["pairs"][0]
    (back, *_) = restore_worlds(WorldsFile(**document), PreparedRun(plan.run, plan.data), "there")
    for one, other in ((back.records_0, plan.worlds.records_0), (back.records_1, plan.worlds.records_1)):
        for t in range(ROUNDS):
            np.testing.assert_array_equal(one.batch(t).features, other.batch(t).features)
            np.testing.assert_array_equal(one.batch(t).labels, other.batch(t).labels)
    np.testing.assert_array_equal(back.replacements_per_round, plan.worlds.replacements_per_round)


def test_all_pairs_of_worlds_come_back_and_every_run_knows_its_own(tmp_path: Path) -> None:
    plan = planned(runs=400)
    assert len(plan.pairs) > 1
    pairs = interleave_pairs(plan)
    write_worlds(tmp_path, plan, pair_of_run=pairs)
    document = WorldsFile.model_validate_json((tmp_path / WORLDS_FILE).read_text())
    back = restore_worlds(document, PreparedRun(plan.run, plan.data), "there")
    assert [each.description for each in back] == [each.worlds.description for each in plan.pairs]
    assert [pairs.count(k) for k in range(len(back))] == [2 * each.runs for each in plan.pairs]
    assert [document.find_pair_index(replica) for replica in range(len(pairs))] == pairs
    for wrong in (-1, len(pairs), None):
        with pytest.raises(CaptureError, match="must name one of 4 pairs of worlds"):
            document.find_pair_index(wrong)
    with pytest.raises(CaptureError, match="pair_of_run"):
        document.model_copy(update={"pair_of_run": [9]}).find_pair_index(0)


def test_a_run_of_another_pair_of_worlds_alone_is_refused(tmp_path: Path) -> None:
    plan = planned(runs=400)
    pairs = interleave_pairs(plan)
    write_worlds(tmp_path, plan, pair_of_run=pairs)
    keep(tmp_path, plan, 0, pairs.index(1))
    with pytest.raises(
        CaptureError, match=r"run-\d+ is of the audit's pair of worlds 2, .*: name the whole folder of the audit"
    ):
        audited(tmp_path, plan)


# ---- of one world ----------------------------------------------------------------------------------------------------


def test_one_world_is_tested_and_never_said_to_be_guessed(tmp_path: Path) -> None:
    plan = planned()
    for k in range(4):
        keep(tmp_path, plan, None, k)
    done = audited(tmp_path, plan, learner="learner-2", spec=plan.run.spec)
    assert done.plan.worlds.learner == 2
    assert done.plan.worlds.records_0 is plan.data.learners[2]  # the records as they were, not made-up ones
    assert (done.findings.bounds, done.findings.has_both_worlds) == ((), False)
    assert done.run_losses is not None and 0.0 < done.largest_loss <= done.findings.claim
    assert done.verdict.kind == "consistent" and "4 runs of one world" in done.verdict.text
    assert "No world was guessed" in done.verdict.text and "above" not in done.verdict.text
    few = audited(tmp_path / "run-0", plan)
    assert few.verdict.kind == "inconclusive" and "even a learner with half of its noise" in few.verdict.text


def test_half_the_noise_shows_in_one_world(tmp_path: Path) -> None:
    plan = planned()
    half = build_run(spec_of(algorithm={"sigma": 15.0}), 3)
    for k in range(5):
        keep(tmp_path, plan, None, k, actual=half)
    done = audited(tmp_path, plan)
    assert done.verdict.kind == "refuted" and done.plan.runs == 5


# ---- what is left out or refused -------------------------------------------------------------------------------------


def test_captures_that_miss_rounds_are_left_out_and_counted(tmp_path: Path) -> None:
    plan = planned()
    short = keep(tmp_path, plan, None, 0, rounds=ROUNDS - 1)
    with pytest.raises(CaptureError, match=f"must have all {ROUNDS} rounds, and none of 1 capture has"):
        audited(short, plan)
    keep(tmp_path, plan, None, 1)
    keep(tmp_path, plan, None, 2)
    done = audited(tmp_path, plan)
    assert done.plan.runs == 2 and "2 captures" in done.source and "1 other left out" in done.source


def test_captures_of_different_runs_are_named_with_the_place(tmp_path: Path) -> None:
    plan = planned()
    keep(tmp_path, plan, None, 0)
    keep(tmp_path, planned(spec_of(algorithm={"sigma": 31.0})), None, 1)
    with pytest.raises(CaptureError, match=r"run-0 and .*run-1 .* differ in algorithm\.sigma: 30\.0 and 31\.0"):
        audited(tmp_path, plan)


def test_a_spec_beside_them_must_be_theirs_but_for_what_an_audit_changes(tmp_path: Path) -> None:
    plan = planned()
    keep(tmp_path, plan, None, 0)
    same = spec_of(capture="none", privacy={"budget": 3.0}, telemetry={"accuracy": True})
    assert audited(tmp_path, plan, same).plan.runs == 1
    with pytest.raises(SpecError, match=r"differs in algorithm\.sigma: 2\.0 and 30\.0"):
        audited(tmp_path, plan, spec_of(algorithm={"sigma": 2.0}))


def test_code_that_captures_name_is_not_imported_unasked(tmp_path: Path) -> None:
    plan = planned()
    path = keep(tmp_path, plan, None, 0) / "capture.json"
    facts = json.loads(path.read_text())
    facts["spec"]["algorithm"]["name"] = "antigravity:Algorithm"
    path.write_text(json.dumps(facts))
    with pytest.raises(SpecError, match="give the SPEC together with --captures"):
        audited(tmp_path, plan)


def broken(document: dict[str, Any], **more: Any) -> str:
    (pair,) = document["pairs"]
    of_pair = {key: more.pop(key) for key in ("first", "second", "use") if key in more}
    return json.dumps({**document, **more, "pairs": [{**pair, **of_pair}]})


def second(document: dict[str, Any], **more: Any) -> dict[str, Any]:
    record: dict[str, Any] = document["pairs"][0]["second"]
    return {**record, **more}


WORLDS: dict[str, tuple[Callable[[dict[str, Any]], str], type[SottovoceError], str]] = {
    "not JSON": (lambda d: "{", CaptureError, "cannot read"),
    "foreign": (lambda d: "[]", CaptureError, "in the format"),
    "not adjacent": (
        lambda d: broken(d, second=d["pairs"][0]["first"]),
        DataError,
        r"worlds\.json: adjacent .* exactly one record",
    ),
    "other data": (lambda d: broken(d, data="0"), DataError, "is of others"),
    "label of no class": (
        lambda d: broken(d, second=second(d, label=5.0)),
        DataError,
        "labels of the logistic loss must be 0 or 1",
    ),
    "other learner": (lambda d: broken(d, learner="ann"), CaptureError, "learner-0, learner-1"),
    "other spec": (lambda d: broken(d, spec={**d["spec"], "rounds": 9}), CaptureError, "differ in rounds: 9 and 4"),
    "no record": (lambda d: broken(d, first={}), CaptureError, "must describe"),
    "no such use": (lambda d: broken(d, use=99), DataError, r"worlds\.json: position"),
    "not a number": (lambda d: broken(d, use="0"), CaptureError, "pairs.0.use must be a whole number"),
}


@pytest.mark.parametrize("case", list(WORLDS))
def test_worlds_that_cannot_be_used_are_refused_in_a_line(tmp_path: Path, case: str) -> None:
    plan = planned()
    write_worlds(tmp_path, plan)
    for k in range(2):
        keep(tmp_path, plan, k, k)
    mutilate, error, text = WORLDS[case]
    path = tmp_path / WORLDS_FILE
    path.write_text(mutilate(json.loads(path.read_text())))
    with pytest.raises(error, match=text) as raised:
        audited(tmp_path, plan)
    assert "\n" not in str(raised.value)


def test_labels_need_their_worlds(tmp_path: Path) -> None:
    plan = planned()
    keep(tmp_path, plan, 0, 0)
    keep(tmp_path, plan, 1, 1)
    with pytest.raises(
        CaptureError, match=r"of world 0 and 1: a worlds\.json next to them must describe the worlds, and there is none"
    ):
        audited(tmp_path, plan)
    write_worlds(tmp_path, plan)
    with pytest.raises(SpecError, match="runs of each world, got 1"):
        audited(tmp_path, plan)
    assert not audited(tmp_path / "run-0", plan).findings.has_both_worlds  # its worlds are named in the folder above
    with pytest.raises(CaptureError, match="or 0 alone, got 1"):
        audited(tmp_path / "run-1", plan)
    keep(tmp_path, plan, 5, 2)
    with pytest.raises(CaptureError, match="world 0 or 1, or name no world, got 5"):
        audited(tmp_path, plan)


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        ({"learner": "learner-0"}, "--learner must be learner-1"),
        ({"record": 0}, "--record is for new runs only"),
        ({"threat": ThreatModel.OUTPUT}, "--threat output"),
    ],
)
def test_only_what_was_recorded_can_be_asked(tmp_path: Path, asked: dict[str, Any], text: str) -> None:
    plan = planned()
    write_worlds(tmp_path, plan)
    keep(tmp_path, plan, 0, 0)
    with pytest.raises(SpecError, match=text):
        audited(tmp_path, plan, **asked)


def test_mutilated_captures_are_named(tmp_path: Path) -> None:
    plan = planned()
    with pytest.raises(CaptureError, match=r"must be a capture, or a folder with captures, and has no capture\.json"):
        audited(tmp_path, plan)
    part = keep(tmp_path, plan, None, 0) / "part-000001.parquet"
    whole = part.read_bytes()
    part.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CaptureError, match=r"part-000001\.parquet"):
        audited(tmp_path, plan)
    part.unlink()
    with pytest.raises(CaptureError, match="parts are missing"):
        audited(tmp_path, plan)
    part.with_name("part-000002.parquet").write_bytes(whole)
    with pytest.raises(CaptureError, match=r"must have part-000001\.parquet"):
        audited(tmp_path, plan)


def test_two_words_in_one_round_are_named_with_the_capture(tmp_path: Path) -> None:
    plan = planned()

    def change(row: CaptureRow, world: int) -> CaptureRow:
        twice = row.kind == "message" and (row.caller, row.callee, row.sender) == (0, 1, 0)
        return row._replace(payload=row.payload[:-1] + b"\x3f") if twice else row

    keep(tmp_path, plan, None, 0, change=change)
    with pytest.raises(
        EquivocationError, match="run-0: learner-0 sent two different messages in round 0, or the capture was changed"
    ):
        audited(tmp_path, plan)


def test_differences_are_found_where_they_are() -> None:
    one = {"a": {"b": [1, 2]}, "c": 0}
    assert find_difference(one, dict(one)) is None
    assert find_difference(one, {"a": {"b": [1, 3]}, "c": 1}) == "a.b: [1, 2] and [1, 3]"
    assert find_difference(one, {"a": {"b": [1, 2]}}) == "c: 0 and None"
    assert find_difference({"a": 1, "name": "x"}, {"name": "y"}) == "name: x and y"


# ---- channel ---------------------------------------------------------------------------------------------------------


def table(rows: list[CaptureRow]) -> pa.Table:
    columns = {name: [getattr(row, name) for row in rows] for name in CaptureRow._fields}
    return pa.table(columns)


def test_runs_stand_side_by_side_however_much_was_heard() -> None:
    plan = planned()
    rows = rows_of(plan.run, plan, 0, 1, ROUNDS)
    runs = [channel(table(each), select_channels(plan), "run-0") for each in (rows, rows[:9], rows[:1], rows * 10)]
    for view in build_tables(runs).values():
        assert view.shape[0] == 4 and np.isfinite(view).all()
    assert build_tables(runs[:1]).keys() == build_tables(runs).keys()


def test_messages_of_others_are_not_looked_into() -> None:
    plan = planned()
    rows = rows_of(plan.run, plan, 0, 1, ROUNDS)
    others = [r._replace(payload=b"?") if r.sender != plan.worlds.learner and r.kind == "message" else r for r in rows]
    views = build_tables([channel(table(each), select_channels(plan), "run-0") for each in (rows, others)])
    assert all((before == after).all() for before, after in views.values())


def changed(plan: AuditPlan, change: Callable[[CaptureRow], CaptureRow]) -> set[str]:
    """The views in which a change of the learner's rows shows."""
    lines = select_channels(plan)
    rows = rows_of(plan.run, plan, 0, 1, ROUNDS)
    own = [change(row) if row.sender == plan.worlds.learner else row for row in rows]
    views = build_tables([channel(table(each), lines, "run-0") for each in (rows, own)])
    return {name for name, (before, after) in views.items() if (before != after).any()}


def test_every_change_shows_where_it_belongs() -> None:
    plan = planned()

    def entries(text: str) -> Callable[[CaptureRow], CaptureRow]:
        payload = json.dumps({"metadata": [["key", text]]}).encode()
        return lambda row: row._replace(payload=payload) if row.kind == "metadata" else row

    def longer(row: CaptureRow) -> CaptureRow:
        return row._replace(size=row.size + 1) if row.kind == "message" else row

    def last(row: CaptureRow) -> CaptureRow:
        return row._replace(payload=row.payload[:40] + b"!" + row.payload[41:]) if row.kind == "message" else row

    assert changed(plan, lambda row: row) == set()
    assert changed(plan, entries("value")) == {"metadata", "counts"}  # there was none before
    assert changed(plan, longer) == {"sizes", "counts"}
    assert changed(plan, last) == {"bytes"}
    assert changed(plan, lambda row: row._replace(mono_ns=row.mono_ns * 2)) == {"gaps", "replies"}
    assert changed(plan, lambda row: row._replace(stream=2)) == {"counts", "order"}
    assert changed(plan, lambda row: row._replace(kind="trailers") if row.kind == "metadata" else row) >= {"status"}


def test_frames_show_in_views_of_their_own() -> None:
    """Of what the learner sends and receives; the payload of a ping as a time does, for gRPC chooses it at random."""
    plan = planned()
    lines, spoken = select_channels(plan), rows_of(plan.run, plan, 0, 1, ROUNDS)

    def views(frames: str, sender: int = 1, receiver: int = 0) -> dict[str, Any]:
        own = row(bytes.fromhex(frames), sender, receiver, kind="http2", stream=0, method="")
        return channel(table([own, *spoken]), lines, "run-0")

    def changed(one: dict[str, Any], other: dict[str, Any]) -> set[str]:
        return {name for name, (a, b) in build_tables([one, other]).items() if (a != b).any()}

    unknown, ping = "000001530000000000", "000008060000000000" + "00" * 7
    assert changed(views(unknown + "01"), views(unknown + "02")) == {"http2"}
    assert changed(views(unknown + "01", 0, 1), views(unknown + "02", 0, 1)) == {"http2"}
    assert changed(views(unknown + "01", 0, 2), views(unknown + "02", 0, 2)) == set()
    assert changed(views(ping + "01"), views(ping + "02")) == {"flow control"}


def test_random_names_of_runs_and_what_is_no_json_say_nothing() -> None:
    plan = planned()
    lines = select_channels(plan)

    def views(name: str) -> dict[str, Any]:
        payload = json.dumps({"metadata": [["sottovoce-run", name], ["odd"], 3]}).encode()
        rows = rows_of(plan.run, plan, 0, 1, ROUNDS)
        return channel(table([r._replace(payload=payload) if r.kind == "metadata" else r for r in rows]), lines, name)

    for one, other in build_tables([views("run-a"), views("run-b")]).values():
        np.testing.assert_array_equal(one, other)
    for junk in (b"[[[", b"[]", b"\xff", b"[" * 5000):
        rows = [r._replace(payload=junk, kind="trailers") for r in rows_of(plan.run, plan, 0, 1, 1)]
        assert np.isfinite(channel(table(rows), lines, "run-a")["status"].numbers).all()


def test_hellos_are_looked_at_as_metadata_are() -> None:
    """They are none of the messages; the run's random name says nothing."""
    plan = planned()
    lines, spoken = select_channels(plan), rows_of(plan.run, plan, 0, 1, ROUNDS)

    def views(run_id: str = "run-a", first: bytes = b"", **more: Any) -> dict[str, Any]:
        said = first or hello(1, run_id=run_id, **more)
        greeting = row(said, 1, 0, kind="hello", at=0, mono_ns=1)
        return channel(table([greeting, *spoken]), lines, run_id)

    usual = views()

    def changed(other: dict[str, Any]) -> set[str]:
        return {name for name, (before, after) in build_tables([usual, other]).items() if (before != after).any()}

    assert changed(views("run-b")) == set()
    assert changed(views(next_round=3)) == {"metadata"}
    assert changed(views(plan_hash=bytes(31) + b"!")) == {"metadata"}
    assert changed(views(first=b"\x0a\xff")) == {"metadata", "sizes", "counts"}


def test_a_neighbour_hears_its_own_edges_only() -> None:
    plan = planned(threat=ThreatModel.NEIGHBOUR, neighbour=2)
    lines = select_channels(plan)
    assert all(2 in line[:2] for line in lines.roles) and len(lines.roles) == 4
    assert lines.inspected_channel == (1, 2, "out")
    assert {line: whose for line, whose in lines.roles.items() if whose != "others"} == {
        (1, 2, "out"): "sent",
        (1, 2, "back"): "received",
    }
