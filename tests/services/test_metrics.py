"""What real services tell Prometheus of a run, and that none of it depends on a record."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from sottovoce_client.runs.feeder import make_batch
from sottovoce_coordinator.metrics import CATALOGUE as COORDINATOR
from sottovoce_coordinator.metrics import _get_failed_runs
from sottovoce_coordinator.run_state import CaptureBinding
from sottovoce_coordinator.store import StoredRun
from sottovoce_core.data import LearnerData, PlacedData
from sottovoce_core.spec import RunSpec
from sottovoce_eavesdropper.service import CATALOGUE as EAVESDROPPER
from sottovoce_learner.host import collect_metrics
from sottovoce_learner.metrics import CATALOGUE as LEARNER
from sottovoce_rpc.access import Refusals
from sottovoce_rpc.learner_status import LearnerState
from sottovoce_rpc.metrics import MetricsEndpoint, serve_metrics
from sottovoce_rpc.principals import Role
from sottovoce_rpc.server import open_channel
from sottovoce_wire.v1 import coordinator_pb2, eavesdropper_pb2, learner_pb2_grpc
from tests.examples import made_up, small_spec
from tests.services.capturing import hello
from tests.services.identities import Identities, raw_channel
from tests.services.network import PATIENCE_S, Network, network, refused
from tests.services.scrapes import asked, series

pytest.importorskip("prometheus_client")

NAMES = ["ann", "ben", "cleo"]
ROUNDS, HALF = 12, 6


@asynccontextmanager
async def told(up: Network) -> AsyncIterator[dict[str, str]]:
    """Where the services of a network tell metrics: by kind of service."""
    assert up.coordinating is not None and up.eavesdropping is not None
    own = {kind: Refusals() for kind in ("learner", "coordinator", "eavesdropper")}
    coordinator, eavesdropper = up.coordinating, up.eavesdropping
    at = MetricsEndpoint("127.0.0.1:0", include_process=False)
    async with (
        serve_metrics(
            at, LEARNER, lambda: collect_metrics([*up.learners.values()], own["learner"]), own["learner"]
        ) as learners,
        serve_metrics(
            at, COORDINATOR, lambda: coordinator.collect_metrics(own["coordinator"]), own["coordinator"]
        ) as main,
        serve_metrics(
            at, EAVESDROPPER, lambda: eavesdropper.collect_metrics(own["eavesdropper"]), own["eavesdropper"]
        ) as ear,
    ):
        yield {"learner": learners, "coordinator": main, "eavesdropper": ear}


async def all_of(at: dict[str, str]) -> dict[str, float]:
    """What all services say."""
    found = dict[str, float]()
    for address in at.values():
        found |= series((await asked(address)).body)
    return found


async def until(at: dict[str, str], holds: Callable[[dict[str, float]], bool]) -> dict[str, float]:
    """What all services say once that is something."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            if holds(found := await all_of(at)):
                return found
            await asyncio.sleep(0.01)


def of(name: str, learner: str, **labels: str) -> str:
    """A series of a learner."""
    told = ",".join(f'{label}="{value}"' for label, value in sorted({"learner": learner, **labels}.items()))
    return f"sottovoce_learner_{name}{{{told}}}"


# ---- what is told ----------------------------------------------------------------------------------------------------


