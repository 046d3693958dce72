#!/usr/bin/env python3
"""How fast other projects' learners exchange a vector of 117 numbers on one machine, beside the ring of ours.

Each has an environment of its own (pip, from PyPI; made once where `--folder` says), and runs the nearest thing to a ring of
five that its public API has, with nothing to learn: `peers/` has a script for each. Ours runs before each of them. Nothing is
asserted: one that cannot be installed or run has a row that says why.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
from machine import machine, median, write_json
from measure import Case, ring_of
from rich import box
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().with_name("peers")))
from progress import FILE, FORM, read

from sottovoce_core.errors import SottovoceError

SCRIPTS = Path(__file__).resolve().with_name("peers")
DIM = 117
ENDLESS = 100_000_000
"""Rounds that a peer is told to run: it is ended when it was measured."""
START_S, STALL_S = 240.0, 90.0
"""Seconds until a peer's first round, and between two of its rounds, after which it is given up."""
TORCH = "torch==2.13.0"

console = Console() if sys.stdout.isatty() else Console(width=240)


@dataclass(frozen=True, slots=True)
class Peer:
    """A peer, and how it is run.

    Attributes:
        name: as on the command line.
        package: whose version is shown.
        requires: what pip is asked for.
        script: in `peers/`, with its arguments.
        ran: the topology and processes, in words.
        messages: vectors that cross the network a round, by the topology.
    """

    name: str
    package: str
    requires: tuple[str, ...]
    script: tuple[str, ...]
    ran: str
    learners: int = 5
    messages: int = 10


NVFLARE = ("nvflare", ("nvflare==2.9.0", TORCH))
P2PFL = ("p2pfl", ("p2pfl[dp]==0.4.4", "pyarrow<18", "huggingface_hub<1"))
"""Its `datasets` 2.15 sets no upper bounds, and cannot be imported with today's versions of these."""
FLOWER = ("flwr", ("flwr==1.42.0",))
PEERS = (
    Peer(
        "decent-dp",
        "decent-dp",
        ("decent-dp==0.2.3", TORCH, "numpy"),
        ("decent_dp_ring.py",),
        "ring of 6 (odd ones are refused), one neighbour a round; a process each, gloo",
        learners=6,
        messages=6,
    ),
    Peer(
        "flower-grpc",
        *FLOWER,
        ("flower_grpc.py",),
        "star of 5, FedAvg; start_server and start_client, deprecated; a process each, gRPC",
    ),
    Peer(
        "nvflare-simulator",
        *NVFLARE,
        ("nvflare_ring.py",),
        "ring of 5, p2p application in the simulator; a process each",
    ),
    Peer(
        "nvflare",
        *NVFLARE,
        ("nvflare_ring.py", "--poc"),
        "ring of 5, p2p application in a proof of concept; two processes each and for the server, gRPC, mutual TLS",
    ),
    Peer(
        "p2pfl",
        *P2PFL,
        ("p2pfl_ring.py", "--period-s", "0.005"),
        "ring of 5, all are averaged; periods of 5 ms; a process each, gRPC",
    ),
    Peer(
        "p2pfl-examples",
        *P2PFL,
        ("p2pfl_ring.py",),
        "the same with the periods of its examples, up to 2 s",
    ),
    Peer(
        "flower",
        *FLOWER,
        ("flower_star.py",),
        "star of 5, FedAvg; SuperLink, SuperNodes, a process for each ClientApp's message, HTTP",
    ),
)
OURS = {
    "sottovoce": "ring of 5, unrecorded; a process each and the coordinator, gRPC",
    "sottovoce-tls": "the same, mutual TLS",
}


@dataclass(frozen=True, slots=True)
class Use:
    """What processes have used until a moment: processor seconds, with those of their children that have ended; memory now."""

    cpu_s: float
    memory_mb: float
    processes: int


@dataclass(frozen=True, slots=True)
class Sample:
    """A measured window.

    Attributes:
        rounds: in it.
        cpu_us: of all processes, a round.
        memory_mb: of all processes at its end; what several share counts once.
        startup_s: from the first process's start until the first round is done.
        ours: rounds/s of ours, just before.
    """

    rounds: int
    rounds_per_s: float
    cpu_us: float
    memory_mb: float
    processes: int
    startup_s: float
    ours: float | None = None


# ---- a peer ------------------------------------------------------------------------------------------------------------


