"""Conducting a feeder for a person: progress while it goes, a summary at the end, and signals in between."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

import structlog

from sottovoce.errors import SottovoceError
from sottovoce_client import terminal
from sottovoce_client.feeding.pump import Target, Terms, feed
from sottovoce_client.feeding.showing import facts_of, print_summary, shown
from sottovoce_client.feeding.source import Part
from sottovoce_client.feeding.tally import Account
from sottovoce_rpc.logs import configure_logs, failure, tell_no_texts

log = structlog.get_logger()

Work = Callable[[Account, asyncio.Event], Coroutine[Any, Any, None]]


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
        async with shown(account, console):
            await work(account, stop)
        failed = False
    except asyncio.CancelledError:
        return 130
    finally:
        print_summary(account, time.monotonic() - begun, console, failed=failed)
        if not failed:
            terminal.tell(lambda: facts_of(account))
        if not console.is_terminal and account.run_id:
            log.info("fed", **facts_of(account))
    return 1 if account.dropped else 0


def feeding(opened: AbstractAsyncContextManager[Sequence[Part]], target: Target, terms: Terms) -> Work:
    """The work of feeding parts.

    Args:
        opened: gives them, open.
        target, terms: as of `feed`.
    """

    async def work(account: Account, stop: asyncio.Event) -> None:
        account.awaited = "the broker"  # files are there
        async with opened as parts:
            await feed(parts, target, terms, account, stop)

    return work
