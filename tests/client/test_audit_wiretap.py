"""Audits of ciphertext: what leaks there alone is found there alone, and an honest learner is not accused."""

from __future__ import annotations

import json
import shutil
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from sottovoce_client.auditing import network
from sottovoce_client.auditing.audit import AuditRequest
from sottovoce_client.auditing.captures import audit_captures, list_captures, load_captured_runs
from sottovoce_client.auditing.network import audit_ciphertext
from sottovoce_client.cli import app
from sottovoce_client.terminal import ignore_progress
from sottovoce_client.watching.watch import WatchRequest, open_source, watch
from sottovoce_core.auditing.foreign.audit import audit_traffic
from sottovoce_core.auditing.traffic_features import CapturedFrame, RunTraffic, build_timing_views, build_views
from sottovoce_core.errors import CaptureError, SpecError
from sottovoce_core.experiment import prepare
from sottovoce_core.spec import load_spec
from sottovoce_eavesdropper.storage import open_folder
from sottovoce_lab.gallery import write_capture_gallery
from sottovoce_lab.service_mutants import WIRETAP_MUTANTS, ServiceMutant
from sottovoce_lab.service_power import SERVICE_BASE_RUN, _collect_runs, _plan_norm_audit

BROKEN = {each.name: each for each in WIRETAP_MUTANTS}
QUIET = replace(SERVICE_BASE_RUN, epsilon=0.1)
"""The less is claimed, the fewer runs show that more is given away."""
RUNS = 24
SURE = 0.9999
"""With this confidence a correct learner is refuted in one audit of 10,000: times and coins' luck with them are not seeded."""

# ---- real services ---------------------------------------------------------------------------------------------------


def by_wiretap(broken: ServiceMutant) -> tuple[Any, dict[int, float]]:
    """The audit, and how many connections a run of each world has."""
    plan = _plan_norm_audit(QUIET, RUNS, 1, SURE)
    with _collect_runs(broken, plan, "wiretap") as made:
        assert made.is_ciphertext and len(made.complete_captures) == 2 * RUNS
        heard = {
            world: [
                each.ciphertext.connections
                for each in made.complete_captures
                if each.ciphertext and each.world == world
            ]
            for world in (0, 1)
        }
        usual = {world: statistics.median(counts) for world, counts in heard.items()}
        return audit_ciphertext(plan, made, 1, ignore_progress), usual


@pytest.mark.slow
def test_a_connection_more_is_found_by_a_wiretap() -> None:
    """The coins and the split are seeded, and the connection is there in every run of one world and in none of the other.

    A guess may be wrong where the machine was so busy that a run had to connect again.
    """
    done, connections = by_wiretap(BROKEN["another connection"])
    assert done.verdict.kind == "refuted"
    assert any(bound.is_above_claim for bound in done.findings.bounds)
    assert abs(connections[1] - connections[0]) == 1
    assert done.timing_bounds == ()  # times are judged with the rest


@pytest.mark.slow
def test_a_connection_more_is_not_found_by_a_relay() -> None:
    """Nothing that a relay hears depends on it: a false alarm has probability 0.0001 at most."""
    plan = _plan_norm_audit(QUIET, RUNS, 1, SURE)
    with _collect_runs(BROKEN["another connection"], plan, "relay") as made:
        assert audit_captures(plan, made, ignore_progress).verdict.kind != "refuted"


@pytest.mark.slow
def test_an_honest_learner_is_not_accused_by_a_wiretap() -> None:
    """By construction with probability 0.0001 at most, and then a sign of less is no refutation."""
    done, connections = by_wiretap(BROKEN["correct"])
    assert done.verdict.kind == "consistent"
    assert done.findings.epsilon_lower_bound == 0.0 and done.verdict.evidence == ()
    assert connections[0] == connections[1]


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    features = np.random.default_rng(0).normal(size=(60, 3))
    np.savez(tmp_path / "records.npz", X=features, y=(features[:, 0] > 0).astype(int))
    path = tmp_path / "small.yaml"
    document = {
        "rounds": 4,
        "learners": ["a", "b"],
        "algorithm": {"name": "ldp-dol", "sigma": 1.0},
        "data": {"source": str(tmp_path / "records.npz")},
        "durability": "process",
    }
    path.write_text(json.dumps(document), encoding="utf-8")
    return path


