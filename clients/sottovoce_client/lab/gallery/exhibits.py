"""The page of `sottovoce gallery`: pictures of what was rebuilt, and the ROC of guesses."""

from __future__ import annotations

import base64
import html
import math
import struct
import zlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from sottovoce.arrays import FloatArray
from sottovoce_client.lab.gallery.cases import Exhibit, Gallery, Membership, Strip
from sottovoce_client.reports.drawing import FAINT, PALETTE, Trace, axis, draw, finite, thinned
from sottovoce_client.reports.page import page, section, table
from sottovoce_client.wording import NOTHING, count, number, share

SHOWN = 8
"""Pictures in a row."""
LEAST_ERROR = 1e-9
"""A mean squared error below it is rounding."""
GET_TORCH = "pip install 'sottovoce[torch]'"


class Words(NamedTuple):
    """What is said of an attack: its title, what the eavesdropper sees, what it does, and what noise does to that."""

    title: str
    sees: str
    does: str
    noise: str


NOT_SAFE = (
    "That a picture is gone proves nothing: the last column asks only which of two records it was, and is right long after "
    "the eye has given up. What is promised is epsilon, not grey squares."
)
WORDS = {
    "linear": Words(
        "Read off a gradient",
        "Two messages of a learner, one after the other, and those of its neighbours in between. Each is a model (PD-OGD, a "
        "linear model of ten digits, one record a round).",
        "Undoing the mixing and the step leaves the gradient of the one record that came in between. For a linear model it is "
        "the record itself times a factor: no search is needed, and the label comes with it.",
        NOT_SAFE,
    ),
    "network": Words(
        "Searched for in a network’s gradient",
        "The same messages, of a small convolutional network with sigmoid activations (690 parameters, not yet trained).",
        "The gradient is no longer the record, so the eavesdropper moves a made-up record and label until their gradient fits "
        "the one it overheard (deep leakage from gradients; Zhu, Liu, Han 2019).",
        "The search fails before the closed form does, and fails on trained, deep or batched networks, too: that says something "
        "about this search, and nothing about privacy. " + NOT_SAFE,
    ),
    "gossip": Words(
        "Overheard in gossip",
        "The first gossip message of every block of PD-FTGL (linear model, blocks of one record).",
        "As published, this message is the sum of the block’s gradients, without noise: with one record in a block, the record. "
        "Noise enters only afterwards, inside the learners, so the epsilon of published decisions says nothing about the wire.",
        "The default here adds noise before anything is said; only then does epsilon hold on the wire.",
    ),
    "capture": Words(
        "Rebuilt from a capture",
        "What the eavesdropper recorded on the channels between learners.",
        "From the run’s spec and the messages, the eavesdropper computes the gradients that learners added, and rebuilds the "
        "records whose gradients they are.",
        "If these are not the records, this attack failed. That proves nothing about other attacks: see what is claimed. The "
        "first row shows true records: this page is as private as they are.",
    ),
}

STYLE = """
table.strips { width: auto; }
table.strips td.picture, table.strips th.picture { padding: 3px; }
table.strips img { display: block; image-rendering: pixelated; border-radius: 4px; }
table.strips tbody :is(th, td) { vertical-align: middle; }
table.strips tbody th { max-width: 150px; white-space: normal; font-size: 12.5px; padding-right: 14px; }
table.strips td.figure { padding-left: 20px; font-size: 13px; }
table.strips tbody tr:hover > * { background: none; }
table.strips tr.true + tr > * { border-top: 1.5px solid var(--line); }
p.noise { margin: 14px 0 0; }
"""


def render(shown: Gallery) -> str:
    """The page as text.

    Raises:
        SpecError: plotly is not installed.
    """
    facts = [shown.source] if shown.source else ["scikit-learn’s handwritten digits, 8 × 8 pixels", "simulated runs"]
    title = "What the wire gives away" if shown.memberships else "What this capture gives away"
    parts = [_exhibit(each) for each in shown.exhibits]
    if shown.memberships:
        parts.append(_memberships(shown.memberships))
    return page("attack gallery", title, facts, [_lead(shown), *parts], style=STYLE)


