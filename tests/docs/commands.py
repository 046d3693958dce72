"""Commands that pages name, held against the command line: subcommands, options and arguments exist.

Of a block of `sh` each is whole. What stands within a sentence, as `sottovoce up --tls`, or in a synopsis, an indented block
with what may be left out in brackets, need not be: there nothing is missed, and a word in capitals stands for any.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import typer

from sottovoce_client.cli.app import app
from sottovoce_client.command_words import strip_common_options
from tests.docs.pages import FENCE, blocks

ENDS = {"|", "||", "&&", "&", ";", "&;"}
INTO = {">", ">>", "<", ">&", "2>&1"}
INLINE = re.compile(r"`(sottovoce [^`]+)`")
SYNOPSIS = re.compile(r"^ {4}(?:\$ )?(sottovoce .*(?:\n {5,}\[.*)*)", re.MULTILINE)
SETS = re.compile(r"\w+=")
STANDS_FOR_ANY = re.compile(r"…|\.\.\.|[A-Z][A-Z_0-9:]*(?:=[A-Z]+)?")


@dataclass(frozen=True)
class Named:
    """A command of a page, without `sottovoce`; `whole`: as one would type it."""

    words: tuple[str, ...]
    whole: bool

    def __str__(self) -> str:
        return " ".join(("sottovoce", *self.words))


def named(page: str) -> Iterator[Named]:
    """All commands that a page's text names."""
    for block in blocks(page):
        for command in block.commands:
            yield from (Named(tuple(words), whole=True) for words in _ours(command))
    prose = FENCE.sub("", page)
    for pattern in (SYNOPSIS, INLINE):
        for found in pattern.findall(prose):
            text = re.sub(r"\]\.\.\.|[\[\]]|(?<= )\|(?= )|(?<=\w)\|[\w:]+", " ", found)
            yield from (Named(tuple(words), whole=False) for words in _ours(text))


def _ours(command: str) -> Iterator[list[str]]:
    """Of a line of a shell, what it tells `sottovoce`."""
    lexer = shlex.shlex(command.replace("\\\n", " "), posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    simple = list[str]()
    for word in [*lexer, ";"]:
        if word not in ENDS:
            simple.append(word)
            continue
        while simple and (SETS.match(simple[0]) or simple[0] in {"until", "while", "do", "$"}):
            simple.pop(0)
        if simple and simple[0] == "sottovoce":
            into = next((i for i, each in enumerate(simple) if each in INTO), len(simple))
            yield [each for each in simple[1:into] if each != "2"] if into < len(simple) else simple[1:]
        simple = []


@cache
def _tree() -> Any:
    return typer.main.get_command(app)


def mistake(command: Named) -> str:
    """What of a command is not there; empty where all is."""
    at, words = _tree(), strip_common_options(command.words) or list(command.words)
    before = list(command.words[: len(command.words) - len(words)])
    while hasattr(at, "commands") and words and not words[0].startswith("-"):
        if words[0] not in at.commands:
            return "" if not command.whole and STANDS_FOR_ANY.fullmatch(words[0]) else f"no command {words[0]!r}"
        at = at.commands[words.pop(0)]
    words += before
    own = {flag for each in at.params for flag in each.opts}
    shared = [
        each
        for each in _tree().params
        if each.name in {*getattr(at, "common_options", ()), "profile"} and not own & {*each.opts}
    ]
    options = {
        name: each for each in [*at.params, *shared] for name in (*each.opts, *each.secondary_opts) if name[0] == "-"
    }
    places, given = [each for each in at.params if each.param_type_name == "argument"], list[str]()
    seen = set[str]()
    while words:
        word, _, value = words.pop(0).partition("=")
        if word in {"--help", "-h"} or (word in options and (options[word].is_eager or not options[word].expose_value)):
            return ""
        if word == "-" or not word.startswith("-"):  # a dash alone stands for standard input
            given.append(word)
        elif word not in options:
            return f"no option {word}"
        elif not options[word].is_flag:
            seen.add(options[word].name)
            values = [value] if value else [words.pop(0) for _ in range(options[word].nargs) if words]
            if command.whole and (len(values) < options[word].nargs or any(each.startswith("--") for each in values)):
                return f"{word} needs a value"
    return _misplaced(at, places, given, seen, whole=command.whole)


def _misplaced(at: Any, places: Sequence[Any], given: Sequence[str], seen: set[str], *, whole: bool) -> str:
    if hasattr(at, "commands"):
        return f"{at.name}: which command?" if whole and not at.invoke_without_command else ""
    most = sum(each.nargs for each in places) if all(each.nargs > 0 for each in places) else len(given)
    if len(given) > most:
        return f"takes {most} arguments, got {' '.join(given)}"
    least = sum(1 for each in places if each.required)
    if whole and len(given) < least:
        return f"needs {least} arguments"
    missed = [each.opts[0] for each in at.params if each.required and each not in places and each.name not in seen]
    return f"needs {', '.join(missed)}" if whole and missed else ""
