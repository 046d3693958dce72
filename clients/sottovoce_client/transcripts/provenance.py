"""Whether captures that somebody has kept are what learners said: a sentence for whoever judges learners by them."""

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
_CHANGED = "What is not signed may have been changed by anyone who could write to what was kept"


@dataclass(frozen=True, slots=True)
class Provenance:
    """What signatures say of captures.

    Attributes:
        text: for people, a sentence or two.
        unproven: why the captures do not prove what their learners said, in a few words; empty: they do.
    """

    text: str
    unproven_reason: str = ""


def check_provenance(captures: Sequence[Capture], place: Folder, *, relative_to: Path | None = None) -> Provenance:
    """What signatures say of captures, and what must be believed where there are none.

    Args:
        captures: of runs of ours.
        place: the folder that was named. The authorities' certificates (`ca.crt`) may lie in it, or in one of the two above.
        stands: the folder that paths are told from (default: the one that was named).

    Raises:
        CaptureError: a capture cannot be read, or is not what was signed in it.
    """
    kept = "this capture" if len(captures) == 1 else f"these {format_count(len(captures))} captures"
    found = next(_beside(place, AUTHORITIES_FILE), None)
    where, authorities = ("", b"") if found is None else (_from(relative_to, place, found[0]), found[1])
    if not any(map(_is_signed, captures)):
        identities = f", though the learners had identities ({where})" if where else ""
        return Provenance(
            f"There are no signatures in {kept}{identities}: {MISSING_SIGNATURE_REASON}. {_CHANGED}.", NO_SIGNATURES
        )
    if found is None:
        return Provenance(
            f"Signatures in {kept} were not checked, for there is no {AUTHORITIES_FILE} beside it "
            f"(sottovoce transcript verify --ca takes one from elsewhere). {_CHANGED}.",
            "its signatures were not checked",
        )
    heard, evidence, lacking = 0, 0, Counter[str]()
    for capture in captures:
        words = read_signatures(capture, authorities)
        if wrong := next((line for name, own in words.items() for line in own.describe_faults(name)), None):
            known = any(own.has_signatures for own in words.values())
            why = (
                "It was changed, or they said two things"
                if known
                else f"It was changed, or {where} is of another authority"
            )
            raise CaptureError(
                f"{capture.name} is not what its learners signed, by {where}: {wrong}. {why}: "
                "sottovoce transcript verify says more"
            )
        lacking.update({name: own.message_rounds_count - own.signed_rounds_count for name, own in words.items()})
        heard += sum(own.message_rounds_count for own in words.values())
        evidence += sum(own.signed_rounds_count for own in words.values())
    if evidence < heard:
        whose = ", ".join(f"{name} {format_count(many)}" for name, many in (+lacking).most_common(_MAX_NAMED_LEARNERS))
        more = (
            f", and {len(+lacking) - _MAX_NAMED_LEARNERS} more learners" if len(+lacking) > _MAX_NAMED_LEARNERS else ""
        )
        return Provenance(
            f"Of {format_count(heard)} messages {format_count(heard - evidence)} are not signed, by {where} ({whose}{more}): their signatures "
            f"were {MISSING_SIGNATURE_REASON}. {_CHANGED}.",
            "not all of it is signed",
        )
    return Provenance(
        f"All messages are signed by their learners, by {where}: they said them, where that file is their authority's."
    )


def describe_noise_source(captures: Sequence[Capture], place: Folder) -> str:
    """What is known of where the noise of runs came from, by the `summary.json` that `sottovoce run` writes; empty: the system.

    Args:
        captures: of runs of ours.
        place: the folder that was named.
    """
    known: dict[str, bool] = {}
    for _, content in _beside(place, SUMMARY_FILE):
        try:
            told = json.loads(content)
        except (ValueError, RecursionError):
            continue
        if isinstance(told, dict) and isinstance(told.get("private_noise"), bool):
            known[str(told.get("run_id"))] = told["private_noise"]
    runs = [known.get(str(capture.metadata["run_id"])) for capture in captures]
    if seeded := runs.count(False):
        return describe_seeded_noise(seeded, len(runs))
    if None in runs:
        return (
            "Captures do not say where noise came from: that it was the operating system's, and no seed's or recording's, "
            "was assumed."
        )
    return ""


def describe_seeded_noise(seeded: int, runs: int) -> str:
    """What must be said of runs whose noise somebody can repeat."""
    some = f"all {format_count(runs)}" if seeded == runs else f"{format_count(seeded)} of {format_count(runs)}"
    whose = "of this run" if runs == 1 else f"of {some} runs"
    return (
        f"The noise {whose} came from a seed (SOTTOVOCE_NOISE_SEED) or a recording: whoever has that takes it "
        "away again, so it protected nothing, whatever was found."
    )


def _from(stands: Path | None, place: Folder, path: str) -> str:
    """The path of a file beside this folder, from where somebody stands."""
    if stands is None or "://" in place.name:
        return path
    whole = os.path.normpath(Path(place.name) / path)
    return min(os.path.relpath(whole, stands), whole, key=len)


def _is_signed(capture: Capture) -> bool:
    import pyarrow.compute as pc

    kinds = (batch.column("kind") for batch in capture.read_batches(("kind",)))
    return any(pc.any(pc.equal(each, "signature")).as_py() for each in kinds)


def _beside(place: Folder, name: str) -> Iterator[tuple[str, bytes]]:
    """Files of this name, and where they lie: in the folder, and in the two above."""
    for above in ("", "../", "../../"):
        try:
            if place.get_size(f"{above}{name}") <= _MAX_FILE_BYTES:
                with place.open(f"{above}{name}") as file:
                    yield f"{above}{name}", file.read(_MAX_FILE_BYTES)
        except (OSError, ValueError):  # a store may know no folder above
            continue
