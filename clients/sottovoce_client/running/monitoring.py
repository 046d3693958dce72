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
from sottovoce_core.network.roster import OfflineInterval, ParticipationSchedule, names_of
from sottovoce_core.network.topology import Topology
from sottovoce_core.registry import ENDLESS
from sottovoce_core.text import plain
from sottovoce_rpc.learner_status import LearnerState, LearnerStatus, describe_violations
from sottovoce_rpc.specs import document_from_wire
from sottovoce_wire.v1 import coordinator_pb2, eavesdropper_pb2

_MAX_SCANNED_ROUNDS = 64
"""Of a network that changes more often, every edge is taken to lead both ways."""
Way = tuple[int, int]
"""From whom to whom: indices of learners."""


@dataclass(frozen=True, slots=True)
class Plan:
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
    ways: tuple[Way, ...]
    capture: str
    clock: str
    period_s: float | None
    live: bool
    lost: frozenset[str] = frozenset()


def plan_of(spec: str) -> Plan:
    """Read a spec as it crosses the wire.

    Raises:
        SpecError: it is not JSON, of a format that is none, or of a version that says things otherwise.
    """
    return parse_plan_document(document_from_wire(spec))


def parse_plan_document(document: Any) -> Plan:
    """Read a spec as YAML or JSON gives it.

    Raises:
        SpecError: it is of a version that says things otherwise.
    """
    try:
        return _plan(document)
    except (LookupError, TypeError, ValueError, AttributeError):
        raise SpecError("the run's spec is of a version that this one cannot read") from None


def _plan(document: Any) -> Plan:
    names = names_of(document["learners"])
    absences = tuple(OfflineInterval(**each) for each in document.get("absences") or ())
    clock, algorithm = document.get("clock") or {}, document["algorithm"]
    return Plan(
        name=str(document.get("name") or "run"),
        rounds=None if document["rounds"] is None else int(document["rounds"]),
        algorithm=str(algorithm.get("name") if isinstance(algorithm, Mapping) else algorithm),
        learners=names,
        ways=_ways(document, names, absences),
        capture=str(document.get("capture") or "none"),
        clock=str(clock.get("mode") or "free"),
        period_s=clock.get("period_s"),
        live=(document.get("data") or {}).get("source") == "live",
        lost=frozenset(each.learner for each in absences if each.unheard),
    )


def _ways(document: Mapping[str, Any], names: tuple[str, ...], absences: tuple[OfflineInterval, ...]) -> tuple[Way, ...]:
    """Who says something to whom in any round."""
    try:
        topology = Topology.model_validate(document.get("topology") or {})
        network = topology.network(len(names), int(document["rounds"] or ENDLESS), ParticipationSchedule(names, absences))
        if network.horizon > _MAX_SCANNED_ROUNDS:
            return tuple(way for i, j in network.edges for way in ((i, j), (j, i)))
        heard = np.any([network.at(t).neighbours > 0 for t in range(network.horizon)], axis=0)
    except (SottovoceError, ValidationError):  # a graph of one's own, which only its code could tell
        return ()
    return tuple((int(speaker), int(listener)) for speaker, listener in np.argwhere(heard.T))


WINDOW_S, RATE_WINDOW_ROUNDS = 10.0, 5
"""Rates are of so many seconds, or paced rounds: slow enough to read, and quick enough to see that something stopped."""
KEPT = 180
"""Looks at a run that are remembered: three minutes."""
_ENDED_STATES = (LearnerState.FINISHED, LearnerState.STOPPED)
NEAR = 0.9
"""A learner that has spent such a share of its limit is told of, where it goes on spending."""
Count = tuple[int, int]
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

    at: float
    statuses: tuple[LearnerStatus, ...]
    addresses: tuple[str, ...] = ()
    away_since: tuple[float | None, ...] = ()
    heard: Mapping[Way, Count] | None = None

    @property
    def round(self) -> int:
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
    rounds: int
    epsilon: float
    limit: float | None
    elsewhere: float
    epsilon_owner_budget: float | None
    records: int
    waiting: int
    arrival: float | None
    accuracy: float | None
    warnings: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class EdgeView:
    """An edge: messages and bytes a second in both ways, and messages so far."""

    a: int
    b: int
    there: float
    back: float
    bytes_per_second: float
    messages: int
    one_way: bool


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
    started: float
    ended: float | None
    round: int = 0
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView(RunListItem):
    """One run, with its graph."""

    name: str
    algorithm: str
    clock: str
    period_s: float | None
    capture: str
    live: bool
    rounds: int | None
    rate: float | None
    remaining_s: float | None
    pace: tuple[float, ...]
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
class History:
    """The last looks at a run."""

    looks: deque[RunObservation] = field(default_factory=lambda: deque(maxlen=KEPT))

    def add(self, look: RunObservation) -> None:
        """One more."""
        self.looks.append(look)

    def before(self, window_s: float) -> RunObservation | None:
        """What to compare the last look with: the first one within the window; None: there is none."""
        now = self.looks[-1].at
        within = (each for each in self.looks if now - each.at <= window_s)
        found = next(within)
        return found if found.at < now else None

    @property
    def pace(self) -> tuple[float, ...]:
        """Rounds a second between looks."""
        pairs = zip(list(self.looks)[:-1], list(self.looks)[1:], strict=True)
        return tuple(max(0.0, round((b.round - a.round) / (b.at - a.at), 3)) for a, b in pairs if b.at > a.at)


def newest(runs: Sequence[RunListItem]) -> str:
    """The run to look at where nobody says which: under way before others, then the newest; empty: there is none.

    Args:
        runs: the newest first.
    """
    under_way = [each.run_id for each in runs if each.ended is None]
    return next(iter([*under_way, *(each.run_id for each in runs)]), "")


