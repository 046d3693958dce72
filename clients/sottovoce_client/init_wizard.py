"""`sottovoce init`: write a commented spec for a file of records, interactively or from options alone."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from sottovoce_client.data.catalogue import count_classes, describe_constant_features
from sottovoce_client.formatting import SINGLE_LEARNER_NOTE, format_count, format_number, pluralize
from sottovoce_core.budget.calibration import DEFAULT_ROUNDS, compute_epsilons, propose_spec
from sottovoce_core.data.columns import choose_label, read_names
from sottovoce_core.data.dataset import Dataset, load_dataset, read_source, require_source_file
from sottovoce_core.data.encoding import describe_similar_labels, format_labels, resolve_class_name
from sottovoce_core.data.files import PLACEMENT_COLUMNS, RawTable
from sottovoce_core.data.schedule import PlacedData
from sottovoce_core.data.spec import DataSpec
from sottovoce_core.errors import SpecError
from sottovoce_core.runs.placement import place_data
from sottovoce_core.runs.run import build_run
from sottovoce_core.spec import RunSpec, load_schema, parse_spec
from sottovoce_core.text import abbreviate_names
from sottovoce_core.yaml_files import write_yaml

QuestionCallback = Callable[[str, str], str]
"""Function that asks a question: (question, default answer) -> answer."""
T = TypeVar("T")

_EPSILON = 2.0
_LEARNERS = 5
_RADIUS = 20.0
PARTITIONS: Mapping[str, Mapping[str, Any]] = {
    "iid": {"kind": "iid"},
    "by_label": {"kind": "by_label", "iid_fraction": 0.3},
}
SCALES = ("standard", "range", "none")
TASKS = ("classify", "regress")
_UNSCALED = (
    "no record is held out, so features are not scaled; rows are clipped to norm 1: scale them, or declare a schema with "
    "bounds"
)


@dataclass(frozen=True, slots=True)
class InitOptions:
    """Options of the command; None: not given.

    Attributes:
        file: File of records.
        label: Label column.
        task: `classify` or `regress`.
        positive: Labels that count as 1.
        label_bound: Bound to which the labels of a regression are clipped.
        schema: File that declares the fields.
        learners: Number of learners, or names with commas.
        partition: Key of `PARTITIONS`.
        scale: One of `SCALES`.
        epsilon: Epsilon per record.
        delta: Delta of epsilon; 0: it is pure.
        rounds: Maximum number of rounds.
        name: Name of the run.
    """

    file: Path
    label: str | None = None
    task: str | None = None
    positive: tuple[str, ...] | None = None
    label_bound: float | None = None
    schema: Path | None = None
    learners: str | None = None
    partition: str | None = None
    scale: str | None = None
    epsilon: float | None = None
    delta: float = 0.0
    rounds: int | None = None
    name: str | None = None


@dataclass(frozen=True, slots=True)
class _SpecDraft:
    """A drafted spec.

    Attributes:
        spec: The run spec, with the source as in the written file.
        text: Commented file.
        epsilon: Epsilon of the most costly record, by the accounting of the product.
        records: Number of records of all learners.
        unused_records: Maximum number of records of a learner that no round uses.
        notes: Notes on the records and learners, a sentence each: unscaled features, labels that are nearly the same,
            constant features, a learner without neighbours.
    """

    spec: RunSpec
    text: str
    epsilon: float
    records: int
    unused_records: int
    notes: tuple[str, ...] = ()


def draft_spec(
    options: InitOptions, folder: Path, ask: QuestionCallback | None, show: Callable[[str], None]
) -> _SpecDraft:
    """Draft a spec; missing options are asked for, or chosen to fit the file.

    Args:
        options: The given options.
        folder: Folder of the spec, to which its paths are relative.
        ask: Function that asks the user; None: not interactive.
        show: Function that shows a line to the user.

    Raises:
        SpecError: An option does not fit, or no spec keeps the epsilon.
        DataError: The records cannot be used.
    """
    require_source_file(options.file)
    dialogue = _Dialogue(ask, show)
    data, loss, table = _choose_data(options, dialogue)
    document: dict[str, Any] = {"name": _choose_name(options), "loss": loss, "data": data}
    document |= {"decision_set": {"kind": "l2_ball", "radius": _choose_radius(loss)}}
    dataset = _load_dataset(document)
    document["learners"] = _choose_learners(options, dataset, dialogue)
    placed, unscaled = dataset.learner is not None or dataset.round is not None, ""
    if dataset.learner is None:
        partition = dialogue.choose(
            "distribution of records among learners", options.partition, "iid", tuple(PARTITIONS), "--partition"
        )
        data["partition"] = dict(PARTITIONS[partition])
    elif options.partition is not None:
        raise SpecError("--partition must be left out: the column learner of the file assigns the records to learners")
    if options.schema is None and (not placed or dataset.test is not None):
        data["scale"] = dialogue.choose(
            "scaling of features: by mean and deviation (standard) or range of held-out records, which are not protected, or "
            "none",
            options.scale,
            "standard",
            SCALES,
            "--scale",
        )
    elif options.scale not in (None, "none"):
        reason = "a schema scales by its bounds" if options.schema else "no record of this file is held out"
        raise SpecError(f"--scale must be left out or none, because {reason}, got {options.scale}")
    elif options.schema is None:
        unscaled = _UNSCALED
    epsilon = dialogue.choose_number(
        "epsilon per record: 1 is strict, 4 is loose", options.epsilon, _EPSILON, "--epsilon"
    )
    rounds = int(
        dialogue.choose_number(
            "rounds: fewer have larger batches, and cost less accuracy", options.rounds, DEFAULT_ROUNDS, "--rounds"
        )
    )
    n_learners = _count_learners(document)
    document |= {
        "topology": {"graph": _choose_graph(n_learners)},
        "privacy": {"budget": epsilon, "delta": options.delta},
    }
    document |= {"capture": "relay"} if n_learners > 1 else {"capture": "none", "telemetry": {"predict": True}}
    spec = propose_spec(document, dataset, epsilon, rounds, delta=options.delta)
    placement = place_data(spec, dataset)
    spent = max(compute_epsilons(build_run(spec, placement.n_features), placement, "record", options.delta))
    unused = max(len(own.labels) - int(own.offsets[-2]) for own in placement.learners)
    text = "\n".join(_lines(spec, options, folder, table, placement, (spent, unused, unscaled))) + "\n"
    similar = describe_similar_labels(dataset.class_names)
    notes = (
        unscaled,
        f"labels {similar}" if similar else "",
        "" if table is None else describe_constant_features(table),
        SINGLE_LEARNER_NOTE if spec.n_learners == 1 else "",
    )
    records = sum(len(own.labels) for own in placement.learners)
    return _SpecDraft(spec, text, spent, records, unused, tuple(filter(None, notes)))


# ---- questions ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Dialogue:
    """Questions to the user; `ask` is None if the command is not interactive."""

    ask: QuestionCallback | None
    show: Callable[[str], None]

    def settle(self, question: str, given: T | None, default: str, parse: Callable[[str], T]) -> T:
        """Return the given value, else the user's answer, else the default; an invalid answer is asked again."""
        if given is not None:
            return given
        while self.ask is not None:
            try:
                return parse(self.ask(question, default).strip())
            except SpecError as error:
                self.show(str(error))
        return parse(default)

    def choose(self, question: str, given: str | None, default: str, allowed: Sequence[str], option: str) -> str:
        """Choose one of the allowed values."""

        def parse(text: str) -> str:
            if text not in allowed:
                raise SpecError(f"{option} must be one of {', '.join(allowed)}, got {text!r}")
            return text

        text = question if list(allowed) == [default] else f"{question} ({abbreviate_names(allowed)})"
        return self.settle(text, None if given is None else parse(given), default, parse)

    def choose_number(self, question: str, given: float | None, default: float | None, option: str) -> float:
        """Choose a finite number above 0."""

        def parse(text: str) -> float:
            try:
                value = float(text)
            except ValueError:
                value = math.nan
            if not 0 < value < math.inf:
                advice = "" if text else f"; add {option} NUMBER"
                raise SpecError(f"{option} must be a finite number above 0, got {text!r}{advice}")
            return value

        text = "" if default is None else f"{default:g}"
        return self.settle(question, None if given is None else parse(str(given)), text, parse)


