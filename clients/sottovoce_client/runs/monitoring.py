"""Model of an observed run: its plan, the reports of its services, and the view that `status` and the console show."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

from sottovoce_core.errors import SottovoceError, SpecError
from sottovoce_core.network.participation_schedule import OfflineInterval, ParticipationSchedule, resolve_learner_names
from sottovoce_core.network.topology import Topology
from sottovoce_core.registry import UNBOUNDED_ROUNDS
from sottovoce_core.text import escape_control
from sottovoce_rpc.learner_status import LearnerState, LearnerStatus, describe_violations
from sottovoce_rpc.specs import document_from_wire
from sottovoce_wire.v1 import coordinator_pb2, eavesdropper_pb2

_MAX_SCANNED_ROUNDS = 64
"""Maximum number of rounds searched for directed edges; a longer period is assumed to use every edge in both directions."""
DirectedEdge = tuple[int, int]
"""Index of the sender and index of the receiver."""


@dataclass(frozen=True, slots=True)
class RunPlan:
    """Facts about a run that its spec gives. Code that the spec names is not imported.

    Attributes:
        name: Name of the run.
        rounds: Planned rounds; None: unbounded.
        algorithm: Name of the algorithm.
        learners: Names of the learners.
        directed_edges: Sender and receiver of every channel; empty if only the run's own code can compute them.
        capture: Capture mode: `none`, `relay`, `mirror` or `wiretap`.
        clock: Mode of the clock.
        period_s: Seconds of a round, if the clock paces rounds.
        is_live: Whether records arrive during the run.
        lost_learners: Names of the learners that the run continues without.
    """

    name: str
    rounds: int | None
    algorithm: str
    learners: tuple[str, ...]
    directed_edges: tuple[DirectedEdge, ...]
    capture: str
    clock: str
    period_s: float | None
    is_live: bool
    lost_learners: frozenset[str] = frozenset()


def parse_plan(spec: str) -> RunPlan:
    """Parse a spec as it is sent on the wire.

    Raises:
        SpecError: It is not valid JSON, or its format or version is not supported.
    """
    return parse_plan_document(document_from_wire(spec))


def parse_plan_document(document: Any) -> RunPlan:
    """Parse a spec document, read from YAML or JSON.

    Raises:
        SpecError: Its version is not supported.
    """
    try:
        return _plan(document)
    except (LookupError, TypeError, ValueError, AttributeError):
        raise SpecError("the run's spec must have a format that this version can read: update this program") from None


def _plan(document: Any) -> RunPlan:
    names = resolve_learner_names(document["learners"])
    offline_intervals = tuple(OfflineInterval(**each) for each in document.get("offline_intervals") or ())
    clock, algorithm = document.get("clock") or {}, document["algorithm"]
    return RunPlan(
        name=str(document.get("name") or "run"),
        rounds=None if document["rounds"] is None else int(document["rounds"]),
        algorithm=str(algorithm.get("name") if isinstance(algorithm, Mapping) else algorithm),
        learners=names,
        directed_edges=_ways(document, names, offline_intervals),
        capture=str(document.get("capture") or "none"),
        clock=str(clock.get("mode") or "free"),
        period_s=clock.get("period_s"),
        is_live=(document.get("data") or {}).get("source") == "live",
        lost_learners=frozenset(each.learner for each in offline_intervals if each.missed_from_rounds),
    )


def _ways(
    document: Mapping[str, Any], names: tuple[str, ...], offline_intervals: tuple[OfflineInterval, ...]
) -> tuple[DirectedEdge, ...]:
    """Return the channels that are used in at least one round."""
    try:
        topology = Topology.model_validate(document.get("topology") or {})
        network = topology.build_network(
            len(names), int(document["rounds"] or UNBOUNDED_ROUNDS), ParticipationSchedule(names, offline_intervals)
        )
        if network.horizon > _MAX_SCANNED_ROUNDS:
            return tuple(way for i, j in network.edges for way in ((i, j), (j, i)))
        is_receiving = np.any([network.mixing(t).neighbour_weights > 0 for t in range(network.horizon)], axis=0)
    except (SottovoceError, ValidationError):  # a custom graph, known to its code alone
        return ()
    return tuple((int(sender), int(receiver)) for sender, receiver in np.argwhere(is_receiving.T))


RATE_WINDOW_S, RATE_WINDOW_ROUNDS = 10.0, 5
"""Window of a rate, in seconds and in paced rounds: long enough to be readable, short enough to show a stop."""
MAX_OBSERVATIONS = 180
"""Maximum number of observations that are kept: three minutes."""
_ENDED_STATES = (LearnerState.FINISHED, LearnerState.STOPPED)
NEAR_LIMIT_FRACTION = 0.9
"""Fraction of the epsilon limit above which a learner that is still spending gets a warning."""
MessageCount = tuple[int, int]
"""Number of messages, and their bytes."""


@dataclass(frozen=True, slots=True)
class RunObservation:
    """Observation of a run at one time; lists are by index.

    Attributes:
        observed_at_s: Seconds of a monotonic clock.
        statuses: Statuses of the learners.
        addresses: Addresses of the learners.
        disconnected_since: Unix time since which each learner is disconnected; None: connected.
        channel_traffic: Messages that the eavesdropper counted on every channel; None: not available.
    """

    observed_at_s: float
    statuses: tuple[LearnerStatus, ...]
    addresses: tuple[str, ...] = ()
    disconnected_since: tuple[float | None, ...] = ()
    channel_traffic: Mapping[DirectedEdge, MessageCount] | None = None

    @property
    def rounds_done(self) -> int:
        """Minimum number of completed rounds over the learners that have not ended."""
        busy = [each for each in self.statuses if each.state not in _ENDED_STATES] or self.statuses
        return min((each.rounds_done for each in busy), default=0)


# ---- views -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LearnerView:
    """Row of the table of learners. Rates are per second; None: unknown, or no limit."""

    name: str
    address: str
    state: str
    disconnected_since: float | None
    rounds_done: int
    epsilon: float
    epsilon_limit: float | None
    delta: float
    epsilon_other_runs: float
    epsilon_owner_budget: float | None
    owner_delta: float
    records: int
    records_waiting: int
    records_per_second: float | None
    accuracy: float | None
    warnings: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class EdgeView:
    """Edge with its messages and bytes per second in both directions, and its messages so far."""

    a: int
    b: int
    forward_rate: float
    backward_rate: float
    bytes_per_second: float
    messages: int
    is_one_way: bool


@dataclass(frozen=True, slots=True)
class RunListItem:
    """Row of the list of runs, as the coordinator reports it; times are Unix times.

    Attributes:
        run_id: Id of the run.
        state, detail: State in one word, and why the run ended.
        started_at, ended_at: Start and end; None: not ended.
        rounds_done: Rounds that all learners have completed.
        warnings: Reported violations, and errors of the capture.
    """

    run_id: str
    state: str
    detail: str
    started_at: float
    ended_at: float | None
    rounds_done: int = 0
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView(RunListItem):
    """Run with its graph."""

    name: str
    algorithm: str
    clock: str
    period_s: float | None
    capture: str
    is_live: bool
    rounds: int | None
    rounds_per_second: float | None
    remaining_s: float | None
    recent_rates: tuple[float, ...]
    traffic_source: str
    learners: tuple[LearnerView, ...]
    edges: tuple[EdgeView, ...]


@dataclass(frozen=True, slots=True)
class CaptureListItem:
    """Row of the list of captures; `path` leads to its facts if they can be opened, else it is empty."""

    name: str
    run_id: str
    location: str
    state: str
    messages: int
    bytes: int
    path: str = ""
    modified: float = 0.0


# ---- construction of views ---------------------------------------------------------------------------------------------


@dataclass(slots=True)
class RunHistory:
    """Last observations of a run."""

    observations: deque[RunObservation] = field(default_factory=lambda: deque(maxlen=MAX_OBSERVATIONS))

    def add(self, observation: RunObservation) -> None:
        """Append an observation."""
        self.observations.append(observation)

    def find_baseline(self, window_s: float) -> RunObservation | None:
        """Return the first observation within the window, for comparison with the last one; None if there is no earlier one."""
        now = self.observations[-1].observed_at_s
        within = (each for each in self.observations if now - each.observed_at_s <= window_s)
        found = next(within)
        return found if found.observed_at_s < now else None

    @property
    def recent_rates(self) -> tuple[float, ...]:
        """Rounds per second between consecutive observations."""
        pairs = zip(list(self.observations)[:-1], list(self.observations)[1:], strict=True)
        return tuple(
            max(0.0, round((b.rounds_done - a.rounds_done) / (b.observed_at_s - a.observed_at_s), 3))
            for a, b in pairs
            if b.observed_at_s > a.observed_at_s
        )


def choose_run(runs: Sequence[RunListItem]) -> str:
    """Return the id of the default run: the newest active run, else the newest run; empty if there is none.

    Args:
        runs: Runs, the newest first.
    """
    active = [each.run_id for each in runs if each.ended_at is None]
    return next(iter([*active, *(each.run_id for each in runs)]), "")


def make_run_view(item: RunListItem, plan: RunPlan, history: RunHistory) -> RunView:
    """Build the view of a run from its row, its plan and its observations."""
    now, before = (
        history.observations[-1],
        history.find_baseline(max(RATE_WINDOW_S, RATE_WINDOW_ROUNDS * (plan.period_s or 0.0))),
    )
    rate = (
        None if before is None else _rate(now.rounds_done, before.rounds_done, now.observed_at_s - before.observed_at_s)
    )
    over = item.ended_at is not None
    left = None if plan.rounds is None else max(0, plan.rounds - now.rounds_done)
    return RunView(
        run_id=item.run_id,
        name=plan.name,
        state=item.state,
        detail=item.detail,
        algorithm=plan.algorithm,
        clock=plan.clock,
        period_s=plan.period_s,
        capture=plan.capture,
        is_live=plan.is_live,
        started_at=item.started_at,
        ended_at=item.ended_at,
        rounds_done=now.rounds_done,
        rounds=plan.rounds,
        rounds_per_second=_mean_rate(item, now) if over else rate,
        remaining_s=left / limit_rate_to_clock(rate, plan.period_s) if left is not None and rate and not over else None,
        recent_rates=history.recent_rates,
        traffic_source="learners" if now.channel_traffic is None else "eavesdropper",
        learners=_learner_views(plan, now, before),
        edges=_edge_views(plan.directed_edges, now, before),
        warnings=item.warnings,
    )


def limit_rate_to_clock(rate: float, period_s: float | None) -> float:
    """Limit a rate to what the clock sustains: rounds are faster than its period only for a while, after a pause."""
    return rate if period_s is None else min(rate, 1.0 / period_s)


def _learner_views(plan: RunPlan, now: RunObservation, before: RunObservation | None) -> tuple[LearnerView, ...]:
    """Build a row for each learner."""
    rows = []
    for i, status in enumerate(now.statuses):
        past = before.statuses[i] if before is not None and i < len(before.statuses) else None
        arrival = (
            None
            if past is None or before is None
            else _rate(status.records, past.records, now.observed_at_s - before.observed_at_s)
        )
        away = now.disconnected_since[i] if i < len(now.disconnected_since) else None
        rows.append(
            LearnerView(
                name=status.learner or (plan.learners[i] if i < len(plan.learners) else str(i)),
                address=now.addresses[i] if i < len(now.addresses) else "",
                state=_describe_state(status, away, plan.lost_learners),
                disconnected_since=away,
                rounds_done=status.rounds_done,
                epsilon=status.epsilon_charged,
                epsilon_limit=status.epsilon_limit,
                delta=status.delta,
                epsilon_other_runs=status.epsilon_other_runs,
                epsilon_owner_budget=status.epsilon_owner_budget,
                owner_delta=status.owner_delta,
                records=status.records,
                records_waiting=status.records_waiting,
                records_per_second=arrival,
                accuracy=status.prequential_accuracy,
                warnings=tuple(_find_warnings(status, past)),
            )
        )
    return tuple(rows)


def _describe_state(status: LearnerStatus, away: float | None, lost: frozenset[str]) -> str:
    if status.learner in lost:
        return "lost"
    return "disconnected" if away is not None else status.state.name.lower().replace("_", " ")


def _find_warnings(status: LearnerStatus, past: LearnerStatus | None) -> list[str]:
    """List what an operator should check.

    A learner that learns each record once spends everything in the first round; later rounds cost nothing and give no warning.

    Args:
        status: Current status.
        past: Earlier status; None: none.
    """
    warnings = []
    if status.noise_is_not_private:
        warnings.append("its noise is not private: this run has no privacy guarantee")
    near = status.epsilon_limit is not None and status.epsilon_charged >= NEAR_LIMIT_FRACTION * status.epsilon_limit
    if near and status.state.is_active and past is not None and 0 < past.epsilon_charged < status.epsilon_charged:
        warnings.append("its budget is nearly used up")
    if status.violation_count:
        warnings.append(f"protocol violations on its channels: {status.violation_count}")
    if status.detail:
        warnings.append(status.detail)
    return warnings


def _edge_views(
    channels: Sequence[DirectedEdge], now: RunObservation, before: RunObservation | None
) -> tuple[EdgeView, ...]:
    """Build the edges with their traffic, from the eavesdropper's counts, else from the learners' statuses (broadcasts)."""
    counts = dict(now.channel_traffic) if now.channel_traffic is not None else _count_sent_messages(channels, now)
    if before is None:
        past: Mapping[DirectedEdge, MessageCount] | None = None
    else:
        past = _count_sent_messages(channels, before) if now.channel_traffic is None else before.channel_traffic
    seconds = now.observed_at_s - before.observed_at_s if before is not None else 0.0

    def rate(channel: DirectedEdge, part: int) -> float:
        if past is None:
            return 0.0
        return _rate(counts.get(channel, (0, 0))[part], past.get(channel, (0, 0))[part], seconds)

    known = set(channels)
    edges = []
    for a, b in sorted({(min(channel), max(channel)) for channel in channels}):
        there, back = ((a, b), (b, a)) if (a, b) in known else ((b, a), (a, b))
        edges.append(
            EdgeView(
                a=there[0],
                b=there[1],
                forward_rate=rate(there, 0),
                backward_rate=rate(back, 0),
                bytes_per_second=rate(there, 1) + rate(back, 1),
                messages=counts.get(there, (0, 0))[0] + counts.get(back, (0, 0))[0],
                is_one_way=back not in known,
            )
        )
    return tuple(edges)


def _count_sent_messages(
    channels: Sequence[DirectedEdge], observation: RunObservation
) -> dict[DirectedEdge, MessageCount]:
    """Divide the messages that each learner has sent evenly over its channels: every neighbour receives each message."""
    receivers: dict[int, int] = {}
    for sender, _ in channels:
        receivers[sender] = receivers.get(sender, 0) + 1
    return {
        (s, r): (
            observation.statuses[s].messages_sent // receivers[s],
            observation.statuses[s].bytes_sent // receivers[s],
        )
        for s, r in channels
        if s < len(observation.statuses)
    }


def _rate(now: int, before: int, seconds: float) -> float:
    """Return a rate per second; 0 if the counter was reset."""
    return max(0, now - before) / seconds if seconds > 0 else 0.0


def _mean_rate(item: RunListItem, last: RunObservation) -> float | None:
    """Return the mean rounds per second of a run that has ended."""
    seconds = (item.ended_at or item.started_at) - item.started_at
    return last.rounds_done / seconds if seconds > 0 else None


_STATES = {value: name.removeprefix("RUN_STATE_").lower() for name, value in coordinator_pb2.RunState.items()}


@dataclass(frozen=True, slots=True)
class ServiceAddresses:
    """Addresses of the services, and the identity that asks them.

    Attributes:
        coordinator, eavesdropper: Addresses; empty: none.
        identity: Folder of an operator's identity; None: none.
    """

    coordinator: str = ""
    eavesdropper: str = ""
    identity: Path | None = None


# ---- conversion of wire messages ---------------------------------------------------------------------------------------


def make_run_list_item(run: coordinator_pb2.Run) -> RunListItem:
    """Convert a run from the wire to a row of the list."""
    statuses = tuple(LearnerStatus.from_wire(each.status) for each in run.learners)
    return RunListItem(
        run_id=escape_control(run.run_id),
        state=_STATES.get(run.state, "unknown (newer version)"),
        detail=escape_control(run.detail),
        started_at=run.started_at.ToDatetime(UTC).timestamp(),
        ended_at=run.ended_at.ToDatetime(UTC).timestamp() if run.HasField("ended_at") else None,
        rounds_done=RunObservation(0.0, statuses).rounds_done,
        warnings=tuple(map(escape_control, (*describe_violations(run), *filter(None, [run.capture_error])))),
    )


def parse_observation(
    run: coordinator_pb2.Run, channel_traffic: Mapping[DirectedEdge, MessageCount] | None, observed_at_s: float
) -> RunObservation:
    """Convert a run from the wire to an observation of its learners.

    Args:
        run: Run as its coordinator reports it.
        channel_traffic: Messages that the eavesdropper counted.
        observed_at_s: Time of the observation.
    """
    return RunObservation(
        observed_at_s,
        tuple(LearnerStatus.from_wire(each.status) for each in run.learners),
        tuple(escape_control(each.address) for each in run.learners),
        tuple(
            each.disconnected_at.ToDatetime(UTC).timestamp() if each.HasField("disconnected_at") else None
            for each in run.learners
        ),
        channel_traffic,
    )


def make_capture_list_item(info: eavesdropper_pb2.CaptureInfo) -> CaptureListItem:
    """Convert a capture from the wire to a row of the list."""
    state = info.error or ("open" if info.open else "closed")
    if info.gaps:
        state += f"; rounds are missing in {info.gaps} {'place' if info.gaps == 1 else 'places'}"
    location = escape_control(info.location)
    return CaptureListItem(
        Path(location).name or location,
        escape_control(info.run_id),
        location,
        escape_control(state),
        info.messages,
        info.bytes,
    )


def format_time(when: float) -> str:
    """Format a Unix time in the local time zone."""
    return f"{datetime.fromtimestamp(when).astimezone():%Y-%m-%d %H:%M:%S}"
