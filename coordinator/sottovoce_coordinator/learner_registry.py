"""Registry of learners: admits them, tracks which are connected, and queues commands for them."""

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
"""Maximum number of characters of a learner's address: a host name has at most 253."""
MAX_CONNECTED_LEARNERS, MAX_KNOWN_LEARNERS = 4_096, 65_536
"""Maximum numbers of connected learners, and of names that ever joined, which are stored for ever."""
_MAX_QUEUED_COMMANDS = 131_072
"""Maximum number of queued commands for a learner: twice what is announced at a time if the network changes."""

Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(slots=True)
class JoinedLearner:
    """A learner that has joined, with the commands queued for it.

    Attributes:
        introduction: first message of its stream.
        claim: the part of it that decides on its admission.
        origin: origin of the commands for this learner.
        commands: queued commands; None ends the stream.
        displacement: set when a newer stream of the same process has replaced this one.
    """

    introduction: coordinator_pb2.Introduction
    claim: Claim
    origin: Origin
    # Encoded when they are sent: encoding many at once would delay other learners.
    commands: asyncio.Queue[tuple[str, Command, Origin] | None] = field(default_factory=asyncio.Queue)
    displacement: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def name(self) -> str:
        """Name of the learner."""
        return self.introduction.learner

    def enqueue_command(self, run_id: str, command: Command) -> None:
        """Queue a command; the stream of a learner that does not read ends."""
        if self.commands.qsize() >= _MAX_QUEUED_COMMANDS:
            self.displacement.set()
            return
        self.commands.put_nowait((run_id, command, self.origin))

    async def send_commands(self, context: Context) -> None:
        """Send queued commands as they come.

        Raises:
            Unavailable: the coordinator stops.
        """
        while (command := await self.commands.get()) is not None:
            await context.write(command_to_wire(*command))
        raise Unavailable("the coordinator is stopping")

    async def wait_until_displaced(self) -> None:
        """Wait until a newer stream of the same learner replaces this one.

        Raises:
            Unavailable: it has.
        """
        await self.displacement.wait()
        raise Unavailable(f"another stream of learner {self.name} took the place of this one")


