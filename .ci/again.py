"""Second run of failed tests, alone: `again.py FOLDER`, where FOLDER is the cache directory of a pytest that exited with 1.

Tests of real processes share the machine with other work, such as the other lane of CI. A test that fails there and passes alone
is reported as UNSTEADY, also at the end of CI: it hides a defect of the test or of the product. The script does not repeat
failures of tests of the pure core, or more than three failures.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

MAX_REPEATED = 3
PROCESS_TESTS = (
    "tests/client/",
    "tests/deploy/",
    "tests/lab/",
    "tests/observability/",
    "tests/rpc/",
    "tests/services/",
)


def main() -> int:
    """Return pytest's exit code: 0 if no test failed, or all failed tests pass alone."""
    cache = Path(sys.argv[1])
    last_failed = cache / "v" / "cache" / "lastfailed"
    failed = sorted(json.loads(last_failed.read_text(encoding="utf-8"))) if last_failed.exists() else []
    if not failed:
        return 0
    if len(failed) > MAX_REPEATED or not all(name.startswith(PROCESS_TESTS) for name in failed):
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
