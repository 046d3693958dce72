"""`sottovoce watch`, as people run it and as it follows a capture; and canaries of a real run."""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import urllib.request
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import structlog
import yaml
from rich.console import Console

from sottovoce_client.watching import watch as watching
from sottovoce_client.watching.canary_files import CommitmentError, _save, insert_canaries, load_canaries
from sottovoce_client.watching.capture_sources import CaptureSource, FolderSource, open_eavesdropper_source
from sottovoce_client.watching.display import Gauges, WatchDisplay, WatchStatus, _format_e_value
from sottovoce_client.watching.watch import WatchRequest, _CaptureWatch, open_source, watch
from sottovoce_core.auditing.online.watch import Alarm, Watch
from sottovoce_core.errors import CaptureError, SottovoceError, SpecError
from sottovoce_core.experiment import PreparedRun, prepare
from sottovoce_core.noise import Recorder, SeededNoise
from sottovoce_core.runs.simulator import simulate_rounds
from sottovoce_core.spec import load_spec
from sottovoce_eavesdropper.capture_reader import Capture, open_capture
from tests.examples import made_up, small_run

ROUNDS, BROKEN_ROUND = 30, 20
GUARD_S = 300.0  # against a hang; a busy machine may take its time


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real run with canaries, and recorded noise that is zero for one learner in one round."""
    folder = tmp_path_factory.mktemp("run")
    generator = np.random.default_rng(0)
    features = generator.normal(size=(400, 3))
    np.savez(folder / "records.npz", X=features, y=(features[:, 0] > 0).astype(int))
    document: dict[str, Any] = {
        "name": "watched",
        "rounds": ROUNDS,
        "learners": ["ann", "bob", "eve"],
        "algorithm": {"name": "pd-ogd", "noise": {"kind": "calibrated", "epsilon": 1.0}},
        "decision_set": {"kind": "l2_ball", "radius": 1.0},
        "topology": {"graph": "ring", "weights": "metropolis"},
        "data": {"source": str(folder / "records.npz"), "scale": "standard"},
        "capture": "relay",
        "durability": "process",
    }
    spec = folder / "spec.yaml"
    spec.write_text(yaml.safe_dump(document), encoding="utf-8")
    prepared, recorder = prepare(load_spec(spec)), Recorder(SeededNoise(1))
    list(simulate_rounds(prepared.run, prepared.data, recorder))
    noise = np.stack(recorder.noise_by_field["y"])
    noise[BROKEN_ROUND, 1] = 0.0
    np.savez(folder / "noise.npz", y=noise[:, :, 0])
    noise_file, out = str(folder / "noise.npz"), folder / "out"
    more = ["--per-process", "3", "--recorded-noise", noise_file, "--canaries", "20", "--out", str(out)]
    assert started("up", str(spec), *more).wait(GUARD_S) == 0
    return out


def started(*arguments: str) -> subprocess.Popen[str]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("SOTTOVOCE_")}
    return subprocess.Popen(
        [sys.executable, "-m", "sottovoce_client", *arguments],
        stdout=subprocess.DEVNULL if arguments[0] == "up" else subprocess.PIPE,
        stderr=subprocess.DEVNULL if arguments[0] == "up" else subprocess.PIPE,
        text=True,
        env={**environment, "COLUMNS": "100"},
    )


def capture_in(folder: Path) -> Path:
    (found,) = (folder / "captures").iterdir()
    return found


def watched(place: Path, **question: Any) -> tuple[int, str]:
    """Exit code, and what was printed."""
    return followed(open_source(str(place), None, None), **question)


def followed(source: AbstractAsyncContextManager[CaptureSource], **question: Any) -> tuple[int, str]:
    console = Console(file=io.StringIO(), width=100)
    code = watch(source, WatchRequest(**question), prepare, console=console)
    assert isinstance(console.file, io.StringIO)
    return code, console.file.getvalue()


# ---- the command -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_command_names_the_broken_learner_in_its_round(folder: Path) -> None:
    process = started("watch", str(folder), "--once", "--canary-file", str(folder / "canaries.json"))
    out, err = process.communicate(timeout=GUARD_S)
    line, *_ = [json.loads(line) for line in err.splitlines()]  # the detector may see it at once, too

    assert process.returncode == 1
    assert (line["level"], line["event"], line["learner"], line["round"]) == ("error", "alarm", "bob", BROKEN_ROUND)
    assert line["test"] == "repeats" and line["log_e_value"] > line["log_threshold"]
    assert f"ALARM: bob in round {BROKEN_ROUND}: the noise is not as claimed (repeats)" in out
    assert f"round {BROKEN_ROUND + 1}/{ROUNDS}" in out


def test_code_that_a_capture_names_is_imported_only_where_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "named_by_a_capture.py").write_text("Spec = None", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    capture: Any = SimpleNamespace(
        name="capture",
        require_messages=lambda: None,
        metadata={"spec": {"rounds": 3, "algorithm": {"name": "named_by_a_capture:Spec"}}},
    )
    source: Any = SimpleNamespace()
    with pytest.raises(SpecError, match="--allow-imports"):
        _CaptureWatch(source, WatchRequest(), prepare, None, asyncio.Event())._start(capture)
    assert "named_by_a_capture" not in sys.modules
    with pytest.raises(SpecError, match="must be a subclass"):
        _CaptureWatch(source, WatchRequest(allow_imports=True), prepare, None, asyncio.Event())._start(capture)
    assert sys.modules.pop("named_by_a_capture").Spec is None


def test_watching_on_after_an_alarm(folder: Path) -> None:
    with structlog.testing.capture_logs() as logs:
        code, out = watched(capture_in(folder), keep_going=True, canary_file=folder / "canaries.json")
    assert code == 1
    assert f"round {ROUNDS}/{ROUNDS}" in out
    assert [(entry["log_level"], entry["learner"]) for entry in logs if not entry["change"]] == [("error", "bob")]


def test_others_than_the_broken_one_are_fine(folder: Path) -> None:
    """But with probability 0.001. And only those that are asked for are shown."""
    code, out = watched(folder, learners=("ann", "eve"), once=True, canary_file=folder / "canaries.json")
    assert code == 0
    assert "ann" in out and "eve" in out and "bob" not in out
    assert "No alarm in 30 rounds. The probability of a false alarm was at most 0.1 %." in out


def test_what_cannot_be_watched_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="--learner must be one of ann, bob, eve, got mallory"):
        watched(folder, learners=("mallory",), once=True, canary_file=folder / "canaries.json")
    with pytest.raises(SpecError, match=r"must be in \(0, 1\), got 1"):
        watched(folder, alpha=1.0)
    with pytest.raises(CaptureError, match="there is none"):
        followed(open_source(str(tmp_path / "nowhere"), None, None, once=True), once=True)
    with pytest.raises(CaptureError, match="there is none"):  # a file: nobody makes a folder of it
        watched(folder / "canaries.json")
    with pytest.raises(CaptureError, match="--once needs a capture, and there is none"):
        watched(tmp_path, once=True)
    for arguments in ((None, None, None), ("folder", "host:1", "run"), (None, "host:1", None)):
        with pytest.raises(SpecError, match="--eavesdropper HOST:PORT and --run RUN_ID"):
            open_source(*arguments)
    with pytest.raises(SpecError, match=r"has canaries in its records .*: give --canary-file"):
        watched(capture_in(folder), once=True)


def test_noise_of_the_runs_before_is_kept_and_known_again(folder: Path, tmp_path: Path) -> None:
    """The same noise in another run is an alarm in its first rounds. A false one has probability below 0.001."""
    kept = tmp_path / "keys.npz"
    question = {"learners": ("ann", "eve"), "canary_file": folder / "canaries.json", "noise_history_file": kept}
    assert watched(folder, **question)[0] == 0
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    with pytest.raises(CaptureError, match=r"must be of earlier runs, and .* contains run watched-"):
        watched(folder, **question)
    with np.load(kept) as stored:
        table = stored["table"]
    np.savez(kept, runs=np.array(["another run"]), table=table)
    with structlog.testing.capture_logs() as logs:
        assert watched(folder, **question)[0] == 1
    assert {entry["test"] for entry in logs} == {"repeats"} and {entry["round"] for entry in logs} <= {0, 1, 2}
    assert table.shape[1] > 100


def test_keys_that_cannot_be_written_cost_no_alarm_and_no_end(folder: Path, tmp_path: Path, capsys: Any) -> None:
    question = {
        "learners": ("ann", "eve"),
        "canary_file": folder / "canaries.json",
        "noise_history_file": tmp_path / "gone" / "keys.npz",
    }
    code, said = watched(folder, **question)
    assert code == 3 and "no alarm" in said
    assert "keys.npz could not be made: " in capsys.readouterr().err


def test_files_that_have_no_keys_are_refused(folder: Path, tmp_path: Path) -> None:
    kept = tmp_path / "keys.npz"
    kept.write_bytes(b"nothing")
    with pytest.raises(CaptureError, match="cannot read the noise history"):
        watched(folder, canary_file=folder / "canaries.json", noise_history_file=kept)
    for table in (np.zeros((3, 4), dtype=np.int64), np.zeros((2, 4)), np.full((2, 1), -1)):
        np.savez(kept, runs=np.array(["a run"]), table=table)
        with pytest.raises(CaptureError, match="has no keys"):
            watched(folder, canary_file=folder / "canaries.json", noise_history_file=kept)


# ---- canaries --------------------------------------------------------------------------------------------------------


def test_coins_are_committed_to_secret_and_guessed(folder: Path) -> None:
    """A false alarm has probability below 0.001."""
    secret = folder / "canaries.json"
    committed = json.loads((folder / "commitment.json").read_text(encoding="utf-8"))
    code, out = watched(folder, canary_file=secret, once=True, learners=("ann", "eve"))

    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    assert (committed["canaries"], len(committed["sha256"])) == (20, 64)
    assert code == 0
    found = re.search(r"\ncanaries: 20 of 20 scored, (\d+) of (\d+) guesses right; ε at least [\d.]+, claimed 1\n", out)
    assert found is not None and int(found[1]) <= int(found[2])


def test_other_canaries_than_those_committed_to_are_refused(folder: Path, tmp_path: Path) -> None:
    kept = load_canaries(folder / "canaries.json")
    turned = replace(kept, coins=tuple(1 - coin for coin in kept.coins))
    digest = _save(turned, tmp_path)
    assert load_canaries(tmp_path / "canaries.json", digest) == turned
    assert _save(turned, tmp_path) != digest  # the nonce hides them from whoever tries all coins
    with pytest.raises(CommitmentError, match="to which the run committed"):
        load_canaries(tmp_path / "canaries.json", digest)
    with pytest.raises(CommitmentError):
        watched(folder, canary_file=tmp_path / "canaries.json", commitment=digest, once=True)


def test_canaries_of_another_run_are_refused(folder: Path) -> None:
    canaries = load_canaries(folder / "canaries.json")
    shorter = small_run(3)
    with pytest.raises(CaptureError, match="of another run"):
        insert_canaries(PreparedRun(shorter, made_up(shorter.spec)), canaries)


# ---- following -------------------------------------------------------------------------------------------------------


class Growing:
    """A capture of which another part is there whenever somebody looks."""

    wait_description = "a capture"

    def __init__(self, finished: Path, folder: Path, parts: int) -> None:
        import pyarrow as pa

        self._folder, self._facts = folder, json.loads((finished / "capture.json").read_text(encoding="utf-8"))
        table = pa.Table.from_batches(list(open_capture(finished).read_batches()))
        size = -(-len(table) // parts)
        self._left = [table.slice(k * size, size) for k in range(parts)]
        self.looks = 0

    async def fetch_latest(self) -> Capture | None:
        import pyarrow.parquet as parquet

        self.looks += 1
        if self.looks < 3:
            return None  # the run has yet to begin
        if self._left:
            parquet.write_table(self._left.pop(0), self._folder / f"part-{self.looks - 2:06d}.parquet")
        facts = {**self._facts, "complete": not self._left}
        (self._folder / "capture.json").write_text(json.dumps(facts), encoding="utf-8")
        return open_capture(self._folder)


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "POLL_INTERVAL_S", 0.001)


@pytest.mark.usefixtures("at_once")
def test_a_capture_is_followed_until_it_is_complete(folder: Path, tmp_path: Path) -> None:
    """The same e-values as from all of it at once."""
    finished = capture_in(folder)
    source, question = Growing(finished, tmp_path, 7), {"learners": ("eve",), "canary_file": folder / "canaries.json"}
    code, out = followed(nullcontext(source), **question)
    at_the_end = watched(finished, **question)[1]

    assert code == 0 and source.looks == 2 + 7
    assert out.startswith("waiting for a capture\n")
    assert out[out.index("watched  no alarm") :] == at_the_end[at_the_end.index("watched  no alarm") :]


@pytest.mark.usefixtures("at_once")
def test_a_folder_that_is_not_there_is_waited_for(tmp_path: Path) -> None:
    folder, found = tmp_path / "try", list[str]()

    async def looked(source: CaptureSource) -> None:
        found.append(source.wait_description)
        assert await source.fetch_latest() is None
        folder.mkdir(exist_ok=True)
        found.append(source.wait_description)
        assert await source.fetch_latest() is None

    asyncio.run(looked(FolderSource(str(folder), GUARD_S)))
    assert found == [str(folder), f"a capture in {folder}"]
    with pytest.raises(CaptureError, match="nowhere must be a folder of a capture or a run, and there is none"):
        followed(nullcontext(FolderSource(str(tmp_path / "nowhere"), 0.01)))


@pytest.mark.usefixtures("at_once")
def test_the_alarm_comes_while_the_run_goes_on(folder: Path, tmp_path: Path) -> None:
    source = Growing(capture_in(folder), tmp_path, 10)
    with structlog.testing.capture_logs() as logs:
        code, _ = followed(nullcontext(source), canary_file=folder / "canaries.json")
    assert code == 1 and source.looks < 2 + 10
    assert {entry["round"] for entry in logs} == {BROKEN_ROUND}


@pytest.mark.usefixtures("at_once")
def test_whoever_interrupts_gets_a_summary(folder: Path, tmp_path: Path) -> None:
    class Interrupting(Growing):
        async def fetch_latest(self) -> Capture | None:
            if self.looks == 5:
                os.kill(os.getpid(), signal.SIGINT)
            return await super().fetch_latest()

    source = Interrupting(capture_in(folder), tmp_path, 10)
    code, out = followed(nullcontext(source), learners=("ann",), canary_file=folder / "canaries.json")
    assert code == 130
    assert "watched  interrupted" in out
    assert "No alarm in" in out


def test_a_capture_that_ends_early_says_who_is_missing(folder: Path, tmp_path: Path) -> None:
    import pyarrow.compute as pc
    import pyarrow.parquet as parquet

    finished = capture_in(folder)
    shutil.copytree(finished, tmp_path / "cut")
    (part,) = (tmp_path / "cut").glob("part-*.parquet")
    table = parquet.read_table(part)
    rows = table.filter(pc.equal(table.column("sender"), 2)).num_rows
    of_eve = pc.and_(pc.equal(table.column("sender"), 2), pc.equal(table.column("kind"), "message"))
    kept = np.flatnonzero(~(np.asarray(of_eve) & (np.cumsum(np.asarray(of_eve)) > 20)))
    parquet.write_table(table.take(kept), part)
    code, out = watched(tmp_path / "cut", learners=("eve",), canary_file=folder / "canaries.json")
    assert rows > 20 and code == 0
    assert f"The capture ends before round 10 of {ROUNDS}: it has no messages of eve." in out


def test_the_newest_capture_of_a_folder_is_found(folder: Path) -> None:
    found = [asyncio.run(FolderSource(str(place)).fetch_latest()) for place in (folder, capture_in(folder))]
    assert found[0] is not None and found[1] is not None
    assert found[0].name == found[1].name
    with pytest.raises(SottovoceError, match="eavesdropper at 127"):
        asyncio.run(_first_of("127.0.0.1:1"))


async def _first_of(address: str) -> Capture | None:
    async with open_eavesdropper_source(address, "run") as source:
        return await source.fetch_latest()


# ---- what is shown ---------------------------------------------------------------------------------------------------


def a_sight(alarm: Alarm | None = None) -> WatchStatus:
    run = small_run(5)
    watch = Watch(run, made_up(run.spec).learners, 1e-3, (0, 1, 2))
    watch.learners[0].log_e_value, watch.learners[1].log_e_value = 5.0, 30.0
    return WatchStatus("a run", 5, ("ann", "bob", "eve"), 1e-3, watch, alarms=[alarm] if alarm else [])


@pytest.mark.parametrize(
    ("e", "text"), [(-50.0, "2e−22"), (0.0, "1"), (7.0, "1,100"), (29.93, "1e13"), (13.7, "9e5"), (np.inf, "∞")]
)
def test_e_values_as_people_read_them(e: float, text: str) -> None:
    assert _format_e_value(e) == text


def test_the_panel_fits_a_terminal_and_logs_go_beside_it() -> None:
    console = Console(file=io.StringIO(), width=80, height=24, force_terminal=True, color_system=None)
    with WatchDisplay(console, clock=lambda: 0.0) as shown:
        shown.update(a_sight())
        with shown.suspend():
            console.file.write("a log line\n")
        shown.update(a_sight())  # too soon
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue().count("together") == 3  # shown, stopped, started again
    lines = Console(file=io.StringIO(), width=80, record=True)
    lines.print(a_sight().render())
    text = lines.export_text().splitlines()
    assert max(map(len, text)) <= 80
    bars = {line.split()[0]: line.count("━") for line in text if line.split()[:1]}
    assert (bars["eve"], bars["bob"]) == (0, 12) and 0 < bars["ann"] < 12


def test_numbers_for_prometheus() -> None:
    with Gauges("127.0.0.1:0") as metrics:
        metrics.update(a_sight(Alarm(1, 3, "scale", 30.0, 9.0)))
        with urllib.request.urlopen(f"http://{metrics.address}/metrics", timeout=GUARD_S) as answer:
            lines = answer.read().decode().splitlines()
    assert 'sottovoce_watch_log_e_value{learner="bob",run="a run"} 30.0' in lines
    assert 'sottovoce_watch_alarms{learner="bob",run="a run"} 1.0' in lines
    assert 'sottovoce_watch_alarms{learner="ann",run="a run"} 0.0' in lines
    assert 'sottovoce_watch_round{learner="eve",run="a run"} 0.0' in lines
    with pytest.raises(SpecError, match="must be HOST:PORT with a port from 0 to 65535, got '9400'"):
        Gauges("9400")
