"""`sottovoce audit --captures`: an audit of traffic that was recorded earlier, of one world or of two."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, Literal

from sottovoce_client.auditing.audit import AuditRequest
from sottovoce_client.auditing.audit_files import (
    WORLDS_FILE,
    RunLedgerEntry,
    WorldsFile,
    prepare_audit_spec,
    read_run_ledger,
    read_worlds,
    restore_worlds,
)
from sottovoce_client.auditing.audit_runs import (
    UNSIGNED_PROMISE_NOTE,
    AuditRuns,
    collect_runs,
    find_difference,
    read_transcript,
    require_plausible_size,
    require_same_spec,
)
from sottovoce_client.formatting import pluralize
from sottovoce_client.terminal import ProgressReporter
from sottovoce_client.transcripts.provenance import Provenance, check_provenance, describe_noise_source
from sottovoce_client.watching.canary_files import find_commitment
from sottovoce_core.auditing.audit import (
    Audit,
    ChunkStatistics,
    compute_chunk_statistics,
    conclude,
    count_sweep_runs,
    merge_noise,
)
from sottovoce_core.auditing.plan import AuditPlan
from sottovoce_core.auditing.traffic_features import (
    CHANNEL_VIEWS,
    MAX_HEAD_BYTES,
    TIMING_VIEWS,
    CapturedFrame,
    FeatureLayout,
    RunTraffic,
    build_features_by_view,
    digest,
)
from sottovoce_core.auditing.worlds import RecordedRuns, count_runs_in_memory
from sottovoce_core.errors import CaptureError, DataError, RemoteProtocolError, SpecError
from sottovoce_core.experiment import PreparedRun
from sottovoce_core.privacy.guarantee import ThreatModel
from sottovoce_core.runs.transcript import Transcript
from sottovoce_core.spec import RunSpec, find_first_import, parse_spec
from sottovoce_eavesdropper.capture_reader import Capture, find_captures
from sottovoce_eavesdropper.storage import Folder, open_folder
from sottovoce_rpc.codec import read_hello

if TYPE_CHECKING:
    import pyarrow as pa

# ---- conversations ---------------------------------------------------------------------------------------------------

_MAX_CHANNELS = 64
"""Directions of edges that are looked at, the learner's own ones first."""

_Line = tuple[int, int, str]
"""A direction of an edge: caller, callee, `out` or `back`."""

_Whose = Literal["sent", "received", "others"]


@dataclass(frozen=True, slots=True)
class ObservedChannels:
    """The directions of edges that a listener hears, and whose words pass on them.

    Attributes:
        whose: of each.
        opened: the one whose messages are looked into; None: the learner speaks on none. Its others carry the same bytes.
    """

    roles: Mapping[_Line, _Whose]
    inspected_channel: _Line | None


def select_channels(plan: AuditPlan) -> ObservedChannels:
    """What the plan's listener hears."""
    learner, neighbour = plan.worlds.learner, plan.adversary.neighbour
    edges = [edge for edge in plan.run.network.edges if neighbour is None or neighbour in edge]
    edges.sort(key=lambda edge: learner not in edge)
    every = [(*edge, direction) for edge in edges for direction in ("out", "back")][:_MAX_CHANNELS]
    whose = {line: _whose(line, learner) for line in every}
    return ObservedChannels(whose, next((line for line in every if whose[line] == "sent"), None))


def _whose(line: _Line, learner: int) -> _Whose:
    caller, callee, direction = line
    if learner not in (caller, callee):
        return "others"
    return "sent" if learner == (caller if direction == "out" else callee) else "received"


def read_conversation(
    table: pa.Table, channels: ObservedChannels, run_id: str, *, world: int = 0, run_number: int = 0
) -> RunTraffic:
    """One run, as it was heard.

    Args:
        table: all columns of a capture.
        lines: who is heard.
        run_id: the run's random name, which says nothing.
        world: 0 or 1.
        number: of the run, in the order of all.
    """
    return RunTraffic(world, run_id, float(run_number), tuple(_heard(table, channels, run_id.encode())))


