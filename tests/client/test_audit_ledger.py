"""Which runs were started: commitments and what binds files, copies, early ends, and numbers that no capture can have."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sottovoce_client.auditing.audit_files import (
    RUN_LEDGER_FILE,
    RunLedgerWriter,
    read_run_ledger,
    read_worlds,
    toss_coins,
    write_worlds,
)
from sottovoce_client.auditing.audit_files import WORLDS_FILE as WORLDS
from sottovoce_client.auditing.captures import list_captures
from sottovoce_core.auditing.plan import AuditPlan
from sottovoce_core.errors import CaptureError
from sottovoce_eavesdropper.capture_checks import CaptureRow
from sottovoce_eavesdropper.storage import open_folder
from tests.client.test_audit_captures import ROUNDS, audited, keep, planned, spec_of, two_worlds

Rounds = Callable[[int, int], int]


def ledgered(
    folder: Path,
    plan: AuditPlan,
    outcome: Callable[[int, int], str] = lambda k, world: "finished",
    *,
    reveal: bool = True,
) -> Path:
    """An audit's folder with a ledger: worlds take turns; runs that do not finish have all rounds but one, or no capture."""
    folder.mkdir()
    worlds = np.arange(2 * plan.runs) % 2
    ledger = RunLedgerWriter(folder, worlds)
    write_worlds(folder, plan, ledger.commitment)
    ledger.bind()
    for k, world in enumerate(worlds.tolist()):
        ledger.record_start(k)
        if (how := outcome(k, world)) == "gone":
            continue
        keep(folder, plan, world, k, rounds=ROUNDS if how == "finished" else ROUNDS - 1)
        ledger.record_end(k, f"run-{k}", how)
    if reveal:
        ledger.reveal(list_captures(open_folder(folder)))
    return folder


# ---- commitments -----------------------------------------------------------------------------------------------------


def test_coins_are_the_machines_own() -> None:
    """No seed gives them. 200 coins are as uneven as 60:140 with probability below 1e-7, and two tosses equal below 1e-60."""
    first, second = toss_coins(200), toss_coins(200)
    assert (first != second).any() and 60 < first.sum() < 140


def test_coins_are_committed_to_before_the_first_run_and_revealed_after_the_last(tmp_path: Path) -> None:
    plan = planned(runs=4)
    folder = ledgered(tmp_path / "captures", plan)
    lines = [json.loads(line) for line in (folder / RUN_LEDGER_FILE).read_text().splitlines()]
    first, worlds, started, ended, *_ = lines
    assert len(first["commitments"]) == 8 == len(set(first["commitments"]))
    assert worlds == {"worlds": hashlib.sha256((folder / WORLDS).read_bytes()).hexdigest()}
    assert started == {"replica": 0, "started": True} and ended["outcome"] == "finished"
    revealed = [line for line in lines if "nonce" in line]
    assert lines[-8:] == revealed and [line["world"] for line in revealed] == [0, 1] * 4
    for line, promised in zip(revealed, first["commitments"], strict=True):
        assert hashlib.sha256(f"{line['world']} {line['nonce']}".encode()).hexdigest() == promised
    assert not any("world" in line or "nonce" in line for line in lines[:-8])
    entries = read_run_ledger(open_folder(folder), read_worlds(open_folder(folder)))
    assert entries is not None and [entry.world for entry in entries.values()] == [0, 1] * 4


def test_an_audit_with_a_ledger_is_the_audit_without_it(tmp_path: Path) -> None:
    plan = planned()
    with_it = audited(ledgered(tmp_path / "with", plan), plan)
    without = audited(two_worlds(tmp_path / "without", plan), plan)
    assert with_it.verdict == without.verdict and with_it.findings.tests == without.findings.tests
    assert with_it.source == "16 captures in with"


def _exchange(path: Path, *changes: tuple[str, str]) -> None:
    text = path.read_text()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new, 1)
    path.write_text(text)


def _relabelled(old: str, new: str) -> Callable[[Path], None]:
    """Something else in what the first capture says of itself."""
    return lambda folder: _exchange(folder / "run-0" / "capture.json", (old, new))


