"""Files of an audit next to its captures: the two worlds, and the ledger of the started runs.

The ledger states which runs were started, their coins, and their outcomes. It has lines of JSON, in order of time; the first line
is written before the first run:

    {"format": "sottovoce-runs-1", "commitments": [...]}    to the coin of every planned run: SHA-256 of its world and a nonce
    {"worlds": "..."}                                       SHA-256 of worlds.json, which has that of the first line
    {"replica": 0, "started": true}
    {"replica": 0, "run_id": "...", "outcome": "finished"}    with "seeded": true if its noise can be repeated
    {"replica": 0, "world": 1, "nonce": "...", "capture": "..."}    after all runs: the coin, and the capture's SHA-256

A coin that differs from its commitment, and a replaced file, are refused. All three could be replaced together, since none is
signed. An auditor who must be convinced notes the SHA-256 of the first line before the runs.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, Field, ValidationError

from sottovoce_client.atomic_files import open_private
from sottovoce_core.arrays import IntArray
from sottovoce_core.auditing.plan import AuditPlan
from sottovoce_core.auditing.worlds import Worlds
from sottovoce_core.data import LearnerData, PlacedData
from sottovoce_core.errors import CaptureError, DataError
from sottovoce_core.experiment import PreparedRun
from sottovoce_core.spec import RunSpec
from sottovoce_core.validation_errors import describe_requirement
from sottovoce_eavesdropper.capture_reader import Capture
from sottovoce_eavesdropper.storage import Folder

# ---- worlds ----------------------------------------------------------------------------------------------------------

WORLDS_FILE = "worlds.json"
_FORMAT: Literal["sottovoce-worlds-2"] = "sottovoce-worlds-2"

MAX_WORLDS_BYTES = 64 * 2**20

CaptureMethod = Literal["relay", "wiretap"]


class _Record(BaseModel, strict=True):
    features: list[float]
    label: float


class _Pair(BaseModel, strict=True):
    """Two worlds: a use of a record, or a record in all of its uses, and its value in each world."""

    what: str
    use: int | None = None
    row: int | None = None
    first: _Record
    second: _Record

    @classmethod
    def from_worlds(cls, worlds: Worlds) -> _Pair:
        """Convert worlds to their file form."""
        differing = np.flatnonzero(worlds.find_differing_uses())
        use = int(differing[0])
        place = {"use": use} if len(differing) == 1 else {"row": int(worlds.records_0.order[use])}
        records = []
        for data in (worlds.records_0, worlds.records_1):
            row = data.order[use]
            records.append(_Record(features=data.features[row].tolist(), label=float(data.labels[row])))
        return cls(what=worlds.description, **place, first=records[0], second=records[1])

    def build_worlds(self, learner: int, own: LearnerData, *, shared: bool) -> Worlds:
        """Build the worlds from the records of this learner."""
        replace_record, index = (own.with_record, self.row) if self.use is None else (own.with_use, self.use)
        if index is None:
            raise CaptureError(f"a pair of worlds must have a use or a row: {self.what}")
        first, second = (
            replace_record(index, np.array(each.features), each.label) for each in (self.first, self.second)
        )
        return Worlds(learner, first, second, self.what, shared)


class WorldsFile(BaseModel, strict=True):
    """`worlds.json`: the worlds of an audit.

    Attributes:
        learner: learner whose record is replaced.
        pair_of_run: pair of worlds of every planned run; empty: there is one pair.
        runs: runs of each world.
        coins: source of the world of every run.
        data: digest as of `hash_data`.
        ledger: SHA-256 of the first line of the ledger of the runs; None: there is no ledger.
    """

    format: Literal["sottovoce-worlds-2"] = _FORMAT
    learner: str
    shared: bool
    pairs: Annotated[list[_Pair], Field(min_length=1)]
    pair_of_run: list[int] = []
    runs: int
    seed: Any
    coins: Literal["seed", "operating system", "not known"] = "not known"
    data: str
    spec: dict[str, Any]
    ledger: str | None = None

    def find_pair_index(self, replica: int | None) -> int:
        """Return the index of the pair of worlds of a run.

        Raises:
            CaptureError: The file does not contain it.
        """
        if len(self.pairs) == 1:
            return 0
        found = None if replica is None else dict(enumerate(self.pair_of_run)).get(replica)
        if found is None or not 0 <= found < len(self.pairs):
            raise CaptureError(
                f"{WORLDS_FILE}: pair_of_run must name one of {len(self.pairs)} pairs of worlds for run {replica}, got {found}"
            )
        return found


def prepare_audit_spec(spec: RunSpec, capture: CaptureMethod = "relay") -> RunSpec:
    """Adapt a spec for an audit: every edge captured, no budget, no telemetry.

    Args:
        spec: spec of the user.
        capture: method of recording edges.
    """
    return spec.model_copy(
        update={
            "capture": capture,
            "privacy": type(spec.privacy)(),
            "telemetry": type(spec.telemetry)(),
            "topology": spec.topology.inline_files(spec.names),
        }
    )


def write_worlds(
    folder: Path,
    plan: AuditPlan,
    ledger: str | None = None,
    pair_of_run: Sequence[int] = (),
    *,
    capture: CaptureMethod = "relay",
    seeded_coins: bool = False,
) -> None:
    """Write `worlds.json`.

    Args:
        folder: folder of the captures.
        plan: the audit plan.
        ledger: SHA-256 of the first line of the ledger of the runs; None: there is no ledger.
        pair_of_run: pair of worlds of every planned run; empty: there is one pair.
        capture: method of recording edges.
        seeded_coins: whether the coins come from the seed.
    """
    document = WorldsFile(
        learner=plan.run.spec.names[plan.worlds.learner],
        shared=plan.worlds.is_shared,
        pairs=[_Pair.from_worlds(each.worlds) for each in plan.pairs],
        pair_of_run=list(pair_of_run) if plan.other_pairs else [],
        runs=plan.total_runs,
        seed=plan.seeds.audited_runs.entropy,
        coins="seed" if seeded_coins else "operating system",
        data=hash_data(plan.data),
        spec=prepare_audit_spec(plan.run.spec, capture).model_dump(mode="json"),
        ledger=ledger,
    ).model_dump(exclude_none=True)
    with open(folder / WORLDS_FILE, "w", encoding="utf-8", opener=open_private) as file:  # it holds records
        file.write(json.dumps(document, indent=2) + "\n")


def hash_data(data: PlacedData) -> str:
    """Compute a digest that is equal for equal records in equal rounds."""
    digest = hashlib.sha256()
    for own in data.learners:
        for part in (own.features[own.order], own.labels[own.order], own.offsets):
            digest.update(np.ascontiguousarray(part).tobytes())
    return digest.hexdigest()


def read_worlds(place: Folder) -> WorldsFile:
    """Read `worlds.json`.

    Raises:
        CaptureError: It cannot be read, or is invalid.
    """
    where = f"{place.name}/{WORLDS_FILE}"
    try:
        if (size := place.get_size(WORLDS_FILE)) > MAX_WORLDS_BYTES:
            raise CaptureError(f"{where} must have at most {MAX_WORLDS_BYTES} bytes, got {size}")
        with place.open(WORLDS_FILE) as file:
            document = json.loads(file.read(MAX_WORLDS_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise CaptureError(f"cannot read {where}: {str(error) or type(error).__name__}") from None
    if not isinstance(document, dict) or document.get("format") != _FORMAT:
        raise CaptureError(f"{where} must describe two worlds, in the format {_FORMAT}")
    try:
        return WorldsFile.model_validate(document)
    except ValidationError as error:
        raise CaptureError(f"{where} must describe two worlds: {_describe_error(error)}") from None


def _describe_error(error: ValidationError) -> str:
    problem = error.errors()[0]
    return f"{'.'.join(map(str, problem['loc']))} {describe_requirement(problem)}"


def restore_worlds(document: WorldsFile, prepared: PreparedRun, where: str) -> list[Worlds]:
    """Build all pairs of worlds.

    Args:
        document: the file.
        prepared: the run and its data.
        where: name of the file, for errors.

    Raises:
        CaptureError: The learner is not in the run.
        DataError: The data differ, the worlds are not adjacent, or the loss is not defined for them.
    """
    names = prepared.run.spec.names
    if document.learner not in names:
        raise CaptureError(f"{where}: the learner must be one of {', '.join(names)}, got {document.learner!r}")
    if document.data != hash_data(prepared.data):
        raise DataError(
            f"{where} must be of the records that the spec's data source gives, and is of others: check SOTTOVOCE_DATA"
        )
    learner = names.index(document.learner)
    own = prepared.data.learners[learner]
    try:
        found = [pair.build_worlds(learner, own, shared=document.shared) for pair in document.pairs]
        for worlds in found:
            worlds.require_learnable(prepared.run.loss)
    except DataError as error:
        raise DataError(f"{where}: {error}") from None
    return found


# ---- the ledger ------------------------------------------------------------------------------------------------------

RUN_LEDGER_FILE, _LEDGER_FORMAT = "runs.jsonl", "sottovoce-runs-1"
MAX_RUN_LEDGER_BYTES = 64 * 2**20


def toss_coins(runs: int) -> IntArray:
    """Toss fair coins, `(runs,)`, from the operating system's entropy, which is not predictable."""
    return np.array([secrets.randbits(1) for _ in range(runs)], dtype=np.int64)


