"""`python -m tests.faults`: do faults to runs of real processes, and write down what held."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shlex
import shutil
import signal
import sys
import tempfile
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from tests.faults.catalogue import EVERY
from tests.faults.page import Row, page
from tests.faults.promises import promises
from tests.faults.soak import soak
from tests.faults.trial import Calm, Fault, tried

T = TypeVar("T")

OK, BROKEN, REFUSED = 0, 1, 2


@dataclass(frozen=True, slots=True)
class Tries:
    """What is tried.

    Attributes:
        faults: which.
        seeds: of the tries of each.
        seconds: that a run lasts by itself.
        jobs: runs at a time.
        folder: for their files; those of a trial that breaks a promise are kept.
    """

    faults: tuple[Fault, ...]
    seeds: range
    seconds: float
    jobs: int
    folder: Path


async def try_all(tries: Tries) -> list[Row]:
    """Every fault with every seed; a row for each fault."""
    calm, room = Calm(tries.folder, tries.seconds), asyncio.Semaphore(tries.jobs)

    async def one(fault: Fault, seed: int) -> list[str]:
        async with room:
            return await _one(tries, calm, fault, seed)

    rows = []
    found = await asyncio.gather(*(one(fault, seed) for fault in tries.faults for seed in tries.seeds))
    for k, fault in enumerate(tries.faults):
        own = found[k * len(tries.seeds) : (k + 1) * len(tries.seeds)]
        rows.append(Row(fault, len(own), sum(map(bool, own))))
    return rows


async def _one(tries: Tries, calm: Calm, fault: Fault, seed: int) -> list[str]:
    folder = tries.folder / f"{fault.name.replace(' ', '-')}-{seed}"
    try:
        trial = await tried(fault, seed, folder, tries.seconds, calm)
        broken, state, reason = promises(trial), trial.state, trial.reason
    except Exception as error:  # noqa: BLE001 - a trial that cannot be judged is one that broke, and the others go on
        broken, state, reason = [f"{type(error).__name__}: {error}"], "unknown", ""
    print(
        f"{fault.name}, {seed}: {'BROKEN' if broken else 'held'}; {state}{f': {reason}' if reason else ''}", flush=True
    )
    if not broken:
        shutil.rmtree(folder)
        return broken
    again = (
        f"python -m tests.faults --only {shlex.quote(fault.name)} --seed {seed} --tries 1 --seconds {tries.seconds:g}"
    )
    facts = {"fault": fault.name, "seed": seed, "broken": broken, "state": state, "reason": reason, "again": again}
    (folder / "trial.json").write_text(json.dumps(facts, indent=2), encoding="utf-8")
    for each in broken[:10]:
        print(f"  {each}")
    print(f"  kept in {folder}; again: {again}", flush=True)
    return broken


async def _unless_told(work: Coroutine[Any, Any, T]) -> T:
    """Until SIGTERM: then services are told to end, too."""
    task = asyncio.ensure_future(work)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await task


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser("python -m tests.faults", description=__doc__)
    parser.add_argument("--tries", type=int, default=4, help="of each fault")
    parser.add_argument("--seconds", type=float, default=4.0, help="that a run lasts by itself")
    parser.add_argument("--only", metavar="NAME", action="append", help="this fault; may be repeated")
    parser.add_argument("--seed", type=int, default=0, help="of the first try")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="runs at a time")
    parser.add_argument("--out", type=Path, help="page to write, such as docs/developers/faults.md")
    parser.add_argument(
        "--soak", type=float, metavar="MINUTES", help="one long run with many faults, in place of all that"
    )
    told = parser.parse_args()
    names = [fault.name for fault in EVERY]
    if unknown := set(told.only or ()) - set(names):
        print(f"no fault {', '.join(sorted(unknown))}: there are {', '.join(names)}", file=sys.stderr)
        return REFUSED
    folder = Path(tempfile.mkdtemp(prefix="faults-"))
    if told.soak is not None:
        held = asyncio.run(_unless_told(soak(folder, told.soak, told.seed)))
        if held:
            shutil.rmtree(folder)
        return OK if held else BROKEN
    chosen = tuple(fault for fault in EVERY if not told.only or fault.name in told.only)
    tries = Tries(chosen, range(told.seed, told.seed + told.tries), told.seconds, told.jobs, folder)
    rows = asyncio.run(_unless_told(try_all(tries)))
    if told.out is not None:
        seed = f" --seed {told.seed}" if told.seed else ""
        command = f"python -m tests.faults --tries {told.tries} --seconds {told.seconds:g}{seed} --out {told.out}"
        told.out.write_text(page(rows, command, told.seconds), encoding="utf-8")
    broken = sum(row.broken for row in rows)
    print(f"{sum(row.tries for row in rows)} trials, {broken} broken")
    if not broken:
        shutil.rmtree(folder)
    return BROKEN if broken else OK


if __name__ == "__main__":
    sys.exit(main())
