"""The chart as Helm renders it, and what is in it."""

from __future__ import annotations

import functools
import json
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

CHART = Path(__file__).resolve().parents[2] / "deploy" / "helm" / "sottovoce"
DOMAIN, RELEASE, NAMESPACE = "ward.example", "study", "wards"
ISSUED = {"domain": DOMAIN, "identities": {"issuer": {"name": "ward", "kind": "Issuer"}}}

Values = Mapping[str, Any]
Document = dict[str, Any]


@functools.cache
def tool(name: str) -> str:
    """The path of a program; without it whoever asks is skipped."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not there: python .ci/chart_tools.py FOLDER gets it")
    return found


def helm(*arguments: str, values: Values | None = None, release: str = RELEASE) -> subprocess.CompletedProcess[str]:
    """Run Helm on the chart; values come by standard input."""
    where = [str(CHART)] if arguments[0] == "lint" else [release, str(CHART), "--namespace", NAMESPACE]
    command = [tool("helm"), arguments[0], *where, *arguments[1:], "--values", "-"]
    return subprocess.run(
        command, input=json.dumps(values or {}), capture_output=True, text=True, check=False, timeout=300
    )


@dataclass(frozen=True)
class Rendered:
    """What a release consists of."""

    text: str
    documents: tuple[Document, ...]

    def of(self, kind: str) -> list[Document]:
        return [each for each in self.documents if each["kind"] == kind]

    def named(self, kind: str, name: str) -> Document:
        (found,) = (each for each in self.of(kind) if each["metadata"]["name"] == name)
        return found

    def pods(self) -> Iterator[tuple[str, Document]]:
        """Each pod: the name of what makes it, and its metadata and spec."""
        for each in self.of("StatefulSet"):
            yield each["metadata"]["name"], each["spec"]["template"]
        for each in self.of("Pod"):
            yield each["metadata"]["name"], {"metadata": each["metadata"], "spec": each["spec"]}


def rendered(values: Values, release: str = RELEASE) -> Rendered:
    """A release with these values."""
    return _rendered(json.dumps(values), release)


@functools.cache
def _rendered(values: str, release: str) -> Rendered:
    said = helm("template", values=json.loads(values), release=release)
    assert said.returncode == 0, said.stderr
    documents = [each for each in yaml.safe_load_all(said.stdout) if each is not None]
    return Rendered(said.stdout, tuple(documents))


def merged(*parts: Values) -> dict[str, Any]:
    """Values of several files, as Helm merges them."""
    whole: dict[str, Any] = {}
    for part in parts:
        for key, value in part.items():
            both = isinstance(value, Mapping) and isinstance(whole.get(key), Mapping)
            whole[key] = merged(whole[key], value) if both else value
    return whole


def selects(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """As Kubernetes does it; whatever else a selector says is an error."""
    assert selector.keys() <= {"matchLabels", "matchExpressions"}, selector
    if any(labels.get(key) != value for key, value in selector.get("matchLabels", {}).items()):
        return False
    for each in selector.get("matchExpressions", []):
        assert each["operator"] == "In", each
        if labels.get(each["key"]) not in each["values"]:
            return False
    return True
