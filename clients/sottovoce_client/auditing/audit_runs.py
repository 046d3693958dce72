"""What captures are held to, which runs of an audit were started, and what became of each."""

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

# ---- the promise -----------------------------------------------------------------------------------------------------

SPEC_FILE, _FOLDER = "spec.yaml", "captures"
_MAX_NAMED_FIELDS = 3
"""Fields that differ, at most, that are named."""

UNSIGNED_PROMISE_NOTE = (
    "What was promised is taken from capture.json, which nobody signed: whoever kept the capture could have written another "
    "promise there, which no learner made."
)


def require_same_spec(spec: RunSpec, captures: Sequence[Capture], place: Folder | None = None) -> None:
    """Hold the spec in captures against the `spec.yaml` that lies beside them, where one does: `up` leaves it.

    Args:
        spec: that captures say was run.
        captures: in folders of this machine; of others nothing is looked for.
        place: the folder that was named, if it was one.

    Raises:
        CaptureError: it is another one, or cannot be read.
    """
    for path in _beside(captures, place):
        try:
            found = parse_spec(read_document(path), source=str(path), allow_imports=False)
        except SpecError as error:
            raise CaptureError(f"{path} lies beside the captures, and cannot be held against them: {error}") from None
        promised = partial(_promised, network=_has_network(found))
        if where := list(islice(_differences(promised(spec), promised(found)), _MAX_NAMED_FIELDS)):
            raise CaptureError(
                f"{captures[0].name} and {path} must be of the same run spec, and differ in {'; '.join(where)}: one of them was "
                f"changed, and neither is signed. Give the spec that you were told: sottovoce audit SPEC --captures ..."
            )


def _beside(captures: Sequence[Capture], place: Folder | None) -> list[Path]:
    """Files `spec.yaml`: in the folder that was named, in a capture's own, and in that which has its folder `captures`."""
    local = [Path(each.name) for each in (place, *captures) if each is not None and "://" not in each.name]
    runs = [each.parent.parent for each in local if each.parent.name == _FOLDER]
    runs += [each.parent for each in local if each.name == _FOLDER]
    paths = (each / SPEC_FILE for each in dict.fromkeys((*local, *runs)))
    return [path for path in paths if path.is_file()]


def _has_network(spec: RunSpec) -> bool:
    """Whether a graph that a spec names as a file can be read here."""
    try:
        spec.topology.inline_files(spec.names)
    except SpecError:
        return False
    return True


def _promised(spec: RunSpec, *, network: bool) -> dict[str, Any]:
    """What an audit takes from a spec, but for where data lie, and who was away in the end: `spec.yaml` may lack that."""
    kept = spec if network else spec.model_copy(update={"topology": type(spec.topology)()})
    document = prepare_audit_spec(kept).model_dump(mode="json")
    source = document["data"]["source"]
    return {**document, "offline_intervals": [], "data": {**document["data"], "source": PurePath(str(source)).name}}


def find_difference(one: Any, other: Any) -> str | None:
    """The first place where two JSON documents differ, and what stands there; None: nowhere."""
    return next(_differences(one, other), None)