def make_run_view(course: RunListItem, plan: Plan, history: History) -> RunView:
    """A run, of what its coordinator said now and before."""
    now, before = history.looks[-1], history.before(max(WINDOW_S, RATE_WINDOW_ROUNDS * (plan.period_s or 0.0)))
    rate = None if before is None else _rate(now.round, before.round, now.at - before.at)
    over = course.ended is not None
    left = None if plan.rounds is None else max(0, plan.rounds - now.round)
    return RunView(
        run_id=course.run_id,
        name=plan.name,
        state=course.state,
        detail=course.detail,
        algorithm=plan.algorithm,
        clock=plan.clock,
        period_s=plan.period_s,
        capture=plan.capture,
        live=plan.live,
        started=course.started,
        ended=course.ended,
        round=now.round,
        rounds=plan.rounds,
        rate=_mean_rate(course, now) if over else rate,
        remaining_s=left / lasting(rate, plan.period_s) if left is not None and rate and not over else None,
        pace=history.pace,
        traffic_source="learners" if now.heard is None else "eavesdropper",
        learners=_learner_views(plan, now, before),
        edges=_edge_views(plan.ways, now, before),
        warnings=course.warnings,
    )


def lasting(rate: float, period_s: float | None) -> float:
    """The rounds a second that may last: a clock that paces them lets them be faster only for a while, after a pause."""
    return rate if period_s is None else min(rate, 1.0 / period_s)


def _learner_views(plan: Plan, now: RunObservation, before: RunObservation | None) -> tuple[LearnerView, ...]:
    """A row for each learner."""
    rows = []
    for i, status in enumerate(now.statuses):
        past = before.statuses[i] if before is not None and i < len(before.statuses) else None
        arrival = None if past is None or before is None else _rate(status.records, past.records, now.at - before.at)
        away = now.away_since[i] if i < len(now.away_since) else None
        rows.append(
            LearnerView(
                name=status.learner or (plan.learners[i] if i < len(plan.learners) else str(i)),
                address=now.addresses[i] if i < len(now.addresses) else "",
                state=_standing(status, away, plan.lost),
                away_since=away,
                rounds=status.rounds_done,
                epsilon=status.epsilon_spent,
                limit=status.limit,
                elsewhere=status.epsilon_other_runs,
                epsilon_owner_budget=status.epsilon_owner_budget,
                records=status.records,
                waiting=status.records_waiting,
                arrival=arrival,
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
    near = status.limit is not None and status.epsilon_spent >= NEAR * status.limit
    if near and status.state.under_way and past is not None and 0 < past.epsilon_spent < status.epsilon_spent:
        told.append("its budget is nearly used up")
    if status.violation_count:
        told.append(f"messages that broke a rule on its channels: {status.violation_count}")
    if status.detail:
        told.append(status.detail)
    return told


def _edge_views(ways: Sequence[Way], now: RunObservation, before: RunObservation | None) -> tuple[EdgeView, ...]:
    """What passes on every edge: as the eavesdropper counted, else as learners say, who tell all their neighbours the same."""
    counts = dict(now.heard) if now.heard is not None else _said(ways, now)
    if before is None:
        past: Mapping[Way, Count] | None = None
    else:
        past = _said(ways, before) if now.heard is None else before.heard
    seconds = now.at - before.at if before is not None else 0.0

    def rate(way: Way, which: int) -> float:
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
                there=rate(there, 0),
                back=rate(back, 0),
                bytes_per_second=rate(there, 1) + rate(back, 1),
                messages=counts.get(there, (0, 0))[0] + counts.get(back, (0, 0))[0],
                one_way=back not in known,
            )
        )
    return tuple(edges)


def _said(ways: Sequence[Way], look: RunObservation) -> dict[Way, Count]:
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
    seconds = (course.ended or course.started) - course.started
    return last.round / seconds if seconds > 0 else None


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
        run_id=plain(run.run_id),
        state=_STATES.get(run.state, "of a newer version"),
        detail=plain(run.detail),
        started=run.started_at.ToDatetime(UTC).timestamp(),
        ended=run.ended_at.ToDatetime(UTC).timestamp() if run.HasField("ended_at") else None,
        round=RunObservation(0.0, statuses).round,
        warnings=tuple(map(plain, (*describe_violations(run), *filter(None, [run.capture_error])))),
    )


def parse_observation(run: coordinator_pb2.Run, heard: Mapping[Way, Count] | None, at: float) -> RunObservation:
    """A look at a run's learners.

    Args:
        run: as its coordinator says.
        heard: what the eavesdropper counted.
        at: when.
    """
    return RunObservation(
        at,
        tuple(LearnerStatus.from_wire(each.status) for each in run.learners),
        tuple(plain(each.address) for each in run.learners),
        tuple(
            each.disconnected_at.ToDatetime(UTC).timestamp() if each.HasField("disconnected_at") else None
            for each in run.learners
        ),
        heard,
    )


def make_capture_list_item(told: eavesdropper_pb2.CaptureInfo) -> CaptureListItem:
    """A capture in the list."""
    state = told.error or ("open" if told.open else "closed")
    if told.gaps:
        state += f"; rounds are missing in {told.gaps} {'place' if told.gaps == 1 else 'places'}"
    location = plain(told.location)
    return CaptureListItem(
        Path(location).name or location, plain(told.run_id), location, plain(state), told.messages, told.bytes
    )


def moment(when: float) -> str:
    """A Unix time in this machine's zone."""
    return f"{datetime.fromtimestamp(when).astimezone():%Y-%m-%d %H:%M:%S}"
