"""A learner process: it follows its coordinator from run to run, and serves whoever may ask it something (`face.py`)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TextIO

import grpc
import structlog

from sottovoce.errors import (
    DataError,
    NotReady,
    RemoteProtocolError,
    SottovoceError,
    SpecError,
    Unavailable,
)
from sottovoce.noise import KeyedNoise, Noise, OpenDpNoise, RecordedNoise, SystemNoise
from sottovoce.running.policy import accepted
from sottovoce.running.transcript import read_noise
from sottovoce.spec import parse_spec
from sottovoce_learner import exchange
from sottovoce_learner.config import LearnerConfig
from sottovoce_learner.face import NAME, Face
from sottovoce_learner.identity import Identity
from sottovoce_learner.mirror import Mirror
from sottovoce_learner.role import Role
from sottovoce_learner.session import Session
from sottovoce_learner.standing import Files, under_way
from sottovoce_learner.store import claim, end_run
from sottovoce_rpc import directives, principals
from sottovoce_rpc.directives import Directive, Epoch, Grant, Neighbour, Stop, from_wire
from sottovoce_rpc.learner_status import LearnerState, LearnerStatus
from sottovoce_rpc.logs import failure
from sottovoce_rpc.misconduct import Misconduct
from sottovoce_rpc.private import tell_if_open
from sottovoce_rpc.server import HELLO_S, Service, announce, channel, reach, serve_until_stopped, start_server
from sottovoce_rpc.specs import document_from_wire, plan_hash, require_run_id
from sottovoce_rpc.status import Ending, as_error
from sottovoce_rpc.tasks import Tasks, beside, drained
from sottovoce_rpc.waiting import Waiting
from sottovoce_wire.v1 import coordinator_pb2, coordinator_pb2_grpc

log = structlog.get_logger()

REPORT_S = 0.25
_REJOIN_S, _LONGEST_REJOIN_S = 0.5, 10.0
"""Between two attempts to join: the first pause, and the longest: a run that is started waits twice as long for its learners."""
_JITTER = secrets.SystemRandom()
FLUSH_S = 1.0
_LONGEST_RUN_ID = 128

_JoinCall = grpc.aio.StreamStreamCall[coordinator_pb2.Event, coordinator_pb2.Directive]


class Learner:
    """A learner process: serves its neighbours and its owner, follows its coordinator."""

    def __init__(self, config: LearnerConfig) -> None:
        config.check()
        self.config = config
        self._noise_fields = None if config.recorded_noise is None else read_noise(config.recorded_noise)
        self._sampler = OpenDpNoise() if config.noise == "opendp" else SystemNoise()
        self._session: Session | None = None
        self._refused: tuple[str, str] | None = None  # run, and why it could not be followed
        self._attempt = 0  # at the run that it was assigned to last
        self._stopped = ""  # run that it was told to end, until it is told to prepare for one again
        self._over = ""  # run that nobody goes on with, until its log is deleted
        self._changed = asyncio.Event()  # there is something to report
        self._rounds, self._channels, self._copying = Tasks(), Tasks(), Tasks()
        self._opened: dict[
            int, tuple[str, asyncio.Task[None] | None]
        ] = {}  # streams to neighbours, and where they lead
        self._mirror: Mirror | None = None
        self._claim: TextIO | None = None
        self._identity = Identity(config.name, b"")  # until the state folder is claimed
        self._confirmed = False  # this process is that incarnation
        self._origin = directives.Origin()  # whom it obeys
        self.face = Face(config, self.in_run, lambda: self.status)
        self.service: Service | None = None

    # ---- life ---------------------------------------------------------------------------------------------

    async def start(self) -> str:
        """Claim the state folder and listen; returns the address for others.

        Raises:
            NotReady: another process is this learner, its state folder cannot be written, or its identity is another one's.
            SpecError: other machines can reach the address, and it has no identity.
            DataError: its identity is damaged.
            Unavailable: the address cannot be listened on.
        """
        folder = self.config.state_folder
        self.config.credentials.require(principals.Role.LEARNER, self.config.name)
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # records lie below it
            held = claim(folder, self.config.name)
            try:
                self._identity = Identity.of(folder, self.config.name)
                with contextlib.suppress(DataError):  # a damaged folder is told to whoever starts a run
                    keep = self.config.keep_log
                    await asyncio.to_thread(
                        end_run, folder, self.config.name, keep_log=keep
                    )  # what a death has left of it
                self.service = await start_server(self.config.listen, self.face.add_to, [NAME], self.config.credentials)
            except BaseException:
                held.close()
                raise
        except OSError as error:
            raise NotReady(f"the state folder {folder} cannot be written: {error.strerror}") from None
        self._claim = held
        tell_if_open(folder, "state folder, and records lie in it")
        return self.config.advertise or self.service.address

    async def follow(self, address: str) -> None:
        """Follow the coordinator for ever; it may come back after having been away.

        Raises:
            Unavailable: it could not be reached in the first place.
        """
        trusted = await self._reach()
        attempts = 0
        while True:
            joined = asyncio.Event()
            async with self._to_coordinator(trusted[0]) as to:  # a new one: an old one waits ever longer by itself
                await self._follow_once(coordinator_pb2_grpc.CoordinatorStub(to), address, joined)
            if joined.is_set():
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
        trusted, at = deque(accepted(self.config.policy.coordinators)), self.config.coordinator
        for left in reversed(range(len(trusted))):
            who = f"coordinator/{trusted[0]}, whom its owner trusts," if trusted[0] else "the coordinator"
            try:
                async with self._to_coordinator(trusted[0]) as to:
                    await reach(to, f"{who} at {at}", self.config.join_timeout_s / len(trusted))
                    break
            except Unavailable:
                if not left:
                    raise
            trusted.rotate(-1)
        return trusted

    def _to_coordinator(self, name: str) -> grpc.aio.Channel:
        """To the coordinator of a name, or to any."""
        return channel(self.config.coordinator, principals.Role.COORDINATOR, name, credentials=self.config.credentials)

    def _pause(self, attempts: int) -> float:
        """Seconds until the next attempt to join: longer each time, never as long as a run's deadline, and not all at once."""
        longest = _LONGEST_REJOIN_S
        if self._session is not None and not self._session.ended:
            longest = min(longest, self._session.role.spec.clock.deadline_s / 4)
        return _JITTER.uniform(0.5, 1.0) * min(_REJOIN_S * 2.0**attempts, longest)

    async def _follow_once(
        self, stub: coordinator_pb2_grpc.CoordinatorAsyncStub, address: str, joined: asyncio.Event
    ) -> None:
        """Join, and obey until the stream of directives ends."""
        call = stub.Join()
        ending = Ending(call)
        try:
            await self._join(call, address)
            joined.set()
            async with beside(self._report(call)):
                while (said := await _told(call)) is not None:
                    self._require_newest(said)
                    if self._session is not None:  # whoever leads it is back
                        self._session.coordinated(away=False)
                    await self._obey_or_tell(said.run_id, from_wire(said))
        except Unavailable as error:
            log.warning("coordinator away", reason=str(error))
        except asyncio.InvalidStateError:  # it broke while something was being written; the next attempt says why
            log.warning("coordinator away", reason="the stream broke")
        except grpc.aio.AioRpcError:
            status = await ending.status()
            refusal = as_error(status, f"the coordinator at {self.config.coordinator}")
            # Its end in the middle of a report is none to end here, nor is a bug over there: runs of other operators may come.
            if not isinstance(refusal, Unavailable) and status.code() not in (
                grpc.StatusCode.OK,
                grpc.StatusCode.INTERNAL,
            ):
                raise refusal from None
            log.warning("coordinator away", reason=str(refusal))
        finally:
            call.cancel()
            if self._session is not None and self._origin.term:  # without a memory it cannot go on with the run
                self._session.coordinated(away=True)

    def _require_newest(self, said: coordinator_pb2.Directive) -> None:
        """As long as it is in a run, a learner obeys who led it, and who has taken that one's place.

        Raises:
            Unavailable: this is an older coordinator, or a second one.
        """
        origin = directives.Origin(said.term, said.nonce)
        if self._session is not None and not self._session.ended:
            self._origin.require_newest(origin)
        self._origin = origin

    async def stop(self) -> None:
        """Finish the message on its way, then end."""
        await self._end_run()
        await self._let_go()
        await self._copying.end()
        if self.service is not None:
            await self.service.stop()
        if self._claim is not None:
            self._claim.close()

    async def _join(self, call: _JoinCall, address: str) -> None:
        """Introduce ourselves and be let in: with a new incarnation, written and confirmed, or with that of this process.

        Only then may this learner greet a neighbour or speak.

        Raises:
            RemoteProtocolError: the coordinator says something else first.
            Unavailable: it says nothing: is it older than this learner?
            NotReady: the state folder cannot be written.
        """
        pb, own = coordinator_pb2, self._identity
        introduction = pb.Introduction(
            learner=own.learner,
            address=address,
            store=own.store,
            incarnation=own.incarnation,
            rejoins=self._confirmed,
            **await self._under_way(),
        )
        await call.write(pb.Event(introduction=introduction))
        told = await _answer(call)
        if isinstance(told, directives.Issued) and not self._confirmed:
            try:
                self._identity = own.issued(told.incarnation, self.config.state_folder)
            except OSError as error:
                raise NotReady(f"the state folder cannot be written: {error.strerror}") from None
            await call.write(pb.Event(confirmation=pb.Confirmation(incarnation=told.incarnation)))
            told = await _answer(call)
        if told != directives.Confirmed(self._identity.incarnation):
            raise RemoteProtocolError(
                f"the coordinator must confirm incarnation {self._identity.incarnation}, got {told}"
            )
        self._confirmed = True

    async def _under_way(self) -> dict[str, Any]:
        """How far it is in its run, for a coordinator that may know less of it, or more: then its state was set back."""
        session = self._session
        if session is not None and not session.silent:  # one that has finished may not have been told that all have
            role, said = session.role, session.status.rounds_said
            return {
                "run_id": role.run_id,
                "journaled": said,
                "granted": session.granted,
                "term": 0 if session.ended else self._origin.term,
                "attempt": self._attempt,
                "plan_hash": plan_hash(role.spec, role.n_features),
            }
        return await asyncio.to_thread(self._left_open)

    def _left_open(self) -> dict[str, Any]:
        """The same of the run whose log it has, where it has stopped, or is yet to go on with it."""
        try:
            found = under_way(Files(self.config.state_folder, self.config.name))
        except DataError:  # nothing is said from such a folder: a run is told so when it begins
            return {}
        if found is None:
            return {}
        line, closed = found
        known = {"run_id": line.run_id, "journaled": line.said, "attempt": self._attempt, "closed": closed}
        try:
            self.config.policy.require_code(json.loads(line.spec))
            spec = line.parsed(imports=self.config.allow_imports)
        except SpecError:  # it names code that may not be imported now
            return known
        return {**known, "plan_hash": plan_hash(spec, line.n_features)}

    # ---- the coordinator ----------------------------------------------------------------------------------

    async def _obey_or_tell(self, run_id: str, told: Directive | None) -> None:
        """A directive that cannot be followed fails the run, with the reason, and leaves the learner alive.

        Of that run only the end is obeyed from then on: what went wrong first is what its operator is told.
        """
        if (
            self._refused is not None
            and self._refused[0] == run_id
            and not (isinstance(told, Stop) or self._anew(run_id, told))
        ):
            return
        try:
            await self._obey(run_id, told)
        except SottovoceError as error:
            log.error("directive refused", run_id=run_id, reason=str(error), **failure(error))
            self._refuse(run_id, str(error))
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a run that does not fit this machine, or own code that a spec names
            what = failure(error)
            log.error("directive refused", run_id=run_id, **what)
            cause = getattr(error, "strerror", None) or "an internal error"  # the system's word on a file
            self._refuse(run_id, f"{cause}, {what['kind']}; the learner's log says where")

    def _refuse(self, run_id: str, detail: str) -> None:
        self._refused = (run_id[:_LONGEST_RUN_ID], detail)
        self._changed.set()

    @property
    def status(self) -> LearnerStatus:
        """How far it is in its run; a run that it refused is its run, too."""
        idle = LearnerStatus(self.config.name, state=LearnerState.IDLE)
        if self._refused is None:
            return idle if self._session is None else self._session.status
        run_id, detail = self._refused
        session = self._of_run(run_id)  # what it has said and spent until then
        return replace(
            idle if session is None else session.status, run_id=run_id, state=LearnerState.FAILED, detail=detail
        )

    def in_run(self) -> Session:
        """Its session in the run of now.

        Raises:
            NotReady: it is in none.
        """
        if self._session is None:
            raise NotReady("this learner is not in a run yet")
        return self._session

    @property
    def _waiting(self) -> Waiting | None:
        """What it waits for in its run."""
        return self._session.waiting if self._session is not None and self._refused is None else None

    @property
    def _misconduct(self) -> tuple[Misconduct, ...]:
        """What it has noticed of its neighbours in its run."""
        return () if self._session is None or self._refused is not None else self._session.misconduct

    async def _obey(self, run_id: str, told: Directive | None) -> None:
        session = self._of_run(run_id)
        match told:
            case directives.Assignment() if session is None or self._anew(run_id, told):
                # Else it is said again after a reconnect.
                await self._prepare(run_id, told)
            case Epoch() if session is not None:
                self._meet(session, told)
            case Grant(until_round) if session is not None:
                session.grant(until_round)
            case Stop(_, over):
                self._stopped, self._over = run_id, run_id if over else ""
                if session is not None:
                    await self._end_run()
                await self._let_go()

    def _anew(self, run_id: str, told: Directive | None) -> bool:
        """Is a run taken up again? Whatever became of it here, it goes on from the log, as after a death.

        Also in the same attempt, where a coordinator that did not know the run has ended it here, and knows it by now.
        """
        return isinstance(told, directives.Assignment) and (told.attempt > self._attempt or run_id == self._stopped)

    def _of_run(self, run_id: str) -> Session | None:
        session = self._session
        return session if session is not None and session.role.run_id == run_id else None

    async def _prepare(self, run_id: str, told: directives.Assignment) -> None:
        await self._end_run()
        self._attempt, self._stopped = told.attempt, ""
        role = _role(run_id, told, self._identity, self.config)
        to = accepted(self.config.policy.eavesdroppers)
        mirror = Mirror(run_id, told.index, told.mirror, self.config.credentials, to) if told.mirror else None
        if (before := self._of_run(run_id)) is not None:
            before.replaced.set()
        self._session = Session(
            role,
            self._noise(role),
            self.config.state_folder,
            mirror.copy if mirror else None,
            policy=self.config.policy,
            private=self.config.private,
            own_budget=self.config.own_budget,
            credentials=self.config.credentials,
            changed=self._changed,
            keep_log=self.config.keep_log,
        )
        self._mirror, self._refused = mirror, None

    def _noise(self, role: Role) -> Noise:
        index = role.index
        if self.config.noise_seed is not None:  # the name: a run's id is another each time
            return KeyedNoise(self.config.noise_seed, role.spec.name, index)
        if self._noise_fields is None:
            return self._sampler
        for name, values in self._noise_fields.items():
            if index >= values.shape[1]:
                raise SpecError(f"recorded noise of field {name!r} must cover learner {index}, got {values.shape[1]}")
        return RecordedNoise({name: values[:, index, 0] for name, values in self._noise_fields.items()})

    def _meet(self, session: Session, epoch: Epoch) -> None:
        begun = session.introduced
        session.announce(
            epoch.first_round,
            {neighbour.index: neighbour.weight for neighbour in epoch.neighbours},
            [neighbour.index for neighbour in epoch.neighbours if neighbour.told],
        )
        for neighbour in epoch.neighbours:
            if neighbour.index > session.role.index:
                self._open(session, neighbour)
        if begun:
            return
        if self._mirror is not None:
            self._copying.start(self._mirror.run(), "nothing more is mirrored")
        self._rounds.start(self._run(session), "the rounds broke off")

    def _open(self, session: Session, neighbour: Neighbour) -> None:
        """Hold the stream to a neighbour open, which may have come back elsewhere."""
        index, address = neighbour.index, neighbour.address
        before, opened = self._opened.get(index, ("", None))
        if address in (before, ""):  # it is where it was, or has not joined yet
            return
        if opened is not None:
            opened.cancel()
        held = exchange.keep_open(session, neighbour, self.config.credentials)
        self._opened[index] = address, self._channels.start(held, "a channel is given up")

    async def _run(self, session: Session) -> None:
        await session.run()
        if self._mirror is not None:
            self._mirror.end()

    async def _end_run(self) -> None:
        """Begin no other round, let the message on its way reach the neighbours, then close the channels."""
        if self._session is not None:
            await self._rounds.end()
            await drained(self._session.flush(), FLUSH_S)
            await self._session.close()
        await self._channels.end()
        self._opened.clear()

    async def _let_go(self) -> None:
        """The run is over for all: the ledger says what it has cost, and its log is deleted, with the records in it."""
        run_id = self._over
        if not run_id:
            return
        try:
            own = self.config
            await asyncio.to_thread(end_run, own.state_folder, own.name, run_id, keep_log=own.keep_log)
        except DataError as error:  # nothing is deleted that may be evidence; the next run is told
            log.error("the run's log stays", run_id=run_id, reason=str(error))
        except OSError as error:
            log.error("the run's log stays", run_id=run_id, reason=error.strerror)
        self._over = ""

    async def _report(self, call: _JoinCall) -> None:
        """Say how far we are, when it matters for the clock and a few times a second.

        A stream that breaks is noticed by whoever reads it, so here it just ends.
        """
        pb, last = coordinator_pb2, None
        with contextlib.suppress(grpc.RpcError, grpc.aio.BaseError, grpc.aio.UsageError, asyncio.InvalidStateError):
            while True:
                if (now := (self.status, self._waiting, self._attempt, self._misconduct)) != last:
                    status, waiting, attempt, noticed = now
                    waits = None if waiting is None else waiting.to_wire()
                    report = pb.Report(status=status.to_wire(), waiting=waits, attempt=attempt)
                    report.misconduct.extend(each.to_wire() for each in noticed)
                    await call.write(pb.Event(report=report))
                    last = now
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(REPORT_S):
                        await self._changed.wait()
                self._changed.clear()


