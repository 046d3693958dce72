"""Optional dependencies: packages that only an extra of pip installs."""

from __future__ import annotations

import importlib
from typing import Any

from sottovoce_core.errors import SpecError


def format_install_hint(extra: str) -> str:
    """Describe how to install a group of optional dependencies: no package index has a release yet."""
    return f"in a clone of the repository, pip install '.[{extra}]'"


def import_optional(module: str, package: str, what: str, extra: str = "audit") -> Any:
    """Import a module that only an extra installs.

    Raises:
        SpecError: the package is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError:
        raise SpecError(f"{what} needs {package}: {format_install_hint(extra)}") from None
