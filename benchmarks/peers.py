#!/usr/bin/env python3
"""Benchmark of other projects (peers): rate at which their learners exchange a vector of 117 numbers on one machine, and ours.

Each peer has its own environment (pip, from PyPI; created once in `--folder`), and runs the setup of its public API that is
nearest to a ring of five, without learning: `peers/` has a script for each. Our ring runs before each peer. Nothing is
asserted: the row of a peer that cannot be installed or run has the reason.
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
from measure import Case, start_ring
from rich import box
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().with_name("peers")))
from progress import FILE, FORM, read

from sottovoce_core.errors import SottovoceError

SCRIPT_FOLDER = Path(__file__).resolve().with_name("peers")
DIM = 117
REQUESTED_ROUNDS = 100_000_000
"""Number of rounds requested from a peer, which is killed after the measurement."""
START_S, STALL_S = 240.0, 90.0
"""Maximum seconds until the first round of a peer, and between two of its rounds."""
TORCH = "torch==2.13.0"

console = Console() if sys.stdout.isatty() else Console(width=240)


@dataclass(frozen=True, slots=True)
class Peer:
    """Project to compare with, and its setup.

    Attributes:
        name: name on the command line.
        package: package whose version is printed.
        requires: requirements for pip.
        script: script in `peers/`, with its arguments.
        setup: topology and processes, in words.
        messages: vectors that cross the network per round, by the topology.
    """

    name: str
    package: str
    requires: tuple[str, ...]
    script: tuple[str, ...]
    setup: str
    learners: int = 5
    messages: int = 10


NVFLARE = ("nvflare", ("nvflare==2.9.0", TORCH))
P2PFL = ("p2pfl", ("p2pfl[dp]==0.4.4", "pyarrow<18", "huggingface_hub<1"))
"""Name and requirements of p2pfl. Its `datasets` 2.15 has no upper bounds, and fails to import with current versions of these."""
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
OUR_RINGS = {
    "sottovoce": "ring of 5, unrecorded; a process each and the coordinator, gRPC",
    "sottovoce-tls": "the same, mutual TLS",
}


@dataclass(frozen=True, slots=True)
class Usage:
    """Usage of processes until now: CPU seconds, including those of children that have ended; current memory."""

    cpu_s: float
    memory_mb: float
    processes: int


@dataclass(frozen=True, slots=True)
class Sample:
    """Measured window.

    Attributes:
        rounds: rounds of the window.
        cpu_us: CPU microseconds of all processes per round.
        memory_mb: memory of all processes at the end of the window; shared memory counts once.
        startup_s: seconds from the start of the first process until the first round is done.
        our_rounds_per_s: rounds/s of our ring, measured just before.
    """

    rounds: int
    rounds_per_s: float
    cpu_us: float
    memory_mb: float
    processes: int
    startup_s: float
    our_rounds_per_s: float | None = None


# ---- a peer ------------------------------------------------------------------------------------------------------------


def prepare_environment(peer: Peer, folder: Path) -> Path:
    """Create the environment of a peer if it does not exist; return its Python.

    Raises:
        SottovoceError: the installation failed.
    """
    place = folder / peer.package
    python, complete = place / "bin" / "python", place / "complete"
    if not complete.exists():
        with console.status(f"installing {', '.join(peer.requires)}"):
            _run_command([sys.executable, "-m", "venv", "--clear", str(place)])
            _run_command([str(python), "-m", "pip", "install", "--quiet", *peer.requires])
        complete.touch()
    return python


def _run_command(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SottovoceError(f"{command[2]} failed: {_last_line(done.stderr)}")
    return done.stdout.strip()


def read_version(peer: Peer, python: Path) -> str:
    """Return the installed version of a peer."""
    return _run_command([str(python), "-c", f"import importlib.metadata as m; print(m.version({peer.package!r}))"])


@contextlib.contextmanager
def start_peer(peer: Peer, python: Path, folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], Path, Path]]:
    """Start a peer; after the block kill all its processes, found by our environment variable."""
    progress, log = folder / "progress", folder / "log"
    progress.write_bytes(FORM.pack(0, 0.0))
    numbers = {"--learners": peer.learners, "--dim": DIM, "--rounds": REQUESTED_ROUNDS}
    arguments = [
        str(SCRIPT_FOLDER / peer.script[0]),
        *peer.script[1:],
        *(str(p) for pair in numbers.items() for p in pair),
    ]
    threads = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    own = {FILE: str(progress), "PYTHONPATH": str(SCRIPT_FOLDER), "HOME": str(folder), "TMPDIR": str(folder), **threads}
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
        while remaining := find_processes(progress):
            for process in remaining:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            time.sleep(0.1)
        child.wait()


def find_processes(progress: Path) -> list[psutil.Process]:
    """Find the processes of a run by its progress file."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(FILE) == str(progress) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def measure_usage(processes: Sequence[psutil.Process]) -> Usage:
    """Measure the usage of processes until now."""
    cpu, memory = 0.0, 0.0
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            cpu += times.user + times.system + times.children_user + times.children_system
            memory += process.memory_full_info().pss / 2**20
    return Usage(cpu, memory, len(processes))


