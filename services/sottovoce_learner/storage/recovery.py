"""Replays of a log: the learner after a death, and the records that it learned in each round.

What a learner remembers is a function of what it said, heard and learned, all of which its log has: the algorithm's state after
saying exactly the logged message (`overheard`), then `listen` with the logged messages and records, round by round. Where the
state keeps noise that no message shows, the log has that, too, and the message is formed again. So that a log need not be kept
whole, it goes on from an image of the learner right after some round was said.

Nothing is written here, and entries that are right never change, so a log may be read while its learner writes.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sottovoce_core.algorithms.interface import Message
from sottovoce_core.arrays import Batch
from sottovoce_core.errors import DataError
from sottovoce_core.spec import RunSpec
from sottovoce_learner.ingest.queue import Intake, intake_for
from sottovoce_learner.memory import ANOTHER, DrawnAgain, Memory
from sottovoce_learner.storage.snapshot import read_image
from sottovoce_learner.storage.state_folder import KEPT, Files
from sottovoce_learner.storage.wal import Entry, EntryReader, Kind, Reading, Said
from sottovoce_wire.v1 import learner_pb2


def recover(memory: Memory, reading: Reading, names: Mapping[str, object]) -> None:
    """Remember all that a log says.

    Args:
        memory: of the learner, before any step was taken.
        reading: what is left of the log.
        names: as for `unpack`.

    Raises:
        DataError: the log was written by another version, or for another spec.
    """
    if (image := read_image(reading, names)) is not None:
        memory.restore(image)
    for entry in reading.uncovered:
        replay(memory, entry)


def replay(memory: Memory, entry: Entry) -> None:
    """The next entry of a log.

    Raises:
        DataError: it does not follow from those before: the log was written by another version, or for another spec.
    """
    if entry.kind is Kind.BATCH:
        _take_in(memory.intake, entry)
    elif entry.kind in (Kind.ROUND, Kind.CLOSE):
        said = Said.decode(entry.body)
        memory.pass_absence(entry.round)
        if entry.round > memory.done:
            _learn(memory, entry, said)
        if entry.kind is Kind.ROUND:
            _say(memory, entry, said)


def _take_in(intake: Intake, entry: Entry) -> None:
    intake.replay(entry.round, learner_pb2.SampleBatch.FromString(entry.body))


def _say(memory: Memory, entry: Entry, said: Said) -> None:
    """What was said is said: no noise is drawn, and the charge is the one that stands in the log."""
    t, _, message = memory.codec.decode(said.frame)
    if t != entry.round or memory.books.price(t) != entry.spent:
        raise _unlike(entry, f"round {entry.round} at epsilon {entry.spent:.6g}", f"round {t} at another price")
    memory.say(t, _having_said(memory, entry, message, said.drawn), said.frame, entry.spent)


def _having_said(memory: Memory, entry: Entry, message: Message, drawn: bytes) -> Any:
    if not memory.hidden:
        return memory.algorithm.overheard(memory.state, message)[0]
    noise = DrawnAgain(drawn)
    state, formed = memory.algorithm.speak(memory.state, noise)
    if len(noise.left) or any(value.tobytes() != message[name].tobytes() for name, value in formed.fields.items()):
        raise _unlike(entry, "a message", "another one")
    return state


def _learn(memory: Memory, entry: Entry, said: Said) -> None:
    t, wanted = entry.round - 1, memory.plan.heard(entry.round - 1)
    messages = {sender: message for _, sender, message in map(memory.codec.decode, said.heard)}
    if t != memory.done or messages.keys() != wanted.keys():
        raise _unlike(entry, f"messages of {sorted(messages)} in round {t}", f"of {sorted(wanted)} in {memory.done}")
    batch = memory.intake.take(t, said.records)
    if batch.size != said.records or memory.intake.filled <= t:
        raise _unlike(entry, f"{said.records} records in round {t}", f"{batch.size}")
    heard = memory.hear(messages, batch)
    memory.learn(memory.algorithm.listen(memory.state, heard, batch), Said(b"", said.heard, said.upto, said.records))


def _unlike(entry: Entry, wanted: str, got: str) -> DataError:
    return DataError(
        f"entry {entry.sequence} of the log says {wanted}, and by the entries before it would be {got}: {ANOTHER}"
    )


# ---- what was learned ------------------------------------------------------------------------------------------------


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
        self._log = _open(folder, learner, run_id)
        attendance = spec.roster.attendance(spec.names.index(learner), spec.rounds)
        self._intake, self._attendance = intake_for(spec, n_features, attendance), attendance
        self._known: dict[int, Batch] = {}
        self.rounds = 0
        """Rounds below this one are known."""

    def look(self) -> None:
        """Read what the log has more than before."""
        for entry in self._log.new():
            if entry.kind is Kind.BATCH:
                _take_in(self._intake, entry)
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


def _open(folder: Path, learner: str, run_id: str) -> EntryReader:
    """The entries of a log from its beginning, whether they were put away or not."""
    log = Files(folder, learner).log(run_id)
    kept = folder / KEPT / log.name
    segments = sorted(int(path.stem) for each in (kept, log) for path in each.glob("*.log"))
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
    return EntryReader(kept, log)


def learners_in(folder: Path, run_id: str) -> list[str]:
    """Names of those whose log of a run stands in a state folder, still or kept."""
    found = (*folder.glob(f"{KEPT}/*@*"), *folder.glob("*@*"))
    return sorted({each.name.partition("@")[2] for each in found if each.name.partition("@")[0] == run_id})
