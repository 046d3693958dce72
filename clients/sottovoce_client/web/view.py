"""What the page shows, made of what is known; pure. The page itself only puts it into words and pictures."""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from sottovoce.text import plain
from sottovoce_client.web.plans import Plan, Way
from sottovoce_rpc.learner_status import LearnerState, LearnerStatus

WINDOW_S, FEW_ROUNDS = 10.0, 5
"""Rates are of so many seconds, or paced rounds: slow enough to read, and quick enough to see that something stopped."""
KEPT = 180
"""Looks at a run that are remembered: three minutes."""
_OVER = (LearnerState.FINISHED, LearnerState.STOPPED)
NEAR = 0.9
"""A learner that has spent such a share of its limit is told of, where it goes on spending."""

Count = tuple[int, int]
"""Messages, and their bytes."""


@dataclass(frozen=True, slots=True)
class Look:
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
        busy = [each for each in self.statuses if each.state not in _OVER] or self.statuses
        return min((each.rounds_done for each in busy), default=0)


@dataclass(frozen=True, slots=True)
class Course:
    """Where a run stands, as its coordinator says; times are Unix times.

    Attributes:
        run_id: whose it is.
        state, detail: in a word, and why it ended.
        started, ended: None: not yet.
        notices: what learners noticed of each other, and what went wrong with the capture.
        location: of its capture; empty: it has none.
    """

    run_id: str
    state: str
    detail: str
    started: float
    ended: float | None
    notices: tuple[str, ...] = ()
    location: str = ""


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
    own_limit: float | None
    records: int
    waiting: int
    arrival: float | None
    accuracy: float | None
    notices: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class EdgeView:
    """An edge: messages and bytes a second in both ways, and messages so far."""

    a: int
    b: int
    there: float
    back: float
    bytes_s: float
    messages: int
    one_way: bool


@dataclass(frozen=True, slots=True)
class RunView:
    """One run, with its graph."""

    run_id: str
    name: str
    state: str
    detail: str
    algorithm: str
    clock: str
    period_s: float | None
    capture: str
    live: bool
    started: float
    ended: float | None
    round: int
    rounds: int | None
    rate: float | None
    left_s: float | None
    pace: tuple[float, ...]
    counted_by: str
    learners: tuple[LearnerView, ...]
    edges: tuple[EdgeView, ...]
    notices: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RunLine:
    """A run in the list."""

    run_id: str
    state: str
    detail: str
    started: float
    ended: float | None
    round: int


@dataclass(frozen=True, slots=True)
class CaptureLine:
    """A capture in the list; `path` leads to its facts where they can be opened, else it is empty."""

    name: str
    run_id: str
    location: str
    state: str
    messages: int
    bytes: int
    path: str = ""
    modified: float = 0.0


@dataclass(frozen=True, slots=True)
class ReportLine:
    """A page in the results that can be opened."""

    path: str
    title: str
    bytes: int
    modified: float


@dataclass(frozen=True, slots=True)
class Problem:
    """Who does not answer, as it was said, and since when."""

    text: str
    since: float


@dataclass(frozen=True, slots=True)
class WatchLine:
    """Natural logarithms of a learner's e-values, and from where on they are an alarm; None: not told."""

    name: str
    e: float
    change: float | None
    line: float | None
    change_line: float | None
    rounds: int
    alarms: int


@dataclass(frozen=True, slots=True)
class WatchView:
    """What `sottovoce watch` says of a run; `together` is of all learners."""

    run: str
    learners: tuple[WatchLine, ...]
    together: WatchLine | None
    alarms: int


@dataclass(frozen=True, slots=True)
class Page:
    """All that is shown.

    Attributes:
        at: Unix time.
        run: that is looked at; None: there is none, or nobody knows it.
        runs, captures, reports: to open, the newest first.
        watch: of this run.
        problems: who does not answer.
        folder: of the results; empty: none was given.
        gone: whether the coordinator does not answer, so that what is shown of the run is old.
    """

    at: float
    version: str
    run: RunView | None = None
    runs: tuple[RunLine, ...] = ()
    captures: tuple[CaptureLine, ...] = ()
    reports: tuple[ReportLine, ...] = ()
    watch: WatchView | None = None
    problems: tuple[Problem, ...] = ()
    folder: str = ""
    gone: bool = False


# ---- how it is made ----------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class History:
    """The last looks at a run."""

    looks: deque[Look] = field(default_factory=lambda: deque(maxlen=KEPT))

    def add(self, look: Look) -> None:
        """One more."""
        self.looks.append(look)

    def before(self, window_s: float) -> Look | None:
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


def newest(runs: Sequence[RunLine]) -> str:
    """The run to look at where nobody says which: under way before others, then the newest; empty: there is none.

    Args:
        runs: the newest first.
    """
    under_way = [each.run_id for each in runs if each.ended is None]
    return next(iter([*under_way, *(each.run_id for each in runs)]), "")


