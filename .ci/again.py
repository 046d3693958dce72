"""Run once more, alone, what just failed: `again.py FOLDER`, FOLDER being the cache directory of a pytest that ended with 1.

Tests of real processes share a machine with whatever else it does, CI's other lane above all. One that failed there and passes
alone is named UNSTEADY, at CI's end, too: it hides a defect, of the test or of what it tests, that somebody has to find. Tests of
the pure core have no such excuse, nor have more than three at once: then nothing is run again, and the failure stands.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

MOST = 3
OF_PROCESSES = ("tests/client/", "tests/deploy/", "tests/lab/", "tests/observability/", "tests/rpc/", "tests/services/")


def main() -> int:
    """Return pytest's exit code: 0 where nothing failed, or what did passes alone."""
    cache = Path(sys.argv[1])
    lasting = cache / "v" / "cache" / "lastfailed"
    failed = sorted(json.loads(lasting.read_text(encoding="utf-8"))) if lasting.exists() else []
    if not failed:
        return 0
    if len(failed) > MOST or not all(name.startswith(OF_PROCESSES) for name in failed):
        return 1
    environment = {**os.environ, "PYTEST_ADDOPTS": ""}
    code = subprocess.run(
        ["pytest", "-q", "-m", "", "-o", f"cache_dir={cache}", *failed], env=environment, check=False
    ).returncode
    if code == 0:
        print(*(f"UNSTEADY: {name} failed, and passed alone" for name in failed), sep="\n", flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
