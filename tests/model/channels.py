"""What two neighbours decide on the stream between them: what is kept and said again, what is heard, and who is greeted."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

from sottovoce_core.errors import SottovoceError
from sottovoce_learner.assignment import RunAssignment
from sottovoce_learner.peers import connection
from sottovoce_learner.peers.inbox import Inbox
from sottovoce_learner.peers.outbox import NeighbourLink
from sottovoce_learner.session import Session
from tests.model.runs import FEATURES, RUN, Shape, about, codec_of, heard_in, neighbours, plan_of, run_of, told_in

Kept = tuple[tuple[int, bytes], ...]
"""Own messages by round, oldest first."""


class Reach(NamedTuple):
    """How far a neighbour may be ahead, and how many messages it may lack."""

    ahead: int
    keep: int


@cache
def reach(shape: Shape, learner: int) -> Reach:
    return Reach(
        *plan_of(shape, learner).compute_buffer_rounds(
            min(shape.window, shape.rounds), allows_late=run_of(shape).has_bounded_staleness
        )
    )


# ---- links -----------------------------------------------------------------------------------------------------------


def _link(link: Callable[[int], NeighbourLink], shape: Shape, learner: int, kept: Kept) -> NeighbourLink:
    new = link(reach(shape, learner).keep)
    for t, message in kept:
        new.queue(t, message)
    return new


@cache
def kept(
    link: Callable[[int], NeighbourLink], shape: Shape, learner: int, before: Kept, t: int, message: bytes
) -> Kept:
    """What a link keeps once a message was said."""
    after = _link(link, shape, learner, before)
    after.queue(t, message)
    return tuple(after._frames)


class _Unwritten:
    """A stream that nothing is written to."""

    async def write(self, message: bytes) -> None:
        raise NotImplementedError


@cache
def due(
    link: Callable[[int], NeighbourLink], shape: Shape, learner: int, before: Kept, neighbour: int, next_round: int
) -> tuple[bytes, ...]:
    """What a link says on a new stream to a neighbour; it was told what is for that one alone."""
    told = tuple((t, message) for t, message in before if neighbour in told_in(shape, learner, t))
    attached = _link(link, shape, learner, told)
    attached._start_writing = lambda: None  # type: ignore[method-assign] # the model says when it is written
    attached.attach(_Unwritten(), next_round)
    return tuple(attached._due)


# ---- inboxes ---------------------------------------------------------------------------------------------------------


class Box(NamedTuple):
    """An inbox: the current round, and by neighbour the messages from that round on.

    Attributes:
        round: the current one.
        heard: oldest first.
        last: where rounds go on without late neighbours, of each the last message before; empty: none yet.
    """

    round: int
    heard: tuple[tuple[bytes, ...], ...]
    last: tuple[bytes, ...] = ()


def new_box(shape: Shape, learner: int, first_round: int, heard: tuple[bytes, ...] = ()) -> Box:
    """Of a learner that begins in a round; `heard`: the messages that it used last, by its log."""
    others = neighbours(shape, learner)
    last = {about(shape, message)[0]: message for message in heard} if run_of(shape).has_bounded_staleness else {}
    return Box(
        first_round,
        ((),) * len(others),
        tuple(last.get(j, b"") for j in others) if run_of(shape).has_bounded_staleness else (),
    )


Boxes = Callable[..., Inbox[bytes]]


def _inbox(kind: Boxes, shape: Shape, learner: int, box: Box) -> Inbox[bytes]:
    plan, others = plan_of(shape, learner), neighbours(shape, learner)
    last = (
        {j: (about(shape, m)[1], m) for j, m in zip(others, box.last, strict=True) if m}
        if run_of(shape).has_bounded_staleness
        else None
    )
    new = kind(plan.neighbours, plan.get_in_neighbours, reach(shape, learner).ahead, box.round, late_messages=last)
    for j, messages in zip(others, box.heard, strict=True):
        for message in messages:
            new.put(j, about(shape, message)[1], j, message)
    return new


def _value(shape: Shape, learner: int, inbox: Inbox[bytes]) -> Box:
    others, rounds = neighbours(shape, learner), sorted(inbox._received)
    heard = tuple(tuple(inbox._received[t][j] for t in rounds if j in inbox._received[t]) for j in others)
    return Box(
        inbox.round,
        heard,
        tuple(inbox._last_messages.get(j, b"") for j in others) if run_of(shape).has_bounded_staleness else (),
    )


@cache
def heard(kind: Boxes, shape: Shape, learner: int, box: Box, neighbour: int, message: bytes) -> Box | None:
    """The inbox with one more message; None: it is refused, and the stream ends."""
    sender, t = about(shape, message)
    inbox = _inbox(kind, shape, learner, box)
    try:
        inbox.put(neighbour, t, sender, message)
    except SottovoceError:
        return None
    return _value(shape, learner, inbox)


@cache
def complete(kind: Boxes, shape: Shape, learner: int, box: Box) -> bool:
    """Was everybody heard in this round?"""
    return _inbox(kind, shape, learner, box).is_complete


@cache
def enough(kind: Boxes, shape: Shape, learner: int, box: Box) -> bool:
    """May the round go on without those who are late?"""
    return run_of(shape).has_bounded_staleness and _inbox(kind, shape, learner, box).has_enough


@cache
def taken(kind: Boxes, shape: Shape, learner: int, box: Box) -> tuple[tuple[bytes, ...], Box]:
    """The messages that the round uses, by sender, and the inbox then (`Session._update`)."""
    inbox = _inbox(kind, shape, learner, box)
    here = inbox.take()
    return tuple(here[j] for j in heard_in(shape, learner, box.round)), _value(shape, learner, inbox)


# ---- hellos ----------------------------------------------------------------------------------------------------------


class Greeting(NamedTuple):
    """What a session knows where it greets, or is greeted by, a neighbour.

    Attributes:
        learner, incarnation: who it is.
        said, done: rounds.
        box: its inbox.
        known: incarnation that the neighbour has greeted with before.
    """

    learner: int
    incarnation: int
    said: int
    done: int
    box: Box
    known: int = 0


@cache
def hello(shape: Shape, own: Greeting, neighbour: int) -> bytes:
    """What a side says of itself when a stream is opened."""
    return connection._build_hello(_session(shape, own, neighbour), neighbour)


@cache
def greeted(shape: Shape, own: Greeting, neighbour: int, payload: bytes) -> tuple[int, int] | None:
    """The first round that the neighbour has not heard, and its incarnation; None: it is refused."""
    session = _session(shape, own, neighbour)
    try:
        _, asked = connection._verify_hello(session, payload)
    except SottovoceError:
        return None
    return asked, session.links[neighbour].incarnation


def _session(shape: Shape, own: Greeting, neighbour: int) -> Session:
    """As much of a session as a greeting looks at."""
    run, link = run_of(shape), NeighbourLink()
    link.incarnation = own.known
    bare: Any = SimpleNamespace(
        assignment=RunAssignment(RUN, run.spec, FEATURES, own.learner, run.spec.names[own.learner], own.incarnation),
        inbox=_inbox(Inbox, shape, own.learner, own.box),
        codec=codec_of(shape),
        links={neighbour: link},
        plan=plan_of(shape, own.learner),
        _staleness_timeout_s=run.spec.clock.staleness_timeout_s,
        state_machine=SimpleNamespace(rounds_committed=own.said, rounds_done=own.done),
    )
    bare.require_log_complete = lambda j, asked: Session.require_log_complete(bare, j, asked)
    return cast(Session, bare)
