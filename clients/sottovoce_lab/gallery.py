"""`sottovoce lab gallery`: what an eavesdropper can make of the wire, as pictures on a page, as tables and as JSON."""

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
    FAINT,
    PALETTE,
    RULE,
    Axis,
    PlotView,
    make_line,
    make_reference_line,
    select_evenly,
)
from sottovoce_core.algorithms.dual_averaging.algorithm import DualAveraging
from sottovoce_core.arrays import FloatArray
from sottovoce_core.errors import CaptureError, SpecError
from sottovoce_core.experiment import prepare
from sottovoce_core.optional import format_install_hint
from sottovoce_core.spec import parse_spec
from sottovoce_eavesdropper.capture_reader import find_captures
from sottovoce_eavesdropper.storage import open_folder
from sottovoce_lab.reconstruction import Reconstruction, reconstruct_records
from sottovoce_lab.simulated_attacks import AttackResults, Gallery, MembershipInference, simulate_gallery

# ---- exhibits --------------------------------------------------------------------------------------------------------

MAX_PICTURES_PER_ROW = 8
"""Pictures in a row."""
_MIN_ERROR = 1e-9
"""A mean squared error below it is rounding."""
_GET_TORCH = format_install_hint("torch")
_TITLES = {
    "linear": "Read off a gradient",
    "network": "Searched for in a network’s gradient",
    "gossip": "Overheard in gossip",
    "capture": "Rebuilt from a capture",
}
"""Of attacks."""


class _Image(NamedTuple):
    """A picture, its size in pixels of the page, and what it is of."""

    data: str
    width: int
    height: int
    label: str


def _gallery_page(shown: Gallery) -> Page:
    """All attacks, and all guesses."""
    first = [next(iter(made.values())) for made in shown.attacks.values() if made]
    values = {
        "source": shown.source,
        "attacked": [(name, list(_rows(made)), _faded_at(made)) for name, made in shown.attacks.items()],
        "titles": _TITLES,
        "total": sum(len(each.pictures) for each in first),
        "right": round(sum(each.recognised_share * len(each.pictures) for each in first)),
        "get_torch": _GET_TORCH,
        "runs": shown.memberships[0].guesses.runs if shown.memberships else 0,
    }
    return Page("gallery.html.j2", [_guesses(shown.memberships), _roc(shown.memberships)], values)


# ---- pictures --------------------------------------------------------------------------------------------------------


def _faded_at(attacked: AttackResults) -> tuple[str, Reconstruction] | None:
    """The first transcript after the plain one whose pictures are gone."""
    return next(((label, made) for label, made in list(attacked.items())[1:] if made.recognised_share < 0.05), None)


def _rows(attacked: AttackResults) -> Iterator[tuple[str, list[_Image], Sequence[str], Reconstruction]]:
    """The true records, and what was made of them in each transcript: a label, pictures, figures."""
    for k, (label, made) in enumerate(attacked.items()):
        if k == 0:
            yield "the true records", _images(made.originals, "the true records"), ("",) * 4, made
        error = format_number(made.mean_squared_error, 2) if made.mean_squared_error >= _MIN_ERROR else "< 1e−9"
        figures = (
            error,
            format_number(made.similarity, 2),
            format_percent(made.recognised_share),
            format_percent(made.identified_share),
        )
        yield label, _images(made.pictures, label), figures, made


def _images(pictures: FloatArray, label: str) -> list[_Image]:
    """Square where the number of features is a square, else one line."""
    side = math.isqrt(pictures.shape[1])
    square = side * side == pictures.shape[1]
    shape, size = ((side, side), (56, 56)) if square else ((1, pictures.shape[1]), (72, 28))
    return [
        _Image(base64.b64encode(_png(each.reshape(shape))).decode(), *size, label)
        for each in pictures[:MAX_PICTURES_PER_ROW]
    ]


def _png(values: FloatArray) -> bytes:
    """A grey PNG of values in [0, 1] (1 is black), or in [-1, 1] where some are negative; one pixel a value."""
    ink = (values + 1.0) / 2.0 if (values < 0).any() else values
    grey = np.rint(255.0 * (1.0 - np.clip(ink, 0.0, 1.0))).astype(np.uint8)
    lines = b"".join(b"\0" + line.tobytes() for line in grey)
    header = struct.pack(">IIBBBBB", grey.shape[1], grey.shape[0], 8, 0, 0, 0, 0)
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(lines)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, data) for kind, data in parts)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


