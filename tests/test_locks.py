"""What deploy/requirements locks fits pyproject.toml, and what is said of it where an advisory database answers, or does not."""

from __future__ import annotations

import importlib.util
import re
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

CHECKOUT = Path(__file__).parents[1]
FOLDER, ADVISORIES = CHECKOUT / "deploy" / "requirements", CHECKOUT / ".ci" / "advisories.py"
LOCKS = {
    "services": ["fast", "metrics"],
    "audit": ["audit", "fast", "metrics"],
    "tools": ["audit", "fast", "feed", "metrics", "query"],
}
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
PROJECT = tomllib.loads((CHECKOUT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def locked(name: str) -> list[tuple[Requirement, list[str]]]:
    """What a lock holds: each package, and its hashes."""
    text = (FOLDER / f"{name}.txt").read_text(encoding="utf-8").replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    return [
        (Requirement(line.partition("--hash")[0]), re.findall(r"--hash=sha256:([0-9a-f]{64})", line)) for line in lines
    ]


def chosen(name: str, python: str) -> dict[str, str]:
    """Versions that are installed with a Python."""
    own: Any = {**default_environment(), "python_version": python, "python_full_version": f"{python}.0"}
    found = dict[str, str]()
    for each, _ in locked(name):
        if each.marker is None or each.marker.evaluate(own):
            assert each.name not in found, f"{each.name} has two versions on {python}"
            found[canonicalize_name(each.name)] = str(each.specifier).removeprefix("==")
    return found


@pytest.mark.parametrize("name", [*LOCKS, "build"])
def test_everything_is_pinned_with_its_hashes(name: str) -> None:
    for each, hashes in locked(name):
        assert re.fullmatch(r"==[^*,]+", str(each.specifier)) and not each.url and hashes, each


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("name", LOCKS)
def test_a_lock_fits_the_project_on_every_python(name: str, python: str) -> None:
    """`nox -s lock` writes it anew where it does not."""
    wanted = [*PROJECT["dependencies"]]
    for extra in LOCKS[name]:
        wanted += PROJECT["optional-dependencies"][extra]
    versions = chosen(name, python)
    for text in wanted:
        requirement = Requirement(text)
        assert requirement.specifier.contains(versions[canonicalize_name(requirement.name)], prereleases=True), (
            text,
            versions,
        )


def test_locks_of_more_hold_the_versions_of_less() -> None:
    for python in PYTHONS:
        assert chosen("services", python).items() <= chosen("audit", python).items() <= chosen("tools", python).items()


# ---- advisories ------------------------------------------------------------------------------------------------------


@pytest.fixture
def advisories() -> ModuleType:
    if not ADVISORIES.exists():
        pytest.skip("a source distribution has no .ci")
    found = importlib.util.spec_from_file_location("advisories", ADVISORIES)
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


VERSIONS = {"numpy": ["2.4.6", "2.5.5"], "jinja2": ["3.1.2"]}
FINE: list[dict[str, Any]] = [
    {"name": name, "version": version, "vulns": []} for name, each in VERSIONS.items() for version in each
]
VULNERABLE = {"id": "PYSEC-1", "fix_versions": ["3.1.3"], "aliases": ["CVE-1"]}


def test_every_locked_version_is_looked_up(advisories: ModuleType) -> None:
    versions = advisories.parse_locks(FOLDER / f"{name}.txt" for name in LOCKS)
    assert {(name, each) for name, own in versions.items() for each in own} == {
        (each.name, str(each.specifier).removeprefix("==")) for name in LOCKS for each, _ in locked(name)
    }
    assert list(advisories.split_requirements(VERSIONS)) == ["numpy==2.4.6\njinja2==3.1.2\n", "numpy==2.5.5\n"]


def test_what_is_known_and_what_is_not_is_told_apart(advisories: ModuleType) -> None:
    assert advisories.format_report(VERSIONS, FINE, "pypi") == (["0 advisories for 3 of 3 locked versions, by pypi"], 0)
    found = [*FINE[:2], {"name": "jinja2", "version": "3.1.2", "vulns": [VULNERABLE]}]
    lines, code = advisories.format_report(VERSIONS, found, "pypi")
    assert (lines[0], code) == ("jinja2 3.1.2: PYSEC-1, CVE-1; fixed in 3.1.3", advisories.FOUND)
    skipped = [*FINE[:2], {"name": "jinja2", "skip_reason": "Dependency not found on PyPI and could not be audited"}]
    lines, code = advisories.format_report(VERSIONS, skipped, "pypi")
    assert (lines[-1].startswith("UNREACHABLE"), lines[-1].endswith("for jinja2 3.1.2"), code) == (True, True, 2)
    lines, code = advisories.format_report(VERSIONS, [], "pypi")
    assert lines[-1].endswith("did not answer for any of them") and code == advisories.UNKNOWN
