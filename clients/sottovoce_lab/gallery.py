"""`sottovoce lab gallery`: records that an eavesdropper can rebuild, as pictures on a page, as tables and as JSON."""

from __future__ import annotations

import base64
import math
import struct
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from sottovoce_client import terminal
from sottovoce_client.atomic_files import open_private, write_json
from sottovoce_client.formatting import MISSING_VALUE, format_number, format_percent
from sottovoce_client.reports.figure import Figure
from sottovoce_client.reports.page import Page, PageColumn, PageTable
from sottovoce_client.reports.plot_elements import (
    BLUE,
    FAINT,
    INK,
    Axis,
    PlotView,
    make_band,
    make_line,
    make_reference_line,
    select_evenly,
)
from sottovoce_core.arrays import FloatArray
from sottovoce_core.errors import CaptureError
from sottovoce_core.experiment import PreparedRun, prepare
from sottovoce_core.optional import format_install_hint
from sottovoce_core.spec import parse_spec
from sottovoce_eavesdropper.capture_reader import find_captures
from sottovoce_eavesdropper.storage import open_folder
from sottovoce_lab.reconstruction import Reconstruction, reconstruct_records
from sottovoce_lab.simulated_attacks import (
    DEFAULT_EPSILONS,
    AttackResults,
    Gallery,
    MembershipInference,
    attack_spec,
    simulate_gallery,
)

# ---- exhibits --------------------------------------------------------------------------------------------------------

MAX_PICTURES_PER_ROW = 8
"""Maximum number of pictures in a row."""
_REFERENCES = {"blank": "a blank picture", "mean record": "the mean record", "random record": "a random record"}
"""Descriptions of the guesses that need no message."""
_MAX_ROC_POINTS = 200
"""Maximum number of drawn points of an ROC."""
_MIN_ERROR = 1e-9
"""Mean squared error that counts as rounding."""
_GET_TORCH = format_install_hint("torch")
_TITLES = {
    "linear": "Read off a gradient",
    "network": "Searched for in a network’s gradient",
    "gossip": "Read off gossip messages",
    "spec": "Rebuilt from messages",
    "capture": "Rebuilt from a capture",
}
"""Titles of the attacks."""


class _Image(NamedTuple):
    """A picture as base64 data, its size in pixels of the page, and its caption."""

    data: str
    width: int
    height: int
    label: str


def _build_gallery_page(gallery: Gallery) -> Page:
    """Build the page of all attacks and all membership guesses."""
    first = [next(iter(results.values())) for results in gallery.attacks.values() if results]
    right = round(sum(each.recognised_share * len(each.pictures) for each in first))
    share = f"{right:,} of {sum(len(each.pictures) for each in first):,} records"
    if gallery.source:
        messages = "recorded messages" if "capture" in gallery.attacks else "messages of the spec"
        heading = f"{share} recognised in the {messages}."
    else:
        heading = f"Without noise on the wire: {share} recovered and recognised."
    curves = [_plot_roc(each, k) for k, each in enumerate(gallery.memberships)]
    values = {
        "curves": list(zip(curves, map(_describe_share, gallery.memberships), strict=True)),
        "source": gallery.source,
        "heading": heading,
        "right": right,
        "summary": [*map(_compare_with_guesses, first)] if gallery.source else (),
        "attacked": [
            (name, list(_build_rows(each)), _find_faded_transcript(each)) for name, each in gallery.attacks.items()
        ],
        "titles": _TITLES,
        "get_torch": _GET_TORCH,
        "runs": gallery.memberships[0].guesses.runs if gallery.memberships else 0,
    }
    return Page("gallery.html.j2", [_build_guesses_table(gallery.memberships), *curves], values)


# ---- pictures --------------------------------------------------------------------------------------------------------


def _find_faded_transcript(results: AttackResults) -> tuple[str, Reconstruction] | None:
    """Return the first transcript with noise whose pictures are recognised in fewer than 5 % of the cases."""
    return next(((label, each) for label, each in list(results.items())[1:] if each.recognised_share < 0.05), None)