async def test_a_run_in_numbers(tmp_path: Path) -> None:
    """Every number that can be known beforehand."""
    spec = small_spec(
        ROUNDS, NAMES, topology={"graph": "path"}, capture="mirror", privacy={"budget": 1e9}, data={"reuse": False}
    )
    async with network(tmp_path, NAMES) as up, told(up) as at:
        up.learners["ben"].config = replace(up.learners["ben"].config, budget=2e9)
        idle = await until(
            at,
            lambda found: (
                found.get("sottovoce_coordinator_learners_joined") == 3
                and all(found.get(of("coordinator_connected", name)) == 1 for name in NAMES)
            ),
        )
        assert idle[of("state", "ann", state="idle")] == 1
        outcome = await up.run(spec, made_up(spec))
        found = await until(at, lambda found: found["sottovoce_eavesdropper_captures_open"] == 0)
    assert outcome.state == "finished"
    for name, neighbours in (("ann", 1), ("ben", 2), ("cleo", 1)):
        length = outcome.statuses[NAMES.index(name)].bytes_sent / outcome.statuses[NAMES.index(name)].messages_sent
        assert found[of("run_info", name, run=outcome.run_id)] == 1
        assert found[of("rounds_total", name)] == found[of("rounds_committed_total", name)] == ROUNDS
        assert (found[of("leased_rounds", name)], found[of("lag_rounds", name)]) == (ROUNDS, 0)
        assert (
            found[of("messages_sent_total", name)] == found[of("messages_received_total", name)] == ROUNDS * neighbours
        )
        assert (
            found[of("sent_bytes_total", name)]
            == found[of("received_bytes_total", name)]
            == ROUNDS * neighbours * length
        )
        assert found[of("records_total", name)] == found[of("records_learned_total", name)] == ROUNDS
        waiting = ("records_waiting", "records_waiting_bytes", "link_queue_messages", "mirror_queue_messages")
        assert [found[of(each, name)] for each in waiting] == [0] * 4
        assert found[of("neighbours", name)] == neighbours
        assert found[of("noise_private", name)] == 1
        spent = outcome.statuses[NAMES.index(name)].epsilon_spent
        assert found[of("epsilon_spent", name, scope="run")] == spent > 0
        assert found[of("epsilon_limit", name, scope="run")] == 1e9
        assert found[of("epsilon_left", name, scope="run")] == 1e9 - spent
        assert (of("epsilon_left", name, scope="all") in found) == (name == "ben")
    assert found['sottovoce_coordinator_runs{state="finished"}'] == 1
    assert found['sottovoce_coordinator_run_ended_timestamp_seconds{state="finished"}'] > 1e9
    assert found["sottovoce_coordinator_epochs_total"] == 3
    assert found["sottovoce_eavesdropper_messages_total"] == 4 * ROUNDS
    assert found["sottovoce_eavesdropper_parts_total"] >= 1
    assert found["sottovoce_eavesdropper_storage_errors_total"] == 0


async def test_who_is_away_is_told_and_who_comes_back(tmp_path: Path) -> None:
    spec = small_spec(10_000, NAMES, topology={"graph": "path"}, clock={"mode": "data"})
    async with network(tmp_path, NAMES, durable=True) as up, told(up) as at:
        await up.start(spec, 3)
        await up.until("ann", LearnerState.RUNNING)
        here = await all_of(at)
        assert here["sottovoce_coordinator_learners_disconnected"] == here[of("neighbours_disconnected", "ann")] == 0
        await up.leave("ben")
        away = await until(at, lambda found: found[of("neighbours_disconnected", "ann")] == 1)
        await up.until_gone("ben")
        away = await all_of(at)
        assert away["sottovoce_coordinator_learners_disconnected"] == 1
        assert away['sottovoce_coordinator_learner_disconnected{learner="ben"}'] == 1
        await up.join("ben")
        back = await until(at, lambda found: found[of("neighbours_disconnected", "ann")] == 0)
        assert back[of("reconnects_total", "ann", to="neighbour")] >= 1
        await up.restart_coordinator()
        await until(at, lambda found: found[of("reconnects_total", "ann", to="coordinator")] >= 1)


async def test_what_a_learner_waits_for_is_told(tmp_path: Path) -> None:
    spec = small_spec(10, NAMES)
    async with network(tmp_path, NAMES) as up, told(up) as at:
        await up.start(spec, 3)
        await until(at, lambda found: of("waiting", "ann", cause="records") in found)


async def test_who_is_not_let_in_is_counted(tmp_path: Path) -> None:
    async with network(tmp_path / "one", ["ann"]) as up, told(up) as at, network(tmp_path / "two", []) as other:
        await up.until_here("ann")  # else the first one may be refused
        other.coordinator = up.coordinator
        await other.join("ann")  # with another state folder
        refused = 'sottovoce_coordinator_joins_refused_total{kind="PermissionDenied"}'
        assert (await until(at, lambda found: refused in found))[refused] >= 1


async def test_a_storage_error_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    spec = small_spec(ROUNDS, NAMES, capture="relay")
    async with network(tmp_path, NAMES) as up, told(up) as at:
        monkeypatch.setattr("sottovoce_eavesdropper.capture_writer.CaptureWriter._write", full)
        await up.run(spec, made_up(spec))
        found = await until(at, lambda found: found["sottovoce_eavesdropper_captures_open"] == 0)
    assert found["sottovoce_eavesdropper_storage_errors_total"] == 1


async def denied(caller: Path, believes: Path, to: str, host: str, method: str, said: bytes) -> None:
    """Somebody calls who may not, and is told so."""
    async with raw_channel(caller, believes, to, f"{host}.ward.example") as channel:
        asked: Any = channel.stream_stream(f"/sottovoce_wire.v1.{method}")
        assert (await refused(asked(iter([said]), timeout=PATIENCE_S))).code() is grpc.StatusCode.PERMISSION_DENIED


