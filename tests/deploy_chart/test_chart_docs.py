"""The pages on Kubernetes describe the values of the chart, and no others."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import yaml

from tests.deploy_chart.__main__ import HEADING, PAGE, entries, render
from tests.deploy_chart.rendering import CHART, helm, merged
from tests.docs.pages import blocks, text_of

VALUES = (CHART / "values.yaml").read_text(encoding="utf-8")


def test_the_page_has_every_value_with_its_default() -> None:
    assert PAGE.read_text(encoding="utf-8").partition(HEADING)[2] == render(VALUES), (
        "python -m tests.deploy_chart writes it anew"
    )


def _paths(values: object, place: str = "") -> Iterator[str]:
    for key, value in values.items() if isinstance(values, dict) else ():
        yield f"{place}{key}"
        yield from _paths(value, f"{place}{key}.")


def test_every_value_is_read() -> None:
    """Line by line as many keys are found as PyYAML finds, but for those within a value."""
    found = list(entries(VALUES))
    leaves = tuple(f"{entry.path}." for entry in found if entry.is_leaf)
    paths = [path for path in _paths(yaml.safe_load(VALUES)) if not path.startswith(leaves)]
    assert [entry.path for entry in found] == paths


def test_a_value_that_no_comment_explains_is_refused() -> None:
    with pytest.raises(ValueError, match=r"image\.colour has none"):
        render(VALUES.replace("image:\n", "image:\n  colour: red\n"))


def test_the_values_that_the_page_shows_are_taken() -> None:
    """Each of its examples, with what `sottovoce spec values` would add."""
    shown = {block.file: block.text for block in blocks(text_of("docs/operate/deploy.md"))}
    one, north = (yaml.safe_load(shown[name]) for name in ("mine.yaml", "north.yaml"))
    assert helm("template", values=one).returncode == 0
    identity = {"identities": one["identities"]}
    said = helm("template", values=merged(identity, north, {"edges": [["north", "east"]]}))
    assert said.returncode == 0, said.stderr
