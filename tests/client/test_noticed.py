"""What the eavesdropper noticed reaches whoever looks at a run."""

from __future__ import annotations

import asyncio
import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from sottovoce_client.reports.run_report import build_run_page
from sottovoce_client.runs import run_command as conducting
from sottovoce_client.runs.evaluate import describe_missing_traffic, list_capture_gaps, read_detections
from sottovoce_client.runs.run_client import Outcome
from sottovoce_client.runs.summary import DetectionSummary, RunSummary
from sottovoce_client.runs.terminal_display import print_summary
from sottovoce_core.experiment import PreparedRun
from sottovoce_core.runs.run import build_run
from tests.client.summaries import capture, summary
from tests.examples import made_up, small_spec
from tests.services.capturing import captured, frame, row

LINE = "The eavesdropper detected 2 protocol violations: learner 0 to learner 1, round 3: <b>bytes</b> …"
TWO = DetectionSummary(
    2, ("learner 0 to learner 1, round 3: <b>bytes</b>", "learner 2 to learner 1, round 3: other bytes"), None
)


def printed(made: RunSummary) -> str:
    console = Console(file=io.StringIO(), width=300)
    print_summary(made, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_terminal_and_the_report_say_it_in_one_line() -> None:
    made = replace(summary(), detections=TWO)
    assert LINE in printed(made)
    page = build_run_page(made).to_html()
    assert LINE.replace("<", "&lt;").replace(">", "&gt;") in page
    assert "<li>learner 2 to learner 1, round 3: other bytes</li>" in page


def test_nothing_noticed_is_not_worth_a_line() -> None:
    for noticed in (None, DetectionSummary(0, (), None)):
        made = replace(summary(), detections=noticed)
        assert "detected" not in printed(made)
        assert "protocol violation" not in build_run_page(made).to_html()


@pytest.mark.parametrize(("noticed", "code"), [(None, 0), (DetectionSummary(0, (), None), 0), (TWO, 1)])
def test_a_run_in_which_something_was_noticed_exits_with_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, noticed: DetectionSummary | None, code: int
) -> None:
    """It has finished; what must never happen is no success."""
    spec = small_spec(4, 2)
    monkeypatch.setattr(conducting, "run_async", lambda start: outcome(None))
    monkeypatch.setattr(conducting, "summarise", lambda *_: replace(summary(), detections=noticed))
    prepared = PreparedRun(build_run(spec, 3), made_up(spec))
    assert conducting.run_and_report(prepared, tmp_path, lambda *_: asyncio.sleep(0)) == code  # type: ignore[arg-type]


def outcome(capture: str | None) -> Outcome:
    return Outcome("r", "finished", "", 1.0, (), (), capture, ())


def test_it_is_read_from_the_capture(tmp_path: Path) -> None:
    spec = json.dumps(small_spec(4, 2, topology={"graph": "path"}).model_dump(mode="json"))
    asyncio.run(captured(tmp_path / "c", [row(frame(0, 1), 0, 1)], spec=spec, n_features=3))
    found = read_detections(outcome(str(tmp_path / "c")))
    assert found is not None and found.count == 1 and "states the sender learner-1" in found.first[0]
    assert read_detections(outcome(None)) is None and list_capture_gaps(outcome(None)) == ()
    assert read_detections(outcome(str(tmp_path / "nowhere"))) is None


@pytest.mark.parametrize(
    ("gaps", "words"),
    [
        ([], ()),
        ([{"sender": 1, "from": 3, "to": 9}], ("learner 1, rounds 3 to 8",)),
        ([{"sender": 1, "from": 3, "to": None}, "none"], ("learner 1, rounds 3 to the end",)),
        ([{"sender": 1, "from": 3, "to": "nine"}], ()),
        ("none", ()),
    ],
)
def test_gaps_are_read_from_a_capture_that_anybody_may_have_written(
    tmp_path: Path, gaps: object, words: tuple[str, ...]
) -> None:
    asyncio.run(captured(tmp_path, [row(frame(0, 1), 0, 1)]))
    path = tmp_path / "capture.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "gaps": gaps}))
    assert list_capture_gaps(outcome(str(tmp_path))) == words
    lines = [f"The capture has 1 gap: {words[0]}"] if words else []
    assert list(describe_missing_traffic(outcome(str(tmp_path)))) == lines
    assert list(describe_missing_traffic(replace(outcome(str(tmp_path)), capture_error="No space left on device"))) == [
        "The capture is not complete: No space left on device",
        *lines,
    ]


def test_gaps_are_told_of_all_learners_as_far_as_there_is_room(tmp_path: Path) -> None:
    asyncio.run(captured(tmp_path, [row(frame(0, 1), 0, 1)]))
    path = tmp_path / "capture.json"
    gaps = [{"sender": i % 2, "from": i, "to": i + 1} for i in range(12)]
    path.write_text(json.dumps({**json.loads(path.read_text()), "gaps": gaps}))
    (line,) = describe_missing_traffic(outcome(str(tmp_path)))
    first = "The capture has 12 gaps: learner 0, rounds 0 to 0; learner 1, rounds 1 to 1; "
    assert line.startswith(first) and line.endswith("learner 1, rounds 9 to 9; and 2 more")


def test_a_capture_that_is_not_whole_is_said_on_the_terminal_and_on_the_page() -> None:
    """Rounds below the first one that was not overheard from everybody; a summary of fewer rounds is whole."""
    whole = "rounds 0 to 41 were recorded completely, and the losses are of these"
    made = replace(summary(rounds=50), capture=capture(42))
    assert whole in " ".join(printed(made).split())
    assert f"Of 50 rounds, {whole}." in build_run_page(made).to_html()
    for complete in (summary(rounds=50), replace(summary(rounds=50), capture=None)):
        assert "recorded completely" not in printed(complete)
        assert "Not all messages of this run were recorded" not in build_run_page(complete).to_html()


def test_what_a_capture_lacks_is_on_the_page() -> None:
    lines = (
        "The capture is not complete: <the disk> is full",
        "The capture has 2 gaps: learner 1, rounds 3 to 8; learner 0, rounds 12 to 13",
    )
    for made in (summary(), replace(summary(), capture=None)):
        text = build_run_page(replace(made, missing_traffic=lines)).to_html()
        assert "The capture is not complete: &lt;the disk&gt; is full." in text and f"{lines[1]}." in text
        assert "no eavesdropper took part" not in text
