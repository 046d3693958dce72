"""Learners at the door: who they are, whether they are let in, who is here, and what is on its way to them."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc

from sottovoce_coordinator.store import MAX_INCARNATION, Claim, CoordinatorStore, LearnerBinding
from sottovoce_core.errors import (
    FailedPrecondition,
    LimitReached,
    NotFound,
    PermissionDenied,
    RemoteProtocolError,
    SpecError,
    Unavailable,
)
from sottovoce_core.spec import LEARNER_NAME_PATTERN, LEARNER_NAME_RULE
from sottovoce_core.text import abbreviate_names
from sottovoce_rpc.commands import Command, Origin, command_to_wire
from sottovoce_rpc.principals import Principal, Role
from sottovoce_rpc.server import HELLO_TIMEOUT_S
from sottovoce_rpc.tasks import NotifyWait, notify_if_slow
from sottovoce_wire.v1 import coordinator_pb2

_MAX_ADDRESS_CHARS = 300
"""Characters of a learner's: a name of a host has at most 253."""
MAX_CONNECTED_LEARNERS, MAX_KNOWN_LEARNERS = 4_096, 65_536
"""Learners that are here, and names that ever joined: these are kept for good."""
_MAX_QUEUED_COMMANDS = 131_072
"""On their way to a learner: twice what is announced at a time where the network changes."""

Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(slots=True)
class JoinedLearner:
    """A learner that has joined, and the directives on their way to it.

    Attributes:
        said: how it introduced itself.
        claim: what of that decides whether it is let in.
        origin: of the coordinator, as it speaks to this learner.
        directives: what it is to be told.
        displaced: another stream of the same process has come.
    """

    introduction: coordinator_pb2.Introduction
    claim: Claim
    origin: Origin
    # Made a message when its turn comes: so many of them do not hold up everybody. None: that was the last one.
    commands: asyncio.Queue[tuple[str, Command, Origin] | None] = field(default_factory=asyncio.Queue)
    displacement: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def name(self) -> str:
        """The learner's."""
        return self.introduction.learner

    def enqueue_command(self, run_id: str, directive: Command) -> None:
        """Say something as soon as the stream allows; that of a learner which reads nothing ends."""
        if self.commands.qsize() >= _MAX_QUEUED_COMMANDS:
            self.displacement.set()
            return
        self.commands.put_nowait((run_id, directive, self.origin))

    async def send_commands(self, context: Context) -> None:
        """Send what it is to do, as it comes.

        Raises:
            Unavailable: that was all, for the coordinator ends.
        """
        while (directive := await self.commands.get()) is not None:
            await context.write(command_to_wire(*directive))
        raise Unavailable("the coordinator was told to end")

    async def wait_until_displaced(self) -> None:
        """Wait until another stream of the same process takes the place of this one, which it has given up.

        Raises:
            Unavailable: one has come.
        """
        await self.displacement.wait()
        raise Unavailable(f"another stream of learner {self.name} took the place of this one")


