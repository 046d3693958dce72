"""`sottovoce audit --captures`: audit traffic that was captured earlier, of one world or of two."""

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
from sottovoce_core.auditing.http2_frames import FrameSample
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
"""Maximum number of audited channels (directions of edges), the learner's own ones first."""

_Channel = tuple[int, int, str]
"""Direction of an edge: caller, callee, `out` or `back`."""

_Role = Literal["sent", "received", "others"]


@dataclass(frozen=True, slots=True)
class ObservedChannels:
    """Channels (directions of edges) that the adversary observes.

    Attributes:
        roles: relation of each to the audited learner.
        inspected_channel: the channel whose messages are inspected; None: the learner sends on none. Its other channels carry the
            same bytes.
    """

    roles: Mapping[_Channel, _Role]
    inspected_channel: _Channel | None


def select_channels(plan: AuditPlan) -> ObservedChannels:
    """Select the channels that the plan's adversary observes."""
    learner, neighbour = plan.worlds.learner, plan.adversary.neighbour
    edges = [edge for edge in plan.run.network.edges if neighbour is None or neighbour in edge]
    edges.sort(key=lambda edge: learner not in edge)
    channels = [(*edge, direction) for edge in edges for direction in ("out", "back")][:_MAX_CHANNELS]
    roles = {channel: _get_role(channel, learner) for channel in channels}
    return ObservedChannels(roles, next((channel for channel in channels if roles[channel] == "sent"), None))


def _get_role(channel: _Channel, learner: int) -> _Role:
    caller, callee, direction = channel
    if learner not in (caller, callee):
        return "others"
    return "sent" if learner == (caller if direction == "out" else callee) else "received"


def read_conversation(
    table: pa.Table, channels: ObservedChannels, run_id: str, *, world: int = 0, run_number: int = 0
) -> RunTraffic:
    """Read the frames of one run.

    Args:
        table: all columns of a capture.
        channels: the observed channels.
        run_id: the run's random name, which is removed from the frames.
        world: 0 or 1.
        run_number: number of the run, in order.
    """
    sample = FrameSample()
    frames = tuple(_read_frames(table, channels, run_id.encode(), sample))
    return RunTraffic(world, run_id, float(run_number), frames, tuple(sample.frames))


def _read_frames(
    table: pa.Table, channels: ObservedChannels, run_id: bytes, sample: FrameSample
) -> Iterator[CapturedFrame]:
    """Yield the frames on observed channels, and add those of HTTP/2 to the sample.

    Payloads of other learners' channels are not read.
    """
    names = ("caller", "callee", "direction", "kind", "method", "stream", "connection", "mono_ns", "size")
    payloads, streams, began = table.column("payload"), dict[object, int](), None
    for k, values in enumerate(zip(*(table.column(name).to_pylist() for name in names), strict=True)):
        caller, callee, direction, kind, method, stream, connection, at, size = values
        channel = (caller, callee, direction)
        if (role := channels.roles.get(channel)) is None:
            continue
        if kind == "http2":
            if role != "others":
                side = "request" if direction == "out" else "response"
                sample.add(f"{caller} to {callee} {side}", payloads[k].as_py())
            continue
        began = at if began is None else began
        stream = streams.setdefault((caller, callee, stream, connection), len(streams))
        frame = CapturedFrame(
            kind, f"{caller} to {callee} {method}".rstrip(), direction, stream, (at - began) / 1e9, size, role=role
        )
        if role != "others" and kind == "hello":
            frame = replace(frame, entries=tuple(_read_hello_entries(payloads[k].as_py(), run_id)))
        elif role != "others" and kind == "unfinished":
            frame = replace(frame, entries=(("bytes", payloads[k].as_py()[:MAX_HEAD_BYTES].hex()),))
        elif role != "others" and kind in ("metadata", "trailers"):
            frame = parse_metadata(frame, payloads[k].as_py().replace(run_id, b""))
        elif role == "sent" and kind == "message":
            payload = payloads[k].as_py()
            frame = replace(
                frame,
                head=payload[:MAX_HEAD_BYTES] if channel == channels.inspected_channel else b"",
                digest=digest(payload),
            )
        yield frame


