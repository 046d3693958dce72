"""Text of others is text, wherever it is shown: one test for each way out. Pages: `test_pages.py`."""

from __future__ import annotations

import ast
import csv
import io
import json
import math
import sys
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import structlog
from rich.console import Console
from rich.text import Text

import sottovoce_client
from sottovoce_client import atomic_files, cli, terminal
from sottovoce_client.doctor import Finding, print_findings
from sottovoce_client.runs import coordinator_commands, status
from sottovoce_client.runs.compare import format_markdown
from sottovoce_client.runs.monitoring import (
    RunHistory,
    make_capture_list_item,
    make_run_list_item,
    make_run_view,
    parse_observation,
)
from sottovoce_client.runs.summary import DetectionSummary
from sottovoce_client.runs.terminal_display import display_run, print_summary
from sottovoce_client.transcripts.query import query
from sottovoce_core.errors import SpecError
from sottovoce_core.results import Facts, Result, Results
from sottovoce_core.runs.curves import Curve, Curves
from sottovoce_core.table import Table
from sottovoce_core.text import escape_control
from sottovoce_rpc.error_status import convert_status_error
from sottovoce_rpc.learner_status import LearnerState, LearnerStatus
from sottovoce_rpc.logs import configure_logs
from sottovoce_wire.v1 import coordinator_pb2, eavesdropper_pb2, learner_pb2
from tests.client import consoles
from tests.client.summaries import learner, summary
from tests.client.test_transcript import capture

HOSTILE = "=x[red]\x1b[2J\x9b31m\x07\r\u202e:smile:\nall is well"
"""A formula, markup, commands to a terminal, a text turned round, an emoji, and a line of its own."""
SHOWN = r"=x[red]\x1b[2J\x9b31m\x07\r\u202e:smile:\nall is well"
COMMANDS = "\x1b\x9b\x07\r\u202e"


def clean(text: str) -> bool:
    """Nothing in it is a command, and no line is a stranger's."""
    return not set(COMMANDS) & set(text) and not any(
        line.strip().startswith("all is well") for line in text.splitlines()
    )


def screen(width: int = 400) -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return terminal.create_console(file=out, width=width), out


def test_what_is_plain_stays_as_it_is() -> None:
    assert escape_control(HOSTILE) == SHOWN
    assert (
        escape_control(SHOWN) == SHOWN and escape_control("Krankenhaus Süd – ε = ∞ 北") == "Krankenhaus Süd – ε = ∞ 北"
    )
    assert escape_control("\ud800") == r"\ud800"


# ---- logs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tty", [True, False])
def test_a_log_line_is_one_line_and_steers_no_terminal(monkeypatch: pytest.MonkeyPatch, tty: bool) -> None:
    out = io.StringIO()
    monkeypatch.setattr(out, "isatty", lambda: tty)
    monkeypatch.setattr(sys, "stderr", out)
    monkeypatch.setenv("NO_COLOR", "1")
    try:
        configure_logs()
        structlog.get_logger().warning("call refused", caller=HOSTILE, several=[HOSTILE], **{f"n{HOSTILE}": 1})
        structlog.get_logger().warning(HOSTILE)
    finally:
        structlog.reset_defaults()
    first, second = (_uncoloured(line) for line in out.getvalue().splitlines())
    assert clean(first) and clean(second)
    assert "[2J" in first and "[2J" in second
    if not tty:
        assert json.loads(first)["caller"] == HOSTILE == json.loads(second)["event"]


def _uncoloured(line: str) -> str:
    """Without what the renderer puts in itself: colours, which a stranger's commands are not among."""
    for colour in {*vars(structlog.dev._ColorfulStyles).values()}:
        line = line.replace(colour, "") if isinstance(colour, str) and colour.startswith("\x1b") else line
    return line


# ---- what comes over the wire ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "code", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNKNOWN]
)
def test_what_a_service_says_of_an_error_is_a_line(code: grpc.StatusCode) -> None:
    nothing = grpc.aio.Metadata()
    text = str(convert_status_error(grpc.aio.AioRpcError(code, nothing, nothing, HOSTILE), "the coordinator"))
    assert text.isprintable() and r"=x[red]\x1b[2J" in text


