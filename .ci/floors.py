"""Hold the coverage of every house against its floor: `python floors.py coverage.json`, as `coverage json` wrote it.

A floor stands just below what was measured. It is raised with the coverage, and lowered only by a change that says why.
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
"""Per cent of the lines of a house that the quick tests run."""


def covered(report: Path) -> dict[str, float]:
    """Per cent of every house's lines that ran."""
    lines: Counter[str] = Counter()
    ran: Counter[str] = Counter()
    for name, facts in json.loads(report.read_text(encoding="utf-8"))["files"].items():
        for house in set(FLOORS) & set(Path(name).parts):
            lines[house] += facts["summary"]["num_statements"]
            ran[house] += facts["summary"]["covered_lines"]
    return {house: 100.0 * ran[house] / lines[house] if lines[house] else 0.0 for house in FLOORS}


def main() -> int:
    """Show, and exit with 1 where a house is below its floor."""
    measured = covered(Path(sys.argv[1]))
    for house, percent in measured.items():
        below = "  BELOW ITS FLOOR" if percent < FLOORS[house] else ""
        print(f"{house:24}{percent:6.1f} %   floor {FLOORS[house]} %{below}")
    return int(any(percent < FLOORS[house] for house, percent in measured.items()))


if __name__ == "__main__":
    sys.exit(main())
