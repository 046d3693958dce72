"""Who may be a learner: state folders and incarnations. Pure.

A name is bound to the state folder (store) that was first confirmed under it. Each start of a learner gets the next
incarnation, in two steps: it is issued, the learner writes it to its folder and confirms, and only then does it count. A death
in between is harmless. A number is never issued twice, so two processes never have the same one, and the lower is refused.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from sottovoce.errors import NotReady, RemoteProtocolError, StrangerError, Unavailable

STORE_BYTES = 16
MOST_STARTS = 2**32
"""That anything can have had: a learner may tell whatever it likes, and its next starts need higher numbers."""


@dataclass(frozen=True, slots=True)
class Claim:
    """What a learner says of itself when it joins.

    Attributes:
        name, store: whose it is, and the number of its state folder.
        incarnation: the highest that the folder knows.
        rejoins: it is this process's own, confirmed: only the stream broke.
        journaled: rounds that it has journaled in the run that is under way; None: it is in none, or in another.
    """

    name: str
    store: bytes
    incarnation: int = 0
    rejoins: bool = False
    journaled: int | None = None

    def __post_init__(self) -> None:
        if len(self.store) != STORE_BYTES:
            raise RemoteProtocolError(
                f"a learner must say which state folder it speaks from, in {STORE_BYTES} bytes, got {len(self.store)}: "
                "is it older than its coordinator?"
            )


@dataclass(frozen=True, slots=True)
class Membership:
    """What is known of a learner.

    Attributes:
        store: the number of the state folder that joined last; the name is bound to it once an incarnation is confirmed.
        issued, confirmed: the last incarnations; 0: none.
    """

    store: bytes = b""
    issued: int = 0
    confirmed: int = 0

    def admit(self, claim: Claim, *, live: bool, journaled: int = 0) -> Membership:
        """The membership with which a learner is let in: `issued` is its incarnation, to be confirmed unless it rejoins.

        Args:
            claim: what it says.
            live: a stream of a learner of this name is there.
            journaled: rounds of the run under way that it is known to have journaled.

        Raises:
            RemoteProtocolError: nothing was started as often as it says.
            StrangerError: it has another state folder.
            Unavailable: the learner is here already; if it has died, that will be noticed.
            NotReady: its state is an old one, or it is an old process.
        """
        name = claim.name
        if claim.incarnation > (most := max(self.issued, MOST_STARTS)):  # by a coordinator of before, maybe
            raise RemoteProtocolError(
                f"an incarnation is one more at each start of a learner, at most {most}, got {claim.incarnation}"
            )
        if self.confirmed and claim.store != self.store:
            raise StrangerError(
                f"learner {name!r} has joined with another state folder than this one: start it on that folder, or take "
                f"another name; if the folder is lost, `sottovoce rebind {name}` lets this one take its place"
            )
        if claim.rejoins:
            return self._back(claim)
        if live:
            raise Unavailable(f"learner {name!r} is here already: stop the other process, or take another name")
        if claim.incarnation < self.confirmed or (claim.journaled is not None and claim.journaled < journaled):
            raise NotReady(
                f"the state folder of learner {name!r} is an old one: it knows incarnation {claim.incarnation} and "
                f"{claim.journaled or 0} rounds, and must know {self.confirmed} and {journaled}. It would say rounds again "
                "with other noise: restore the newest state"
            )
        if claim.journaled is None and journaled:
            raise NotReady(
                f"the state folder of learner {name!r} has no log of the run that this learner is in, and {journaled} rounds "
                "were said in it: it would say them again with other noise. Restore the newest state; where the log is lost, or "
                f"the ledger was repaired, let the run go on without this learner (`sottovoce runs leave RUN {name}`), or stop it"
            )
        return replace(self, store=claim.store, issued=max(self.issued, claim.incarnation) + 1)

    def _back(self, claim: Claim) -> Membership:
        """Of a process that never stopped; what a coordinator without a memory has forgotten, the learner knows."""
        if claim.incarnation < self.issued:
            raise NotReady(
                f"learner {claim.name!r} has been started again as incarnation {self.issued}: this process, "
                f"{claim.incarnation}, is an old one and ends"
            )
        return Membership(claim.store, claim.incarnation, claim.incarnation)

    def confirm(self, claim: Claim, incarnation: int) -> Membership:
        """The membership of a learner that has written its incarnation.

        Raises:
            NotReady: another one was issued since.
        """
        if (claim.store, incarnation) != (self.store, self.issued):
            raise NotReady(
                f"learner {claim.name!r} must confirm incarnation {self.issued}, got {incarnation}: it was started twice"
            )
        return replace(self, confirmed=incarnation)

    def unbound(self) -> Membership:
        """The next state folder of this name is taken, whatever it knows; numbers go on."""
        return Membership(issued=self.issued)
