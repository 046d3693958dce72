"""The started runs of an audit and their outcomes, and the checks of captures against specs and ledgers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path, PurePath, PurePosixPath
from typing import Any

import numpy as np

from sottovoce_client.auditing.audit_files import RunLedgerEntry, prepare_audit_spec
from sottovoce_client.formatting import pluralize
from sottovoce_client.transcripts.provenance import describe_seeded_noise
from sottovoce_core.auditing.audit import CoinSource
from sottovoce_core.auditing.coin_tests import COMPLETE_OUTCOME, RunOutcomes
from sottovoce_core.auditing.likelihood import RunLosses, compute_run_losses
from sottovoce_core.auditing.plan import AuditPlan
from sottovoce_core.auditing.worlds import RecordedRuns
from sottovoce_core.errors import CaptureError, EquivocationError, SpecError
from sottovoce_core.runs.run import Run
from sottovoce_core.runs.transcript import Transcript
from sottovoce_core.spec import RunSpec, parse_spec, read_document
from sottovoce_eavesdropper.capture_reader import Capture
from sottovoce_eavesdropper.storage import Folder

# ---- comparison of specs ---------------------------------------------------------------------------------------------

SPEC_FILE, _FOLDER = "spec.yaml", "captures"
_MAX_NAMED_FIELDS = 3
"""Maximum number of named fields that differ."""

UNSIGNED_PROMISE_NOTE = (
    "The claim is taken from capture.json, which is not signed: its owner could have replaced it by a claim that no learner "
    "made."
)


def require_same_spec(spec: RunSpec, captures: Sequence[Capture], place: Folder | None = None) -> None:
    """Compare the spec in captures with the `spec.yaml` next to them, if there is one: `up` writes it.

    Args:
        spec: spec in the captures.
        captures: captures; only for those on this machine a file is searched.
        place: the named folder.

    Raises:
        CaptureError: The specs differ, or the file cannot be read.
    """
    for path in _find_spec_files(captures, place):
        try:
            found = parse_spec(read_document(path), source=str(path), allow_imports=False)
        except SpecError as error:
            raise CaptureError(
                f"{path} next to the captures must be readable to be compared with them: {error}"
            ) from None
        get_relevant = partial(_get_relevant_part, network=_has_readable_network(found))
        differences = list(islice(_list_differences(get_relevant(spec), get_relevant(found)), _MAX_NAMED_FIELDS))
        if differences:
            raise CaptureError(
                f"{captures[0].name} and {path} must be of the same run spec, and differ in {'; '.join(differences)}: one of "
                "them was changed, and neither is signed. Give the spec that you trust: sottovoce audit SPEC --captures ..."
            )


def _find_spec_files(captures: Sequence[Capture], place: Folder | None) -> list[Path]:
    """Find files `spec.yaml`: in the named folder, in that of a capture, and in the parent of its folder `captures`."""
    local = [Path(each.name) for each in (place, *captures) if each is not None and "://" not in each.name]
    runs = [each.parent.parent for each in local if each.parent.name == _FOLDER]
    runs += [each.parent for each in local if each.name == _FOLDER]
    paths = (each / SPEC_FILE for each in dict.fromkeys((*local, *runs)))
    return [path for path in paths if path.is_file()]


def _has_readable_network(spec: RunSpec) -> bool:
    """Return whether a graph that a spec names as a file can be read here."""
    try:
        spec.topology.inline_files(spec.names)
    except SpecError:
        return False
    return True


def _get_relevant_part(spec: RunSpec, *, network: bool) -> dict[str, Any]:
    """Return the fields that an audit uses, without the data's folder and offline intervals, which `spec.yaml` may lack."""
    kept = spec if network else spec.model_copy(update={"topology": type(spec.topology)()})
    document = prepare_audit_spec(kept).model_dump(mode="json")
    source = document["data"]["source"]
    name = PurePath(source).name if isinstance(source, str) else source
    return {**document, "offline_intervals": [], "data": {**document["data"], "source": name}}