def _choose_data(options: InitOptions, dialogue: _Dialogue) -> tuple[dict[str, Any], dict[str, Any], RawTable | None]:
    """Choose the sections `data` and `loss`; return them, and the table of the file if there is no schema."""
    data: dict[str, Any] = {"source": str(options.file)}
    if options.schema is not None:
        for option, given in (("--label", options.label), ("--label-bound", options.label_bound)):
            if given is not None:
                raise SpecError(f"{option} must be left out with --schema, which defines the label")
        schema = load_schema(options.schema)
        data["schema"] = schema.model_dump(mode="json")
        classes = schema.label.classes
        dialogue.show(f"{pluralize(len(schema.features), 'field')}, label {schema.label.name!r}")
        task = "regress" if classes is None else "classify"
        if options.task not in (None, task):
            raise SpecError(
                f"--task must be {task}, because the schema's label is of type {schema.label.type}, got {options.task}"
            )
        return data, _choose_loss(options, data, classes, 1.0, dialogue), None
    label = default = options.label
    if options.file.suffix.lower() != ".npz":
        names, guess, header = _read_columns(options.file, label)
        default = choose_label(names, None, "")
        dialogue.show(f"{pluralize(len(names), 'column')}: {abbreviate_names(names)}")
        if label is not None:
            choose_label(names, label, "--label must be one of the columns", header)
        label = dialogue.choose("label column", label, guess, names, "--label")
        data["label"] = label
    is_default = options.label is None and label == default  # a default label does not prove that line 1 has names
    table = read_source(DataSpec(source=str(options.file), label=None if is_default else label))
    dialogue.show(f"{pluralize(len(table.labels), 'record')} of {pluralize(table.features.shape[1], 'feature')}")
    found = count_classes(table)
    dialogue.show(
        "labels are numbers"
        if found is None
        else f"labels: {abbreviate_names([f'{name} ({format_count(n)})' for name, n in found])}"
    )
    guess = "regress" if found is None else "classify"
    task = dialogue.choose("task", options.task, guess, TASKS, "--task")
    labels = table.labels if table.test is None else np.concatenate([table.labels, table.test[1]])
    texts = None if task == "regress" else format_labels(np.unique(labels))
    return data, _choose_loss(options, data, texts, None, dialogue), table