class LearnerRegistry:
    """The learners that are here, and what is known of all that ever joined.

    Args:
        store: where that is kept.
    """

    def __init__(self, store: CoordinatorStore) -> None:
        self._store = store
        self._known = store.load_learners()
        self._here: dict[str, JoinedLearner] = {}
        self._last: dict[str, JoinedLearner] = {}  # as they introduced themselves last, here or not
        self._changed = asyncio.Condition()
        self.epoch_count = 0
        """Topology epochs that were told."""

    def __contains__(self, name: object) -> bool:
        return name in self._here

    def __len__(self) -> int:
        return len(self._here)

    def get(self, name: str) -> JoinedLearner:
        """A learner that is here."""
        return self._here[name]

    async def admit(
        self,
        member: JoinedLearner,
        events: AsyncIterator[coordinator_pb2.LearnerMessage],
        context: Context,
        *,
        rounds_committed: int,
    ) -> None:
        """Let a learner in: with a new incarnation that it confirms, or with that of a process that never stopped.

        Args:
            member: the learner.
            events, context: what it says, and where it is answered.
            journaled: rounds of the run under way that it is known to have journaled.

        Raises:
            SottovoceError: it may not be this learner.
        """
        self._require_room(member.name)
        claim, known = member.claim, self._known.get(member.name, LearnerBinding())
        now = known.admit(claim, is_connected=member.name in self._here, rounds_committed=rounds_committed)
        self._remember(member.name, now)
        if not claim.is_rejoin:
            await context.write(
                command_to_wire(
                    "", coordinator_pb2.IncarnationIssued(incarnation=now.issued_incarnation), member.origin
                )
            )
            event = await _next(events, "a confirmation")
            if event is None or event.WhichOneof("message") != "incarnation_stored":
                raise RemoteProtocolError("a learner must confirm the incarnation that it was issued")
            now = self._known[member.name].confirm(claim, event.incarnation_stored.incarnation)
            self._remember(member.name, now)
        member.enqueue_command("", coordinator_pb2.IncarnationConfirmed(incarnation=now.confirmed_incarnation))

    def _require_room(self, name: str) -> None:
        """Refuse a learner beyond those that a coordinator serves.

        Raises:
            LimitReached: there are as many.
        """
        if name not in self._here and len(self._here) >= MAX_CONNECTED_LEARNERS:
            raise LimitReached(
                f"a coordinator serves at most {MAX_CONNECTED_LEARNERS} learners at a time: let this one join another"
            )
        if name not in self._known and len(self._known) >= MAX_KNOWN_LEARNERS:
            raise LimitReached(
                f"a coordinator knows at most {MAX_KNOWN_LEARNERS} learners by name: start another, on another state folder"
            )

    def unbind(self, name: str) -> None:
        """Take whatever state folder the next learner of this name has.

        Raises:
            SpecError: no name is given.
            NotFound: no learner of this name has joined.
            FailedPrecondition: it is here.
        """
        require_learner_name(name)
        if name not in self._known:
            known = (
                f"those that have are {abbreviate_names(sorted(self._known))}" if self._known else "no learner has yet"
            )
            raise NotFound(f"learner {name!r} has never joined this coordinator; {known}")
        if name in self._here:
            raise FailedPrecondition(f"learner {name!r} is here, with the state folder that it has: stop it first")
        self._remember(name, self._known[name].unbind())

    def _remember(self, name: str, known: LearnerBinding) -> None:
        """Durable before it is told."""
        self._store.save_learner(name, known)
        self._known[name] = known

    def add(self, member: JoinedLearner) -> None:
        """It is here from now on; another stream of the same process ends."""
        before, member.origin = self._here.get(member.name), self._store.origin
        self._here[member.name] = self._last[member.name] = member
        if before is not None:
            before.displacement.set()

    async def notify_waiters(self) -> None:
        """Whoever waits for learners looks again."""
        async with self._changed:
            self._changed.notify_all()

    def remove(self, member: JoinedLearner) -> bool:
        """Its stream has ended; True unless another one took its place."""
        if self._here.get(member.name) is not member:
            return False
        del self._here[member.name]
        return True

    def enqueue_commands(self, run_id: str, directives: Mapping[str, Sequence[Command]]) -> None:
        """Each learner its own; who is away is briefed when it joins again."""
        for name, own in directives.items():
            if name in self._here:
                for directive in own:
                    self.epoch_count += isinstance(directive, coordinator_pb2.TopologyEpoch)
                    self._here[name].enqueue_command(run_id, directive)

    def end_streams(self) -> None:
        """Tell all of them what is on its way, and nothing more."""
        for member in self._here.values():
            member.commands.put_nowait(None)

    async def wait_until_joined(self, names: Sequence[str], seconds: float, tell: NotifyWait) -> None:
        """Wait for learners.

        Args:
            names: of them.
            seconds: to wait.
            tell: whoever asked for them, who is missing.

        Raises:
            FailedPrecondition: not all of them have joined by then.
        """
        await self._until_none(lambda: self._missing(names), names, seconds, tell)

    async def wait_until_reintroduced(
        self, names: Sequence[str], seconds: float, tell: NotifyWait
    ) -> list[JoinedLearner]:
        """What learners tell of themselves. Whoever obeys another coordinator does not stay, but joins again and again.

        Args:
            names, seconds, tell: as of `until_here`.

        Raises:
            FailedPrecondition: not all of them were here by then.
        """
        before = dict(self._last)

        def absent() -> list[str]:
            return [name for name in self._missing(names) if self._last.get(name) is before.get(name)]

        await self._until_none(absent, names, seconds, tell)
        return [self._last[name] for name in names]

    async def _until_none(
        self, absent: Callable[[], list[str]], names: Sequence[str], seconds: float, tell: NotifyWait
    ) -> None:
        def others() -> str:
            found = sorted(set(self._here) - set(names))
            return f" Here are others: {abbreviate_names(found)}." if found else ""

        async def early() -> None:
            asked = "is each started, under the name that the spec has, with the address of this coordinator?"
            await tell(f"{abbreviate_names(absent())}: not joined yet; {asked}{others()}")

        async with notify_if_slow(early), self._changed:
            try:
                async with asyncio.timeout(seconds):
                    await self._changed.wait_for(lambda: not absent())
            except TimeoutError:
                gone = absent()
                raise FailedPrecondition(
                    f"{len(gone)} of {len(names)} learners have not joined: {abbreviate_names(gone)}.{others()} Start each under the "
                    "name that the spec has, with the address of this coordinator"
                ) from None

    def outrank(self, term: int) -> None:
        """Speak from now on as a coordinator of a later term than this one."""
        self._store.outrank(term)
        for member in self._here.values():
            member.origin = self._store.origin

    def require_joined(self, names: Sequence[str]) -> None:
        """Learners that were waited for have not left since.

        Raises:
            FailedPrecondition: some have.
        """
        if absent := self._missing(names):
            raise FailedPrecondition(f"learners have left: {abbreviate_names(absent)}")

    def _missing(self, names: Sequence[str]) -> list[str]:
        return [name for name in names if name not in self._here]