class LearnerRegistry:
    """Connected learners, and the state-folder binding of each that ever joined.

    Args:
        store: durable store of the bindings.
    """

    def __init__(self, store: CoordinatorStore) -> None:
        self._store = store
        self._bindings = store.load_learners()
        self._connected: dict[str, JoinedLearner] = {}
        self._last: dict[str, JoinedLearner] = {}  # last introduction of each, connected or not
        self._changed = asyncio.Condition()
        self.epoch_count = 0
        """Number of topology epochs sent."""

    def __contains__(self, name: object) -> bool:
        return name in self._connected

    def __len__(self) -> int:
        return len(self._connected)

    def get(self, name: str) -> JoinedLearner:
        """Return a connected learner."""
        return self._connected[name]

    async def admit(
        self,
        member: JoinedLearner,
        events: AsyncIterator[coordinator_pb2.LearnerMessage],
        context: Context,
        *,
        rounds_committed: int,
    ) -> None:
        """Admit a learner: with a new incarnation that it confirms, or with the current one of a process that never stopped.

        Args:
            member: the learner.
            events, context: its stream.
            rounds_committed: rounds of the active run that it is known to have committed.

        Raises:
            SottovoceError: it is not admitted.
        """
        self._require_capacity(member.name)
        claim, binding = member.claim, self._bindings.get(member.name, LearnerBinding())
        now = binding.admit(claim, is_connected=member.name in self._connected, rounds_committed=rounds_committed)
        self._save_binding(member.name, now)
        if not claim.is_rejoin:
            await context.write(
                command_to_wire(
                    "", coordinator_pb2.IncarnationIssued(incarnation=now.issued_incarnation), member.origin
                )
            )
            event = await _read_message(events, "a confirmation")
            if event is None or event.WhichOneof("message") != "incarnation_stored":
                raise RemoteProtocolError("a learner must confirm the incarnation that it was issued")
            now = self._bindings[member.name].confirm(claim, event.incarnation_stored.incarnation)
            self._save_binding(member.name, now)
        member.enqueue_command("", coordinator_pb2.IncarnationConfirmed(incarnation=now.confirmed_incarnation))

    def _require_capacity(self, name: str) -> None:
        """Refuse a learner beyond the limits of a coordinator.

        Raises:
            LimitReached: a limit is reached.
        """
        if name not in self._connected and len(self._connected) >= MAX_CONNECTED_LEARNERS:
            raise LimitReached(
                f"a coordinator serves at most {MAX_CONNECTED_LEARNERS} learners at a time: let this one join another"
            )
        if name not in self._bindings and len(self._bindings) >= MAX_KNOWN_LEARNERS:
            raise LimitReached(
                f"a coordinator knows at most {MAX_KNOWN_LEARNERS} learners by name: start another, on another state folder"
            )

    def unbind(self, name: str) -> None:
        """Unbind a name from its state folder, so that the next learner of this name may have any.

        Raises:
            SpecError: the name is empty.
            NotFound: no learner of this name has joined.
            FailedPrecondition: it is connected.
        """
        require_learner_name(name)
        if name not in self._bindings:
            known = (
                f"those that have are {abbreviate_names(sorted(self._bindings))}"
                if self._bindings
                else "no learner has yet"
            )
            raise NotFound(f"learner {name!r} has never joined this coordinator; {known}")
        if name in self._connected:
            raise FailedPrecondition(f"learner {name!r} is connected, with the state folder that it has: stop it first")
        self._save_binding(name, self._bindings[name].unbind())

    def _save_binding(self, name: str, binding: LearnerBinding) -> None:
        """Store a binding durably, before it is sent."""
        self._store.save_learner(name, binding)
        self._bindings[name] = binding

    def add(self, member: JoinedLearner) -> None:
        """Mark a learner as connected; an older stream of the same process ends."""
        before, member.origin = self._connected.get(member.name), self._store.origin
        self._connected[member.name] = self._last[member.name] = member
        if before is not None:
            before.displacement.set()

    async def notify_waiters(self) -> None:
        """Wake all calls that wait for learners."""
        async with self._changed:
            self._changed.notify_all()

    def remove(self, member: JoinedLearner) -> bool:
        """Mark a learner as disconnected when its stream has ended; return False if a newer stream has replaced it."""
        if self._connected.get(member.name) is not member:
            return False
        del self._connected[member.name]
        return True

    def enqueue_commands(self, run_id: str, commands: Mapping[str, Sequence[Command]]) -> None:
        """Queue commands by learner; a disconnected one gets the current ones when it joins again."""
        for name, own in commands.items():
            if name in self._connected:
                for command in own:
                    self.epoch_count += isinstance(command, coordinator_pb2.TopologyEpoch)
                    self._connected[name].enqueue_command(run_id, command)

    def end_streams(self) -> None:
        """End all streams after their queued commands."""
        for member in self._connected.values():
            member.commands.put_nowait(None)

    async def wait_until_joined(self, names: Sequence[str], seconds: float, notify: NotifyWait) -> None:
        """Wait for learners.

        Args:
            names: their names.
            seconds: time limit.
            notify: called with the missing ones if it takes long.

        Raises:
            FailedPrecondition: not all of them have joined in time.
        """
        await self._wait_for_all(lambda: self._find_missing(names), names, seconds, notify)

    async def wait_until_reintroduced(
        self, names: Sequence[str], seconds: float, notify: NotifyWait
    ) -> list[JoinedLearner]:
        """Wait for new introductions of learners. One that obeys another coordinator does not stay, but joins repeatedly.

        Args:
            names, seconds, notify: as of `wait_until_joined`.

        Raises:
            FailedPrecondition: not all of them have joined in time.
        """
        before = dict(self._last)

        def find_absent() -> list[str]:
            return [name for name in self._find_missing(names) if self._last.get(name) is before.get(name)]

        await self._wait_for_all(find_absent, names, seconds, notify)
        return [self._last[name] for name in names]

    async def _wait_for_all(
        self, find_absent: Callable[[], list[str]], names: Sequence[str], seconds: float, notify: NotifyWait
    ) -> None:
        def describe_others() -> str:
            found = sorted(set(self._connected) - set(names))
            return f" Others have joined: {abbreviate_names(found)}." if found else ""

        async def notify_absent() -> None:
            hint = "is each started, under the name that the spec has, with the address of this coordinator?"
            await notify(f"{abbreviate_names(find_absent())}: not joined yet; {hint}{describe_others()}")

        async with notify_if_slow(notify_absent), self._changed:
            try:
                async with asyncio.timeout(seconds):
                    await self._changed.wait_for(lambda: not find_absent())
            except TimeoutError:
                gone = find_absent()
                raise FailedPrecondition(
                    f"{len(gone)} of {len(names)} learners have not joined: {abbreviate_names(gone)}.{describe_others()} Start "
                    "each "
                    "under the name that the spec has, with the address of this coordinator"
                ) from None

    def outrank(self, term: int) -> None:
        """Take a later term than this one, and use it for all later commands."""
        self._store.outrank(term)
        for member in self._connected.values():
            member.origin = self._store.origin

    def require_joined(self, names: Sequence[str]) -> None:
        """Require that learners are still connected.

        Raises:
            FailedPrecondition: some are not.
        """
        if absent := self._find_missing(names):
            raise FailedPrecondition(f"learners have left: {abbreviate_names(absent)}")

    def _find_missing(self, names: Sequence[str]) -> list[str]:
        return [name for name in names if name not in self._connected]