def _heard(table: pa.Table, lines: ObservedChannels, run_id: bytes) -> Iterator[CapturedFrame]:
    """What passed on the lines; payloads of the others are not looked into."""
    names = ("caller", "callee", "direction", "kind", "method", "stream", "connection", "mono_ns", "size")
    payloads, streams, began = table.column("payload"), dict[object, int](), None
    for k, values in enumerate(zip(*(table.column(name).to_pylist() for name in names), strict=True)):
        caller, callee, direction, kind, method, stream, connection, at, size = values
        line = (caller, callee, direction)
        if (whose := lines.roles.get(line)) is None:
            continue
        began = at if began is None else began
        stream = streams.setdefault((caller, callee, stream, connection), len(streams))
        heard = CapturedFrame(
            kind, f"{caller} to {callee} {method}".rstrip(), direction, stream, (at - began) / 1e9, size, role=whose
        )
        if whose != "others" and kind == "hello":
            heard = replace(heard, entries=tuple(_greeting(payloads[k].as_py(), run_id)))
        elif whose != "others" and kind in ("metadata", "trailers"):
            heard = parse_metadata(heard, payloads[k].as_py().replace(run_id, b""))
        elif whose == "sent" and kind == "message":
            payload = payloads[k].as_py()
            heard = replace(
                heard, head=payload[:MAX_HEAD_BYTES] if line == lines.inspected_channel else b"", digest=digest(payload)
            )
        yield heard


def _greeting(payload: bytes, run_id: bytes) -> Iterator[tuple[str, str]]:
    """What a hello asks for, and all its bytes without the run's random name."""
    with suppress(RemoteProtocolError):
        yield "next_round", str(read_hello(payload).next_round)
    yield "bytes", payload.replace(run_id, b"").hex()


def parse_metadata(heard: CapturedFrame, payload: bytes) -> CapturedFrame:
    """Metadata or trailers with what they say, recorded in JSON; of what is none, nothing."""
    try:
        document = json.loads(payload)
    except (ValueError, RecursionError):
        document = None
    document = document if isinstance(document, dict) else {}
    listed = document.get("metadata")
    pairs = [each for each in (listed if isinstance(listed, list) else ()) if isinstance(each, list) and len(each) == 2]
    entries = tuple((str(key), str(value)) for key, value in pairs)
    status = (str(document.get("code", "")), str(document.get("details", "")))
    return replace(heard, entries=entries, status=status)


# ---- captures --------------------------------------------------------------------------------------------------------

SpecDocument = dict[str, Any]
RunLedger = Mapping[int, RunLedgerEntry] | None
_GIVE = "To hold learners to what you were told, give the spec: sottovoce audit SPEC --captures ..."


