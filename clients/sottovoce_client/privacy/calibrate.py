"""`sottovoce budget --target`: the same spec with the noise that a budget asks for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from sottovoce_client import terminal
from sottovoce_client.atomic_files import create_file, require_new
from sottovoce_client.formatting import format_number
from sottovoce_client.privacy.budget import find_learner_index
from sottovoce_core.algorithms.run_context import AlgorithmSpec
from sottovoce_core.budget.calibration import BudgetTarget, BudgetUnit, CalibrationResult, calibrate
from sottovoce_core.errors import SpecError
from sottovoce_core.experiment import PreparedRun
from sottovoce_core.runs.run import build_run
from sottovoce_core.runs.run_warnings import find_budget_warnings
from sottovoce_core.spec import RunSpec, move_paths, read_document
from sottovoce_core.yaml_files import write_yaml


def write_calibrated_spec(
    source: Path, prepared: PreparedRun, target: BudgetTarget, out: Path | None, console: Console | None = None
) -> None:
    """Find the noise, say what it came to, and write the spec: the user's own document with another noise.

    Args:
        source: the spec's file. Its comments are not kept.
        prepared: what it describes.
        target: what to meet.
        out: where to write (None: to standard output).
        console: where to say what was found.

    Raises:
        SpecError: there is a file at `out` already, or the budget cannot be met.
    """
    require_new(out)
    console = console or terminal.create_console(stderr=True)
    spec = prepared.run.spec
    with console.status("searching"):
        found = calibrate(spec, prepared.data, target)
    for name, epsilon, factor in zip(spec.names, found.epsilons, found.factors, strict=True):
        console.print(
            f"{name}: epsilon {format_number(epsilon)}, {format_number(factor)} times the noise", highlight=False
        )
    if spec.data.partition.is_shared:
        console.print(
            "learners share their records: these are epsilons of all their messages together", highlight=False
        )
    for finding in find_budget_warnings(build_run(found.spec, prepared.data.n_features), prepared.data):
        console.print(f"warning: {finding.text} [{finding.code}]", highlight=False, markup=False, soft_wrap=True)
    document = _with_algorithm(source, spec.algorithm, found, out)
    text = write_yaml(document)
    if out is None:
        print(text, end="")
    else:
        with create_file(out) as file:
            file.write(text.encode())
        console.print(str(out), highlight=False)
    each = [
        {"name": name, "epsilon": epsilon, "noise_factor": factor}
        for name, epsilon, factor in zip(spec.names, found.epsilons, found.factors, strict=True)
    ]
    terminal.print_json_if_requested(lambda: {"out": out, "learners": each, "spec": document})


def _with_algorithm(source: Path, before: AlgorithmSpec, found: CalibrationResult, out: Path | None) -> dict[str, Any]:
    """The document of a file, its schema in place, with those parameters of the algorithm that have changed."""
    document: dict[str, Any] = dict(read_document(source))
    if out is not None:
        move_paths(document, Path(), out.parent)
    old, new = (each.model_dump(mode="json") for each in (before, found.spec.algorithm))
    named = document["algorithm"]
    document["algorithm"] = ({"name": named} if isinstance(named, str) else named) | {
        key: new[key] for key in new if new[key] != old[key]
    }
    return document


def parse_horizon(text: str | None) -> float | None:
    """How many rounds an option asks for: a number, `inf`, or None for all of the run.

    Raises:
        SpecError: none of these.
    """
    rounds = None if text is None else _number("--horizon", text)
    if rounds is not None and rounds < math.inf and rounds != round(rounds):
        raise SpecError(f"--horizon must be a whole number of rounds, or inf, got {text}")
    return rounds


def parse_target(spec: RunSpec, wanted: Sequence[str], horizon: float | None, per: BudgetUnit) -> BudgetTarget:
    """What the command's options ask for.

    Args:
        spec: the run.
        wanted: `E`, for every learner that is not named, or `NAME=E` each.
        horizon: rounds, or infinity; None: all.
        per: for an event or a record.

    Raises:
        SpecError: an option is not of its form, names nobody, or a learner is left without a target.
    """
    general = [each for each in wanted if "=" not in each]
    if len(general) > 1:
        raise SpecError(
            f"--target must be one epsilon for every learner, and NAME=E for others, got {', '.join(general)}"
        )
    targets: list[float | None] = [_number("--target", general[0]) if general else None] * spec.n_learners
    named = set[int]()
    for each in wanted:
        name, equals, value = each.rpartition("=")
        if not equals:
            continue
        learner = find_learner_index(spec, name, "--target")
        if learner in named:
            raise SpecError(f"--target must name each learner once, got {name} twice")
        named.add(learner)
        targets[learner] = _number("--target NAME=E", value)
    without = [name for name, target in zip(spec.names, targets, strict=True) if target is None]
    if without:
        raise SpecError(f"every learner needs a target, got none for {', '.join(without)}; give --target E")
    return BudgetTarget(tuple(target for target in targets if target is not None), horizon, per)


def _number(option: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if math.isnan(value):
        raise SpecError(f"{option} must be a number, got {text!r}")
    return value