def environment(peer: Peer, folder: Path) -> Path:
    """The Python of a peer's environment, which is made where it is not there yet.

    Raises:
        SottovoceError: it cannot be.
    """
    place = folder / peer.package
    python, complete = place / "bin" / "python", place / "complete"
    if not complete.exists():
        with console.status(f"installing {', '.join(peer.requires)}"):
            _call([sys.executable, "-m", "venv", "--clear", str(place)])
            _call([str(python), "-m", "pip", "install", "--quiet", *peer.requires])
        complete.touch()
    return python


def _call(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SottovoceError(f"{command[2]} failed: {_last(done.stderr)}")
    return done.stdout.strip()


def version_of(peer: Peer, python: Path) -> str:
    """As it is installed."""
    return _call([str(python), "-c", f"import importlib.metadata as m; print(m.version({peer.package!r}))"])


@contextlib.contextmanager
def running(peer: Peer, python: Path, folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], Path, Path]]:
    """Start a peer; afterwards all its processes are ended, which are those that have our variable."""
    progress, log = folder / "progress", folder / "log"
    progress.write_bytes(FORM.pack(0, 0.0))
    numbers = {"--learners": peer.learners, "--dim": DIM, "--rounds": ENDLESS}
    arguments = [str(SCRIPTS / peer.script[0]), *peer.script[1:], *(str(p) for pair in numbers.items() for p in pair)]
    threads = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    own = {FILE: str(progress), "PYTHONPATH": str(SCRIPTS), "HOME": str(folder), "TMPDIR": str(folder), **threads}
    with log.open("wb") as out:
        child = subprocess.Popen(
            [str(python), *arguments],
            cwd=folder,
            env=os.environ | own,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield child, progress, log
    finally:
        while left := marked(progress):
            for process in left:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            time.sleep(0.1)
        child.wait()


def marked(progress: Path) -> list[psutil.Process]:
    """Processes of a run."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(FILE) == str(progress) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def use(processes: Sequence[psutil.Process]) -> Use:
    """What they have used until now."""
    cpu, memory = 0.0, 0.0
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            cpu += times.user + times.system + times.children_user + times.children_system
            memory += process.memory_full_info().pss / 2**20
    return Use(cpu, memory, len(processes))


def measured(peer: Peer, python: Path, seconds: float) -> Sample:
    """Run a peer, and look at it for so long, from the end of a round to that of another.

    Raises:
        SottovoceError: it ended, or came to no round for too long.
    """
    with tempfile.TemporaryDirectory(prefix="peer-", ignore_cleanup_errors=True) as name:
        began = time.monotonic()
        with running(peer, python, Path(name)) as (child, progress, log):

            def until(done: Callable[[int, float], bool], patience: float) -> tuple[int, float]:
                since, last = time.monotonic(), 0
                while True:
                    rounds, at = read(progress)
                    if done(rounds, at):
                        return rounds, at
                    if rounds != last:
                        since, last = time.monotonic(), rounds
                    if child.poll() is not None:
                        raise SottovoceError(f"it ended by itself after {rounds} rounds: {_last(_text(log))}")
                    if time.monotonic() - since > patience:
                        raise SottovoceError(
                            f"no round in {patience:.0f} s after {rounds}; its last words: {_last(_text(log))}"
                        )
                    time.sleep(0.005)

            _, up = until(lambda rounds, _: rounds > 0, START_S)
            warm, _ = until(lambda rounds, at: rounds > 2 and at > up + seconds / 3, STALL_S)
            first, begin = until(lambda rounds, _: rounds > warm, STALL_S)
            before = use(marked(progress))
            last, end = until(lambda rounds, at: rounds > first + 2 and at > begin + seconds, STALL_S)
            after = use(marked(progress))
    rounds = last - first
    cpu = 1e6 * (after.cpu_s - before.cpu_s) / rounds
    return Sample(rounds, rounds / (end - begin), cpu, after.memory_mb, after.processes, up - began)


def _text(log: Path) -> str:
    return log.read_text(encoding="utf-8", errors="replace")


def _last(text: str) -> str:
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)  # without colours
    lines = [line.strip() for line in plain.splitlines() if line.strip()] or ["it said nothing"]
    return lines[-1][:200]


# ---- ours --------------------------------------------------------------------------------------------------------------


async def own(case: Case) -> Sample:
    """Our ring, unrecorded; the process that feeds it, this one, is not counted.

    Raises:
        SottovoceError: it did not start, or broke.
    """
    with tempfile.TemporaryDirectory() as folder:
        async with ring_of(case, case.rounds + 2 * case.margin, Path(folder)) as ring:
            processes = [process for role in ring.processes.values() for process in role]
            begin = await ring.reach(case.margin)
            before = use(processes)
            end = await ring.reach(case.margin + case.rounds)
            after = use(processes)
    rounds = end.round - begin.round
    cpu = 1e6 * (after.cpu_s - before.cpu_s) / rounds
    rate = rounds / (end.at - begin.at)
    return Sample(rounds, rate, cpu, after.memory_mb, after.processes, ring.running_s)


# ---- the table ---------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Row:
    """What a peer came to: samples, or why there are none."""

    name: str
    version: str
    ran: str
    learners: int
    messages: int
    samples: list[Sample]
    why: str = ""

    def cells(self) -> list[str]:
        """As shown."""
        if not self.samples:
            return [self.name, self.version, f"not run: {self.why}", *[""] * 7]

        def of(name: str) -> float:
            return median(getattr(sample, name) for sample in self.samples) or 0.0

        beside = median(s.rounds_per_s / s.ours for s in self.samples if s.ours)
        rate, cpu = of("rounds_per_s"), of("cpu_us")
        return [
            self.name,
            self.version,
            self.ran,
            f"{of('processes'):.0f}",
            f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}",
            "" if beside is None else f"{beside:.2g}",
            f"{cpu / self.messages:,.0f}",
            f"{cpu / self.learners:,.0f}",
            f"{of('memory_mb'):,.0f}",
            f"{of('startup_s'):.1f}",
        ]


def table(rows: Sequence[Row]) -> Table:
    """One row a peer, in Markdown."""
    shown = Table(box=box.MARKDOWN)
    for head in ("peer", "version", "what it ran"):
        shown.add_column(head)
    for head in ("proc.", "rounds/s", "of ours", "CPU us a message", "a learner-round", "MB", "start s"):
        shown.add_column(head, justify="right")
    for row in rows:
        shown.add_row(*row.cells())
    return shown


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    names = [peer.name for peer in PEERS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME", help=f"some of {', '.join(names)}")
    parser.add_argument("--seconds", type=float, default=15.0, help="that a peer is measured (default: 15)")
    parser.add_argument("--repeats", type=int, default=1, help="how often each is run (default: 1)")
    parser.add_argument("--quick", action="store_true", help="three seconds each: does it run at all?")
    parser.add_argument("--folder", type=Path, help="where environments are kept, 3 GB (default: a temporary one)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all samples to a file")
    options = parser.parse_args(arguments)
    if options.quick:
        options.seconds, options.repeats = min(options.seconds, 3.0), 1
    if options.seconds <= 0 or options.repeats < 1:
        parser.error("--seconds must be above 0, --repeats at least 1")
    return options


def run(options: argparse.Namespace, folder: Path) -> list[Row]:
    """Ours and a peer in turn, each peer so often."""
    chosen = [peer for peer in PEERS if not options.only or peer.name in options.only]
    rounds, version = 300 if options.quick else 2_000, str(machine()["sottovoce"])
    cases = [Case(name, rounds, dim=DIM, tls="tls" in name) for name in OURS]
    ours = [Row(name, version, ran, 5, 10, []) for name, ran in OURS.items()]
    theirs = [Row(p.name, "", p.ran, p.learners, p.messages, []) for p in chosen]
    for _ in range(options.repeats):
        for peer, row in zip(chosen, theirs, strict=True):
            try:
                python = environment(peer, folder)
                row.version = version_of(peer, python)
                for case, own_row in zip(cases, ours, strict=True):
                    with console.status(case.name):
                        own_row.samples.append(asyncio.run(own(case)))
                with console.status(peer.name):
                    sample = measured(peer, python, options.seconds)
                beside = ours[0].samples[-1].rounds_per_s
                row.samples.append(Sample(**asdict(sample) | {"ours": beside}))
            except (SottovoceError, OSError) as error:
                row.why = str(error)
                console.print(f"{peer.name}: {error}", style="red", markup=False, highlight=False)
    return [*ours, *theirs]


def main() -> int:
    """Measure and show; 1 where something could not be run."""
    options = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as Ctrl-C does: what was started is ended
    before = machine()
    with contextlib.ExitStack() as stack:
        folder = options.folder or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="peers-")))
        folder.mkdir(parents=True, exist_ok=True)
        rows = run(options, folder.resolve())
    after = machine()
    console.print(
        f"{after['date']}, {after['processor']}, {after['cores']} cores, load {before['load']} before and {after['load']} after, "
        f"Python {after['python']}",
        highlight=False,
    )
    console.print(table(rows))
    if options.json is not None:
        write_json(options.json, {"load_before": before["load"], "rows": [asdict(row) for row in rows]})
    return 0 if all(row.samples for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
