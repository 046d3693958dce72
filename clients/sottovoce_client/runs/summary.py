"""Results of a run as plain values: computed by `evaluate`, shown on the terminal and in the report, saved as `summary.json`."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

from sottovoce_client.atomic_files import write_json
from sottovoce_core.arrays import FloatArray
from sottovoce_core.privacy.guarantee import combine_epsilons
from sottovoce_core.runs.participation import StalenessStatistics


@dataclass(frozen=True, slots=True)
class RunProgress:
    """Progress of the running learners at one time; per-learner lists are by index.

    Attributes:
        seconds: Seconds since the first round.
        rounds: Completed rounds.
        accuracy: Prequential accuracy; None if the run did not opt in, or nothing was predicted yet.
        epsilon: Pure epsilon spent.
        messages: Messages sent.
        offline_learners: Names of the learners that are disconnected, for now or for good.
        violations: Violations that learners reported of each other, in words.
        departed_learners: Indices of the learners that have left or were lost; their rounds do not count any more.
        run_id: Id of the run; empty: unknown.
        capture_error: Reason why nothing is captured although it should be; empty: no error; None: ended, or unknown.
        epsilon_charged: Epsilon spent at the delta of each learner's limit; empty: all of it is pure.
    """

    seconds: float
    rounds: tuple[int, ...]
    accuracy: tuple[float | None, ...]
    epsilon: tuple[float, ...]
    messages: tuple[int, ...]
    offline_learners: tuple[str, ...] = ()
    departed_learners: frozenset[int] = frozenset()
    violations: tuple[str, ...] = ()
    run_id: str = ""
    capture_error: str | None = None
    epsilon_charged: tuple[float, ...] = ()

    @property
    def spending(self) -> tuple[float, ...]:
        """Epsilon that counts against each learner's limit."""
        return self.epsilon_charged or self.epsilon

    @property
    def rounds_done(self) -> int:
        """Minimum number of completed rounds over the learners that are still in the run."""
        return min((done for i, done in enumerate(self.rounds) if i not in self.departed_learners), default=0)


@dataclass(frozen=True, slots=True)
class ObservedPrivacyLoss:
    """Exact privacy loss of a capture between the true data set and an adjacent one.

    Attributes:
        loss: Absolute privacy loss of this capture.
        supremum: Largest loss that any capture could have shown for this pair of data sets.
        claimed_epsilon: Epsilon that the guarantee claims for this adjacency.
        cumulative_loss: Signed cumulative loss by round.
    """

    loss: float
    supremum: float
    claimed_epsilon: float
    cumulative_loss: FloatArray


@dataclass(frozen=True, slots=True)
class LearnerSummary:
    """Results of one learner.

    Attributes:
        records: Number of records that it holds; of live ones, that it has learned.
        max_uses: Number of rounds in which its most used record was learned.
        rounds_done: Completed rounds.
        has_left: Whether it left or was lost before the last round.
        test_accuracy: Accuracy on the held-out records; None if unknown.
        prequential_accuracy: Accuracy on its own records, each predicted before it was learned.
        messages, bytes: Messages sent, and their bytes.
        epsilon_spent: Epsilon that the learner itself charged, at `delta`.
        epsilon_limit: Limit at `delta` at which it would have stopped; None: no limit.
        epsilon_paper: Cumulative epsilon by the paper's formula.
        epsilon_record_use: Tight cumulative epsilon of one use of one record.
        epsilon_record: Tight cumulative epsilon of the most expensive record in all its uses.
        epsilon_infinite_horizon: Bound on `epsilon_record_use` over infinitely many rounds; may be infinite.
        epsilon_*_curve: The same epsilons after every round.
        records_waiting: Live records that waited when the run ended, and were not learned.
        test_curve: Pairs of a round and the accuracy on the held-out records after it, if this was measured here.
        record_use_loss, record_loss: Loss if the record that is learned first is replaced by the worst one, in its first use,
            and in all its uses; None without a capture.
    """

    name: str
    records: int
    max_uses: int
    rounds_done: int
    test_accuracy: float | None
    prequential_accuracy: float | None
    messages: int
    bytes: int
    epsilon_spent: float
    epsilon_limit: float | None
    epsilon_paper: float
    epsilon_record_use: float
    epsilon_record: float
    epsilon_infinite_horizon: float
    epsilon_paper_curve: FloatArray
    epsilon_record_use_curve: FloatArray
    epsilon_record_curve: FloatArray
    record_use_loss: ObservedPrivacyLoss | None = None
    record_loss: ObservedPrivacyLoss | None = None
    has_left: bool = False
    delta: float = 0.0
    records_waiting: int = 0
    test_curve: tuple[tuple[int, float], ...] = ()

    def get_observed_loss(self, level: str) -> ObservedPrivacyLoss | None:
        """Return the observed loss at a level, `record_use` or `record`."""
        return self.record_use_loss if level == "record_use" else self.record_loss


@dataclass(frozen=True, slots=True)
class CaptureSummary:
    """Recorded traffic of a run.

    Attributes:
        mode: `relay` or `mirror`.
        location: Folder of the capture.
        messages, bytes: Recorded messages, and their bytes.
        sender: Name of the learner whose messages are shown.
        sender_values: `(rounds, dim)` recorded messages of that learner.
        first_scale, last_scale: Scale of its noise in the first and last round that had noise; 0: no noise.
        staleness: Statistics of message staleness; None: the clock waits for all messages.
    """

    mode: str
    location: str
    messages: int
    bytes: int
    sender: str
    sender_values: FloatArray
    first_scale: float
    last_scale: float
    staleness: StalenessStatistics | None = None


