"""The house rules that no single module can hold: who imports whom, and that generated code fits its source."""

from __future__ import annotations

import importlib
import re
import subprocess
import sysconfig
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.version import Version

CHECKOUT = Path(__file__).resolve().parent.parent
PROTO = CHECKOUT / "proto"
PROTOS = sorted(path.relative_to(PROTO).as_posix() for path in PROTO.glob("sottovoce_wire/**/*.proto"))


def _run(*command: str) -> None:
    done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def _lower_bound(package: str) -> Version:
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = {requirement.name: requirement for requirement in map(Requirement, project["dependencies"])}
    return next(Version(bound.version) for bound in wanted[package].specifier if bound.operator == ">=")


def _series(version: Version) -> tuple[int, ...]:
    """What generated code depends on: a patch changes nothing in it."""
    return version.release[:2]


def test_imports_follow_the_arrows() -> None:
    _run(str(Path(sysconfig.get_path("scripts"), "lint-imports")), "--no-cache")


@pytest.mark.parametrize("proto", PROTOS)
def test_proto_package_is_its_folder_and_its_python_package(proto: str) -> None:
    package = Path(proto).parent.as_posix().replace("/", ".")
    module = importlib.import_module(f"{package}.{Path(proto).stem}_pb2")

    assert f"\npackage {package};\n" in (PROTO / proto).read_text(encoding="utf-8")
    assert proto == module.DESCRIPTOR.name
    assert package == module.DESCRIPTOR.package


def test_the_oldest_protobuf_that_is_allowed_is_that_of_the_generated_code() -> None:
    sources = [path.read_text(encoding="utf-8") for path in (PROTO / "generated").rglob("*_pb2.py")]
    demanded = {
        version for source in sources for version in re.findall(r"^# Protobuf Python Version: (.+)$", source, re.M)
    }

    assert {_series(Version(version)) for version in demanded} == {_series(_lower_bound("protobuf"))}


@pytest.mark.parametrize("package", ["grpcio", "grpcio-health-checking", "grpcio-reflection", "grpcio-status"])
def test_no_grpcio_is_allowed_that_is_older_than_the_generated_code(package: str) -> None:
    lines = (PROTO / "tools.txt").read_text(encoding="utf-8").splitlines()
    tools = {tool.name: tool for tool in (Requirement(line.partition("#")[0]) for line in lines if line[:1] != "#")}
    (pin,) = tools["grpcio-tools"].specifier

    assert _series(_lower_bound(package)) >= _series(Version(pin.version))


def test_the_citation_names_the_version() -> None:
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    citation = yaml.safe_load((CHECKOUT / "CITATION.cff").read_text(encoding="utf-8"))

    assert (citation["version"], citation["license"]) == (project["version"], project["license"])
