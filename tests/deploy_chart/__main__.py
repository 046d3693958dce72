"""Write the values in docs/reference/chart.md anew, from the comments of values.yaml: `python -m tests.deploy_chart`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import yaml

from tests.deploy_chart.rendering import CHART

PAGE = CHART.parents[2] / "docs" / "reference" / "chart.md"
KEY = re.compile(r"( *)(\w+):( .+)?")
HEADING = "## Values\n"
"""The heading from which on the page is generated."""


class Entry(NamedTuple):
    """A key of values.yaml: its dotted path, the comment above it, and whether its value is on its line."""

    path: str
    comment: str
    is_leaf: bool


def entries(text: str) -> Iterator[Entry]:
    """Read keys and comments line by line, in the file's order."""
    comment, path = list[str](), list[str]()
    for line in text.splitlines():
        if line.lstrip().startswith("# "):
            comment.append(line.lstrip(" #"))
            continue
        if key := KEY.fullmatch(line):
            path[len(key[1]) // 2 :] = [key[2]]
            yield Entry(".".join(path), " ".join(comment), bool(key[3]))
        comment = []


def value_at(values: Any, path: str) -> str:
    """Format the default at a path as YAML on one line."""
    for key in path.split("."):
        values = values[key]
    return yaml.safe_dump([values], default_flow_style=True, width=10_000, sort_keys=False)[1:-2]


def render(text: str) -> str:
    """Render the tables of the page: the values at the top level, then those of each section.

    Raises:
        ValueError: a value has no comment, and the same value of `learner` has none.
    """
    values, found = yaml.safe_load(text), list(entries(text))
    comments = {entry.path: entry.comment for entry in found}
    tables: dict[str, list[str]] = {"": []}
    for path, comment, is_leaf in found:
        section, dot, name = path.partition(".")
        if not is_leaf:
            tables.setdefault(section, [])
            continue
        if not comment and not comments.get(f"learner.{name}"):
            raise ValueError(f"values.yaml must explain every value in a comment above it, {path} has none")
        meaning = comment or f"As `learner.{name}`."
        tables[section if dot else ""].append(f"| `{path}` | `{value_at(values, path)}` | {meaning} |")
    return "".join(
        "\n".join(["", f"### `{section}`" if section else "### The release", ""])
        + (f"\n{comments[section]}\n" if comments.get(section) else "")
        + "\n".join(["", "| value | default | meaning |", "|---|---|---|", *rows, ""])
        for section, rows in tables.items()
    )


if __name__ == "__main__":
    opening = PAGE.read_text(encoding="utf-8").partition(HEADING)[0]
    values = render((CHART / "values.yaml").read_text(encoding="utf-8"))
    PAGE.write_text(opening + HEADING + values, encoding="utf-8")
