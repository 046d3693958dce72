"""Logs of a service: one event a line, for people on a terminal, else JSON, or as asked. No event ever carries records or states.

Of an error that is not ours a log has the kind and the place, never the text: that may quote a record.
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
        f"sottovoce{house}"
        for house in ("", "_core", "_rpc", "_learner", "_eavesdropper", "_coordinator", "_client", "_wire")
    }
)
"""Packages of this project; somebody else's may begin with the same word."""
SEE_LOG_TEXT = "the learner's log has it"
"""What others are told of an error whose text may quote a record."""
_USER_CODE_MARK = ", in code of your own"
_MAX_ERROR_CHARS = 300
"""Of the text of an error."""


def configure_logs(level: str = "info", form: str = "auto") -> None:
    """Send structured logs to standard error.

    Args:
        level: `debug`, `info`, `warning` or `error`.
        form: `json`, `people`, or `auto`: for people on a terminal, as JSON elsewhere.

    Raises:
        SpecError: another level or form.
    """
    levels, forms = ("debug", "info", "warning", "error"), ("auto", "json", "people")
    if level not in levels:
        raise errors.SpecError(f"the log level must be one of {', '.join(levels)}, got {level}")
    if form not in forms:
        raise errors.SpecError(f"the log format must be one of {', '.join(forms)}, got {form}")
    warnings.simplefilter("ignore", RuntimeWarning)  # of numbers that overflow: whether one does depends on records
    tty = sys.stderr.isatty()
    people: list[Processor] = [_plainly, structlog.dev.ConsoleRenderer(colors=tty)]
    programs: list[Processor] = [_strictly, structlog.processors.JSONRenderer()]
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
    """Log that a service serves from now on.

    Args:
        service: its kind.
        identity: its principal; None: it has no identity.
        facts: where it listens, where it keeps its state, and whose it is.
    """
    told = {name: str(value) for name, value in facts.items() if value is not None}
    log.info("started", service=service, version=version("sottovoce"), identity=str(identity or "none"), **told)


def _plainly(_: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """On a terminal what others have said is text, on one line; JSON escapes it by itself."""
    return {
        escape_control(name): escape_control(value) if isinstance(value, str) else value
        for name, value in event.items()
    }


def _strictly(_: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """JSON has no infinity and no NaN, and who reads it strictly would drop the line."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in event.items()
    }


def describe_failure(error: BaseException, user_packages: Collection[str] = ()) -> dict[str, str]:
    """What a log may say of an error that is not ours: its kind, and where it was raised.

    Args:
        error: as it was caught.
        own: packages of code that a run spec names.

    Returns:
        kind: the error's class.
        where: file and line of the innermost frame of such code, whatever it called, of ours too; else of the innermost one of
            ours, or that is no library's.
    """
    frames = list(traceback.walk_tb(error.__traceback__))
    theirs = [each for each in frames if _package(each[0]) in set(user_packages) - _PROJECT_PACKAGES]
    known = theirs or [each for each in frames if not _of_a_library(each[0])] or frames
    where = f"{known[-1][0].f_code.co_filename}:{known[-1][1]}" if known else "nowhere"
    return {"kind": type(error).__name__, "where": where}


def describe_user_code_error(error: BaseException) -> str:
    """For whoever runs code of their own: kind and text of its error, and its file and line; empty where no such code failed.

    It is not for logs: the text may quote a record. An error that crosses processes leaves its frames behind: it is told there,
    and carried as a note (`add_note`).
    """
    frames = traceback.walk_tb(error.__traceback__)
    theirs = [each for each in frames if _package(each[0]) not in _PROJECT_PACKAGES and not _of_a_library(each[0])]
    if not theirs:
        return next((note for note in getattr(error, "__notes__", ()) if _USER_CODE_MARK in note), "")
    frame, line = theirs[-1]
    text = " ".join(str(error).split())
    if len(text) > _MAX_ERROR_CHARS:
        text = f"{text[:_MAX_ERROR_CHARS]} ..."
    return f"{type(error).__name__} at {frame.f_code.co_filename}:{line}{_USER_CODE_MARK}{': ' * bool(text)}{text}"


def describe_reason(error: Exception) -> str:
    """Why a result could not be computed, in a line for people: the text of an error of ours; of others their kind and place."""
    if has_project_text(error) or isinstance(error, OSError):
        return str(error)
    if isinstance(error, MemoryError):
        return "it needs more memory than there is"
    return "{kind} at {where}; please report this line if that file is not yours".format(**describe_failure(error))


def has_project_text(error: BaseException) -> bool:
    """True when the text of an error is this project's, which quotes no record.

    Code that a run spec names may raise our classes, too, with words of its own.
    """
    names = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
    words = [name for name in names if name != errors.__name__]  # where `require` only raises what it was given
    return isinstance(error, errors.SottovoceError) and bool(words) and words[-1].partition(".")[0] in _PROJECT_PACKAGES


def hide_error_texts(loop: asyncio.AbstractEventLoop) -> None:
    """What a loop says of errors that nobody caught would have their text."""

    def tell(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        log.error("not caught", **(describe_failure(error) if isinstance(error, BaseException) else {}))

    loop.set_exception_handler(tell)


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def _of_a_library(frame: FrameType) -> bool:
    """True in the standard library and in installed packages, but for ours."""
    package = _package(frame)
    if package in _PROJECT_PACKAGES:
        return False
    file = frame.f_globals.get("__file__") or ""
    return package in sys.stdlib_module_names or "site-packages" in file or "dist-packages" in file


# ---- files of one user -----------------------------------------------------------------------------------------------


_GROUP_AND_OTHERS_MODE = 0o077


def set_private_umask() -> None:
    """From now on, whatever this process makes can be read by its user alone: for a process that is a service."""
    os.umask(os.umask(_GROUP_AND_OTHERS_MODE) | _GROUP_AND_OTHERS_MODE)


def is_open_to_others(folder: Path) -> bool:
    """Whether other users of this machine may look into a folder; a folder that is not there yet is not."""
    try:
        return bool(stat.S_IMODE(folder.stat().st_mode) & _GROUP_AND_OTHERS_MODE)
    except FileNotFoundError:
        return False


def warn_if_open(folder: Path, what: str) -> None:
    """Warn where other users may look into a folder.

    It is no reason not to start: a volume of a container is open to all, and nobody else is there.

    Args:
        folder: that the service writes to.
        what: it is, and holds.
    """
    if is_open_to_others(folder):
        log.warning(f"other users may look into the {what}: chmod 700", folder=str(folder))
