"""The report: one HTML file with everything that it needs inside, to be opened, mailed and archived."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Iterable
from importlib.resources import files
from pathlib import Path

from sottovoce_client.reports import plots as plots
from sottovoce_client.reports import text as words
from sottovoce_client.reports.drawing import plotly
from sottovoce_client.reports.verdict import Verdict, exceeds, telling, verdict_of
from sottovoce_client.running.summary import CaptureSummary, LearnerSummary, Noticed, Promise, RunSummary, Swap
from sottovoce_client.wording import count, duration, noticed_line, number, plural, share, share_range, size

# Nothing may be loaded, from anywhere: a page about eavesdropping does not phone home.
POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"


MOST_NOTICED = 20


def write_report(summary: RunSummary, path: Path) -> None:
    """Write the report.

    Raises:
        SpecError: plotly is not installed.
    """
    path.write_text(render_report(summary), encoding="utf-8")


def render_report(summary: RunSummary) -> str:
    """The report as text of a self-contained HTML page.

    Raises:
        SpecError: plotly is not installed.
    """
    parts = (_graph_and_learning, _budget, _losses, _heard, _table, _promise, _warnings, _spec)
    body = [_header(summary), _banner(summary), _verdict(verdict_of(summary)), _cards(summary)]
    body += [part(summary) for part in parts]
    style = files("sottovoce_client.reports").joinpath("report.css").read_text(encoding="utf-8")
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
            f"<title>{_text(summary.name)}: Sottovoce report</title>\n<style>\n{style}</style>",
            f"<script>{plotly('offline').get_plotlyjs()}</script>\n</head>\n<body>\n<main>",
            *filter(None, body),
            f"<footer>Written by Sottovoce {_text(summary.version)}. {words.OUTSIDE}</footer>\n</main>\n</body>\n</html>\n",
        ]
    )


def _text(value: str) -> str:
    return html.escape(value)


def _section(title: str, lead: str, *content: str) -> str:
    lead = f'<p class="lead">{lead}</p>' if lead else ""
    return f"<section>\n<h2>{title}</h2>\n{lead}\n{''.join(content)}\n</section>"


def _note(text: str) -> str:
    return f'<p class="note">{text}</p>'


# ---- the head --------------------------------------------------------------------------------------------


def _header(summary: RunSummary) -> str:
    facts = (
        f"{plural(len(summary.learners), 'learner')} on {_text(summary.data)}",
        f"{plural(summary.n_features, 'feature')}",
        f"started {_text(summary.started_at)}",
        f"run <code>{_text(summary.run_id)}</code>",
    )
    spans = "".join(f"<span>{fact}</span>" for fact in facts)
    kicker = '<div class="kicker">Sottovoce · run report</div>'
    return f'<header>{kicker}<h1>{_text(summary.name)}</h1><div class="facts">{spans}</div></header>'


def _banner(summary: RunSummary) -> str:
    return _noticed(summary.noticed) + _unfinished(summary)


def _noticed(noticed: Noticed | None) -> str:
    """What must never happen and did: a line, and the list of it to open."""
    if noticed is None or not noticed.count:
        return ""
    line = _text(noticed_line(noticed.count, noticed.first))
    items = "".join(f"<li>{_text(text)}</li>" for text in noticed.first[:MOST_NOTICED])
    shown = f"<details><summary>The first {len(noticed.first[:MOST_NOTICED])}</summary><ul>{items}</ul></details>"
    return f'<div class="banner"><strong>{line}</strong>{shown if noticed.count > 1 else ""}</div>'


def _unfinished(summary: RunSummary) -> str:
    if summary.state == "finished":
        return ""
    reached = f"after {count(summary.rounds_done)} of {plural(summary.rounds, 'round')}"
    detail = f"<p>{_text(summary.detail)}</p>" if summary.detail else ""
    return f'<div class="banner"><strong>This run {_text(summary.state)} {reached}.</strong>{detail}</div>'


def _verdict(verdict: Verdict) -> str:
    return f'<div class="verdict {verdict.kind}"><strong>{_text(verdict.headline)}</strong><p>{_text(verdict.text)}</p></div>'


def _cards(summary: RunSummary) -> str:
    learners = summary.learners
    accuracy = share_range(each.test_accuracy for each in learners)
    central = f"worst to best learner; {share(summary.central_accuracy)} centralised without privacy"
    whose = (
        "all learners together, for they share their records" if summary.promise.shared else "largest of all learners"
    )
    paper = f"tight, per event, {whose}; {number(max(e.paper for e in learners))} by the paper’s formula"
    speed = f"{number(summary.rounds_per_second)} rounds/s, {duration(summary.seconds)} in all"
    cards = (
        _card("Rounds", f"{count(summary.rounds_done)} <small>of {count(summary.rounds)}</small>", speed),
        _card("Test accuracy", accuracy, central),
        _card("Privacy budget used", f"ε = {number(summary.event)}", paper),
        _overheard_card(summary.capture),
        _loss_card(summary),
    )
    return f'<div class="cards">{"".join(cards)}</div>'


def _card(what: str, figure: str, more: str, meter: str = "") -> str:
    inner = f'<div class="what">{what}</div><div class="figure">{figure}</div>{meter}<div class="more">{more}</div>'
    return f'<div class="card">{inner}</div>'


def _overheard_card(capture: CaptureSummary | None) -> str:
    if capture is None:
        return _card("Overheard messages", "–", "nobody listened in this run")
    return _card("Overheard messages", count(capture.messages), f"{size(capture.bytes)}, mode {_text(capture.mode)}")


def _loss_card(summary: RunSummary) -> str:
    what = "Exact privacy loss"
    worst = telling(summary)
    if worst is None:
        return _card(what, "–", "needs a capture")
    learner, level, swap = worst
    part = swap.loss / swap.budget if 0 < swap.budget < math.inf else 0.0
    over = " over" if exceeds(swap.loss, swap.budget) else ""
    meter = f'<div class="meter{over}"><i style="width:{min(100, 100 * part):.1f}%"></i></div>' if part else ""
    more = f"of this capture, against a claim of {number(swap.budget)} ({_text(learner.name)}, per {level})"
    return _card(what, number(swap.loss), more, meter)


# ---- plots -----------------------------------------------------------------------------------------------


def _graph_and_learning(summary: RunSummary) -> str:
    graph = words.GRAPH.format(
        learners=plural(len(summary.learners), "learner"),
        edges=plural(len(summary.edges), "edge"),
        records=plural(summary.test_records, "held-out record"),
    )
    if summary.disagreement is not None:
        graph += words.DISAGREE.format(share=share(summary.disagreement))
    predicted = any(value is not None for look in summary.progress for value in look.accuracy)
    curves = plots.learning_plot(summary) if predicted else _note(words.UNKNOWN)
    left = _section("Who spoke to whom", graph, plots.graph_plot(summary))
    return f'<div class="pair">{left}{_section("How they learned", words.LEARNED, curves)}</div>'


def _budget(summary: RunSummary) -> str:
    horizon = max(learner.infinite_horizon for learner in summary.learners)
    said = [words.FOREVER.format(bound=number(horizon)) if math.isfinite(horizon) else words.NOT_FOREVER]
    infinite = [name for kind, name, _ in plots.KINDS if any(math.isinf(getattr(e, kind)) for e in summary.learners)]
    if infinite:
        said.append(words.UNPROMISED.format(kinds="; ".join(infinite)))
    return _section("What it cost", words.COST, plots.budget_plot(summary), _note(" ".join(said)))


def _losses(summary: RunSummary) -> str:
    title = "What this capture gives away"
    levels = (("event", "One use of the record swapped"), ("record", "All uses of the record swapped"))
    shown = [
        f"<div><h3>{heading}</h3>{plots.loss_plot(summary, level)}</div>"
        for level, heading in levels
        if any((swap := plots.swap_of(each, level)) is not None and swap.by_round.size for each in summary.learners)
    ]
    if not shown:
        return _section(title, "", _note(words.NO_LOSSES))
    return _section(title, words.LOSSES, f'<div class="halves">{"".join(shown)}</div>')


def _heard(summary: RunSummary) -> str:
    capture = summary.capture
    if capture is None or not capture.heard.size:
        return ""
    noise = words.NOISE if max(capture.first_scale, capture.last_scale) > 0 else words.NO_NOISE
    lead = words.HEARD.format(
        name=_text(capture.messages_of),
        messages=plural(capture.heard.shape[0], "message"),
        numbers=plural(capture.heard.shape[1], "number"),
        noise=noise.format(first=number(capture.first_scale), last=number(capture.last_scale)),
    )
    picked = any(n > most for n, most in zip(capture.heard.shape, plots.MOST_HEARD, strict=True))
    where = words.WHERE.format(location=_text(capture.location))
    said = [words.CLIPPED, *([words.PICKED] if picked else []), where]
    return _section("What was overheard", lead, plots.heard_plot(capture.heard), _note(" ".join(said)))


# ---- words and figures -----------------------------------------------------------------------------------

Column = tuple[str, Callable[[LearnerSummary], str]]
GROUPS: tuple[tuple[str, tuple[Column, ...]], ...] = (
    ("records", (("held", lambda e: count(e.records)), ("most uses", lambda e: count(e.most_uses)))),
    ("accuracy", (("test", lambda e: share(e.test_accuracy)), ("own", lambda e: share(e.prequential_accuracy)))),
    (
        "said",
        (
            ("rounds", lambda e: count(e.rounds)),
            ("messages", lambda e: count(e.messages)),
            ("bytes", lambda e: size(e.bytes)),
        ),
    ),
    (
        "budget",
        (("spent", lambda e: number(e.spent)), ("limit", lambda e: "none" if e.budget is None else number(e.budget))),
    ),
    (
        "claimed ε",
        (
            ("paper", lambda e: number(e.paper)),
            ("event", lambda e: number(e.event)),
            ("record", lambda e: number(e.record)),
            ("forever", lambda e: number(e.infinite_horizon)),
        ),
    ),
)


def _table(summary: RunSummary) -> str:
    levels = ("event", "record")
    above = "".join(f'<th class="group" colspan="{len(columns)}">{title}</th>' for title, columns in GROUPS)
    above += "".join(f'<th class="group" colspan="3">loss, per {level}</th>' for level in levels)
    heads = [name for _, columns in GROUPS for name, _ in columns] + ["this", "largest", "claim"] * len(levels)
    below = "".join(f"<th>{name}</th>" for name in heads)
    rows = "".join(_row(learner) for learner in summary.learners)
    table = (
        f"<table><thead><tr><th></th>{above}</tr><tr><th>learner</th>{below}</tr></thead><tbody>{rows}</tbody></table>"
    )
    return _section("Learner by learner", words.TABLE, f'<div class="wide">{table}</div>')


def _row(learner: LearnerSummary) -> str:
    figures = "".join(f"<td>{show(learner)}</td>" for _, columns in GROUPS for _, show in columns)
    swaps = _swap_cells(learner.swap_event) + _swap_cells(learner.swap_record)
    name = _text(learner.name)
    return f'<tr><th title="{name}">{name}</th>{figures}{swaps}</tr>'


def _swap_cells(swap: Swap | None) -> str:
    if swap is None:
        return "<td>–</td>" * 3
    marked = [(value, exceeds(value, swap.budget)) for value in (swap.loss, swap.supremum)]
    cells = "".join(f'<td class="over">{number(v)}</td>' if over else f"<td>{number(v)}</td>" for v, over in marked)
    return f"{cells}<td>{number(swap.budget)}</td>"


def _promise(summary: RunSummary) -> str:
    uses = plural(max(learner.most_uses for learner in summary.learners), "round")
    promised = any(math.isfinite(learner.event) for learner in summary.learners)
    terms = [words.THREATS[summary.promise.threat_model] if promised else words.UNPROTECTED]
    epsilon = summary.promise.output
    if epsilon is None:
        epsilon = summary.event
    elif words.OUTPUT not in terms:
        terms.append(words.OUTPUT)
    facts = {"uses": uses, "epsilon": number(epsilon)}
    pairs = "".join(f"<dt>{term}</dt><dd>{text.format(**facts)}</dd>" for term, text in (*terms, *words.PROMISE))
    return _section("What was promised", "", f"<dl>{pairs}</dl>", _grounds(summary.promise))


def _grounds(promise: Promise) -> str:
    """What the promise rests on."""
    facts = {name: _text(getattr(promise, name)) for name in ("algorithm", "accounting", "adjacency", "proof")}
    rows = "".join(
        f'<tr><th>{_text(name)}</th><td>{number(value)}</td><td class="why">{_text(why)}</td></tr>'
        for name, value, why in promise.constants
    )
    table = f'<div class="wide"><table class="grounds"><tbody>{rows}</tbody></table></div>' if rows else ""
    rests = words.RESTS_ON if rows else ""
    return f"<p>{words.PROOF.format(**facts)}{rests}</p>{table}"


def _warnings(summary: RunSummary) -> str:
    if not summary.warnings:
        return ""
    return _section("Warnings", words.WARNINGS, f'<ul class="codes">{_codes(summary.warnings)}</ul>')


def _codes(warnings: Iterable[tuple[str, str]]) -> str:
    return "".join(f"<li><code>{_text(code)}</code> {_text(text)}</li>" for code, text in warnings)


def _spec(summary: RunSummary) -> str:
    spec = f"<details><summary>Show</summary><pre><code>{_text(summary.spec_yaml)}</code></pre></details>"
    return _section("Spec", words.SPEC, spec)
