"""Records that a learner learned in each round, read from its log, also while its learner writes.

Nothing is written here. A learner that resumes replays its log by `LearnerStateMachine.recover`.
"""

from __future__ import annotations

from pathlib import Path

from sottovoce_core.arrays import Batch
from sottovoce_core.errors import CorruptStateError
from sottovoce_core.spec import RunSpec
from sottovoce_learner.ingest.record_queue import RecordQueue
from sottovoce_learner.storage.state_folder import KEPT_LOGS_FOLDER, LearnerPaths
from sottovoce_learner.storage.wal import EntryKind, LogContents, RoundPayload, read_log
from sottovoce_wire.v1 import learner_pb2


class LoggedRecords:
    """Records of a learner by round, known once the learner has committed the next round, or ended.

    Args:
        folder: state folder of the learner.
        learner: learner name.
        run_id: run id.
        spec: current run spec.
        n_features: features of a record.

    Raises:
        CorruptStateError: there is no log of this run, or its beginning was not kept.
    """

    def __init__(self, folder: Path, learner: str, run_id: str, spec: RunSpec, n_features: int) -> None:
        log = LearnerPaths(folder, learner).get_log_folder(run_id)
        self._folders: tuple[Path, ...] = (folder / KEPT_LOGS_FOLDER / log.name, log)
        participation = spec.participation.learner_participation(spec.names.index(learner), spec.rounds)
        self._record_queue, self._participation = RecordQueue.from_spec(spec, n_features, participation), participation
        self._known_batches: dict[int, Batch] = {}
        self.known_rounds = 0
        """Rounds below this one are known."""
        self._log = read_log(*self._folders)
        if self._log.header is None:
            raise CorruptStateError(
                f"the state folder {folder} has no log of run {run_id} by learner {learner!r}: there is one during the run, "
                "and after it where the learner was started with --keep-log"
            )
        if self._log.first_sequence:
            raise CorruptStateError(
                f"the log of run {run_id} by learner {learner!r} in {folder} has lost its beginning: start the learner with "
                "--keep-log before the run"
            )
        self._process_entries(self._log)

    def refresh(self) -> None:
        """Read new entries of the log."""
        self._log = read_log(*self._folders, previous=self._log)
        self._process_entries(self._log)

    def _process_entries(self, log: LogContents) -> None:
        for entry in log.entries:
            if entry.kind is EntryKind.BATCH:
                self._record_queue.replay(entry.round, learner_pb2.SampleBatch.FromString(entry.body))
            elif entry.kind in (EntryKind.ROUND, EntryKind.CLOSE):
                self._mark_done(entry.round, RoundPayload.decode(entry.body).records)

    def batch(self, t: int) -> Batch:
        """Return the records of a round, once.

        Raises:
            KeyError: they are not known.
        """
        return self._known_batches.pop(t)

    def _mark_done(self, until: int, records: int) -> None:
        """Mark rounds below `until` as done; the last took `records` records, earlier unlisted rounds took none (offline)."""
        while self.known_rounds < until:
            participates = self.known_rounds in self._participation
            self._known_batches[self.known_rounds] = self._record_queue.take(
                self.known_rounds, records if participates else None
            )
            self.known_rounds += 1


def find_learners(folder: Path, run_id: str) -> list[str]:
    """Return the learners whose log of a run is in a state folder, current or kept."""
    paths = (*folder.glob(f"{KEPT_LOGS_FOLDER}/*@*"), *folder.glob("*@*"))
    return sorted({each.name.partition("@")[2] for each in paths if each.name.partition("@")[0] == run_id})
