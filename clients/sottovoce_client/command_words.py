"""Parsing of a command line before large modules are imported."""

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
"""Common options with a value, which may precede the command."""


def strip_common_options(words: Sequence[str]) -> list[str]:
    """Return the command line from its command on, without the common options before it.

    Args:
        words: The command line after `sottovoce`.
    """
    at = 0
    while at < len(words) and words[at].startswith("-"):
        at += 2 if words[at] in OPTIONS_WITH_VALUE else 1
    return [*words[at:]]
