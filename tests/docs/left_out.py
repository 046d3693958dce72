"""What of the tutorials' commands does not run as it stands, and why: here, and nowhere else."""

from __future__ import annotations

_INSTALLED = "it is installed already: the tests' own packages are what is tried"

NOT_RUN: dict[str, dict[str, str]] = {
    "docs/tutorial-researcher.md": {"pip install": _INSTALLED},
    "docs/tutorial-auditor.md": {"pip install": _INSTALLED},
    "docs/tutorial-engineer.md": {
        "pip install": _INSTALLED,
        "docker ": "it needs a Docker Engine: `nox -s deploy` tries it",
        "cp deploy": "it needs root, and a machine that runs systemd",
        "systemctl": "it needs root, and a machine that runs systemd",
    },
}
"""Of a page, how commands begin, and the reason."""
