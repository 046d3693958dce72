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
    tried = asyncio.run(fuzz(folder, told.inputs, told.seed))
    for (method, code), times in sorted(tried.answers.items()):
        print(f"{method:16} {code:20} {times:8}")
    for each in tried.broken:
        print(each)
    memory = ", ".join(f"{house} {mib}" for house, mib in tried.mib.items())
    print(f"{told.inputs} inputs for each service, seed {told.seed}: {'BROKEN' if tried.broken else 'all held'}")
    print(f"most memory in MiB, of at most {MOST_MIB}: {memory}; files in {folder}")
    return BROKEN if tried.broken else OK


if __name__ == "__main__":
    sys.exit(main())
