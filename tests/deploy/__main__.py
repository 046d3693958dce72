"""`python -m tests.deploy`: images and the compose file on a Docker Engine of its own, and what held.

Leaves nothing behind, but for the engine's data where --cache keeps it for the next time.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType

from tests.deploy import faults
from tests.deploy.engine import NotHere, engine, require_engine, workplace
from tests.deploy.images import TARGETS, build, make_base, make_standins
from tests.deploy.promises import LIVE, ends, recorded, reproducible, sizes
from tests.deploy.stack import LEARNERS, Stack, brought_up

OK, BROKEN, NOT_HERE = 0, 1, 2


class Notes:
    """What was looked at, and what of it did not hold."""

    def __init__(self) -> None:
        self.broken: list[str] = []

    @contextlib.contextmanager
    def look(self, what: str) -> Iterator[None]:
        """One thing: it holds, or why not. Others are looked at all the same."""
        began = time.monotonic()
        try:
            yield
        except Exception as error:  # noqa: BLE001 - whatever it is, it did not hold, and the next is looked at
            self.broken.append(what)
            print(f"BROKEN  {what}: {type(error).__name__}: {str(error)[-3_000:]}", flush=True)
        else:
            print(f"held    {what} ({time.monotonic() - began:.0f} s)", flush=True)


def live(folder: Path, notes: Notes) -> None:
    """What is promised of the running demo."""
    with engine(folder, alone=True) as here, brought_up(here) as stack:
        print("\n".join(sizes(stack)), flush=True)
        print("not run here: " + ", ".join(["official base images", *stack.leave_out]), flush=True)
        with notes.look("all are healthy"):
            stack.wait_healthy("coordinator", *LEARNERS)
        for check in LIVE:
            with notes.look(_title(check)):
                check(stack)


def hurt(folder: Path, notes: Notes) -> None:
    """What is refused, and faults."""
    with engine(folder, alone=True) as here:
        faults.small_volume(here)
        with brought_up(here) as stack:
            stack.wait_healthy("coordinator", *LEARNERS)
            faults.wrong_identities(stack)
            for each in faults.REFUSED:
                with notes.look(f"refused: {each.what}"):
                    faults.refused(stack, each)
            for fault in faults.SURVIVED:
                with notes.look(f"the run goes on: {_title(fault)}"):
                    fault(stack)


def overheard(folder: Path, notes: Notes) -> None:
    """The other profiles."""
    with engine(folder, alone=True) as here:
        stack = Stack(here)
        try:
            for check in (recorded, faults.eavesdropper_killed, ends):
                with notes.look(_title(check)):
                    check(stack)
        finally:
            stack.down()


def again(folder: Path, notes: Notes) -> None:
    """A second build."""
    with engine(folder, alone=False) as here, notes.look("the files of a second build are the same to the byte"):
        differing = reproducible(Stack(here))
        assert not differing, differing[:20]


PARTS: dict[str, tuple[Callable[[Path, Notes], None], Sequence[str]]] = {
    "live": (live, ("learner", "coordinator", "tools")),
    "faults": (hurt, ("learner", "coordinator", "tools")),
    "recorded": (overheard, TARGETS),
    "reproducible": (again, ("learner",)),
}
"""Each with the images that it takes."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0: all held; 1: something did not; 2: no engine can be had here."""
    parser = argparse.ArgumentParser(prog="python -m tests.deploy", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="as --only live: no faults, no recording")
    parser.add_argument("--only", choices=PARTS, action="append", help="this part, and others that are named so")
    parser.add_argument("--cache", type=Path, help="keep the engine's data here for the next time")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, _as_interrupt)
    notes = Notes()
    parts = ["live"] if options.quick else options.only or list(PARTS)
    wanted = {target for part in parts for target in PARTS[part][1]}
    try:
        require_engine()
        with workplace(options.cache) as folder:
            began = time.monotonic()
            with engine(folder, alone=False) as here:
                make_base(here)
                build(here, [name for name in TARGETS if name in wanted])
                make_standins(here)
            print(f"built ({time.monotonic() - began:.0f} s)", flush=True)
            for part in parts:
                PARTS[part][0](folder, notes)
    except NotHere as error:
        print(f"not here: {error}")
        return NOT_HERE
    print(f"{len(notes.broken)} promises are broken: {', '.join(notes.broken)}" if notes.broken else "all held")
    return BROKEN if notes.broken else OK


def _title(check: Callable[..., object]) -> str:
    return (check.__doc__ or "").splitlines()[0].rstrip(".") if "killed" not in check.__name__ else check.__name__


def _as_interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
