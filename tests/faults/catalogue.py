"""The faults."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

from sottovoce_core.errors import CorruptStateError
from sottovoce_learner.storage.ledger import StoredState
from sottovoce_learner.storage.state_folder import LearnerPaths
from sottovoce_learner.storage.wal import LogContents, read_log
from tests.faults.link import Link
from tests.faults.roster import ROSTER
from tests.faults.stage import COORDINATOR, EAVESDROPPER, NAMES, Stage
from tests.faults.trial import Fault

Act = Callable[[Stage], Awaitable[None]]

GOES_ON = "the run finishes with the same results"
BLIND = "the run finishes; the capture may lack rounds"
NOTICED = "harmless, or detected: nothing is sent and the file is named; no ledger below the cost of sent messages"
_DAMAGED = r"/learners/\S*(@|\.log|\.high_water_mark|\.runs|\.identity)|another state folder than this one|is outdated"
"""Names a file, or is the coordinator's word on a folder that it does not know, or knew when it was newer."""
_FULL = r"space on its disk"


# ---- processes -------------------------------------------------------------------------------------------------------


def _killed(kind: str) -> Act:
    async def act(stage: Stage) -> None:
        await stage.sometime()
        name = _one(stage, kind)
        await stage.kill(name)
        await asyncio.sleep(stage.random.uniform(0.0, 2.0))
        await stage.start(name)

    return act


def _frozen(kind: str) -> Act:
    async def act(stage: Stage) -> None:
        await stage.sometime()
        await stage.freeze(_one(stage, kind), stage.random.uniform(1.0, 3.0))

    return act


def _told_to_end(kind: str) -> Act:
    async def act(stage: Stage) -> None:
        await stage.sometime()
        name = _one(stage, kind)
        await stage.tell_to_end(name)
        await stage.start(name)

    return act


async def _all_killed(stage: Stage) -> None:
    """As when a machine's power fails but its disks keep what was written."""
    await stage.sometime()
    everybody = (*NAMES, COORDINATOR, EAVESDROPPER)
    await asyncio.gather(*map(stage.kill, stage.random.sample(everybody, len(everybody))))
    await stage.start(EAVESDROPPER)
    await stage.start(COORDINATOR)
    await asyncio.gather(*map(stage.start, NAMES))


async def _killed_twice(stage: Stage) -> None:
    """The second time while it comes back."""
    await stage.sometime()
    name = stage.chosen()
    await stage.kill(name)
    await stage.start(name)
    await asyncio.sleep(stage.random.uniform(0.0, 0.5))
    await stage.kill(name)
    await stage.start(name)


def _one(stage: Stage, kind: str) -> str:
    return stage.chosen() if kind == "learner" else kind


# ---- points ----------------------------------------------------------------------------------------------------------


def _dies_at(point: str, *, least: int = 3, most: int = 0) -> Act:
    """A learner dies at a point, at the n-th time by chance (0: at any of its rounds), and is started again."""

    async def act(stage: Stage) -> None:
        name = stage.chosen()
        stage.arm(name, point, stage.random.randint(least, most or stage.spec.rounds - 2))
        await stage.until(0.0)
        await stage.death(name)
        await stage.start(name)

    return act