def run_view(course: Course, plan: Plan, history: History) -> RunView:
    """A run, of what its coordinator said now and before."""
    now, before = history.looks[-1], history.before(max(WINDOW_S, FEW_ROUNDS * (plan.period_s or 0.0)))
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
        left_s=left / lasting(rate, plan.period_s) if left is not None and rate and not over else None,
        pace=history.pace,
        counted_by="learners" if now.heard is None else "eavesdropper",
        learners=learner_views(plan, now, before),
        edges=edge_views(plan.ways, now, before),
        notices=course.notices,
    )


def lasting(rate: float, period_s: float | None) -> float:
    """The rounds a second that may last: a clock that paces them lets them be faster only for a while, after a pause."""
    return rate if period_s is None else min(rate, 1.0 / period_s)


def learner_views(plan: Plan, now: Look, before: Look | None) -> tuple[LearnerView, ...]:
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
                elsewhere=status.epsilon_elsewhere,
                own_limit=status.epsilon_own_budget,
                records=status.records,
                waiting=status.records_waiting,
                arrival=arrival,
                accuracy=status.prequential_accuracy,
                notices=tuple(_notices(status, past)),
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
    if status.rules_broken:
        told.append(f"messages that broke a rule on its channels: {status.rules_broken}")
    if status.detail:
        told.append(status.detail)
    return told


def ended_view(summary: Mapping[str, Any], plan: Plan) -> RunView:
    """A run that is over, as its `summary.json` says: the services that ran it need not be there any more.

    Args:
        summary: the content of the file.
        plan: of its spec.

    Raises:
        LookupError, TypeError, ValueError: it is no summary.
    """
    started = datetime.fromisoformat(summary["started_at"]).timestamp()
    seconds, told = float(summary["seconds"]), summary["learners"]
    looks = [(float(each["seconds"]), min(each["rounds"], default=0)) for each in summary["progress"]]
    pairs = [(a, b) for a, b in itertools.pairwise(looks[-KEPT:]) if b[0] > a[0]]
    done = min((int(each["rounds"]) for each in told if not each["left"]), default=0)
    receivers = Counter(speaker for speaker, _ in plan.ways)
    sent = {(s, r): int(told[s]["messages"]) // receivers[s] for s, r in plan.ways}
    edges = sorted({(min(way), max(way)) for way in plan.ways})
    return RunView(
        run_id=plain(str(summary["run_id"])),
        name=plain(plan.name),
        state=plain(str(summary["state"])),
        detail=plain(str(summary["detail"])),
        algorithm=plain(plan.algorithm),
        clock=plan.clock,
        period_s=plan.period_s,
        capture=plan.capture,
        live=plan.live,
        started=started,
        ended=started + seconds,
        round=done,
        rounds=plan.rounds,
        rate=done / seconds if seconds > 0 else None,
        left_s=None,
        pace=tuple(max(0.0, round((b[1] - a[1]) / (b[0] - a[0]), 3)) for a, b in pairs),
        counted_by="learners",
        learners=tuple(_ended_learner(each, str(summary["state"])) for each in told),
        edges=tuple(
            EdgeView(*(way if way in sent else way[::-1]), 0.0, 0.0, 0.0, sent.get(way, 0) + sent.get(way[::-1], 0),
                     not (way in sent and way[::-1] in sent))
            for way in edges
        ),
        notices=tuple(plain(str(each)) for each in (*summary["misconduct"], *summary["not_captured"])),
    )  # fmt: skip


def _ended_learner(said: Mapping[str, Any], state: str) -> LearnerView:
    return LearnerView(
        name=plain(str(said["name"])),
        address="",
        state="left" if said["left"] else plain(state),
        away_since=None,
        rounds=int(said["rounds"]),
        epsilon=float(said["spent"]),
        limit=None if said["budget"] is None else float(said["budget"]),
        elsewhere=0.0,
        own_limit=None,
        records=int(said["records"]),
        waiting=int(said["waiting"]),
        arrival=None,
        accuracy=said["prequential_accuracy"],
        notices=(),
    )


def run_line(run: RunView) -> RunLine:
    """The line of a run in the list."""
    return RunLine(run.run_id, run.state, run.detail, run.started, run.ended, run.round)


def edge_views(ways: Sequence[Way], now: Look, before: Look | None) -> tuple[EdgeView, ...]:
    """What passes on every edge: as the eavesdropper counted, else as learners say, who tell all their neighbours the same."""
    counts = dict(now.heard) if now.heard is not None else said(ways, now)
    if before is None:
        past: Mapping[Way, Count] | None = None
    else:
        past = said(ways, before) if now.heard is None else before.heard
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
                bytes_s=rate(there, 1) + rate(back, 1),
                messages=counts.get(there, (0, 0))[0] + counts.get(back, (0, 0))[0],
                one_way=back not in known,
            )
        )
    return tuple(edges)


def said(ways: Sequence[Way], look: Look) -> dict[Way, Count]:
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


def _mean_rate(course: Course, last: Look) -> float | None:
    """Of a run that is over."""
    seconds = (course.ended or course.started) - course.started
    return last.round / seconds if seconds > 0 else None
