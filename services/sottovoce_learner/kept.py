"""What a learner has learned in a run, read off its log: while the run goes on, and behind it where logs are kept.

Nothing is written here, and entries that are right never change, so a log may be read while its learner writes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from sottovoce.arrays import Batch
from sottovoce.errors import DataError
from sottovoce.spec import RunSpec
from sottovoce_learner.bodies import Said
from sottovoce_learner.entries import START, Entry, Kind, walk
from sottovoce_learner.intake import intake_for
from sottovoce_learner.log import PAGE, begins
from sottovoce_learner.standing import KEPT, Files
from sottovoce_wire.v1 import learner_pb2


class Learned:
    """Records of a learner, round by round. Each round's are known as soon as the learner has said the next one, or ended.

    Args:
        folder: the state folder of the learner.
        learner: its name.
        run_id: the run.
        spec: of the run, as it is by now.
        n_features: features of a record.

    Raises:
        DataError: there is no log of this run, or its beginning was not kept.
    """

    def __init__(self, folder: Path, learner: str, run_id: str, spec: RunSpec, n_features: int) -> None:
        self._log = _Following(folder, learner, run_id)
        attendance = spec.roster.attendance(spec.names.index(learner), spec.rounds)
        self._intake, self._attendance = intake_for(spec, n_features, attendance), attendance
        self._known: dict[int, Batch] = {}
        self.rounds = 0
        """Rounds below this one are known."""

    def look(self) -> None:
        """Read what the log has more than before."""
        for entry in self._log.more():
            if entry.kind is Kind.BATCH:
                self._intake.replay(entry.round, learner_pb2.SampleBatch.FromString(entry.body))
            elif entry.kind in (Kind.ROUND, Kind.CLOSE):
                self._take(entry.round, Said.decode(entry.body).records)

    def batch(self, t: int) -> Batch:
        """The records of a round, once.

        Raises:
            KeyError: they are not known.
        """
        return self._known.pop(t)

    def _take(self, until: int, records: int) -> None:
        """Rounds below this one are learned, the last of them with so many records: the learner was away in the others."""
        while self.rounds < until:
            here = self.rounds in self._attendance
            self._known[self.rounds] = self._intake.take(self.rounds, records if here else None)
            self.rounds += 1


class _Place:
    """Where reading goes on: in which segment, at which of its bytes, and which entry is due there."""

    def __init__(self, segment: int = 0, first: int = 0, base: bytes = START) -> None:
        self.segment, self.first, self.base = segment, first, base
        self.at, self.sequence, self.chain = PAGE, first, base


class _Following:
    """Entries of a log, as they come."""

    def __init__(self, folder: Path, learner: str, run_id: str) -> None:
        self._folders = (folder / KEPT / Files(folder, learner).log(run_id).name, Files(folder, learner).log(run_id))
        self._place = _Place()
        segments = sorted(int(path.stem) for each in self._folders for path in each.glob("*.log"))
        if not segments:
            raise DataError(
                f"the state folder {folder} has no log of run {run_id} by learner {learner!r}: a log is there while the run goes "
                "on, and behind it where the learner was started with --keep-log"
            )
        if segments[0] > 0:
            raise DataError(
                f"the log of run {run_id} by learner {learner!r} in {folder} has lost its beginning: start the learner with "
                "--keep-log before the run"
            )

    def more(self) -> Iterator[Entry]:
        """Those that were not read yet."""
        place = self._place
        with suppress(FileNotFoundError):  # put away just now: it is found there at the next look
            while begins(path := self._path(place.segment), place.first, place.base):
                with path.open("rb") as file:
                    file.seek(place.at)
                    raw, start = file.read(), place.at
                for placed in walk(raw, 0, place.sequence, place.chain):
                    place.at, place.sequence, place.chain = start + placed.end, place.sequence + 1, placed.chain
                    yield placed.entry
                if not begins(self._path(place.segment + 1), place.sequence, place.chain):
                    return
                place = self._place = _Place(place.segment + 1, place.sequence, place.chain)

    def _path(self, segment: int) -> Path:
        kept, own = (folder / f"{segment:08d}.log" for folder in self._folders)
        return kept if kept.exists() else own


def learners_in(folder: Path, run_id: str) -> list[str]:
    """Names of those whose log of a run stands in a state folder, still or kept."""
    found = (*folder.glob(f"{KEPT}/*@*"), *folder.glob("*@*"))
    return sorted({each.name.partition("@")[2] for each in found if each.name.partition("@")[0] == run_id})
