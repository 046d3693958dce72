"""Text for people: names in messages, and text of others as it may stand on a terminal, in a log or in a spreadsheet."""

from __future__ import annotations

from collections.abc import Sequence

_FORMULA = ("=", "+", "-", "@")
_MAX_NAMED = 10
"""Names that a message lists."""


def escape_control(text: str) -> str:
    r"""Text on one line, every letter of it seen: what would move a cursor, colour, turn or break what is around it is escaped.

    >>> plain("all is well\n\x1b[2J")
    'all is well\\n\\x1b[2J'
    """
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def escape_control_lines(text: str) -> str:
    """The same of every line, where the lines are ours."""
    return "\n".join(map(escape_control, text.split("\n")))


def escape_formula(value: object) -> object:
    """A cell of a CSV file: text that a spreadsheet would take for a formula, or a terminal for a command, is none any more."""
    if not isinstance(value, str):
        return value
    text = escape_control(value)
    return f"'{text}" if text.startswith(_FORMULA) else text


def format_learner_name(names: Sequence[str], learner: int) -> str:
    """A learner's name, in words for people; `learner 3` where nobody has said it."""
    return names[learner] if 0 <= learner < len(names) else f"learner {learner}"


def abbreviate_names(names: Sequence[str], most: int = _MAX_NAMED) -> str:
    """Some of them, where there are many: an error has to fit into a status. `none` where there are none."""
    if not names:
        return "none"
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{', '.join(names[:most])}{more}"