# ---- membership ------------------------------------------------------------------------------------------------------


def _guesses(rows: Sequence[MembershipInference]) -> PageTable:
    texts = ("algorithm, decisions", "records", "seen")
    columns = [PageColumn(head, kind="text") for head in texts]
    columns += [PageColumn(head) for head in ("right guesses", "95 % interval", "ε at least", "ε claimed", "allows")]
    cells = [
        (
            each.algorithm,
            each.record,
            each.view,
            format_percent(each.guesses.rate),
            f"{format_percent(each.guesses.low).removesuffix(' %')}{MISSING_VALUE}{format_percent(each.guesses.high)}",
            format_number(each.guesses.bound, 3),
            format_number(each.claim) if each.is_covered else "none",
            format_percent(1.0 / (1.0 + math.exp(-each.claim))) if each.is_covered else "100.0 %",
        )
        for each in rows
    ]
    return PageTable("guesses", "Was this record learned?", columns, cells)


def _roc(rows: Sequence[MembershipInference]) -> Figure:
    """Every row's ROC, and the regions that the claims leave."""
    title = "Guesses of membership"
    marks = [make_reference_line([0, 1], [0, 1], "a coin", RULE, "solid")]
    claims = sorted({round(each.claim, 6) for each in rows if each.is_covered})
    for claim, dash in zip(claims, ("dot", "dash", "dashdot"), strict=False):
        corner, most = 1.0 / (1.0 + math.exp(claim)), f"most that ε = {format_number(claim)} allows"
        marks.append(make_reference_line([0, corner, 1], [0, 1 - corner, 1], most, FAINT, dash))
    for each, colour in zip(rows, PALETTE, strict=False):
        kept = select_evenly(len(each.guesses.false_alarms))
        name = f"{each.algorithm}, ε = {format_number(each.claim)}: {each.record}, from {each.view}"
        marks.append(make_line(each.guesses.false_alarms[kept], each.guesses.detections[kept], name, colour))
    axes = (Axis(what, low=0.0, high=1.005, value_format="share") for what in ("false alarms", "detections"))
    return Figure("roc", title, marks if rows else (), (PlotView("", *axes),), height=420)


# ---- gallery ---------------------------------------------------------------------------------------------------------


def write_simulated_gallery(folder: Path, epsilons: Sequence[float], runs: int, seed: int) -> int:
    """Run every attack on simulated runs, print figures, write `gallery.json` and `gallery.html`; returns the exit code.

    Args:
        folder: where to.
        epsilons, runs, seed: as of `simulate_gallery`.

    Raises:
        SpecError: scikit-learn, scipy or Jinja2 are not installed.
    """
    console = terminal.create_console()
    return _publish(simulate_gallery(epsilons, runs, seed, console.status), folder, console)


def write_capture_gallery(
    capture: Path,
    folder: Path,
    seed: int,
    folders: Sequence[Path],
    console: Console | None = None,
    *,
    allow_imports: bool = False,
) -> int:
    """The attack that fits a capture, on what was overheard on the wire; returns the exit code.

    Args:
        capture: its folder.
        folder: where to.
        seed: of searches.
        folders: where data sets that have a name are looked for: the originals.
        console: where to print (default: standard output).
        allow_imports: import code that the capture's spec names.

    Raises:
        CaptureError: it cannot be read, or has no spec.
        SpecError: no attack fits its algorithm, or what the attack needs is not installed.
        DataError: the spec's data cannot be used.
    """
    console, below = console or terminal.create_console(), list(find_captures(open_folder(str(capture))))
    if not below:
        raise CaptureError(f"{capture} must be a capture, or a folder with one: there is no capture.json")
    found = below[-1]
    if not found.metadata.get("spec"):
        raise CaptureError(f"the capture {capture} must have a run spec to be attacked, and has none")
    spec = parse_spec(found.metadata["spec"], source=str(capture), allow_imports=allow_imports)
    prepared = prepare(spec, folders=folders)
    run = prepared.run
    if isinstance(run.algorithm, DualAveraging):
        raise SpecError("membership is guessed over many runs, a capture is one; see sottovoce audit")
    heard = found.read_transcript(run.field_shapes, run.spec.n_learners, run.network)
    epsilon = max(run.guarantee(i).epsilon() for i in range(run.spec.n_learners))
    label = f"claimed ε = {format_number(epsilon)}" if math.isfinite(epsilon) else "nothing is promised"
    with console.status("attacking"):
        made = reconstruct_records(run, prepared.data, heard, seed=seed)
    where = found.folder.name.rpartition("/")[2]
    source = f"{run.spec.algorithm.name}, {run.spec.data.source}, {heard.rounds:,} rounds overheard in {where}"
    return _publish(Gallery({"capture": {label: made}}, source=source), folder, console)


