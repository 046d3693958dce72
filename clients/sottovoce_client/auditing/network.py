"""`sottovoce audit --on network`: real services, started once, run the spec again and again; a coin chooses each run's world."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from sottovoce.auditing.audit import Audit
from sottovoce.auditing.plan import AuditPlan
from sottovoce.errors import SottovoceError, SpecError
from sottovoce_client.auditing.audit import Auditor, Say
from sottovoce_client.auditing.captures import audit_of, find, require_heard, whole
from sottovoce_client.auditing.worlds import as_audited, write_worlds
from sottovoce_client.running.launch import ServiceDied, run_async, while_alive
from sottovoce_client.running.local import LocalServices
from sottovoce_client.running.operate import BY_OPERATOR, Interrupted, run_on
from sottovoce_client.wording import duration, plural
from sottovoce_eavesdropper.storage import open_folder

BAR = 24


class RunFailed(SottovoceError):
    """A run of an audit did not reach its end."""


def on_network(folder: Path, *, per_process: int = 1) -> Auditor:
    """The work of an audit on real services of this machine, every edge overheard by a relay.

    Captures and `worlds.json` stay in `captures` below the folder, so that the audit can be repeated from them. Journals and
    ledgers are of these runs alone, and nobody's budget is touched.

    Args:
        folder: for the results.
        per_process: learners in one process.

    Returns:
        What makes the runs and examines them. It raises `Interrupted` when it was told to stop, and says how to go on.
    """

    def work(plan: AuditPlan, *, say: Say) -> Audit:
        require_heard(plan.listener.threat)
        captures = _fresh(folder)
        write_worlds(captures, plan)
        _make(plan, folder, per_process, say)
        kept, _ = whole(find(open_folder(captures)), plan.run)
        source = f"{plural(len(kept), 'run')} of real services on this machine, overheard by relays"
        return audit_of(plan, kept, source, say)

    return work


def _fresh(folder: Path) -> Path:
    """The folder for captures: those of other runs must not be taken for ours."""
    captures = folder / "captures"
    if captures.exists() and any(captures.iterdir()):
        raise SpecError(f"{captures} must be empty or missing: --out is for a folder without captures of other runs")
    captures.mkdir(parents=True, exist_ok=True)
    return captures


def _make(audited: AuditPlan, folder: Path, per_process: int, say: Say) -> None:
    """All runs; whatever ends them early, says so and how to go on."""
    done = 0

    def count(runs: int) -> None:
        nonlocal done
        done = runs

    try:
        run_async(lambda stop: _all_runs(audited, folder, per_process, _telling(audited, say, count), stop))
    except (Interrupted, ServiceDied, RunFailed) as error:
        kind = Interrupted if isinstance(error, Interrupted) else RunFailed
        why = "told to stop" if kind is Interrupted else str(error)
        more = f"; what they said is kept: sottovoce audit --from {folder / 'captures'}" if done else ""
        raise kind(f"{done:,} of {2 * audited.runs:,} runs were made: {why}{more}") from None


async def _all_runs(
    audited: AuditPlan, folder: Path, per_process: int, tell: Callable[[int], None], stop: asyncio.Event
) -> None:
    spec = as_audited(audited.run.spec)
    data = [audited.worlds.data(audited.data, world) for world in (0, 1)]
    async with LocalServices(spec, folder, per_process=per_process) as services:
        for k, world in enumerate(coins(audited).tolist()):
            if stop.is_set():
                raise Interrupted(BY_OPERATOR)
            running = run_on(services.coordinator, spec, data[world], lambda *seen: None, stop, world=world, replica=k)
            outcome = await while_alive(services, running, stop)
            if outcome.state != "finished":
                raise (Interrupted if outcome.detail == BY_OPERATOR else RunFailed)(outcome.detail)
            _forget(folder / "journals", outcome.run_id)
            tell(k + 1)


def coins(audited: AuditPlan) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    """`(2 runs,)` the world of every run, by a fair coin each: what drifts on the machine is no hint of the world."""
    return np.random.default_rng(audited.seeds.audited).integers(0, 2, 2 * audited.runs)


def _forget(journals: Path, run_id: str) -> None:
    """Drop what a run that is over left for the next one: nobody's budget, and more to read for every run to come."""
    for path in journals.glob(f"{run_id}-*"):
        path.unlink(missing_ok=True)


def _telling(audited: AuditPlan, say: Say, count: Callable[[int], None]) -> Callable[[int], None]:
    """Tells how many runs are done, at what pace, and how long it will take."""
    began, runs = time.monotonic(), 2 * audited.runs
    say("starting services")

    def tell(done: int) -> None:
        nonlocal began
        count(done)
        now = time.monotonic()
        if done == 1:  # the services were still waking up
            began = now
        pace = (done - 1) / (now - began) if done > 1 else 0.0
        filled = BAR * done // runs
        left = f"{pace:.2g} runs/s, {duration(round((runs - done) / pace))} left" if pace else "the first one"
        say(f"{'━' * filled}{'─' * (BAR - filled)} run {done:,} of {runs:,}, {left}")

    return tell
