"""`python -m tests.fuzz`: hostile calls on every method of every service, as real processes."""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path

from tests.fuzz.houses import MOST_MIB, fuzz

OK, BROKEN = 0, 1


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser("python -m tests.fuzz", description=__doc__)
    parser.add_argument("--inputs", type=int, default=1_000, help="for each service")
    parser.add_argument("--seed", type=int, default=0, help="of what is said")
    told = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="fuzz-"))
    found, answers = asyncio.run(fuzz(folder, told.inputs, told.seed))
    for (method, code), times in sorted(answers.items()):
        print(f"{method:16} {code:20} {times:8}")
    for each in found:
        print(each)
    print(f"{told.inputs} inputs for each service, seed {told.seed}: {'BROKEN' if found else 'all held'}")
    print(f"memory below {MOST_MIB} MiB; files in {folder}")
    return BROKEN if found else OK


if __name__ == "__main__":
    sys.exit(main())
