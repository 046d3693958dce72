"""Words of a command line, read before anything large is imported."""

from __future__ import annotations

from collections.abc import Sequence

OPTIONS_WITH_VALUE = (
    "--config",
    "--coordinator",
    "--identity",
    "--log-format",
    "--log-level",
    "--profile",
)
"""Common options, which may stand before the command, that take a value."""


def strip_common_options(words: Sequence[str]) -> list[str]:
    """Return a command line from its command on, without the common options before it.

    Args:
        words: The command line after `sottovoce`.
    """
    at = 0
    while at < len(words) and words[at].startswith("-"):
        at += 2 if words[at] in OPTIONS_WITH_VALUE else 1
    return [*words[at:]]
