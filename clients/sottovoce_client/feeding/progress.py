"""A feeder at work: counts of messages, the display and the log of them, signals and the exit code.

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
from sottovoce_client.formatting import format_count, format_duration, format_number, pluralize
from sottovoce_core.errors import SottovoceError
from sottovoce_rpc.learner_status import LearnerStatus
from sottovoce_rpc.logs import configure_logs, describe_failure, hide_error_texts
from sottovoce_rpc.tasks import run_in_background

log = structlog.get_logger()
_REFRESH_INTERVAL_S, _LOG_INTERVAL_S = 0.25, 10.0
_MAX_REASONS = 8


@dataclass(slots=True)
class FeedCounters:
    """Counts of a feeder, since it began.

    Attributes:
        sources: names under which the learner counts its records.
        fed: records that the learner has in keeping.
        again: messages that came a second time, and were passed over.
        waiting: messages that were read and are neither fed nor refused yet.
        refused: messages that are no records of the run, by reason.
        written: how many of those were in the dead-letter file before.
        run_id: that is fed; empty: no learner has been reached yet.
        status: of the learner, when it was last asked; None: it does not answer.
        awaited: what must be there before anything is fed.
        kept: what becomes of refused messages, as "written to a file"; empty: they are dropped.
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
        """Refused messages that are kept nowhere."""
        return 0 if self.refusal_destination else self.refusals.total()


FeedTask = Callable[[FeedCounters, asyncio.Event], Coroutine[Any, Any, None]]
"""Feeds, and counts in the account, until it is done or the event is set."""


async def _show(account: FeedCounters, console: Console) -> None:
    """Show it until it is cancelled: a display on a terminal, else a line of the log every so often."""
    looks = deque([(time.monotonic(), account.records_fed)], maxlen=20)

    def speed() -> float:
        """Records per second over the last looks."""
        looks.append((time.monotonic(), account.records_fed))
        (since, before), (now, done) = looks[0], looks[-1]
        return (done - before) / (now - since) if now > since else 0.0

    if not console.is_terminal:
        while True:
            await asyncio.sleep(_LOG_INTERVAL_S)
            say = log.warning if account.dropped_count else log.info
            say("feeding", records_per_second=round(speed(), 1), **_facts_of(account))
    with Live(console=console, auto_refresh=False, transient=True) as live:
        while True:
            live.update(_picture(account, speed()), refresh=True)
            await asyncio.sleep(_REFRESH_INTERVAL_S)


def _facts_of(account: FeedCounters) -> dict[str, object]:
    """For a log."""
    facts: dict[str, object] = {
        "run": account.run_id,
        "fed": account.records_fed,
        "waiting": account.messages_waiting,
        "again": account.duplicate_count,
        "refused": dict(account.refusals.most_common(_MAX_REASONS)),
        "dropped": account.dropped_count,
    }
    if (status := account.status) is not None:
        facts |= {"round": status.rounds_done, "epsilon": status.epsilon_spent, "epsilon_limit": status.epsilon_limit}
        facts |= {"learner_waiting": status.records_waiting}
    return facts


def _picture(account: FeedCounters, speed: float) -> RenderableType:
    """For a terminal: two lines, and one for each reason."""
    if not account.run_id:
        return Text(f"waiting for {account.awaited_condition}", style="cyan")
    head = Text.assemble(
        (format_count(account.records_fed), "bold green"),
        " fed  ",
        f"{format_number(speed, 3)} records/s  {format_count(account.messages_waiting)} waiting",
    )
    if account.duplicate_count:
        head.append(f"  {format_count(account.duplicate_count)} came again")
    return Group(head, _learner_line(account), *_reasons(account))


def _learner_line(account: FeedCounters) -> Text:
    status = account.status
    if status is None:
        return Text("the learner does not answer", style="yellow")
    limit = "" if status.epsilon_limit is None else f" of {format_number(status.epsilon_limit)}"
    line = f"{status.learner}: round {format_count(status.rounds_done)}  ε {format_number(status.epsilon_spent)}{limit}"
    return Text(f"{line}  {format_count(status.records_waiting)} wait for their round", style="dim")