def _build_rows(results: AttackResults) -> Iterator[tuple[str, list[_Image], Sequence[str], Reconstruction]]:
    """Yield the true records, the rebuilt ones of each transcript, and guesses without messages: a label, pictures, figures."""
    first = next(iter(results.values()), None)
    if first is None:
        return
    blank = ("",) * 4
    yield "the true records", _build_images(first.originals, "the true records"), ("", *blank), first
    for label, each in results.items():
        figures = (
            _format_error(each.mean_squared_error),
            format_number(each.similarity, 2),
            format_percent(each.recognised_share),
            format_percent(each.identified_share),
            format_percent(each.label_share),
        )
        yield label, _build_images(each.pictures, label), figures, each
    for name, guess in first.references.items():
        label = f"guess: {_REFERENCES[name]}"
        yield label, _build_images(guess.pictures, label), (_format_error(guess.mean_squared_error), *blank), first


def _format_error(error: float) -> str:
    return format_number(error, 3) if error >= _MIN_ERROR else "< 1e−9"


def _compare_with_guesses(result: Reconstruction) -> str:
    """Compare the error of an attack with that of the best guess that needs no message, in a sentence."""
    name, guess = min(result.references.items(), key=lambda each: each[1].mean_squared_error)
    verb = "is better" if result.mean_squared_error < guess.mean_squared_error else "is no better"
    return (
        f"The attack {verb} than a guess without any message: its error is {_format_error(result.mean_squared_error)}, "
        f"that of {_REFERENCES[name]} {_format_error(guess.mean_squared_error)}."
    )


