"""What a coordinator tells Prometheus: its runs, who is there, who lags, what was refused. It has no records to tell of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from sottovoce_coordinator.learner_registry import LearnerRegistry
from sottovoce_coordinator.run_registry import ManagedRun
from sottovoce_coordinator.run_state import RunState
from sottovoce_coordinator.store import StoredRun
from sottovoce_rpc.learner_status import VIOLATION_KINDS
from sottovoce_rpc.metrics import Catalogue, MetricSample

CATALOGUE = Catalogue("sottovoce_coordinator")
_metric = CATALOGUE.add_metric

_RUNS = _metric("runs", "Runs that are under way, or remembered, by state.", "state")
_ENDED = _metric(
    "run_ended_timestamp_seconds",
    "When the last run ended that ended in a state, in Unix time; none: none has.",
    "state",
)
_FAILED = _metric(
    "run_failed_timestamp_seconds",
    "When a run failed of whose learners none is in a later run, in Unix time.",
    "run",
)
_RUN = _metric("run_info", "Always 1: a run that is under way.", "run", "state")
_ROUNDS = _metric(
    "run_rounds", "Rounds that all learners of a run under way have done, but those that were lost.", "run"
)
_GRANTED = _metric("run_granted_rounds", "Rounds that the clock of a run under way has granted.", "run")
_ATTEMPT = _metric("run_attempts", "How often a run under way was taken up again, or its learners changed.", "run")
_UNCAPTURED = _metric("runs_uncaptured", "Runs under way of which the spec wants a capture, and nothing is captured.")
_MISCONDUCT = _metric("misconduct", "What learners of remembered runs have noticed of neighbours, by rule.", "rule")

_JOINED = _metric("learners_joined", "Learners that are here.")
_AWAY = _metric("learners_away", "Learners of runs under way that are not here.")
_LEARNER_AWAY = _metric("learner_away", "1 where a learner of a run under way is not here, else 0.", "learner")
_LEARNER_LAG = _metric(
    "learner_lag_rounds", "Rounds that a learner of a run under way is behind the one that is furthest.", "learner"
)
_REFUSED = _metric(
    "joins_refused_total", "Learners that were not let in, or whose stream was ended, by kind of error.", "kind"
)
_EPOCHS = _metric("epochs_total", "Topology epochs that were told to learners.")


def collect_metrics(
    runs: Iterable[ManagedRun | StoredRun], members: LearnerRegistry, refused: Mapping[str, int]
) -> Iterator[MetricSample]:
    """Of a coordinator.

    Args:
        runs: that it remembers, the newest first.
        members: learners that are here.
        refused: streams of learners, by kind of error.
    """
    runs = list(runs)
    courses = [run for run in runs if isinstance(run, ManagedRun)]
    yield from _states(runs)
    yield from _failed(runs)
    yield from _under_way([course for course in courses if not course.machine.has_ended])
    rules = Counter(
        VIOLATION_KINDS[each.kind].name.lower() for course in courses for each in course.machine.violations.values()
    )
    for rule, count in rules.items():
        yield _MISCONDUCT.sample(count, rule)
    yield _JOINED.sample(len(members))
    yield _EPOCHS.sample(members.epoch_count)
    for kind, count in refused.items():
        yield _REFUSED.sample(count, kind)


def _states(runs: Sequence[ManagedRun | StoredRun]) -> Iterator[MetricSample]:
    outcomes = [run.outcome for run in runs]
    for state in RunState:
        own = [ended for found, ended in outcomes if found is state]
        yield _RUNS.sample(len(own), state.value)
        if times := [ended.timestamp() for ended in own if ended is not None]:
            yield _ENDED.sample(max(times), state.value)


def _failed(runs: Iterable[ManagedRun | StoredRun]) -> Iterator[MetricSample]:
    """Failed runs that can still be taken up: a learner keeps the log of its last run alone."""
    later = set[str]()
    for run in runs:
        state, ended = run.outcome
        if state is RunState.FAILED and ended is not None and later.isdisjoint(run.learners):
            yield _FAILED.sample(ended.timestamp(), run.run_id)
        later |= run.learners


def _under_way(courses: Sequence[ManagedRun]) -> Iterator[MetricSample]:
    away = 0
    for course in courses:
        book = course.machine
        yield _RUN.sample(1, book.run_id, book.state.value)
        yield _GRANTED.sample(book.clock.leased_until, book.run_id)
        yield _ATTEMPT.sample(book.attempt, book.run_id)
        done = {name: book.statuses[i].rounds_done for name, i in book.index.items() if i not in book.lost_learners}
        yield _ROUNDS.sample(min(done.values(), default=0), book.run_id)
        furthest = max(done.values(), default=0)
        for name, rounds in done.items():
            gone = book.index[name] in book.disconnected_since
            away += gone
            yield _LEARNER_AWAY.sample(gone, name)
            yield _LEARNER_LAG.sample(furthest - rounds, name)
    yield _AWAY.sample(away)
    yield _UNCAPTURED.sample(
        sum(bool(course.capture_loss_reason or course.capture_outage_reason) for course in courses)
    )
