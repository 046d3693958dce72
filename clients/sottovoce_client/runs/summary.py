"""What a run came to: plain values, gathered by `evaluate`, shown by `console` and `report`, saved as `summary.json`."""

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
    """One look at the running learners; per-learner lists are by index.

    Attributes:
        seconds: since the first round.
        rounds: rounds done.
        accuracy: prequential accuracy; None where the run did not opt in, or nothing was predicted yet.
        epsilon: spent.
        messages: sent.
        away: names of learners that are gone, for now or for good.
        misconduct: what learners noticed of each other, in words.
        left: indices of those who have left, or were lost, and whose rounds do not count any more.
        run_id: of the run; empty: not told.
        uncaptured: why nothing is captured, though it should be; empty: it is; None: it is over, or not told.
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

    @property
    def rounds_done(self) -> int:
        """Rounds that all have done who are still in the run."""
        return min((done for i, done in enumerate(self.rounds) if i not in self.departed_learners), default=0)


@dataclass(frozen=True, slots=True)
class ObservedPrivacyLoss:
    """An adjacent data set, and how well this very capture tells it from the true one.

    Attributes:
        loss: exact privacy loss of the capture, absolute.
        supremum: the largest loss that any capture could have shown for this pair of data sets.
        budget: the epsilon that the guarantee claims for such a swap.
        by_round: cumulative loss, signed.
    """

    loss: float
    supremum: float
    claimed_epsilon: float
    cumulative_loss: FloatArray


@dataclass(frozen=True, slots=True)
class LearnerSummary:
    """One learner at the end.

    Attributes:
        records: how many records it holds; of live ones, has learned.
        most_uses: in how many rounds the most used of them was learned.
        rounds: rounds done.
        left: whether it left, or was lost, before the last round.
        test_accuracy: on the held-out records; None where it is not known.
        prequential_accuracy: on its own records, each predicted before it was learned.
        messages, bytes: said.
        spent: epsilon charged by the learner itself.
        budget: where it would have stopped; None for nowhere.
        paper: cumulative epsilon by the paper's formula.
        event: tight cumulative epsilon of one use of one record.
        record: tight cumulative epsilon of the record that costs most in all its uses.
        infinite_horizon: bound on `event` over infinitely many rounds; may be infinite.
        paper_curve, event_curve, record_curve: the same after every round.
        waiting: live records that waited when the run ended, and were learned by none.
        test_curve: rounds, and the accuracy on the held-out records after them, where it was measured here.
        swap_event, swap_record: the record that is learned first, swapped for the worst one in its first use, and in all
            its uses; None without a capture.
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
    records_waiting: int = 0
    test_curve: tuple[tuple[int, float], ...] = ()

    def get_observed_loss(self, level: str) -> ObservedPrivacyLoss | None:
        """Its swap at this level: `event` or `record`."""
        return self.record_use_loss if level == "record_use" else self.record_loss


@dataclass(frozen=True, slots=True)
class CaptureSummary:
    """What was overheard.

    Attributes:
        mode: `relay` or `mirror`.
        location: folder of the capture.
        messages, bytes: recorded.
        messages_of: name of the learner whose messages are shown.
        heard: `(rounds, dim)` what that learner said, as overheard.
        first_scale, last_scale: scale of its noise in the first and last round that had any; 0: there was none.
        late: how late messages were; None: all waited for them.
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
    """What a wiretap noted: sizes and times of ciphertext, and no message.

    Attributes:
        location: folder of the capture.
        connections: that were opened.
        records: of TLS; where there was none, of what came at a time.
        bytes: of all records.
    """

    location: str
    connections: int
    records: int
    bytes: int


@dataclass(frozen=True, slots=True)
class DetectionSummary:
    """What the eavesdropper noticed, while the run went on, that must never happen.

    Attributes:
        count: of findings.
        first: a line on each of the first ones.
        not_checked: what could not be looked for, and why; None: all was.
    """

    count: int
    first: tuple[str, ...]
    not_checked: str | None


@dataclass(frozen=True, slots=True)
class GuaranteeSummary:
    """What the algorithm promised of the first learner's messages; the others differ in numbers only.

    Attributes:
        algorithm: its name in the spec.
        threat_model: who may listen: `wire`, `neighbour` or `output`.
        adjacency: which two data sets must look alike.
        accounting: the mode that the losses follow.
        proof: where it stands.
        constants: name, value, and what enforces it.
        output: epsilon against somebody who sees published decisions only, where that is a promise of its own.
        shared: all learners hold the same records, and their epsilons add up.
    """

    algorithm: str
    threat_model: str
    adjacency: str
    accounting: str
    proof: str
    constants: tuple[tuple[str, float, str], ...]
    output: float | None = None
    shared: bool = False


@dataclass(frozen=True, slots=True)
class RunSummary:
    """A whole run.

    Attributes:
        promise: what was promised, and what that rests on.
        state: `finished`, `stopped` or `failed`; `detail` says why.
        rounds: planned; None: no end was.
        seconds: from the first round to the end.
        edges: pairs of learner indices.
        one_way: pairs of them, of which the first speaks to the second and never hears it.
        disagreement: largest share of held-out records on which two learners predict different labels.
        central_accuracy: of a non-private model trained on all records together.
        warnings: conditions of a theorem that do not hold, by code.
        private_noise: False where a learner's noise came from a recording or a seed.
        misconduct: what learners noticed of each other, a line on each.
        noticed: by the eavesdropper; None without one, or where its capture cannot be read.
        not_captured: what the capture lacks, a line on each; nothing without one, or where it is complete.
        not_computed: what could not be computed of the summary, and why, a line on each.
        tapped: what a wiretap noted; None without one, or where its capture cannot be read.
        measured: what it costs to publish accuracies that were measured here, of models that no learner was asked for; empty:
            none was.
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
        """Whether its records came while it went on: they are with its learners, and nobody else has them."""
        return self.data == "live"

    @property
    def has_prequential_accuracy(self) -> bool:
        """Whether learners told, while it went on, how right they were on their own records."""
        return any(told is not None and math.isfinite(told) for look in self.progress for told in look.accuracy)

    @property
    def rounds_done(self) -> int:
        """Rounds that all learners have done who were there to the end."""
        return min((learner.rounds_done for learner in self.learners if not learner.has_left), default=0)

    @property
    def epsilon_record_use(self) -> float:
        """Epsilon of one event to somebody who hears everything: the largest of all learners, or their sum if shared."""
        return combine_epsilons(
            (learner.epsilon_record_use for learner in self.learners), has_shared_records=self.guarantee.shared
        )

    @property
    def rounds_per_second(self) -> float:
        """Mean speed."""
        return self.rounds_done / self.seconds if self.seconds > 0 else 0.0

    def save(self, path: Path) -> None:
        """Write as JSON, in which infinities and not-a-number stand as `Infinity` and `NaN`."""
        write_json(path, self, not_finite="constants")
