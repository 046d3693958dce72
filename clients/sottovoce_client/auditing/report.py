"""The audit's page: what was asked, what was looked at, what was found, and what that does not show."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from pathlib import Path

import numpy as np

from sottovoce.audit.audit import Audit
from sottovoce.audit.bounds import ceiling
from sottovoce.audit.likelihood import Guessed, Ratios
from sottovoce.audit.rounds import RoundBounds
from sottovoce.privacy.guarantee import ThreatModel
from sottovoce.spec import dump_spec
from sottovoce_client.auditing import pictures as pictures
from sottovoce_client.auditing import plots as plots
from sottovoce_client.auditing import text as words
from sottovoce_client.auditing.head import banner, cards, families, no_noise
from sottovoce_client.reports.drawing import thinned
from sottovoce_client.reports.page import page, section, table
from sottovoce_client.reports.text import OUTSIDE, THREATS, UNPROTECTED
from sottovoce_client.wording import NOTHING, count, number, plural

MOST_ROUNDS = 1000
"""Rows of the table of single rounds."""

STYLE = """
.verdict ul { margin: 8px 0 0; padding-left: 20px; overflow-wrap: anywhere; }
.families { display: grid; grid-template-columns: repeat(3, minmax(0, 1fr)); gap: 14px; margin-top: 14px; }
.family { border: 1px solid var(--line); border-radius: 8px; padding: 13px 16px; }
.family h3 { margin: 0 0 2px; font-size: 15px; }
.family h3::before { content: ""; display: inline-block; width: 11px; height: 11px; border-radius: 50%; margin-right: 8px; }
.family.consistent h3::before { background: var(--good); }
.family.refuted h3::before { background: var(--bad); }
.family.inconclusive h3::before { background: #e69f00; }
.family.unpromised h3::before, .family.idle h3::before { background: var(--faint); }
.family p { color: var(--soft); font-size: 13px; margin: 0 0 8px; }
.family .says { color: var(--ink); font-weight: 600; }
.family dl { grid-template-columns: minmax(0, 1fr) auto; gap: 3px 12px; font-size: 13px; margin: 0; }
.family dt { color: var(--soft); font-weight: 400; margin: 0; }
.family dd { text-align: right; font-variant-numeric: tabular-nums; }
.halves > div > section { height: calc(100% - 18px); }
main table.tests :is(td, thead th):nth-child(-n+3) { text-align: left; }
table.tests td { white-space: normal; min-width: 68px; }
table.tests td:nth-child(2) { min-width: 230px; }
table.tests thead tr:first-child th { padding-bottom: 6px; }
tr.over > * { color: var(--bad); }
.wide + .note { margin-top: 12px; }
.section-end { margin: 14px 0 0; }
pre.command { margin-bottom: 16px; white-space: pre-wrap; overflow-wrap: anywhere; }
ul.limits { margin: 6px 0 16px; padding-left: 20px; max-width: 92ch; }
@media (max-width: 860px) { .families { grid-template-columns: minmax(0, 1fr); } .halves > div > section { height: auto; } }
"""


def write_audit_report(done: Audit, name: str, path: Path, seed: int) -> None:
    """Write the page.

    Args:
        done: the audit.
        name: of the learner.
        path: of the page.
        seed: of the audit.

    Raises:
        SpecError: plotly is not installed.
    """
    path.write_text(render_audit(done, name, seed), encoding="utf-8")


def render_audit(done: Audit, name: str, seed: int) -> str:
    """The page as text of a self-contained HTML page.

    Raises:
        SpecError: plotly is not installed.
    """
    spec = done.plan.run.spec
    facts = (
        f"learner {name}",
        done.plan.run.algorithm.name,
        plural(spec.rounds, "round"),
        f"{plural(done.found.runs, 'run')} of {'each' if done.found.paired else 'one'} world",
        f"from {done.source}",
        f"{100 * (1 - done.found.alpha):.6g} % confidence",
        f"seed {seed}",
    )
    parts = [banner(done), cards(done), families(done), *_exact(done), _noise(done), _swap(done)]
    parts += [_learners(done), _tests(done), _limits(done, name, seed)]
    footer = f"<footer>Written by Sottovoce {html.escape(version('sottovoce'))}. {OUTSIDE}</footer>"
    return page("audit", spec.name, facts, [*parts, footer], STYLE)


def _note(text: str) -> str:
    return f'<p class="note">{html.escape(text)}</p>' if text else ""


def _halves(left: str, right: str) -> str:
    """Side by side, where there are two."""
    if not (left and right):
        return left or right
    return f'<div class="halves"><div>{left}</div><div>{right}</div></div>'


# ---- exact losses ----------------------------------------------------------------------------------------------------


def _exact(done: Audit) -> list[str]:
    """What needs the exact loss of every run; one sentence where it is not known."""
    shown, guessed = done.shown, done.found.guessed
    if shown is None:
        why = words.UNHEARD[done.plan.listener.threat.value]
        return [section("Exact losses", f"There is nothing to draw here: {why}. The black box is what is left.")]
    if guessed is None:
        return [_by_round(done, shown)]
    histogram, guessing = _histogram(done, shown), _guessing(done, shown, guessed)
    side_by_side = shown.total[plots.possible(shown)].any()
    pair = _halves(histogram, guessing) if side_by_side else histogram + guessing
    return [pair, _by_round(done, shown), _progress(done, shown, guessed)]


def _histogram(done: Audit, shown: Ratios) -> str:
    paper = float(done.plan.guarantee.paper[-1])
    known = plots.possible(shown)
    plot = plots.loss_plot(shown, done.found.claim, paper)
    said = [f"Of {plural(len(known), 'run')}, {count(int((done.worlds == 0).sum()))} live in the first world."]
    impossible = int((~known).sum())
    if impossible:
        said.append(
            f"{plural(impossible, 'run')} cannot be drawn: a message could not have been said in one of the worlds, or in "
            "either, so the loss is infinite."
        )
    if not plot and impossible < len(known):
        said.append(f"The loss of {'every other' if impossible else 'every'} run is zero: it tells nothing.")
    if math.isinf(done.found.claim):
        said.append("The claim is infinite, so no loss is too large for it.")
    return section(
        "How much every run gives away", words.LOSSES if plot else words.NO_LOSSES, plot, _note(" ".join(said))
    )


def _guessing(done: Audit, shown: Ratios, guessed: Guessed) -> str:
    plot = plots.roc_plot(shown, done.found.claim, guessed.bound)
    said = []
    if guessed.bound > 0:
        said.append(
            f"To be guessed this often, ε must be at least {number(guessed.bound, 3)}: the dashed line is what that would allow."
        )
    if 8 < done.found.claim < math.inf:
        said.append(
            f"A claim of {number(done.found.claim)} allows nearly any guess to be right: the grey area is nearly everything."
        )
    if math.isinf(done.found.claim):
        said.append("The claim is infinite, so there is no grey area: everything is allowed.")
    return section("How well the worlds can be told apart", words.ROC, plot, _note(" ".join(said)))


def _by_round(done: Audit, shown: Ratios) -> str:
    rounds = done.found.rounds
    left = plots.cumulative_plot(shown, done.plan.claim)
    right = plots.single_plot(rounds) if rounds is not None else ""
    titled = [
        f"<h3>{title}</h3>{plot}" if plot else ""
        for title, plot in (("All rounds so far", left), ("Every message on its own", right))
    ]
    drawn = _halves(*titled)
    said = []
    endless = np.flatnonzero(np.isinf(shown.peak))
    if len(endless):
        said.append(f"From round {int(endless[0])} on the loss of some run is infinite, which no line can show.")
    if rounds is None:
        said.append("Single rounds were not drawn anew: these runs were not simulated.")
    else:
        claimed = (
            f"{number(done.found.claim)} is claimed" if math.isfinite(done.found.claim) else "nothing finite is claimed"
        )
        said.append(f"Added up, single messages show that ε is at least {number(rounds.composed, 3)}; {claimed}.")
    if not (left or right or len(endless)):
        said.append("Nothing was claimed, and no run gives anything away that could be drawn.")
    return section("Round by round", words.ROUNDS, drawn, _note(" ".join(said)))


def _progress(done: Audit, shown: Ratios, guessed: Guessed) -> str:
    found = done.found
    if not guessed.guesses:
        return section("What more runs add", "No run was telling enough to be guessed, so there is no bound to follow.")
    plot = plots.progress_plot(shown, guessed, found.claim, found.alpha / 9)
    beyond = found.claim > plots.SHOWN_CLAIM * ceiling(found.runs, found.alpha / 9)
    claim = f"The claim, {number(found.claim)}, lies above the picture." if beyond else ""
    said = (
        f"{guessed.correct:,} of {guessed.guesses:,} guesses were right; runs that tell too little were left out, by a "
    )
    said += "threshold that was fixed beforehand. "
    return section("What more runs add", words.PROGRESS, plot, _note(said + claim))


# ---- noise, swap, learners -------------------------------------------------------------------------------------------


def _noise(done: Audit) -> str:
    title = "The noise in the messages"
    if not len(done.noise):
        return section(title, words.NO_NOISE.format(why=no_noise(done)))
    said = f"{plural(len(done.noise), 'number')} of learner {done.plan.run.spec.names[done.plan.worlds.learner]}."
    if not done.noise.any():
        return section(
            title, f"There should be Laplace noise, and there is none: {said.removesuffix('.')}, all of them zero."
        )
    plot = _halves(pictures.noise_plot(done.noise), pictures.quantile_plot(done.noise))
    return section(title, words.NOISE, plot, _note(said))


def _swap(done: Audit) -> str:
    pair = done.twins
    lead = words.TWINS.format(field=f"field {pair.field}", coordinate=pair.coordinate, swapped=pair.swapped)
    rounds = len(pair.first)
    whole = pictures.twins_plot("plot-twins", pair, thinned(rounds))
    near = pictures.close_rounds(pair)
    close = pictures.twins_plot("plot-twins-close", pair, near) if len(near) < rounds else ""
    drawn = _halves(f"<h3>The whole run</h3>{whole}", f"<h3>Around the swap</h3>{close}" if close else "")
    place = pictures.most_different(done)
    lower = [_said(done, *place) if place else "", _moved(done)]
    return section("What the swap does", lead, drawn, _halves(*lower))


def _said(done: Audit, position: int, coordinate: int) -> str:
    t = int(done.plan.listener.rounds[position])
    what = "decision published in" if done.plan.listener.threat is ThreatModel.OUTPUT else "message of"
    plot = pictures.said_plot(done, position, coordinate)
    note = (
        f"Number {coordinate} of the {what} round {t}, in all runs of either world. It was picked for differing most, so "
        "some of the difference, or all of it, may be chance."
    )
    return f"<h3>With fresh noise in every run</h3>{plot}{_note(note)}"


def _moved(done: Audit) -> str:
    """The first messages that the swap moves, against their noise."""
    pair = done.twins
    moved = pictures.moving(pair)
    if not len(moved):
        return _note("No message differs between the two worlds: nothing that was said depends on the record.")
    rows = []
    for t in moved[:3].tolist():
        difference, scale = abs(float(pair.first[t] - pair.second[t])), float(pair.scale[t])
        ratio = number(difference / scale, 3) if scale > 0 else "no noise"
        bare = abs(float(pair.bare_first[t] - pair.bare_second[t]))
        rows.append((f"round {t}", number(difference, 3), number(bare, 3), number(scale, 3), ratio))
    heads = ("message", "difference, same noise", "without noise", "noise scale", "difference / scale")
    note = "What one record moves, against the noise that must hide it."
    return f"<h3>The first messages that differ</h3>{table(heads, rows)}{_note(note)}"


def _learners(done: Audit) -> str:
    if not done.learners:
        return ""
    names = done.plan.run.spec.names
    plot = pictures.learners_plot(done.learners, names, done.plan.worlds.learner)
    endless = [names[each.learner] for each in done.learners if math.isinf(each.claim)]
    text = f"Nothing finite is promised for messages of {', '.join(endless)}." if endless else ""
    return section("Learner by learner", words.LEARNERS, plot, _note(text))


# ---- everything that was tried ---------------------------------------------------------------------------------------


def _tests(done: Audit) -> str:
    found = done.found
    tests = [
        (
            t.name,
            t.what,
            t.where or NOTHING,
            number(t.statistic),
            number(t.p_value, 2),
            number(level, 2),
            t.p_value < level,
        )
        for t, level in found.tests
    ]
    guessers = [
        (name, f"{right:,} of {guesses:,}", number(bound, 3), number(claim), number(level, 2), bound > claim)
        for name, right, guesses, bound, claim, level in found.bounds
    ]
    heads = ("test", "what is tested", "where it was largest", "statistic", "p-value", "rejects below")
    heads_of_guessers = ("who guesses", "right guesses", "ε at least", "claimed ε", "may be wrong with")
    return section(
        "All comparisons",
        words.TESTS.format(alpha=number(found.alpha, 3), third=number(found.alpha / 3, 3)),
        f"<h3>Tests</h3>{_marked(heads, tests, 'tests')}" if tests else "",
        f"<h3>Guesses</h3>{_marked(heads_of_guessers, guessers)}{_note(_views(done))}" if guessers else "",
        _single(found.rounds, found.alpha / 9) if found.rounds is not None else "",
    )


def _views(done: Audit) -> str:
    """What classifiers were offered: of each view, how much differs between runs at all."""
    offered = ", ".join(f"{html.escape(name)} ({count(varying)})" for name, varying in done.views.items())
    return (
        f"The classifiers could choose between these views (in brackets: numbers that differ between runs): {offered}."
    )


MARKED = ' class="over"'


def _marked(heads: Sequence[str], rows: Iterable[tuple[object, ...]], kind: str = "") -> str:
    """A table of plain texts; the last thing of a row: whether the claim fails there."""
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in heads)
    body = "\n".join(
        f"<tr{MARKED if over else ''}><th>{html.escape(str(first))}</th>"
        f"{''.join(f'<td>{html.escape(str(cell))}</td>' for cell in rest)}</tr>"
        for first, *rest, over in rows
    )
    named = f' class="{kind}"' if kind else ""
    return f'<div class="wide"><table{named}><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _single(rounds: RoundBounds, alpha: float) -> str:
    """Guesses of every round."""
    most = np.argsort(-rounds.bound, kind="stable")[:MOST_ROUNDS]
    rows = [
        (
            f"round {t}",
            f"{rounds.correct[t]:,} of {rounds.guesses[t]:,}",
            number(float(rounds.bound[t]), 3),
            number(float(rounds.claim[t])),
            number(float(rounds.largest[t])),
            rounds.bound[t] > rounds.claim[t],
        )
        for t in sorted(most.tolist())
    ]
    length = len(rounds.claim)
    which = f"the {MOST_ROUNDS:,} of {length:,} that show most" if length > MOST_ROUNDS else plural(length, "round")
    title = f"Guesses of single rounds ({which}; each may be wrong with {number(alpha / length, 2)})"
    heads = ("message", "right guesses", "ε at least", "claimed ε", "largest loss")
    return f'<details class="section-end"><summary>{title}</summary>{_marked(heads, rows)}</details>'


# ---- limits ----------------------------------------------------------------------------------------------------------


def _limits(done: Audit, name: str, seed: int) -> str:
    plan = done.plan
    limits = words.LIMITS if done.source == "the simulator" else words.OVERHEARD_LIMITS
    items = "".join(f"<li>{html.escape(each)}</li>" for each in limits)
    _, text = UNPROTECTED if math.isinf(plan.epsilon) else THREATS[plan.made_for.value]
    terms = [
        ("The worlds", html.escape(f"{plan.worlds.what[:1].upper()}{plan.worlds.what[1:]}.")),
        (
            "Adjacent",
            html.escape(
                f"{plan.guarantee.adjacency}. Accounting {plan.guarantee.grounds.mode}; proof: {plan.guarantee.grounds.proof}."
            ),
        ),
        ("Who listened", html.escape(f"{words.LISTENERS[plan.listener.threat.value].capitalize()}{_where(done)}.")),
        ("Claimed", text.format(epsilon=number(plan.epsilon))),
    ]
    pairs = "".join(f"<dt>{term}</dt><dd>{text}</dd>" for term, text in terms)
    spec = (
        f"<details><summary>The spec</summary><pre><code>{html.escape(dump_spec(plan.run.spec))}</code></pre></details>"
    )
    return section("What this does not show", "", f'<ul class="limits">{items}</ul><dl>{pairs}</dl>') + section(
        "How to repeat it", "", _repeat(done, name, seed), spec
    )


def _where(done: Audit) -> str:
    neighbour = done.plan.listener.neighbour
    return "" if neighbour is None else f": {done.plan.run.spec.names[neighbour]}"


def _repeat(done: Audit, name: str, seed: int) -> str:
    plan = done.plan
    if done.source != "the simulator":
        return f"<p>{html.escape(words.ELSEWHERE.format(source=done.source))}</p>"
    file = f"{plan.run.spec.name}.yaml"
    options = [f"--learner {name}", f"--runs {plan.runs}", f"--threat {plan.listener.threat.value}"]
    if plan.listener.neighbour is not None:
        options.append(f"--neighbour {plan.run.spec.names[plan.listener.neighbour]}")
    options += [f"--confidence {1 - plan.alpha:.6g}", f"--seed {seed}"]
    command = html.escape(f"sottovoce audit {file} {' '.join(options)}")
    chosen = f" {words.CHOSEN}" if plan.worlds.what.startswith("record ") else ""
    return f'<p>{html.escape(words.REPEAT.format(file=file) + chosen)}</p><pre class="command"><code>{command}</code></pre>'
