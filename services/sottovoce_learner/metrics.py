"""Prometheus metrics of a learner: progress, messages, privacy spending and queues.

No metric depends on a record's content: numbers of records, rounds and bytes are public (docs/privacy/guarantees.md).
The model has no metrics.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

from sottovoce_learner.mirror import Mirror
from sottovoce_learner.privacy_filter import PrivacyFilter
from sottovoce_learner.session import Session
from sottovoce_rpc.learner_status import VIOLATION_KINDS, LearnerStatus
from sottovoce_rpc.metrics import Catalogue, MetricSample

CATALOGUE = Catalogue("sottovoce_learner")
_metric = CATALOGUE.add_metric

_STATE = _metric("state", "Always 1: state of the learner.", "learner", "state")
_RUN = _metric("run_info", "Always 1: current run of the learner.", "learner", "run")
_CONNECTED = _metric("coordinator_connected", "1 while the learner is joined to its coordinator, else 0.", "learner")
_PRIVATE = _metric("noise_private", "1 if noise comes from the operating system, 0 if it is predictable.", "learner")
_WAITING = _metric("waiting", "Always 1: cause of a wait that is long enough to be reported.", "learner", "cause")

_ROUNDS = _metric("rounds_total", "Completed rounds of the current run.", "learner")
_ROUNDS_COMMITTED = _metric(
    "rounds_committed_total", "Rounds whose message is logged and charged, in the current run.", "learner"
)
_LEASED = _metric("leased_rounds", "Rounds that the coordinator's clock has leased in the current run.", "learner")
_LAG = _metric("lag_rounds", "Rounds that are leased and not done; 0 where the run has ended.", "learner")
_MESSAGES_SENT = _metric("messages_sent_total", "Messages queued for neighbours, one for each recipient.", "learner")
_BYTES_SENT = _metric("sent_bytes_total", "Bytes of these messages.", "learner")
_MESSAGES_RECEIVED = _metric("messages_received_total", "Accepted messages of neighbours.", "learner")
_BYTES_RECEIVED = _metric("received_bytes_total", "Bytes of these messages.", "learner")

_RECORDS_TAKEN = _metric("records_total", "Records accepted in the current run.", "learner")
_RECORDS_LEARNED = _metric("records_learned_total", "Accepted records that a round has taken.", "learner")
_RECORDS_WAITING = _metric("records_waiting", "Records that wait for their round.", "learner")
_RECORDS_WAITING_BYTES = _metric("records_waiting_bytes", "Bytes of these records.", "learner")
_LINKS = _metric("link_queue_messages", "Messages that wait to be written, over all neighbours.", "learner")
_MIRROR = _metric("mirror_queue_messages", "Copies that wait for the eavesdropper.", "learner")

_SPENT = _metric(
    "epsilon_spent", "Epsilon spent: in the current run, in the last 30 days, in all runs.", "learner", "scope"
)
_LIMIT = _metric(
    "epsilon_limit",
    "Limit of epsilon, by the run's budget or the learner's owner; none: no limit.",
    "learner",
    "scope",
)
_LEFT = _metric("epsilon_left", "Epsilon that may still be spent; none: no limit.", "learner", "scope")

_NEIGHBOURS = _metric("neighbours", "Neighbours that participate in this round.", "learner")
_DISCONNECTED = _metric("neighbours_disconnected", "Participating neighbours without an open stream.", "learner")
_RECONNECTS = _metric(
    "reconnects_total",
    "Streams that replaced an earlier one: to neighbours, or to the coordinator.",
    "learner",
    "to",
)
_VIOLATIONS = _metric("violations_total", "Rejected messages of neighbours that violated the protocol.", "learner")
_VIOLATING = _metric("violating_neighbours", "Neighbours by the kind of their first violation.", "learner", "kind")


def collect_metrics(
    status: LearnerStatus, session: Session | None, mirror: Mirror | None, joins: int, *, is_joined: bool
) -> Iterator[MetricSample]:
    """Yield the samples of one learner.

    Args:
        status: status of the learner.
        session: its current session.
        mirror: copies of its messages to the eavesdropper.
        joins: number of times it has joined its coordinator.
        is_joined: whether it is joined now.
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
    yield _ROUNDS_COMMITTED.sample(status.rounds_committed, name)
    yield _LEASED.sample(session.lease_tracker.end_round, name)
    yield _LAG.sample(
        0 if session.lifecycle.has_ended else max(session.lease_tracker.end_round - status.rounds_done, 0), name
    )
    if (waiting := session.reportable_wait) is not None and not session.lifecycle.has_ended:
        yield _WAITING.sample(1, name, waiting.cause.name.lower())
    yield from _collect_traffic(name, status, session, mirror)
    yield from _collect_spending(name, session.state_machine.privacy_filter)


def _collect_traffic(
    name: str, status: LearnerStatus, session: Session, mirror: Mirror | None
) -> Iterator[MetricSample]:
    links, active_links = session.links.values(), session.outbox.get_active_links(session.state_machine.rounds_done)
    yield _MESSAGES_SENT.sample(status.messages_sent, name)
    yield _BYTES_SENT.sample(status.bytes_sent, name)
    yield _MESSAGES_RECEIVED.sample(session.receiver.messages_received, name)
    yield _BYTES_RECEIVED.sample(
        session.receiver.messages_received * session.codec.message_bytes, name
    )  # all messages have the same length
    yield _RECORDS_TAKEN.sample(status.records, name)
    yield _RECORDS_LEARNED.sample(status.records - status.records_waiting, name)
    yield _RECORDS_WAITING.sample(status.records_waiting, name)
    yield _RECORDS_WAITING_BYTES.sample(session.record_queue.queued_bytes, name)
    yield _LINKS.sample(sum(link.queue_size for link in links), name)
    yield _MIRROR.sample(0 if mirror is None else mirror.queue_size, name)
    yield _NEIGHBOURS.sample(len(active_links), name)
    yield _DISCONNECTED.sample(
        0 if session.lifecycle.has_ended else sum(not link.attached_event.is_set() for link in active_links.values()),
        name,
    )
    yield _RECONNECTS.sample(sum(max(link.stream_count - 1, 0) for link in links), name, "neighbour")
    yield _VIOLATIONS.sample(status.violation_count, name)
    for kind, count in Counter(VIOLATION_KINDS[each.kind].name.lower() for each in session.receiver.violations).items():
        yield _VIOLATING.sample(count, name, kind)


def _collect_spending(name: str, privacy_filter: PrivacyFilter) -> Iterator[MetricSample]:
    for scope in privacy_filter.scopes:
        spent = privacy_filter.measure(scope)
        yield _SPENT.sample(spent, name, scope.name)
        if scope.limit is not None and scope.limit.epsilon < math.inf:
            yield _LIMIT.sample(scope.limit.epsilon, name, scope.name)
            yield _LEFT.sample(max(scope.limit.epsilon - spent, 0.0), name, scope.name)
