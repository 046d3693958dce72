"""How started runs ended, against their coins: a run that fails, ends early or is never seen again says something, too.

Nothing about the end of a run may depend on its world but through what was said. A run is never left out because of its end:
what was heard of it counts with its loss, and ends are compared between the worlds by Fisher's exact test.

The coins come first. If there are many more started runs in one world than fair coins give, the ledger or the coin is at
fault, or captures were lost on purpose: the guesses are worth nothing, and say nothing against the learner either.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from sottovoce.arrays import IntArray
from sottovoce.auditing.levels import Test
from sottovoce.auditing.likelihood import Ratios
from sottovoce.optional import import_extra

UNDER_WAY = 1
"""Runs that an audit which is cut off can leave without a trace: it makes one after the other."""

WHOLE = "complete"
"""The outcome of a run of which all rounds were overheard."""


@dataclass(frozen=True, slots=True)
class Starts:
    """All runs that were started, and how they ended.

    Attributes:
        worlds: `(started,)` 0 or 1, what the coin of each run fell on.
        outcomes: of each, in a word or two; `WHOLE` if all is well.
        lost: losses of what was heard of those that are not whole, by pair of worlds; where the listener can know them.
        unknown: so many more were started, and nobody knows in which world: they left neither a capture nor a coin.
    """

    worlds: IntArray
    outcomes: tuple[str, ...]
    lost: Mapping[int, Ratios] = field(default_factory=dict)
    unknown: int = 0

    @property
    def balance(self) -> float:
        """How likely fair coins fall this unevenly, two-sided."""
        stats = import_extra("scipy.stats", "scipy", "an audit")
        return float(stats.binomtest(int(self.worlds.sum()), len(self.worlds)).pvalue) if len(self.worlds) else 1.0

    @property
    def counts(self) -> tuple[int, int]:
        """Started runs of either world."""
        seconds = int(self.worlds.sum())
        return len(self.worlds) - seconds, seconds

    def void(self, level: float) -> str:
        """Why the coins are none; empty where they may be fair ones.

        Args:
            level: with which probability fair coins may be taken for others.
        """
        if self.unknown > UNDER_WAY:
            return f"{self.unknown:,} started runs left neither a capture nor a coin: nobody knows in which world they were"
        if self.balance < level:
            first, second = self.counts
            return (
                f"{first:,} runs of the first world and {second:,} of the second are not what fair coins give "
                f"(p = {self.balance:.2g}): the coin or the ledger is at fault"
            )
        return ""

    def test(self, where: str = "") -> Test:
        """Do runs end alike in both worlds? The outcome that differs most, times the number of outcomes that are compared.

        Args:
            where: the place that the test names.
        """
        exact = import_extra("scipy.stats", "scipy", "an audit").fisher_exact
        tables = dict(self._tables())
        p_values = {name: float(exact(table).pvalue) for name, table in tables.items()}
        name = min(p_values, key=p_values.__getitem__, default="")
        (first, _), (second, _) = tables.get(name, ((0, 0), (0, 0)))
        ends = (
            f"{name} in {first} of {self.counts[0]} and {second} of {self.counts[1]} runs" if name else "all complete"
        )
        return Test(
            name="outcomes of runs",
            what=f"runs end alike in both worlds: {ends}",
            statistic=float(first - second),
            p_value=min(1.0, len(p_values) * p_values[name]) if name else 1.0,
            where=where,
            family="black box",
        )

    def _tables(self) -> Iterator[tuple[str, tuple[tuple[int, int], tuple[int, int]]]]:
        """Runs of the first and of the second world with this outcome, and without it."""
        counts = Counter(zip(self.outcomes, self.worlds.tolist(), strict=True))
        names = sorted(set(self.outcomes) - {WHOLE})
        for name in names:
            yield name, self._table(counts[name, 0], counts[name, 1])
        if len(names) > 1:
            first, second = (total - counts[WHOLE, world] for world, total in enumerate(self.counts))
            yield "not complete", self._table(first, second)

    def _table(self, first: int, second: int) -> tuple[tuple[int, int], tuple[int, int]]:
        return (first, self.counts[0] - first), (second, self.counts[1] - second)