def _read_hello_entries(payload: bytes, run_id: bytes) -> Iterator[tuple[str, str]]:
    """Yield the next round of a hello, and its bytes without the run's random name."""
    with suppress(RemoteProtocolError):
        yield "next_round", str(read_hello(payload).next_round)
    yield "bytes", payload.replace(run_id, b"").hex()


def parse_metadata(frame: CapturedFrame, payload: bytes) -> CapturedFrame:
    """Add entries and status from metadata or trailers in JSON; empty if the payload is none."""
    try:
        document = json.loads(payload)
    except (ValueError, RecursionError):
        document = None
    document = document if isinstance(document, dict) else {}
    listed = document.get("metadata")
    pairs = [each for each in (listed if isinstance(listed, list) else ()) if isinstance(each, list) and len(each) == 2]
    entries = tuple((str(key), str(value)) for key, value in pairs)
    status = (str(document.get("code", "")), str(document.get("details", "")))
    return replace(frame, entries=entries, status=status)


# ---- captures --------------------------------------------------------------------------------------------------------

SpecDocument = dict[str, Any]
RunLedger = Mapping[int, RunLedgerEntry] | None
_TRUSTED_SPEC_HINT = "To compare with a spec that you trust, give it: sottovoce audit SPEC --captures ..."


def load_captured_runs(
    place: str,
    request: AuditRequest,
    prepare: Callable[[RunSpec], PreparedRun],
    report_progress: ProgressReporter,
    *,
    spec: RunSpec | None = None,
) -> tuple[AuditPlan, AuditRuns]:
    """Plan an audit of earlier captures, and collect its runs.

    Captures of an audit name their worlds, and a file next to them describes these. Other captures are all taken as the spec's
    own world: their noise is tested and their exact losses are known, but there is nothing to guess.

    Args:
        place: a folder with one or more captures: a path, or a URL for fsspec.
        request: options of the audit; its number of runs is that of the captures.
        prepare: loads the data of a spec and checks the run.
        report_progress: progress callback.
        spec: the spec of the runs (default: that of the captures).

    Raises:
        CaptureError: There are no captures, they cannot be read, they are of different runs, or a different spec is next to them.
        SpecError: The request or the spec do not fit them, or they are too few.
        DataError: The data, or the two worlds, are not those of the captures.
    """
    report_progress("looking for captures")
    root = open_folder(place)
    captures = list_captures(root)
    if not captures:
        simulated = "spec.yaml" in root.list_names()
        hint = f"; to audit simulations of its spec: sottovoce audit {place}/spec.yaml" if simulated else ""
        raise CaptureError(f"{root.name} must be a capture, or a folder with captures, and has no capture.json{hint}")
    document = _get_common_spec(captures)
    if not document:
        raise CaptureError(
            f"{captures[0].name} must be of a Sottovoce run; for captures of other services use sottovoce eavesdropper audit"
        )
    _require_no_canaries(place)
    given = _resolve_spec(document, captures[0].name, spec)
    if spec is None:
        require_same_spec(given, captures, root)
    require_plausible_size(given, captures)
    prepared = prepare(given)
    _require_features(captures, prepared)
    labels = _get_world_labels(captures)
    worlds_file, source, ledger = (None, "", None) if labels == {None} else _find_worlds_file(root, labels)
    find_pair = (lambda replica: 0) if worlds_file is None else worlds_file.find_pair_index
    runs = collect_runs(captures, prepared.run, ledger, find_pair)
    worlds = None if worlds_file is None else restore_worlds(worlds_file, prepared, source)
    if worlds_file is not None:
        _require_equal(worlds_file.spec, document, source, captures[0].name)
        _require_matching_request(request, worlds_file.learner, source)
    paired = {*labels, *(run.world for run in runs.runs)} == {0, 1}
    request = replace(request, runs=len(runs.runs) // 2 if paired else len(runs.complete_captures))
    provenance = Provenance("") if runs.is_ciphertext else check_provenance(runs.captures, root)
    assumptions = (
        *filter(None, [provenance.text]),
        *(() if spec is not None else (f"{UNSIGNED_PROMISE_NOTE} {_TRUSTED_SPEC_HINT}",)),
        *runs.assumptions,
    )
    if ledger is None and (noise := describe_noise_source(runs.complete_captures, root)):
        assumptions += (noise,)
    coins = "none" if worlds_file is None or not paired else worlds_file.coins
    description = f"{pluralize(len(runs.complete_captures), 'capture')} in {PurePosixPath(root.name).name}"
    runs = replace(runs, assumptions=assumptions, unproven_reason=provenance.unproven_reason, coins=coins)
    runs = runs.with_root(root, description)
    counts = () if worlds is None or not paired else runs.count_runs(len(worlds))
    return request.plan(prepared, worlds, counts, is_paired=paired), runs


def audit_captures(plan: AuditPlan, runs: AuditRuns, report_progress: ProgressReporter) -> Audit:
    """Audit captured messages.

    Args:
        plan: the audit plan.
        runs: the started runs.
        report_progress: progress callback.

    Raises:
        CaptureError: A capture cannot be read, or is ciphertext.
        EquivocationError: A learner sent different messages to different neighbours.
        SpecError: No channel carries what the threat model needs, or an optional dependency is not installed.
    """
    require_wire_threat(plan.adversary.threat)
    max_together, captures = count_runs_in_memory(plan.run), runs.complete_captures
    captures[0].require_messages()
    first: list[Transcript] = []
    parts: list[ChunkStatistics] = []
    pending = dict[tuple[int, int], list[RecordedRuns]]()
    for k, (pair, part) in enumerate(_iterate_recorded_runs(plan, runs)):
        if (pair, part.world) == (0, 0) and len(first) < count_sweep_runs(plan.run):
            first.append(part.transcript)
        together = pending.setdefault((pair, part.world), [])
        together.append(part)
        if len(together) == max_together:
            parts.append(_examine_runs(plan, pair, together))
            together.clear()
        report_progress("reading", k + 1, len(captures), "captures")
    parts += [_examine_runs(plan, pair, rest) for (pair, _), rest in pending.items() if rest]
    if not first:
        raise CaptureError(
            f"a capture must be of the first world, and none of {pluralize(len(captures), 'capture')} is"
        )
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
        assumptions=runs.assumptions,
        unproven_reason=runs.unproven_reason,
    )