def measure_peer(peer: Peer, python: Path, seconds: float) -> Sample:
    """Run a peer, and measure it for at least `seconds`, from the end of one round to the end of another.

    Raises:
        SottovoceError: the peer ended, or completed no round for too long.
    """
    with tempfile.TemporaryDirectory(prefix="peer-", ignore_cleanup_errors=True) as name:
        began = time.monotonic()
        with start_peer(peer, python, Path(name)) as (child, progress, log):

            def wait_until(done: Callable[[int, float], bool], timeout_s: float) -> tuple[int, float]:
                since, last = time.monotonic(), 0
                while True:
                    rounds, at = read(progress)
                    if done(rounds, at):
                        return rounds, at
                    if rounds != last:
                        since, last = time.monotonic(), rounds
                    if child.poll() is not None:
                        raise SottovoceError(
                            f"it must run until stopped, but ended after {rounds} rounds: {_last_line(_read_text(log))}"
                        )
                    if time.monotonic() - since > timeout_s:
                        raise SottovoceError(
                            f"no round in {timeout_s:.0f} s after {rounds}; its last output: {_last_line(_read_text(log))}"
                        )
                    time.sleep(0.005)

            _, startup_at = wait_until(lambda rounds, _: rounds > 0, START_S)
            warm, _ = wait_until(lambda rounds, at: rounds > 2 and at > startup_at + seconds / 3, STALL_S)
            first, begin = wait_until(lambda rounds, _: rounds > warm, STALL_S)
            before = measure_usage(find_processes(progress))
            last, end = wait_until(lambda rounds, at: rounds > first + 2 and at > begin + seconds, STALL_S)
            after = measure_usage(find_processes(progress))
    rounds = last - first
    cpu = 1e6 * (after.cpu_s - before.cpu_s) / rounds
    return Sample(rounds, rounds / (end - begin), cpu, after.memory_mb, after.processes, startup_at - began)


def _read_text(log: Path) -> str:
    return log.read_text(encoding="utf-8", errors="replace")


def _last_line(text: str) -> str:
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)  # without colours
    lines = [line.strip() for line in plain.splitlines() if line.strip()] or ["no output"]
    return lines[-1][:200]


# ---- ours --------------------------------------------------------------------------------------------------------------


