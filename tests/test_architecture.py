"""The house rules that no single module can hold: who imports whom, and that generated code fits its source."""

from __future__ import annotations

import importlib
import importlib.util
import re
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import pytest
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


def test_imports_follow_the_arrows() -> None:
    _run(str(Path(sysconfig.get_path("scripts"), "lint-imports")), "--no-cache", "--no-logo")


@pytest.mark.skipif(importlib.util.find_spec("grpc_tools") is None, reason="grpcio-tools is not installed (extra: dev)")
def test_generated_code_is_fresh() -> None:
    _run(sys.executable, "proto/generate.py", "--check")


@pytest.mark.parametrize("proto", PROTOS)
def test_proto_package_is_its_folder_and_its_python_package(proto: str) -> None:
    package = Path(proto).parent.as_posix().replace("/", ".")
    module = importlib.import_module(f"{package}.{Path(proto).stem}_pb2")

    assert f"\npackage {package};\n" in (PROTO / proto).read_text(encoding="utf-8")
    assert proto == module.DESCRIPTOR.name
    assert package == module.DESCRIPTOR.package


@pytest.mark.parametrize(
    ("package", "files", "pattern"),
    [
        ("grpcio", "*_pb2_grpc.py", r"^GRPC_GENERATED_VERSION = '(.+)'$"),
        ("protobuf", "*_pb2.py", r"^# Protobuf Python Version: (.+)$"),
    ],
)
def test_dependencies_are_recent_enough_for_the_generated_code(package: str, files: str, pattern: str) -> None:
    sources = [path.read_text(encoding="utf-8") for path in (PROTO / "generated").rglob(files)]
    demanded = {Version(version) for source in sources for version in re.findall(pattern, source, re.MULTILINE)}

    assert demanded, f"no generated file names the {package} that it needs"
    assert _lower_bound(package) >= max(demanded)