def _reasons(account: FeedCounters) -> Iterator[Text]:
    """Why messages were refused, the commonest first, and what became of them."""
    refused = account.refusals
    if not refused:
        return
    if account.refusal_destination:
        yield Text(
            f"{pluralize(refused.total(), 'message')} refused, and {account.refusal_destination}:", style="yellow"
        )
    else:
        yield Text(f"{pluralize(refused.total(), 'message')} refused and DROPPED:", style="bold red")
    for reason, times in refused.most_common(_MAX_REASONS):
        yield Text(f"  {format_count(times)}  {reason}")
    if len(refused) > _MAX_REASONS:
        yield Text(f"  … {pluralize(len(refused) - _MAX_REASONS, 'other reason')}")


def _summary(account: FeedCounters, seconds: float, *, failed: bool = False) -> Iterator[Text]:
    """What feeding came to; where it failed, an error says why."""
    if not account.run_id:
        stop = "" if account.awaited_condition.endswith("?") else "."
        told = f"Nothing was fed: told to end while it waited for {account.awaited_condition}{stop}"
        yield Text("Nothing was fed." if failed else told)
        return
    speed = format_number(account.records_fed / seconds if seconds else 0.0, 3)
    fed, sources = pluralize(account.records_fed, "record"), pluralize(len(account.sources), "source")
    yield Text(f"Fed {fed} of {sources} to run {account.run_id} in {format_duration(seconds)}, {speed} records/s.")
    if (status := account.status) is not None and status.records_waiting:
        waiting, verb = pluralize(status.records_waiting, "record"), "waits" if status.records_waiting == 1 else "wait"
        yield Text(
            f"At {status.learner} {waiting} still {verb} for a round: what waits when its run ends is learned by none."
        )
    if account.duplicate_count:
        yield Text(
            f"{pluralize(account.duplicate_count, 'message')} came a second time, and {_were(account.duplicate_count)} passed over."
        )
    yield from _reasons(account)
    if account.dropped_count:
        yield Text("What was dropped is kept nowhere by this feeder: --dead-letters FILE keeps it.", style="bold red")
    elif account.already_written_count:
        yield Text(f"{format_count(account.already_written_count)} of them had been written before.")
    if account.messages_waiting:
        yield Text(
            f"{pluralize(account.messages_waiting, 'message')} had been read and {_were(account.messages_waiting)} not fed.",
            style="yellow",
        )


def _were(value: int) -> str:
    return "was" if value == 1 else "were"


def run_feeder(work: FeedTask, log_level: str = "info") -> int:
    """Feed, show, summarise; returns the exit code.

    The first Ctrl-C or SIGTERM sets the event that the work was given, the second one cancels it.

    Args:
        work: feeds, and counts in an account, until it is done or the event is set.
        log_level: of what is logged where there is no terminal.

    Returns:
        0: it ended, and all that was read was fed or written down. 1: some messages were dropped. 2: a bug. 130: it was forced.

    Raises:
        SottovoceError, OSError: what it failed of.
    """
    configure_logs(log_level)
    try:
        return asyncio.run(_conducted(work))
    except (SottovoceError, OSError):
        raise
    except Exception as error:  # noqa: BLE001 - a traceback ends with the error's text, and that may quote a record
        log.critical("bug", **describe_failure(error))
        return 2


async def _conducted(work: FeedTask) -> int:
    account, console, begun = FeedCounters(), terminal.create_console(), time.monotonic()
    stop, task, loop = asyncio.Event(), asyncio.current_task(), asyncio.get_running_loop()
    hide_error_texts(loop)

    def tell() -> None:
        if stop.is_set() and task is not None:
            task.cancel()
        stop.set()

    for each in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(each, tell)
    failed = True  # in a line that follows
    try:
        async with run_in_background(_show(account, console)):
            await work(account, stop)
        failed = False
    except asyncio.CancelledError:
        return 130
    finally:
        for line in _summary(account, time.monotonic() - begun, failed=failed):
            console.print(line, soft_wrap=True)
        if not failed:
            terminal.print_json_if_requested(lambda: _facts_of(account))
        if not console.is_terminal and account.run_id:
            log.info("fed", **_facts_of(account))
    return 1 if account.dropped_count else 0