def _lead(shown: Gallery) -> str:
    """What is on the page, in a box."""
    strips = [each.strips[0].rebuilt for each in shown.exhibits if each.strips]
    total, right = sum(len(each.pictures) for each in strips), sum(each.found * len(each.pictures) for each in strips)
    if shown.memberships:
        head = f"Without noise on the wire: {count(round(right))} of {count(total)} records recovered and recognised."
    else:
        head = f"{count(round(right))} of {count(total)} records recognised in what was overheard."
    text = (
        "Learners never send a record, only models and sums of gradients. This page shows what somebody who listens makes of "
        "those. An attack that works shows what is lost; an attack that fails proves nothing."
    )
    kind = "refuted" if right else "open"
    return f'<div class="verdict {kind}" style="margin-bottom: 18px"><strong>{head}</strong><p>{text}</p></div>'


# ---- pictures --------------------------------------------------------------------------------------------------------


def _exhibit(each: Exhibit) -> str:
    words = WORDS[each.name]
    told = _paragraph("What is overheard", words.sees) + _paragraph("What is done with it", words.does)
    if not each.strips:
        how = f"This attack needs PyTorch, which is not installed: <code>{html.escape(GET_TORCH)}</code>, then again."
        return section(words.title, "", told, f'<p class="note">{how}</p>')
    noise = _paragraph("What noise does to it", f"{_fading(each.strips)} {words.noise}".strip(), kind="noise")
    return section(words.title, "", told, _strips(each.strips), noise)


def _paragraph(head: str, text: str, kind: str = "") -> str:
    return f'<p class="{kind}"><strong>{html.escape(head)}.</strong> {html.escape(text)}</p>'


def _fading(strips: Sequence[Strip]) -> str:
    """Where pictures are gone, and whether records can still be told from others there."""
    gone = [each for each in strips[1:] if each.rebuilt.found < 0.05]
    if not gone:
        return ""
    first = gone[0]
    text = f"At {first.label}, {share(first.rebuilt.found)} of the records are still recognised"
    if math.isnan(first.rebuilt.told):
        return f"{text}."
    return f"{text}; told from one other record: {share(first.rebuilt.told)} (a coin: 50 %)."


def _strips(strips: Sequence[Strip]) -> str:
    shown = strips[0].rebuilt
    heads = ("mean squared error", "similarity", f"recognised among {count(shown.pool)}", "told from one other")
    cells = "".join(f'<th class="figure">{head.replace(" ", "<br>", 1)}</th>' for head in heads)
    many = min(SHOWN, len(shown.originals))
    rows = [_row("the true records", shown.originals, "<td></td>" * 4, "true")]
    for each in strips:
        made = each.rebuilt
        error = number(made.error, 2) if made.error >= LEAST_ERROR else "< 1e−9"
        figures = error, number(made.alike, 2), share(made.found), share(made.told)
        rows.append(_row(each.label, made.pictures, "".join(f'<td class="figure">{text}</td>' for text in figures)))
    head = f'<thead><tr><th></th><th class="picture" colspan="{many}"></th>{cells}</tr></thead>'
    note = f"Figures: means over {count(len(shown.originals))} records. Similarity: 1 if equal, about 0 if unrelated."
    body = f'<table class="strips">{head}<tbody>{"".join(rows)}</tbody></table>'
    return f'<div class="wide">{body}</div><p class="note">{note}</p>'


def _row(label: str, pictures: FloatArray, figures: str, kind: str = "") -> str:
    shown = "".join(f'<td class="picture">{_image(each, label)}</td>' for each in pictures[:SHOWN])
    return f'<tr class="{kind}"><th>{html.escape(label)}</th>{shown}{figures}</tr>'


def _image(values: FloatArray, label: str) -> str:
    """Square where the number of features is a square, else one line."""
    side = math.isqrt(len(values))
    shape = (side, side) if side * side == len(values) else (1, len(values))
    height, width = (56, 56) if shape[0] > 1 else (28, 72)
    data = base64.b64encode(png(values.reshape(shape))).decode()
    size = f'width="{width}" height="{height}"'
    return f'<img src="data:image/png;base64,{data}" {size} alt="{html.escape(label)}">'


