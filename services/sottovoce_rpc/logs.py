"""Logs of a service: one event a line, for people on a terminal, else JSON. No event ever carries records or states."""

from __future__ import annotations

import logging
import sys
import warnings

import structlog

from sottovoce.errors import SpecError


def configure_logs(level: str = "info") -> None:
    """Send structured logs to standard error.

    Args:
        level: `debug`, `info`, `warning` or `error`.

    Raises:
        SpecError: another level.
    """
    levels = ("debug", "info", "warning", "error")
    if level not in levels:
        raise SpecError(f"the log level must be one of {', '.join(levels)}, got {level}")
    warnings.simplefilter("ignore", RuntimeWarning)  # of numbers that overflow: whether one does depends on records
    tty = sys.stderr.isatty()
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            structlog.dev.ConsoleRenderer() if tty else structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
