"""The ledger of an audit's runs, beside `worlds.json`: which were started, what their coins are, and how they ended.

Lines of JSON, in the order in which things happen; the first is written before the first run:

    {"format": "sottovoce-runs-1", "commitments": [...]}    to the coin of every planned run: SHA-256 of its world and a nonce
    {"worlds": "..."}                                       SHA-256 of worlds.json, which has that of the first line
    {"replica": 0, "started": true}
    {"replica": 0, "run_id": "...", "outcome": "finished"}    with "seeded": true where its noise can be repeated
    {"replica": 0, "world": 1, "nonce": "...", "capture": "..."}    when all runs are over: the coin, and the capture's SHA-256

A coin that was not the one committed to, and a file that was exchanged for another one, are refused. All three could be
exchanged together: nothing here is signed. Whoever must be convinced notes the SHA-256 of the first line before the runs.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sottovoce.arrays import IntArray
from sottovoce.errors import CaptureError
from sottovoce_client.auditing.worlds import FILE as WORLDS
from sottovoce_client.documents import private
from sottovoce_eavesdropper.reading import Capture
from sottovoce_eavesdropper.storage import Folder

FILE, _FORMAT = "runs.jsonl", "sottovoce-runs-1"
MOST_BYTES = 64 * 2**20

_KINDS: Mapping[str, type] = {
    "started": bool,
    "run_id": str,
    "outcome": str,
    "world": int,
    "nonce": str,
    "capture": str,
    "seeded": bool,
}


def tossed(runs: int) -> IntArray:
    """`(runs,)` fair coins from the operating system's entropy: nobody can know them before they fall."""
    return np.array([secrets.randbits(1) for _ in range(runs)], dtype=np.int64)


def _commitment(world: int, nonce: str) -> str:
    return hashlib.sha256(f"{world} {nonce}".encode()).hexdigest()


class LedgerWriter:
    """A ledger of runs that are about to be made.

    Args:
        folder: where captures and `worlds.json` are going to lie.
        worlds: `(runs,)` the coins, secret until `reveal`.

    Attributes:
        commitment: SHA-256 of the first line, for `worlds.json`.
    """

    def __init__(self, folder: Path, worlds: IntArray) -> None:
        self._folder = folder
        self._coins = [(world, secrets.token_hex(32)) for world in worlds.tolist()]
        self._started: list[int] = []
        first = {"format": _FORMAT, "commitments": [_commitment(*coin) for coin in self._coins]}
        self.commitment = hashlib.sha256(json.dumps(first).encode()).hexdigest()
        self._write(first)

    def bind(self) -> None:
        """`worlds.json` is there: these are the worlds that the coins choose from."""
        self._write({"worlds": hashlib.sha256((self._folder / WORLDS).read_bytes()).hexdigest()})

    def started(self, replica: int) -> None:
        """A run is about to start."""
        self._started.append(replica)
        self._write({"replica": replica, "started": True})

    def ended(self, replica: int, run_id: str, outcome: str, *, seeded: bool = False) -> None:
        """A run is over, and how; `seeded`: noise of a learner came from a seed or a recording."""
        told = {"seeded": True} if seeded else {}
        self._write({"replica": replica, "run_id": run_id, "outcome": outcome, **told})

    def reveal(self, captures: Iterable[Capture]) -> None:
        """All runs are over: say how the coins of those that were started had fallen, and which captures there are."""
        digests = {capture.replica: capture.digests()[0] for capture in captures}
        for replica in self._started:
            world, nonce = self._coins[replica]
            found = {"capture": digests[replica]} if replica in digests else {}
            self._write({"replica": replica, "world": world, "nonce": nonce, **found})

    def _write(self, line: Mapping[str, Any]) -> None:
        with open(self._folder / FILE, "a", encoding="utf-8", opener=private) as file:
            file.write(json.dumps(line) + "\n")


@dataclass(frozen=True, slots=True)
class Entry:
    """A started run, as the ledger knows it.

    Attributes:
        run_id: empty: it had none yet when all ended.
        outcome: as the coordinator saw it; empty: nobody saw its end.
        world: what its coin had fallen on; None: it was not revealed.
        capture: SHA-256 of its capture; empty: there was none, or nobody looked any more.
        seeded: noise of a learner came from a seed or a recording.
    """

    run_id: str = ""
    outcome: str = ""
    world: int | None = None
    capture: str = ""
    seeded: bool = False


def read_ledger(place: Folder, worlds: Mapping[str, Any]) -> dict[int, Entry] | None:
    """The started runs of the audit that these worlds belong to, by replica; None: it kept no ledger.

    Args:
        place: where the worlds and the ledger lie.
        worlds: `worlds.json`.

    Raises:
        CaptureError: the ledger is missing, cannot be read, is that of other worlds, or a coin is not the one committed to.
    """
    where = f"{place.name}/{FILE}"
    if "ledger" not in worlds and FILE not in place.names():
        return None
    first, *lines = _lines(place, where)
    if worlds.get("ledger") != hashlib.sha256(first).hexdigest():
        raise CaptureError(f"{where} is not the ledger that {place.name}/{WORLDS} was written with")
    with place.open(WORLDS) as file:
        digest = hashlib.sha256(file.read()).hexdigest()
    try:
        commitments = json.loads(first)["commitments"]
        entries = dict[int, dict[str, Any]]()
        for number, line in enumerate(map(json.loads, lines)):
            if number == 0:
                if line["worlds"] != digest:
                    raise CaptureError(f"{where} is of another {WORLDS} than the one beside it")
                continue
            _add(entries, line, len(commitments))
        return {k: _checked(k, entries[k], commitments[k], where) for k in sorted(entries)}
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CaptureError(f"{where} does not say which runs were started: {error!r}") from None


def _lines(place: Folder, where: str) -> Iterator[bytes]:
    try:
        if (size := place.size(FILE)) > MOST_BYTES:
            raise CaptureError(f"{where} must have at most {MOST_BYTES} bytes, got {size}")
        with place.open(FILE) as file:
            content = file.read(MOST_BYTES)
    except OSError as error:
        raise CaptureError(f"cannot read {where}: {error}") from None
    # A last line that does not end was being written when the machine went down, or the disk was full.
    yield from content.rpartition(b"\n")[0].split(b"\n")


def _add(entries: dict[int, dict[str, Any]], line: Mapping[str, Any], planned: int) -> None:
    """What a line says of a run is said once."""
    replica = line["replica"]
    if type(replica) is not int or not 0 <= replica < planned:
        raise ValueError(f"replica must be in [0, {planned})")
    known = entries.setdefault(replica, {})
    for key, value in line.items():
        if key == "replica":
            continue
        if type(value) is not _KINDS[key] or key in known:
            raise ValueError(f"{key} of run {replica} must be said once, and be a {_KINDS[key].__name__}")
        known[key] = value


def _checked(replica: int, known: Mapping[str, Any], commitment: str, where: str) -> Entry:
    if known.get("started") is not True:
        raise ValueError(f"run {replica} ended before it was started")
    world = known.get("world")
    if world is not None and _commitment(world, known["nonce"]) != commitment:
        raise CaptureError(f"{where}: the coin of run {replica} is not the one that was committed to before")
    return Entry(
        known.get("run_id", ""), known.get("outcome", ""), world, known.get("capture", ""), known.get("seeded", False)
    )
