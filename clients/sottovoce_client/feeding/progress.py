"""Running feeder: counts of messages, their display and log, signals and the exit code.

Counts and reasons are shown, and never the contents of a record.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from typing import Any

import structlog
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from sottovoce_client import terminal
from sottovoce_client.formatting import format_count, format_duration, format_epsilon, format_number, pluralize
from sottovoce_core.errors import SottovoceError
from sottovoce_rpc.learner_status import LearnerStatus
from sottovoce_rpc.logs import configure_logs, describe_failure, hide_error_texts
from sottovoce_rpc.tasks import run_in_background

log = structlog.get_logger()
_REFRESH_INTERVAL_S, _LOG_INTERVAL_S = 0.25, 10.0
_MAX_REASONS = 8


@dataclass(slots=True)
class FeedCounters:
    """Counts of a feeder since its start.

    Attributes:
        sources: names under which the learner counts its records.
        records_fed: records that the learner has stored.
        duplicate_count: repeated messages, which were skipped.
        messages_waiting: messages that were read and are neither fed nor refused yet.
        refusals: messages that are not records of the run, by reason.
        already_written_count: refused messages that an earlier feeder had written to the dead-letter file.
        run_id: run id; empty: no learner has been reached yet.
        status: last status of the learner; None: it does not answer.
        awaited_condition: condition for the start.
        refusal_destination: what happens to refused messages, such as "written to a file"; empty: they are dropped.
    """

    sources: set[str] = field(default_factory=set)
    records_fed: int = 0
    duplicate_count: int = 0
    messages_waiting: int = 0
    refusals: Counter[str] = field(default_factory=Counter)
    already_written_count: int = 0
    run_id: str = ""
    awaited_condition: str = "the learner to be in a run"
    status: LearnerStatus | None = None
    refusal_destination: str = ""

    @property
    def dropped_count(self) -> int:
        """Number of refused messages that are not kept."""
        return 0 if self.refusal_destination else self.refusals.total()


FeedTask = Callable[[FeedCounters, asyncio.Event], Coroutine[Any, Any, None]]
"""Coroutine function that feeds and updates the counters, until it is done or the event is set."""


async def _show_progress(counters: FeedCounters, console: Console) -> None:
    """Show the counters until cancelled: a display on a terminal, else periodic log lines."""
    samples = deque([(time.monotonic(), counters.records_fed)], maxlen=20)

    def records_per_second() -> float:
        """Return the records per second over the last calls."""
        samples.append((time.monotonic(), counters.records_fed))
        (since, before), (now, done) = samples[0], samples[-1]
        return (done - before) / (now - since) if now > since else 0.0

    if not console.is_terminal:
        while True:
            await asyncio.sleep(_LOG_INTERVAL_S)
            write = log.warning if counters.dropped_count else log.info
            write("feeding", records_per_second=round(records_per_second(), 1), **_build_facts(counters))
    with Live(console=console, auto_refresh=False, transient=True) as live:
        while True:
            live.update(_render(counters, records_per_second()), refresh=True)
            await asyncio.sleep(_REFRESH_INTERVAL_S)


def _build_facts(counters: FeedCounters) -> dict[str, object]:
    """Return the fields of a log line or of `--json`."""
    facts: dict[str, object] = {
        "run": counters.run_id,
        "records_delivered": counters.records_fed,
        "pending": counters.messages_waiting,
        "duplicates": counters.duplicate_count,
        "refused": dict(counters.refusals.most_common(_MAX_REASONS)),
        "dropped": counters.dropped_count,
    }
    if (status := counters.status) is not None:
        facts |= {"round": status.rounds_done, "epsilon": status.epsilon_charged, "epsilon_limit": status.epsilon_limit}
        facts |= {"delta": status.delta, "records_waiting": status.records_waiting}
    return facts


def _render(counters: FeedCounters, records_per_second: float) -> RenderableType:
    """Render the display for a terminal: two lines, and one for each reason."""
    if not counters.run_id:
        return Text(f"waiting for {counters.awaited_condition}", style="cyan")
    head = Text.assemble(
        (format_count(counters.records_fed), "bold green"),
        " fed  ",
        f"{format_number(records_per_second, 3)} records/s  {format_count(counters.messages_waiting)} waiting",
    )
    if counters.duplicate_count:
        head.append(f"  {format_count(counters.duplicate_count)} came again")
    return Group(head, _render_learner(counters), *_render_reasons(counters))


def _render_learner(counters: FeedCounters) -> Text:
    status = counters.status
    if status is None:
        return Text("the learner does not answer", style="yellow")
    limit = "" if status.epsilon_limit is None else f" of {format_epsilon(status.epsilon_limit, status.delta)}"
    line = (
        f"{status.learner}: round {format_count(status.rounds_done)}  ε {format_number(status.epsilon_charged)}{limit}"
    )
    return Text(f"{line}  {format_count(status.records_waiting)} wait for their round", style="dim")


def _render_reasons(counters: FeedCounters) -> Iterator[Text]:
    """Yield the reasons of refusals, the most frequent first, and what happened to the messages."""
    refused = counters.refusals
    if not refused:
        return
    if counters.refusal_destination:
        yield Text(
            f"{pluralize(refused.total(), 'message')} refused, and {counters.refusal_destination}:", style="yellow"
        )
    else:
        yield Text(f"{pluralize(refused.total(), 'message')} refused and DROPPED:", style="bold red")
    for reason, times in refused.most_common(_MAX_REASONS):
        yield Text(f"  {format_count(times)}  {reason}")
    if len(refused) > _MAX_REASONS:
        yield Text(f"  … {pluralize(len(refused) - _MAX_REASONS, 'other reason')}")


def _render_summary(counters: FeedCounters, seconds: float, *, failed: bool = False) -> Iterator[Text]:
    """Yield the lines of the summary; after a failure, an error gives the reason."""
    if not counters.run_id:
        stop = "" if counters.awaited_condition.endswith("?") else "."
        text = f"Nothing was fed: stopped while waiting for {counters.awaited_condition}{stop}"
        yield Text("Nothing was fed." if failed else text)
        return
    records_per_second = format_number(counters.records_fed / seconds if seconds else 0.0, 3)
    fed, sources = pluralize(counters.records_fed, "record"), pluralize(len(counters.sources), "source")
    yield Text(
        f"Fed {fed} of {sources} to run {counters.run_id} in {format_duration(seconds)}, {records_per_second} records/s."
    )
    if (status := counters.status) is not None and status.records_waiting:
        waiting, verb = pluralize(status.records_waiting, "record"), "waits" if status.records_waiting == 1 else "wait"
        yield Text(
            f"At {status.learner} {waiting} still {verb} for a round: records that wait when its run ends are not learned."
        )
    if counters.duplicate_count:
        yield Text(
            f"{pluralize(counters.duplicate_count, 'message')} came again, and {_was_or_were(counters.duplicate_count)} skipped."
        )
    yield from _render_reasons(counters)
    if counters.dropped_count:
        yield Text("Dropped messages are not kept: use --dead-letters FILE to keep them.", style="bold red")
    elif counters.already_written_count:
        yield Text(f"{format_count(counters.already_written_count)} of them had been written earlier.")
    if counters.messages_waiting:
        yield Text(
            f"{pluralize(counters.messages_waiting, 'message')} had been read and not fed.",
            style="yellow",
        )


def _was_or_were(value: int) -> str:
    return "was" if value == 1 else "were"


def run_feeder(work: FeedTask, log_level: str = "info") -> int:
    """Feed, show progress and a summary; return the exit code.

    The first Ctrl-C or SIGTERM sets the task's event, the second one cancels it.

    Args:
        work: feeds and updates the counters, until it is done or the event is set.
        log_level: level of the log where there is no terminal.

    Returns:
        0: it ended, and all messages read were fed or written down. 1: some messages were dropped. 2: a bug. 130: it was
            forced.

    Raises:
        SottovoceError, OSError: reason of a failure.
    """
    configure_logs(log_level)
    try:
        return asyncio.run(_run_with_display(work))
    except (SottovoceError, OSError):
        raise
    except Exception as error:  # noqa: BLE001 - a traceback ends with the error's text, and that may quote a record
        log.critical("bug", **describe_failure(error))
        return 2


async def _run_with_display(work: FeedTask) -> int:
    counters, console, start_time = FeedCounters(), terminal.create_console(), time.monotonic()
    stop, task, loop = asyncio.Event(), asyncio.current_task(), asyncio.get_running_loop()
    hide_error_texts(loop)

    def handle_signal() -> None:
        if stop.is_set() and task is not None:
            task.cancel()
        stop.set()

    for each in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(each, handle_signal)
    failed = True  # in a line that follows
    try:
        async with run_in_background(_show_progress(counters, console)):
            await work(counters, stop)
        failed = False
    except asyncio.CancelledError:
        return 130
    finally:
        for line in _render_summary(counters, time.monotonic() - start_time, failed=failed):
            console.print(line, soft_wrap=True)
        if not failed:
            terminal.print_json_if_requested(lambda: _build_facts(counters))
        if not console.is_terminal and counters.run_id:
            log.info("fed", **_build_facts(counters))
    return 1 if counters.dropped_count else 0
