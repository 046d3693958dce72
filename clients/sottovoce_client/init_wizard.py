"""`sottovoce init`: a commented spec for a file of one's own, by questions or by options alone."""

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
"""What somebody answers to a question; the second text is the answer of whoever only presses Enter."""
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
    "no record is held out, so features are not scaled; rows are cut to norm 1: scale them, or declare a schema with "
    "bounds"
)


@dataclass(frozen=True, slots=True)
class InitOptions:
    """What the options of the command say; None: nothing was said.

    Attributes:
        file: of records.
        label: its label column.
        task: `classify` or `regress`.
        positive: labels that count as 1.
        label_bound: of a regression: what labels are clipped to.
        schema: a file that declares the fields.
        learners: how many, or names with commas.
        partition: one of `PARTITIONS`.
        scale: one of `SCALES`.
        epsilon: per record.
        rounds: at most so many.
        name: of the run.
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
    rounds: int | None = None
    name: str | None = None


@dataclass(frozen=True, slots=True)
class _Begun:
    """What was chosen.

    Attributes:
        spec: the run, with the source as the written file has it.
        text: the commented file.
        epsilon: of the dearest record, by the product's own accounting.
        records: that learners have, all together; and that nobody learns, at most, of each learner.
        notes: what else to know of the records and learners, a sentence each: why features are not scaled where nobody chose
            that, labels that are nearly the same, features with one value, a learner without neighbours.
    """

    spec: RunSpec
    text: str
    epsilon: float
    records: int
    unused_records: int
    notes: tuple[str, ...] = ()


def draft_spec(options: InitOptions, folder: Path, ask: QuestionCallback | None, say: Callable[[str], None]) -> _Begun:
    """Choose what was not said, by asking or as the file suggests, and make the spec.

    Args:
        wishes: what was said.
        folder: where the spec will lie: paths in it begin there.
        ask: somebody who answers; None: nobody does.
        say: shows a line to whoever answers.

    Raises:
        SpecError: an option does not fit, or no spec keeps the wish.
        DataError: the records cannot be used.
    """
    require_source_file(options.file)
    asking = _Asking(ask, say)
    data, loss, table = _reading(options, asking)
    document: dict[str, Any] = {"name": _name(options), "loss": loss, "data": data}
    document |= {"decision_set": {"kind": "l2_ball", "radius": _radius(loss)}}
    dataset = _loaded(document)
    document["learners"] = _learners(options, dataset, asking)
    placed, unscaled = dataset.learner is not None or dataset.round is not None, ""
    if dataset.learner is None:
        told = asking.one(
            "how records are dealt to learners", options.partition, "iid", tuple(PARTITIONS), "--partition"
        )
        data["partition"] = dict(PARTITIONS[told])
    elif options.partition is not None:
        raise SpecError("--partition must be left out: the column learner of the file says who has which records")
    if options.schema is None and (not placed or dataset.test is not None):
        data["scale"] = asking.one(
            "how features are scaled: by mean and deviation (standard) or range of held-out records, which nothing protects, or "
            "not at all (none)",
            options.scale,
            "standard",
            SCALES,
            "--scale",
        )
    elif options.scale not in (None, "none"):
        why = "a schema scales by its bounds" if options.schema else "no record of this file is held out"
        raise SpecError(f"--scale must be left out or none, for {why}, got {options.scale}")
    elif options.schema is None:
        unscaled = _UNSCALED
    epsilon = asking.number("epsilon per record: 1 is strict, 4 is loose", options.epsilon, _EPSILON, "--epsilon")
    rounds = int(
        asking.number(
            "rounds: fewer have larger batches, and cost less accuracy", options.rounds, DEFAULT_ROUNDS, "--rounds"
        )
    )
    document |= {"topology": {"graph": _graph(_many(document))}, "privacy": {"budget": epsilon}}
    document |= {"capture": "relay"} if _many(document) > 1 else {"capture": "none", "telemetry": {"predict": True}}
    spec = propose_spec(document, dataset, epsilon, rounds)
    shares = place_data(spec, dataset)
    spent = max(compute_epsilons(build_run(spec, shares.n_features), shares, unit="record"))
    left = max(len(own.labels) - int(own.offsets[-2]) for own in shares.learners)
    text = "\n".join(_lines(spec, options, folder, table, shares, (spent, left, unscaled))) + "\n"
    told = describe_similar_labels(dataset.class_names)
    notes = (
        unscaled,
        f"labels {told}" if told else "",
        "" if table is None else describe_constant_features(table),
        SINGLE_LEARNER_NOTE if spec.n_learners == 1 else "",
    )
    return _Begun(spec, text, spent, sum(len(own.labels) for own in shares.learners), left, tuple(filter(None, notes)))


# ---- what is asked -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Asking:
    """Whoever answers, or nobody."""

    ask: QuestionCallback | None
    say: Callable[[str], None]

    def settle(self, question: str, given: T | None, default: str, parsed: Callable[[str], T]) -> T:
        """What was said, or is answered, or is usual; who answers something else is asked again."""
        if given is not None:
            return given
        while self.ask is not None:
            try:
                return parsed(self.ask(question, default).strip())
            except SpecError as error:
                self.say(str(error))
        return parsed(default)

    def one(self, question: str, given: str | None, default: str, allowed: Sequence[str], option: str) -> str:
        """One of some words."""

        def parsed(text: str) -> str:
            if text not in allowed:
                raise SpecError(f"{option} must be one of {', '.join(allowed)}, got {text!r}")
            return text

        shown = question if list(allowed) == [default] else f"{question} ({abbreviate_names(allowed)})"
        return self.settle(shown, None if given is None else parsed(given), default, parsed)

    def number(self, question: str, given: float | None, default: float | None, option: str) -> float:
        """A number above 0."""

        def parsed(text: str) -> float:
            try:
                value = float(text)
            except ValueError:
                value = math.nan
            if not 0 < value < math.inf:
                advice = "" if text else f"; add {option} NUMBER"
                raise SpecError(f"{option} must be a finite number above 0, got {text!r}{advice}")
            return value

        usual = "" if default is None else f"{default:g}"
        return self.settle(question, None if given is None else parsed(str(given)), usual, parsed)


def _reading(wishes: InitOptions, asking: _Asking) -> tuple[dict[str, Any], dict[str, Any], RawTable | None]:
    """The sections `data` and `loss`, and the file as it is read without a schema."""
    data: dict[str, Any] = {"source": str(wishes.file)}
    if wishes.schema is not None:
        for option, given in (("--label", wishes.label), ("--label-bound", wishes.label_bound)):
            if given is not None:
                raise SpecError(f"{option} must be left out with --schema, which says what the label is")
        schema = load_schema(wishes.schema)
        data["schema"] = schema.model_dump(mode="json")
        classes = schema.label.classes
        asking.say(f"{pluralize(len(schema.features), 'field')}, label {schema.label.name!r}")
        task = "regress" if classes is None else "classify"
        if wishes.task not in (None, task):
            raise SpecError(f"--task must be {task}, for the schema's label is of type {schema.label.type}")
        return data, _loss(wishes, data, classes, 1.0, asking), None
    label = default = wishes.label
    if wishes.file.suffix.lower() != ".npz":
        names, guess, header = _columns(wishes.file, label)
        default = choose_label(names, None, "")
        asking.say(f"{pluralize(len(names), 'column')}: {abbreviate_names(names)}")
        if label is not None:
            choose_label(names, label, "--label must be one of the columns", header)
        label = asking.one("label column", label, guess, names, "--label")
        data["label"] = label
    usual = wishes.label is None and label == default  # which is no reason to take a first line for names
    table = read_source(DataSpec(source=str(wishes.file), label=None if usual else label))
    asking.say(f"{pluralize(len(table.labels), 'record')} of {pluralize(table.features.shape[1], 'feature')}")
    found = count_classes(table)
    asking.say(
        "labels are numbers"
        if found is None
        else f"labels: {abbreviate_names([f'{name} ({format_count(n)})' for name, n in found])}"
    )
    guess = "regress" if found is None else "classify"
    task = asking.one("task", wishes.task, guess, TASKS, "--task")
    labels = table.labels if table.test is None else np.concatenate([table.labels, table.test[1]])
    texts = None if task == "regress" else format_labels(np.unique(labels))
    return data, _loss(wishes, data, texts, None, asking), table


def _loss(
    wishes: InitOptions, data: dict[str, Any], classes: Sequence[str] | None, bound: float | None, asking: _Asking
) -> dict[str, Any]:
    """The section `loss`, and what counts as 1.

    Args:
        wishes: what was said.
        data: the section, which gets `positive`.
        classes: of the label, sorted; None: it is a number.
        bound: what numbers lie in; None: to be said.
        asking: whoever answers.
    """
    if classes is None:
        if wishes.positive is not None:
            raise SpecError("--positive must be left out where labels are numbers: it says which labels count as 1")
        if bound is None:
            bound = asking.number(
                "labels are clipped to plus and minus (a public bound, not one read off the records)",
                wishes.label_bound,
                None,
                "--label-bound",
            )
        return {"kind": "ridge", "ridge": 0.001, "label_bound": bound, "clip_norm": bound}
    if wishes.label_bound is not None:
        raise SpecError("--label-bound must be left out where labels are classes: it bounds those that are numbers")
    if len(classes) < 2:
        raise SpecError("there must be two labels to tell apart, got one alone; bring records of another class")
    if len(classes) > 2 and wishes.positive is None:
        return {"kind": "softmax", "ridge": 0.001, "feature_bound": 1.0, "classes": len(classes)}

    def parsed(text: str) -> tuple[str, ...]:
        chosen = tuple(resolve_class_name(part.strip(), classes) for part in text.split(","))
        if unknown := [each for each in chosen if each not in classes]:
            raise SpecError(f"--positive must name labels that occur, {abbreviate_names(classes)}, got {unknown[0]!r}")
        if len(set(chosen)) == len(classes):
            raise SpecError(f"--positive must name some of the labels {abbreviate_names(classes)}, not all")
        return chosen

    given = None if wishes.positive is None else parsed(",".join(wishes.positive))
    positive = asking.settle(f"which label counts as 1 ({abbreviate_names(classes)})", given, classes[-1], parsed)
    data["positive"] = [_as_number(each) for each in positive]
    return {"kind": "logistic", "ridge": 0.001, "feature_bound": 1.0}


def _as_number(text: str) -> int | str:
    return int(text) if re.fullmatch(r"-?\d{1,15}", text) and str(int(text)) == text else text


def _columns(path: Path, label: str | None) -> tuple[list[str], str, str | None]:
    """Names of columns that may be the label, which of them probably is, and why these are names."""
    kinds, header = read_names(path, label)
    names = [name for name in kinds if name not in PLACEMENT_COLUMNS]
    if not names:
        raise SpecError(f"{path} must have a label column and a feature column, got none")
    words = [name for name in names if kinds[name]]
    if "label" in names or "y" in names or len(words) != 1:
        return names, choose_label(names, None, ""), header
    return names, words[0], header


def _loaded(document: Mapping[str, Any]) -> Dataset:
    spec = parse_spec({"rounds": 1, "algorithm": "ldp-dol", **document}, allow_imports=False)
    return load_dataset(spec.data, spec.loss)


def _learners(wishes: InitOptions, dataset: Dataset, asking: _Asking) -> int | list[str]:
    def parsed(text: str) -> int | list[str]:
        if text.isascii() and text.isdigit() and 0 < int(text) <= len(dataset.labels):
            return int(text)
        names = [part.strip() for part in text.split(",")]
        if all(names) and not names[0].isdigit():
            return names
        raise SpecError(
            f"--learners must be how many, at most one for each of {format_count(len(dataset.labels))} records, or names with commas "
            f"between them, got {text!r}"
        )

    if dataset.learner is not None and wishes.learners is None:
        if dataset.learner_names is not None:
            return list(dataset.learner_names)
        return int(dataset.learner.max()) + 1
    if wishes.learners is not None:
        return parsed(wishes.learners)
    usual = str(_LEARNERS)
    return asking.settle("learners: how many, or their names with commas", None, usual, parsed)


def _many(document: Mapping[str, Any]) -> int:
    learners = document["learners"]
    return learners if isinstance(learners, int) else len(learners)


def _graph(learners: int) -> str:
    return "ring" if learners > 2 else "complete"


def _radius(loss: Mapping[str, Any]) -> float:
    """Of the ball of models: rows have norm 1, so scores reach it."""
    return max(_RADIUS, 2.0 * float(loss.get("label_bound", 0.0)))


def _name(wishes: InitOptions) -> str:
    if wishes.name is not None:
        return wishes.name
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", wishes.file.stem).strip("-._")
    return plain[:63] or "run"


# ---- what is written ---------------------------------------------------------------------------------------------------


def _lines(
    spec: RunSpec,
    wishes: InitOptions,
    folder: Path,
    table: RawTable | None,
    shares: PlacedData,
    found: tuple[float, int, str],
) -> Iterator[str]:
    """The file, line by line.

    Args:
        spec: the run.
        wishes: what was said.
        folder: where the file will lie.
        table: the records without a schema.
        shares: who learns which.
        found: epsilon of the dearest record; the most records of a learner that no message shows; why features are not scaled,
            where nobody chose that.
    """
    (spent, left, unscaled), wished, held = found, spec.privacy.budget, len(shares.test_labels)
    document = spec.model_dump(mode="json", exclude_defaults=True)
    noise = document["algorithm"]["noise"]["epsilon"] if "noise" in document["algorithm"] else 1.0
    own = [len(each.labels) for each in shares.learners]
    least, most = min(own), max(own)
    have = format_count(least) if least == most else f"{format_count(least)} to {format_count(most)}"
    yield f"# Written by `sottovoce init` for {wishes.file.name}. What each field means: docs/spec.md."
    yield f"# One record, which is learned once, costs epsilon {format_number(spent)} at most, of {wished:g} that were wished."
    yield "# The promise is pure: it holds at delta 0, and so at any other delta."
    yield "#"
    yield "# Next:"
    for command in list_next_commands("THIS_FILE"):
        yield f"#   {command}"
    yield ""
    yield f"name: {_flow(spec.name)}"
    yield f"rounds: {spec.rounds}  # fewer have larger batches, whose noise is smaller; more follow a stream that changes"
    yield f"learners: {_flow(document.get('learners', spec.n_learners))}"
    yield ""
    yield "# PD-OGD: a record shows in one message, and its noise is in proportion to what one record of a batch can move."
    yield "# The public mix of messages is the model (play: mixed), so what it predicts tells no more than they do."
    yield "algorithm:"
    yield "  name: pd-ogd"
    yield "  play: mixed"
    batch = spec.data.batch_size
    yield f"  # what a record alone in its batch would cost; here {batch} share a round, and the message that shows them"
    yield f"  noise: {{kind: calibrated, epsilon: {_flow(noise)}}}"
    yield ""
    yield "# Every row is scaled to norm 1 at most: what a record can move is bounded whatever it says."
    yield f"loss: {_flow(_loss_document(spec))}"
    yield f"decision_set: {_flow({'kind': 'l2_ball', 'radius': spec.decision_set.largest_norm(1)})}"
    yield f"topology: {_flow({'graph': _graph(spec.n_learners)})}"
    yield ""
    yield f"# {have} records for each learner."
    yield "data:"
    yield f"  source: {_flow(_relative(wishes.file, folder))}"
    if wishes.schema is not None:
        yield f"  schema: {_flow(_relative(wishes.schema, folder))}"
    if spec.data.label is not None:
        yield f"  label: {_flow(spec.data.label)}"
    if spec.data.positive is not None:
        yield f"  positive: {_flow(list(spec.data.positive))}  # counts as 1, all others as 0"
    if "partition" in document["data"] or (table is not None and table.learner is None):
        yield f"  partition: {_flow(document['data'].get('partition', {'kind': 'iid'}))}"
    if not (table is not None and table.round is not None):
        yield f"  batch_size: {batch}  # all batches are full, for one of few records would cost more"
        if left:
            yield f"  # so of a learner's records up to {format_count(left)} are not learned"
    yield "  reuse: false  # each record once"
    if held:
        yield f"  # {format_count(held)} records are held out, for accuracy and the constants of scale. Nothing protects these."
    if unscaled:
        yield f"  # {unscaled}"
    if wishes.schema is None:
        yield f"  scale: {spec.data.scale}"
    yield ""
    yield f"privacy: {{budget: {_flow(wished)}}}  # a learner that would exceed it stops speaking"
    yield f"capture: {spec.capture}  # relay: an eavesdropper stands on every edge, for an audit; none: nobody does"
    if spec.telemetry.predict:
        yield "# Nothing is overheard of a single learner: its answers give the accuracy."
    else:
        yield "# For `sottovoce predict`. Accuracy on held-out records does without: it is measured from the capture."
    off = "" if spec.telemetry.predict else "# "
    yield f"{off}telemetry: {{predict: true}}  # a policy allows it by `telemetry: [predict]` (`sottovoce policy`)"


def list_next_commands(spec: str) -> tuple[str, ...]:
    """What to do with a spec, in this order."""
    return (
        f"sottovoce spec check {spec}             # how the records are read: columns, what is 1",
        f"sottovoce budget {spec}                 # what is promised, to whom, and on what it rests",
        f"sottovoce simulate {spec}               # what it comes to, without services",
        f"sottovoce up {spec}                     # all services on this machine",
    )


def _loss_document(spec: RunSpec) -> dict[str, Any]:
    return spec.loss.model_dump(mode="json", exclude_none=True, exclude={"history", "score_bound"})


def _relative(path: Path, folder: Path) -> str:
    if path.is_absolute():
        return str(path)
    return os.path.relpath(path, folder)


def _flow(value: Any) -> str:
    """A value on one line of YAML."""
    return write_yaml(value, flow=True).removesuffix("\n")