def test_what_a_learner_says_of_itself_is_a_line() -> None:
    said = learner_pb2.LearnerStatus(
        learner=HOSTILE, run_id=HOSTILE, detail=HOSTILE, state=learner_pb2.LEARNER_STATE_FAILED
    )
    told = LearnerStatus.from_wire(said)
    assert (told.learner, told.run_id, told.detail, told.state) == (SHOWN, SHOWN, SHOWN, LearnerState.FAILED)


def a_run() -> coordinator_pb2.Run:
    """Of a coordinator that says whatever it likes."""
    standing = coordinator_pb2.Participant(
        status=learner_pb2.LearnerStatus(learner=HOSTILE, detail=HOSTILE), address=HOSTILE
    )
    standing.disconnected_at.FromSeconds(1)
    return coordinator_pb2.Run(
        run_id=HOSTILE,
        detail=HOSTILE,
        capture_location=HOSTILE,
        capture_error=HOSTILE,
        learners=[standing],
        spec=json.dumps({"rounds": 3, "offline_intervals": [{"learner": HOSTILE, "first_round": 1}]}),
    )


COMMANDS_ON_RUNS: dict[str, Callable[[Console], Awaitable[None]]] = {
    "list": lambda console: coordinator_commands.list_runs("here:1", console),
    "show": lambda console: coordinator_commands.show_run("here:1", "r", console),
    "stop": lambda console: coordinator_commands.stop_run("here:1", "r", console),
    "resume": lambda console: coordinator_commands.resume_run("here:1", "r", console),
    "leave": lambda console: coordinator_commands.reconfigure_run("here:1", "r", HOSTILE, console, joins=False),
    "join": lambda console: coordinator_commands.reconfigure_run("here:1", "r", HOSTILE, console, joins=True),
    "rebind": lambda console: coordinator_commands.rebind("here:1", HOSTILE, console),
}


