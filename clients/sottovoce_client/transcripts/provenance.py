"""Provenance of captures: signatures that prove their messages, described in a sentence."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from sottovoce_client.formatting import format_count
from sottovoce_client.transcripts.verify import MISSING_SIGNATURE_REASON, read_signatures
from sottovoce_core.errors import CaptureError
from sottovoce_eavesdropper.capture_reader import Capture
from sottovoce_eavesdropper.storage import Folder
from sottovoce_rpc.certificates import AUTHORITIES_FILE

SUMMARY_FILE = "summary.json"
_MAX_FILE_BYTES = 64 * 2**20
_MAX_NAMED_LEARNERS = 5
NO_SIGNATURES = f"no signatures: {MISSING_SIGNATURE_REASON}"
_CHANGED = "Anyone who could write to the captures may have changed what is not signed"


@dataclass(frozen=True, slots=True)
class Provenance:
    """Signatures of captures.

    Attributes:
        text: description, in one or two sentences.
        unproven_reason: why the captures do not prove their messages, in a few words; empty: they do.
    """

    text: str
    unproven_reason: str = ""


def check_provenance(captures: Sequence[Capture], place: Folder, *, relative_to: Path | None = None) -> Provenance:
    """Check the signatures of captures, and describe what must be trusted without them.

    Args:
        captures: captures of Sottovoce runs.
        place: the named folder. The authorities' certificates (`ca.crt`) may be in it, or in one of the two above.
        relative_to: folder that printed paths are relative to (default: the named one).

    Raises:
        CaptureError: A capture cannot be read, or differs from what was signed in it.
    """
    subject = "this capture" if len(captures) == 1 else f"these {format_count(len(captures))} captures"
    found = next(_find_files(place, AUTHORITIES_FILE), None)
    where, authorities = ("", b"") if found is None else (_format_path(relative_to, place, found[0]), found[1])
    if not any(map(_is_signed, captures)):
        identities = f", although the learners had identities ({where})" if where else ""
        return Provenance(
            f"There are no signatures in {subject}{identities}: {MISSING_SIGNATURE_REASON}. {_CHANGED}.", NO_SIGNATURES
        )
    if found is None:
        return Provenance(
            f"Signatures in {subject} were not checked, because there is no {AUTHORITIES_FILE} next to it "
            f"(sottovoce transcript verify --ca takes one from another place). {_CHANGED}.",
            "its signatures were not checked",
        )
    total, signed, unsigned = 0, 0, Counter[str]()
    for capture in captures:
        learners = read_signatures(capture, authorities)
        if fault := next((line for name, own in learners.items() for line in own.describe_faults(name)), None):
            has_signatures = any(own.has_signatures for own in learners.values())
            reason = (
                "It was changed, or they sent two messages of one round"
                if has_signatures
                else f"It was changed, or {where} is of another authority"
            )
            raise CaptureError(
                f"{capture.name} must be what its learners signed, by {where}, and is not: {fault}. {reason}: "
                "sottovoce transcript verify shows details"
            )
        unsigned.update({name: own.message_rounds_count - own.signed_rounds_count for name, own in learners.items()})
        total += sum(own.message_rounds_count for own in learners.values())
        signed += sum(own.signed_rounds_count for own in learners.values())
    if signed < total:
        names = ", ".join(f"{name} {format_count(n)}" for name, n in (+unsigned).most_common(_MAX_NAMED_LEARNERS))
        more = (
            f", and {len(+unsigned) - _MAX_NAMED_LEARNERS} more learners"
            if len(+unsigned) > _MAX_NAMED_LEARNERS
            else ""
        )
        return Provenance(
            f"Of {format_count(total)} messages {format_count(total - signed)} are not signed, by {where} ({names}{more}): their "
            f"signatures were {MISSING_SIGNATURE_REASON}. {_CHANGED}.",
            "not all messages are signed",
        )
    return Provenance(
        f"All messages are signed by their learners, by {where}: the learners sent them, if that file is their authority's."
    )


def describe_noise_source(captures: Sequence[Capture], place: Folder) -> str:
    """Describe the noise source of runs from the `summary.json` that `sottovoce run` writes; empty for the operating system's.

    Args:
        captures: captures of Sottovoce runs.
        place: the named folder.
    """
    known: dict[str, bool] = {}
    for _, content in _find_files(place, SUMMARY_FILE):
        try:
            summary = json.loads(content)
        except (ValueError, RecursionError):
            continue
        if isinstance(summary, dict) and isinstance(summary.get("private_noise"), bool):
            known[str(summary.get("run_id"))] = summary["private_noise"]
    runs = [known.get(str(capture.metadata["run_id"])) for capture in captures]
    if seeded := runs.count(False):
        return describe_seeded_noise(seeded, len(runs))
    if None in runs:
        return (
            "Captures do not record the noise source: the operating system's is assumed, and no seed's or recording's."
        )
    return ""


def describe_seeded_noise(seeded: int, runs: int) -> str:
    """Describe runs whose noise can be repeated."""
    runs_text = f"all {format_count(runs)}" if seeded == runs else f"{format_count(seeded)} of {format_count(runs)}"
    subject = "of this run" if runs == 1 else f"of {runs_text} runs"
    return (
        f"The noise {subject} came from a seed (SOTTOVOCE_NOISE_SEED) or a recording: its owner can remove the noise, so it "
        "protected nothing, independent of the result of the audit."
    )


def _format_path(relative_to: Path | None, place: Folder, path: str) -> str:
    """Format the path of a file near a folder, relative to `relative_to` if that is shorter."""
    if relative_to is None or "://" in place.name:
        return path
    full = os.path.normpath(Path(place.name) / path)
    return min(os.path.relpath(full, relative_to), full, key=len)


def _is_signed(capture: Capture) -> bool:
    import pyarrow.compute as pc

    kinds = (batch.column("kind") for batch in capture.read_batches(("kind",)))
    return any(pc.any(pc.equal(each, "signature")).as_py() for each in kinds)


def _find_files(place: Folder, name: str) -> Iterator[tuple[str, bytes]]:
    """Yield path and content of files of this name, in the folder and in the two above."""
    for above in ("", "../", "../../"):
        try:
            if place.get_size(f"{above}{name}") <= _MAX_FILE_BYTES:
                with place.open(f"{above}{name}") as file:
                    yield f"{above}{name}", file.read(_MAX_FILE_BYTES)
        except (OSError, ValueError):  # some stores have no folder above
            continue