def require_learner_name(learner: str) -> None:
    """Refuse a request about a learner that names none.

    Raises:
        SpecError: it is empty.
    """
    if not learner:
        raise SpecError("a learner's name is required, got none")


async def read_introduction(
    events: AsyncIterator[coordinator_pb2.LearnerMessage], origin: Origin, caller: Principal | None = None
) -> JoinedLearner:
    """Who opened a stream.

    Args:
        events: what comes on it.
        origin: of this coordinator.
        caller: by its certificate, where it has shown one.

    Raises:
        PermissionDenied: somebody else, by its certificate.
        RemoteProtocolError: it does not say, or by a name or an address that is none.
    """
    first = await _next(events, "an introduction")
    if first is None or first.WhichOneof("message") != "introduction" or not first.introduction.learner:
        raise RemoteProtocolError("a learner must introduce itself first, by its name")
    name, address = first.introduction.learner, first.introduction.address
    if re.fullmatch(LEARNER_NAME_PATTERN, name) is None:
        raise RemoteProtocolError(f"a learner's name must be {LEARNER_NAME_RULE}, got {name[:80]!r}")
    if caller is not None and not caller.is_one_of(f"{Role.LEARNER}/{name}"):
        raise PermissionDenied(f"{caller} must join as itself, got {name!r}")
    if len(address) > _MAX_ADDRESS_CHARS:
        raise RemoteProtocolError(f"an address has at most {_MAX_ADDRESS_CHARS} characters, got {len(address)}")
    said = first.introduction
    journaled = said.rounds_committed if said.run_id else None
    claim = Claim(name, said.store_id, said.incarnation, said.is_reconnect, journaled)
    if said.term > MAX_INCARNATION:
        raise RemoteProtocolError(
            f"a term is one more at each start of a coordinator, at most {MAX_INCARNATION}, got {said.term}"
        )
    return JoinedLearner(said, claim, origin)


async def _next(
    events: AsyncIterator[coordinator_pb2.LearnerMessage], what: str
) -> coordinator_pb2.LearnerMessage | None:
    """What a learner says next; None: nothing more.

    Raises:
        RemoteProtocolError: it takes too long.
    """
    try:
        async with asyncio.timeout(HELLO_TIMEOUT_S):
            return await anext(aiter(events), None)
    except TimeoutError:
        raise RemoteProtocolError(f"expected {what} within {HELLO_TIMEOUT_S:g} s, got nothing") from None
