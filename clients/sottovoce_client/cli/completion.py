"""Shell completion. The shell waits for the answer, so nothing slow is imported here."""

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
"""Names in `sottovoce_core.data.catalogue`, which imports NumPy."""


def complete_spec_files(incomplete: str) -> list[str]:
    """Complete the name of a YAML file; an empty list makes the shell complete any file or folder."""
    folder, _, start = incomplete.rpartition("/")
    parent = Path(f"{folder}/" if folder or incomplete.startswith("/") else ".").expanduser()
    if not parent.is_dir():
        return []
    before = incomplete[: len(incomplete) - len(start)]
    names = sorted(each.name for each in parent.iterdir() if each.suffix in (".yaml", ".yml") and each.is_file())
    return [f"{before}{name}" for name in names if name.startswith(start)]


def complete_dataset_names(incomplete: str) -> list[str]:
    """Complete the name of a data set; the shell completes files."""
    return [name for name in DATASET_NAMES if name.startswith(incomplete)]


def complete_metrics(incomplete: str) -> list[str]:
    """Complete a list of metrics with commas."""
    from sottovoce_core.runs.metrics import METRICS

    return make_list_completer(METRICS)(incomplete)


def make_list_completer(names: Sequence[str]) -> Callable[[str], list[str]]:
    """Return a completer of an option that takes several names with commas; it offers those not given yet."""

    def complete(incomplete: str) -> list[str]:
        before, comma, start = incomplete.rpartition(",")
        given = before.split(",")
        return [f"{before}{comma}{name}" for name in names if name.startswith(start) and name not in given]

    return complete
