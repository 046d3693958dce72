"""Functions that the benchmarks share: description of the machine, resource usage of a program, and the writing of results."""

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
class ProgramUsage:
    """Output and usage of a program: CPU seconds including its children, largest resident memory of one process in MB."""

    output: str
    cpu_s: float
    peak_mb: float


def run_program(command: Sequence[str]) -> ProgramUsage:
    """Run a program to its end; its standard error is shown.

    Raises:
        OSError: the program failed.
    """
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        output = child.stdout.read()
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode != 0:
        raise OSError(f"{Path(command[1]).name} failed with exit code {child.returncode}:\n{output.strip()}")
    return ProgramUsage(output, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024)


def median(values: Iterable[float]) -> float | None:
    """Return the median of the values, or None if there are none."""
    collected = list(values)
    return statistics.median(collected) if collected else None


def machine() -> dict[str, Any]:
    """Describe the machine: date, processor, cores, memory in GB, load, versions."""
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
    """Write results and the description of the machine as JSON."""
    path.write_text(json.dumps({"machine": machine(), **results}, indent=2) + "\n", encoding="utf-8")


def _processor() -> str:
    """Return the name of the processor as Linux reports it."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
