"""The records that a learner learned in each round, by its log, which may be read while its learner writes.

Nothing is written here. A learner that goes on after a death takes in its log by `Memory.recover`.
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
    """Records of a learner, round by round. Each round's are known as soon as the learner has said the next one, or ended.

    Args:
        folder: the state folder of the learner.
        learner: its name.
        run_id: the run.
        spec: of the run, as it is by now.
        n_features: features of a record.

    Raises:
        CorruptStateError: there is no log of this run, or its beginning was not kept.
    """

    def __init__(self, folder: Path, learner: str, run_id: str, spec: RunSpec, n_features: int) -> None:
        log = LearnerPaths(folder, learner).get_log_folder(run_id)
        self._folders: tuple[Path, ...] = (folder / KEPT_LOGS_FOLDER / log.name, log)
        attendance = spec.participation.learner_participation(spec.names.index(learner), spec.rounds)
        self._intake, self._attendance = RecordQueue.from_spec(spec, n_features, attendance), attendance
        self._known: dict[int, Batch] = {}
        self.known_rounds = 0
        """Rounds below this one are known."""
        self._log = read_log(*self._folders)
        if self._log.header is None:
            raise CorruptStateError(
                f"the state folder {folder} has no log of run {run_id} by learner {learner!r}: a log is there while the run goes "
                "on, and behind it where the learner was started with --keep-log"
            )
        if self._log.first_sequence:
            raise CorruptStateError(
                f"the log of run {run_id} by learner {learner!r} in {folder} has lost its beginning: start the learner with "
                "--keep-log before the run"
            )
        self._learn(self._log)

    def refresh(self) -> None:
        """Read what the log has more than before."""
        self._log = read_log(*self._folders, previous=self._log)
        self._learn(self._log)

    def _learn(self, log: LogContents) -> None:
        for entry in log.entries:
            if entry.kind is EntryKind.BATCH:
                self._intake.replay(entry.round, learner_pb2.SampleBatch.FromString(entry.body))
            elif entry.kind in (EntryKind.ROUND, EntryKind.CLOSE):
                self._take(entry.round, RoundPayload.decode(entry.body).records)

    def batch(self, t: int) -> Batch:
        """The records of a round, once.

        Raises:
            KeyError: they are not known.
        """
        return self._known.pop(t)

    def _take(self, until: int, records: int) -> None:
        """Rounds below this one are learned, the last of them with so many records: the learner was away in the others."""
        while self.known_rounds < until:
            here = self.known_rounds in self._attendance
            self._known[self.known_rounds] = self._intake.take(self.known_rounds, records if here else None)
            self.known_rounds += 1


def find_learners(folder: Path, run_id: str) -> list[str]:
    """Names of those whose log of a run stands in a state folder, still or kept."""
    found = (*folder.glob(f"{KEPT_LOGS_FOLDER}/*@*"), *folder.glob("*@*"))
    return sorted({each.name.partition("@")[2] for each in found if each.name.partition("@")[0] == run_id})
