"""What of a run's records its owner should know before believing its numbers: they end early, or their labels tell little."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from sottovoce.algorithms.setting import Caveat
from sottovoce.data.dataset import Dataset
from sottovoce.data.schedule import PlacedData
from sottovoce.network.roster import in_short
from sottovoce.spec import RunSpec

_FEW = 0.01
"""Share of the rounds that a learner may be without records at the end: so far records that are dealt evenly differ."""
_SHOWN = 12
"""Labels that are listed."""


def cautions(spec: RunSpec, dataset: Dataset, data: PlacedData) -> Iterator[Caveat]:
    """None of them makes a run unsafe, or costs anything.

    Args:
        spec: of the run.
        dataset: its records, before anybody got any of them.
        data: who learns what when.
    """
    yield from _ended(spec, dataset, data)
    yield from _classes(spec, dataset, data)


def _ended(spec: RunSpec, dataset: Dataset, data: PlacedData) -> Iterator[Caveat]:
    """Learners that are there after their last record has been learned."""
    dealt = dataset.round is None  # by us: else the file says when, and who pauses may do so to the end
    if dealt and spec.data.batch_size == "all":
        return  # which says that they all come at first
    short = dict[int, int]()
    for i, own in enumerate(data.learners):
        last = int(np.searchsorted(own.offsets, own.offsets[-1]))  # rounds until all are learned
        idle = np.count_nonzero(spec.roster.attendance(i, spec.rounds).mask()[last:])
        if idle > max(1, _FEW * spec.rounds):  # the last round shows in no message, and `init` may leave it empty
            short[i] = last
    if not short or (not dealt and len(short) < spec.n_learners):
        return
    least, most = min(short.values()), max(short.values())
    if least == most and len(short) == spec.n_learners:
        lasting, rounds = f"{least}", "at every learner"
    else:
        told = [f"{spec.names[i]} ({last})" for i, last in sorted(short.items(), key=lambda each: each[1])]
        lasting, rounds = f"{least}" if least == most else f"{least} to {most}", f"at {in_short(told)}"
    instead = ", take a smaller data.batch_size, or data.reuse: true, which costs more epsilon" if dealt else ""
    yield Caveat(
        "RECORDS_END",
        f"the records last {lasting} of {spec.rounds} rounds {rounds}: after that nothing more is learned from them, and "
        f"average_loss is over the rounds that bring records: set rounds to at most {most}{instead}",
    )


def _classes(spec: RunSpec, dataset: Dataset, data: PlacedData) -> Iterator[Caveat]:
    """Labels that a loss of two classes puts together, and those that are all the same."""
    loss, texts = spec.loss, dataset.class_names
    if loss.n_classes is None or dataset.classes is None or not texts:
        return
    labels = np.concatenate([*(own.labels for own in data.learners), data.test_labels])
    if (labels == labels[0]).all():
        only = texts[int(dataset.classes[0])]
        yield Caveat(
            "ONE_CLASS",
            f"all records have the same class ({only}): there is nothing to tell apart, and an accuracy near 1 is no merit; "
            "bring records of another class",
        )
    elif loss.binary and spec.data.positive is None and len(texts) > 2:
        yield Caveat(
            "CLASSES_JOINED",
            f"{len(texts)} labels under the {loss.kind} loss, which has two classes: {_read_as(texts, dataset)}; take loss: "
            f"{{kind: softmax, classes: {len(texts)}}}, or name in data.positive those that count as 1",
        )


def _read_as(texts: Sequence[str], dataset: Dataset) -> str:
    found, first = np.unique(dataset.classes if dataset.classes is not None else (), return_index=True)
    read = [f"{texts[int(k)]} is {dataset.labels[at]:g}" for k, at in zip(found, first, strict=True)]
    return ", ".join(read[:_SHOWN]) + (", ..." if len(read) > _SHOWN else "")