def _examine_runs(plan: AuditPlan, pair: int, runs: Sequence[RecordedRuns]) -> ChunkStatistics:
    """Compute the statistics of runs of one world of a pair together."""
    transcript = Transcript.concatenate([run.transcript for run in runs])
    together = RecordedRuns(
        runs[0].world, transcript, channel_features=tuple(each for run in runs for each in run.channel_features)
    )
    return compute_chunk_statistics(plan, together, pair)


def _iterate_recorded_runs(plan: AuditPlan, runs: AuditRuns) -> Iterator[tuple[int, RecordedRuns]]:
    """Yield the transcript and channel features of every complete run, with its pair of worlds."""
    import pyarrow as pa

    run, channels = plan.run, select_channels(plan)
    layouts: dict[FeatureLayout, FeatureLayout] = {}
    for started_run in runs.runs:
        if (capture := started_run.capture) is None or not started_run.is_complete:
            continue
        if (pair := started_run.pair) >= len(plan.pairs):
            raise CaptureError(
                f"{capture.name} is of the audit's pair of worlds {pair + 1}, so runs of both worlds are needed, and there is "
                "one: name the whole folder of the audit"
            )
        traffic = read_conversation(
            pa.Table.from_batches(capture.read_batches()), channels, str(capture.metadata["run_id"])
        )
        features = build_features_by_view(traffic, {**CHANNEL_VIEWS, **TIMING_VIEWS})
        for name, row in features.items():  # most runs have the same layout: it is kept once
            features[name] = replace(row, layout=layouts.setdefault(row.layout, row.layout))
        yield pair, RecordedRuns(started_run.world, read_transcript(capture, run), channel_features=(features,))


# ---- selection of captures -------------------------------------------------------------------------------------------


def list_captures(place: Folder) -> list[Capture]:
    """List all captures in a folder and below, ordered by replica.

    Raises:
        CaptureError: A capture is invalid, or the folder cannot be read.
    """

    def get_order(capture: Capture) -> tuple[int, str]:
        return -1 if capture.replica is None else capture.replica, capture.name

    return sorted(find_captures(place), key=get_order)