def _differences(one: Any, other: Any, where: str = "") -> Iterator[str]:
    """All places where two JSON documents differ, and what stands there."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key in sorted({*one, *other}, key=lambda key: (key != "name", key)):  # what it is comes before how it is
            yield from _differences(one.get(key), other.get(key), f"{where}.{key}" if where else str(key))
    elif one != other:
        yield f"{where or 'all of it'}: {str(one)[:60]} and {str(other)[:60]}"


# ---- runs ------------------------------------------------------------------------------------------------------------

_EARLY, _MISSING, _REPEATED = "ended early", "missing", "repeated"
_MAX_NAMED = 3
"""Copies, and runs without a capture, that are named; more are counted."""

_MAX_ROUNDS_PER_MESSAGE = 64
"""Rounds, and learners, of a spec for each message of its fullest capture, at most, and 1,024 besides: a round may be silent."""


@dataclass(frozen=True, slots=True)
class _StartedRun:
    """A run of an audit.

    Attributes:
        capture: what was overheard of it; None: nothing.
        pair, world: the pair of worlds, and which world of it.
        outcome: how it ended, in a word or two.
        whole: whether its capture has all rounds; by wiretap, where nobody can tell, whether there is one.
    """

    capture: Capture | None
    pair: int
    world: int
    outcome: str
    whole: bool = False

    def losses(self, plan: AuditPlan) -> RunLosses:
        """Exact losses of what was heard of it, in the worlds of this plan: none of a round that was not heard."""
        rounds = plan.run.spec.rounds
        if self.capture is not None:
            try:
                said = read_transcript(self.capture, plan.run).truncate(rounds)
                return compute_run_losses(plan.run, plan.worlds, RecordedRuns(self.world, said), plan.claim)
            except EquivocationError:
                raise
            except CaptureError:  # not one round was heard
                pass
        return RunLosses.create_empty(np.array([self.world]), rounds)


@dataclass(frozen=True, slots=True)
class AuditRuns:
    """The runs of an audit, each once: those that are whole, those of which rounds are missing, those without a capture.

    Attributes:
        runs: whose world is known.
        source: where they came from, in words; what else must be said of them.
        unknown: so many more started runs left neither a capture nor a coin.
        provisos: what must be known besides to judge what is found, a sentence each.
        unproven: as of `Audit`.
        coins: what chose their worlds.
        root: the folder that captures are named by, which may lie anywhere; empty: none was said.
    """

    runs: tuple[_StartedRun, ...]
    source: tuple[str, ...] = ()
    unknown_count: int = 0
    provisos: tuple[str, ...] = ()
    unproven_reason: str = ""
    coins: CoinSource = "none"
    root: str = ""

    @property
    def complete_captures(self) -> list[Capture]:
        """Captures of the runs that are whole."""
        return [run.capture for run in self.runs if run.capture is not None and run.whole]

    @property
    def captures(self) -> list[Capture]:
        """All captures."""
        return [run.capture for run in self.runs if run.capture is not None]

    def with_root(self, folder: Folder, what: str) -> AuditRuns:
        """The same runs, that came from there, whose captures are called by their paths in this folder."""
        notes = (note.replace(f"{folder.name}/", "") for note in self.source)
        return replace(self, root=folder.name, source=(what, *notes))

    def compute_digests(self) -> dict[str, str]:
        """SHA-256 of every capture, by its path in the folder of `within`.

        Raises:
            CaptureError: one cannot be read.
        """
        found = {}
        for each in self.captures:
            place = each.name.removeprefix(f"{self.root}/") if each.name != self.root else PurePosixPath(each.name).name
            found[place] = each.compute_digests()[0]
        return found

    @property
    def is_ciphertext(self) -> bool:
        """Whether what was overheard is ciphertext."""
        return self.complete_captures[0].ciphertext is not None

    def build_starts(self, plan: AuditPlan) -> RunOutcomes | None:
        """For the tests of the audit; None: there is one world only.

        Raises:
            CaptureError: a capture cannot be read.
        """
        if not plan.has_both_worlds:
            return None
        lost = dict[int, list[RunLosses]]()
        for run in self.runs if plan.adversary.can_replay else ():
            if not run.whole:
                lost.setdefault(run.pair, []).append(run.losses(plan.pairs[run.pair]))
        worlds, outcomes = (tuple(getattr(run, name) for run in self.runs) for name in ("world", "outcome"))
        losses = {k: RunLosses.concatenate(parts) for k, parts in lost.items()}
        return RunOutcomes(np.array(worlds, dtype=np.int64), outcomes, losses, self.unknown_count)

    def count_runs(self, pairs: int) -> list[int]:
        """Runs of each world, of every pair of worlds."""
        return [max(1, sum(run.pair == k for run in self.runs) // 2) for k in range(pairs)]


def read_transcript(capture: Capture, run: Run) -> Transcript:
    """What was said in a run.

    Raises:
        CaptureError: it cannot be read, or has no round.
        EquivocationError: a learner said different things to different neighbours.
    """
    try:
        return capture.read_transcript(run.field_shapes, run.spec.n_learners, run.network)
    except EquivocationError as error:
        raise EquivocationError(f"{capture.name}: {error}") from None


# ---- bounds ----------------------------------------------------------------------------------------------------------


def require_plausible_size(spec: RunSpec, captures: Sequence[Capture]) -> None:
    """Refuse a spec that is far larger than what its captures hold, before anything is made as large as it says.

    Raises:
        CaptureError: it is, or a capture cannot be read.
    """
    most = max(capture.count_messages()[0] for capture in captures)
    for what, count in (("rounds", spec.rounds), ("learners", spec.n_learners)):
        if count > _MAX_ROUNDS_PER_MESSAGE * most + 1024:
            raise CaptureError(
                f"{captures[0].name} says that its run has {count:,} {what}, and no capture has more than "
                f"{pluralize(most, 'message')}: none can have been overheard to its end"
            )


# ---- outcomes --------------------------------------------------------------------------------------------------------


def collect_runs(
    captures: Sequence[Capture],
    run: Run,
    ledger: Mapping[int, RunLedgerEntry] | None = None,
    find_pair: Callable[[int | None], int] = lambda replica: 0,
) -> AuditRuns:
    """What became of every run that was started.

    Args:
        captures: all that there are.
        run: what was run.
        ledger: of all runs that were started; None: none is known but those that were captured.
        find_pair: the pair of worlds of a run, by its replica (default: all are of one pair).

    Raises:
        CaptureError: there is none, none has all rounds, one cannot be read, or they are not those of the ledger.
        EquivocationError: a learner said different things to different neighbours.
    """
    if not captures:
        raise CaptureError("no run was overheard: there is no capture")
    single, copies = _first_of_each(captures, _content)
    ids = dict[str, Capture]()
    for capture in single:
        ident = str(capture.metadata["capture_id"])
        if (other := ids.setdefault(ident, capture)) is not capture:
            raise CaptureError(f"{other.name} and {capture.name} are both capture {ident}, and differ")
    single, again = _first_of_each(single, lambda each: each.name if each.replica is None else each.replica)
    for capture in (*single, *again) if ledger is not None else ():
        _require_entered(capture, _entry(capture, ledger))
    kept = _whole(single, run) if single[0].ciphertext is None else single
    if not kept:
        raise CaptureError(
            f"of {pluralize(len(captures), 'capture')} none has all {run.spec.rounds} rounds ({captures[0].name} is the first)"
        )
    names = {capture.name for capture in kept}
    short = [capture for capture in single if capture.name not in names]
    repeated, heard = ({capture.replica for capture in some} for some in (again, single))
    unheard = {k: entry for k, entry in (ledger or {}).items() if k not in heard}
    runs = []
    for capture in (*kept, *short):
        whole, entry = capture.name in names, _entry(capture, ledger)
        outcome = (entry.early_outcome if entry else "") or (COMPLETE_OUTCOME if whole else _EARLY)
        outcome = _REPEATED if capture.replica in repeated else outcome
        runs.append(_StartedRun(capture, find_pair(capture.replica), capture.world or 0, outcome, whole))
    runs += [
        _StartedRun(None, find_pair(k), entry.world, entry.early_outcome or _MISSING)
        for k, entry in unheard.items()
        if entry.world is not None
    ]
    notes = []
    if copies:
        notes.append(f"{'copies' if len(copies) > 1 else 'a copy'} counted once: {_some(each.name for each in copies)}")
    if short:  # where there are no coins, nothing can be said of them
        coined = short[0].world is not None
        what = pluralize(len(short), "run") if coined else f"{pluralize(len(short), 'other')} left out,"
        notes.append(f"{what} of which rounds are missing")
    notes += [f"{pluralize(len(unheard), 'started run')} without a capture: {_some(unheard)}"] if unheard else []
    unknown = sum(entry.world is None for entry in unheard.values())
    seeded = sum(entry.seeded for entry in ledger.values()) if ledger else 0
    provisos = (describe_seeded_noise(seeded, len(ledger)),) if ledger and seeded else ()
    return AuditRuns(tuple(runs), tuple(notes), unknown, provisos)


def _some(things: Iterable[object]) -> str:
    """The first few by name, how many more."""
    names = [str(each) for each in things]
    return ", ".join(names[:_MAX_NAMED]) + (f" and {len(names) - _MAX_NAMED:,} more" if len(names) > _MAX_NAMED else "")


def _content(capture: Capture) -> str:
    """Equal for copies, wherever they lie: of messages, byte by byte; where nothing was said, all captures look alike."""
    whole, parts = capture.compute_digests()
    return parts if capture.count_messages()[0] or capture.ciphertext else whole


def _first_of_each(
    captures: Sequence[Capture], key: Callable[[Capture], object]
) -> tuple[list[Capture], list[Capture]]:
    """The first capture with every key, and the others."""
    first, again = dict[object, Capture](), list[Capture]()
    for capture in captures:
        if first.setdefault(key(capture), capture) is not capture:
            again.append(capture)
    return list(first.values()), again


def _whole(captures: Sequence[Capture], run: Run) -> list[Capture]:
    """Those that have all rounds."""
    least = sum(np.count_nonzero(run.network.mixing(t).neighbour_weights) for t in range(run.spec.rounds))
    kept = [capture for capture in captures if capture.count_messages()[0] >= least]
    return [capture for capture in kept if read_transcript(capture, run).rounds == run.spec.rounds]


def _entry(capture: Capture, ledger: Mapping[int, RunLedgerEntry] | None) -> RunLedgerEntry | None:
    return None if capture.replica is None or ledger is None else ledger.get(capture.replica)


def _require_entered(capture: Capture, entry: RunLedgerEntry | None) -> None:
    """A capture must be the one that the ledger knows.

    Raises:
        CaptureError: it is of no run there, of another world, or not the same any more.
    """
    if entry is None:
        raise CaptureError(f"{capture.name} is of no run that the ledger of this audit has")
    if entry.world is not None and capture.world != entry.world:
        raise CaptureError(f"{capture.name} must be of world {entry.world}, as its coin in the ledger says")
    if entry.run_id and capture.metadata["run_id"] != entry.run_id:
        raise CaptureError(f"{capture.name} must be of run {entry.run_id}, as the ledger says")
    if entry.capture and capture.compute_digests()[0] != entry.capture:
        raise CaptureError(f"{capture.name} is not the capture that was made: its SHA-256 is another one")
