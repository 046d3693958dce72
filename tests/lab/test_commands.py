"""The commands of the laboratory are found where its package is installed; elsewhere, the command line says what is missing."""

from __future__ import annotations

import subprocess
import sys

COMMAND = "import sys; {}sys.argv = ['sottovoce', *sys.argv[1:]]; from sottovoce_client.cli import main; main()"


def called(*words: str, before: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", COMMAND.format(before), *words], capture_output=True, text=True, check=False
    )


def test_without_the_package_the_command_says_what_is_missing() -> None:
    done = called("lab", "gallery", "--seed", "3", before="sys.modules['sottovoce_lab'] = None; ")
    assert done.returncode == 2 and done.stdout == ""
    assert "needs the package sottovoce_lab, which is not installed" in done.stderr and "'.[audit]'" in done.stderr


def test_its_help_names_all_of_them() -> None:
    done = called("lab", "--help")
    assert done.returncode == 0
    assert all(name in done.stdout for name in ("self-test", "power", "gallery"))