def require_learner_name(learner: str) -> None:
    """Require a name in a request about a learner.

    Raises:
        SpecError: it is empty.
    """
    if not learner:
        raise SpecError("a learner's name is required, got none")


async def read_introduction(
    events: AsyncIterator[coordinator_pb2.LearnerMessage], origin: Origin, caller: Principal | None = None
) -> JoinedLearner:
    """Read the introduction of a learner that opened a stream.

    Args:
        events: messages of the stream.
        origin: origin of this coordinator's commands.
        caller: principal of its certificate, if it has one.

    Raises:
        PermissionDenied: the certificate names another learner.
        RemoteProtocolError: the first message is no introduction, or has an invalid name or address.
    """
    first = await _read_message(events, "an introduction")
    if first is None or first.WhichOneof("message") != "introduction" or not first.introduction.learner:
        raise RemoteProtocolError("a learner must introduce itself first, by its name")
    name, address = first.introduction.learner, first.introduction.address
    if re.fullmatch(LEARNER_NAME_PATTERN, name) is None:
        raise RemoteProtocolError(f"a learner's name must be {LEARNER_NAME_RULE}, got {name[:80]!r}")
    if caller is not None and not caller.is_one_of(f"{Role.LEARNER}/{name}"):
        raise PermissionDenied(f"{caller} must join as itself, got {name!r}")
    if len(address) > _MAX_ADDRESS_CHARS:
        raise RemoteProtocolError(f"an address must have at most {_MAX_ADDRESS_CHARS} characters, got {len(address)}")
    introduction = first.introduction
    rounds_committed = introduction.rounds_committed if introduction.run_id else None
    claim = Claim(name, introduction.store_id, introduction.incarnation, introduction.is_reconnect, rounds_committed)
    if introduction.term > MAX_INCARNATION:
        raise RemoteProtocolError(
            f"a term is one more at each start of a coordinator, at most {MAX_INCARNATION}, got {introduction.term}"
        )
    return JoinedLearner(introduction, claim, origin)


async def _read_message(
    events: AsyncIterator[coordinator_pb2.LearnerMessage], what: str
) -> coordinator_pb2.LearnerMessage | None:
    """Read the next message of a learner; None at the end of its stream.

    Raises:
        RemoteProtocolError: it takes too long.
    """
    try:
        async with asyncio.timeout(HELLO_TIMEOUT_S):
            return await anext(aiter(events), None)
    except TimeoutError:
        raise RemoteProtocolError(f"expected {what} within {HELLO_TIMEOUT_S:g} s, got nothing") from None
