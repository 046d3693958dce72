"""The book of one run: who takes part, what they were told, how far they are, how it ended. Pure."""

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
    """Where a run stands."""

    CONNECTING = "connecting"
    RUNNING = "running"
    FINISHED = "finished"
    STOPPED = "stopped"
    FAILED = "failed"

    @classmethod
    def from_message(cls, run: coordinator_pb2.Run) -> RunState:
        """That of a message."""
        return cls(coordinator_pb2.RunState.Name(run.state).removeprefix("RUN_STATE_").lower())


_FINAL_STATES = frozenset({RunState.FINISHED, RunState.STOPPED, RunState.FAILED})
_QUIESCED_STATES = frozenset({LearnerState.STOPPED, LearnerState.FAILED, LearnerState.BUDGET_EXHAUSTED})
_INACTIVE_STATES = _QUIESCED_STATES | {LearnerState.FINISHED}
_MAX_DESCRIBED_VIOLATIONS = 3
"""Of what was noticed, as much as a text tells."""


@dataclass(frozen=True, slots=True)
class CaptureBinding:
    """What an eavesdropper has opened for a run.

    Attributes:
        capture_id, location: of the capture.
        relays: addresses in place of the learners' own, by edge.
        mirror: where learners copy their messages to; empty for nowhere.
    """

    capture_id: str = ""
    location: str = ""
    relay_addresses: Mapping[tuple[int, int], str] = field(default_factory=dict)
    mirror_address: str = ""


