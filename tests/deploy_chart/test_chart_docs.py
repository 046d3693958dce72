"""What the page on Kubernetes says of values is what the chart has."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from tests.deploy_chart.rendering import CHART

PAGE = CHART.parents[2] / "docs" / "operate" / "deploy.md"
ROW = re.compile(r"^\| `([\w.*]+)` \| (.*?) \| .*\|$", re.MULTILINE)
SHARED = ("learner", "coordinator", "eavesdropper")


def _leaves(values: Mapping[str, Any], place: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        path = f"{place}.{key}" if place else key
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, path)
        else:
            yield path, value


def _documented() -> Iterator[tuple[str, Any]]:
    """Each value with its default; of those that stand there for all services, one for each."""
    text = PAGE.read_text(encoding="utf-8")
    for path, cell in ROW.findall(text[text.index("## Values") :]):
        defaults = [yaml.safe_load(each) for each in re.findall(r"`([^`]*)`", cell)]
        if not path.startswith("*"):
            (default,) = defaults
            yield path, default
            continue
        spread = defaults * len(SHARED) if len(defaults) == 1 else defaults
        for role, default in zip(SHARED, spread, strict=True):
            yield path.replace("*", role), default


def test_every_value_is_explained_with_its_default() -> None:
    documented = list(_documented())
    values = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))

    assert dict(documented) == dict(_leaves(values))
    assert len(dict(documented)) == len(documented)


def test_the_values_that_the_page_shows_are_taken() -> None:
    """Its first example, with what `sottovoce spec values` would add."""
    from tests.deploy_chart.rendering import helm, merged

    shown = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    one, north = (yaml.safe_load(each) for each in shown if "domain: ward.example" in each and "state:" not in each)
    assert helm("template", values=one).returncode == 0
    identity = {"identities": one["identities"]}
    said = helm("template", values=merged(identity, north, {"edges": [["north", "east"]]}))
    assert said.returncode == 0, said.stderr
