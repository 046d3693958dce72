"""Sources that come and go: what clients bring under a name, fed in the order in which it came, so much at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from sottovoce_client.feeding.broker import Feed, Setting
from sottovoce_client.feeding.progress import Account, Tally
from sottovoce_client.feeding.pump import WAITING, Target, Terms, until_over
from sottovoce_client.feeding.records import NO_POSITION, Sieve, Unfit, whole_number
from sottovoce_client.live.connecting import connect_learner
from sottovoce_client.live.learner import ConnectedLearner
from sottovoce_core.errors import DataError, NotReady, SottovoceError, Unavailable
from sottovoce_rpc.tasks import Tasks

MOST_SOURCES = 64
"""That are connected at once."""

_MOST_TALLIES, _OTHERS = 1_024, "others"

WhenFull = Literal["wait", "reject"]


HTTP = Feed(
    name="HTTP",
    schemes={"http": 7490, "https": 7490},
    tls=frozenset({"https"}),
    help="Records that clients POST to /records at this address, as JSON; they are answered when the learner has kept them. "
    "Other addresses than this machine's own need https, --tls-cert, --tls-key and --token-file, or --insecure.",
    examples=("http://127.0.0.1:7490", "https://0.0.0.0:7490?when-full=reject"),
    settings=(
        Setting(
            "when-full", "Whether a request that finds no room waits, or is refused (429).", "wait", ("wait", "reject")
        ),
        Setting("max-bytes", "Maximum size of a request, in bytes.", 1024 * 1024, least=1),
    ),
    modules=("starlette", "uvicorn"),
    has_positions=True,
)
"""The feed that listens at its URL."""


class Full(Exception):
    """There is no room now; nothing of it was taken."""


class Refused(Exception):
    """Records do not fit, by their number; none of them was taken."""

    def __init__(self, reasons: Mapping[int, str]) -> None:
        super().__init__()
        self.reasons = reasons


@dataclass(frozen=True, slots=True)
class _Taken:
    """Records that the learner has in keeping.

    Attributes:
        first, last: their positions.
        new: how many it did not have before.
    """

    first: int
    last: int
    new: int


@dataclass(eq=False, slots=True)
class _Sink:
    """One source, connected."""

    connection: connect_learner
    learner: ConnectedLearner
    sieve: Sieve
    tally: Tally
    last: int
    users: int = 0


@dataclass(eq=False, slots=True)
class Sinks:
    """All sources of an endpoint; `async with` closes their connections.

    Attributes:
        target: the learner; its own source is taken where a client names none.
        terms: what a record is. One that does not fit goes back to its client.
        account: what becomes of them is counted here.
        when_full: while more records wait for their receipts than `most`, others wait for `patience_s`, or are refused.
    """

    target: Target
    terms: Terms
    account: Account
    when_full: WhenFull = "wait"
    most: int = WAITING
    _sinks: dict[str, _Sink] = field(default_factory=dict)
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    _less: asyncio.Condition = field(default_factory=asyncio.Condition)
    _waiting: int = 0
    _tasks: Tasks = field(default_factory=Tasks)

    async def __aenter__(self) -> Sinks:
        """Reach the learner.

        Raises:
            SottovoceError: as `connect_learner`, and where a map does not fit.
        """
        self.account.kept = "sent back"
        await self._sink(self.target.source)
        self._tasks.start(self._look())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._tasks.end()
        for source in list(self._sinks):
            await self._close(source)

    async def take(self, source: str, records: Sequence[Mapping[str, Any]], positions: Sequence[int] | None) -> _Taken:
        """Feed records, all or none, and come back when they are in keeping.

        Args:
            source: under which they are counted; empty: the endpoint's own.
            records: one at least.
            positions: where each stands, ascending. None: a field says it, or they are counted on.

        Raises:
            Refused: some do not fit.
            DataError: positions do not rise.
            Full: there is no room for them, now or within patience.
            Unavailable, NotReady: the learner is away; it may have taken them in.
        """
        sink = await self._connected(source or self.target.source)
        sink.users += 1
        try:
            encoded, positions = self._fitting(sink, records, positions)
            await self._admit(len(records))
            sink.tally.waiting += len(records)
            try:  # nothing is awaited between the choice of positions and their turn in `feed`
                first = sink.last + 1
                places = list(range(first, first + len(records))) if positions is None else list(positions)
                sink.last = max(sink.last, places[-1])
                new = await sink.learner.feed(encoded, positions=places)
            finally:
                sink.tally.waiting -= len(records)
                await self._release(len(records))
            sink.tally.fed += new
            sink.tally.again += len(records) - new
            return _Taken(places[0], places[-1], new)
        except (Unavailable, NotReady):
            await self._forget(sink)
            raise
        finally:
            sink.users -= 1

    async def _connected(self, source: str) -> _Sink:
        """At once, or after those who came before.

        Raises:
            Unavailable: the learner does not answer within patience; and as `connect_learner`.
        """
        if source in self._sinks:
            return await self._sink(source)
        try:
            async with asyncio.timeout(self.target.patience_s), self._turn:
                return await self._sink(source)
        except TimeoutError:
            raise Unavailable(f"the learner at {self.target.address} does not answer") from None

    def _fitting(
        self, sink: _Sink, records: Sequence[Mapping[str, Any]], positions: Sequence[int] | None
    ) -> tuple[Any, Sequence[int] | None]:
        """Records as they are learned, and their positions where these are said.

        Raises:
            Refused, DataError: as `take`.
        """
        reasons, found = dict[int, str](), list[Mapping[str, Any]]()
        for number, record in enumerate(records):
            try:
                found.append(sink.sieve.fields.record(record))
            except Unfit as why:
                reasons[number] = str(why)
        if not reasons and self.terms.position and positions is None:
            said = [whole_number(record, self.terms.position) for record in records]
            lasts = [-1, *(-1 if each is None else each for each in said)]
            reasons = {at: NO_POSITION for at, each in enumerate(said) if each is None or each <= lasts[at]}
            positions = [each for each in said if each is not None]
        if (
            positions is not None
            and not reasons
            and any(b <= a for a, b in zip([-1, *positions], positions, strict=False))
        ):
            raise DataError("positions must be whole numbers, ascending from 0")
        encoded = None
        if not reasons:
            encoded, refused = sink.sieve.encode(found)
            reasons = dict(refused)
        if reasons:
            sink.tally.refused.update(reasons.values())
            raise Refused(reasons)
        return encoded, positions

    async def _admit(self, records: int) -> None:
        """Wait for room.

        Raises:
            Full: there is none.
        """
        if self._has_room(records):
            self._waiting += records
            return
        if self.when_full == "reject":
            raise Full
        try:
            async with asyncio.timeout(self.target.patience_s), self._less:
                await self._less.wait_for(lambda: self._has_room(records))
                self._waiting += records
        except TimeoutError:
            raise Full from None

    def _has_room(self, records: int) -> bool:
        """One request alone may be of any size."""
        return self._waiting == 0 or self._waiting + records <= self.most

    async def _release(self, records: int) -> None:
        self._waiting -= records
        async with self._less:
            self._less.notify_all()

    async def _sink(self, source: str) -> _Sink:
        """Connected, under a name."""
        if (sink := self._sinks.pop(source, None)) is None:
            await self._make_room()
            connection = self.target.connect(source, self.account)
            learner = await connection.__aenter__()
            try:
                sieve = self.terms.sieve(learner)
            except SottovoceError:
                await connection.__aexit__(None, None, None)
                raise
            tally = self._tally(source)
            self.account.run_id = learner.run_id
            sink = _Sink(connection, learner, sieve, tally, learner.position)
        self._sinks[source] = sink  # the last one in order was used last
        return sink

    def _tally(self, source: str) -> Tally:
        """Of a source; of all that are too many, one together."""
        if len(self.account.tallies) >= _MOST_TALLIES:
            source = _OTHERS
        found = next((each for each in self.account.tallies if each.source == source), None)
        if found is None:
            self.account.tallies.append(found := Tally(source))
        return found

    async def _make_room(self) -> None:
        if len(self._sinks) >= MOST_SOURCES:
            idle = next((source for source, sink in self._sinks.items() if not sink.users), None)
            if idle is None:
                raise Full
            await self._close(idle)

    async def _forget(self, sink: _Sink) -> None:
        """A connection that is of no use any more: the next request makes another."""
        source = sink.learner.source
        if self._sinks.get(source) is sink:
            await self._close(source)

    async def _close(self, source: str) -> None:
        await self._sinks.pop(source).connection.__aexit__(None, None, None)

    async def _look(self) -> None:
        """How the learner stands, run after run."""
        while True:
            for sink in list(self._sinks.values())[-1:]:
                try:
                    await until_over(sink.learner, self.account)
                except NotReady:
                    self.account.status = None
            await asyncio.sleep(1.0)
