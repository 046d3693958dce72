"""After which rounds a run is looked at, beside a few times a second: so that curves of a short run have points, too. Pure."""

from __future__ import annotations

EVERY = 8


def next_look(rounds: int, learners: int) -> int:
    """The number of rounds after which the next look is due, where the last one was after `rounds`.

    Looks are ever further apart, by an eighth of all rounds so far. So of T rounds about `20 + 8 ln(T / 20)` are looked at (20
    of 25, 46 of 500, 85 of 50,000), and what looks cost a round vanishes. Of many learners the first looks are further
    apart, too: all of them together tell at most about eight times a round.

    >>> next_look(3, 5), next_look(400, 5), next_look(3, 800)
    (4, 450, 103)
    """
    return rounds + max(1, rounds // EVERY, learners // EVERY)
