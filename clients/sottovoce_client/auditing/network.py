"""`sottovoce audit --on network`: real services, started once, run the spec again and again; a coin chooses each run's world."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from sottovoce.arrays import IntArray
from sottovoce.auditing.audit import Audit
from sottovoce.auditing.plan import AuditPlan
from sottovoce.errors import SottovoceError, SpecError
from sottovoce_client.auditing.audit import Auditor, Say
from sottovoce_client.auditing.captures import audit_of, find, require_heard
from sottovoce_client.auditing.ledger import LedgerWriter, read_ledger, tossed
from sottovoce_client.auditing.started import Started, started
from sottovoce_client.auditing.worlds import Way, as_audited, coins_of, pairs_of, read_worlds, write_worlds
from sottovoce_client.running.launch import ServiceDied, run_async, while_alive
from sottovoce_client.running.local import LocalServices
from sottovoce_client.running.operate import BY_OPERATOR, TOLD, Interrupted, run_on
from sottovoce_client.wording import plural
from sottovoce_eavesdropper.storage import open_folder

_MOST_FAILED = 5
"""Runs that fail one after the other until no more are started."""


_Lives = Sequence[tuple[int, int]]
"""Of every run its pair of worlds, and the world."""


class RunFailed(SottovoceError):
    """A run of an audit did not reach its end."""


def on_network(folder: Path, *, per_process: int = 1, seeded: bool = False) -> Auditor:
    """The work of an audit on real services of this machine, every edge overheard by a relay.

    Captures, `worlds.json` and the ledger of the runs stay in `captures` below the folder, so that the audit can be repeated
    from them. The coins are committed to before the first run, and revealed after the last one. Journals and budgets are of
    these runs alone: nobody's budget is touched.

    Args:
        folder: for the results.
        per_process: learners in one process.
        seeded: the coins come from the plan's seed, for a test that must be repeated: whoever knows the seed knows them.
            Else from the operating system's entropy.

    Returns:
        What makes the runs and examines them. It raises `Interrupted` when it was told to stop, and says how to go on.
    """

    def work(plan: AuditPlan, *, say: Say) -> Audit:
        runs = made(plan, folder, "relay", per_process=per_process, seeded=seeded, say=say)
        source = f"{plural(len(runs.kept), 'run')} of real services on this machine, overheard by relays"
        return audit_of(plan, runs, "; ".join((source, *runs.notes)), say)

    return work


def made(
    plan: AuditPlan, folder: Path, capture: Way, *, per_process: int = 1, seeded: bool = False, say: Say
) -> Started:
    """Make all runs of an audit on real services of this machine.

    Args:
        plan: the audit.
        folder, per_process, seeded: as of `on_network`.
        capture: how edges are overheard; by wiretap, they are encrypted.
        say: told what is being done.

    Raises:
        SpecError: the listener hears what no channel carries, or the folder holds captures.
        Interrupted: told to stop.
        RunFailed: services do not work.
        CaptureError: as `started`.
    """
    require_heard(plan.listener.threat)
    captures = _fresh(folder)
    worlds, pairs = coins(plan) if seeded else tossed(2 * plan.all_runs), in_turn(plan)
    ledger = LedgerWriter(captures, worlds)
    write_worlds(captures, plan, ledger.commitment, pairs, capture=capture, seeded=seeded)
    ledger.bind()
    services = LocalServices(
        as_audited(plan.run.spec, capture), folder, per_process=per_process, tls=capture == "wiretap"
    )
    _make(plan, list(zip(pairs, worlds.tolist(), strict=True)), ledger, folder, services, say)
    place = open_folder(captures)
    told = read_worlds(place)
    runs = started(find(place), plan.run, read_ledger(place, told), pairs_of(told, place.name))
    return replace(runs, coins=coins_of(told)).within(open_folder(folder))


def _fresh(folder: Path) -> Path:
    """The folder for captures: those of other runs must not be taken for ours."""
    captures = folder / "captures"
    if captures.exists() and any(captures.iterdir()):
        raise SpecError(f"{captures} must be empty or missing: --out is for a folder without captures of other runs")
    captures.mkdir(mode=0o700, parents=True, exist_ok=True)
    return captures


def _make(plan: AuditPlan, lives: _Lives, ledger: LedgerWriter, folder: Path, local: LocalServices, say: Say) -> None:
    """All runs; whatever ends them early, says so and how to go on."""
    done = 0

    def count(runs: int) -> None:
        nonlocal done
        done = runs

    try:
        tell = _telling(plan, say, count)
        try:
            run_async(lambda stop: _all_runs(plan, lives, ledger, folder, local, tell, stop))
        finally:
            ledger.reveal(find(open_folder(folder / "captures")))
    except (Interrupted, ServiceDied, RunFailed, OSError) as error:  # the disk may be full
        kind = Interrupted if isinstance(error, Interrupted) else RunFailed
        why = "told to stop" if kind is Interrupted else str(error)
        more = f"; what they said is kept: sottovoce audit --captures {folder / 'captures'}" if done else ""
        raise kind(f"{done:,} of {2 * plan.all_runs:,} runs were made: {why}{more}") from None


async def _all_runs(
    plan: AuditPlan,
    lives: _Lives,
    ledger: LedgerWriter,
    folder: Path,
    local: LocalServices,
    tell: Callable[[int], None],
    stop: asyncio.Event,
) -> None:
    """A run that fails is one more outcome; only many in a row end the audit, for then nothing works any more."""
    done, failed = 0, 0
    data = [[pair.worlds.data(plan.data, world) for world in (0, 1)] for pair in plan.pairs]
    async with local as services:
        for k, (pair, world) in enumerate(lives):
            if stop.is_set():
                raise Interrupted(BY_OPERATOR)
            ledger.started(k)
            running = run_on(
                services.coordinator,
                services.spec,
                data[pair][world],
                lambda *seen: None,
                stop,
                world=world,
                replica=k,
                credentials=services.credentials,
            )
            outcome = await while_alive(services, running, stop)
            seeded = any(status.noise_is_not_private for status in outcome.statuses)
            ledger.ended(k, outcome.run_id, outcome.state, seeded=seeded)
            if outcome.detail in TOLD:
                raise Interrupted(BY_OPERATOR)
            if stop.is_set() and outcome.state == "failed":  # a service died
                raise RunFailed(outcome.detail)
            finished = outcome.state == "finished"
            done, failed = done + finished, 0 if finished else failed + 1
            if failed == _MOST_FAILED:
                raise RunFailed(outcome.detail)
            tell(done)


def coins(plan: AuditPlan) -> IntArray:
    """`(2 runs,)` the world of every run, by a fair coin each from the plan's seed."""
    return np.random.default_rng(plan.seeds.audited).integers(0, 2, 2 * plan.all_runs)


def in_turn(plan: AuditPlan) -> list[int]:
    """Of every run the pair of worlds: pairs take turns, each as often as it has runs, so that all meet the same machine."""
    places = [((k + 0.5) / each.runs, number) for number, each in enumerate(plan.pairs) for k in range(2 * each.runs)]
    return [number for _, number in sorted(places)]


def _telling(plan: AuditPlan, say: Say, count: Callable[[int], None]) -> Callable[[int], None]:
    """Tells how many runs are done, at what pace, and how long it will take."""
    began, runs = time.monotonic(), 2 * plan.all_runs
    say("starting services")

    def tell(done: int) -> None:
        nonlocal began
        count(done)
        now = time.monotonic()
        if done == 1:  # the services were still waking up
            began = now
        pace = (done - 1) / (now - began) if done > 1 else 0.0
        say(f"run {done:,} of {runs:,}, {f'{pace:.2g} runs/s' if pace else 'the first one'}")

    return tell
