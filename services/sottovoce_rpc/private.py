"""What a service writes is its user's alone: records lie in it, or what was said of them."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import structlog

log = structlog.get_logger()

_OTHERS = 0o077


def keep_private() -> None:
    """From now on, whatever this process makes can be read by its user alone: for a process that is a service."""
    os.umask(os.umask(_OTHERS) | _OTHERS)


def open_to_others(folder: Path) -> bool:
    """Whether other users of this machine may look into a folder; a folder that is not there yet is not."""
    try:
        return bool(stat.S_IMODE(folder.stat().st_mode) & _OTHERS)
    except FileNotFoundError:
        return False


def tell_if_open(folder: Path, what: str) -> None:
    """Warn where other users may look into a folder.

    It is no reason not to start: a volume of a container is open to all, and nobody else is there.

    Args:
        folder: that the service writes to.
        what: it is, and holds.
    """
    if open_to_others(folder):
        log.warning(f"other users may look into the {what}: chmod 700", folder=str(folder))