def find_difference(one: Any, other: Any) -> str | None:
    """Return the first field in which two JSON documents differ, with both values; None if they are equal."""
    return next(_list_differences(one, other), None)


def _list_differences(one: Any, other: Any, where: str = "") -> Iterator[str]:
    """Yield all fields in which two JSON documents differ, with both values."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key in sorted({*one, *other}, key=lambda key: (key != "name", key)):  # names first
            yield from _list_differences(one.get(key), other.get(key), f"{where}.{key}" if where else str(key))
    elif one != other:
        yield f"{where or 'all of it'}: {str(one)[:60]} and {str(other)[:60]}"


# ---- runs ------------------------------------------------------------------------------------------------------------

_EARLY, _MISSING, _REPEATED = "ended early", "missing", "repeated"
_MAX_NAMED = 3
"""Maximum number of named copies, or runs without a capture; the rest is counted."""

_MAX_ROUNDS_PER_MESSAGE = 64
"""Maximum rounds, or learners, of a spec per message of its largest capture, plus 1,024: a round may have no message."""


@dataclass(frozen=True, slots=True)
class _StartedRun:
    """A started run of an audit.

    Attributes:
        capture: its capture; None: none.
        pair, world: pair of worlds, and world of the pair.
        outcome: its outcome, in one or two words.
        is_complete: whether its capture has all rounds; with a wiretap, which cannot show it, whether there is a capture.
    """

    capture: Capture | None
    pair: int
    world: int
    outcome: str
    is_complete: bool = False

    def compute_losses(self, plan: AuditPlan) -> RunLosses:
        """Compute exact losses of the captured rounds, in the worlds of this plan."""
        rounds = plan.run.spec.rounds
        if self.capture is not None:
            try:
                transcript = read_transcript(self.capture, plan.run).truncate(rounds)
                recorded = RecordedRuns(self.world, transcript)
                return compute_run_losses(plan.run, plan.worlds, recorded, plan.claim)
            except EquivocationError:
                raise
            except CaptureError:  # it has not one round
                pass
        return RunLosses.create_empty(np.array([self.world]), rounds)


@dataclass(frozen=True, slots=True)
class AuditRuns:
    """All runs of an audit: complete ones, ones with missing rounds, and ones without a capture.

    Attributes:
        runs: runs with a known world.
        source: origin of the runs, in words, and notes.
        unknown_count: number of further started runs that left neither a capture nor a coin.
        assumptions: assumptions about the runs that the verdict depends on, a sentence each.
        unproven_reason: as in `Audit`.
        coins: source of the worlds.
        root: folder relative to which captures are named; empty: none.
    """

    runs: tuple[_StartedRun, ...]
    source: tuple[str, ...] = ()
    unknown_count: int = 0
    assumptions: tuple[str, ...] = ()
    unproven_reason: str = ""
    coins: CoinSource = "none"
    root: str = ""

    @property
    def complete_captures(self) -> list[Capture]:
        """Captures of complete runs."""
        return [run.capture for run in self.runs if run.capture is not None and run.is_complete]

    @property
    def captures(self) -> list[Capture]:
        """Captures of all runs."""
        return [run.capture for run in self.runs if run.capture is not None]

    def with_root(self, folder: Folder, description: str) -> AuditRuns:
        """Return a copy with this origin, whose captures are named relative to this folder."""
        notes = (note.replace(f"{folder.name}/", "") for note in self.source)
        return replace(self, root=folder.name, source=(description, *notes))

    def compute_digests(self) -> dict[str, str]:
        """Compute the SHA-256 of every capture, by its path in the folder of `with_root`.

        Raises:
            CaptureError: A capture cannot be read.
        """
        found = {}
        for each in self.captures:
            place = each.name.removeprefix(f"{self.root}/") if each.name != self.root else PurePosixPath(each.name).name
            found[place] = each.compute_digests()[0]
        return found

    @property
    def is_ciphertext(self) -> bool:
        """True if captures are of ciphertext."""
        return self.complete_captures[0].ciphertext is not None

    def build_starts(self, plan: AuditPlan) -> RunOutcomes | None:
        """Build the outcomes of all runs for the tests of the audit; None with one world only.

        Raises:
            CaptureError: A capture cannot be read.
        """
        if not plan.has_both_worlds:
            return None
        incomplete = dict[int, list[RunLosses]]()
        for run in self.runs if plan.adversary.can_replay else ():
            if not run.is_complete:
                incomplete.setdefault(run.pair, []).append(run.compute_losses(plan.pairs[run.pair]))
        worlds, outcomes = (tuple(getattr(run, name) for run in self.runs) for name in ("world", "outcome"))
        losses = {k: RunLosses.concatenate(parts) for k, parts in incomplete.items()}
        return RunOutcomes(np.array(worlds, dtype=np.int64), outcomes, losses, self.unknown_count)

    def count_runs(self, pairs: int) -> list[int]:
        """Count the runs of each world for every pair of worlds."""
        return [max(1, sum(run.pair == k for run in self.runs) // 2) for k in range(pairs)]


def read_transcript(capture: Capture, run: Run) -> Transcript:
    """Read all messages of a run.

    Raises:
        CaptureError: The capture cannot be read, or has no round.
        EquivocationError: A learner sent different messages to different neighbours.
    """
    try:
        return capture.read_transcript(run.field_shapes, run.spec.n_learners, run.network)
    except EquivocationError as error:
        raise EquivocationError(f"{capture.name}: {error}") from None


# ---- size ------------------------------------------------------------------------------------------------------------


def require_plausible_size(spec: RunSpec, captures: Sequence[Capture]) -> None:
    """Refuse a spec that is far larger than its captures, before memory of its size is allocated.

    Raises:
        CaptureError: It is, or a capture cannot be read.
    """
    max_messages = max(capture.count_messages()[0] for capture in captures)
    for unit, count in (("rounds", spec.rounds), ("learners", spec.n_learners)):
        if count > _MAX_ROUNDS_PER_MESSAGE * max_messages + 1024:
            raise CaptureError(
                f"the number of {unit} of {captures[0].name} must fit its messages, got {count:,} {unit}, and no capture has "
                f"more than {pluralize(max_messages, 'message')}"
            )


# ---- outcomes --------------------------------------------------------------------------------------------------------


def collect_runs(
    captures: Sequence[Capture],
    run: Run,
    ledger: Mapping[int, RunLedgerEntry] | None = None,
    find_pair: Callable[[int | None], int] = lambda replica: 0,
) -> AuditRuns:
    """Determine the outcome of every started run.

    Args:
        captures: all captures.
        run: the run.
        ledger: all started runs; None: only the captured ones are known.
        find_pair: finds the pair of worlds of a run, from its replica (default: there is one pair).

    Raises:
        CaptureError: There is no capture, none has all rounds, one cannot be read, or they differ from the ledger.
        EquivocationError: A learner sent different messages to different neighbours.
    """
    if not captures:
        raise CaptureError("an audit needs a capture, and there is none")
    single, copies = _deduplicate(captures, _get_content_digest)
    ids = dict[str, Capture]()
    for capture in single:
        capture_id = str(capture.metadata["capture_id"])
        if (other := ids.setdefault(capture_id, capture)) is not capture:
            raise CaptureError(
                f"{other.name} and {capture.name} must be equal, as both are capture {capture_id}, and differ"
            )
    single, repeated = _deduplicate(single, lambda each: each.name if each.replica is None else each.replica)
    for capture in (*single, *repeated) if ledger is not None else ():
        _require_ledger_entry(capture, _get_entry(capture, ledger))
    complete = _select_complete(single, run) if single[0].ciphertext is None else single
    if not complete:
        raise CaptureError(
            f"a capture must have all {run.spec.rounds} rounds, and none of {pluralize(len(captures), 'capture')} has "
            f"({captures[0].name} is the first)"
        )
    names = {capture.name for capture in complete}
    incomplete = [capture for capture in single if capture.name not in names]
    repeated_replicas, captured = ({capture.replica for capture in some} for some in (repeated, single))
    uncaptured = {k: entry for k, entry in (ledger or {}).items() if k not in captured}
    runs = []
    for capture in (*complete, *incomplete):
        is_complete, entry = capture.name in names, _get_entry(capture, ledger)
        outcome = (entry.early_outcome if entry else "") or (COMPLETE_OUTCOME if is_complete else _EARLY)
        outcome = _REPEATED if capture.replica in repeated_replicas else outcome
        runs.append(_StartedRun(capture, find_pair(capture.replica), capture.world or 0, outcome, is_complete))
    runs += [
        _StartedRun(None, find_pair(k), entry.world, entry.early_outcome or _MISSING)
        for k, entry in uncaptured.items()
        if entry.world is not None
    ]
    notes = []
    if copies:
        notes.append(
            f"{'copies' if len(copies) > 1 else 'a copy'} counted once: {_format_names(each.name for each in copies)}"
        )
    if incomplete:  # without coins, they are not counted
        has_coins = incomplete[0].world is not None
        count = pluralize(len(incomplete), "run") if has_coins else f"{pluralize(len(incomplete), 'other')} left out,"
        notes.append(f"{count} of which rounds are missing")
    if uncaptured:
        notes.append(f"{pluralize(len(uncaptured), 'started run')} without a capture: {_format_names(uncaptured)}")
    unknown = sum(entry.world is None for entry in uncaptured.values())
    seeded = sum(entry.seeded for entry in ledger.values()) if ledger else 0
    assumptions = (describe_seeded_noise(seeded, len(ledger)),) if ledger and seeded else ()
    return AuditRuns(tuple(runs), tuple(notes), unknown, assumptions)


def _format_names(things: Iterable[object]) -> str:
    """Format the first few names, and the number of the rest."""
    names = [str(each) for each in things]
    return ", ".join(names[:_MAX_NAMED]) + (f" and {len(names) - _MAX_NAMED:,} more" if len(names) > _MAX_NAMED else "")


def _get_content_digest(capture: Capture) -> str:
    """Return a digest that is equal for copies: of the messages; of the whole capture, if it has none."""
    digest, parts_digest = capture.compute_digests()
    return parts_digest if capture.count_messages()[0] or capture.ciphertext else digest


def _deduplicate(captures: Sequence[Capture], key: Callable[[Capture], object]) -> tuple[list[Capture], list[Capture]]:
    """Return the first capture with every key, and the others."""
    first, repeated = dict[object, Capture](), list[Capture]()
    for capture in captures:
        if first.setdefault(key(capture), capture) is not capture:
            repeated.append(capture)
    return list(first.values()), repeated


def _select_complete(captures: Sequence[Capture], run: Run) -> list[Capture]:
    """Select captures that have all rounds."""
    min_messages = sum(np.count_nonzero(run.network.mixing(t).neighbour_weights) for t in range(run.spec.rounds))
    candidates = [capture for capture in captures if capture.count_messages()[0] >= min_messages]
    return [capture for capture in candidates if read_transcript(capture, run).rounds == run.spec.rounds]


def _get_entry(capture: Capture, ledger: Mapping[int, RunLedgerEntry] | None) -> RunLedgerEntry | None:
    return None if capture.replica is None or ledger is None else ledger.get(capture.replica)


def _require_ledger_entry(capture: Capture, entry: RunLedgerEntry | None) -> None:
    """Require that a capture agrees with its entry in the ledger.

    Raises:
        CaptureError: It has no entry, or its world, run or digest differ.
    """
    if entry is None:
        raise CaptureError(f"{capture.name} must be of a run in the ledger of this audit, and is of none")
    if entry.world is not None and capture.world != entry.world:
        raise CaptureError(
            f"{capture.name} must be of world {entry.world}, the coin in the ledger, got {capture.world}"
        )
    if entry.run_id and capture.metadata["run_id"] != entry.run_id:
        raise CaptureError(
            f"{capture.name} must be of run {entry.run_id}, as in the ledger, got {capture.metadata['run_id']}"
        )
    if entry.capture and capture.compute_digests()[0] != entry.capture:
        raise CaptureError(f"{capture.name} must have the SHA-256 {entry.capture} in the ledger: it was changed")