def _compute_commitment(world: int, nonce: str) -> str:
    return hashlib.sha256(f"{world} {nonce}".encode()).hexdigest()


class RunLedgerWriter:
    """Writer of the ledger of an audit's runs.

    Args:
        folder: folder of the captures and `worlds.json`.
        worlds: `(runs,)` coins, secret until `reveal`.

    Attributes:
        commitment: SHA-256 of the first line, for `worlds.json`.
    """

    def __init__(self, folder: Path, worlds: IntArray) -> None:
        self._folder = folder
        self._coins = [(world, secrets.token_hex(32)) for world in worlds.tolist()]
        self._started: list[int] = []
        first = {"format": _LEDGER_FORMAT, "commitments": [_compute_commitment(*coin) for coin in self._coins]}
        self.commitment = hashlib.sha256(json.dumps(first).encode()).hexdigest()
        self._write(first)

    def bind(self) -> None:
        """Record the digest of `worlds.json`, which defines the worlds of the coins."""
        self._write({"worlds": hashlib.sha256((self._folder / WORLDS_FILE).read_bytes()).hexdigest()})

    def record_start(self, replica: int) -> None:
        """Record that a run is about to start."""
        self._started.append(replica)
        self._write({"replica": replica, "started": True})

    def record_end(self, replica: int, run_id: str, outcome: str, *, seeded_noise: bool = False) -> None:
        """Record the outcome of a run; `seeded_noise`: noise of a learner came from a seed or a recording."""
        flags = {"seeded": True} if seeded_noise else {}
        self._write({"replica": replica, "run_id": run_id, "outcome": outcome, **flags})

    def reveal(self, captures: Iterable[Capture]) -> None:
        """Reveal the coins of all started runs, and record the digests of their captures."""
        digests = {capture.replica: capture.compute_digests()[0] for capture in captures}
        for replica in self._started:
            world, nonce = self._coins[replica]
            found = {"capture": digests[replica]} if replica in digests else {}
            self._write({"replica": replica, "world": world, "nonce": nonce, **found})

    def _write(self, line: Mapping[str, Any]) -> None:
        with open(self._folder / RUN_LEDGER_FILE, "a", encoding="utf-8", opener=open_private) as file:
            file.write(json.dumps(line) + "\n")


