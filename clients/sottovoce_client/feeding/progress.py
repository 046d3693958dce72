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
from sottovoce_client.wording import count, duration, number, pluralize
from sottovoce_core.errors import SottovoceError
from sottovoce_rpc.learner_status import LearnerStatus
from sottovoce_rpc.logs import configure_logs, failure, hide_error_texts
from sottovoce_rpc.tasks import beside

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
    fed: int = 0
    again: int = 0
    waiting: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    written: int = 0
    run_id: str = ""
    awaited: str = "the learner to be in a run"
    status: LearnerStatus | None = None
    kept: str = ""

    @property
    def dropped(self) -> int:
        """Refused messages that are kept nowhere."""
        return 0 if self.kept else self.refused.total()


Work = Callable[[FeedCounters, asyncio.Event], Coroutine[Any, Any, None]]
"""Feeds, and counts in the account, until it is done or the event is set."""


async def _show(account: FeedCounters, console: Console) -> None:
    """Show it until it is cancelled: a display on a terminal, else a line of the log every so often."""
    looks = deque([(time.monotonic(), account.fed)], maxlen=20)

    def speed() -> float:
        """Records per second over the last looks."""
        looks.append((time.monotonic(), account.fed))
        (since, before), (now, done) = looks[0], looks[-1]
        return (done - before) / (now - since) if now > since else 0.0

    if not console.is_terminal:
        while True:
            await asyncio.sleep(_LOG_INTERVAL_S)
            say = log.warning if account.dropped else log.info
            say("feeding", records_per_second=round(speed(), 1), **_facts_of(account))
    with Live(console=console, auto_refresh=False, transient=True) as live:
        while True:
            live.update(_picture(account, speed()), refresh=True)
            await asyncio.sleep(_REFRESH_INTERVAL_S)


def _facts_of(account: FeedCounters) -> dict[str, object]:
    """For a log."""
    facts: dict[str, object] = {
        "run": account.run_id,
        "fed": account.fed,
        "waiting": account.waiting,
        "again": account.again,
        "refused": dict(account.refused.most_common(_MAX_REASONS)),
        "dropped": account.dropped,
    }
    if (status := account.status) is not None:
        facts |= {"round": status.rounds_done, "epsilon": status.epsilon_spent, "epsilon_limit": status.limit}
        facts |= {"learner_waiting": status.records_waiting}
    return facts


def _picture(account: FeedCounters, speed: float) -> RenderableType:
    """For a terminal: two lines, and one for each reason."""
    if not account.run_id:
        return Text(f"waiting for {account.awaited}", style="cyan")
    head = Text.assemble(
        (count(account.fed), "bold green"), " fed  ", f"{number(speed, 3)} records/s  {count(account.waiting)} waiting"
    )
    if account.again:
        head.append(f"  {count(account.again)} came again")
    return Group(head, _learner_line(account), *_reasons(account))


def _learner_line(account: FeedCounters) -> Text:
    status = account.status
    if status is None:
        return Text("the learner does not answer", style="yellow")
    limit = "" if status.limit is None else f" of {number(status.limit)}"
    line = f"{status.learner}: round {count(status.rounds_done)}  ε {number(status.epsilon_spent)}{limit}"
    return Text(f"{line}  {count(status.records_waiting)} wait for their round", style="dim")


def _reasons(account: FeedCounters) -> Iterator[Text]:
    """Why messages were refused, the commonest first, and what became of them."""
    refused = account.refused
    if not refused:
        return
    if account.kept:
        yield Text(f"{pluralize(refused.total(), 'message')} refused, and {account.kept}:", style="yellow")
    else:
        yield Text(f"{pluralize(refused.total(), 'message')} refused and DROPPED:", style="bold red")
    for reason, times in refused.most_common(_MAX_REASONS):
        yield Text(f"  {count(times)}  {reason}")
    if len(refused) > _MAX_REASONS:
        yield Text(f"  … {pluralize(len(refused) - _MAX_REASONS, 'other reason')}")


def _summary(account: FeedCounters, seconds: float, *, failed: bool = False) -> Iterator[Text]:
    """What feeding came to; where it failed, an error says why."""
    if not account.run_id:
        stop = "" if account.awaited.endswith("?") else "."
        told = f"Nothing was fed: told to end while it waited for {account.awaited}{stop}"
        yield Text("Nothing was fed." if failed else told)
        return
    speed = number(account.fed / seconds if seconds else 0.0, 3)
    fed, sources = pluralize(account.fed, "record"), pluralize(len(account.sources), "source")
    yield Text(f"Fed {fed} of {sources} to run {account.run_id} in {duration(seconds)}, {speed} records/s.")
    if (status := account.status) is not None and status.records_waiting:
        waiting, verb = pluralize(status.records_waiting, "record"), "waits" if status.records_waiting == 1 else "wait"
        yield Text(
            f"At {status.learner} {waiting} still {verb} for a round: what waits when its run ends is learned by none."
        )
    if account.again:
        yield Text(f"{pluralize(account.again, 'message')} came a second time, and {_were(account.again)} passed over.")
    yield from _reasons(account)
    if account.dropped:
        yield Text("What was dropped is kept nowhere by this feeder: --dead-letters FILE keeps it.", style="bold red")
    elif account.written:
        yield Text(f"{count(account.written)} of them had been written before.")
    if account.waiting:
        yield Text(
            f"{pluralize(account.waiting, 'message')} had been read and {_were(account.waiting)} not fed.", style="yellow"
        )


def _were(value: int) -> str:
    return "was" if value == 1 else "were"


def conduct(work: Work, log_level: str = "info") -> int:
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
        log.critical("bug", **failure(error))
        return 2


async def _conducted(work: Work) -> int:
    account, console, begun = FeedCounters(), terminal.console(), time.monotonic()
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
        async with beside(_show(account, console)):
            await work(account, stop)
        failed = False
    except asyncio.CancelledError:
        return 130
    finally:
        for line in _summary(account, time.monotonic() - begun, failed=failed):
            console.print(line, soft_wrap=True)
        if not failed:
            terminal.tell(lambda: _facts_of(account))
        if not console.is_terminal and account.run_id:
            log.info("fed", **_facts_of(account))
    return 1 if account.dropped else 0
