"""The top of the audit's page: the verdict, the figures, and the three families side by side."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence

from sottovoce.audit.audit import Audit
from sottovoce.audit.bounds import ceiling
from sottovoce.audit.verdict import Findings, decide
from sottovoce.privacy.guarantee import ThreatModel
from sottovoce_client.auditing import text as words
from sottovoce_client.reports.page import section
from sottovoce_client.wording import count, number, plural


def banner(done: Audit) -> str:
    """The verdict in its own words, and what it rests on."""
    look, headline = words.HEADLINES[done.verdict.kind]
    shown = done.verdict.evidence[:8]
    items = "".join(f"<li>{html.escape(each)}</li>" for each in shown)
    more = len(done.verdict.evidence) - len(shown)
    items += f"<li>and {more:,} more, in the tables below</li>" if more else ""
    text = f"<strong>{headline}</strong><p>{html.escape(done.verdict.text)}</p>"
    heard, made_for = done.plan.listener.threat, done.plan.made_for
    if made_for is ThreatModel.OUTPUT and heard is not ThreatModel.OUTPUT:
        facts = {"made_for": words.LISTENERS[made_for.value], "heard": words.LISTENERS[heard.value]}
        text += f"<p>{html.escape(words.NOT_MADE_FOR.format(**facts))}</p>"
    return f'<div class="verdict {look}">{text}{f"<ul>{items}</ul>" if items else ""}</div>'


def cards(done: Audit) -> str:
    """The figures that most people ask for."""
    plan, found = done.plan, done.found
    paper = float(plan.guarantee.paper[-1])
    family, bound = found.best
    made_for = f"for this swap; made for {words.LISTENERS[plan.made_for.value]}"
    if math.isinf(plan.epsilon):
        made_for = "nothing finite is promised about what is said"
    figures = [
        ("Claimed ε", number(plan.epsilon), made_for),
        ("The paper’s own ε", number(paper), _against_paper(plan.guarantee.epsilon(), paper)),
        ("Largest exact loss", number(done.largest), _largest(done)),
    ]
    if found.paired:
        shown = f"shown by {family}, at this confidence" if bound else "no family shows more"
        figures += [
            ("ε is at least", number(bound, 3), shown),
            ("At best so many runs show", number(found.most, 3), _at_best(found)),
        ]
    each = (
        f'<div class="card"><div class="what">{what}</div><div class="figure">{figure}</div>'
        f'<div class="more">{html.escape(more)}</div></div>'
        for what, figure, more in figures
    )
    return f'<div class="cards">{"".join(each)}</div>'


def _against_paper(tight: float, paper: float) -> str:
    if math.isinf(tight):
        return "by its formula; nothing finite is promised about what is heard on the wire"
    if not (tight > 0.0 and math.isfinite(paper)):
        return f"by its formula; the tight value is {number(tight)}"
    factor = paper / tight
    how = (
        "the same"
        if abs(factor - 1) < 0.005
        else f"{number(max(factor, 1 / factor), 3)} times {'more' if factor < 1 else 'less'}"
    )
    return f"by its formula; the tight value is {number(tight)}, {how}"


def _largest(done: Audit) -> str:
    if done.shown is None:
        return words.UNHEARD[done.plan.listener.threat.value]
    excess = done.found.excess
    said = f"of {plural(len(done.worlds), 'transcript')}, after any round; "
    return said + (f"{count(excess.transcripts)} above the claim" if excess else "none above the claim")


def _at_best(found: Findings) -> str:
    said = "if every guess of a whole run were right"
    if found.rounds is None:
        return said
    added = sum(ceiling(found.runs, bound.level) for bound in found.rounds.bounds)
    return f"{said}; guessed round by round and added up, {number(added, 3)}"


# ---- the families ----------------------------------------------------------------------------------------------------

SAYS = {
    "consistent": "Nothing found",
    "refuted": "Something found",
    "inconclusive": "A hint, too weak to count",
    "unpromised": "Nothing is promised that could fail",
}

Rows = Sequence[tuple[str, str]]


def families(done: Audit) -> str:
    """What each family looked at, and what came of it."""
    panels = "".join((_conformance(done), _likelihood(done), _black_box(done)))
    return section("Three families of tests", words.FAMILIES, f'<div class="families">{panels}</div>')


def _family(title: str, what: str, kind: str, rows: Rows, idle: str = "") -> str:
    """One family; `idle` is why it had nothing to do."""
    says = f"Does not apply: {idle}." if idle else f"{SAYS[kind]}."
    pairs = "".join(f"<dt>{html.escape(k)}</dt><dd>{html.escape(v)}</dd>" for k, v in rows)
    return (
        f'<div class="family {"idle" if idle else kind}"><h3>{title}</h3><p>{html.escape(what)}</p>'
        f'<p class="says">{html.escape(says)}</p><dl>{pairs}</dl></div>'
    )


def _conformance(done: Audit) -> str:
    found = done.found.of("conformance")
    kind = decide(found).kind
    idle, rows = "", []
    if not found.tests:
        idle = no_noise(done)
    else:
        worst = min(found.tests, key=lambda test: math.inf if math.isnan(test.p_value) else test.p_value)
        rejected = sum(test.rejects for test in found.tests)
        rows = [
            ("tests", count(len(found.tests))),
            ("smallest p-value", f"{number(worst.p_value, 2)} ({worst.name})"),
        ]
        rows += [
            ("p-value that rejects", f"below {number(worst.level, 2)}"),
            ("tests that reject", count(rejected)),
        ]
    what = "Is the noise in the messages what the algorithm says: its size, its shape, fresh every time?"
    return _family("Conformance", what, "consistent" if kind == "unpromised" else kind, rows, idle)


def _likelihood(done: Audit) -> str:
    found, guessed = done.found.of("likelihood"), done.found.guessed
    kind = decide(found).kind
    what = "Knows the algorithm: how far do messages tell the two worlds apart? Nobody guesses better if the noise is as claimed."
    if done.shown is None:
        return _family("Likelihood", what, kind, (), words.UNHEARD[done.plan.listener.threat.value])
    largest = ("largest loss of a run", f"{number(done.largest)} of {number(found.claim)}")
    if guessed is None:
        return _family("Likelihood", what, kind, (largest,))
    rows = [
        largest,
        ("right guesses of runs", f"{guessed.correct:,} of {guessed.guesses:,}"),
        ("so ε is at least", number(guessed.value, 3)),
        *((f"{test.name}?", f"p = {number(test.p_value, 2)}") for test in found.tests),
    ]
    if found.rounds is not None:
        rows.append(("single rounds, added up: ε at least", number(found.rounds.composed, 3)))
    return _family("Likelihood", what, kind, rows)


def _black_box(done: Audit) -> str:
    found = done.found.of("black box")
    kind = decide(found).kind
    what = "Knows nothing of the algorithm: classifiers learn from the bare numbers which world a run lives in."
    tried = [bound for bound in found.bounds if bound.view]
    if not found.paired:
        return _family("Black box", what, kind, (), words.ONE_WORLD)
    if not tried:
        return _family("Black box", what, kind, (), "all runs look alike, or there are too few to learn from")
    best = max(tried, key=lambda bound: (bound.value, bound.correct / max(1, bound.guesses)))
    rows = [
        ("best classifier", best.guesser),
        ("what it looked at", best.view),
        ("right guesses", f"{best.correct:,} of {best.guesses:,}"),
        ("so ε is at least", number(best.value, 3)),
        ("claimed in the rounds it saw", number(best.claim)),
    ]
    return _family("Black box", what, kind, rows)


def no_noise(done: Audit) -> str:
    """Why there is no noise to test."""
    if done.plan.listener.threat is ThreatModel.OUTPUT:
        return "who sees published decisions only hears no message to take noise off"
    return "the messages carry none, or none that a replay can take off"