class RunLedgerEntry(BaseModel, strict=True, frozen=True, extra="forbid"):
    """A started run in the ledger.

    Attributes:
        run_id: id of the run; empty: it had none yet when the audit ended.
        outcome: final state of the run; empty: not known.
        world: its coin; None: not revealed.
        capture: SHA-256 of its capture; empty: there is none, or it was not recorded.
        seeded: whether noise of a learner came from a seed or a recording.
    """

    started: Literal[True] = True
    run_id: str = ""
    outcome: str = ""
    world: int | None = None
    nonce: str = ""
    capture: str = ""
    seeded: bool = False

    @property
    def early_outcome(self) -> str:
        """Outcome before its last round; empty: it finished, or its end is not known."""
        return "" if self.outcome == "finished" else self.outcome


def read_run_ledger(place: Folder, worlds: WorldsFile) -> dict[int, RunLedgerEntry] | None:
    """Read the started runs of an audit, by replica; None if it has no ledger.

    Args:
        place: folder of the worlds and the ledger.
        worlds: content of `worlds.json`.

    Raises:
        CaptureError: The ledger is missing, cannot be read, is that of other worlds, or a coin differs from its commitment.
    """
    where = f"{place.name}/{RUN_LEDGER_FILE}"
    if worlds.ledger is None and RUN_LEDGER_FILE not in place.list_names():
        return None
    first, *lines = _read_lines(place, where)
    if worlds.ledger != hashlib.sha256(first).hexdigest():
        raise CaptureError(
            f"{where} must be the ledger that {place.name}/{WORLDS_FILE} was written with, and is another one"
        )
    with place.open(WORLDS_FILE) as file:
        digest = hashlib.sha256(file.read()).hexdigest()
    try:
        commitments = json.loads(first)["commitments"]
        entries = dict[int, dict[str, Any]]()
        for number, line in enumerate(map(json.loads, lines)):
            if number == 0:
                if line["worlds"] != digest:
                    raise CaptureError(f"{where} must be of the {WORLDS_FILE} next to it, and is of another one")
                continue
            _merge_line(entries, line, len(commitments))
        found = {k: RunLedgerEntry.model_validate(entries[k]) for k in sorted(entries)}
    except ValidationError as error:
        raise CaptureError(f"{where} must state which runs were started: {_describe_error(error)}") from None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CaptureError(f"{where} must state which runs were started: {error!r}") from None
    for k, entry in found.items():
        if entry.world is not None and _compute_commitment(entry.world, entry.nonce) != commitments[k]:
            raise CaptureError(f"{where}: the coin of run {k} must be the committed one, and differs")
    return found


def _read_lines(place: Folder, where: str) -> Iterator[bytes]:
    try:
        if (size := place.get_size(RUN_LEDGER_FILE)) > MAX_RUN_LEDGER_BYTES:
            raise CaptureError(f"{where} must have at most {MAX_RUN_LEDGER_BYTES} bytes, got {size}")
        with place.open(RUN_LEDGER_FILE) as file:
            content = file.read(MAX_RUN_LEDGER_BYTES)
    except OSError as error:
        raise CaptureError(f"cannot read {where}: {error}") from None
    # A last line without an end is incomplete: the machine stopped, or the disk was full.
    yield from content.rpartition(b"\n")[0].split(b"\n")


def _merge_line(entries: dict[int, dict[str, Any]], line: dict[str, Any], planned: int) -> None:
    """Merge a line into the entry of its run; each field comes once, after the start."""
    replica = line.pop("replica")
    if type(replica) is not int or not 0 <= replica < planned:
        raise ValueError(f"replica must be in [0, {planned})")
    known = entries.setdefault(replica, {})
    if known.keys() & line.keys() or not (known or "started" in line):
        raise ValueError(f"run {replica} must be started once, and each other field must come once, after that")
    known.update(line)
