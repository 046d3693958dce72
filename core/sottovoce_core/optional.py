"""Optional dependencies: packages that only an extra of pip installs."""

from __future__ import annotations

import importlib
from typing import Any

from sottovoce_core.errors import SpecError


def format_install_hint(extra: str) -> str:
    """How to install a group of optional dependencies: there is no release on a package index yet."""
    return f"in a clone of the repository, pip install '.[{extra}]'"


def import_optional(module: str, package: str, what: str, extra: str = "audit") -> Any:
    """A module that only an extra installs.

    Raises:
        SpecError: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError:
        raise SpecError(f"{what} needs {package}: {format_install_hint(extra)}") from None
