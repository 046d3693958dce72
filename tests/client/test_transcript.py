"""`sottovoce transcript`: what is in the tables, that a query gets nowhere else, and what is shown of hostile captures."""

from __future__ import annotations

import asyncio
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from rich.console import Console
from typer.testing import CliRunner

from sottovoce_client.cli import app
from sottovoce_client.transcripts import query as transcript
from sottovoce_client.transcripts.query import find_transcripts, format_cell, query
from sottovoce_client.transcripts.show import show
from sottovoce_core.algorithms.interface import Message
from sottovoce_core.errors import CaptureError, SpecError
from sottovoce_core.noise import SeededNoise
from sottovoce_core.runs.simulator import simulate_rounds
from sottovoce_core.runs.transcript import TranscriptWriter
from sottovoce_eavesdropper.capture_checks import CaptureRow
from tests.examples import made_up, small_run
from tests.services.capturing import captured, conversation, encode_round, frame, hello, row


def capture(folder: Path, rows: list[CaptureRow] | None = None, **more: Any) -> Path:
    asyncio.run(captured(folder, conversation(4) if rows is None else rows, **more))
    return folder


def asked(place: Path | str, sql: str) -> list[list[str]]:
    """The answer, as text, without the heads."""
    out = io.StringIO()
    query(str(place), sql, csv_file=out)
    return [line.split(",") for line in out.getvalue().splitlines()[1:]]


def shown(place: Path, width: int = 100, **more: Any) -> str:
    console = Console(file=io.StringIO(), width=width, markup=False, highlight=False)
    show(str(place), console=console, **more)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


# ---- tables ----------------------------------------------------------------------------------------------------------


def test_messages_are_the_records_and_said_is_what_they_mean(tmp_path: Path) -> None:
    capture(tmp_path, world=1, replica=3)
    assert asked(tmp_path, "SELECT count(*), sum(size), min(sender), max(caller) FROM messages") == [
        ["8", str(8 * len(frame(0, 0))), "0", "0"]
    ]
    rows = asked(
        tmp_path,
        "SELECT run, world, replica, round, sender, field, value[1], len(value) FROM broadcasts ORDER BY round, sender",
    )
    assert rows == [["run-1", "1", "3", str(t), str(i), "y", f"{t}.0", "3"] for t in range(4) for i in range(2)]


def test_a_message_that_many_heard_was_said_once(tmp_path: Path) -> None:
    rows = [row(frame(0, 0), 0, j) for j in (1, 2, 3)] + [row(frame(0, 0, 9.0), 0, 4), row(b"\xff", 0, 1)]
    capture(tmp_path, rows)
    assert asked(tmp_path, "SELECT value[1] FROM broadcasts ORDER BY ALL") == [["0.0"], ["9.0"]]
    assert asked(tmp_path, "SELECT count(*) FROM messages") == [["5"]]


def test_fields_of_all_shapes(tmp_path: Path) -> None:
    message = Message({"h": np.arange(4.0).reshape(2, 2), "none": np.empty(0), "w": np.array([0.5])})
    rows = [row(encode_round(t, 0, message)) for t in (7, 2**63)] + [row(frame(3, 0))]  # the last one has other fields
    capture(tmp_path / "known", rows, fields={"h": (2, 2), "none": (0,), "w": (1,)})
    question = "SELECT round, field, len(value) FROM broadcasts ORDER BY ALL"
    assert asked(tmp_path / "known", question) == [["7", "h", "4"], ["7", "none", "0"], ["7", "w", "1"]]
    capture(tmp_path / "unknown", rows, fields={})
    assert asked(tmp_path / "unknown", question) == []
    assert "3 messages cannot be decoded" in shown(tmp_path / "unknown")


def test_many_captures_and_simulations_are_one_table(tmp_path: Path) -> None:
    for k in range(2):
        capture(tmp_path / "runs" / f"a.{k}" / "captures" / "x", world=k)
    run = small_run(3)
    (tmp_path / "simulated").mkdir()
    with TranscriptWriter(tmp_path / "simulated" / "transcript.parquet", "sim") as writer:
        for step in simulate_rounds(run, made_up(run.spec), SeededNoise(0), 2):
            writer.write(step.t, "y", step.message["y"])
    counts = asked(tmp_path, "SELECT run, world, count(*) FROM broadcasts GROUP BY ALL ORDER BY ALL")
    assert counts == [["run-1", "0", "8"], ["run-1", "1", "8"], ["sim", "0", "18"]]
    assert asked(tmp_path / "simulated" / "transcript.parquet", "SELECT count(*) FROM broadcasts") == [["18"]]
    with pytest.raises(SpecError, match="there are only simulated transcripts"):
        asked(tmp_path / "simulated", "SELECT * FROM messages")
    assert "sim" in shown(tmp_path / "simulated")
    listed = shown(tmp_path / "runs")
    assert "2 captures" in listed and "closed" in listed