def _choose_loss(
    options: InitOptions,
    data: dict[str, Any],
    classes: Sequence[str] | None,
    bound: float | None,
    dialogue: _Dialogue,
) -> dict[str, Any]:
    """Choose the section `loss`, and the positive classes.

    Args:
        options: The given options.
        data: Section `data`, to which `positive` is added.
        classes: Sorted classes of the label; None: it is a number.
        bound: Absolute bound of numeric labels; None: to be chosen.
        dialogue: Questions to the user.
    """
    if classes is None:
        if options.positive is not None:
            raise SpecError("--positive must be left out if labels are numbers: it selects the classes that count as 1")
        if bound is None:
            bound = dialogue.choose_number(
                "labels are clipped to plus and minus (a public bound, not one computed from the records)",
                options.label_bound,
                None,
                "--label-bound",
            )
        return {"kind": "ridge", "ridge": 0.001, "label_bound": bound, "clip_norm": bound}
    if options.label_bound is not None:
        raise SpecError("--label-bound must be left out if labels are classes: it bounds numeric labels")
    if len(classes) < 2:
        raise SpecError("there must be at least two classes, got one: add records of another class")
    if len(classes) > 2 and options.positive is None:
        return {"kind": "softmax", "ridge": 0.001, "feature_bound": 1.0, "classes": len(classes)}

    def parse(text: str) -> tuple[str, ...]:
        chosen = tuple(resolve_class_name(part.strip(), classes) for part in text.split(","))
        if unknown := [each for each in chosen if each not in classes]:
            raise SpecError(f"--positive must name labels that occur, {abbreviate_names(classes)}, got {unknown[0]!r}")
        if len(set(chosen)) == len(classes):
            raise SpecError(f"--positive must name some of the labels {abbreviate_names(classes)}, not all")
        return chosen

    given = None if options.positive is None else parse(",".join(options.positive))
    positive = dialogue.settle(f"which label counts as 1 ({abbreviate_names(classes)})", given, classes[-1], parse)
    data["positive"] = [_parse_integer(each) for each in positive]
    return {"kind": "logistic", "ridge": 0.001, "feature_bound": 1.0}


