"""A learner's stream to its coordinator: it joins as itself, hears what to do, reports, and comes back when that breaks."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import structlog

from sottovoce_core.errors import FailedPrecondition, RemoteProtocolError, Unavailable
from sottovoce_core.runs.policy import extract_identity_names
from sottovoce_learner.config import LearnerConfig
from sottovoce_learner.session import Session
from sottovoce_learner.storage.state_folder import StoreIdentity
from sottovoce_rpc import commands, principals
from sottovoce_rpc.commands import Command, command_from_wire
from sottovoce_rpc.error_status import CallOutcome, convert_status_error
from sottovoce_rpc.server import HELLO_TIMEOUT_S, open_channel, wait_until_reachable
from sottovoce_rpc.tasks import notify_if_slow, run_in_background
from sottovoce_wire.v1 import coordinator_pb2, coordinator_pb2_grpc

log = structlog.get_logger()

REPORT_INTERVAL_S, _MAX_REPORTS_PER_S = 0.25, 500
"""Between two reports of a learner that nothing hangs on; and of all learners of a run, so many a second."""
_MIN_REJOIN_PAUSE_S, _MAX_REJOIN_PAUSE_S = 0.5, 10.0
"""Between two attempts to join: the first pause, and the longest: a run that is started waits twice as long for its learners."""
_JITTER = secrets.SystemRandom()

_JoinCall = grpc.aio.StreamStreamCall[coordinator_pb2.LearnerMessage, coordinator_pb2.Command]


class CoordinatorClient:
    """Follows the coordinator of one learner.

    Args:
        config: of the learner.
        session: its run of now.
        known: what it tells of its run when it joins.
        obey: does what a directive of a run says.
        report: what there is to report now.
        changed: set when it is to be reported at once.
    """

    def __init__(
        self,
        config: LearnerConfig,
        session: Callable[[], Session | None],
        known: Callable[[], Awaitable[dict[str, Any]]],
        obey: Callable[[str, Command | None], Awaitable[None]],
        report: Callable[[], coordinator_pb2.LearnerMessage],
        changed: asyncio.Event,
    ) -> None:
        self._config, self._session, self._known, self._obey = config, session, known, obey
        self._report, self._changed = report, changed
        self.identity = StoreIdentity(config.name, b"")  # until the state folder is claimed
        self._confirmed = False  # this process is that incarnation
        self._origin = commands.Origin()  # whom it obeys
        self.join_count, self.is_joined = 0, False
        """So often it was let in, and is."""
        self._left_in: int | None = None  # rounds that it had done when it last heard what to do in its run
        self._why_away, self._told = "", False

    @property
    def connection_problem(self) -> str:
        """In words, that it has no coordinator now, since when, and what it waits for; empty: it has one."""
        if self.is_joined:
            return ""
        session, why = self._session(), self._why_away or f"that at {self._config.coordinator} has not answered yet"
        if not self.join_count:
            return f"no coordinator has let it in yet: {why}"
        since = "" if self._left_in is None else f" since round {self._left_in}"
        lacks = "" if session is None or session.lifecycle.has_ended else session.wait_tracker.describe()
        return f"it has not heard its coordinator{since}: {why}{f'; it waits for {lacks}' if lacks else ''}"

    def _is_away(self, why: str) -> None:
        self._why_away = why
        log.warning("coordinator away", reason=why)

    @property
    def term(self) -> int:
        """Of the coordinator that it obeys; 0: that one remembers nothing."""
        return self._origin.term

    async def follow(self, address: str) -> None:
        """Follow the coordinator for ever; it may come back after having been away.

        Args:
            address: of the learner, for others.

        Raises:
            Unavailable: it could not be reached in the first place.
        """
        trusted = await self._reach()
        attempts = 0
        while True:
            joined = self.join_count
            async with self._to_coordinator(trusted[0]) as to:  # a new one: an old one waits ever longer by itself
                await self._follow_once(coordinator_pb2_grpc.CoordinatorStub(to), address)
            if self.join_count > joined:
                attempts = 0
            else:
                attempts += 1
                trusted.rotate(-1)
            await asyncio.sleep(self._pause(attempts))

    async def _reach(self) -> deque[str]:
        """Wait for a coordinator that its owner trusts; returns the names of all, that one's first.

        Raises:
            Unavailable: none is there.
        """
        trusted, at = deque(extract_identity_names(self._config.policy.coordinators)), self._config.coordinator
        for left in reversed(range(len(trusted))):
            who = f"coordinator/{trusted[0]}, whom its owner trusts," if trusted[0] else "the coordinator"
            try:
                async with self._to_coordinator(trusted[0]) as to, notify_if_slow(self._wonder):
                    await wait_until_reachable(
                        to, f"{who} at {at}", self._config.join_timeout_s / len(trusted), self._unreached
                    )
                    break
            except Unavailable:
                if not left:
                    raise
            trusted.rotate(-1)
        return trusted

    async def _wonder(self) -> None:
        if not self._told:  # else it was told at once
            self._tell("is it running, and is the address right?")

    def _unreached(self, why: str, lasting: bool) -> None:
        """Told why, at once where waiting alone does not mend it."""
        self._why_away = f"that at {self._config.coordinator}: {why}"
        if lasting:
            self._told = True
            self._tell(why)

    def _tell(self, why: str) -> None:
        at, seconds = self._config.coordinator, self._config.join_timeout_s
        log.warning("waiting for the coordinator", at=at, for_s=seconds, why=why)

    def _to_coordinator(self, name: str) -> grpc.aio.Channel:
        """To the coordinator of a name, or to any."""
        own = self._config
        return open_channel(own.coordinator, principals.Role.COORDINATOR, name, credentials=own.credentials)

    def _pause(self, attempts: int) -> float:
        """Seconds until the next attempt to join: longer each time, never as long as a run's deadline, and not all at once."""
        longest, session = _MAX_REJOIN_PAUSE_S, self._session()
        if session is not None and not session.lifecycle.has_ended:
            longest = min(longest, session.assignment.spec.clock.deadline_s / 4)
        return _JITTER.uniform(0.5, 1.0) * min(_MIN_REJOIN_PAUSE_S * 2.0**attempts, longest)

    async def _follow_once(self, stub: coordinator_pb2_grpc.CoordinatorAsyncStub, address: str) -> None:
        """Join, and obey until the stream of directives ends."""
        call = stub.Join()
        ending, heard = CallOutcome(call), False
        try:
            await self._join(call, address)
            self.join_count, self.is_joined = self.join_count + 1, True
            async with run_in_background(self._reports(call)):
                while (said := await _told(call)) is not None:
                    self._require_newest(said)
                    heard = True
                    self._coordinated(away=False)  # whoever leads it is back
                    await self._obey(said.run_id, command_from_wire(said))
        except Unavailable as error:
            self._is_away(str(error))
        except asyncio.InvalidStateError:  # it broke while something was being written; the next attempt says why
            self._is_away("the stream broke")
        except grpc.aio.AioRpcError:
            status = await ending.wait_for_status()
            refusal = convert_status_error(status, f"the coordinator at {self._config.coordinator}")
            # Its end in the middle of a report is none to end here, nor is a bug over there: runs of other operators may come.
            if not isinstance(refusal, Unavailable) and status.code() not in (
                grpc.StatusCode.OK,
                grpc.StatusCode.INTERNAL,
            ):
                raise refusal from None
            self._is_away(str(refusal))
        finally:
            self.is_joined, session = False, self._session()
            if heard:
                self._left_in = (
                    None if session is None or session.lifecycle.has_ended else session.state_machine.rounds_done
                )
            call.cancel()
            if self.term:  # without a memory it cannot go on with the run
                self._coordinated(away=True)

    def _coordinated(self, *, away: bool) -> None:
        if (session := self._session()) is not None:
            session.wait_tracker.set_coordinator_away(is_away=away)

    def _require_newest(self, said: coordinator_pb2.Command) -> None:
        """As long as it is in a run, a learner obeys who led it, and who has taken that one's place.

        Raises:
            Unavailable: this is an older coordinator, or a second one.
        """
        origin, session = commands.Origin(said.term, said.nonce), self._session()
        if session is not None and not session.lifecycle.has_ended:
            self._origin.require_newest(origin)
        self._origin = origin

    async def _join(self, call: _JoinCall, address: str) -> None:
        """Introduce ourselves and be let in: with a new incarnation, written and confirmed, or with that of this process.

        Only then may this learner greet a neighbour or speak.

        Raises:
            RemoteProtocolError: the coordinator says something else first.
            Unavailable: it says nothing: is it older than this learner?
            FailedPrecondition: the state folder cannot be written.
        """
        pb, own = coordinator_pb2, self.identity
        introduction = pb.Introduction(
            learner=own.learner,
            address=address,
            store_id=own.store_id,
            incarnation=own.incarnation,
            is_reconnect=self._confirmed,
            accepts_network_hash=True,
            **await self._known(),
        )
        await call.write(pb.LearnerMessage(introduction=introduction))
        told = await _answer(call)
        if isinstance(told, pb.IncarnationIssued) and not self._confirmed:
            try:
                self.identity = own.write_incarnation(told.incarnation, self._config.state_folder)
            except OSError as error:
                raise FailedPrecondition(f"the state folder cannot be written: {error.strerror}") from None
            await call.write(pb.LearnerMessage(incarnation_stored=pb.IncarnationStored(incarnation=told.incarnation)))
            told = await _answer(call)
        if told != pb.IncarnationConfirmed(incarnation=self.identity.incarnation):
            raise RemoteProtocolError(
                f"the coordinator must confirm incarnation {self.identity.incarnation}, got {told}"
            )
        self._confirmed = True

    async def _reports(self, call: _JoinCall) -> None:
        """Say how far we are, when it matters for the clock and a few times a second.

        A stream that breaks is noticed by whoever reads it, so here it just ends.
        """
        last = None
        with contextlib.suppress(grpc.RpcError, grpc.aio.BaseError, grpc.aio.UsageError, asyncio.InvalidStateError):
            while True:
                if (now := self._report()) != last:
                    await call.write(now)
                    last = now
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._report_s):
                        await self._changed.wait()
                self._changed.clear()

    @property
    def _report_s(self) -> float:
        """Between reports that the clock does not need: what a coordinator hears of a run does not grow with its learners."""
        session = self._session()
        learners = 0 if session is None else session.assignment.spec.n_learners
        return max(REPORT_INTERVAL_S, learners / _MAX_REPORTS_PER_S)


async def _told(call: _JoinCall) -> coordinator_pb2.Command | None:
    """The next directive; None: the stream has ended well."""
    said = await call.read()
    return said if isinstance(said, coordinator_pb2.Command) else None


async def _answer(call: _JoinCall) -> Command | None:
    """What a coordinator says to an introduction, or to a confirmation."""
    try:
        async with asyncio.timeout(HELLO_TIMEOUT_S):
            said = await _told(call)
    except TimeoutError:
        raise Unavailable(
            f"the coordinator does not answer within {HELLO_TIMEOUT_S:g} s: is it older than this learner?"
        ) from None
    if said is None:
        raise Unavailable("the coordinator ended the stream without a word")
    return command_from_wire(said)