def png(values: FloatArray) -> bytes:
    """A grey PNG of values in [0, 1] (1 is black), or in [-1, 1] where some are negative; one pixel a value."""
    ink = (values + 1.0) / 2.0 if (values < 0).any() else values
    grey = np.rint(255.0 * (1.0 - np.clip(ink, 0.0, 1.0))).astype(np.uint8)
    lines = b"".join(b"\0" + line.tobytes() for line in grey)
    header = struct.pack(">IIBBBBB", grey.shape[1], grey.shape[0], 8, 0, 0, 0, 0)
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(lines, 9)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, data) for kind, data in parts)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


# ---- membership ------------------------------------------------------------------------------------------------------


def _memberships(rows: Sequence[Membership]) -> str:
    sees = (
        "All messages of DPSDA in a run (four learners, all of whom hold all records), or the decisions that they publish, or "
        "both. Everything is known but one record."
    )
    does = (
        "Was it this record, or that one (two digits; or the worst pair, a record that weighs equally in all features and its "
        "mirror image)? The eavesdropper weighs how likely each would have made what it saw, and guesses; "
        "each run has a record that a fair coin chose. “Noised” decisions are made from messages, “clean” ones, as in the paper, "
        "from numbers that were never perturbed."
    )
    noise = (
        "Right guesses stay within what the claim allows. Most lie far below it: the loss is spread thinly over 65 numbers, and "
        "no test can gather all of it. The claim is what holds against whoever does better. The exception is the last row: "
        "decisions from clean numbers give the record away, whatever the messages cost. The claim covers messages only."
    )
    heads = (
        "algorithm, decisions",
        "records",
        "seen",
        "right guesses",
        "95 % interval",
        "ε at least",
        "ε claimed",
        "allows",
    )
    cells = [
        (
            each.algorithm,
            each.record,
            each.seen,
            share(each.guessed.rate),
            f"{share(each.guessed.low).removesuffix(' %')}{NOTHING}{share(each.guessed.high)}",
            number(each.guessed.bound, 3),
            number(each.claim) if each.covered else "none",
            share(1.0 / (1.0 + math.exp(-each.claim))) if each.covered else "100.0 %",
        )
        for each in rows
    ]
    lead = _paragraph("What is overheard", sees) + _paragraph("What is done with it", does)
    runs = (
        f"{count(rows[0].guessed.runs)} runs a row. Allowed: the share of right guesses that ε leaves possible at most."
    )
    note = f'<p class="note">{html.escape(runs)}</p>'
    ending = _paragraph("What noise does to it", noise, kind="noise")
    return section("Was this record learned?", "", lead, table(heads, cells), note, _roc(rows), ending)


def _roc(rows: Sequence[Membership]) -> str:
    """Every row's ROC, and the regions that the claims leave."""
    traces: list[Trace] = [_line([0.0, 1.0], [0.0, 1.0], "a coin", "#b8c2cc", width=1.2)]
    claims = sorted({round(each.claim, 6) for each in rows if each.covered})
    for claim, dash in zip(claims, ("dot", "dash", "dashdot"), strict=False):
        corner = 1.0 / (1.0 + math.exp(claim))
        traces.append(
            _line([0, corner, 1], [0, 1 - corner, 1], f"most that ε = {number(claim)} allows", FAINT, dash=dash)
        )
    for each, colour in zip(rows, PALETTE, strict=False):
        kept = thinned(len(each.guessed.false_alarms))
        name = f"{each.algorithm}, ε = {number(each.claim)}: {each.record}, from {each.seen}"
        across, up = each.guessed.false_alarms[kept], each.guessed.detections[kept]
        traces.append(_line(finite(across), finite(up), name, colour, width=2.0))
    square = {"range": [0, 1.005], "tickformat": ".0%"}
    return draw(
        "plot-roc",
        traces,
        470,
        xaxis=axis("false alarms", **square),
        yaxis=axis("detections", **square),
        legend={"x": 1.02, "y": 1, "font": {"size": 11.5}},
    )


def _line(x: Sequence[float | None], y: Sequence[float | None], name: str, colour: str, **line: object) -> Trace:
    values = {"x": list(x), "y": list(y), "name": name, "hovertemplate": "%{x:.1%}, %{y:.1%}"}
    return {"type": "scatter", "mode": "lines", **values, "line": {"color": colour, **line}}