async def _told(call: _JoinCall) -> coordinator_pb2.Directive | None:
    """The next directive; None: the stream has ended well."""
    said = await call.read()
    return said if isinstance(said, coordinator_pb2.Directive) else None


async def _answer(call: _JoinCall) -> Directive | None:
    """What a coordinator says to an introduction, or to a confirmation."""
    try:
        async with asyncio.timeout(HELLO_S):
            said = await _told(call)
    except TimeoutError:
        raise Unavailable(
            f"the coordinator does not answer within {HELLO_S:g} s: is it older than this learner?"
        ) from None
    if said is None:
        raise Unavailable("the coordinator ended the stream without a word")
    return from_wire(said)


def _role(run_id: str, told: directives.Assignment, own: Identity, config: LearnerConfig) -> Role:
    """What the coordinator said, checked: its run id becomes part of a file name.

    Raises:
        RemoteProtocolError: it contradicts itself, or is another learner's.
        SpecError: the run spec is not valid, or names code that may not be imported.
    """
    require_run_id(run_id)
    document = document_from_wire(told.spec)
    config.policy.require_code(document)
    spec = parse_spec(document, imports=config.allow_imports)
    return Role(run_id, spec, told.n_features, told.index, own.learner, own.incarnation)


async def serve(configs: Sequence[LearnerConfig], *, with_stdin: bool = False) -> None:
    """Run learners in this process until it is told to stop.

    Raises:
        SottovoceError: an address is taken, or the coordinator cannot be reached.
    """
    learners = [Learner(config) for config in configs]
    addresses = [await learner.start() for learner in learners]
    for learner, address in zip(learners, addresses, strict=True):
        announce("learner", name=learner.config.name, address=address)

    async def stop() -> None:
        await asyncio.gather(*(learner.stop() for learner in learners))

    following = [learner.follow(address) for learner, address in zip(learners, addresses, strict=True)]
    await serve_until_stopped(stop, following, with_stdin=with_stdin)