@pytest.mark.slow
def test_runs_are_made_audited_and_audited_again(spec: Path, tmp_path: Path) -> None:
    """Epsilon is so large that 5 runs cannot refute it, whatever they show."""
    out = tmp_path / "out"
    made = CliRunner().invoke(
        app, ["audit", str(spec), "--on", "wiretap", "--runs", "5", "--seed", "3", "--out", str(out)]
    )
    assert made.exit_code == 0, made.output
    assert "channels encrypted and tapped" in " ".join(made.output.split()) and "INCONCLUSIVE" in made.output
    told = json.loads((out / "audit.json").read_text(encoding="utf-8"))
    captures = list_captures(open_folder(out / "captures"))
    assert len(captures) == 10 and sum(told["runs_of_each_world"]) == 10
    assert told["spec"]["capture"] == "none"  # as it was asked for; the captures say how it was run
    assert {capture.metadata["spec"]["capture"] for capture in captures} == {"wiretap"}
    counts = [capture.ciphertext for capture in captures]
    assert told["ciphertext"]["records"] == sum(each.records for each in counts if each) > 0
    assert told["ciphertext"]["connections"] == sum(each.connections for each in counts if each) >= 10
    assert "a first record on the bound" in told["worlds"] and told["epsilon"]["promised"] > 1.0
    assert not (out / "identities").exists()

    more = ["audit", "--captures", str(out), "--seed", "3", "--out", str(tmp_path / "again")]
    assert CliRunner().invoke(app, more).exit_code == 0
    again = json.loads((tmp_path / "again" / "audit.json").read_text(encoding="utf-8"))
    for key in ("verdict", "black_box", "ciphertext", "worlds", "captures_sha256", "epsilon"):
        assert again[key] == told[key]
    refused_elsewhere(out, tmp_path)


def refused_elsewhere(out: Path, tmp_path: Path) -> None:
    """Whoever needs messages says in one line that there are none; one world alone cannot be told from another."""
    with pytest.raises(CaptureError, match="is by wiretap: it has sizes and times of ciphertext, and no message"):
        audit_captures(*load_captured_runs(str(out), AuditRequest(), prepare, ignore_progress), ignore_progress)
    with pytest.raises(CaptureError, match="is by wiretap"):
        write_capture_gallery(out / "captures", tmp_path, 0, ())
    (one, *_) = list_captures(open_folder(out / "captures"))
    question, source = WatchRequest(0.001, once=True), open_source(one.name, None, None)
    with pytest.raises(CaptureError, match="is by wiretap"):
        watch(source, question, prepare)
    shutil.copytree(one.name, tmp_path / "alone" / "cap")
    facts = json.loads((tmp_path / "alone" / "cap" / "capture.json").read_text(encoding="utf-8"))
    (tmp_path / "alone" / "cap" / "capture.json").write_text(json.dumps({**facts, "world": None}), encoding="utf-8")
    with pytest.raises(
        SpecError, match="by wiretap must be of two worlds to be audited, got one: sottovoce audit --on wir"
    ):
        CliRunner().invoke(
            app, ["audit", "--captures", str(tmp_path / "alone")], catch_exceptions=False, standalone_mode=False
        )


def test_a_record_that_was_asked_for_is_swapped_and_else_a_loud_one(spec: Path) -> None:
    prepared = prepare(load_spec(spec))
    asked = AuditRequest(runs=30)
    loud = network.plan_ciphertext_audit(prepared, asked)
    assert [pair.worlds.description for pair in loud.pairs] == [
        "a first record on the bound, against one without features"
    ]
    own = network.plan_ciphertext_audit(prepared, replace(asked, record=20, replacement="label"))
    assert len(own.pairs) == 1 and own.worlds.description != loud.worlds.description


# ---- views -----------------------------------------------------------------------------------------------------------

EDGE = "0 to 1"


def record(size: int, direction: Any = "out", at: float = 0.0, stream: int = 0) -> CapturedFrame:
    return CapturedFrame("ciphertext", EDGE, direction, stream, at, size)


def usual() -> list[CapturedFrame]:
    """A connection: a greeting, 40 rounds each way, an end."""
    said = [record(104, direction, 0.01 * t) for t in range(1, 41) for direction in ("out", "back")]
    ends = [CapturedFrame("closed", EDGE, direction, 0, 1.0, 0) for direction in ("out", "back")]
    return [CapturedFrame("opened", EDGE, "out", 0, 0.0, 0), *said, *ends]


def a_connection_more(run: list[CapturedFrame]) -> list[CapturedFrame]:
    more = [CapturedFrame(kind, EDGE, "out", 1, 0.5, 0) for kind in ("opened", "closed")]
    return run + more


def a_ping(run: list[CapturedFrame]) -> list[CapturedFrame]:
    return [*run[:60], record(39, at=run[60].seconds), *run[60:]]


def a_longer_record(run: list[CapturedFrame]) -> list[CapturedFrame]:
    return [*run[:75], replace(run[75], size=105), *run[76:]]


