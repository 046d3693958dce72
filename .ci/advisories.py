"""Hold what is locked against advisories: `python advisories.py [--service osv] LOCK...`, by pip-audit, which must be installed.

Every locked version is looked up, also those of other platforms and Pythons. Exits with 1 where there is an advisory, and with 2
where the database did not answer for every package: pip-audit by itself calls that "no known vulnerabilities".
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


def pinned(locks: Iterable[Path]) -> dict[str, list[str]]:
    """Versions of every package, as the locks say."""
    found = defaultdict[str, list[str]](list)
    for lock in locks:
        for name, version in PINNED.findall(lock.read_text(encoding="utf-8")):
            if version not in found[name]:
                found[name].append(version)
    return dict(found)


def lists(versions: dict[str, list[str]]) -> Iterator[str]:
    """As files of requirements, in each of which a package has one version."""
    for i in range(max(map(len, versions.values()))):
        yield "".join(f"{name}=={each[i]}\n" for name, each in versions.items() if i < len(each))


def asked(requirements: str, service: str) -> list[dict[str, Any]]:
    """What pip-audit says of every package; nothing where the database could not be reached."""
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
        said = subprocess.run(command, check=False, capture_output=True, text=True)
    try:
        packages: list[dict[str, Any]] = json.loads(said.stdout)["dependencies"]
    except (ValueError, KeyError):
        print((said.stderr.strip().splitlines() or ["pip-audit says nothing"])[-1], file=sys.stderr)
        return []
    return packages


def told(versions: dict[str, list[str]], packages: Iterable[dict[str, Any]], service: str) -> tuple[list[str], int]:
    """The lines of a report, and the exit code."""
    wanted = {(name, version) for name, each in versions.items() for version in each}
    answered, lines = set[tuple[str, str]](), list[str]()
    for package in packages:
        if "skip_reason" in package:
            continue
        answered.add((package["name"], package["version"]))
        for each in package["vulns"]:
            names = ", ".join([each["id"], *each.get("aliases", ())])
            mended = ", ".join(each.get("fix_versions", ())) or "no version yet"
            lines.append(f"{package['name']} {package['version']}: {names}; mended in {mended}")
    code = FOUND if lines else 0
    lines.append(f"{len(lines)} advisories for {len(answered)} of {len(wanted)} locked versions, by {service}")
    if unknown := sorted(wanted - answered):
        names = ", ".join(f"{name} {version}" for name, version in unknown) if answered else "any of them"
        lines.append(f"UNREACHABLE: the database of {service} did not answer, and so nothing is known, for {names}")
        code = code or UNKNOWN
    return lines, code


def main() -> int:
    """Look up, and say what was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("locks", nargs="+", type=Path)
    parser.add_argument("--service", default="pypi", choices=["pypi", "osv"])
    given = parser.parse_args()
    versions = pinned(given.locks)
    packages = [package for each in lists(versions) for package in asked(each, given.service)]
    lines, code = told(versions, packages, given.service)
    print("\n".join(lines))
    return code


if __name__ == "__main__":
    sys.exit(main())