def test_what_was_said_again_is_marked(tmp_path: Path) -> None:
    spec = json.dumps(small_run(4, 2, topology={"graph": "path"}).spec.model_dump(mode="json"))
    rows = [*conversation(4), row(frame(3, 0), 0, 1, stream=2)]
    capture(tmp_path / "new", rows, spec=spec, n_features=3)
    assert asked(tmp_path, "SELECT count(*), count(*) FILTER (is_repeat) FROM messages") == [["9", "1"]]
    assert "9 messages (1 of them repeated), " in shown(tmp_path / "new")


def test_a_capture_anywhere(tmp_path: Path) -> None:
    url = f"memory://{tmp_path.name}"
    asyncio.run(captured(f"{url}/one", conversation(2)))
    assert asked(url, "SELECT count(*) FROM messages") == [["4"]]


def test_nothing_there_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match="must have captures or"):
        find_transcripts(str(tmp_path))
    (tmp_path / "transcript.parquet").write_text("no parquet")
    with pytest.raises(CaptureError, match=r"transcript\.parquet"):
        asked(tmp_path, "SELECT * FROM broadcasts")


# ---- a query gets nowhere else ---------------------------------------------------------------------------------------

OUTSIDE = [
    "SELECT * FROM read_csv('{secret}')",
    "SELECT * FROM '{secret}'",
    "SELECT * FROM read_text('{secret}')",
    "SELECT * FROM read_parquet('http://127.0.0.1:9/x')",
    "SELECT * FROM glob('{folder}/*')",
    "SELECT * FROM sniff_csv('{secret}')",
    "COPY (SELECT 1) TO '{folder}/out.csv'",
    "COPY broadcasts TO '{folder}/out.csv'",
    "ATTACH '{folder}/other.db'",
    "INSTALL httpfs",
    "LOAD httpfs",
    "SET enable_external_access = true",
    "PRAGMA database_list",
    "CREATE TABLE t AS SELECT 1",
    "INSERT INTO broadcasts SELECT * FROM broadcasts",
    "DROP TABLE broadcasts",
    "EXPORT DATABASE '{folder}/all'",
    "SELECT 1; SELECT 2",
    "SELECT 1; COPY broadcasts TO '{folder}/out.csv'",
    "SELEC broadcasts",
    "",
]


@pytest.mark.parametrize("sql", OUTSIDE)
def test_a_query_reads_these_tables_and_nothing_else(tmp_path: Path, sql: str) -> None:
    capture(tmp_path / "cap")
    secret = tmp_path / "secret.csv"
    secret.write_text("word\nsesame\n")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(SpecError) as refusal:
        asked(tmp_path / "cap", sql.format(secret=secret, folder=tmp_path))
    assert "\n" not in str(refusal.value)
    assert "sesame" not in str(refusal.value)
    assert sorted(tmp_path.rglob("*")) == before


def test_the_database_is_gone_afterwards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "t"))
    (tmp_path / "t").mkdir()
    capture(tmp_path / "cap")
    asked(tmp_path / "cap", "SELECT 1 FROM broadcasts")
    assert list((tmp_path / "t").iterdir()) == []


# ---- the command -----------------------------------------------------------------------------------------------------


def test_an_answer_is_a_table_a_csv_or_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    capture(tmp_path / "cap")
    place, runner = str(tmp_path / "cap"), CliRunner(env={"COLUMNS": "100"})
    sql = "SELECT sender, count(*) AS n FROM messages GROUP BY ALL ORDER BY ALL"
    assert "sender  n" in runner.invoke(app, ["transcript", "query", place, sql]).output
    assert runner.invoke(app, ["transcript", "query", place, sql, "--csv"]).output == "sender,n\n0,4\n1,4\n"
    out = tmp_path / "answer.parquet"
    assert runner.invoke(app, ["transcript", "query", place, sql, "--out", str(out)]).output == ""
    assert pq.read_table(out).to_pydict() == {"sender": [0, 1], "n": [4, 4]}
    upright = runner.invoke(app, ["transcript", "query", place, "SELECT * FROM messages"]).output
    assert "payload" in upright and max(map(len, upright.splitlines())) <= 100
    monkeypatch.setattr(transcript, "MAX_SHOWN_ROWS", 1)
    assert "The first 1 rows" in runner.invoke(app, ["transcript", "query", place, sql]).output


