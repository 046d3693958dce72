"""`sottovoce budget --target`: the same spec with noise calibrated to a budget."""

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
from sottovoce_core.budget.calibration import BudgetTarget, CalibrationResult, calibrate
from sottovoce_core.budget.cost import PrivacyUnit
from sottovoce_core.errors import SpecError
from sottovoce_core.experiment import PreparedRun
from sottovoce_core.runs.run import build_run
from sottovoce_core.runs.run_warnings import find_budget_warnings
from sottovoce_core.spec import RunSpec, move_paths, read_document
from sottovoce_core.yaml_files import write_yaml


def write_calibrated_spec(
    source: Path, prepared: PreparedRun, target: BudgetTarget, out: Path | None, console: Console | None = None
) -> None:
    """Calibrate the noise, print the result, and write the spec: the user's document with other noise parameters.

    Args:
        source: Spec file. Its comments are lost.
        prepared: Run of the spec.
        target: Budget to meet.
        out: Output file (None: standard output).
        console: Console of the result.

    Raises:
        SpecError: `out` exists already, or the budget cannot be met.
    """
    require_new(out)
    console = console or terminal.create_console(stderr=True)
    spec = prepared.run.spec
    with console.status("searching"):
        found = calibrate(spec, prepared.data, target)
    for name, epsilon, factor in zip(spec.names, found.epsilons, found.factors, strict=True):
        console.print(
            f"{name}: epsilon {format_number(epsilon)}, noise {format_number(factor)} times that of the spec",
            highlight=False,
        )
    if spec.data.partition.is_shared:
        console.print(
            "learners share their records: these epsilons cover the messages of all learners", highlight=False
        )
    for finding in find_budget_warnings(build_run(found.spec, prepared.data.n_features), prepared.data):
        console.print(f"warning: {finding.text} [{finding.code}]", highlight=False, markup=False, soft_wrap=True)
    document = _replace_algorithm(source, spec.algorithm, found, out)
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


def _replace_algorithm(
    source: Path, before: AlgorithmSpec, found: CalibrationResult, out: Path | None
) -> dict[str, Any]:
    """Return the document of a file, with its schema inlined, and the changed parameters of the algorithm."""
    document: dict[str, Any] = dict(read_document(source))
    if out is not None:
        move_paths(document, Path(), out.parent)
    old, new = (each.model_dump(mode="json") for each in (before, found.spec.algorithm))
    algorithm = document["algorithm"]
    document["algorithm"] = ({"name": algorithm} if isinstance(algorithm, str) else algorithm) | {
        key: new[key] for key in new if new[key] != old[key]
    }
    return document


def parse_horizon(text: str | None) -> float | None:
    """Parse the rounds of `--horizon`: a number, `inf`, or None for all rounds of the run.

    Raises:
        SpecError: It has another form.
    """
    rounds = None if text is None else _parse_number("--horizon", text)
    if rounds is not None and rounds < math.inf and rounds != round(rounds):
        raise SpecError(f"--horizon must be a whole number of rounds, or inf, got {text}")
    return rounds


def parse_target(
    spec: RunSpec, wanted: Sequence[str], horizon: float | None, per: PrivacyUnit, delta: float = 0.0
) -> BudgetTarget:
    """Parse the options of the command.

    Args:
        spec: Run spec.
        wanted: `E` for every learner that is not named, or `NAME=E` for one.
        horizon: Rounds, or infinity; None: all.
        per: Unit of the budget, a record use or a record.
        delta: The epsilons are at this delta; 0: pure.

    Raises:
        SpecError: An option has another form, names no learner, or a learner has no target.
    """
    general = [each for each in wanted if "=" not in each]
    if len(general) > 1:
        raise SpecError(
            f"--target must be one epsilon for every learner, and NAME=E for others, got {', '.join(general)}"
        )
    targets: list[float | None] = [_parse_number("--target", general[0]) if general else None] * spec.n_learners
    named = set[int]()
    for each in wanted:
        name, equals, value = each.rpartition("=")
        if not equals:
            continue
        learner = find_learner_index(spec, name, "--target")
        if learner in named:
            raise SpecError(f"--target must name each learner once, got {name} twice")
        named.add(learner)
        targets[learner] = _parse_number("--target NAME=E", value)
    without = [name for name, target in zip(spec.names, targets, strict=True) if target is None]
    if without:
        raise SpecError(f"every learner needs a target, got none for {', '.join(without)}; give --target E")
    return BudgetTarget(tuple(target for target in targets if target is not None), horizon, per, delta)


def _parse_number(option: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if math.isnan(value):
        raise SpecError(f"{option} must be a number, got {text!r}")
    return value
