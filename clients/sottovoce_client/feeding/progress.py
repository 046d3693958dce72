"""A feeder at work: counts of messages, the display and the log of them, signals and the exit code.

Counts and reasons are shown, and never the contents of a record.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import structlog
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from sottovoce_client import terminal
from sottovoce_client.wording import count, duration, number, plural
from sottovoce_core.errors import SottovoceError
from sottovoce_rpc.learner_status import LearnerStatus
from sottovoce_rpc.logs import configure_logs, failure, tell_no_texts
from sottovoce_rpc.tasks import beside

log = structlog.get_logger()
LIVE_S, LOG_S = 0.25, 10.0
MOST_REASONS = 8


@dataclass(slots=True)
class Tally:
    """Of one source, since this feeder began.

    Attributes:
        source: under which the learner counts its records.
        fed: records that the learner has in keeping.
        again: messages that came a second time, and were passed over.
        waiting: messages that were read and are neither fed nor refused yet.
        refused: messages that are no records of the run, by reason.
        written: how many of those were in the dead-letter file before.
    """

    source: str
    fed: int = 0
    again: int = 0
    waiting: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    written: int = 0


@dataclass(slots=True)
class Account:
    """Of all sources of a feeder.

    Attributes:
        tallies: one for each source.
        run_id: that is fed; empty: no learner has been reached yet.
        status: of the learner, when it was last asked; None: it does not answer.
        awaited: what must be there before anything is fed.
        kept: what becomes of refused messages, as "written to a file"; empty: they are dropped.
    """

    tallies: list[Tally] = field(default_factory=list)
    run_id: str = ""
    awaited: str = "the learner to be in a run"
    status: LearnerStatus | None = None
    kept: str = ""

    @property
    def fed(self) -> int:
        """Records that the learner has in keeping."""
        return sum(each.fed for each in self.tallies)

    @property
    def again(self) -> int:
        """Messages that came a second time."""
        return sum(each.again for each in self.tallies)

    @property
    def waiting(self) -> int:
        """Messages that were read, and are on their way."""
        return sum(each.waiting for each in self.tallies)

    @property
    def refused(self) -> Counter[str]:
        """By reason."""
        return sum((each.refused for each in self.tallies), Counter())

    @property
    def dropped(self) -> int:
        """Refused messages that are kept nowhere."""
        return 0 if self.kept else self.refused.total()


Work = Callable[[Account, asyncio.Event], Coroutine[Any, Any, None]]
"""Feeds, and counts in the account, until it is done or the event is set."""


class _Speed:
    """Records per second over the last looks."""

    def __init__(self) -> None:
        self._looks: deque[tuple[float, int]] = deque(maxlen=20)

    def look(self, fed: int) -> float:
        """How fast it is, when so many were fed by now."""
        self._looks.append((time.monotonic(), fed))
        (since, before), (now, done) = self._looks[0], self._looks[-1]
        return (done - before) / (now - since) if now > since else 0.0


@asynccontextmanager
async def _shown(account: Account, console: Console) -> AsyncIterator[None]:
    """Show it while the block lasts: a display on a terminal, else a line of the log every so often."""
    if not console.is_terminal:
        async with beside(_log(account)):
            yield
        return
    with Live(console=console, auto_refresh=False, transient=True) as live:
        async with beside(_display(account, live)):
            yield


async def _display(account: Account, live: Live) -> None:
    speed = _Speed()
    while True:
        live.update(picture(account, speed.look(account.fed)), refresh=True)
        await asyncio.sleep(LIVE_S)


async def _log(account: Account) -> None:
    speed = _Speed()
    speed.look(0)
    while True:
        await asyncio.sleep(LOG_S)
        facts = facts_of(account)
        tell = log.warning if account.dropped else log.info
        tell("feeding", records_per_second=round(speed.look(account.fed), 1), **facts)


def facts_of(account: Account) -> dict[str, object]:
    """For a log."""
    facts: dict[str, object] = {
        "run": account.run_id,
        "fed": account.fed,
        "waiting": account.waiting,
        "again": account.again,
        "refused": dict(account.refused.most_common(MOST_REASONS)),
        "dropped": account.dropped,
    }
    if (status := account.status) is not None:
        facts |= {"round": status.rounds_done, "epsilon": status.epsilon_spent, "epsilon_limit": status.limit}
        facts |= {"learner_waiting": status.records_waiting}
    return facts


def picture(account: Account, speed: float) -> RenderableType:
    """For a terminal: two lines, and one for each reason."""
    if not account.run_id:
        return Text(f"waiting for {account.awaited}", style="cyan")
    head = Text.assemble(
        (count(account.fed), "bold green"), " fed  ", f"{number(speed, 3)} records/s  {count(account.waiting)} waiting"
    )
    if account.again:
        head.append(f"  {count(account.again)} came again")
    return Group(head, _learner_line(account), *_reasons(account))


def _learner_line(account: Account) -> Text:
    status = account.status
    if status is None:
        return Text("the learner does not answer", style="yellow")
    limit = "" if status.limit is None else f" of {number(status.limit)}"
    line = f"{status.learner}: round {count(status.rounds_done)}  ε {number(status.epsilon_spent)}{limit}"
    return Text(f"{line}  {count(status.records_waiting)} wait for their round", style="dim")


def _reasons(account: Account) -> Iterator[Text]:
    """Why messages were refused, the commonest first, and what became of them."""
    refused: Counter[str] = account.refused
    if not refused:
        return
    if account.kept:
        yield Text(f"{plural(refused.total(), 'message')} refused, and {account.kept}:", style="yellow")
    else:
        yield Text(f"{plural(refused.total(), 'message')} refused and DROPPED:", style="bold red")
    for reason, times in refused.most_common(MOST_REASONS):
        yield Text(f"  {count(times)}  {reason}")
    if len(refused) > MOST_REASONS:
        yield Text(f"  … {plural(len(refused) - MOST_REASONS, 'other reason')}")


def _print_summary(account: Account, seconds: float, console: Console, *, failed: bool = False) -> None:
    """What feeding came to; where it failed, an error says why."""
    for line in _summary(account, seconds, failed=failed):
        console.print(line, soft_wrap=True)


def _summary(account: Account, seconds: float, *, failed: bool = False) -> Iterator[Text]:
    if not account.run_id:
        stop = "" if account.awaited.endswith("?") else "."
        told = f"Nothing was fed: told to end while it waited for {account.awaited}{stop}"
        yield Text("Nothing was fed." if failed else told)
        return
    speed = number(account.fed / seconds if seconds else 0.0, 3)
    fed, sources = plural(account.fed, "record"), plural(len(account.tallies), "source")
    yield Text(f"Fed {fed} of {sources} to run {account.run_id} in {duration(seconds)}, {speed} records/s.")
    if (status := account.status) is not None and status.records_waiting:
        waiting, verb = plural(status.records_waiting, "record"), "waits" if status.records_waiting == 1 else "wait"
        yield Text(
            f"At {status.learner} {waiting} still {verb} for a round: what waits when its run ends is learned by none."
        )
    if account.again:
        yield Text(f"{plural(account.again, 'message')} came a second time, and {_were(account.again)} passed over.")
    yield from _reasons(account)
    if account.dropped:
        yield Text("What was dropped is kept nowhere by this feeder: --dead-letters FILE keeps it.", style="bold red")
    elif written := sum(each.written for each in account.tallies):
        yield Text(f"{count(written)} of them had been written before.")
    if account.waiting:
        yield Text(
            f"{plural(account.waiting, 'message')} had been read and {_were(account.waiting)} not fed.", style="yellow"
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
    account, console, begun = Account(), terminal.console(), time.monotonic()
    stop, task, loop = asyncio.Event(), asyncio.current_task(), asyncio.get_running_loop()
    tell_no_texts(loop)

    def tell() -> None:
        if stop.is_set() and task is not None:
            task.cancel()
        stop.set()

    for each in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(each, tell)
    failed = True  # in a line that follows
    try:
        async with _shown(account, console):
            await work(account, stop)
        failed = False
    except asyncio.CancelledError:
        return 130
    finally:
        _print_summary(account, time.monotonic() - begun, console, failed=failed)
        if not failed:
            terminal.tell(lambda: facts_of(account))
        if not console.is_terminal and account.run_id:
            log.info("fed", **facts_of(account))
    return 1 if account.dropped else 0
