"""Text of others, as it may stand on a terminal, in a log or in a spreadsheet."""

from __future__ import annotations

_FORMULA = ("=", "+", "-", "@")


def plain(text: str) -> str:
    r"""Text on one line, every letter of it seen: what would move a cursor, colour, turn or break what is around it is escaped.

    >>> plain("all is well\n\x1b[2J")
    'all is well\\n\\x1b[2J'
    """
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def plain_lines(text: str) -> str:
    """The same of every line, where the lines are ours."""
    return "\n".join(map(plain, text.split("\n")))


def cell_of(value: object) -> object:
    """A cell of a CSV file: text that a spreadsheet would take for a formula, or a terminal for a command, is none any more."""
    if not isinstance(value, str):
        return value
    text = plain(value)
    return f"'{text}" if text.startswith(_FORMULA) else text
