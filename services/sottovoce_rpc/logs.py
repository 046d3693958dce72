"""Logs of a service: one event per line, as text for people on a terminal, else as JSON. Events never contain records or states.

For errors of foreign code the log has the class and the place, never the text, which may quote a record.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import stat
import sys
import traceback
import warnings
from collections.abc import Collection, MutableMapping
from importlib.metadata import version
from pathlib import Path
from types import FrameType
from typing import Any

import structlog
from structlog.typing import Processor

from sottovoce_core import errors
from sottovoce_core.text import escape_control

log = structlog.get_logger()

_PROJECT_PACKAGES = frozenset(
    {
        f"sottovoce{suffix}"
        for suffix in ("", "_core", "_rpc", "_learner", "_eavesdropper", "_coordinator", "_client", "_wire")
    }
)
"""Packages of this project, by full name: other projects' names may begin with the same word."""
SEE_LOG_TEXT = "the learner's log has it"
"""Text sent in place of an error text that may quote a record."""
_USER_CODE_MARK = ", in code of your own"
_MAX_ERROR_CHARS = 300
"""Maximum number of characters of an error text."""


log_options = ("info", "auto")
"""Level and form that `configure_logs` has set, for processes that this one starts."""


def configure_logs(level: str = "info", form: str = "auto") -> None:
    """Send structured logs to standard error.

    Args:
        level: `debug`, `info`, `warning` or `error`.
        form: `json`, `people` (text), or `auto`: text on a terminal, JSON elsewhere.

    Raises:
        SpecError: the level or form is unknown.
    """
    levels, forms = ("debug", "info", "warning", "error"), ("auto", "json", "people")
    if level not in levels:
        raise errors.SpecError(f"the log level must be one of {', '.join(levels)}, got {level}")
    if form not in forms:
        raise errors.SpecError(f"the log format must be one of {', '.join(forms)}, got {form}")
    global log_options
    log_options = level, form
    warnings.simplefilter("ignore", RuntimeWarning)  # whether a number overflows depends on records
    tty = sys.stderr.isatty()
    people: list[Processor] = [_escape_event, structlog.dev.ConsoleRenderer(colors=tty)]
    programs: list[Processor] = [_remove_non_finite, structlog.processors.JSONRenderer()]
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            *(people if form == "people" or (tty and form == "auto") else programs),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )


def log_start(service: str, identity: object = None, **facts: object) -> None:
    """Log that a service has started.

    Args:
        service: kind of the service.
        identity: its principal; None: it has no identity.
        facts: its addresses, state folder and owner.
    """
    texts = {name: str(value) for name, value in facts.items() if value is not None}
    log.info("started", service=service, version=version("sottovoce"), identity=str(identity or "none"), **texts)


def _escape_event(_: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Escape control characters for a terminal, so that an event stays one line; JSON escapes them itself."""
    return {
        escape_control(name): escape_control(value) if isinstance(value, str) else value
        for name, value in event.items()
    }


def _remove_non_finite(_: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Replace infinity and NaN by null: JSON has neither, and a strict reader would drop the line."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in event.items()
    }


def describe_failure(error: BaseException, user_packages: Collection[str] = ()) -> dict[str, str]:
    """Return what a log may contain of a foreign error: its class, and where it was raised.

    Args:
        error: the error as caught.
        user_packages: packages of code that a run spec names.

    Returns:
        kind: the error's class.
        where: file and line of the innermost frame of `user_packages`, not counting what it called; else of the innermost frame
            of this project or of code outside installed libraries.
    """
    frames = list(traceback.walk_tb(error.__traceback__))
    theirs = [each for each in frames if _package(each[0]) in set(user_packages) - _PROJECT_PACKAGES]
    known = theirs or [each for each in frames if not _is_library(each[0])] or frames
    where = f"{known[-1][0].f_code.co_filename}:{known[-1][1]}" if known else "nowhere"
    return {"kind": type(error).__name__, "where": where}


def describe_user_code_error(error: BaseException) -> str:
    """Describe an error of a user's own code: class, text, file and line; empty if no such code failed.

    Not for logs: the text may quote a record. An error that crosses processes loses its frames, so the process that raised it
    attaches this text as a note (`add_note`).
    """
    frames = traceback.walk_tb(error.__traceback__)
    theirs = [each for each in frames if _package(each[0]) not in _PROJECT_PACKAGES and not _is_library(each[0])]
    if not theirs:
        return next((note for note in getattr(error, "__notes__", ()) if _USER_CODE_MARK in note), "")
    frame, line = theirs[-1]
    text = " ".join(str(error).split())
    if len(text) > _MAX_ERROR_CHARS:
        text = f"{text[:_MAX_ERROR_CHARS]} ..."
    return f"{type(error).__name__} at {frame.f_code.co_filename}:{line}{_USER_CODE_MARK}{': ' * bool(text)}{text}"


def describe_reason(error: Exception) -> str:
    """Describe in one line why a result could not be computed: the text of a project error; of others, class and place."""
    if has_project_text(error) or isinstance(error, OSError):
        return str(error)
    if isinstance(error, MemoryError):
        return "it needs more memory than is available"
    return "{kind} at {where}; please report this line if that file is not yours".format(**describe_failure(error))


def has_project_text(error: BaseException) -> bool:
    """Return whether an error's text was written by this project, and so quotes no record.

    Code that a run spec names may raise this project's error classes, too, with its own texts.
    """
    names = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
    words = [name for name in names if name != errors.__name__]  # there `require` only raises the error it is given
    return isinstance(error, errors.SottovoceError) and bool(words) and words[-1].partition(".")[0] in _PROJECT_PACKAGES


def hide_error_texts(loop: asyncio.AbstractEventLoop) -> None:
    """Keep texts of uncaught errors out of the event loop's messages: log their class and place only."""

    def handle(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        log.error("not caught", **(describe_failure(error) if isinstance(error, BaseException) else {}))

    loop.set_exception_handler(handle)


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def _is_library(frame: FrameType) -> bool:
    """Return whether a frame belongs to the standard library or an installed package, except this project's."""
    package = _package(frame)
    if package in _PROJECT_PACKAGES:
        return False
    file = frame.f_globals.get("__file__") or ""
    return package in sys.stdlib_module_names or "site-packages" in file or "dist-packages" in file


# ---- private files ---------------------------------------------------------------------------------------------------


_GROUP_AND_OTHERS_MODE = 0o077


def set_private_umask() -> None:
    """Make all files that this process creates readable by its user only; for service processes."""
    os.umask(os.umask(_GROUP_AND_OTHERS_MODE) | _GROUP_AND_OTHERS_MODE)


def is_open_to_others(folder: Path) -> bool:
    """Return whether other users of this machine can read a folder; False if it does not exist yet."""
    try:
        return bool(stat.S_IMODE(folder.stat().st_mode) & _GROUP_AND_OTHERS_MODE)
    except FileNotFoundError:
        return False


def warn_if_open(folder: Path, what: str) -> None:
    """Warn if other users can read a folder.

    It is no reason not to start: a container's volume may be open to all users, with only one present.

    Args:
        folder: folder that the service writes to.
        what: description of the folder and its content.
    """
    if is_open_to_others(folder):
        log.warning(f"other users can read the {what}: chmod 700", folder=str(folder))