def load_captured_runs(
    place: str,
    request: AuditRequest,
    prepare: Callable[[RunSpec], PreparedRun],
    report_progress: ProgressReporter,
    *,
    spec: RunSpec | None = None,
) -> tuple[AuditPlan, AuditRuns]:
    """What was overheard earlier: an audit of it, and its runs.

    Captures of an audit name the worlds that they lived in, and a file beside them says what these are. Others are all taken
    for the spec's own world: their noise is tested and their exact losses are known, but there is nothing to guess.

    Args:
        place: a folder with one capture or many: a path, or a URL for fsspec.
        asked: what is asked; its number of runs is that of the captures.
        prepare: finds the data of a spec and checks the run.
        say: told what is being done.
        spec: what was run (default: what the captures say was run).

    Raises:
        CaptureError: there are no captures, they cannot be read, they are of different runs, or another spec lies beside them.
        SpecError: the question or the spec do not fit them, or they are too few.
        DataError: the data, or the two worlds, are not those of the captures.
    """
    report_progress("looking for captures")
    root = open_folder(place)
    captures = list_captures(root)
    if not captures:
        simulated = "spec.yaml" in root.list_names()
        hint = (
            f"; its spec is audited by simulations of its own: sottovoce audit {place}/spec.yaml" if simulated else ""
        )
        raise CaptureError(f"{root.name} must be a capture, or a folder with captures: there is no capture.json{hint}")
    document = _same_spec(captures)
    if not document:
        raise CaptureError(
            f"{captures[0].name} is of no run of ours: sottovoce eavesdropper audit is for captures of other services"
        )
    _require_no_canaries(place)
    given = _spec(document, captures[0].name, spec)
    if spec is None:
        require_same_spec(given, captures, root)
    require_plausible_size(given, captures)
    prepared = prepare(given)
    _require_features(captures, prepared)
    labels = _labels(captures)
    told, where, ledger = (None, "", None) if labels == {None} else _told(root, labels)
    runs = collect_runs(captures, prepared.run, ledger, (lambda replica: 0) if told is None else told.find_pair_index)
    worlds = None if told is None else restore_worlds(told, prepared, where)
    if told is not None:
        _require_same(told.spec, document, where, captures[0].name)
        _require_asked(request, told.learner, where)
    paired = {*labels, *(run.world for run in runs.runs)} == {0, 1}
    request = replace(request, runs=len(runs.runs) // 2 if paired else len(runs.complete_captures))
    signed = Provenance("") if runs.is_ciphertext else check_provenance(runs.captures, root)
    provisos = (
        *filter(None, [signed.text]),
        *(() if spec is not None else (f"{UNSIGNED_PROMISE_NOTE} {_GIVE}",)),
        *runs.provisos,
    )
    if ledger is None and (noise := describe_noise_source(runs.complete_captures, root)):
        provisos += (noise,)
    chosen = "none" if told is None or not paired else told.coins
    what = f"{pluralize(len(runs.complete_captures), 'capture')} in {PurePosixPath(root.name).name}"
    runs = replace(runs, provisos=provisos, unproven_reason=signed.unproven_reason, coins=chosen).with_root(root, what)
    counts = () if worlds is None or not paired else runs.count_runs(len(worlds))
    return request.plan(prepared, worlds, counts, is_paired=paired), runs


def audit_captures(plan: AuditPlan, runs: AuditRuns, report_progress: ProgressReporter) -> Audit:
    """Audit what was overheard.

    Args:
        plan: the audit.
        runs: that were started.
        say: told what is being done.

    Raises:
        CaptureError: one cannot be read, or is ciphertext.
        EquivocationError: a learner said different things to different neighbours.
        SpecError: the listener hears what no channel carries, or an extra is not installed.
    """
    require_wire_threat(plan.adversary.threat)
    most, captures = count_runs_in_memory(plan.run), runs.complete_captures
    captures[0].require_messages()
    first: list[Transcript] = []
    parts: list[ChunkStatistics] = []
    pending = dict[tuple[int, int], list[RecordedRuns]]()
    for k, (pair, part) in enumerate(_recordings(plan, runs)):
        if (pair, part.world) == (0, 0) and len(first) < count_sweep_runs(plan.run):
            first.append(part.transcript)
        together = pending.setdefault((pair, part.world), [])
        together.append(part)
        if len(together) == most:
            parts.append(_examined(plan, pair, together))
            together.clear()
        report_progress("reading", k + 1, len(captures), "captures")
    parts += [_examined(plan, pair, rest) for (pair, _), rest in pending.items() if rest]
    if not first:
        raise CaptureError(f"of {pluralize(len(captures), 'capture')} none is of the first world")
    starts = runs.build_starts(plan)
    done = conclude(
        plan,
        merge_noise(parts),
        Transcript.concatenate(first),
        "; ".join(runs.source),
        run_outcomes=starts,
        on_stage=report_progress,
    )
    return replace(
        done,
        captures=runs.compute_digests(),
        coin_source=runs.coins,
        assumptions=runs.provisos,
        unproven_reason=runs.unproven_reason,
    )


def _examined(plan: AuditPlan, pair: int, runs: Sequence[RecordedRuns]) -> ChunkStatistics:
    """Runs of one world of a pair, together."""
    transcript = Transcript.concatenate([run.transcript for run in runs])
    together = RecordedRuns(
        runs[0].world, transcript, channel_features=tuple(seen for run in runs for seen in run.channel_features)
    )
    return compute_chunk_statistics(plan, together, pair)


def _recordings(plan: AuditPlan, runs: AuditRuns) -> Iterator[tuple[int, RecordedRuns]]:
    """What was heard of every run, and its pair of worlds."""
    import pyarrow as pa

    run, lines = plan.run, select_channels(plan)
    layouts: dict[FeatureLayout, FeatureLayout] = {}
    for started_run in runs.runs:
        if (capture := started_run.capture) is None or not started_run.whole:
            continue
        if (pair := started_run.pair) >= len(plan.pairs):
            raise CaptureError(
                f"{capture.name} is of the audit's pair of worlds {pair + 1}, and there are runs of one world alone: name the "
                "whole folder of the audit"
            )
        heard = read_conversation(pa.Table.from_batches(capture.read_batches()), lines, str(capture.metadata["run_id"]))
        seen = build_features_by_view(heard, {**CHANNEL_VIEWS, **TIMING_VIEWS})
        for name, row in seen.items():  # most runs have the same one: it is kept once
            seen[name] = replace(row, layout=layouts.setdefault(row.layout, row.layout))
        yield pair, RecordedRuns(started_run.world, read_transcript(capture, run), channel_features=(seen,))


# ---- which captures --------------------------------------------------------------------------------------------------


def list_captures(place: Folder) -> list[Capture]:
    """All captures in a folder and below, in the order of their replicas.

    Raises:
        CaptureError: one is not what it says it is, or the folder cannot be read.
    """

    def place_of(capture: Capture) -> tuple[int, str]:
        return -1 if capture.replica is None else capture.replica, capture.name

    return sorted(find_captures(place), key=place_of)


def _same_spec(captures: Sequence[Capture]) -> SpecDocument:
    """The spec of all of them.

    Raises:
        CaptureError: two differ.
    """
    first: SpecDocument = captures[0].metadata["spec"]
    for other in captures[1:]:
        _require_same(first, other.metadata["spec"], captures[0].name, other.name)
    return first


def _require_same(one: Any, other: Any, first: str, second: str) -> None:
    if (where := find_difference(one, other)) is not None:
        raise CaptureError(f"{first} and {second} must be of the same run spec, and differ in {where}")


def _spec(document: SpecDocument, where: str, given: RunSpec | None) -> RunSpec:
    """What was run; code that a spec names is imported only for the one that was given.

    Raises:
        SpecError: it is not valid, or another one than was given.
    """
    if given is None:
        if named := find_first_import(document):
            raise SpecError(
                f"{where} names code to import, {named!r}: give the SPEC beside --captures, if you trust that code"
            )
        return parse_spec(document, source=where, allow_imports=False)
    heard = parse_spec(
        document, source=where, allow_imports=find_first_import(given.model_dump(mode="json")) is not None
    )
    one, other = (prepare_audit_spec(spec).model_dump(mode="json") for spec in (given, heard))
    if (place := find_difference(one, other)) is not None:
        raise SpecError(f"the SPEC given must be that of the captures in {where}, and differs in {place}")
    return given


def _require_features(captures: Sequence[Capture], prepared: PreparedRun) -> None:
    for capture in captures:
        if (told := capture.metadata.get("n_features")) and told != prepared.data.n_features:
            raise DataError(
                f"{capture.name} is of records with {told} features (with the intercept), "
                f"the spec's data source gives {prepared.data.n_features}"
            )


# ---- which worlds ----------------------------------------------------------------------------------------------------


def _labels(captures: Sequence[Capture]) -> set[int | None]:
    """The worlds that captures say they are of; None among them: some say nothing.

    Raises:
        CaptureError: one is of a world that there is not.
    """
    for capture in captures:
        if capture.world not in (None, 0, 1):
            raise CaptureError(f"{capture.name} must be of world 0 or 1, or say nothing of it, got {capture.world}")
    return {capture.world for capture in captures}


def _told(root: Folder, labels: set[int | None]) -> tuple[WorldsFile, str, RunLedger]:
    """What the worlds of labelled captures are, where that stands, and which runs were started.

    Of one capture in the folder of others nobody asks where these are.
    """
    named = " and ".join(sorted("none" if label is None else str(label) for label in labels))
    if None in labels or 0 not in labels:
        raise CaptureError(f"captures in {root.name} must be of the worlds 0 and 1, or 0 alone, got {named}")
    above = root.get_subfolder("..")
    for place in (root, root.get_subfolder("captures"), above):
        if WORLDS_FILE in place.list_names():
            told = read_worlds(place)
            ledger = read_run_ledger(place, told)
            return told, f"{place.name}/{WORLDS_FILE}", None if place is above else ledger
    raise CaptureError(
        f"captures in {root.name} are of world {named}: there must be a {WORLDS_FILE} beside them that says what the worlds are"
    )


def _require_asked(asked: AuditRequest, learner: str, where: str) -> None:
    """The swap has been made: no other one can be asked for."""
    if asked.learner not in (None, learner):
        raise SpecError(f"--learner must be {learner}, whose record was swapped in these captures ({where})")
    if asked.record is not None:
        raise SpecError(f"--record is for runs that are still to be made: these captures have their swap ({where})")


def _require_no_canaries(place: str) -> None:
    """A run with canaries learned other records than its spec's.

    Raises:
        SpecError: there are some beside the captures.
    """
    if (found := find_commitment(place)) is not None:
        raise SpecError(f"this run had canaries in its records ({found}): watch it with sottovoce watch --canary-file")


def require_wire_threat(threat: ThreatModel) -> None:
    """Refuse what no channel carries.

    Raises:
        SpecError: published decisions are asked for.
    """
    if threat is ThreatModel.OUTPUT:
        raise SpecError(
            "--threat output is about published decisions, which no channel carries: audit it on the simulator"
        )