def _build_images(pictures: FloatArray, label: str) -> list[_Image]:
    """Build square pictures where the number of features is a square, or three of them, which are averaged; else lines."""
    channels = next((k for k in (1, 3) if pictures.shape[1] == k * math.isqrt(pictures.shape[1] // k) ** 2), 0)
    side = math.isqrt(pictures.shape[1] // channels) if channels else 0
    shape, size = ((channels, side, side), (56, 56)) if channels else ((1, 1, pictures.shape[1]), (72, 28))
    return [
        _Image(base64.b64encode(_encode_png(each.reshape(shape).mean(axis=0))).decode(), *size, label)
        for each in pictures[:MAX_PICTURES_PER_ROW]
    ]


def _encode_png(ink: FloatArray) -> bytes:
    """Encode a grey PNG of values cut to [0, 1], 1 is black; one pixel for each value."""
    grey = np.rint(255.0 * (1.0 - np.clip(ink, 0.0, 1.0))).astype(np.uint8)
    lines = b"".join(b"\0" + line.tobytes() for line in grey)
    header = struct.pack(">IIBBBBB", grey.shape[1], grey.shape[0], 8, 0, 0, 0, 0)
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(lines)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_encode_chunk(kind, data) for kind, data in parts)


def _encode_chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


# ---- membership ------------------------------------------------------------------------------------------------------


def _describe_share(row: MembershipInference) -> str:
    return f"{format_percent(row.guesses.rate)} right (95 % interval: {_format_interval(row)})"


def _format_interval(row: MembershipInference) -> str:
    return f"{format_percent(row.guesses.low).removesuffix(' %')}{MISSING_VALUE}{format_percent(row.guesses.high)}"


def _build_guesses_table(rows: Sequence[MembershipInference]) -> PageTable:
    texts = ("algorithm, decisions", "records", "view")
    columns = [PageColumn(head, kind="text") for head in texts]
    columns += [PageColumn(head) for head in ("right guesses", "95 % interval", "ε at least", "ε claimed", "allows")]
    cells = [
        (
            each.algorithm,
            each.record,
            each.view,
            format_percent(each.guesses.rate),
            _format_interval(each),
            format_number(each.guesses.bound, 3),
            format_number(each.claim) if each.is_covered else "none",
            format_percent(1.0 / (1.0 + math.exp(-each.claim))) if each.is_covered else "100.0 %",
        )
        for each in rows
    ]
    return PageTable("guesses", "Was this record learned?", columns, cells)


def _plot_roc(row: MembershipInference, k: int) -> Figure:
    """Plot the ROC of row k with its band, and the limit of the claim."""
    guesses = row.guesses
    across, low, high = compute_roc_band(guesses.false_alarms, guesses.detections, guesses.runs // 2)
    marks = [
        make_band(across, low, high, BLUE, "95 % band"),
        make_reference_line([0, 1], [0, 1], "a coin", FAINT, "dot"),
    ]
    if row.is_covered:
        corner = 1.0 / (1.0 + math.exp(row.claim))
        name = f"limit of ε = {format_number(row.claim)}"
        marks.append(make_reference_line([0, corner, 1], [0, 1 - corner, 1], name, INK))
    kept = select_evenly(len(guesses.false_alarms), _MAX_ROC_POINTS)
    marks.append(make_line(guesses.false_alarms[kept], guesses.detections[kept], "guesses", BLUE))
    axes = (Axis(title, low=0.0, high=1.005, value_format="share") for title in ("false alarms", "detections"))
    title = f"{row.algorithm}, ε = {format_number(row.claim)}: {row.record}, from {row.view}"
    return Figure(f"roc-{k}", title, marks, (PlotView("", *axes),), height=400)


def compute_roc_band(
    false_alarms: FloatArray, detections: FloatArray, runs: int
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Compute the band that contains a whole ROC with 95 % confidence.

    By the inequality of Dvoretzky, Kiefer and Wolfowitz with Massart's constant, each of both rates is within
    `sqrt(log(2 / 0.025) / (2 runs))` of its expectation at all thresholds, with probability 0.975.

    Args:
        false_alarms, detections: `(points,)` rates, ascending.
        runs: number of runs of each world.

    Returns:
        `(101,)` rates of false alarms, lower edge and upper edge of the band.
    """
    width = math.sqrt(math.log(2.0 / 0.025) / (2.0 * runs))
    across = np.linspace(0.0, 1.0, 101)

    def interpolate(rates: FloatArray) -> FloatArray:
        """Return the largest rate of detections with at most these false alarms."""
        below = np.searchsorted(false_alarms, rates, side="right") - 1
        return np.where(below < 0, 0.0, detections[np.maximum(below, 0)])

    low = np.clip(interpolate(across - width) - width, 0.0, 1.0)
    high = np.clip(np.where(across + width >= 1.0, 1.0, interpolate(across + width)) + width, 0.0, 1.0)
    return across, low, high


# ---- gallery ---------------------------------------------------------------------------------------------------------


def write_simulated_gallery(folder: Path, epsilons: Sequence[float] | None, runs: int, seed: int) -> int:
    """Run every attack on simulated runs, print figures, write `gallery.json` and `gallery.html`; return the exit code.

    Args:
        folder: folder of the results.
        epsilons, runs, seed: as in `simulate_gallery`; default of epsilons: `DEFAULT_EPSILONS`.

    Raises:
        SpecError: scikit-learn, scipy or Jinja2 are not installed.
    """
    console = terminal.create_console()
    return _publish(simulate_gallery(epsilons or DEFAULT_EPSILONS, runs, seed, console.status), folder, console)


def write_spec_gallery(
    prepared: PreparedRun, folder: Path, epsilons: Sequence[float] | None, factors: Sequence[float], seed: int
) -> int:
    """Attack the messages of a simulated run of a spec; print and write as `write_simulated_gallery`; return the exit code.

    Args:
        prepared, epsilons, factors, seed: as in `attack_spec`.
        folder: folder of the results.

    Raises:
        SpecError: as `attack_spec`, or an optional dependency of the attack is not installed.
    """
    console = terminal.create_console()
    return _publish(attack_spec(prepared, epsilons, factors, seed, console.status), folder, console)


def write_capture_gallery(
    capture: Path,
    folder: Path,
    seed: int,
    folders: Sequence[Path],
    console: Console | None = None,
    *,
    allow_imports: bool = False,
) -> int:
    """Run the attack that fits a capture on its messages; return the exit code.

    Args:
        capture: folder of the capture.
        folder: folder of the results.
        seed: seed of searches.
        folders: folders in which named data sets are searched, for the original records.
        console: where to print (default: standard output).
        allow_imports: import code that the capture's spec names.

    Raises:
        CaptureError: The capture cannot be read, or has no spec.
        SpecError: No attack fits its algorithm, or an optional dependency of the attack is not installed.
        DataError: The spec's data cannot be used.
    """
    console, captures = console or terminal.create_console(), list(find_captures(open_folder(str(capture))))
    if not captures:
        raise CaptureError(f"{capture} must be a capture, or a folder with one, and has no capture.json")
    found = captures[-1]
    if not found.metadata.get("spec"):
        raise CaptureError(f"the capture {capture} must have a run spec to be attacked, and has none")
    spec = parse_spec(found.metadata["spec"], source=str(capture), allow_imports=allow_imports)
    prepared = prepare(spec, folders=folders)
    run = prepared.run
    transcript = found.read_transcript(run.field_shapes, run.spec.n_learners, run.network)
    epsilon = max(run.guarantee(i).epsilon() for i in range(run.spec.n_learners))
    label = f"claimed ε = {format_number(epsilon)}" if math.isfinite(epsilon) else "no claim"
    with console.status("attacking"):
        result = reconstruct_records(run, prepared.data, transcript, seed=seed)
    name = found.folder.name.rpartition("/")[2]
    source = f"{run.spec.algorithm.name}, {run.spec.data.source}, {transcript.rounds:,} rounds captured in {name}"
    return _publish(Gallery({"capture": {label: result}}, source=source), folder, console)


# ---- output ----------------------------------------------------------------------------------------------------------


def _publish(gallery: Gallery, folder: Path, console: Console) -> int:
    opener = open_private if gallery.source else None  # the results hold the learners' records
    write_json(folder / "gallery.json", _build_document(gallery), opener=opener)
    _print(gallery, console)
    page = folder / "gallery.html"
    code = terminal.attempt(str(page), lambda: _build_gallery_page(gallery).write(page, opener=opener))
    console.out(f"{folder}: gallery.json{'' if code else ', gallery.html'}", highlight=False)
    return code


def _build_document(gallery: Gallery) -> dict[str, Any]:
    """Build `gallery.json`."""
    return {
        "source": gallery.source or "simulated on scikit-learn's digits",
        # By attack; empty: an optional dependency is not installed.
        "attacks": {
            name: [_build_attack_document(label, each) for label, each in results.items()]
            for name, results in gallery.attacks.items()
        },
        "membership": [
            {
                "algorithm": each.algorithm,  # and the source of its decisions
                "record": each.record,
                "seen": each.view,  # what the guesses are based on
                "claim": each.claim,  # epsilon of all learners together
                "is_covered_by_claim": each.is_covered,  # whether the claim is about all of the view
                "runs": each.guesses.runs,
                "correct": each.guesses.correct,
                "interval": (each.guesses.low, each.guesses.high),  # 95 % interval of the share of right guesses
                "epsilon_lower_bound": each.guesses.bound,
            }
            for each in gallery.memberships
        ],
    }


def _build_attack_document(protection: str, result: Reconstruction) -> dict[str, Any]:
    """Build the results of an attack on one transcript."""
    return {
        "protection": protection,
        "records": len(result.pictures),  # rebuilt
        "mean_squared_error": result.mean_squared_error,  # per feature, in the feature range, which is [0, 1]
        "reference_errors": {  # the same error of guesses that need no message
            name.replace(" ", "_"): guess.mean_squared_error for name, guess in result.references.items()
        },
        "label_found": result.label_share,  # share of records; null: labels are numbers
        "similarity": result.similarity,  # 1 if equal, about 0 if unrelated
        "recognised": result.recognised_share,  # share of pictures that are nearest to their own record
        "recognised_among": result.pool_size,  # number of records
        "pairwise_accuracy": result.identified_share,  # null: messages do not show where a gradient was taken
        "originals": np.round(result.originals[:MAX_PICTURES_PER_ROW], 4),  # the first true records, as pictures
        "pictures": np.round(result.pictures[:MAX_PICTURES_PER_ROW], 4),  # the rebuilt ones
    }


def _print(gallery: Gallery, console: Console) -> None:
    table = terminal.create_table("attack", "protection")
    for head in ("mean sq.\nerror", "label\nfound", "similarity", "recog-\nnised", "pairwise\naccuracy"):
        table.add_column(head, justify="right")
    for name, results in gallery.attacks.items():
        title = _TITLES[name]
        for label, _, figures, _ in list(_build_rows(results))[1:]:
            error, similarity, recognised, identified, found = figures
            table.add_row(title, label, error, found, similarity, recognised, identified)
            title = ""
        if not results:
            table.add_row(title, Text("needs PyTorch", style="yellow"), *[MISSING_VALUE] * 5)
        table.add_section()
    console.print(table)
    if gallery.source:
        console.print(_compare_with_guesses(next(iter(next(iter(gallery.attacks.values())).values()))))
    if not all(gallery.attacks.values()):
        console.print(Text(f"The attack on a network needs PyTorch: {_GET_TORCH}"))
    if gallery.memberships:
        console.print(_create_guesses_table(gallery.memberships))


def _create_guesses_table(rows: Sequence[MembershipInference]) -> Table:
    table = terminal.create_table("membership", "records", "view")
    for head in ("right guesses", "ε at\nleast", "ε\nclaimed"):
        table.add_column(head, justify="right")
    for each in rows:
        claim = format_number(each.claim) if each.is_covered else "none"
        table.add_row(
            each.algorithm,
            each.record,
            each.view,
            format_percent(each.guesses.rate),
            format_number(each.guesses.bound, 3),
            claim,
        )
    return table