def _get_common_spec(captures: Sequence[Capture]) -> SpecDocument:
    """Return the spec of all captures.

    Raises:
        CaptureError: Two specs differ.
    """
    first: SpecDocument = captures[0].metadata["spec"]
    for other in captures[1:]:
        _require_equal(first, other.metadata["spec"], captures[0].name, other.name)
    return first


def _require_equal(one: Any, other: Any, first: str, second: str) -> None:
    if (where := find_difference(one, other)) is not None:
        raise CaptureError(f"{first} and {second} must be of the same run spec, and differ in {where}")


def _resolve_spec(document: SpecDocument, source: str, given: RunSpec | None) -> RunSpec:
    """Return the spec of the runs; code that a spec names is imported only for a given spec.

    Raises:
        SpecError: It is invalid, or differs from the given one.
    """
    if given is None:
        if named := find_first_import(document):
            raise SpecError(
                f"{source} names code to import, {named!r}: if you trust that code, give the SPEC together with --captures"
            )
        return parse_spec(document, source=source, allow_imports=False)
    captured = parse_spec(
        document, source=source, allow_imports=find_first_import(given.model_dump(mode="json")) is not None
    )
    one, other = (prepare_audit_spec(spec).model_dump(mode="json") for spec in (given, captured))
    if (place := find_difference(one, other)) is not None:
        raise SpecError(f"the SPEC given must be that of the captures in {source}, and differs in {place}")
    return given


def _require_features(captures: Sequence[Capture], prepared: PreparedRun) -> None:
    for capture in captures:
        if (n_features := capture.metadata.get("n_features")) and n_features != prepared.data.n_features:
            raise DataError(
                f"{capture.name} is of records with {n_features} features (with the intercept), "
                f"the spec's data source gives {prepared.data.n_features}"
            )


# ---- worlds ----------------------------------------------------------------------------------------------------------


def _get_world_labels(captures: Sequence[Capture]) -> set[int | None]:
    """Return the worlds that captures name; None among them: some name none.

    Raises:
        CaptureError: A world is neither 0 nor 1.
    """
    for capture in captures:
        if capture.world not in (None, 0, 1):
            raise CaptureError(f"{capture.name} must be of world 0 or 1, or name no world, got {capture.world}")
    return {capture.world for capture in captures}


def _find_worlds_file(root: Folder, labels: set[int | None]) -> tuple[WorldsFile, str, RunLedger]:
    """Find the description of the worlds of labelled captures, its path, and the ledger of started runs.

    The ledger is left out for one capture in a folder of several: the others are not audited.
    """
    named = " and ".join(sorted("none" if label is None else str(label) for label in labels))
    if None in labels or 0 not in labels:
        raise CaptureError(f"captures in {root.name} must be of the worlds 0 and 1, or 0 alone, got {named}")
    above = root.get_subfolder("..")
    for place in (root, root.get_subfolder("captures"), above):
        if WORLDS_FILE in place.list_names():
            worlds_file = read_worlds(place)
            ledger = read_run_ledger(place, worlds_file)
            return worlds_file, f"{place.name}/{WORLDS_FILE}", None if place is above else ledger
    raise CaptureError(
        f"captures in {root.name} are of world {named}: a {WORLDS_FILE} next to them must describe the worlds, and there is none"
    )


def _require_matching_request(request: AuditRequest, learner: str, source: str) -> None:
    """Refuse a request for another learner or record than that of the captures."""
    if request.learner not in (None, learner):
        raise SpecError(f"--learner must be {learner}, whose record was replaced in these captures ({source})")
    if request.record is not None:
        raise SpecError(f"--record is for new runs only: the record of these captures is already replaced ({source})")


def _require_no_canaries(place: str) -> None:
    """Refuse a run with canaries, whose records differ from those of its spec.

    Raises:
        SpecError: There are canaries next to the captures.
    """
    if (found := find_commitment(place)) is not None:
        raise SpecError(f"the run must have no canaries, and has some ({found}): use sottovoce watch --canary-file")


def require_wire_threat(threat: ThreatModel) -> None:
    """Refuse a threat model whose channels carry no messages.

    Raises:
        SpecError: It is that of published decisions.
    """
    if threat is ThreatModel.OUTPUT:
        raise SpecError(
            "--threat output is about published decisions, which no channel carries: audit them on the simulator"
        )
