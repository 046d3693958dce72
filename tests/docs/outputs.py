"""Whether what a command prints is what its page shows: word for word, and number for number where noise and clocks allow it."""

from __future__ import annotations

import re

ID = re.compile(r"\b(?=[0-9a-f]*\d)(?=[0-9a-f]*[a-f])[0-9a-f]{6,}\b")
NUMBER = re.compile(r"[−+-]?\d+(?:,\d+)*(?:\.\d+)?(?:e[−+-]?\d+)?|∞")
TIME = re.compile(r"(?:#\s*(?:ms|s|min|h)\b\s*)+")
SIZE = re.compile(r"#\s*(?:kB|MB|B)\b")
STEADY = re.compile(r"sottovoce (?:budget|compare|data|policy|simulate|spec|sweep) ")
"""What prints the same numbers wherever it runs: a seed decides it all, but for last columns of speeds."""
SPEEDS = re.compile(r"^\|.*\| rounds/s \|$(?:\n\|.*\|$)*", re.MULTILINE)
LAST_CELL = re.compile(r"[^|\n]*\|$", re.MULTILINE)
ROUNDING = 0.02
"""By which a number of a page may be off: libraries round differently."""
NOTHING = 1e-12
"""What is smaller is rounding itself."""


def tidy(said: str) -> str:
    """As a page shows it."""
    lines = [line.rstrip() for line in said.replace("\r", "\n").splitlines()]
    return "\n".join(lines).strip("\n") + "\n"


def plain(text: str) -> str:
    """Its words, without blanks and lengths of lines; numbers are alike, and so are times."""
    masked = NUMBER.sub("#", ID.sub("#", text))
    masked = SIZE.sub("#B", TIME.sub("#s ", masked))
    return re.sub(r"\s+", "", re.sub("─+", "─", masked))


def numbers(text: str) -> list[float]:
    """What a text says in numbers; a time is none."""
    speedless = SPEEDS.sub(lambda table: LAST_CELL.sub("", table[0]), text)
    timeless = re.sub(rf"(?:{NUMBER.pattern})\s*(?:ms|s|min|h)\b", "", ID.sub("", speedless))
    return [float(found.replace("−", "-").replace(",", "").replace("∞", "inf")) for found in NUMBER.findall(timeless)]


def shows(shown: str, said: str, *, exact: bool) -> bool:
    """Whether a page shows what was said; `exact`: in its numbers, too."""
    pattern = re.escape(plain(shown)).replace("…", ".*?")
    if not re.fullmatch(pattern, plain(said), re.DOTALL):
        return False
    return not exact or "…" in shown or _close(numbers(shown), numbers(said))


def _close(ours: list[float], theirs: list[float]) -> bool:
    return len(ours) == len(theirs) and all(map(_alike, ours, theirs))


def _alike(a: float, b: float) -> bool:
    largest = max(abs(a), abs(b))
    return a == b or largest < NOTHING or abs(a - b) <= ROUNDING * largest