@dataclass(slots=True)
class RunStateMachine:
    """A run in progress.

    Attributes:
        run_id: its name.
        run: what is run.
        n_features: features of a record.
        addresses: of the learners, by index.
        index: of the learners, by name.
        state, detail: where it stands, and why it ended.
        overhearing: by whom it is captured.
        attempt: how often it was taken up again after it had failed.
        statuses: the learners' last reports, by index.
        waits: what they wait for, as last reported, by index.
        away: when the streams of those ended who are gone, by index.
        losing: whom the run is to go on without, by its spec or an operator.
        unsure: who may speak by what a coordinator before this one, or a stream that broke, has told them.
        misconduct: what was noticed, by who noticed it and who did it.
        reserved: no round from this one on was granted by a coordinator before this one.
        digests: of the network's rounds.
        first: those who take part from the first round on, by index.
        earlier: what is known of learners in runs before this one, by index; it is told at the start alone.
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
    _announced: int = 1
    _told: str = field(init=False)
    _ever: list[set[int]] = field(init=False)
    _attendances: list[Participation] = field(init=False)
    lost_learners: set[int] = field(init=False)

    def __post_init__(self) -> None:
        spec = self.run.spec
        self.index = {name: i for i, name in enumerate(spec.names)}
        self._ever = [set() for _ in spec.names]
        for i, j in self.run.network.edges:
            self._ever[i].add(j)
            self._ever[j].add(i)
        self.statuses = [LearnerStatus(name, self.run_id) for name in spec.names]
        self.waits = [None] * spec.n_learners
        self.clock = RoundClock(spec.clock, spec.rounds, spec.n_learners)
        self._take_in(self.run)

    def _take_in(self, run: Run) -> None:
        """What follows from who takes part when."""
        spec = run.spec
        told = spec.model_copy(update={"topology": spec.topology.to_edge_list(spec.names)})
        self.run, self._told = run, spec_to_wire(told)  # once: it may list many edges
        self.digests = NetworkDigests(run.network, 4 * min(spec.clock.window, spec.rounds))
        self._attendances = [spec.participation.learner_participation(i, spec.rounds) for i in range(spec.n_learners)]
        self.initial_learners = [i for i, attendance in enumerate(self._attendances) if 0 in attendance]
        self.lost_learners = {self.index[each.learner] for each in spec.offline_intervals if each.missed_from_rounds}

    def reconfigure(self, run: Run) -> None:
        """Learners leave or join; all who are told go on anew."""
        self._take_in(run)
        self.attempt += 1
        self.waits = [None] * len(self.waits)
        self.possible_senders.clear()
        for i, known in enumerate(self.statuses):
            # An absence that it has passed over may be another one now.
            status = replace(known, rounds_done=min(known.rounds_done, known.rounds_committed))
            if i in self.lost_learners:
                detail = self.append_violations("lost: the run goes on without it", learner=i)
                self.statuses[i] = replace(status, state=LearnerState.STOPPED, detail=detail)
            elif status.state in _QUIESCED_STATES:
                self.statuses[i] = replace(status, state=LearnerState.CONNECTING, detail="")
            else:
                self.statuses[i] = status
            self._progress(i)
        self._finish()

    @property
    def max_leased_round(self) -> int:
        """No round from this one on was ever granted. Who was granted how much is not known of those who are gone."""
        return min(max(self.clock.leased_until, self.inherited_lease), self.run.spec.rounds)

    @property
    def first_unsent_round(self) -> int:
        """The first round that nobody has said, where all rest."""
        return max(status.rounds_committed for status in self.statuses)

    @property
    def busy_learners(self) -> list[int]:
        """Those who may say something, or may come back and do so, but for those who are lost anyway."""
        return [
            i
            for i, status in enumerate(self.statuses)
            if not self._through(i)
            and i not in self.pending_removals
            and (
                i in self.possible_senders
                or (self.has_leased_work(i) and (i in self.disconnected_since or status.state not in _QUIESCED_STATES))
            )
        ]

    def compute_missed_from_rounds(self, lost: int) -> dict[str, int]:
        """Of the neighbours of a learner that is lost, by name, the first round that each has not learned, by its log.

        Nobody knows the log of one that is lost, too. It has learned all before the last round that it said: what follows from
        more than that, nobody has heard.
        """
        return {
            self.run.spec.names[i]: self.max_leased_round
            if self._through(i) or i in self.pending_removals
            else self._learned(i)
            for i in sorted(self._ever[lost])
        }

    def _learned(self, index: int) -> int:
        """Rounds that a learner has learned, by its log: it has the last one that was said only where an absence follows."""
        said, done = self.statuses[index].rounds_committed, self.statuses[index].rounds_done
        return said if said <= done and said not in self._attendances[index] else max(said - 1, 0)

    # ---- what learners are told ---------------------------------------------------------------------------

    def list_routes(self) -> list[tuple[int, int, str]]:
        """Every pair that ever talks, in the direction in which its stream is opened, and where that leads."""
        return [(i, j, self.addresses[j]) for i, j in self.run.network.edges]

    def build_resume_commands(self, index: int) -> list[Command]:
        """All that a learner has to know after its stream of directives broke, or it was started again.

        Its log may lack the last round that it has done: the network is told from that round on.
        """
        done = max(self.statuses[index].rounds_done - 1, 0)
        return [self.build_assignment(index), self._epoch(index), self._grant(done)]

    def update_address(self, index: int, address: str) -> dict[int, TopologyEpoch]:
        """A learner is there again, where it was or elsewhere.

        Returns:
            By index, what whoever opens streams to it is told: the epoch again, with its address. Empty: it is where it
            was, or behind a relay or a wiretap, which is still where that was.
        """
        if (before := self.addresses[index]) == address:
            return {}
        self.addresses = (*self.addresses[:index], address, *self.addresses[index + 1 :])
        if self.capture_binding.relay_addresses and before:
            return {}
        return {i: self._epoch(i) for i in self._ever[index] if i < index}

    def build_start_commands(self) -> list[list[Command]]:
        """Of all learners, by index, at the start."""
        return [[self.build_assignment(i), self._epoch(i), self._grant(0)] for i in range(len(self.addresses))]

    def build_next_lease(self) -> RoundLease:
        """What every learner is told when the grant has grown."""
        first, self._announced = self._announced, max(self._announced, self.clock.leased_until)
        return self._grant(first)

    def _grant(self, first: int) -> RoundLease:
        """What is granted now, with a digest of the network of the rounds from `first` on, if it changes."""
        since, until = max(first, 1), self.clock.leased_until
        known = self.digests.combined_digest(since, until)
        return RoundLease(until_round=until, from_round=since if known else 0, network_hash=known)

    def build_assignment(self, index: int) -> Assignment:
        """The preparation of one learner."""
        return Assignment(
            spec=self._told,
            n_features=self.n_features,
            index=index,
            mirror_address=self.capture_binding.mirror_address,
            attempt=self.attempt,
            earlier_runs=self.earlier_sent_rounds.get(index, ()),
        )

    def _epoch(self, index: int) -> TopologyEpoch:
        """The topology of round 0 as one learner needs it, with all whom it ever talks to; what follows, the spec says."""
        first, names, relays = self.run.network.mixing(0), self.run.spec.names, self.capture_binding.relay_addresses
        heard, told = first.in_neighbour_weights(index), first.out_neighbours(index)
        neighbours = (
            Neighbour(
                index=j,
                name=names[j],
                # Who has not joined yet has none.
                address=self.addresses[j] and relays.get((index, j), self.addresses[j]),
                weight=heard.get(j, 0.0),
                is_recipient=j in told,
                relayed=self.run.spec.capture != "wiretap" and (index, j) in relays,  # behind a wiretap is j itself
            )
            for j in sorted({*heard, *told, *self._ever[index]})
        )
        return TopologyEpoch(first_round=0, neighbours=neighbours)

    def build_stop(self) -> Stop:
        """The end. What a failed run has left stays where it is."""
        return Stop(reason=self.detail, final=self.state is not RunState.FAILED)

    # ---- what learners tell -------------------------------------------------------------------------------

    def handle_report(
        self, status: LearnerStatus, waiting: WaitReport | None = None, noticed: Sequence[Violation] = ()
    ) -> bool:
        """Take in a report; True when the grant has grown."""
        index = self.index[status.learner]
        if index in self.lost_learners:
            return False
        self.possible_senders.discard(index)
        if (
            status.rounds_committed < (known := self.statuses[index]).rounds_committed
        ):  # it could not go on, and knows nothing
            status = replace(known, state=status.state, detail=status.detail)
        self.statuses[index], self.waits[index] = status, waiting
        self._note(index, noticed)
        self._judge(status)
        before = self.clock.leased_until
        if self.state is RunState.CONNECTING and all(
            self.statuses[i].state is LearnerState.RUNNING for i in self.initial_learners
        ):
            self.state = RunState.RUNNING
            self.clock.start()
            for i in range(len(self.statuses)):  # records may have come while others were still connecting
                self._progress(i)
        elif self.state is RunState.RUNNING:
            self._progress(index)
        return self.clock.leased_until > before

    def _note(self, by: int, noticed: Sequence[Violation]) -> None:
        """What a learner has noticed of its neighbours; what it says of others, or of unknown rules, is passed over."""
        for each in noticed:
            if each.learner in self._ever[by] and each.kind in VIOLATION_KINDS:
                t, known = min(each.round, self.run.spec.rounds), read_attribution(each).value
                found = Violation(learner=each.learner, round=t, kind=each.kind, attribution=known, reporter=by)
                self.violations.setdefault((by, each.learner), found)
        if self.violations:
            self._enforce()

    def _enforce(self) -> None:
        """The run's policy, where it is known who broke a rule."""
        found = [
            pair
            for pair, each in self.violations.items()
            if read_attribution(each) is not Attribution.CLAIM
            and not self.lost_learners & set(pair)  # else it may have been a stranger
        ]
        if self.run.spec.on_violation != "drop":
            for by, whom in found[:1]:
                self.end(RunState.FAILED, describe_violation(self.violations[by, whom], self.run.spec.names))
        elif self.state is RunState.RUNNING:
            there = [{j for j in ever if not self._through(j)} for ever in self._ever]
            self.pending_removals |= find_evictions(found, there)

    def append_violations(self, text: str, learner: int | None = None) -> str:
        """A text, and what was noticed of a learner; None: of all who are still in the run."""
        found = [
            describe_violation(each, self.run.spec.names)
            for each in self.violations.values()
            if (each.learner not in self.lost_learners if learner is None else each.learner == learner)
        ]
        return "; ".join([text, *found[:_MAX_DESCRIBED_VIOLATIONS]])

    def restore(self, state: RunState, statuses: Sequence[LearnerStatus], now: datetime) -> None:
        """Go on where a coordinator before this one was; nobody is there yet, and nobody who was at rest stays so."""
        self.state = state
        self.statuses = [
            replace(each, state=LearnerState.CONNECTING, detail="")
            if each.state in _QUIESCED_STATES and i not in self.lost_learners
            else each
            for i, each in enumerate(statuses)
        ]
        for i in range(len(statuses)):
            self._progress(i)
            self.disconnected_since[i] = now
            self.possible_senders.add(i)
        self.clock.raise_lease(max(each.rounds_committed for each in statuses))
        self._announced = max(self._announced, self.clock.leased_until)

    def restore_sent_rounds(self, sent: SentRounds) -> None:
        """A learner has sent so much at least: one that knows less has an old state folder, and is not taken back."""
        if (index := self.index.get(sent.learner)) is not None:
            status = self.statuses[index]
            self.statuses[index] = replace(
                status, rounds_committed=max(status.rounds_committed, min(sent.rounds, self.run.spec.rounds))
            )

    def _progress(self, index: int) -> None:
        """Tell the clock how far a learner is. It has nothing to do in rounds in which it is away."""
        status, attendance = self.statuses[index], self._attendances[index]
        if index in self.lost_learners:
            self.clock.record_progress(index, attendance.rounds, attendance.rounds)
            return
        self.clock.record_progress(index, *map(attendance.next_round, (status.rounds_done, status.rounds_with_data)))

    def _through(self, index: int) -> bool:
        """Is nothing left to a learner to do?"""
        finished = self.statuses[index].state is LearnerState.FINISHED
        return finished or index in self.lost_learners or not self._attendances[index].end

    def has_leased_work(self, index: int) -> bool:
        """Is something left to a learner to do in rounds that are granted?"""
        due = self._attendances[index].next_round(self.statuses[index].rounds_done)
        return not self._through(index) and due < max(self.clock.leased_until, 1)

    def _judge(self, status: LearnerStatus) -> None:
        """Does this report end the run?"""
        if status.state is LearnerState.FAILED:
            self._fail(status)
        elif status.state is LearnerState.BUDGET_EXHAUSTED:
            self.end(RunState.STOPPED, f"{status.learner} stopped speaking: {status.detail}")
        else:
            self._finish()

    def _finish(self) -> None:
        if all(map(self._through, range(len(self.statuses)))):
            self.end(RunState.FINISHED, "")

    def _fail(self, failed: LearnerStatus) -> None:
        """A learner fails, and with it the run: because of it, unless it waited for others."""
        who = self.index[failed.learner]
        found = find_stragglers(standings := self.learner_progress, who)
        if found == (who,):
            self._lose(found, f"{failed.learner} failed: {failed.detail}")
        elif any((waits := self.waits[i]) is not None and waits.cause is WaitCause.NEIGHBOUR for i in found):
            why = f"{describe_stragglers(standings, found)}: {failed.learner} {failed.detail}"  # a circle
            self.end(RunState.FAILED, self.append_violations(why))
        else:
            self._lose(found, f"{describe_stragglers(standings, found)}: {failed.learner} {failed.detail}")

    def _lose(self, learners: Iterable[int], why: str) -> None:
        """Learners are lost: the run fails, or, by its spec, goes on without them."""
        if self.run.spec.clock.staleness == "drop" and self.state is RunState.RUNNING:
            self.pending_removals |= set(learners) - self.lost_learners
        else:
            self.end(RunState.FAILED, self.append_violations(why))

    @property
    def learner_progress(self) -> list[LearnerProgress]:
        """How every learner stands, by index."""
        busy = [s for i, s in enumerate(self.statuses) if self.has_leased_work(i)] or self.statuses
        ready, data = min(s.rounds_with_data for s in busy), self.run.spec.clock.mode == "data"
        starving = data and ready <= min(s.rounds_done for s in busy)
        return [
            LearnerProgress(
                s.learner,
                s.rounds_done,
                i in self.disconnected_since,
                self.waits[i],
                starving and s.rounds_with_data == ready,
            )
            for i, s in enumerate(self.statuses)
        ]

    def mark_disconnected(self, index: int, now: datetime) -> None:
        """A learner's stream has ended; it may come back."""
        self.disconnected_since[index] = now

    def mark_quiesced(self, index: int, said: int | None, is_last_round_learned: bool = False) -> None:
        """A learner that was started again while all rest.

        Args:
            index: the learner.
            said: rounds, by its log; None: it does not tell.
            closed: by its log the last one was learned, too.
        """
        status = self.statuses[index]
        said = status.rounds_committed if said is None else said
        done = said if is_last_round_learned else status.rounds_done
        state = status.state if status.state is LearnerState.FINISHED else LearnerState.STOPPED
        self.statuses[index] = replace(status, state=state, rounds_done=done, rounds_committed=said)
        self.possible_senders.discard(index)

    def handle_quiesced_report(self, status: LearnerStatus) -> None:
        """What a learner reports, of an attempt before this one, that came back while all rest."""
        index = self.index[status.learner]
        if index in self.possible_senders and status.state in _INACTIVE_STATES:
            self.statuses[index] = status
            self.possible_senders.discard(index)

    def mark_connected(self, index: int) -> None:
        """A learner is there again."""
        self.disconnected_since.pop(index, None)
        self.possible_senders.discard(index)

    def handle_deadline(self, index: int, since: datetime) -> None:
        """The deadline of a learner that was gone since then: the run fails if it still is, and something is left to do.

        Where nothing is left to anybody, the run ends: a coordinator before this one may have died before it said so.
        """
        if self.disconnected_since.get(index) != since:
            return
        if self.has_leased_work(index):
            gone = describe_stragglers(self.learner_progress, [index])
            why = f"{gone}, and did not come back within {self.run.spec.clock.deadline_s:g} s"
            self._lose([index], why)
        else:
            self._finish()

    def end(self, state: RunState, detail: str) -> None:
        """End the run, once."""
        if self.state not in _FINAL_STATES:
            self.state, self.detail = state, detail

    @property
    def has_ended(self) -> bool:
        """True when the state is final."""
        return self.state in _FINAL_STATES