def _parse_integer(text: str) -> int | str:
    return int(text) if re.fullmatch(r"-?\d{1,15}", text) and str(int(text)) == text else text


def _read_columns(path: Path, label: str | None) -> tuple[list[str], str, str | None]:
    """Return the possible label columns, the most likely one, and the reason why the first line is taken as names."""
    kinds, header = read_names(path, label)
    names = [name for name in kinds if name not in PLACEMENT_COLUMNS]
    if not names:
        raise SpecError(f"{path} must have a label column and a feature column, got none")
    text_columns = [name for name in names if kinds[name]]
    if "label" in names or "y" in names or len(text_columns) != 1:
        return names, choose_label(names, None, ""), header
    return names, text_columns[0], header


def _load_dataset(document: Mapping[str, Any]) -> Dataset:
    spec = parse_spec({"rounds": 1, "algorithm": "ldp-dol", **document}, allow_imports=False)
    return load_dataset(spec.data, spec.loss)


def _choose_learners(options: InitOptions, dataset: Dataset, dialogue: _Dialogue) -> int | list[str]:
    def parse(text: str) -> int | list[str]:
        if text.isascii() and text.isdigit() and 0 < int(text) <= len(dataset.labels):
            return int(text)
        names = [part.strip() for part in text.split(",")]
        if all(names) and not names[0].isdigit():
            return names
        raise SpecError(
            f"--learners must be a number, at most one for each of {format_count(len(dataset.labels))} records, or names with "
            f"commas between them, got {text!r}"
        )

    if dataset.learner is not None and options.learners is None:
        if dataset.learner_names is not None:
            return list(dataset.learner_names)
        return int(dataset.learner.max()) + 1
    if options.learners is not None:
        return parse(options.learners)
    return dialogue.settle("learners: number, or names separated by commas", None, str(_LEARNERS), parse)


def _count_learners(document: Mapping[str, Any]) -> int:
    learners = document["learners"]
    return learners if isinstance(learners, int) else len(learners)


def _choose_graph(learners: int) -> str:
    return "ring" if learners > 2 else "complete"


def _choose_radius(loss: Mapping[str, Any]) -> float:
    """Return the radius of the ball of models, which bounds the scores because rows have norm 1."""
    return max(_RADIUS, 2.0 * float(loss.get("label_bound", 0.0)))


def _choose_name(options: InitOptions) -> str:
    if options.name is not None:
        return options.name
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", options.file.stem).strip("-._")
    return name[:63] or "run"


# ---- the written file --------------------------------------------------------------------------------------------------