FORGED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "another ledger": (
        lambda f: _exchange(f / RUN_LEDGER_FILE, ('"commitments": ["', '"commitments": ["0')),
        "must be the ledger",
    ),
    "no ledger": (lambda f: (f / RUN_LEDGER_FILE).unlink(), "cannot read .*runs.jsonl"),
    "other worlds": (
        lambda f: _exchange(f / WORLDS, ('"what": "', '"what": "not ')),
        "must be of the worlds.json next to it",
    ),
    "worlds without their ledger": (lambda f: _exchange(f / WORLDS, ('"ledger"', '"leger"')), "must be the ledger"),
    "another coin": (
        lambda f: _exchange(f / RUN_LEDGER_FILE, ('"world": 0', '"world": 1')),
        "coin of run 0 must be the committed one",
    ),
    "another label": (_relabelled('"world": 0', '"world": 1'), "must be of world 0"),
    "another capture": (_relabelled('"n_features": 3', '"n_features": 3 '), "SHA-256"),
    "another run": (_relabelled('"run_id": "run-0"', '"run_id": "run-x"'), "run run-0"),
    "a run too many": (_relabelled('"replica": 0', '"replica": 99'), "must be of a run in the ledger"),
    "twice": (
        lambda f: (f / RUN_LEDGER_FILE).write_text((f / RUN_LEDGER_FILE).read_text() * 2),
        "must state which runs",
    ),
    "no line": (lambda f: (f / RUN_LEDGER_FILE).write_text("{\n"), "must be the ledger"),
}


@pytest.mark.parametrize("case", sorted(FORGED))
def test_no_single_file_can_be_exchanged(tmp_path: Path, case: str) -> None:
    plan = planned(runs=4)
    folder = ledgered(tmp_path / "captures", plan)
    forge, text = FORGED[case]
    forge(folder)
    with pytest.raises(CaptureError, match=text) as raised:
        audited(folder, plan)
    assert "\n" not in str(raised.value)


def test_one_capture_of_many_is_held_against_the_ledger_and_misses_none(tmp_path: Path) -> None:
    plan = planned(runs=4)
    folder = ledgered(tmp_path / "captures", plan)
    assert "1 capture in" in audited(folder / "run-0", plan).source
    assert not audited(folder / "run-0", plan).findings.has_both_worlds


# ---- outcomes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["failed", "gone"])
def test_runs_that_end_in_one_world_only_are_a_leak(tmp_path: Path, how: str) -> None:
    """16 of 32 runs of one world, none of the other. Fisher's test alone gives p = 1e-6."""
    plan = planned(runs=32)
    folder = ledgered(tmp_path / "captures", plan, lambda k, world: how if world and k % 4 == 1 else "finished")
    done = audited(folder, plan)
    assert done.verdict.kind == "refuted" and "outcomes of runs at learner-1" in done.verdict.text
    name = "missing" if how == "gone" else "failed"
    assert f"{name} in 0 of 32 and 16 of 32 runs" in done.verdict.text
    assert "16 " in done.source and done.run_losses is not None and len(done.run_losses.total) == 64


def test_runs_that_end_early_in_both_worlds_are_no_leak(tmp_path: Path) -> None:
    """4 and 4 of 16: p = 1. What else is tested has a false alarm in one of twenty other seeds."""
    plan = planned(runs=16)
    folder = ledgered(tmp_path / "captures", plan, lambda k, world: "failed" if k % 8 < 2 else "finished")
    assert audited(folder, plan).verdict.kind != "refuted"


def test_without_a_ledger_early_ends_are_told_by_the_captures(tmp_path: Path) -> None:
    plan = planned(runs=24)
    write_worlds(tmp_path, plan)
    for k in range(48):
        keep(tmp_path, plan, k % 2, k, rounds=ROUNDS - (k % 2))
    done = audited(tmp_path, plan)
    assert done.verdict.kind == "refuted" and "ended early in 0 of 24 and 24 of 24 runs" in done.verdict.text


def test_more_runs_of_one_world_void_the_audit(tmp_path: Path) -> None:
    plan = planned(runs=24)
    write_worlds(tmp_path, plan)
    for k in range(48):
        keep(tmp_path, plan, int(k < 6), k)
    done = audited(tmp_path, plan)
    assert done.verdict.kind == "inconclusive" and "42 runs of the first world and 6 of the second" in done.verdict.text


def test_a_ledger_of_runs_that_were_cut_off_is_read(tmp_path: Path) -> None:
    """The machine went down: no coin was revealed, and the labels of the captures stand."""
    plan = planned()
    folder = ledgered(tmp_path / "captures", plan, reveal=False)
    assert audited(folder, plan).verdict == audited(two_worlds(tmp_path / "other", plan), plan).verdict


def test_a_ledger_that_was_cut_off_in_a_line_is_read(tmp_path: Path) -> None:
    """The machine went down, or its disk was full, while a coin was revealed: that run's label stands."""
    plan = planned()
    folder = ledgered(tmp_path / "captures", plan)
    path = folder / RUN_LEDGER_FILE
    path.write_bytes(path.read_bytes()[:-20])
    entries = read_run_ledger(open_folder(folder), read_worlds(open_folder(folder)))
    assert entries is not None and [entry.world for entry in entries.values()] == [0, 1] * 7 + [0, None]
    assert audited(folder, plan).verdict == audited(two_worlds(tmp_path / "other", plan), plan).verdict