def _coordinator_dies_at(point: str) -> Act:
    async def act(stage: Stage) -> None:
        # Written are grants of half a window or more, so that this time comes in any run.
        stage.arm(COORDINATOR, point, stage.random.randint(2, stage.spec.rounds // (2 * stage.spec.clock.window)))
        await stage.until(0.0)
        await stage.death(COORDINATOR)
        await stage.start(COORDINATOR)

    return act


def _coordinator_dies_confirming(point: str) -> Act:
    """A learner that died comes back, and the coordinator dies when it takes it in."""

    async def act(stage: Stage) -> None:
        stage.arm(COORDINATOR, point, len(NAMES) + 1)
        await stage.sometime()
        name = stage.chosen()
        await stage.kill(name)
        await stage.start(name)
        await stage.death(COORDINATOR)
        await stage.start(COORDINATOR)

    return act


# ---- disks -----------------------------------------------------------------------------------------------------------


async def _torn_above(stage: Stage) -> None:
    """The last entry was written, and not yet marked: it may be torn anywhere. All places are looked at, one is left."""
    name = stage.chosen()
    stage.arm(name, "journaled", stage.random.randint(3, stage.spec.rounds - 2))
    await stage.until(0.0)
    await stage.death(name)
    files, reading = LearnerPaths(stage.state, name), _log(stage, name)
    for _ in torn(reading, stage):
        await asyncio.sleep(0)  # let others go on
        StoredState.read_verified(files)  # raises, if anything is missing
    await stage.start(name)


async def _torn_below(stage: Stage) -> None:
    """The last entry that something rests on is torn: noticed, wherever."""
    await stage.sometime()
    name = stage.chosen()
    await stage.kill(name)
    files, reading = LearnerPaths(stage.state, name), _marked(stage, name)
    for place in torn(reading, stage):
        await asyncio.sleep(0)
        try:
            StoredState.read_verified(files)
        except CorruptStateError:
            continue
        raise AssertionError(f"a cut at byte {place} of {reading.path} is not noticed")
    await stage.comes_back(name)


def torn(reading: LogContents, stage: Stage) -> Iterator[int]:
    """Cut a log at every byte of its last entry: of the file, or of what was written in it. At the end one stays."""
    raw = reading.path.read_bytes()
    begin = _begin_of_last(reading, raw)
    places = list(range(begin, reading.end_offset))
    stage.random.shuffle(places)
    for place in places:
        short = stage.random.random() < 0.5
        reading.path.write_bytes(raw[:place] if short else raw[:place] + bytes(len(raw) - place))
        if raw[place : reading.end_offset].strip(b"\0"):  # else nothing is lost
            yield place


def _begin_of_last(reading: LogContents, raw: bytes) -> int:
    """Where the last entry begins: 56 bytes of header and 16 of chain stand around its body, filled up to 8."""
    body = len(reading.entries[-1].body)
    return reading.end_offset - (56 + body + -body % 8 + 16)


def _log(stage: Stage, name: str) -> LogContents:
    found = StoredState.read(LearnerPaths(stage.state, name)).log
    assert found is not None
    return found


def _marked(stage: Stage, name: str) -> LogContents:
    """The log up to the last entry that the mark knows."""
    standing, reading = StoredState.read(LearnerPaths(stage.state, name)), _log(stage, name)
    assert standing.high_water_mark is not None
    raw, kept = reading.path.read_bytes(), standing.high_water_mark.sequence + 1
    while reading.next_sequence > kept:
        begin = _begin_of_last(reading, raw)
        reading.path.write_bytes(raw[:begin] + bytes(len(raw) - begin))
        reading = read_log(reading.path.parent)
    return reading


def _damaged(change: Callable[[Stage, Path], None]) -> Act:
    """One of the files of a learner that is dead is changed."""

    async def act(stage: Stage) -> None:
        await stage.sometime()
        name = stage.chosen()
        await stage.kill(name)
        own = [*stage.state.glob(f"{name}.*"), *stage.state.glob(f"*@{name}/*.log")]
        files = sorted(path for path in own if path.suffix != ".lock" and path.read_bytes())
        change(stage, stage.random.choice(files))
        await stage.comes_back(name)

    return act


def _flipped(stage: Stage, path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[stage.random.randrange(len(raw.rstrip(b"\0")))] ^= 1 << stage.random.randrange(8)
    path.write_bytes(raw)


def _cut(stage: Stage, path: Path) -> None:
    raw = path.read_bytes()
    path.write_bytes(raw[: stage.random.randrange(len(raw.rstrip(b"\0")))])


def _lost(stage: Stage, path: Path) -> None:
    path.unlink()


async def _disk_full(stage: Stage) -> None:
    stage.arm(stage.chosen(), "full", stage.random.randint(12, stage.spec.rounds))
    await stage.until(0.0)


async def _no_room_for_a_while(stage: Stage) -> None:
    stage.arm(stage.chosen(), "no room for a while", stage.random.randint(12, stage.spec.rounds))
    await stage.until(0.0)


async def _coordinators_disk_full(stage: Stage) -> None:
    """For a while: what cannot be told, because it cannot be written, is told when it can."""
    stage.arm(COORDINATOR, "full for a while", stage.random.randint(10, 13))
    await stage.until(0.0)
    await stage.says(COORDINATOR, "cannot be written")


async def _eavesdroppers_disk_full(stage: Stage) -> None:
    stage.arm(EAVESDROPPER, "full captures", stage.random.randint(3, 4))
    await stage.until(0.0)
    await stage.says(EAVESDROPPER, "cannot be written")


async def _disk_read_only(stage: Stage) -> None:
    """For as long as one start takes."""
    await stage.sometime()
    name = stage.chosen()
    await stage.kill(name)
    stage.arm(name, "read-only")
    await stage.start(name)
    await stage.processes[name].over()
    await stage.start(name)


# ---- the network -----------------------------------------------------------------------------------------------------


def _a_link(stage: Stage) -> Link:
    """Of those over which something passes: nobody opens a channel to the first learner but its feeder."""
    return stage.links[stage.random.choice(sorted(stage.links))]


async def _cut_both_ways(stage: Stage) -> None:
    await stage.sometime()
    link = _a_link(stage)
    link.forth.clear()
    link.back.clear()
    await asyncio.sleep(stage.random.uniform(1.0, 10.0))
    link.heal()


async def _cut_one_way(stage: Stage) -> None:
    await stage.sometime()
    link = _a_link(stage)
    stage.random.choice((link.forth, link.back)).clear()
    await asyncio.sleep(stage.random.uniform(1.0, 10.0))
    link.heal()


async def _reset(stage: Stage) -> None:
    await stage.sometime()
    for _ in range(stage.random.randint(1, 4)):
        _a_link(stage).reset()
        await asyncio.sleep(stage.random.uniform(0.0, 0.5))


async def _half_open(stage: Stage) -> None:
    await stage.sometime()
    _a_link(stage).forget_callers()


async def _slow(stage: Stage) -> None:
    await stage.sometime()
    link = _a_link(stage)
    link.delay_s = stage.random.uniform(0.05, 0.5)
    await asyncio.sleep(stage.random.uniform(2.0, 5.0))
    link.heal()


PROCESSES = (
    Fault("learner killed", GOES_ON, _killed("learner")),
    Fault("learner killed twice", GOES_ON, _killed_twice),
    Fault("learner frozen", GOES_ON, _frozen("learner")),
    Fault("learner told to end", GOES_ON, _told_to_end("learner")),
    Fault("coordinator killed", GOES_ON, _killed(COORDINATOR)),
    Fault("coordinator frozen", GOES_ON, _frozen(COORDINATOR)),
    Fault("coordinator told to end", GOES_ON, _told_to_end(COORDINATOR)),
    Fault("eavesdropper killed", BLIND, _killed(EAVESDROPPER), blind=True),
    Fault("eavesdropper told to end", BLIND, _told_to_end(EAVESDROPPER), blind=True),
    Fault("eavesdropper frozen", GOES_ON, _frozen(EAVESDROPPER)),
    Fault("all killed", BLIND, _all_killed, blind=True),
)

POINTS = (
    Fault("dies when it has drawn", GOES_ON, _dies_at("drawn")),
    Fault("dies when it has journaled", GOES_ON, _dies_at("journaled")),
    Fault("dies when it has marked", GOES_ON, _dies_at("marked")),
    Fault("dies when it has told one neighbour", GOES_ON, _dies_at("told one")),
    Fault("dies when it has heard", GOES_ON, _dies_at("heard")),
    Fault("dies when it has learned", GOES_ON, _dies_at("learned")),
    Fault("dies before a receipt", GOES_ON, _dies_at("kept", least=1, most=3)),
    Fault("dies when it has closed", GOES_ON, _dies_at("closed", least=1, most=1)),
    Fault("coordinator dies before a grant is written", GOES_ON, _coordinator_dies_at("before a grant")),
    Fault("coordinator dies after a grant is written", GOES_ON, _coordinator_dies_at("after a grant")),
    Fault("coordinator dies before it confirms", GOES_ON, _coordinator_dies_confirming("before a confirmation")),
    Fault("coordinator dies after it confirms", GOES_ON, _coordinator_dies_confirming("after a confirmation")),
)

DISKS = (
    Fault("torn above the mark", "at every byte: the run finishes with the same results", _torn_above),
    Fault(
        "torn at the mark",
        "at every byte: detected, nothing is sent; a repair charges at least the cost of sent messages",
        _torn_below,
        ends=_DAMAGED,
        must_end=True,
    ),
    Fault("a bit flipped", NOTICED, _damaged(_flipped), ends=_DAMAGED),
    Fault("a file cut", NOTICED, _damaged(_cut), ends=_DAMAGED),
    Fault("a file lost", NOTICED, _damaged(_lost), ends=_DAMAGED),
    Fault(
        "learner's disk full",
        "the run ends with this reason; no ledger below the cost of sent messages",
        _disk_full,
        ends=_FULL,
        must_end=True,
        deadline_s=10.0,
    ),
    Fault("learner's disk full for a while", GOES_ON, _no_room_for_a_while),
    Fault("coordinator's disk full for a while", "the run waits, and finishes", _coordinators_disk_full),
    Fault("eavesdropper's disk full", "the recording ends, the run finishes", _eavesdroppers_disk_full, blind=True),
    Fault("learner's disk read-only", "refused, and the run finishes once it can be written", _disk_read_only),
)

NETWORK = (
    Fault("a link cut, both ways", GOES_ON, _cut_both_ways, linked=True),
    Fault("a link cut, one way", GOES_ON, _cut_one_way, linked=True),
    Fault("links reset", GOES_ON, _reset, linked=True),
    Fault("a link half open", GOES_ON, _half_open, linked=True),
    Fault("a slow link", GOES_ON, _slow, linked=True),
)

CATALOGUE = {
    "Processes": PROCESSES,
    "A learner or the coordinator at a point": POINTS,
    "Disks": DISKS,
    "The network": NETWORK,
    "Participation": ROSTER,
}
EVERY = tuple(fault for faults in CATALOGUE.values() for fault in faults)
