"""What a shell offers when Tab is pressed. It waits for the answer, so nothing large is imported here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

DATASET_NAMES = (
    "breast_cancer",
    "digits",
    "vital_signs",
    "mushrooms",
    "adult",
    "a9a",
    "letter",
    "mnist",
    "poker",
    "cifar10",
    "covtype",
    "electricity",
)
"""Names of `sottovoce_core.data.catalogue`, which NumPy comes with."""


def complete_spec_files(incomplete: str) -> list[str]:
    """YAML files that may be meant; none: the shell offers what it offers for any file, folders too."""
    folder, _, start = incomplete.rpartition("/")
    place = Path(f"{folder}/" if folder or incomplete.startswith("/") else ".").expanduser()
    if not place.is_dir():
        return []
    before = incomplete[: len(incomplete) - len(start)]
    names = sorted(each.name for each in place.iterdir() if each.suffix in (".yaml", ".yml") and each.is_file())
    return [f"{before}{name}" for name in names if name.startswith(start)]


def complete_dataset_names(incomplete: str) -> list[str]:
    """Data sets that have a name; files are the shell's to offer."""
    return [name for name in DATASET_NAMES if name.startswith(incomplete)]


def make_list_completer(names: Sequence[str]) -> Callable[[str], list[str]]:
    """Of an option that takes several of these with commas between: each that is not there yet."""

    def offered(incomplete: str) -> list[str]:
        before, comma, start = incomplete.rpartition(",")
        there = before.split(",")
        return [f"{before}{comma}{name}" for name in names if name.startswith(start) and name not in there]

    return offered
