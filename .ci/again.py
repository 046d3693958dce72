"""Run failed tests once more, alone: `again.py FOLDER`, where FOLDER is the cache directory of a pytest that ended with 1.

Tests of real processes share the machine with other work, such as CI's other lane. A test that fails there and passes alone is
reported as UNSTEADY, also at the end of CI: it hides a defect of the test or of the product. Failures of tests of the pure core,
and more than three failures, are not repeated.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

MAX_REPEATED = 3
OF_PROCESSES = ("tests/client/", "tests/deploy/", "tests/lab/", "tests/observability/", "tests/rpc/", "tests/services/")


def main() -> int:
    """Return pytest's exit code: 0 if no test failed, or all failed tests pass alone."""
    cache = Path(sys.argv[1])
    lasting = cache / "v" / "cache" / "lastfailed"
    failed = sorted(json.loads(lasting.read_text(encoding="utf-8"))) if lasting.exists() else []
    if not failed:
        return 0
    if len(failed) > MAX_REPEATED or not all(name.startswith(OF_PROCESSES) for name in failed):
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
