"""The model of a run under observation: its plan, what its services report, and the view that `status` and the console show."""

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
"""Of a network that changes more often, every edge is taken to lead both ways."""
DirectedEdge = tuple[int, int]
"""From whom to whom: indices of learners."""


@dataclass(frozen=True, slots=True)
class RunPlan:
    """What is known of a run from its spec; code that it names is not imported.

    Attributes:
        name: of the run.
        rounds: planned; None: no end is.
        algorithm: by name.
        learners: names.
        ways: who says something to whom; empty where only code of the run could tell.
        capture: how it is overheard: `none`, `relay`, `mirror` or `wiretap`.
        clock: its mode.
        period_s: of a round, where the clock paces them.
        live: whether records come while it goes on.
        lost: names of learners that the run goes on without.
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
    """Read a spec as it crosses the wire.

    Raises:
        SpecError: it is not JSON, of a format that is none, or of a version that says things otherwise.
    """
    return parse_plan_document(document_from_wire(spec))


def parse_plan_document(document: Any) -> RunPlan:
    """Read a spec as YAML or JSON gives it.

    Raises:
        SpecError: it is of a version that says things otherwise.
    """
    try:
        return _plan(document)
    except (LookupError, TypeError, ValueError, AttributeError):
        raise SpecError("the run's spec is of a version that this one cannot read") from None


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
    """Who says something to whom in any round."""
    try:
        topology = Topology.model_validate(document.get("topology") or {})
        network = topology.build_network(
            len(names), int(document["rounds"] or UNBOUNDED_ROUNDS), ParticipationSchedule(names, offline_intervals)
        )
        if network.horizon > _MAX_SCANNED_ROUNDS:
            return tuple(way for i, j in network.edges for way in ((i, j), (j, i)))
        heard = np.any([network.mixing(t).neighbour_weights > 0 for t in range(network.horizon)], axis=0)
    except (SottovoceError, ValidationError):  # a graph of one's own, which only its code could tell
        return ()
    return tuple((int(speaker), int(listener)) for speaker, listener in np.argwhere(heard.T))


RATE_WINDOW_S, RATE_WINDOW_ROUNDS = 10.0, 5
"""Rates are of so many seconds, or paced rounds: slow enough to read, and quick enough to see that something stopped."""
MAX_OBSERVATIONS = 180
"""Looks at a run that are remembered: three minutes."""
_ENDED_STATES = (LearnerState.FINISHED, LearnerState.STOPPED)
NEAR_LIMIT_FRACTION = 0.9
"""A learner that has spent such a share of its limit is told of, where it goes on spending."""
MessageCount = tuple[int, int]
"""Messages, and their bytes."""


@dataclass(frozen=True, slots=True)
class RunObservation:
    """One look at a run; lists are by index.

    Attributes:
        at: seconds, by a clock that never goes back.
        statuses: of the learners.
        addresses: where each listens.
        away_since: Unix time since which a learner is gone; None: it is there.
        heard: what the eavesdropper counted on every way; None: there is none, or it does not tell.
    """

    observed_at_s: float
    statuses: tuple[LearnerStatus, ...]
    addresses: tuple[str, ...] = ()
    away_since: tuple[float | None, ...] = ()
    channel_traffic: Mapping[DirectedEdge, MessageCount] | None = None

    @property
    def rounds_done(self) -> int:
        """Rounds that all learners have done who have more to do."""
        busy = [each for each in self.statuses if each.state not in _ENDED_STATES] or self.statuses
        return min((each.rounds_done for each in busy), default=0)


# ---- what is shown -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LearnerView:
    """A row of the table: rates are a second's; None is what is not known, or has no limit."""

    name: str
    address: str
    state: str
    away_since: float | None
    rounds_done: int
    epsilon: float
    epsilon_limit: float | None
    epsilon_other_runs: float
    epsilon_owner_budget: float | None
    records: int
    records_waiting: int
    records_per_second: float | None
    accuracy: float | None
    warnings: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class EdgeView:
    """An edge: messages and bytes a second in both ways, and messages so far."""

    a: int
    b: int
    forward_rate: float
    backward_rate: float
    bytes_per_second: float
    messages: int
    is_one_way: bool


