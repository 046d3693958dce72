"""What every benchmark shares: where it ran, what a program that it started used, and how its results are written."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("numpy", "grpcio", "uvloop", "sottovoce")


@dataclass(frozen=True, slots=True)
class Used:
    """What a program wrote and used: processor seconds with those of its children, largest resident memory of one process."""

    said: str
    cpu_s: float
    peak_mb: float


def used(command: Sequence[str]) -> Used:
    """Run a program to its end; what it says on standard error is shown.

    Raises:
        OSError: it failed.
    """
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        said = child.stdout.read()
        _, status, spent = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode != 0:
        raise OSError(f"{Path(command[1]).name} failed with exit code {child.returncode}:\n{said.strip()}")
    return Used(said, spent.ru_utime + spent.ru_stime, spent.ru_maxrss / 1024)


def median(values: Iterable[float]) -> float | None:
    """Of what there is."""
    kept = list(values)
    return statistics.median(kept) if kept else None


def machine() -> dict[str, Any]:
    """Where and when: date, processor, cores, memory in GB, load, versions."""
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9),
        "load": round(os.getloadavg()[0], 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        **{name: _version(name) for name in PACKAGES},
    }


def write_json(path: Path, results: Mapping[str, Any]) -> None:
    """Write results, and where they were measured."""
    path.write_text(json.dumps({"machine": machine(), **results}, indent=2) + "\n", encoding="utf-8")


def _processor() -> str:
    """As Linux calls it."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