@pytest.mark.parametrize("command", COMMANDS_ON_RUNS)
async def test_what_is_told_of_runs_is_text(monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    async def asked(*_: Any) -> Any:
        return coordinator_pb2.ListRunsResponse(runs=[a_run()]) if command == "list" else a_run()

    monkeypatch.setattr(coordinator_commands, "call_service", asked)
    console, out = screen()
    await COMMANDS_ON_RUNS[command](console)
    assert SHOWN in out.getvalue() and clean(out.getvalue())


def test_a_look_at_a_run_is_text() -> None:
    history = RunHistory()
    history.add(parse_observation(a_run(), None, 0.0))
    plan = replace(consoles.plan(), name=HOSTILE, algorithm=HOSTILE, capture=HOSTILE)
    run = make_run_view(make_run_list_item(a_run()), plan, history)
    capture_of = make_capture_list_item(eavesdropper_pb2.CaptureInfo(location=HOSTILE, run_id=HOSTILE, error=HOSTILE))
    console, out = screen()
    seen = status.DeploymentStatus(
        0.0, run, (make_run_list_item(a_run()),), ((HOSTILE, run),), (capture_of,), (escape_control(HOSTILE),)
    )
    status.show(seen, console)
    assert SHOWN in out.getvalue() and clean(out.getvalue())


# ---- the terminal ----------------------------------------------------------------------------------------------------


def test_nothing_that_is_printed_is_markup_or_a_command() -> None:
    console, out = screen()
    table = terminal.create_table(HOSTILE)
    table.add_row(HOSTILE)
    table.add_row(Text(HOSTILE))
    for each in (HOSTILE, Text(HOSTILE), table):
        console.print(each)
    assert not set(COMMANDS) & set(out.getvalue())
    assert out.getvalue().count("=x[red]") == 5 and ":smile:" in out.getvalue()


def test_a_terminal_of_ours_has_colours_of_ours() -> None:
    out = io.StringIO()
    terminal.create_console(file=out, force_terminal=True, color_system="standard").print(
        Text("no", "red"), Text("\x1b[2J")
    )
    assert out.getvalue().startswith("\x1b[31m") and "\x1b[2J" not in out.getvalue()


def test_every_console_is_one_of_these() -> None:
    """Rich's own takes text for markup, and lets commands through."""
    (root,) = sottovoce_client.__path__
    for path in Path(root).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
                name = node.func.id if isinstance(node.func, ast.Name) else node.func.attr
                assert name != "Console" or path.name == "terminal.py", path


def test_a_summary_is_text() -> None:
    noticed = DetectionSummary(1, (HOSTILE,), HOSTILE)
    made = summary(
        3,
        20,
        offline_intervals=(HOSTILE,),
        detections=noticed,
        missing_traffic=(HOSTILE,),
        detail=HOSTILE,
        name=HOSTILE,
    )
    made = replace(made, learners=(learner(HOSTILE, 20), *made.learners[1:]))
    console, out = screen()
    print_summary(made, console, report=Path(HOSTILE))
    assert "=x[red]" in out.getvalue() and not set(COMMANDS) & set(out.getvalue())


def test_a_run_under_way_is_told_in_lines_of_ours() -> None:
    console, out = screen()
    with display_run(HOSTILE, 5, ["ann"], console=console):
        pass
    assert SHOWN in out.getvalue() and clean(out.getvalue())


def test_what_the_doctor_finds_is_text() -> None:
    console, out = screen()
    print_findings([Finding(HOSTILE, "error", HOSTILE)], console)
    assert out.getvalue().count("=x[red]") == 2 and not set(COMMANDS) & set(out.getvalue())


def test_an_error_is_said_in_text(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Several problems of a spec are several lines."""

    def fails(obj: bool) -> None:
        raise SpecError(f"{HOSTILE}\nand another one")

    monkeypatch.setattr(cli, "app", fails)
    with pytest.raises(SystemExit):
        cli.main()
    said = capsys.readouterr().err
    assert not set(COMMANDS) & set(said) and said.startswith(r"sottovoce: =x[red]\x1b[2J")
    assert said.endswith("\nand another one\n")


# ---- files and what is piped -----------------------------------------------------------------------------------------


def read(text: str) -> list[list[str]]:
    return list(csv.reader(io.StringIO(text)))


@pytest.mark.parametrize("formula", ["=1+1", "+1", "-1", "@x", HOSTILE])
def test_a_csv_has_no_formula_and_no_command(tmp_path: Path, formula: str) -> None:
    Table.from_rows(["name", "loss"], [[formula, -1.5], ["ann", 2.0]]).to_csv(tmp_path / "t.csv")
    rows = read((tmp_path / "t.csv").read_text(encoding="utf-8"))
    assert rows == [["name", "loss"], [f"'{escape_control(formula)}", "-1.5"], ["ann", "2.0"]]


def test_an_answer_in_csv_has_no_formula_and_no_command(tmp_path: Path) -> None:
    capture(tmp_path)
    out = io.StringIO()
    query(
        str(tmp_path),
        "SELECT DISTINCT chr(61) || '1+1' AS a, '-' || chr(27) || '[2J' AS b, -1.5 AS c FROM messages",
        csv_file=out,
    )
    assert read(out.getvalue()) == [["a", "b", "c"], ["'=1+1", r"'-\x1b[2J", "-1.5"]]


def test_a_table_of_markdown_has_its_own_lines_only() -> None:
    curves = {key: Curve(np.array([[0.9, 1.1]] * 3), None) for key in ("accuracy", "average_loss")}
    name = f"{HOSTILE}|x|"
    facts = Facts(name, {}, name, "wire", math.inf, 1.0, 2.0, 4, 10, (name,), name, 100.0)
    result = Result(facts, Curves(np.arange(1, 4), curves, np.arange(1.0, 4.0)))
    lines = format_markdown(Results((result,))).splitlines()
    assert [line.count(" | ") for line in lines] == [lines[0].count(" | ")] * 3
    assert not set(COMMANDS) & set(lines[2])


def test_a_file_of_json_says_the_text_and_no_command(tmp_path: Path) -> None:
    atomic_files.write_json(tmp_path / "d.json", {"detail": HOSTILE})
    raw = (tmp_path / "d.json").read_text(encoding="utf-8")
    assert json.loads(raw) == {"detail": HOSTILE}
    assert not set("\x1b\x07\r") & set(raw)