@dataclass(frozen=True, slots=True)
class RunListItem:
    """A run in the list, as its coordinator says; times are Unix times.

    Attributes:
        run_id: its id.
        state, detail: in a word, and why it ended.
        started, ended: None: not yet.
        round: rounds that all learners have done.
        notices: what learners noticed of each other, and what went wrong with the capture.
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
    """One run, with its graph."""

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
    """A capture in the list; `path` leads to its facts where they can be opened, else it is empty."""

    name: str
    run_id: str
    location: str
    state: str
    messages: int
    bytes: int
    path: str = ""
    modified: float = 0.0


# ---- how it is made ----------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class RunHistory:
    """The last looks at a run."""

    observations: deque[RunObservation] = field(default_factory=lambda: deque(maxlen=MAX_OBSERVATIONS))

    def add(self, look: RunObservation) -> None:
        """One more."""
        self.observations.append(look)

    def find_baseline(self, window_s: float) -> RunObservation | None:
        """What to compare the last look with: the first one within the window; None: there is none."""
        now = self.observations[-1].observed_at_s
        within = (each for each in self.observations if now - each.observed_at_s <= window_s)
        found = next(within)
        return found if found.observed_at_s < now else None

    @property
    def recent_rates(self) -> tuple[float, ...]:
        """Rounds a second between looks."""
        pairs = zip(list(self.observations)[:-1], list(self.observations)[1:], strict=True)
        return tuple(
            max(0.0, round((b.rounds_done - a.rounds_done) / (b.observed_at_s - a.observed_at_s), 3))
            for a, b in pairs
            if b.observed_at_s > a.observed_at_s
        )


def choose_run(runs: Sequence[RunListItem]) -> str:
    """The run to look at where nobody says which: under way before others, then the newest; empty: there is none.

    Args:
        runs: the newest first.
    """
    under_way = [each.run_id for each in runs if each.ended_at is None]
    return next(iter([*under_way, *(each.run_id for each in runs)]), "")


def make_run_view(course: RunListItem, plan: RunPlan, history: RunHistory) -> RunView:
    """A run, of what its coordinator said now and before."""
    now, before = (
        history.observations[-1],
        history.find_baseline(max(RATE_WINDOW_S, RATE_WINDOW_ROUNDS * (plan.period_s or 0.0))),
    )
    rate = (
        None if before is None else _rate(now.rounds_done, before.rounds_done, now.observed_at_s - before.observed_at_s)
    )
    over = course.ended_at is not None
    left = None if plan.rounds is None else max(0, plan.rounds - now.rounds_done)
    return RunView(
        run_id=course.run_id,
        name=plan.name,
        state=course.state,
        detail=course.detail,
        algorithm=plan.algorithm,
        clock=plan.clock,
        period_s=plan.period_s,
        capture=plan.capture,
        is_live=plan.is_live,
        started_at=course.started_at,
        ended_at=course.ended_at,
        rounds_done=now.rounds_done,
        rounds=plan.rounds,
        rounds_per_second=_mean_rate(course, now) if over else rate,
        remaining_s=left / limit_rate_to_clock(rate, plan.period_s) if left is not None and rate and not over else None,
        recent_rates=history.recent_rates,
        traffic_source="learners" if now.channel_traffic is None else "eavesdropper",
        learners=_learner_views(plan, now, before),
        edges=_edge_views(plan.directed_edges, now, before),
        warnings=course.warnings,
    )


def limit_rate_to_clock(rate: float, period_s: float | None) -> float:
    """The rounds a second that may last: a clock that paces them lets them be faster only for a while, after a pause."""
    return rate if period_s is None else min(rate, 1.0 / period_s)


def _learner_views(plan: RunPlan, now: RunObservation, before: RunObservation | None) -> tuple[LearnerView, ...]:
    """A row for each learner."""
    rows = []
    for i, status in enumerate(now.statuses):
        past = before.statuses[i] if before is not None and i < len(before.statuses) else None
        arrival = (
            None
            if past is None or before is None
            else _rate(status.records, past.records, now.observed_at_s - before.observed_at_s)
        )
        away = now.away_since[i] if i < len(now.away_since) else None
        rows.append(
            LearnerView(
                name=status.learner or (plan.learners[i] if i < len(plan.learners) else str(i)),
                address=now.addresses[i] if i < len(now.addresses) else "",
                state=_standing(status, away, plan.lost_learners),
                away_since=away,
                rounds_done=status.rounds_done,
                epsilon=status.epsilon_spent,
                epsilon_limit=status.epsilon_limit,
                epsilon_other_runs=status.epsilon_other_runs,
                epsilon_owner_budget=status.epsilon_owner_budget,
                records=status.records,
                records_waiting=status.records_waiting,
                records_per_second=arrival,
                accuracy=status.prequential_accuracy,
                warnings=tuple(_notices(status, past)),
            )
        )
    return tuple(rows)


def _standing(status: LearnerStatus, away: float | None, lost: frozenset[str]) -> str:
    if status.learner in lost:
        return "lost"
    return "away" if away is not None else status.state.name.lower().replace("_", " ")


def _notices(status: LearnerStatus, past: LearnerStatus | None) -> list[str]:
    """What an operator should look at.

    Where each record is learned once, all is spent in the first round, and rounds after it cost nothing: that is no notice.

    Args:
        status: of now.
        past: of an earlier look; None: there is none.
    """
    told = []
    if status.noise_is_not_private:
        told.append("its noise is not private: this run protects nobody")
    near = status.epsilon_limit is not None and status.epsilon_spent >= NEAR_LIMIT_FRACTION * status.epsilon_limit
    if near and status.state.is_active and past is not None and 0 < past.epsilon_spent < status.epsilon_spent:
        told.append("its budget is nearly used up")
    if status.violation_count:
        told.append(f"messages that broke a rule on its channels: {status.violation_count}")
    if status.detail:
        told.append(status.detail)
    return told


def _edge_views(
    ways: Sequence[DirectedEdge], now: RunObservation, before: RunObservation | None
) -> tuple[EdgeView, ...]:
    """What passes on every edge: as the eavesdropper counted, else as learners say, who tell all their neighbours the same."""
    counts = dict(now.channel_traffic) if now.channel_traffic is not None else _said(ways, now)
    if before is None:
        past: Mapping[DirectedEdge, MessageCount] | None = None
    else:
        past = _said(ways, before) if now.channel_traffic is None else before.channel_traffic
    seconds = now.observed_at_s - before.observed_at_s if before is not None else 0.0

    def rate(way: DirectedEdge, which: int) -> float:
        if past is None:
            return 0.0
        return _rate(counts.get(way, (0, 0))[which], past.get(way, (0, 0))[which], seconds)

    known = set(ways)
    edges = []
    for a, b in sorted({(min(way), max(way)) for way in ways}):
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


def _said(ways: Sequence[DirectedEdge], look: RunObservation) -> dict[DirectedEdge, MessageCount]:
    """What learners said on every way, evenly: a message goes to every neighbour."""
    receivers: dict[int, int] = {}
    for speaker, _ in ways:
        receivers[speaker] = receivers.get(speaker, 0) + 1
    return {
        (s, r): (look.statuses[s].messages_sent // receivers[s], look.statuses[s].bytes_sent // receivers[s])
        for s, r in ways
        if s < len(look.statuses)
    }


def _rate(now: int, before: int, seconds: float) -> float:
    """A second's; a count that began anew says nothing."""
    return max(0, now - before) / seconds if seconds > 0 else 0.0


