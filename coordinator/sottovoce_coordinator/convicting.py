"""Who is to leave a run for what others say of it. Pure.

Nothing proves what a learner says of its neighbour: no message comes by here, and either of the two may lie. So one voice
counts for nothing, and several only where they are most of those who can tell. Whoever accuses falsely and alone moves nobody.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

LEAST = 2
"""Voices without which nobody leaves."""


def convicted(accusations: Iterable[tuple[int, int]], neighbours: Sequence[Collection[int]]) -> frozenset[int]:
    """Indices of those whom more than half of their neighbours accuse, and at least `LEAST`.

    Args:
        accusations: who accuses whom.
        neighbours: by index, those of a learner who are still in the run: nobody else has a voice.
    """
    against: dict[int, set[int]] = {}
    for by, whom in accusations:
        if by in neighbours[whom]:
            against.setdefault(whom, set()).add(by)
    return frozenset(
        i for i, voices in against.items() if len(voices) >= LEAST and 2 * len(voices) > len(neighbours[i])
    )
