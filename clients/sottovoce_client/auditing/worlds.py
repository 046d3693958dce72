"""The files of an audit beside its captures: the two worlds, and the ledger of the runs that were started.

The ledger of an audit's runs, beside `worlds.json`: which were started, what their coins are, and how they ended.

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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from sottovoce_client.documents import private
from sottovoce_core.arrays import IntArray
from sottovoce_core.auditing.audit import Coins
from sottovoce_core.auditing.plan import AuditPlan
from sottovoce_core.auditing.worlds import Worlds
from sottovoce_core.data import LearnerData, PlacedData
from sottovoce_core.errors import CaptureError, DataError, SottovoceError
from sottovoce_core.experiment import Prepared
from sottovoce_core.spec import RunSpec
from sottovoce_eavesdropper.reading import Capture
from sottovoce_eavesdropper.storage import Folder

# ---- worlds ----------------------------------------------------------------------------------------------------------

WORLDS_FILE, _FORMAT = "worlds.json", "sottovoce-worlds-2"
_OF_ONE_PAIR = "sottovoce-worlds-1"
"""The format of before: one pair of worlds, its facts among the others."""

MAX_WORLDS_BYTES = 64 * 2**20

Document = dict[str, Any]
Way = Literal["relay", "wiretap"]


def as_audited(spec: RunSpec, capture: Way = "relay") -> RunSpec:
    """A spec as an audit runs it: every edge overheard, no end before the last round, nothing told that costs time.

    Args:
        spec: of the user.
        capture: how edges are overheard.
    """
    return spec.model_copy(
        update={
            "capture": capture,
            "privacy": type(spec.privacy)(),
            "telemetry": type(spec.telemetry)(),
            "topology": spec.topology.without_files(spec.names),
        }
    )


def write_worlds(
    folder: Path,
    plan: AuditPlan,
    ledger: str | None = None,
    pair_of_run: Sequence[int] = (),
    *,
    capture: Way = "relay",
    seeded: bool = False,
) -> None:
    """Write down what the worlds are.

    Args:
        folder: of the captures.
        plan: the audit.
        ledger: SHA-256 of the first line of the ledger of its runs; None: none is kept.
        pair_of_run: of every planned run, the pair of worlds that it lives in one of; empty where there is one pair.
        capture: how edges are overheard.
        seeded: whether the coins come from the seed.
    """
    document = {
        "format": _FORMAT,
        "learner": plan.run.spec.names[plan.worlds.learner],
        "shared": plan.worlds.shared,
        "pairs": [_pair(each.worlds) for each in plan.pairs],
        **({"pair_of_run": list(pair_of_run)} if plan.beside else {}),
        "runs": plan.all_runs,
        "seed": plan.seeds.audited.entropy,
        "coins": "seed" if seeded else "operating system",
        "data": digest(plan.data),
        "spec": as_audited(plan.run.spec, capture).model_dump(mode="json"),
        **({} if ledger is None else {"ledger": ledger}),
    }
    with open(folder / WORLDS_FILE, "w", encoding="utf-8", opener=private) as file:  # it holds records
        file.write(json.dumps(document, indent=2) + "\n")


def _pair(worlds: Worlds) -> Document:
    swapped = np.flatnonzero(worlds.swapped())
    use = int(swapped[0])
    return {
        "what": worlds.what,
        **({"use": use} if len(swapped) == 1 else {"row": int(worlds.first.order[use])}),
        "first": _record(worlds.first, use),
        "second": _record(worlds.second, use),
    }


def _record(data: LearnerData, use: int) -> Document:
    row = data.order[use]
    return {"features": data.features[row].tolist(), "label": float(data.labels[row])}


def digest(data: PlacedData) -> str:
    """Equal for equal records in equal rounds."""
    found = hashlib.sha256()
    for own in data.learners:
        for part in (own.features[own.order], own.labels[own.order], own.offsets):
            found.update(np.ascontiguousarray(part).tobytes())
    return found.hexdigest()


def read_worlds(place: Folder) -> Document:
    """The file as it stands.

    Raises:
        CaptureError: it cannot be read, or is none.
    """
    where = f"{place.name}/{WORLDS_FILE}"
    try:
        if (size := place.size(WORLDS_FILE)) > MAX_WORLDS_BYTES:
            raise CaptureError(f"{where} must have at most {MAX_WORLDS_BYTES} bytes, got {size}")
        with place.open(WORLDS_FILE) as file:
            document = json.loads(file.read(MAX_WORLDS_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise CaptureError(f"cannot read {where}: {str(error) or type(error).__name__}") from None
    if not isinstance(document, dict) or document.get("format") not in (_FORMAT, _OF_ONE_PAIR):
        raise CaptureError(f"{where} must say what two worlds are, in the format {_FORMAT}")
    return document


def worlds_from(document: Document, prepared: Prepared, where: str) -> list[Worlds]:
    """All pairs of worlds.

    Args:
        document: the file.
        prepared: the run and its data.
        where: what errors call the file.

    Raises:
        CaptureError: it lacks something, or something is of another kind.
        DataError: made with other data, the worlds are not adjacent, or the loss is not defined for them.
    """
    try:
        names = prepared.run.spec.names
        if document["learner"] not in names:
            raise CaptureError(f"{where}: the learner must be one of {', '.join(names)}, got {document['learner']!r}")
        if document["data"] != digest(prepared.data):
            raise DataError(
                f"{where} is of other records than the spec's data source gives now; SOTTOVOCE_DATA may lead elsewhere"
            )
        learner = names.index(document["learner"])
        own = prepared.data.learners[learner]
        pairs = document["pairs"] if document["format"] == _FORMAT else [document]
        found = [_worlds(pair, learner, own, shared=document["shared"] is True) for pair in pairs]
        for worlds in found:
            worlds.require_learnable(prepared.run.loss)
        return found
    except DataError as error:
        raise DataError(str(error) if where in str(error) else f"{where}: {error}") from None
    except SottovoceError:
        raise
    except (KeyError, TypeError, ValueError) as error:
        raise CaptureError(f"{where} does not say what two worlds are: {error!r}") from None


def _worlds(pair: Document, learner: int, own: LearnerData, *, shared: bool) -> Worlds:
    kind = "use" if "use" in pair else "row"
    swap, index = (own.with_use if kind == "use" else own.with_record), pair[kind]
    if type(index) is not int:
        raise TypeError(f"{kind} must be a number")
    first, second = (
        swap(index, np.asarray(record["features"], dtype=np.float64), float(record["label"]))
        for record in (pair["first"], pair["second"])
    )
    return Worlds(learner, first, second, str(pair["what"]), shared)


def coins_of(document: Document) -> Coins:
    """What chose the world of every run, as far as the file says it."""
    told = document.get("coins")
    return told if told in ("seed", "operating system") else "not known"


def pairs_of(document: Document, where: str) -> Callable[[int | None], int]:
    """Which pair of worlds a run is of, by its replica.

    Args:
        document: the file.
        where: what errors call the file.

    Raises:
        CaptureError: the file does not say it.
    """
    pairs = len(document.get("pairs", [document]))
    if pairs == 1:
        return lambda replica: 0
    told = document.get("pair_of_run")
    if not isinstance(told, list) or not all(type(k) is int and 0 <= k < pairs for k in told):
        raise CaptureError(f"{where}: pair_of_run must say of every run which of the {pairs} pairs of worlds it is of")

    def pair(replica: int | None) -> int:
        if replica is None or not 0 <= replica < len(told):
            raise CaptureError(f"{where} must say of which pair of worlds run {replica} is")
        return int(told[replica])

    return pair


# ---- the ledger ------------------------------------------------------------------------------------------------------

LEDGER_FILE, _LEDGER_FORMAT = "runs.jsonl", "sottovoce-runs-1"
MAX_LEDGER_BYTES = 64 * 2**20

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
        first = {"format": _LEDGER_FORMAT, "commitments": [_commitment(*coin) for coin in self._coins]}
        self.commitment = hashlib.sha256(json.dumps(first).encode()).hexdigest()
        self._write(first)

    def bind(self) -> None:
        """`worlds.json` is there: these are the worlds that the coins choose from."""
        self._write({"worlds": hashlib.sha256((self._folder / WORLDS_FILE).read_bytes()).hexdigest()})

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
        with open(self._folder / LEDGER_FILE, "a", encoding="utf-8", opener=private) as file:
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
    where = f"{place.name}/{LEDGER_FILE}"
    if "ledger" not in worlds and LEDGER_FILE not in place.names():
        return None
    first, *lines = _lines(place, where)
    if worlds.get("ledger") != hashlib.sha256(first).hexdigest():
        raise CaptureError(f"{where} is not the ledger that {place.name}/{WORLDS_FILE} was written with")
    with place.open(WORLDS_FILE) as file:
        digest = hashlib.sha256(file.read()).hexdigest()
    try:
        commitments = json.loads(first)["commitments"]
        entries = dict[int, dict[str, Any]]()
        for number, line in enumerate(map(json.loads, lines)):
            if number == 0:
                if line["worlds"] != digest:
                    raise CaptureError(f"{where} is of another {WORLDS_FILE} than the one beside it")
                continue
            _add(entries, line, len(commitments))
        return {k: _checked(k, entries[k], commitments[k], where) for k in sorted(entries)}
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CaptureError(f"{where} does not say which runs were started: {error!r}") from None


def _lines(place: Folder, where: str) -> Iterator[bytes]:
    try:
        if (size := place.size(LEDGER_FILE)) > MAX_LEDGER_BYTES:
            raise CaptureError(f"{where} must have at most {MAX_LEDGER_BYTES} bytes, got {size}")
        with place.open(LEDGER_FILE) as file:
            content = file.read(MAX_LEDGER_BYTES)
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