async def measure_ours(case: Case) -> Sample:
    """Measure our ring, unrecorded; this process, which feeds it, is not counted.

    Raises:
        SottovoceError: the ring did not start, or failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        async with start_ring(case, case.rounds + 2 * case.margin, Path(folder)) as ring:
            processes = [process for role in ring.processes.values() for process in role]
            begin = await ring.wait_for_round(case.margin)
            before = measure_usage(processes)
            end = await ring.wait_for_round(case.margin + case.rounds)
            after = measure_usage(processes)
    rounds = end.round - begin.round
    cpu = 1e6 * (after.cpu_s - before.cpu_s) / rounds
    rate = rounds / (end.at - begin.at)
    return Sample(rounds, rate, cpu, after.memory_mb, after.processes, ring.running_s)


# ---- the table ---------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Row:
    """Row of the table: samples of a peer, or the reason why there are none."""

    name: str
    version: str
    setup: str
    learners: int
    messages: int
    samples: list[Sample]
    reason: str = ""

    def cells(self) -> list[str]:
        """Format the cells."""
        if not self.samples:
            return [self.name, self.version, f"not run: {self.reason}", *[""] * 7]

        def median_of(name: str) -> float:
            return median(getattr(sample, name) for sample in self.samples) or 0.0

        ratio = median(s.rounds_per_s / s.our_rounds_per_s for s in self.samples if s.our_rounds_per_s)
        rate, cpu = median_of("rounds_per_s"), median_of("cpu_us")
        return [
            self.name,
            self.version,
            self.setup,
            f"{median_of('processes'):.0f}",
            f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}",
            "" if ratio is None else f"{ratio:.2g}",
            f"{cpu / self.messages:,.0f}",
            f"{cpu / self.learners:,.0f}",
            f"{median_of('memory_mb'):,.0f}",
            f"{median_of('startup_s'):.1f}",
        ]


def build_table(rows: Sequence[Row]) -> Table:
    """Build the table in Markdown, one row per peer."""
    shown = Table(box=box.MARKDOWN)
    for head in ("peer", "version", "what it ran"):
        shown.add_column(head)
    for head in ("proc.", "rounds/s", "of ours", "CPU us a message", "a learner-round", "MB", "start s"):
        shown.add_column(head, justify="right")
    for row in rows:
        shown.add_row(*row.cells())
    return shown


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    names = [peer.name for peer in PEERS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME", help=f"some of {', '.join(names)}")
    parser.add_argument(
        "--seconds", type=float, default=15.0, help="duration of the measurement of a peer (default: 15)"
    )
    parser.add_argument("--repeats", type=int, default=1, help="runs of each peer (default: 1)")
    parser.add_argument("--quick", action="store_true", help="three seconds each, to test the benchmark itself")
    parser.add_argument("--folder", type=Path, help="folder of the environments, 3 GB (default: a temporary one)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all samples to a file")
    options = parser.parse_args(arguments)
    if options.quick:
        options.seconds, options.repeats = min(options.seconds, 3.0), 1
    if options.seconds <= 0 or options.repeats < 1:
        parser.error("--seconds must be above 0, --repeats at least 1")
    return options


def run_all(options: argparse.Namespace, folder: Path) -> list[Row]:
    """Run our ring and each peer in turn, `repeats` times."""
    chosen = [peer for peer in PEERS if not options.only or peer.name in options.only]
    rounds, version = 300 if options.quick else 2_000, str(machine()["sottovoce"])
    cases = [Case(name, rounds, dim=DIM, tls="tls" in name) for name in OUR_RINGS]
    our_rows = [Row(name, version, setup, 5, 10, []) for name, setup in OUR_RINGS.items()]
    peer_rows = [Row(p.name, "", p.setup, p.learners, p.messages, []) for p in chosen]
    for _ in range(options.repeats):
        for peer, row in zip(chosen, peer_rows, strict=True):
            try:
                python = prepare_environment(peer, folder)
                row.version = read_version(peer, python)
                for case, own_row in zip(cases, our_rows, strict=True):
                    with console.status(case.name):
                        own_row.samples.append(asyncio.run(measure_ours(case)))
                with console.status(peer.name):
                    sample = measure_peer(peer, python, options.seconds)
                our_rate = our_rows[0].samples[-1].rounds_per_s
                row.samples.append(Sample(**asdict(sample) | {"our_rounds_per_s": our_rate}))
            except (SottovoceError, OSError) as error:
                row.reason = str(error)
                console.print(f"{peer.name}: {error}", style="red", markup=False, highlight=False)
    return [*our_rows, *peer_rows]


def main() -> int:
    """Run the benchmark and print the results; return 1 if a peer could not run."""
    options = parse_arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as Ctrl-C does: the block of each process ends it
    before = machine()
    with contextlib.ExitStack() as stack:
        folder = options.folder or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="peers-")))
        folder.mkdir(parents=True, exist_ok=True)
        rows = run_all(options, folder.resolve())
    after = machine()
    console.print(
        f"{after['date']}, {after['processor']}, {after['cores']} cores, load {before['load']} before and {after['load']} after, "
        f"Python {after['python']}",
        highlight=False,
    )
    console.print(build_table(rows))
    if options.json is not None:
        write_json(options.json, {"load_before": before["load"], "rows": [asdict(row) for row in rows]})
    return 0 if all(row.samples for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