async def test_a_call_that_is_refused_is_counted_and_why(tmp_path: Path) -> None:
    """By every service, relays included; whoever fails in the handshake is not, for no service is told of it."""
    ids, others = Identities(tmp_path / "ids"), Identities(tmp_path / "others")
    spec = small_spec(10_000, NAMES, topology={"graph": "path"}, clock={"mode": "data"}, capture="relay")
    async with network(tmp_path, NAMES, identities=ids) as up:
        run = await up.start(spec, 3)
        await up.until("ann", LearnerState.RUNNING)
        coordinator, eavesdropper = up.coordinating, up.eavesdropping
        assert coordinator is not None and eavesdropper is not None
        (recording,) = eavesdropper._captures.sessions.values()
        relay = next(route["address"] for route in recording.writer.routes if route["caller"] == 0)
        joins = coordinator_pb2.LearnerMessage(
            introduction=coordinator_pb2.Introduction(learner="ann", address="here:1")
        )
        closes = eavesdropper_pb2.CloseCaptureRequest(capture_id=recording.writer.capture_id)
        greets = hello(0, run_id=run.run_id)
        for caller, to, host, method, said in (
            ("operator/bob", up.addresses["ann"], "learner", "Learner/GetLedger", b""),
            ("learner/zoe", up.addresses["ben"], "learner", "Learner/Exchange", greets),
            ("learner/zoe", up.coordinator, "coordinator", "Coordinator/Join", joins.SerializeToString()),
            ("coordinator/b", up.eavesdropper, "eavesdropper", "Eavesdropper/CloseCapture", closes.SerializeToString()),
            ("learner/zoe", relay, "eavesdropper", "Learner/Exchange", greets),
            ("monitor/prometheus", up.addresses["ann"], "learner", "Learner/GetLedger", b""),
        ):
            await denied(ids.at(caller), ids.at(caller), to, host, method, said)
        stranger = others.at("learner/zoe")
        async with raw_channel(
            stranger, ids.at("learner/ann"), up.addresses["cleo"], "learner.ward.example"
        ) as to_cleo:
            status: Any = to_cleo.unary_unary("/sottovoce_wire.v1.Learner/GetStatus")
            failed = await refused(status(b"", timeout=PATIENCE_S))
        read = {name: list(collect_metrics([learner], Refusals())) for name, learner in up.learners.items()}
        read |= {
            "main": list(coordinator.collect_metrics(Refusals())),
            "ear": list(eavesdropper.collect_metrics(Refusals())),
        }
    assert failed.code() is grpc.StatusCode.UNAVAILABLE
    counted = {
        (who, *each.labels): each.value
        for who, readings in read.items()
        for each in readings
        if each.metric.name == "sottovoce_calls_refused_total" and each.value
    }
    assert counted == {
        ("ann", "condition"): 1,
        ("ann", "role"): 1,
        ("ben", "condition"): 1,
        ("main", "condition"): 1,
        ("ear", "condition"): 2,
    }
    ends = [each.labels for each in read["ann"] if each.metric.name == "sottovoce_certificate_expiry_timestamp_seconds"]
    assert ends == [("learner/ann",)]


# ---- nothing of it depends on a record -------------------------------------------------------------------------------

TIMES = re.compile(
    r"_timestamp_seconds\b|^sottovoce_learner_waiting\b|_parts_total\b|_busy_ratio\b|_delay_\w+_seconds\b"
)
"""When something was, whether it has lasted so long that it is told, into how many parts that cut what was
recorded, and how busy processes are."""


async def scrapes(folder: Path, spec: RunSpec, data: PlacedData) -> tuple[list[dict[str, float]], list[float | None]]:
    """All series before a run, when half of the records are learned, and after it; and how well the learners predicted."""
    async with network(folder, []) as up, told(up) as at:
        up.noise_seed = "one"
        for name in NAMES:
            await up.join(name)
        found = [await until(at, lambda found: all(found[of("coordinator_connected", name)] for name in NAMES))]
        run_id = (await up.start_another(spec, 3)).run_id
        for half in (0, 1):
            await asyncio.gather(*(fed(up, *each, half) for each in zip(NAMES, data.learners, strict=True)))
            done = (half + 1) * HALF
            found.append(await until(at, lambda found, done=done: rests(found, done)))  # type: ignore[misc]
        accuracies = [up.learners[name].status.prequential_accuracy for name in NAMES]
    return [{name.replace(run_id, "RUN"): value for name, value in each.items()} for each in found], accuracies