def two_in_one(run: list[CapturedFrame]) -> list[CapturedFrame]:
    """The same bytes, and as many records, in other bursts: one side waits until the other has said two."""
    return [*run[:41], run[42], run[41], *run[43:]]


def the_other_side_ends(run: list[CapturedFrame]) -> list[CapturedFrame]:
    return [*run[:-2], run[-1], run[-2]]


def on_another_connection(run: list[CapturedFrame]) -> list[CapturedFrame]:
    return [each if k < 50 else replace(each, stream=1) for k, each in enumerate(run)]


@pytest.mark.parametrize(
    ("leak", "seen"),
    [
        (a_connection_more, {"connections", "counts", "order", "sizes"}),
        (a_ping, {"connections", "counts", "records of each size", "sizes in order", "bursts", "sizes", "order"}),
        (a_longer_record, {"connections", "counts", "records of each size", "sizes in order", "bursts"}),
        (two_in_one, {"bursts"}),
        (the_other_side_ends, {"connections"}),
        (on_another_connection, {"connections", "counts", "bursts", "order"}),
    ],
)
def test_every_leak_of_ciphertext_has_a_view_that_shows_it(
    leak: Callable[[list[CapturedFrame]], list[CapturedFrame]], seen: set[str]
) -> None:
    """In some view a column is the same in all runs of one world, and another one in all of the other."""
    runs = [RunTraffic(w, "", float(k), tuple(leak(usual()) if w else usual())) for k, w in enumerate([0, 1] * 6)]
    found = {name for name, table in build_views(runs).items() if tells(table, runs)}
    assert found and found <= seen
    if leak is not a_longer_record and leak is not two_in_one:
        assert "connections" in found


def tells(table: np.ndarray[Any, Any], runs: Sequence[RunTraffic]) -> bool:
    worlds = np.array([run.world for run in runs])
    return any((column == column[0]).tolist() == (worlds == worlds[0]).tolist() for column in table.T)


def test_times_of_ciphertext_are_told() -> None:
    def late(run: list[CapturedFrame]) -> tuple[CapturedFrame, ...]:
        return tuple(replace(each, seconds=each.seconds * 1.5) for each in run)

    runs = [RunTraffic(w, "", float(k), late(usual()) if w else tuple(usual())) for k, w in enumerate([0, 1] * 6)]
    assert {name for name, table in build_timing_views(runs).items() if tells(table, runs)} >= {"paces"}
    assert not any(tells(table, runs) for table in build_views(runs).values())
    for table in build_timing_views([*runs, RunTraffic(0, "", 0.0, ())]).values():
        assert np.isfinite(table).all()


def noisy(world: int, number: int, generator: np.random.Generator, delay: float = 0.0) -> RunTraffic:
    """Rounds with jitter."""
    times = np.cumsum(generator.exponential(0.01, 41) + delay * world)
    heard = [CapturedFrame("opened", EDGE, "out", 0, 0.0, 0), *(record(104, "out", float(at)) for at in times)]
    return RunTraffic(world, str(number), float(number), tuple(heard))


def tossed(delay: float, runs: int = 200) -> list[RunTraffic]:
    generator = np.random.default_rng(2)
    coins = generator.integers(2, size=runs).tolist()
    return [noisy(world, k, generator, delay) for k, world in enumerate(coins)]


def test_of_one_machine_times_are_judged_and_of_two_they_are_shown() -> None:
    """Delays of five times the jitter; seeded."""
    judged = audit_traffic(tossed(0.05), claim=1.0, same_processes=True)
    assert judged.verdict.kind == "refuted" and judged.timing_bounds == ()
    shown = audit_traffic(tossed(0.05), claim=1.0)
    assert shown.verdict.kind == "inconclusive" and shown.findings.epsilon_lower_bound < 1.0 < max(
        bound.value for bound in shown.timing_bounds
    )


def test_what_tells_worlds_apart_by_less_than_is_claimed_is_a_sign() -> None:
    done = audit_traffic(tossed(0.05), claim=4.0, same_processes=True)
    assert done.verdict.kind == "inconclusive"
    assert any("distinguishes the worlds (epsilon is above" in each for each in done.verdict.evidence)
    quiet = audit_traffic(tossed(0.0), claim=4.0, same_processes=True)
    assert quiet.findings.anomalies == ()


def test_coins_that_are_none_make_it_void() -> None:
    done = audit_traffic(tossed(0.05), claim=1.0, same_processes=True, void_reason="nobody knows")
    assert done.verdict.kind == "inconclusive" and "void" in done.verdict.text