def test_an_answer_replaces_no_file_and_leaves_none_by_half(tmp_path: Path) -> None:
    capture(tmp_path / "cap")
    out = tmp_path / "answer.parquet"
    failing = "SELECT CAST(kind AS INTEGER) FROM messages"
    arguments = ["transcript", "query", str(tmp_path / "cap"), failing, "--out", str(out)]
    assert "the query failed" in str(CliRunner().invoke(app, arguments).exception)
    assert not out.exists()
    out.write_text("of an earlier command")
    arguments[3] = "SELECT sender FROM messages"
    result = CliRunner().invoke(app, arguments)
    assert isinstance(result.exception, SpecError) and "give another --out" in str(result.exception)
    assert out.read_text() == "of an earlier command"


def test_a_capture_is_shown(tmp_path: Path) -> None:
    rows = [each for each in conversation(6) if each.payload != frame(3, 1)]
    greetings = [row(hello(i), i, 1 - i, kind="hello") for i in range(2)]
    text = shown(capture(tmp_path, [*greetings, *rows, row(b"\xff", 1, 0)]), sender=1, max_messages=2)
    lines = [line.split() for line in text.splitlines()]
    ends = ["learner", "0", "learner", "1"]
    assert [*ends, "6", "252", "bytes", "42", "1", "0–5", "0"] in [line for line in lines if line[:4] == ends]
    back = ["learner", "1", "learner", "0"]
    assert next(line for line in lines if line[:4] == back)[-2:] == ["0–5", "1"]  # one round is missing
    assert "values of learner 1" in text
    assert "12 messages" in text and "; 2 hello" in text
    assert "1 message cannot be decoded" in text
    assert "█" in text


def test_ids_of_runs_are_whole_on_a_narrow_terminal(tmp_path: Path) -> None:
    run = "breast-cancer-ward-0123456789ab"
    capture(tmp_path / f"{run}-abcdef", run_id=run)
    capture(tmp_path / f"{run}-abcdeg", run_id=run)
    text = shown(tmp_path, width=80)
    assert f" {run}-abcdef " in text and " world " not in text and " run " not in text
    (tmp_path / f"{run}-abcdeg").rename(tmp_path / "b")
    (tmp_path / f"{run}-abcdef").rename(tmp_path / "a")
    text = shown(tmp_path, width=80)
    assert f" {run} " in text and " a " in text


def test_learners_are_shown_by_their_names(tmp_path: Path) -> None:
    spec = json.dumps(small_run(4, ["Krankenhaus Süd", "north"]).spec.model_dump(mode="json"))
    place = capture(tmp_path, [row(frame(0, 0), 0, 1), row(frame(0, 1), 1, 0)], spec=spec, n_features=3)
    text = " ".join(shown(place, sender="north").split())
    assert "values of north" in text
    assert "Krankenhaus Süd north 1" in text
    with pytest.raises(SpecError, match="--sender must be one of Krankenhaus Süd, north, or an index, got 'south'"):
        shown(place, sender="south")


def test_what_was_noticed_is_shown(tmp_path: Path) -> None:
    spec = json.dumps(small_run(4, 2, topology={"graph": "path"}).spec.model_dump(mode="json"))
    text = shown(capture(tmp_path, [row(frame(0, 1), 0, 1)], spec=spec, n_features=3))
    assert "The eavesdropper detected 1 protocol violation: learner-0 to learner-1" in " ".join(text.split())


def test_nothing_said_can_paint_the_terminal(tmp_path: Path) -> None:
    capture(tmp_path, close=False)
    path = tmp_path / "capture.json"
    facts = json.loads(path.read_text())
    evil = "\x1b[2J[red]x"
    noticed = [{"text": evil}]
    path.write_text(
        json.dumps(
            {
                **facts,
                "run_id": evil,
                "spec": {"algorithm": {"name": evil}},
                "detections": noticed,
                "detection_count": 1,
            }
        )
    )
    text = shown(tmp_path)
    assert "\x1b" not in text
    assert "[red]x" in text
    assert "cut short" in text
    assert "\x1b" not in format_cell(evil)


def test_a_capture_that_was_closed_and_has_gaps_says_so(tmp_path: Path) -> None:
    """The eavesdropper was away for a while: it is not said to have never closed it."""

    async def made() -> None:
        file = await captured(tmp_path / "one", conversation(2), close=False)
        file.gaps.resume_channel(0, 1, next_round=2, t=9)
        await file.close()

    asyncio.run(made())
    text = shown(tmp_path / "one")
    assert "incomplete: 1 gap in the recording" in " ".join(text.split()) and "cut short" not in text


def test_an_empty_capture_is_shown(tmp_path: Path) -> None:
    assert "0 messages" in shown(capture(tmp_path, []))
