"""State machine of one run: participants, commands, progress, end. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from enum import Enum

from sottovoce_coordinator.round_clock import (
    LearnerProgress,
    RoundClock,
    describe_stragglers,
    find_evictions,
    find_stragglers,
)
from sottovoce_core.network.network import NetworkDigests
from sottovoce_core.network.participation_schedule import Participation
from sottovoce_core.runs.run import Run
from sottovoce_rpc.commands import Command
from sottovoce_rpc.learner_status import (
    VIOLATION_KINDS,
    Attribution,
    LearnerState,
    LearnerStatus,
    WaitCause,
    WaitReport,
    describe_violation,
    read_attribution,
)
from sottovoce_rpc.specs import spec_to_wire
from sottovoce_wire.v1 import coordinator_pb2
from sottovoce_wire.v1.coordinator_pb2 import Assignment, Neighbour, RoundLease, Stop, TopologyEpoch, Violation
from sottovoce_wire.v1.eavesdropper_pb2 import SentRounds


class RunState(Enum):
    """State of a run."""

    CONNECTING = "connecting"
    RUNNING = "running"
    FINISHED = "finished"
    STOPPED = "stopped"
    FAILED = "failed"

    @classmethod
    def from_message(cls, run: coordinator_pb2.Run) -> RunState:
        """Return the state in a message."""
        return cls(coordinator_pb2.RunState.Name(run.state).removeprefix("RUN_STATE_").lower())


_FINAL_STATES = frozenset({RunState.FINISHED, RunState.STOPPED, RunState.FAILED})
_QUIESCED_STATES = frozenset({LearnerState.STOPPED, LearnerState.FAILED, LearnerState.BUDGET_EXHAUSTED})
_INACTIVE_STATES = _QUIESCED_STATES | {LearnerState.FINISHED}
_MAX_DESCRIBED_VIOLATIONS = 3
"""Maximum number of violations in a detail text."""


@dataclass(frozen=True, slots=True)
class CaptureBinding:
    """Capture that an eavesdropper has opened for a run.

    Attributes:
        capture_id, location: id and location of the capture.
        relay_addresses: addresses of the relays in place of the learners' own, by edge.
        mirror_address: where learners send copies of their messages; empty for nowhere.
    """

    capture_id: str = ""
    location: str = ""
    relay_addresses: Mapping[tuple[int, int], str] = field(default_factory=dict)
    mirror_address: str = ""


@dataclass(slots=True)
class RunStateMachine:
    """State machine of a run.

    Attributes:
        run_id: id of the run.
        run: the run.
        n_features: features of a record.
        addresses: addresses of the learners, by index.
        index: indices of the learners, by name.
        state, detail: state of the run, and why it ended.
        capture_binding: capture of the run.
        attempt: number of resumptions and reconfigurations.
        statuses: last reports of the learners, by index.
        waits: last reported waits, by index.
        disconnected_since: when the streams of disconnected learners ended, by index.
        pending_removals: learners without which the run is to go on, by its spec or an operator.
        possible_senders: learners that may send because of commands of an earlier coordinator, or of a stream that broke.
        violations: reported violations, by reporter and accused.
        inherited_lease: no round from this one on was leased by an earlier coordinator.
        digests: digests of the network's rounds.
        initial_learners: indices of the learners that take part from the first round on.
        earlier_sent_rounds: known progress in earlier runs, by index; sent at the start only.
        clock: round clock of the run.
        lost_learners: indices of the learners that are lost to the run.
    """

    run_id: str
    run: Run
    n_features: int
    addresses: tuple[str, ...]
    index: dict[str, int] = field(init=False)
    state: RunState = RunState.CONNECTING
    detail: str = ""
    capture_binding: CaptureBinding = CaptureBinding()
    attempt: int = 0
    statuses: list[LearnerStatus] = field(init=False)
    waits: list[WaitReport | None] = field(init=False)
    disconnected_since: dict[int, datetime] = field(default_factory=dict)
    pending_removals: set[int] = field(default_factory=set)
    possible_senders: set[int] = field(default_factory=set)
    violations: dict[tuple[int, int], Violation] = field(default_factory=dict)
    inherited_lease: int = 0
    digests: NetworkDigests = field(init=False)
    initial_learners: list[int] = field(init=False)
    earlier_sent_rounds: dict[int, tuple[SentRounds, ...]] = field(default_factory=dict)
    clock: RoundClock = field(init=False)
    _announced_lease: int = 1
    _wire_spec: str = field(init=False)
    _all_neighbours: list[set[int]] = field(init=False)  # in any round, in either direction
    _participations: list[Participation] = field(init=False)
    lost_learners: set[int] = field(init=False)

    def __post_init__(self) -> None:
        spec = self.run.spec
        self.index = {name: i for i, name in enumerate(spec.names)}
        self._all_neighbours = [set() for _ in spec.names]
        for i, j in self.run.network.edges:
            self._all_neighbours[i].add(j)
            self._all_neighbours[j].add(i)
        self.statuses = [LearnerStatus(name, self.run_id) for name in spec.names]
        self.waits = [None] * spec.n_learners
        self.clock = RoundClock(spec.clock, spec.rounds, spec.n_learners)
        self._set_run(self.run)

    def _set_run(self, run: Run) -> None:
        """Set the run, and what depends on its participation schedule."""
        spec = run.spec
        listed = spec.model_copy(update={"topology": spec.topology.to_edge_list(spec.names)})
        self.run, self._wire_spec = run, spec_to_wire(listed)  # encoded once: it may list many edges
        self.digests = NetworkDigests(run.network, 4 * min(spec.clock.window, spec.rounds))
        self._participations = [
            spec.participation.learner_participation(i, spec.rounds) for i in range(spec.n_learners)
        ]
        self.initial_learners = [i for i, participation in enumerate(self._participations) if 0 in participation]
        self.lost_learners = {self.index[each.learner] for each in spec.absences if each.unheard}

    def reconfigure(self, run: Run) -> None:
        """Set the changed run after learners left or joined; all remaining learners restart from their logs."""
        self._set_run(run)
        self.attempt += 1
        self.waits = [None] * len(self.waits)
        self.possible_senders.clear()
        for i, known in enumerate(self.statuses):
            # Rounds that it skipped as offline may now be rounds in which it takes part.
            status = replace(known, rounds_done=min(known.rounds_done, known.rounds_committed))
            if i in self.lost_learners:
                detail = self.append_violations("lost: the run goes on without it", learner=i)
                self.statuses[i] = replace(status, state=LearnerState.STOPPED, detail=detail)
            elif status.state in _QUIESCED_STATES:
                self.statuses[i] = replace(status, state=LearnerState.CONNECTING, detail="")
            else:
                self.statuses[i] = status
            self._record_progress(i)
        self._end_if_finished()

    @property
    def max_leased_round(self) -> int:
        """Upper bound of leases: no round from this one on was ever leased. Disconnected learners may have less."""
        return min(max(self.clock.leased_until, self.inherited_lease), self.run.spec.rounds)

    @property
    def first_unsent_round(self) -> int:
        """First round that no learner has sent, if all are quiesced."""
        return max(status.rounds_committed for status in self.statuses)

    @property
    def busy_learners(self) -> list[int]:
        """Learners that may send, now or after they reconnect; those to be removed do not count."""
        return [
            i
            for i, status in enumerate(self.statuses)
            if not self._is_done(i)
            and i not in self.pending_removals
            and (
                i in self.possible_senders
                or (self.has_leased_work(i) and (i in self.disconnected_since or status.state not in _QUIESCED_STATES))
            )
        ]

    def compute_missed_from_rounds(self, lost: int) -> dict[str, int]:
        """Return for each neighbour of a lost learner, by name, the first round that it has not learned, by its log.

        The log of a neighbour that is lost, too, is unknown. It has learned all rounds before the last one that it sent: what it
        computed from more than that, it has sent to no one.
        """
        return {
            self.run.spec.names[i]: self.max_leased_round
            if self._is_done(i) or i in self.pending_removals
            else self._count_learned(i)
            for i in sorted(self._all_neighbours[lost])
        }

    def _count_learned(self, index: int) -> int:
        """Return the rounds learned by a learner's log, which has the last sent one only if an offline interval follows."""
        sent, done = self.statuses[index].rounds_committed, self.statuses[index].rounds_done
        return sent if sent <= done and sent not in self._participations[index] else max(sent - 1, 0)

    # ---- commands for learners ----------------------------------------------------------------------------

    def list_routes(self) -> list[tuple[int, int, str]]:
        """Return all edges of the run, in the direction in which their streams are opened, with the callee's address."""
        return [(i, j, self.addresses[j]) for i, j in self.run.network.edges]

    def build_resume_commands(self, index: int) -> list[Command]:
        """Build all commands for a learner that reconnected or was restarted.

        Its log may lack the last round that it has done: the network digest starts at that round.
        """
        done = max(self.statuses[index].rounds_done - 1, 0)
        return [self.build_assignment(index), self._build_epoch(index), self._build_lease(done)]

    def update_address(self, index: int, address: str) -> dict[int, TopologyEpoch]:
        """Update the address of a learner that reconnected.

        Returns:
            By index, the new epoch for each learner that opens streams to it. Empty if the address is unchanged, or if a relay
            or wiretap, whose address is unchanged, is in between.
        """
        if (before := self.addresses[index]) == address:
            return {}
        self.addresses = (*self.addresses[:index], address, *self.addresses[index + 1 :])
        if self.capture_binding.relay_addresses and before:
            return {}
        return {i: self._build_epoch(i) for i in self._all_neighbours[index] if i < index}

    def build_start_commands(self) -> list[list[Command]]:
        """Build the first commands of all learners, by index."""
        return [
            [self.build_assignment(i), self._build_epoch(i), self._build_lease(0)] for i in range(len(self.addresses))
        ]

    def build_next_lease(self) -> RoundLease:
        """Build the command for all learners after the lease has grown."""
        first, self._announced_lease = self._announced_lease, max(self._announced_lease, self.clock.leased_until)
        return self._build_lease(first)

    def _build_lease(self, first: int) -> RoundLease:
        """Build the current lease; if the network changes, with a digest of its rounds from `first` on."""
        since, until = max(first, 1), self.clock.leased_until
        digest = self.digests.combined_digest(since, until)
        return RoundLease(until_round=until, from_round=since if digest else 0, network_hash=digest)

    def build_assignment(self, index: int) -> Assignment:
        """Build the assignment of one learner."""
        return Assignment(
            spec=self._wire_spec,
            n_features=self.n_features,
            index=index,
            mirror_address=self.capture_binding.mirror_address,
            attempt=self.attempt,
            earlier_runs=self.earlier_sent_rounds.get(index, ()),
        )

    def _build_epoch(self, index: int) -> TopologyEpoch:
        """Build round 0 of the topology for one learner, with its neighbours of all rounds; the spec determines the rest."""
        first, names, relays = self.run.network.mixing(0), self.run.spec.names, self.capture_binding.relay_addresses
        weights, recipients = first.in_neighbour_weights(index), first.out_neighbours(index)
        neighbours = (
            Neighbour(
                index=j,
                name=names[j],
                # Empty for a learner that has not joined yet.
                address=self.addresses[j] and relays.get((index, j), self.addresses[j]),
                weight=weights.get(j, 0.0),
                is_recipient=j in recipients,
                relayed=self.run.spec.capture != "wiretap" and (index, j) in relays,  # a wiretap leads to j itself
            )
            for j in sorted({*weights, *recipients, *self._all_neighbours[index]})
        )
        return TopologyEpoch(first_round=0, neighbours=neighbours)

    def build_stop(self) -> Stop:
        """Build the Stop command; after a failed run learners keep their state."""
        return Stop(reason=self.detail, final=self.state is not RunState.FAILED)

    # ---- reports of learners ------------------------------------------------------------------------------

    def handle_report(
        self, status: LearnerStatus, wait: WaitReport | None = None, violations: Sequence[Violation] = ()
    ) -> bool:
        """Process a report; return whether the lease has grown."""
        index = self.index[status.learner]
        if index in self.lost_learners:
            return False
        self.possible_senders.discard(index)
        known = self.statuses[index]
        if status.rounds_committed < known.rounds_committed:  # it could not resume, and has not read its log
            status = replace(known, state=status.state, detail=status.detail)
        self.statuses[index], self.waits[index] = status, wait
        self._record_violations(index, violations)
        self._handle_final_status(status)
        before = self.clock.leased_until
        if self.state is RunState.CONNECTING and all(
            self.statuses[i].state is LearnerState.RUNNING for i in self.initial_learners
        ):
            self.state = RunState.RUNNING
            self.clock.start()
            for i in range(len(self.statuses)):  # records may have arrived while others were still connecting
                self._record_progress(i)
        elif self.state is RunState.RUNNING:
            self._record_progress(index)
        return self.clock.leased_until > before

    def _record_violations(self, by: int, violations: Sequence[Violation]) -> None:
        """Record reported violations of neighbours; reports on other learners, or of unknown kinds, are ignored."""
        for each in violations:
            if each.learner in self._all_neighbours[by] and each.kind in VIOLATION_KINDS:
                t, known = min(each.round, self.run.spec.rounds), read_attribution(each).value
                found = Violation(learner=each.learner, round=t, kind=each.kind, attribution=known, reporter=by)
                self.violations.setdefault((by, each.learner), found)
        if self.violations:
            self._enforce()

    def _enforce(self) -> None:
        """Apply the run's policy to violations whose sender is attributed."""
        found = [
            pair
            for pair, each in self.violations.items()
            if read_attribution(each) is not Attribution.CLAIM  # a claimed name may be forged
            and not self.lost_learners & set(pair)
        ]
        if self.run.spec.misconduct != "drop":
            for by, whom in found[:1]:
                self.end(RunState.FAILED, describe_violation(self.violations[by, whom], self.run.spec.names))
        elif self.state is RunState.RUNNING:
            remaining = [{j for j in neighbours if not self._is_done(j)} for neighbours in self._all_neighbours]
            self.pending_removals |= find_evictions(found, remaining)

    def append_violations(self, text: str, learner: int | None = None) -> str:
        """Append the violations of a learner to a text; None: of all learners that are still in the run."""
        found = [
            describe_violation(each, self.run.spec.names)
            for each in self.violations.values()
            if (each.learner not in self.lost_learners if learner is None else each.learner == learner)
        ]
        return "; ".join([text, *found[:_MAX_DESCRIBED_VIOLATIONS]])

    def restore(self, state: RunState, statuses: Sequence[LearnerStatus], now: datetime) -> None:
        """Continue where an earlier coordinator was; all learners are disconnected, and quiesced ones restart."""
        self.state = state
        self.statuses = [
            replace(each, state=LearnerState.CONNECTING, detail="")
            if each.state in _QUIESCED_STATES and i not in self.lost_learners
            else each
            for i, each in enumerate(statuses)
        ]
        for i in range(len(statuses)):
            self._record_progress(i)
            self.disconnected_since[i] = now
            self.possible_senders.add(i)
        self.clock.raise_lease(max(each.rounds_committed for each in statuses))
        self._announced_lease = max(self._announced_lease, self.clock.leased_until)

    def restore_sent_rounds(self, sent: SentRounds) -> None:
        """Raise a learner's progress to a captured one: a state folder with less is outdated, and will be refused."""
        if (index := self.index.get(sent.learner)) is not None:
            status = self.statuses[index]
            self.statuses[index] = replace(
                status, rounds_committed=max(status.rounds_committed, min(sent.rounds, self.run.spec.rounds))
            )

    def _record_progress(self, index: int) -> None:
        """Report a learner's progress to the clock. In rounds in which it is offline, it has nothing to do."""
        status, participation = self.statuses[index], self._participations[index]
        if index in self.lost_learners:
            self.clock.record_progress(index, participation.rounds, participation.rounds)
            return
        self.clock.record_progress(index, *map(participation.next_round, (status.rounds_done, status.rounds_with_data)))

    def _is_done(self, index: int) -> bool:
        """Return whether a learner has nothing left to do."""
        finished = self.statuses[index].state is LearnerState.FINISHED
        return finished or index in self.lost_learners or not self._participations[index].end

    def has_leased_work(self, index: int) -> bool:
        """Return whether a learner has something left to do in leased rounds."""
        due = self._participations[index].next_round(self.statuses[index].rounds_done)
        return not self._is_done(index) and due < max(self.clock.leased_until, 1)

    def _handle_final_status(self, status: LearnerStatus) -> None:
        """End the run if this report requires it."""
        if status.state is LearnerState.FAILED:
            self._handle_failure(status)
        elif status.state is LearnerState.BUDGET_EXHAUSTED:
            self.end(RunState.STOPPED, f"{status.learner} stopped sending: {status.detail}")
        else:
            self._end_if_finished()

    def _end_if_finished(self) -> None:
        if all(map(self._is_done, range(len(self.statuses)))):
            self.end(RunState.FINISHED, "")

    def _handle_failure(self, failed: LearnerStatus) -> None:
        """Handle a learner's failure; its cause is the learner itself, or those that it waited for."""
        who = self.index[failed.learner]
        found = find_stragglers(progress := self.learner_progress, who)
        if found == (who,):
            self._lose_learners(found, f"{failed.learner} failed: {failed.detail}")
        elif any((waits := self.waits[i]) is not None and waits.cause is WaitCause.NEIGHBOUR for i in found):
            why = f"{describe_stragglers(progress, found)}: {failed.learner} {failed.detail}"  # a cycle
            self.end(RunState.FAILED, self.append_violations(why))
        else:
            self._lose_learners(found, f"{describe_stragglers(progress, found)}: {failed.learner} {failed.detail}")

    def _lose_learners(self, learners: Iterable[int], why: str) -> None:
        """Fail the run, or remove the lost learners if its spec says so."""
        if self.run.spec.clock.late == "drop" and self.state is RunState.RUNNING:
            self.pending_removals |= set(learners) - self.lost_learners
        else:
            self.end(RunState.FAILED, self.append_violations(why))

    @property
    def learner_progress(self) -> list[LearnerProgress]:
        """Progress of every learner, by index."""
        busy = [s for i, s in enumerate(self.statuses) if self.has_leased_work(i)] or self.statuses
        ready, is_data_mode = min(s.rounds_with_data for s in busy), self.run.spec.clock.mode == "data"
        is_starving = is_data_mode and ready <= min(s.rounds_done for s in busy)
        return [
            LearnerProgress(
                s.learner,
                s.rounds_done,
                i in self.disconnected_since,
                self.waits[i],
                is_starving and s.rounds_with_data == ready,
            )
            for i, s in enumerate(self.statuses)
        ]

    def mark_disconnected(self, index: int, now: datetime) -> None:
        """Record that a learner's stream has ended; it may reconnect."""
        self.disconnected_since[index] = now

    def mark_quiesced(self, index: int, rounds_committed: int | None, is_last_round_learned: bool = False) -> None:
        """Record a learner that was restarted while all others are quiesced.

        Args:
            index: the learner.
            rounds_committed: committed rounds by its log; None: unknown.
            is_last_round_learned: by its log the last one was learned, too.
        """
        status = self.statuses[index]
        rounds_committed = status.rounds_committed if rounds_committed is None else rounds_committed
        done = rounds_committed if is_last_round_learned else status.rounds_done
        state = status.state if status.state is LearnerState.FINISHED else LearnerState.STOPPED
        self.statuses[index] = replace(status, state=state, rounds_done=done, rounds_committed=rounds_committed)
        self.possible_senders.discard(index)

    def handle_quiesced_report(self, status: LearnerStatus) -> None:
        """Process a report of an earlier attempt, from a learner that reconnected while all are quiesced."""
        index = self.index[status.learner]
        if index in self.possible_senders and status.state in _INACTIVE_STATES:
            self.statuses[index] = status
            self.possible_senders.discard(index)

    def mark_connected(self, index: int) -> None:
        """Record that a learner has reconnected."""
        self.disconnected_since.pop(index, None)
        self.possible_senders.discard(index)

    def handle_deadline(self, index: int, since: datetime) -> None:
        """Handle the deadline of a learner disconnected since then: the run fails if it still is, and has work left.

        If no learner has work left, the run ends: an earlier coordinator may have died before it recorded that.
        """
        if self.disconnected_since.get(index) != since:
            return
        if self.has_leased_work(index):
            gone = describe_stragglers(self.learner_progress, [index])
            why = f"{gone}, and did not come back within {self.run.spec.clock.deadline_s:g} s"
            self._lose_learners([index], why)
        else:
            self._end_if_finished()

    def end(self, state: RunState, detail: str) -> None:
        """End the run; only the first call counts."""
        if self.state not in _FINAL_STATES:
            self.state, self.detail = state, detail

    @property
    def has_ended(self) -> bool:
        """Return whether the state is final."""
        return self.state in _FINAL_STATES
