"""Recovery: a learner that died, from its log. No file, no clock.

What it remembers is a function of what it said, heard and learned, all of which its log has: the algorithm's state after saying
exactly the logged message (`overheard`), then `listen` with the logged messages and records, round by round. Where the state
keeps noise that no message shows, the log has that, too, and the message is formed again. So that a log need not be kept whole,
it goes on from an image of the learner right after some round was said.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sottovoce.algorithms.interface import Message
from sottovoce.errors import DataError
from sottovoce_learner.bodies import Said
from sottovoce_learner.entries import Entry, Kind
from sottovoce_learner.hidden import DrawnAgain
from sottovoce_learner.log import Reading
from sottovoce_learner.memory import ANOTHER, Memory
from sottovoce_learner.snapshots import read_image
from sottovoce_rpc.codec import RoundCodec
from sottovoce_wire.v1 import learner_pb2


def recover(memory: Memory, codec: RoundCodec, reading: Reading, names: Mapping[str, object]) -> None:
    """Remember all that a log says.

    Args:
        memory: of the learner, before any step was taken.
        codec: of the run.
        reading: what is left of the log.
        names: as for `unpack`.

    Raises:
        DataError: the log was written by another version, or for another spec.
    """
    if (image := read_image(reading, names)) is not None:
        memory.restore(image)
    for entry in reading.uncovered:
        replay(memory, codec, entry)


def replay(memory: Memory, codec: RoundCodec, entry: Entry) -> None:
    """The next entry of a log.

    Raises:
        DataError: it does not follow from those before: the log was written by another version, or for another spec.
    """
    if entry.kind is Kind.BATCH:
        memory.intake.replay(entry.round, learner_pb2.SampleBatch.FromString(entry.body))
    elif entry.kind in (Kind.ROUND, Kind.CLOSE):
        said = Said.decode(entry.body)
        memory.pass_absence(entry.round)
        if entry.round > memory.done:
            _learn(memory, codec, entry, said)
        if entry.kind is Kind.ROUND:
            _say(memory, codec, entry, said)


def _say(memory: Memory, codec: RoundCodec, entry: Entry, said: Said) -> None:
    """What was said is said: no noise is drawn, and the charge is the one that stands in the log."""
    t, _, message = codec.decode(said.frame)
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


def _learn(memory: Memory, codec: RoundCodec, entry: Entry, said: Said) -> None:
    t, wanted = entry.round - 1, memory.plan.heard(entry.round - 1)
    messages = {sender: message for _, sender, message in map(codec.decode, said.heard)}
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
