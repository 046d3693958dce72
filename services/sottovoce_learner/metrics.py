"""What a learner tells Prometheus: how far it is, what it has said, heard and spent, and what waits.

Nothing depends on a record: how many there are, rounds and bytes are public (docs/privacy.md), and of a model nothing is told.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from sottovoce_learner.mirror import Mirror
from sottovoce_learner.privacy_filter import PrivacyFilter
from sottovoce_learner.session import Session
from sottovoce_rpc.learner_status import VIOLATION_KINDS, LearnerStatus
from sottovoce_rpc.metrics import Catalogue, MetricSample

CATALOGUE = Catalogue("sottovoce_learner")
_metric = CATALOGUE.add_metric

_STATE = _metric("state", "Always 1: where a learner stands.", "learner", "state")
_RUN = _metric("run_info", "Always 1: the run that a learner is in.", "learner", "run")
_CONNECTED = _metric("coordinator_connected", "1 while a learner has joined its coordinator, else 0.", "learner")
_PRIVATE = _metric("noise_private", "1 where noise is the operating system's, 0 where it protects nobody.", "learner")
_WAITING = _metric("waiting", "Always 1: what a learner has waited for, so long that it is told.", "learner", "cause")

_ROUNDS = _metric("rounds_total", "Rounds said, heard and learned from, in the run of now.", "learner")
_SAID = _metric("rounds_said_total", "Messages written down, and so charged, in the run of now.", "learner")
_GRANTED = _metric("granted_rounds", "Rounds that the coordinator's clock has granted in the run of now.", "learner")
_LAG = _metric("lag_rounds", "Rounds that are granted and not done; 0 where the run has ended.", "learner")
_MESSAGES_SAID = _metric("messages_said_total", "Messages handed to neighbours, one for each.", "learner")
_BYTES_SAID = _metric("said_bytes_total", "Bytes of these messages.", "learner")
_MESSAGES_HEARD = _metric("messages_heard_total", "Messages of neighbours that were taken in.", "learner")
_BYTES_HEARD = _metric("heard_bytes_total", "Bytes of these messages.", "learner")

_TAKEN = _metric("records_total", "Records taken in, in the run of now.", "learner")
_LEARNED = _metric("records_learned_total", "Records of rounds that have taken theirs.", "learner")
_RECORDS = _metric("records_waiting", "Records that wait for their round.", "learner")
_HELD = _metric("records_waiting_bytes", "Bytes of these records.", "learner")
_LINKS = _metric("link_queue_messages", "Messages that wait to be written to neighbours, of all links.", "learner")
_MIRROR = _metric("mirror_queue_messages", "Copies that wait for the eavesdropper.", "learner")

_SPENT = _metric(
    "epsilon_spent", "Epsilon spent: in the run of now, in the last 30 days, in all runs.", "learner", "scope"
)
_LIMIT = _metric(
    "epsilon_limit",
    "Epsilon that is not exceeded, by the run's budget or the learner's owner; none: there is no limit.",
    "learner",
    "scope",
)
_LEFT = _metric("epsilon_left", "Epsilon that may still be spent; none: there is no limit.", "learner", "scope")

_NEIGHBOURS = _metric("neighbours", "Neighbours that are there in this round.", "learner")
_AWAY = _metric("neighbours_away", "Those of them with which there is no stream.", "learner")
_RECONNECTS = _metric(
    "reconnects_total",
    "Streams that took the place of an earlier one: to neighbours, or to the coordinator.",
    "learner",
    "to",
)
_BROKEN = _metric("rules_broken_total", "Messages of neighbours that broke a rule, and changed nothing.", "learner")
_MISCONDUCT = _metric("misbehaving_neighbours", "Neighbours by the first rule that each broke.", "learner", "rule")


def collect_metrics(
    status: LearnerStatus, session: Session | None, mirror: Mirror | None, joins: int, *, is_joined: bool
) -> Iterator[MetricSample]:
    """Of one learner.

    Args:
        status: of the learner.
        session: its run of now.
        mirror: copies what it says.
        joins: how often it has joined its coordinator.
        joined: it has, and is there.
    """
    name = status.learner
    yield _STATE.sample(1, name, status.state.name.lower())
    yield _CONNECTED.sample(is_joined, name)
    yield _RECONNECTS.sample(max(joins - 1, 0), name, "coordinator")
    if session is None:
        return
    yield _RUN.sample(1, name, status.run_id)
    yield _PRIVATE.sample(not status.noise_is_not_private, name)
    yield _ROUNDS.sample(status.rounds_done, name)
    yield _SAID.sample(status.rounds_committed, name)
    yield _GRANTED.sample(session.lease_tracker.end_round, name)
    yield _LAG.sample(
        0 if session.lifecycle.has_ended else max(session.lease_tracker.end_round - status.rounds_done, 0), name
    )
    if (waiting := session.reportable_wait) is not None and not session.lifecycle.has_ended:
        yield _WAITING.sample(1, name, waiting.cause.name.lower())
    yield from _traffic(name, status, session, mirror)
    yield from _spending(name, session.state_machine.privacy_filter)


def _traffic(name: str, status: LearnerStatus, session: Session, mirror: Mirror | None) -> Iterator[MetricSample]:
    links, met = session.links.values(), session.outbox.get_active_links(session.state_machine.rounds_done)
    yield _MESSAGES_SAID.sample(status.messages_sent, name)
    yield _BYTES_SAID.sample(status.bytes_sent, name)
    yield _MESSAGES_HEARD.sample(session.receiver.messages_received, name)
    yield _BYTES_HEARD.sample(
        session.receiver.messages_received * session.codec.message_bytes, name
    )  # every message has one length
    yield _TAKEN.sample(status.records, name)
    yield _LEARNED.sample(status.records - status.records_waiting, name)
    yield _RECORDS.sample(status.records_waiting, name)
    yield _HELD.sample(session.record_queue.queued_bytes, name)
    yield _LINKS.sample(sum(link.queue_size for link in links), name)
    yield _MIRROR.sample(0 if mirror is None else mirror.queue_size, name)
    yield _NEIGHBOURS.sample(len(met), name)
    yield _AWAY.sample(
        0 if session.lifecycle.has_ended else sum(not link.attached_event.is_set() for link in met.values()), name
    )
    yield _RECONNECTS.sample(sum(max(link.stream_count - 1, 0) for link in links), name, "neighbour")
    yield _BROKEN.sample(status.violation_count, name)
    for rule, count in Counter(VIOLATION_KINDS[each.kind].name.lower() for each in session.receiver.violations).items():
        yield _MISCONDUCT.sample(count, name, rule)


def _spending(name: str, books: PrivacyFilter) -> Iterator[MetricSample]:
    allowed = books.allowance
    for scope, before, limit in (
        ("run", 0.0, books.budget),
        ("month", allowed.other_runs_month_epsilon, allowed.max_epsilon_per_month),
        ("all", allowed.other_runs_epsilon, allowed.max_epsilon_in_all_runs),
    ):
        spent = before + books.epsilon_spent
        yield _SPENT.sample(spent, name, scope)
        if limit is not None:
            yield _LIMIT.sample(limit, name, scope)
            yield _LEFT.sample(max(limit - spent, 0.0), name, scope)