# ---- showing ---------------------------------------------------------------------------------------------------------


def _publish(shown: Gallery, folder: Path, console: Console) -> int:
    opener = open_private if shown.source else None  # of a capture: they hold its learners' records
    write_json(folder / "gallery.json", _document(shown), opener=opener)
    _print(shown, console)
    page = folder / "gallery.html"
    code = terminal.attempt(str(page), lambda: _gallery_page(shown).write(page, opener=opener))
    console.out(f"{folder}: gallery.json{'' if code else ', gallery.html'}", highlight=False)
    return code


def _document(shown: Gallery) -> dict[str, Any]:
    """`gallery.json`."""
    return {
        "source": shown.source or "simulated on scikit-learn's digits",
        # By attack; empty: what it needs is not installed.
        "attacks": {
            name: [_document_of(label, each) for label, each in made.items()] for name, made in shown.attacks.items()
        },
        "membership": [
            {
                "algorithm": each.algorithm,  # and where its decisions come from
                "record": each.record,
                "seen": each.view,  # by the guesser
                "claim": each.claim,  # epsilon of all learners together
                "covered": each.is_covered,  # whether all that is seen is part of the claim
                "runs": each.guesses.runs,
                "correct": each.guesses.correct,
                "interval": (each.guesses.low, each.guesses.high),  # 95 %, of the share of right guesses
                "epsilon_at_least": each.guesses.bound,
            }
            for each in shown.memberships
        ],
    }


def _document_of(protection: str, made: Reconstruction) -> dict[str, Any]:
    """One transcript attacked."""
    return {
        "protection": protection,
        "records": len(made.pictures),  # rebuilt
        "mean_squared_error": made.mean_squared_error,
        "similarity": made.similarity,  # 1 if equal, about 0 if unrelated
        "recognised": made.recognised_share,  # the share that is nearest its own record
        "recognised_among": made.pool_size,  # so many records
        "told_from_one_other": made.identified_share,  # the share; null: messages do not tell where a gradient was taken
        "originals": np.round(made.originals[:MAX_PICTURES_PER_ROW], 4),  # the first true records, as pictures
        "pictures": np.round(made.pictures[:MAX_PICTURES_PER_ROW], 4),  # what was made of them
    }


def _print(shown: Gallery, console: Console) -> None:
    table = terminal.create_table("attack", "protection")
    for head in ("similarity", "recognised", "told from\nanother"):
        table.add_column(head, justify="right")
    for name, attacked in shown.attacks.items():
        for k, (label, made) in enumerate(attacked.items()):
            figures = (
                format_number(made.similarity, 2),
                format_percent(made.recognised_share),
                format_percent(made.identified_share),
            )
            table.add_row("" if k else _TITLES[name], label, *figures, end_section=k == len(attacked) - 1)
        if not attacked:
            table.add_row(_TITLES[name], Text("needs PyTorch", style="yellow"), *[MISSING_VALUE] * 3, end_section=True)
    console.print(table)
    if not all(shown.attacks.values()):
        console.print(Text(f"The search needs PyTorch: {_GET_TORCH}"))
    if shown.memberships:
        console.print(_guesses_table(shown.memberships))


def _guesses_table(rows: Sequence[MembershipInference]) -> Table:
    table = terminal.create_table("was it learned?", "records", "seen")
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