async def fed(up: Network, name: str, own: LearnerData, half: int) -> None:
    """Bring one half of a learner's records, and have a receipt for it."""
    async with open_channel(up.addresses[name], Role.LEARNER, name) as to:
        batch = make_batch(own, "feeder", half, HALF)
        receipts = learner_pb2_grpc.LearnerStub(to).Ingest(iter([batch]), timeout=PATIENCE_S)
        assert [each.next_sequence async for each in receipts][-1] == half + 1


def rests(found: dict[str, float], done: int) -> bool:
    """Nothing moves any more: all rounds are done that have records, the next one is said, and everybody knows."""
    said = min(done + 1, ROUNDS)
    learners = [[found.get(of(each, name)) for each in ("rounds_total", "messages_received_total")] for name in NAMES]
    known = [value for name, value in found.items() if re.match("sottovoce_coordinator_(run_rounds|learner_lag)", name)]
    state = "running" if done < ROUNDS else "finished"
    return (
        all(of("state", name, state=state) in found for name in NAMES)
        and found[f'sottovoce_coordinator_runs{{state="{state}"}}'] == 1
        and learners == [[done, 2 * said]] * 3
        and not any(value for name, value in found.items() if "queue" in name or "rows_waiting" in name)
        and set(known) == ({done, 0} if done < ROUNDS else set())
        and found["sottovoce_eavesdropper_captures_open"] == (done < ROUNDS)
        and found["sottovoce_eavesdropper_messages_total"] == 6 * said
    )


async def test_no_metric_depends_on_a_record(tmp_path: Path) -> None:
    """Two data sets that differ in one record, with the same noise: what is said and predicted differs, what is told does not."""
    spec = small_spec(
        ROUNDS, NAMES, capture="mirror", telemetry={"accuracy": True, "predict": True}, privacy={"budget": 1e9}
    )
    data = made_up(spec, seed=3)
    first = data.learners[0]
    features, labels = first.features.copy(), first.labels.copy()
    features[0], labels[0] = -50.0 * features[0], 1.0 - labels[0]
    other = replace(data, learners=(replace(first, features=features, labels=labels), *data.learners[1:]))
    here, accuracy = await scrapes(tmp_path / "here", spec, data)
    there, other_accuracy = await scrapes(tmp_path / "there", spec, other)

    assert accuracy != other_accuracy  # the record counts for something, and the same could be seen of a metric
    for ours, theirs in zip(here, there, strict=True):
        assert {name for name in ours if not TIMES.search(name)} == {name for name in theirs if not TIMES.search(name)}
        differing = {name for name in ours if not TIMES.search(name) and ours[name] != theirs[name]}
        assert differing == set()
    assert np.isfinite(list(here[-1].values())).all() and len(here[-1]) > 60


def test_the_names_of_times_are_few() -> None:
    """What the test above does not compare."""
    metrics = [each.name for catalogue in (LEARNER, COORDINATOR, EAVESDROPPER) for each in catalogue.metrics]
    assert [name for name in metrics if TIMES.search(name)] == [
        "sottovoce_learner_waiting",
        "sottovoce_coordinator_run_ended_timestamp_seconds",
        "sottovoce_coordinator_run_failed_timestamp_seconds",
        "sottovoce_eavesdropper_parts_total",
        "sottovoce_eavesdropper_busy_ratio",
        "sottovoce_eavesdropper_message_delay_median_seconds",
        "sottovoce_eavesdropper_message_delay_tail_seconds",
    ]


def past_run(name: str, state: coordinator_pb2.RunState.ValueType, ended: int, *learners: str) -> StoredRun:
    view = coordinator_pb2.Run(run_id=name, state=state)
    view.ended_at.FromSeconds(ended)
    for each in learners:
        view.learners.add().status.learner = each
    return StoredRun(name, "{}", 1, CaptureBinding(), view.SerializeToString())


def test_a_run_that_failed_is_told_of_until_one_of_its_learners_is_in_another_one() -> None:
    """Of others' runs after it nothing follows; a second failure of the same learners takes the first one's place."""
    failed, finished = coordinator_pb2.RUN_STATE_FAILED, coordinator_pb2.RUN_STATE_FINISHED
    first = past_run("first", failed, 10, "ann", "ben")
    others, again, good = (
        past_run("others", finished, 20, "cleo"),
        past_run("again", failed, 30, "ben", "cleo"),
        past_run("good", finished, 40, "cleo"),
    )

    def told(*newest_first: StoredRun) -> dict[str, float]:
        return {each.labels[0]: each.value for each in _get_failed_runs(newest_first)}

    assert told(first) == told(others, first) == {"first": 10.0}
    assert told(again, others, first) == {"again": 30.0}
    assert told(good, again, others, first) == {}
