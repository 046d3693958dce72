"""The terminal: plain lines without a terminal, a live display with one, and a summary that fits."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.cells import cell_len
from rich.console import Console

from sottovoce_client.reports.run_report import build_run_page
from sottovoce_client.runs.summary import ObservedPrivacyLoss, RunProgress, RunSummary
from sottovoce_client.runs.terminal_display import MAX_ROWS, display_run, print_summary
from tests.client.summaries import boundless, learner, looks, summary, summary_of, tapped, unasked, unheard, unstarted

NAMES = ("Aarhus", "Bergen", "[red]Cork")
ESCAPE = "\x1b"


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def piped(width: int = 80) -> Console:
    return Console(file=io.StringIO(), width=width, force_terminal=False)


def terminal(width: int = 80, height: int = 30) -> Console:
    return Console(file=io.StringIO(), width=width, height=height, force_terminal=True, color_system="standard")


def written(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def look(done: int, seconds: float = 0.0, learners: int = 3) -> RunProgress:
    known = tuple(0.9 + 0.01 * i for i in range(learners))
    return RunProgress(seconds, (done,) * learners, known, (0.01 * done,) * learners, (2 * done,) * learners)


def printed(made: RunSummary, width: int = 80, report: Path | None = None) -> str:
    console = piped(width)
    print_summary(made, console, report)
    return written(console)


# ---- while it runs ----------------------------------------------------------------------------------------------------


@pytest.fixture(params=[False, True], ids=["pipe", "plain on a terminal"])
def plain(request: pytest.FixtureRequest) -> tuple[Console, bool]:
    return (terminal() if request.param else piped()), request.param


def test_plain_lines(plain: tuple[Console, bool]) -> None:
    console, asked = plain
    with display_run("mushrooms", 500, NAMES, asked, console=console, clock=Clock()) as shown:
        shown.update(look(0), "running", captured_messages=0)
        shown.update(look(250, 0.5), "running", captured_messages=2_500)

    first, start, half = written(console).splitlines()
    assert first == "mushrooms: 3 learners, 500 rounds"
    assert start == "round 0/500  running  0 rounds/s  accuracy 90.0–92.0 %  epsilon <= 0  0 messages recorded"
    assert half == "round 250/500  running  500 rounds/s  accuracy 90.0–92.0 %  epsilon <= 2.5  2,500 messages recorded"


def test_the_run_is_named_once_when_it_begins(plain: tuple[Console, bool]) -> None:
    for console, asked in (plain, (terminal(), False)):
        with display_run("mushrooms", 500, NAMES, asked, console=console, clock=Clock()) as shown:
            for done in (0, 1, 250):
                shown.update(replace(look(done), run_id="mushrooms-0123456789ab"), "running", captured_messages=None)
        text = written(console)
        assert text.count("run mushrooms-0123456789ab") == 1
        assert text.index("run mushrooms-0123456789ab") < text.index("0/500")


def test_of_many_that_are_away_a_line_names_some() -> None:
    console = piped()
    with display_run("run", 500, NAMES, console=console, clock=Clock()) as shown:
        for count in (3, 30):
            away = tuple(f"learner-{i}" for i in range(count))
            shown.update(replace(look(0), offline_learners=away), "waiting", captured_messages=None)
    assert [line.split("  ")[1] for line in written(console).splitlines()[1:]] == [
        "waiting, learner-0, learner-1, learner-2 are disconnected",
        "waiting, 30 learners are disconnected (learner-0, learner-1, learner-2, ...)",
    ]


def test_where_nobody_listens_nothing_is_said_of_it() -> None:
    console = piped()
    with display_run("mushrooms", 500, NAMES, console=console, clock=Clock()) as shown:
        shown.update(look(0), "running", captured_messages=None)
    assert "overheard" not in written(console) and "round 0/500  running" in written(console)
    console = terminal()
    with display_run("mushrooms", 500, NAMES, console=console, clock=Clock()) as shown:
        shown.update(look(0), "running", captured_messages=None)
    assert "overheard" not in written(console) and "0/500" in written(console)


def test_plain_lines_hold_no_escape_codes_and_do_not_wrap(plain: tuple[Console, bool]) -> None:
    console, asked = plain
    with display_run("[bold]run[/bold] " + "x" * 100, 500, NAMES, asked, console=console) as shown:
        shown.update(look(250, 0.5), "running", captured_messages=2_500)

    assert ESCAPE not in written(console)
    assert len(written(console).splitlines()) == 2
    assert "[bold]run[/bold]" in written(console)


def test_a_line_every_tenth_of_the_rounds_however_fast() -> None:
    console = piped()
    with display_run("run", 500, NAMES, console=console, clock=Clock()) as shown:
        for done in range(501):
            shown.update(look(done), "running", captured_messages=0)

    rounds = [line.split()[1] for line in written(console).splitlines()[1:]]
    assert rounds == [f"{done}/500" for done in range(0, 501, 50)]


def test_a_line_every_two_seconds_however_slow() -> None:
    console, clock = piped(), Clock()
    with display_run("run", 500, NAMES, console=console, clock=clock) as shown:
        for tick in range(21):
            clock.now = tick / 4
            shown.update(look(1), "running", captured_messages=0)

    assert len(written(console).splitlines()) == 1 + 3  # at 0, 2 and 4 seconds


def test_a_speed_is_never_negative() -> None:
    """A learner that died goes on a round before what it had told."""
    console, clock = piped(), Clock()
    with display_run("run", 500, NAMES, console=console, clock=clock) as shown:
        for tick, done in enumerate((20, 19)):
            clock.now = 2.0 * tick
            shown.update(look(done, clock.now), "running", captured_messages=0)
    assert "round 19/500  running  0 rounds/s" in written(console)


def test_a_change_of_state_is_said_at_once() -> None:
    console = piped()
    with display_run("run", 500, NAMES, console=console, clock=Clock()) as shown:
        shown.update(look(1), "connecting", captured_messages=0)
        shown.update(look(1), "running", captured_messages=0)

    assert [line.split()[2] for line in written(console).splitlines()[1:]] == ["connecting", "running"]


NOTICED = ("Bergen sent a round that was not its turn when round 3 was due, as Aarhus reported", "and", "so", "on")


def test_misconduct_is_said_at_once_and_once() -> None:
    console = piped()
    with display_run("run", 500, NAMES, console=console, clock=Clock()) as shown:
        for known in (0, 1, 1, 3):
            shown.update(replace(look(1), violations=NOTICED[:known]), "running", captured_messages=0)

    lines = [line for line in written(console).splitlines() if line.startswith("violation: ")]
    assert lines == [f"violation: {line}" for line in NOTICED[:3]]


def test_the_live_display_has_room_for_misconduct() -> None:
    console = terminal(width=60, height=20)
    with display_run("run", 500, [f"ward-{i}" for i in range(40)], console=console, clock=Clock()) as shown:
        shown.update(replace(look(1, learners=40), violations=NOTICED), "running", captured_messages=0)
        text = written(console)
    assert "violation: Bergen sent a round that was not its turn" in text
    assert text.count("violation: ") == 3
    assert len(text.splitlines()) <= 20


def test_unknown_accuracy_is_left_out() -> None:
    console = piped()
    with display_run("run", 10, NAMES, console=console, clock=Clock()) as shown:
        shown.update(replace(look(1), accuracy=(None,) * 3), "running", captured_messages=1)

    assert "accuracy" not in written(console)
    assert "1 message recorded" in written(console)


def test_speed_forgets_a_slow_start() -> None:
    console, clock = piped(), Clock()
    with display_run("run", 10_000, NAMES, console=console, clock=clock) as shown:
        shown.update(look(0, 100.0), "running", captured_messages=0)
        for k in range(100):
            shown.update(look(10 * k, 100.0 + 0.1 * k), "running", captured_messages=0)
        clock.now = 60.0
        shown.update(look(1_000, 110.0), "running", captured_messages=0)

    assert "  100 rounds/s" in written(console).splitlines()[-1]


def test_live_display_on_a_terminal() -> None:
    console, clock = terminal(), Clock()
    with display_run("mushrooms", 500, NAMES, budgets=(4.5, None, 0.0), console=console, clock=clock) as shown:
        shown.update(look(0, 0.0), "running", captured_messages=0)
        clock.now = 1.0
        shown.update(look(250, 1.0), "running", captured_messages=2_500)

    text = written(console)
    assert ESCAPE in text
    for word in (
        "mushrooms",
        "round 250/500",
        "250 rounds/s",
        "1 s left",
        "Bergen",
        "91.0 %",
        "none",
        "2,500 messages",
    ):
        assert word in text
    assert "[red]Cork" in text


def test_live_display_is_drawn_a_few_times_a_second() -> None:
    console, clock = terminal(), Clock()
    with display_run("run", 10_000, NAMES, console=console, clock=clock) as shown:
        for done in range(1_000):
            clock.now = done / 1_000
            shown.update(look(done, clock.now), "running", captured_messages=0)

    assert written(console).count("messages recorded") <= 8 + 2  # once more as it ends


def test_live_display_fits_the_height_of_the_terminal() -> None:
    console = terminal(height=20)
    with display_run("run", 100, [f"learner-{i}" for i in range(50)], console=console, clock=Clock()) as shown:
        shown.update(looks(50, 100, 1.0)[30], "running", captured_messages=0)

    assert "… 39 more" in written(console)
    assert "learner-11" not in written(console)


# ---- at the end -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("large", [False, True])
def test_summary_fits(width: int, large: bool) -> None:
    made = summary()
    if large:
        named = replace(made.learners[0], name="hospital-of-the-holy-spirit", epsilon_paper=10_190.0)
        made = replace(made, learners=(named, *made.learners[1:]))

    lines = printed(made, width).splitlines()

    assert max(map(cell_len, lines)) <= width
    table = "\n".join(lines[1:10])
    assert "…" not in table.replace("hospital-o…", "").replace("hospital-of-the-holy-sp…", "")


@pytest.mark.parametrize(
    ("width", "left_out"),
    [
        (120, ""),
        (70, "loss found per record"),
        (50, "loss found per record, ε per record"),
    ],
)
def test_numbers_are_never_cut(width: int, left_out: str) -> None:
    """What finds no room is left out, and said."""
    swap = ObservedPrivacyLoss(0.003339, 0.003339, 0.9488, np.zeros(500))
    ward = replace(
        learner("a"), epsilon_record_use=0.9488, epsilon_record=12_345.0, record_use_loss=swap, record_loss=swap
    )
    text = printed(summary_of(replace(ward, name="learner-0"), replace(ward, name="learner-1")), width)
    row = next(line for line in text.splitlines() if "learner-1" in line)

    assert "0.00334 of 0.949" in row and row.split().count("0.9488") == 1 and "…" not in text
    assert ("12,340" in row) == ("ε per record" not in left_out)
    if left_out:
        assert f"a wider terminal shows {left_out}, too" in " ".join(text.split())
    else:
        assert "a wider terminal" not in text


def test_where_every_record_is_used_once_there_is_one_epsilon() -> None:
    swap = ObservedPrivacyLoss(0.003339, 0.003339, 0.9488, np.zeros(500))
    ward = replace(
        learner("a"), epsilon_record_use=0.9488, epsilon_record=0.9488, record_use_loss=swap, record_loss=swap
    )
    made = replace(summary_of(ward), central_accuracy=None)
    text = printed(made)
    assert "learner test accuracy ε per record privacy loss found" in " ".join(text.split())
    assert next(line for line in text.splitlines() if line.startswith(" a ")).split()[3:] == [
        "0.9488",
        "0.00334",
        "of",
        "0.949",
    ]
    assert "ε = 0.9488 per record, against" in text and "when one record of a is replaced." in " ".join(text.split())


def test_of_a_tapped_run_the_summary_says_what_was_recorded() -> None:
    text = " ".join(printed(tapped(summary())).split())
    assert "the wiretap recorded 1,204 records of ciphertext, 96 kB, in 3 connections." in text
    assert "capture captures/cap" in text
    assert "Only ciphertext was recorded" in text


def test_summary_says_everything() -> None:
    text = printed(summary(), 120, Path("runs/mushrooms/report.html"))

    for words in (
        "mushrooms finished: 500 of 500 rounds in 1.21 s, 412 rounds/s",
        "Consistent with a weak promise",
        "runs/mushrooms/capture",
        "two learners differ on at most 3.1 % of held-out records",
        "report    runs/mushrooms/report.html",
        "GAMMA0_LARGE  gam0 exceeds",
        "LAMBDA0_LARGE",
    ):
        assert words in text
    for sentence in (
        "the eavesdropper recorded 5,000 messages (1.43 MB, mode relay).",
        "ε = 7.312 per record use, 23.4 per record in all its uses, against an observer of every message.",
        "can become at most 99.9 % sure",
    ):
        assert sentence in " ".join(text.split())
    row = next(line for line in text.splitlines() if "Bergen  " in line)
    assert row.split()[:5] == ["Bergen", "93.5", "%", "6.912", "22.12"]
    assert "0.745 of 6.91" in row
    assert next(line for line in text.splitlines() if "centralised" in line).split() == [
        "centralised", "96.5", "%", "∞", "∞",
    ]  # fmt: skip


def test_summary_without_a_terminal_has_no_escape_codes() -> None:
    assert ESCAPE not in printed(summary())


@pytest.mark.parametrize("make", [unheard, unasked, boundless, unstarted])
def test_summary_of_what_is_missing(make: Callable[[RunSummary], RunSummary]) -> None:
    text = printed(make(summary()))

    assert "None" not in text and "nan" not in text and "inf" not in text.split()


def test_a_failure_gives_its_reason() -> None:
    text = printed(replace(summary(), state="failed", detail="[Bergen] could not be reached"))

    assert "mushrooms failed" in text
    assert "[Bergen] could not be reached" in text


def test_names_are_not_markup() -> None:
    assert "[bold]x" in printed(summary_of(learner("[bold]x")))


def test_many_learners_do_not_push_the_rest_off_the_screen() -> None:
    text = printed(summary(50))

    assert f"… {50 - MAX_ROWS} more" in text
    assert len(text.splitlines()) < 40


def test_where_no_accuracy_is_known_it_is_said_what_opts_in() -> None:
    unknown = summary_of(replace(learner("a"), test_accuracy=None), replace(learner("b"), test_accuracy=None))

    assert "telemetry: {predict: true}" in " ".join(printed(unknown).split())
    assert "(capture: relay or mirror)" in " ".join(printed(unknown).split())
    assert "telemetry: {predict: true}" in build_run_page(unknown).to_html()
    assert "telemetry: {predict: true}" not in printed(
        summary_of(replace(learner("a"), test_accuracy=None), learner("b"))
    )


def test_where_no_record_is_held_out_no_telemetry_is_advised() -> None:
    unknown = replace(summary_of(replace(learner("a"), test_accuracy=None)), test_records=0, central_accuracy=None)
    for text in (" ".join(printed(unknown).split()), build_run_page(unknown).to_html()):
        assert "not known: no record is held out to measure it" in text
        assert "telemetry: {predict: true}" not in text


def test_accuracies_that_were_measured_here_say_so_and_what_publishing_them_costs() -> None:
    made = replace(summary(), publication_cost="the model follows from messages: it costs nothing more")
    for text in (" ".join(printed(made).split()), build_run_page(made).to_html()):
        assert (
            "without queries to learners; to publish it: the model follows from messages: it costs nothing more" in text
        )
    assert "no learner was asked" not in printed(summary())


def test_a_refuted_claim_is_red() -> None:
    console = terminal()
    print_summary(summary_of(learner("a", record_use_loss=ObservedPrivacyLoss(9.0, 9.0, 3.0, np.zeros(500)))), console)

    assert re.search(r"\x1b\[1;31m *9 of 3", written(console))
    assert "Refuted" in written(console)


def test_infinite_claims_are_shown() -> None:
    made = replace(learner("a"), record_use_loss=ObservedPrivacyLoss(1.0, math.inf, math.inf, np.zeros(500)))

    assert "1 of ∞" in printed(summary_of(made))


def test_the_summary_says_who_misbehaved() -> None:
    text = " ".join(printed(summary(violations=NOTICED[:1]), width=160).split())
    assert f"violations {NOTICED[0]}" in text
    assert "violations" not in printed(summary())