def _mean_rate(course: RunListItem, last: RunObservation) -> float | None:
    """Of a run that is over."""
    seconds = (course.ended_at or course.started_at) - course.started_at
    return last.rounds_done / seconds if seconds > 0 else None


_STATES = {value: name.removeprefix("RUN_STATE_").lower() for name, value in coordinator_pb2.RunState.items()}


@dataclass(frozen=True, slots=True)
class ServiceAddresses:
    """Where services listen, and who asks them.

    Attributes:
        coordinator, eavesdropper: addresses; empty: there is none.
        identity: folder of an operator's; None: there is none.
    """

    coordinator: str = ""
    eavesdropper: str = ""
    identity: Path | None = None


# ---- what was said, as values ------------------------------------------------------------------------------------------


def make_run_list_item(run: coordinator_pb2.Run) -> RunListItem:
    """A run in the list."""
    statuses = tuple(LearnerStatus.from_wire(each.status) for each in run.learners)
    return RunListItem(
        run_id=escape_control(run.run_id),
        state=_STATES.get(run.state, "of a newer version"),
        detail=escape_control(run.detail),
        started_at=run.started_at.ToDatetime(UTC).timestamp(),
        ended_at=run.ended_at.ToDatetime(UTC).timestamp() if run.HasField("ended_at") else None,
        rounds_done=RunObservation(0.0, statuses).rounds_done,
        warnings=tuple(map(escape_control, (*describe_violations(run), *filter(None, [run.capture_error])))),
    )


def parse_observation(
    run: coordinator_pb2.Run, channel_traffic: Mapping[DirectedEdge, MessageCount] | None, observed_at_s: float
) -> RunObservation:
    """A look at a run's learners.

    Args:
        run: as its coordinator says.
        heard: what the eavesdropper counted.
        at: when.
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


def make_capture_list_item(told: eavesdropper_pb2.CaptureInfo) -> CaptureListItem:
    """A capture in the list."""
    state = told.error or ("open" if told.open else "closed")
    if told.gaps:
        state += f"; rounds are missing in {told.gaps} {'place' if told.gaps == 1 else 'places'}"
    location = escape_control(told.location)
    return CaptureListItem(
        Path(location).name or location,
        escape_control(told.run_id),
        location,
        escape_control(state),
        told.messages,
        told.bytes,
    )


def format_time(when: float) -> str:
    """A Unix time in this machine's zone."""
    return f"{datetime.fromtimestamp(when).astimezone():%Y-%m-%d %H:%M:%S}"
