"""Check of the coverage of every package against its floor: `python floors.py coverage.json`, a file of `coverage json`.

A floor is just below the measured coverage. Raise it with the coverage; lower it only with a reason.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

FLOORS = {
    "sottovoce_core": 95,
    "sottovoce_rpc": 96,
    "sottovoce_learner": 95,
    "sottovoce_eavesdropper": 96,
    "sottovoce_coordinator": 96,
    "sottovoce_client": 94,
    "sottovoce_lab": 92,
}
"""Minimum percentage of the lines of a package that the quick tests run."""


def compute_coverage(report: Path) -> dict[str, float]:
    """Return the percentage of lines that ran, by package."""
    lines: Counter[str] = Counter()
    ran: Counter[str] = Counter()
    for name, facts in json.loads(report.read_text(encoding="utf-8"))["files"].items():
        for package in set(FLOORS) & set(Path(name).parts):
            lines[package] += facts["summary"]["num_statements"]
            ran[package] += facts["summary"]["covered_lines"]
    return {package: 100.0 * ran[package] / lines[package] if lines[package] else 0.0 for package in FLOORS}


def main() -> int:
    """Print the coverage, and return 1 if a package is below its floor."""
    measured = compute_coverage(Path(sys.argv[1]))
    for package, percent in measured.items():
        below = "  BELOW ITS FLOOR" if percent < FLOORS[package] else ""
        print(f"{package:24}{percent:6.1f} %   floor {FLOORS[package]} %{below}")
    return int(any(percent < FLOORS[package] for package, percent in measured.items()))


if __name__ == "__main__":
    sys.exit(main())