def _lines(
    spec: RunSpec,
    options: InitOptions,
    folder: Path,
    table: RawTable | None,
    placement: PlacedData,
    found: tuple[float, int, str],
) -> Iterator[str]:
    """Yield the lines of the file.

    Args:
        spec: The run spec.
        options: The given options.
        folder: Folder of the file.
        table: Table of the records; None: with a schema.
        placement: Records of each learner.
        found: Epsilon of the most costly record; maximum number of unused records of a learner; reason why features are not
            scaled, if that was not chosen.
    """
    (spent, unused, unscaled), budget, held_out = found, spec.privacy.budget, len(placement.test_labels)
    document = spec.model_dump(mode="json", exclude_defaults=True)
    noise = document["algorithm"]["noise"]["epsilon"] if "noise" in document["algorithm"] else 1.0
    own = [len(each.labels) for each in placement.learners]
    low, high = min(own), max(own)
    counts = format_count(low) if low == high else f"{format_count(low)} to {format_count(high)}"
    yield f"# Written by `sottovoce init` for {options.file.name}. All fields are described in docs/reference/spec.md."
    yield f"# One record is learned once and costs at most epsilon {format_number(spent)}, of the requested {budget:g}."
    if spec.privacy.delta:
        yield f"# The guarantee is approximate differential privacy, at delta {spec.privacy.delta:g}."
    else:
        yield "# The guarantee is pure differential privacy: it holds at delta 0, and so at any other delta."
    yield "#"
    yield "# Next:"
    for command in list_next_commands("THIS_FILE"):
        yield f"#   {command}"
    yield ""
    yield f"name: {_flow(spec.name)}"
    yield f"rounds: {spec.rounds}  # fewer rounds have larger batches and less noise; more rounds follow a changing stream"
    yield f"learners: {_flow(document.get('learners', spec.n_learners))}"
    yield ""
    yield "# PD-OGD: a record affects one message, and the noise is proportional to the effect of one record of a batch."
    yield "# The model is the public mix of messages (play: mixed), so its predictions reveal no more than the messages."
    yield "algorithm:"
    yield "  name: pd-ogd"
    yield "  play: mixed"
    batch = spec.data.batch_size
    yield f"  # the cost of a record that is alone in its batch; here {batch} records share a round and its message"
    yield f"  noise: {{kind: calibrated, epsilon: {_flow(noise)}}}"
    yield ""
    yield "# Every row is clipped to norm 1, which bounds the effect of any record."
    yield f"loss: {_flow(_loss_document(spec))}"
    yield f"decision_set: {_flow({'kind': 'l2_ball', 'radius': spec.decision_set.largest_norm(1)})}"
    yield f"topology: {_flow({'graph': _choose_graph(spec.n_learners)})}"
    yield ""
    yield f"# {counts} records for each learner."
    yield "data:"
    yield f"  source: {_flow(_relative(options.file, folder))}"
    if options.schema is not None:
        yield f"  schema: {_flow(_relative(options.schema, folder))}"
    if spec.data.label is not None:
        yield f"  label: {_flow(spec.data.label)}"
    if spec.data.positive is not None:
        yield f"  positive: {_flow(list(spec.data.positive))}  # count as 1, all others as 0"
    if "partition" in document["data"] or (table is not None and table.learner is None):
        yield f"  partition: {_flow(document['data'].get('partition', {'kind': 'iid'}))}"
    if not (table is not None and table.round is not None):
        yield f"  batch_size: {batch}  # all batches are full, because a smaller batch costs more privacy"
        if unused:
            yield f"  # so up to {format_count(unused)} records of a learner are not used"
    yield "  reuse: false  # each record is used once"
    if held_out:
        yield f"  # {format_count(held_out)} records are held out, not protected: for accuracy and the constants of scale."
    if unscaled:
        yield f"  # {unscaled}"
    if options.schema is None:
        yield f"  scale: {spec.data.scale.kind}"
    yield ""
    privacy = {"budget": budget, **({"delta": spec.privacy.delta} if spec.privacy.delta else {})}
    yield f"privacy: {_flow(privacy)}  # a learner that would exceed it stops sending"
    yield f"capture: {spec.capture}  # relay: an eavesdropper records every edge, for an audit; none: no capture"
    if spec.telemetry.predict:
        yield "# A single learner sends no messages to capture: its predictions give the accuracy."
    else:
        yield "# For `sottovoce predict`. Accuracy on held-out records needs no predictions: it is measured from the capture."
    off = "" if spec.telemetry.predict else "# "
    yield f"{off}telemetry: {{predict: true}}  # a policy allows it by `telemetry: [predict]` (`sottovoce policy`)"


def list_next_commands(spec: str) -> tuple[str, ...]:
    """Return the next commands for a spec, in their order."""
    return (
        f"sottovoce spec check {spec}             # check how the records are read: columns, positive classes",
        f"sottovoce budget {spec}                 # show the privacy guarantee and its assumptions",
        f"sottovoce simulate {spec}               # simulate the run without services",
        f"sottovoce up {spec}                     # run all services on this machine",
    )


def _loss_document(spec: RunSpec) -> dict[str, Any]:
    return spec.loss.model_dump(mode="json", exclude_none=True, exclude={"history", "score_bound"})


def _relative(path: Path, folder: Path) -> str:
    if path.is_absolute():
        return str(path)
    return os.path.relpath(path, folder)


def _flow(value: Any) -> str:
    """Format a value on one line of YAML."""
    return write_yaml(value, flow=True).removesuffix("\n")
