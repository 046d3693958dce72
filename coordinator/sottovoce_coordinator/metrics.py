"""Prometheus metrics of a coordinator: runs, connected learners, lag, refused joins. A coordinator has no records."""

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
    "When the last run that ended in a state ended, in Unix time; none if none has.",
    "state",
)
_FAILED = _metric(
    "run_failed_timestamp_seconds",
    "When a run failed whose learners have not been in a later run, in Unix time.",
    "run",
)
_RUN = _metric("run_info", "Always 1: a run that is under way.", "run", "state")
_ROUNDS = _metric(
    "run_rounds", "Rounds that all learners of a run under way have done; lost learners do not count.", "run"
)
_LEASED = _metric("run_leased_rounds", "Rounds that the clock of a run under way has leased.", "run")
_ATTEMPT = _metric("run_attempts", "Number of times a run under way was resumed, or its learners changed.", "run")
_UNCAPTURED = _metric("runs_uncaptured", "Runs under way whose spec requires a capture, and nothing is captured.")
_VIOLATIONS = _metric(
    "violations", "Violations that learners of remembered runs reported of neighbours, by kind.", "kind"
)

_JOINED = _metric("learners_joined", "Learners that are connected.")
_DISCONNECTED = _metric("learners_disconnected", "Learners of runs under way that are not connected.")
_LEARNER_DISCONNECTED = _metric(
    "learner_disconnected", "1 if a learner of a run under way is not connected, else 0.", "learner"
)
_LEARNER_LAG = _metric(
    "learner_lag_rounds", "Rounds that a learner of a run under way is behind the one that is furthest.", "learner"
)
_REFUSED = _metric(
    "joins_refused_total", "Learners that were refused, or whose stream was ended, by kind of error.", "kind"
)
_EPOCHS = _metric("epochs_total", "Topology epochs that were sent to learners.")


def collect_metrics(
    runs: Iterable[ManagedRun | StoredRun], members: LearnerRegistry, refused: Mapping[str, int]
) -> Iterator[MetricSample]:
    """Yield samples of a coordinator.

    Args:
        runs: remembered runs, the newest first.
        members: connected learners.
        refused: number of refused learner streams, by kind of error.
    """
    runs = list(runs)
    managed_runs = [run for run in runs if isinstance(run, ManagedRun)]
    yield from _collect_states(runs)
    yield from _get_failed_runs(runs)
    yield from _collect_active([managed for managed in managed_runs if not managed.machine.has_ended])
    kinds = Counter(
        VIOLATION_KINDS[each.kind].name.lower()
        for managed in managed_runs
        for each in managed.machine.violations.values()
    )
    for name, count in kinds.items():
        yield _VIOLATIONS.sample(count, name)
    yield _JOINED.sample(len(members))
    yield _EPOCHS.sample(members.epoch_count)
    for kind, count in refused.items():
        yield _REFUSED.sample(count, kind)


def _collect_states(runs: Sequence[ManagedRun | StoredRun]) -> Iterator[MetricSample]:
    outcomes = [run.outcome for run in runs]
    for state in RunState:
        own = [ended for found, ended in outcomes if found is state]
        yield _RUNS.sample(len(own), state.value)
        if times := [ended.timestamp() for ended in own if ended is not None]:
            yield _ENDED.sample(max(times), state.value)


def _get_failed_runs(runs: Iterable[ManagedRun | StoredRun]) -> Iterator[MetricSample]:
    """Yield failed runs that can still be resumed: a learner keeps the log of its last run only."""
    later = set[str]()
    for run in runs:
        state, ended = run.outcome
        if state is RunState.FAILED and ended is not None and later.isdisjoint(run.learners):
            yield _FAILED.sample(ended.timestamp(), run.run_id)
        later |= run.learners


def _collect_active(managed_runs: Sequence[ManagedRun]) -> Iterator[MetricSample]:
    disconnected = 0
    for managed in managed_runs:
        machine = managed.machine
        yield _RUN.sample(1, machine.run_id, machine.state.value)
        yield _LEASED.sample(machine.clock.leased_until, machine.run_id)
        yield _ATTEMPT.sample(machine.attempt, machine.run_id)
        done = {
            name: machine.statuses[i].rounds_done for name, i in machine.index.items() if i not in machine.lost_learners
        }
        yield _ROUNDS.sample(min(done.values(), default=0), machine.run_id)
        furthest = max(done.values(), default=0)
        for name, rounds in done.items():
            is_disconnected = machine.index[name] in machine.disconnected_since
            disconnected += is_disconnected
            yield _LEARNER_DISCONNECTED.sample(is_disconnected, name)
            yield _LEARNER_LAG.sample(furthest - rounds, name)
    yield _DISCONNECTED.sample(disconnected)
    yield _UNCAPTURED.sample(
        sum(bool(managed.capture_loss_reason or managed.capture_outage_reason) for managed in managed_runs)
    )
