"""The picture of who spoke to whom: learners on a circle, their names clear of them, arrows where only one of two speaks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sottovoce_client.reports.rendering import render
from sottovoce_client.reports.tables import Column, PageTable
from sottovoce_client.wording import share

_ROOMY, _NAMED = 8, 16
"""So many learners have room for names above and below; so many have any. More show theirs under the pointer."""


class _Node(NamedTuple):
    """A learner: where it lies, in percent of the picture, and where its name goes."""

    name: str
    accuracy: str
    fill: float
    x: float
    y: float
    side: str


class _Edge(NamedTuple):
    ends: tuple[_Node, _Node]
    one_way: bool


@dataclass(frozen=True, slots=True)
class Graph:
    """Learners and their channels.

    Attributes:
        name: no other figure or table of the page has it; `plot-NAME` is its id there.
        title: what it shows.
        learners: names.
        accuracies: of each; None: not known.
        edges: pairs of indices.
        one_way: pairs, of which the first speaks to the second and never hears it.
    """

    name: str
    title: str
    learners: Sequence[str]
    accuracies: Sequence[float | None]
    edges: Sequence[tuple[int, int]]
    one_way: Sequence[tuple[int, int]] = ()

    def __bool__(self) -> bool:
        return bool(self.learners)

    def __html__(self) -> str:
        nodes = self._nodes()
        directed = set(self.one_way)
        pairs = [pair for pair in self.edges if pair not in directed and pair[::-1] not in directed]
        drawn = [*((pair, False) for pair in pairs), *((pair, True) for pair in self.one_way)]
        edges = [_Edge((nodes[i], nodes[j]), one_way) for (i, j), one_way in drawn]
        size = "" if len(nodes) <= _ROOMY else "some" if len(nodes) <= _NAMED else "many"
        return render("graph.html.j2", graph=self, nodes=nodes, edges=edges, size=size, table=self._table())

    def _nodes(self) -> list[_Node]:
        n = len(self.learners)
        known = [each for each in self.accuracies if each is not None]
        low, reach = min(known, default=0.0), max(max(known, default=1.0) - min(known, default=0.0), 0.01)
        across, down = (34, 33) if n <= _ROOMY else (27, 38)
        found = []
        for k, (name, accuracy) in enumerate(zip(self.learners, self.accuracies, strict=True)):
            angle = 2 * math.pi * k / n
            x, y = (math.sin(angle), -math.cos(angle)) if n > 1 else (0.0, 0.0)
            fill = 0.0 if accuracy is None else 0.4 + 0.6 * (accuracy - low) / reach if n > 1 else 1.0
            vertical = n <= _ROOMY or abs(x) < 0.3
            side = ("up" if y <= 1e-9 else "down") if vertical else "right" if x > 0 else "left"
            said = "" if accuracy is None else share(accuracy)
            found.append(_Node(name, said, fill, 50 + across * x, 50 + down * y, side))
        return found

    def _table(self) -> PageTable:
        rows = []
        for i, (name, accuracy) in enumerate(zip(self.learners, self.accuracies, strict=True)):
            both = [
                b if a == i else a for a, b in self.edges if i in (a, b) and not {(a, b), (b, a)} & set(self.one_way)
            ]
            to = sorted({*both, *(b for a, b in self.one_way if a == i)})
            heard = sorted({*both, *(a for a, b in self.one_way if b == i)})
            rows.append(
                (name, accuracy, *(", ".join(self.learners[k] for k in each) or "nobody" for each in (to, heard)))
            )
        heads = (Column("test accuracy", share), Column("speaks to", kind="long"), Column("hears", kind="long"))
        return PageTable(f"numbers-{self.name}", self.title, (Column("learner"), *heads), rows)