@dataclass(frozen=True, slots=True)
class WiretapSummary:
    """Ciphertext that a wiretap recorded: sizes and times, no messages.

    Attributes:
        location: Folder of the capture.
        connections: Number of opened connections.
        records: Number of TLS records; without TLS, of chunks of bytes.
        bytes: Bytes of all records.
    """

    location: str
    connections: int
    records: int
    bytes: int


@dataclass(frozen=True, slots=True)
class DetectionSummary:
    """Detections of the eavesdropper's online checks: events that must never happen.

    Attributes:
        count: Number of detections.
        first: Description of each of the first ones.
        not_checked: Checks that could not be made, and why; None: all were made.
    """

    count: int
    first: tuple[str, ...]
    not_checked: str | None


@dataclass(frozen=True, slots=True)
class GuaranteeSummary:
    """Guarantee of the first learner's messages; those of the others differ in numbers only.

    Attributes:
        algorithm: Name of the algorithm in the spec.
        threat_model: Adversary's view: `wire`, `neighbour` or `output`.
        adjacency: Pairs of data sets that must be indistinguishable.
        accounting: Accounting mode of the losses.
        proof: Reference to the proof.
        constants: Name and value of each constant, and what enforces it.
        output: Epsilon against an adversary that reads published decisions only, if it has a guarantee of its own.
        shared: Whether all learners hold the same records, so that their epsilons add up.
        delta: Delta of the next two, that of the spec's `privacy`; 0: they are not stated.
        record_use_at_delta, record_at_delta: Epsilon of one record use, and of the most expensive record in all its uses, against
            an observer of all traffic, as learners charge it; None: not stated.
    """

    algorithm: str
    threat_model: str
    adjacency: str
    accounting: str
    proof: str
    constants: tuple[tuple[str, float, str], ...]
    output: float | None = None
    shared: bool = False
    delta: float = 0.0
    record_use_at_delta: float | None = None
    record_at_delta: float | None = None


@dataclass(frozen=True, slots=True)
class RunSummary:
    """Results of a whole run.

    Attributes:
        guarantee: Guarantee, and its assumptions.
        state: `finished`, `stopped` or `failed`; `detail` gives the reason.
        rounds: Planned rounds; None: unbounded.
        seconds: Seconds from the first round to the end.
        edges: Pairs of learner indices.
        one_way: Pairs of a sender and a receiver that are connected in this direction alone.
        disagreement: Largest share of held-out records on which two learners predict different labels.
        central_accuracy: Accuracy of a non-private model trained on all records together.
        warnings: Conditions of a theorem that do not hold, by code.
        private_noise: False if a learner's noise came from a recording or a seed.
        violations: Violations that learners reported of each other, one line for each.
        detections: Detections of the eavesdropper; None without one, or if its capture cannot be read.
        missing_traffic: Parts that the capture lacks, one line for each; empty without a capture, or if it is complete.
        failed_parts: Parts of the summary that could not be computed, and why, one line for each.
        wiretap: Ciphertext that a wiretap recorded; None without one, or if its capture cannot be read.
        publication_cost: Cost of publishing accuracies that were measured here, of models that were not requested from learners;
            empty: none was measured.
    """

    name: str
    run_id: str
    data: str
    state: str
    detail: str
    rounds: int | None
    seconds: float
    n_features: int
    test_records: int
    edges: tuple[tuple[int, int], ...]
    guarantee: GuaranteeSummary
    learners: tuple[LearnerSummary, ...]
    disagreement: float | None
    central_accuracy: float | None
    capture: CaptureSummary | None
    warnings: tuple[tuple[str, str], ...]
    spec_yaml: str
    version: str
    started_at: str
    progress: tuple[RunProgress, ...] = field(default=())
    private_noise: bool = True
    detections: DetectionSummary | None = None
    one_way: tuple[tuple[int, int], ...] = ()
    offline_intervals: tuple[str, ...] = ()
    missing_traffic: tuple[str, ...] = ()
    failed_parts: tuple[str, ...] = ()
    violations: tuple[str, ...] = ()
    wiretap: WiretapSummary | None = None
    publication_cost: str = ""

    @property
    def is_live(self) -> bool:
        """True if records arrive during the run; they stay with the learners, and no other process has them."""
        return self.data == "live"

    @property
    def has_prequential_accuracy(self) -> bool:
        """True if learners reported accuracy on their own records during the run."""
        return any(value is not None and math.isfinite(value) for each in self.progress for value in each.accuracy)

    @property
    def rounds_done(self) -> int:
        """Minimum number of completed rounds over the learners that stayed to the end."""
        return min((learner.rounds_done for learner in self.learners if not learner.has_left), default=0)

    @property
    def epsilon_record_use(self) -> float:
        """Epsilon of one record use against an observer of all traffic: the maximum of the learners, or their sum if shared."""
        return combine_epsilons(
            (learner.epsilon_record_use for learner in self.learners), has_shared_records=self.guarantee.shared
        )

    @property
    def rounds_per_second(self) -> float:
        """Mean number of rounds per second."""
        return self.rounds_done / self.seconds if self.seconds > 0 else 0.0

    def save(self, path: Path) -> None:
        """Write as JSON; infinities and not-a-number are written as `Infinity` and `NaN`."""
        write_json(path, self, not_finite="constants")
