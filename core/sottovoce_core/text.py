"""Display text: names in messages, and untrusted text made safe for a terminal, a log or a spreadsheet."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

_FORMULA = ("=", "+", "-", "@")
_MAX_NAMED = 10
"""Maximum number of names that a message lists."""


def escape_control(text: str) -> str:
    r"""Make text fit for one line: characters that move a cursor, or colour, turn or break the surroundings are escaped.

    >>> escape_control("all is well
    \x1b[2J")
    'all is well\\n\\x1b[2J'
    """
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def escape_control_lines(text: str) -> str:
    """Escape control characters in every line of a text whose line breaks are trusted."""
    return "\n".join(map(escape_control, text.split("\n")))


def escape_formula(value: object) -> object:
    """Escape a cell of a CSV file that a spreadsheet would take for a formula, or a terminal for a command."""
    if not isinstance(value, str):
        return value
    text = escape_control(value)
    return f"'{text}" if text.startswith(_FORMULA) else text


def format_learner_name(names: Sequence[str], learner: int) -> str:
    """Return a learner's name for display; `learner 3` if the name is unknown."""
    return names[learner] if 0 <= learner < len(names) else f"learner {learner}"


def abbreviate_names(names: Sequence[str], max_names: int = _MAX_NAMED) -> str:
    """Join names, abbreviated if there are many: an error must fit into a status. `none` if there are none."""
    if not names:
        return "none"
    more = f" and {len(names) - max_names} more" if len(names) > max_names else ""
    return f"{', '.join(names[:max_names])}{more}"


def suggest_name(got: object, known: Iterable[str]) -> str:
    """Suggest the known name that was probably meant, as the end of an error; empty if none is similar.

    >>> suggest_name("acuracy", ["accuracy", "average_loss"])
    "; did you mean 'accuracy'?"
    """
    names = {name.casefold(): name for name in known}
    near = difflib.get_close_matches(got.casefold(), names, 1) if isinstance(got, str) else []
    return f"; did you mean {names[near[0]]!r}?" if near else ""
