"""Labels as a source has them, mapped to the domain of the loss."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from sottovoce.arrays import FloatArray, IntArray, as_floats
from sottovoce.data.cells import normal
from sottovoce.data.files import AnyArray
from sottovoce.data.typed import truth_of
from sottovoce.errors import DataError, SpecError
from sottovoce.losses import Loss

_SHOWN = 12
"""How many labels an error message lists."""
_TRUTHS = {"yes", "no", "on", "off", "true", "false"}


def map_labels(
    labels: AnyArray, loss: Loss, positive: tuple[int | str, ...] | None, *, meant: bool = True
) -> tuple[FloatArray, IntArray]:
    """Labels in the domain of the loss, and the class of each record.

    Squared losses: numbers as they are. Many classes: the class, its rank among the sorted labels. Logistic and hinges: 1 for
    a label in `positive`, else 0; by default the later half of the k sorted labels is positive (with an odd k the middle one
    is not), so of two labels the second. Of a file with one label, `positive` must say it, unless that is 0 or 1.

    Args:
        labels: `(records,)`, finite numbers or text.
        loss: the loss of the run.
        positive: labels that count as 1.
        meant: whether anybody learns from them. Else the only label of a file is 0 where nothing says which it is.

    Returns:
        Mapped labels `(records,)`, and classes `(records,)`: the rank of the original label among the distinct ones.

    Raises:
        DataError: labels of a squared loss are not numbers, or those of two classes all the same, and nothing says which.
        SpecError: `positive` names a label that does not occur, or all of them; or there are more labels than classes.
    """
    distinct, classes = np.unique(labels, return_inverse=True)
    classes = classes.astype(np.int64)
    if loss.n_classes is None:
        if labels.dtype.kind != "f":
            raise DataError(
                f"labels of the {loss.kind} loss must be numbers, got text{_told(labels, distinct)}; choose another label or a "
                "loss of classes"
            )
        return as_floats(labels), classes
    if loss.binary and len(distinct) < 2:
        only = texts_of(distinct)[0]
        known = meant or positive is not None or only in ("0", "1")
        return np.full(len(labels), _of_one(only, loss, positive, many=len(labels) > 1) if known else 0.0), classes
    few = _told(labels, distinct)
    return class_labels(texts_of(distinct), loss, positive, "that occur", shown=bool(few))[classes], classes


def _told(labels: AnyArray, distinct: AnyArray) -> str:
    """Labels for an error, where they are a few classes; empty: they may tell of single records, and nothing quotes them."""
    few = len(distinct) <= _SHOWN and 2 * len(distinct) <= len(labels)
    return f": {_listed(texts_of(distinct))}" if few else ""


def _core(text: str) -> str:
    """A label without what is easily written differently: case, blanks, a final dot."""
    return " ".join(normal(text).rstrip(". ").split()).casefold()


def alike(texts: Iterable[str]) -> str:
    """Labels that differ by case, blanks or a final dot alone, in words; empty: none do."""
    kinds: dict[str, list[str]] = {}
    for text in texts:
        kinds.setdefault(_core(text), []).append(text)
    same = [" and ".join(map(repr, kind)) for kind in kinds.values() if len(kind) > 1]
    return (
        f"{'; '.join(same[:_SHOWN])} differ by case, blanks or a final dot alone: write them alike if they are one"
        if same
        else ""
    )


def near(text: str, declared: Iterable[str]) -> str | None:
    """The declared label that a word differs from by case, blanks or a final dot alone; None: there is none."""
    return next((each for each in declared if _core(each) == _core(text)), None)


def _of_one(only: str, loss: Loss, positive: tuple[int | str, ...] | None, *, many: bool) -> float:
    """What the label of all records counts as, where they have one only: as `positive` says, or it is 0 or 1 itself.

    Raises:
        DataError: nothing says it.
    """
    if positive is not None:
        return float(only in map(str, positive))
    if only in ("0", "1"):
        return float(only)
    need = f"the {loss.kind} loss needs two labels, got"
    if not many:  # the label of a single record is not quoted
        raise DataError(f"{need} a single record: name in data.positive what counts as 1")
    raise DataError(
        f"{need} only {only}: name in data.positive what counts as 1 (if it is another one, {only} counts as 0)"
    )


def class_named(told: str, texts: Sequence[str]) -> str:
    """The label that a word means: itself, else in another case, else of a true and a false one the one that it says.

    Args:
        told: `yes`, say.
        texts: the labels that there are, as words.

    Returns:
        One of them; `told` where it means none, or several.
    """
    if told in texts:
        return told
    if len(same := [text for text in texts if text.casefold() == told.casefold()]) == 1:
        return same[0]
    truths = {truth_of(text): text for text in texts} if len(texts) == 2 else {}
    return truths.get(truth_of(told), told) if truths.keys() == {True, False} else told


def class_labels(
    classes: Sequence[str],
    loss: Loss,
    positive: tuple[int | str, ...] | None,
    these: str = "that are declared",
    *,
    shown: bool = True,
) -> FloatArray:
    """What each of some classes is in the domain of the loss, `(classes,)`: as `map_labels`, in the order given.

    Args:
        classes: at least two where the loss has two.
        loss: the loss of the run, which must have classes.
        positive: labels that count as 1.
        these: which classes, in errors.
        shown: whether errors may list them.

    Raises:
        SpecError: `positive` names another label, or all of them; or there are more than the loss has.
    """
    if loss.binary:
        return _is_positive(classes, positive, these, shown=shown)
    if len(classes) > (loss.n_classes or 0):
        found = f"{len(classes)} labels{f': {_listed(classes)}' if shown else ''}"
        raise SpecError(f"loss.classes must be at least the number of labels {these}, got {loss.n_classes} for {found}")
    return np.arange(len(classes), dtype=np.float64)


def _is_positive(
    texts: Sequence[str], positive: tuple[int | str, ...] | None, these: str, *, shown: bool
) -> FloatArray:
    """`(labels,)`: 1.0 where the label counts as 1."""
    if positive is None:
        return as_floats(2 * np.arange(len(texts)) >= len(texts))
    wanted = {str(label) for label in positive}
    if unknown := sorted(wanted - set(texts)):
        bare = {"0", "1"}.issuperset(unknown) and _TRUTHS & {text.lower() for text in texts}
        advice = "; without quotes YAML takes true and false for 1 and 0: put quotes around them" if bare else ""
        known = f" ({_listed(texts)})" if shown else ""
        raise SpecError(f"data.positive must name labels {these}{known}, got {_listed(unknown)}{advice}")
    if not 0 < len(wanted) < len(texts):
        known = f"labels {_listed(texts)}" if shown else f"{len(texts)} labels"
        raise SpecError(f"data.positive must name some of the {known}, not all, got {list(positive)}")
    return as_floats([text in wanted for text in texts])


def texts_of(distinct: AnyArray) -> list[str]:
    """Labels as a spec writes them: the float 3.0 is `3`."""
    if distinct.dtype.kind != "f":
        return [str(label) for label in distinct]
    return [str(int(label)) if float(label).is_integer() else str(label) for label in distinct]


def _listed(texts: Sequence[str]) -> str:
    """The first few, for a message."""
    return ", ".join(texts[:_SHOWN]) + (", ..." if len(texts) > _SHOWN else "")
