"""Check of locked dependencies against advisories: `python advisories.py [--service osv] LOCK...`. Needs pip-audit.

The script looks up every locked version, also those of other platforms and Python versions. It exits with 1 if there is an
advisory, and with 2 if the database did not answer for every package: pip-audit alone reports that case as
"no known vulnerabilities".
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

PINNED = re.compile(r"^([\w.-]+)==([\w.+!-]+)", re.MULTILINE)
FOUND, UNKNOWN = 1, 2


def parse_locks(locks: Iterable[Path]) -> dict[str, list[str]]:
    """Return the locked versions of every package."""
    found = defaultdict[str, list[str]](list)
    for lock in locks:
        for name, version in PINNED.findall(lock.read_text(encoding="utf-8")):
            if version not in found[name]:
                found[name].append(version)
    return dict(found)


def split_requirements(versions: dict[str, list[str]]) -> Iterator[str]:
    """Yield requirements files in which every package has one version."""
    for i in range(max(map(len, versions.values()))):
        yield "".join(f"{name}=={each[i]}\n" for name, each in versions.items() if i < len(each))


def run_pip_audit(requirements: str, service: str) -> list[dict[str, Any]]:
    """Return pip-audit's result for every package; empty if the database could not be reached."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "requirements.txt")
        path.write_text(requirements, encoding="utf-8")
        options = [
            "--disable-pip",
            "--no-deps",
            "--progress-spinner",
            "off",
            "--format",
            "json",
            "--vulnerability-service",
        ]
        command = [sys.executable, "-m", "pip_audit", *options, service, "--requirement", str(path)]
        result = subprocess.run(command, check=False, capture_output=True, text=True)
    try:
        packages: list[dict[str, Any]] = json.loads(result.stdout)["dependencies"]
    except (ValueError, KeyError):
        print((result.stderr.strip().splitlines() or ["pip-audit printed no error"])[-1], file=sys.stderr)
        return []
    return packages


def format_report(
    versions: dict[str, list[str]], packages: Iterable[dict[str, Any]], service: str
) -> tuple[list[str], int]:
    """Return the lines of a report, and the exit code."""
    wanted = {(name, version) for name, each in versions.items() for version in each}
    answered, lines = set[tuple[str, str]](), list[str]()
    for package in packages:
        if "skip_reason" in package:
            continue
        answered.add((package["name"], package["version"]))
        for each in package["vulns"]:
            names = ", ".join([each["id"], *each.get("aliases", ())])
            fixed = ", ".join(each.get("fix_versions", ())) or "no version yet"
            lines.append(f"{package['name']} {package['version']}: {names}; fixed in {fixed}")
    code = FOUND if lines else 0
    lines.append(f"{len(lines)} advisories for {len(answered)} of {len(wanted)} locked versions, by {service}")
    if unknown := sorted(wanted - answered):
        names = ", ".join(f"{name} {version}" for name, version in unknown) if answered else "any of them"
        lines.append(f"UNREACHABLE: the database of {service} did not answer for {names}")
        code = code or UNKNOWN
    return lines, code


def main() -> int:
    """Look up all locked versions, and print a report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("locks", nargs="+", type=Path)
    parser.add_argument("--service", default="pypi", choices=["pypi", "osv"])
    given = parser.parse_args()
    versions = parse_locks(given.locks)
    packages = [package for each in split_requirements(versions) for package in run_pip_audit(each, given.service)]
    lines, code = format_report(versions, packages, given.service)
    print("\n".join(lines))
    return code


if __name__ == "__main__":
    sys.exit(main())