def test_runs_without_a_trace_are_named_and_void_the_audit(tmp_path: Path) -> None:
    """One may have been under way when all ended; of more, nobody knows in which world they were."""
    plan = planned()
    gone = (9, 13)
    folder = ledgered(tmp_path / "captures", plan, lambda k, _: "gone" if k in gone else "finished", reveal=False)
    done = audited(folder, plan)
    assert (
        done.verdict.kind == "inconclusive" and "2 started runs left neither a capture nor a coin" in done.verdict.text
    )
    assert done.source.endswith("2 started runs without a capture: 9, 13")
    alone = ledgered(tmp_path / "alone", plan, lambda k, _: "gone" if k == 15 else "finished", reveal=False)
    done = audited(alone, plan)
    assert done.source.endswith("1 started run without a capture: 15") and not done.findings.void_reason


def test_a_ledger_is_not_set_aside_by_worlds_above_it(tmp_path: Path) -> None:
    plan = planned(runs=4)
    folder = ledgered(tmp_path / "captures", plan)
    shutil.copy(folder / WORLDS, tmp_path / WORLDS)
    _exchange(folder / "run-0" / "capture.json", ('"world": 0', '"world": 1'))
    with pytest.raises(CaptureError, match="must be of world 0"):
        audited(folder, plan)


# ---- copies ----------------------------------------------------------------------------------------------------------


def test_copies_count_once_and_are_named(tmp_path: Path) -> None:
    plan = planned()
    folder = two_worlds(tmp_path / "captures", plan)
    alone = audited(folder, plan)
    for k in range(1, 16, 2):  # all of one world: else 8 runs of one and 16 of the other
        shutil.copytree(folder / f"run-{k}", folder / f"run-{k}-again")
    (folder / "loop").symlink_to(folder, target_is_directory=True)
    done = audited(folder, plan)
    assert done.findings == alone.findings and len(done.run_worlds) == 16
    assert "copies counted once: " in done.source and "run-1-again" in done.source


def test_one_id_is_one_capture(tmp_path: Path) -> None:
    plan = planned()
    folder = two_worlds(tmp_path, plan)
    _exchange(folder / "run-3" / "capture.json", ('"capture_id": "run-3"', '"capture_id": "run-5"'))
    with pytest.raises(CaptureError, match=r"run-3 and .*run-5 must be equal, as both are capture run-5, and differ"):
        audited(folder, plan)


def test_a_run_that_was_made_again_counts_once_and_is_an_outcome(tmp_path: Path) -> None:
    plan = planned(runs=16)
    folder = two_worlds(tmp_path, plan)
    for k in range(1, 32, 2):
        again = keep(tmp_path / "second", plan, 1, k + 100)
        again.rename(again.with_name(f"again-{k}"))
        _exchange(tmp_path / "second" / f"again-{k}" / "capture.json", (f'"replica": {k + 100}', f'"replica": {k}'))
    done = audited(folder, plan)
    assert len(done.run_worlds) == 32 and done.verdict.kind == "refuted"
    assert "repeated in 0 of 16 and 16 of 16 runs" in done.verdict.text


# ---- numbers that no capture can have --------------------------------------------------------------------------------


@pytest.mark.parametrize(("field", "value"), [("rounds", 2_000_000_000), ("rounds", 10_000_000), ("learners", 4_000)])
def test_what_a_stranger_says_is_held_against_what_is_there(tmp_path: Path, field: str, value: int) -> None:
    plan = planned()
    path = keep(tmp_path, plan, None, 0) / "capture.json"
    facts = json.loads(path.read_text())
    path.write_text(json.dumps({**facts, "spec": {**facts["spec"], field: value}}))
    with pytest.raises(
        CaptureError, match=f"must fit its messages, got {value:,} {field}, and no capture has more than 24 messages"
    ):
        audited(tmp_path, plan)


EDGES: dict[str, tuple[dict[str, Any], str]] = {
    "no neighbour": ({"callee": 2}, "learner-2 does not receive from learner-0 in round 0"),
    "no learner": ({"callee": 9}, "there are 3 learners"),
    "at neither end": ({"sender": 2}, "learner-2 cannot send on the edge of learner-0 and learner-1"),
    "to itself": ({"callee": 0}, "learner-0 cannot send on the edge of learner-0 and learner-0"),
}


@pytest.mark.parametrize("case", sorted(EDGES))
def test_a_message_on_an_impossible_edge_is_refused(tmp_path: Path, case: str) -> None:
    spec = spec_of(topology={"graph": "path", "weights": "metropolis"})
    plan = planned(spec)
    changed, text = EDGES[case]

    def forge(row: CaptureRow, world: int) -> CaptureRow:
        own = row.kind == "message" and (row.caller, row.callee, row.sender) == (0, 1, 0)
        return row._replace(**changed) if own else row

    keep(tmp_path, plan, None, 0, change=forge)
    with pytest.raises(CaptureError, match=text):
        audited(tmp_path, plan)
