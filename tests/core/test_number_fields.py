"""Every numeric field of a run spec and of a policy refuses a wrong value with a requirement that this value does not meet."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import pytest

from sottovoce_core.errors import SpecError
from sottovoce_core.registry import Registry, Section
from sottovoce_core.runs.policy import Policy
from sottovoce_core.runs.run import build_run
from sottovoce_core.spec import RunSpec, parse_spec
from sottovoce_core.yaml_files import parse_yaml

VALUES: tuple[Any, ...] = (
    math.nan,
    math.inf,
    -math.inf,
    0,
    -1,
    -3,
    10**400,
    "1e400",
    "text",
    True,
    [1],
    [math.inf],
    {},
)
"""Tried on every field."""
NEEDED: dict[str, Any] = {
    "ratio": 0.5, "scale": 1.0, "classes": 2, "radius": 5.0, "low": -5.0,
    "high": 1.0, "rows": 1, "columns": 5, "probability": 0.9, "nearest": 2, "edges": [[0, 1], [1, 2], [2, 3], [3, 4]],
    "value": 0.1, "step": 0.1, "concentration": 1.0, "bounds": [0, 1], "categories": ["a", "b"], "label_bound": 1.0,
    "learner": "learner-0", "until_round": 5, "size": 8, "set": {"kind": "l2_ball", "radius": 5.0}, "path": "graph.txt",
    "graphs": ["ring"], "features": 8, "labels": 2,
    "blocks": [{"size": 8, "set": {"kind": "l2_ball", "radius": 5.0}}],
}  # fmt: skip
"""A right value for each field that a section must have."""
AROUND: dict[str, dict[str, Any]] = {
    **{name: {"loss": {"kind": "logistic", "ridge": 0.01}} for name in ("dvp", "pvp", "admm")},
    "dpcda": {"learners": 1},
}
"""What else a spec says for an algorithm."""
KINDS = ("kind", "name", "type")


def is_numeric(annotation: Any) -> bool:
    """Whether a value of this annotation may be a number, or a list of numbers."""
    if get_origin(annotation) is Literal:
        return False
    inner = get_args(annotation)
    return annotation in (int, float) or any(
        map(is_numeric, inner[:1] if get_origin(annotation) is Annotated else inner)
    )


def parts(annotation: Any, metadata: list[Any]) -> Iterator[Any]:
    """Sections and registries in an annotation."""
    yield from (each for each in metadata if isinstance(each, Registry))
    if isinstance(annotation, type) and issubclass(annotation, Section):
        yield annotation
    yield from (found for each in get_args(annotation) for found in parts(each, [*getattr(each, "__metadata__", ())]))


def least(section: type[Section]) -> dict[str, Any]:
    """The fewest fields that a section may have."""
    fields = section.model_fields.items()
    kinds = {
        name: get_args(field.annotation)[0] for name, field in fields if name in KINDS and get_args(field.annotation)
    }
    return kinds | {name: NEEDED[name] for name, field in fields if field.is_required() and name not in kinds}


Document = Callable[[Any], dict[str, Any]]


def _with_field(around: Document, begin: dict[str, Any], name: str, value: Any) -> dict[str, Any]:
    return around({**begin, name: value})


def fields_of(
    section: type[Section], around: Document, place: str, seen: frozenset[type]
) -> Iterator[tuple[str, Document]]:
    """Every numeric field below a section: its place, and a document in which it has a value."""
    begin = {} if not place else least(section)
    for name, field in section.model_fields.items():
        inner = list(parts(field.annotation, field.metadata))
        classes = [
            (kind, each.find(kind)) for each in inner if isinstance(each, Registry) for kind in each.built_in_classes
        ]
        if not any(isinstance(each, Registry) for each in inner):
            classes = [(each.__name__, each) for each in inner]
        listed = "tuple" in str(field.annotation)

        def within(value: Any, name: str = name, listed: bool = listed) -> dict[str, Any]:
            return around({**begin, name: [value] if listed else value})

        for kind, each in classes:
            if each not in seen and name != "schema" and kind != "torch":  # which not every environment has
                yield from fields_of(each, within, f"{place}.{name}[{kind}]", seen | {each})
        if not classes and name not in KINDS and is_numeric(field.annotation):
            yield f"{place}.{name}", partial(_with_field, around, begin, name)


def whole(document: dict[str, Any]) -> dict[str, Any]:
    named = document.get("algorithm", {"name": "pd-ogd" if "sequence" in document.get("topology", {}) else "ldp-dol"})
    if named["name"] in ("pd-ftgl", "pd-ocg") and not named.keys() & {"epsilon", "noise_scale"}:
        named = {**named, "epsilon": 1.0}
    return {"rounds": 300, **AROUND.get(named["name"], {}), **document, "algorithm": named}


FIELDS = dict(fields_of(RunSpec, whole, "", frozenset({RunSpec})))
OF_POLICY = dict(fields_of(Policy, dict, "", frozenset({Policy})))


def refusal(document: dict[str, Any]) -> str:
    """Why a document is refused; empty where it is not."""
    try:
        build_run(parse_spec(document, allow_imports=True), 8)
    except SpecError as error:
        return str(error)
    return ""


# ---- requirements, as they are told ------------------------------------------------------------------------------------

N = r"(-?[\d.]+(?:e[+-]?\d+)?)"
STATED: list[tuple[str, Callable[..., bool]]] = [
    (rf"(?:greater than|above) {N}", lambda v, a: v > float(a)),
    (rf"(?:greater than or equal to|at least) {N}", lambda v, a: v >= float(a)),
    (rf"(?:less than|below) {N}", lambda v, a: v < float(a)),
    (rf"(?:less than or equal to|at most) {N}", lambda v, a: v <= float(a)),
    (rf"\[{N}, {N}\]", lambda v, a, b: float(a) <= v <= float(b)),
    (rf"\[{N}, {N}\)", lambda v, a, b: float(a) <= v < float(b)),
    (rf"strictly between {N} and {N}", lambda v, a, b: float(a) < v < float(b)),
    (rf"in 1\.\.horizon={N}", lambda v, a: 1 <= v <= float(a)),
    (rf"must not exceed \w+={N}", lambda v, a: v <= float(a)),
    (rf"within the {N} rounds", lambda v, a: 0 <= v < float(a)),
    ("positive", lambda v: v > 0),
    ("finite", lambda v: math.isfinite(v)),
]


def number_of(value: Any) -> float | None:
    """The number that a value is, infinite beyond float64; None: it is none."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf
    except ValueError:
        return None


def violates(value: Any, text: str) -> bool:
    """Whether a value does not meet one of the requirements that a message states."""
    required, got, _ = text.partition(", got ")
    number = number_of(value[0] if value and isinstance(value, list) and ".0: " in required else value)
    if number is None or re.search(r"a list|must be text|mapping|number per learner", required):
        forms = (
            r"a number|a whole number|a list|mapping|number per learner|true or false|at least \d items|must be text"
        )
        return re.search(forms, required) is not None
    holds = [check(number, *found.groups()) for form, check in STATED for found in re.finditer(form, required)]
    return bool(got) and not all(holds)


def inclusive_zero(text: str) -> bool:
    """Whether a message says that zero is allowed."""
    return re.search(r"(at least|equal to) 0(?![.\d])|\[0(?:\.0)?,", text.partition(", got ")[0]) is not None


@pytest.fixture(autouse=True)
def _graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "graph.txt").write_text("0 1\n1 2\n2 3\n3 4\n", encoding="utf-8")


def test_the_fields_are_found() -> None:
    assert len(FIELDS) > 120 and len(OF_POLICY) == 8
    for place in (
        ".algorithm[ldp-dol].sigma",
        ".algorithm[dola].noise[CalibratedNoise].epsilon",
        ".clock[ClockSpec].stale_after_s",
    ):
        assert place in FIELDS


@pytest.mark.parametrize("place", FIELDS)
def test_a_refusal_states_what_the_value_does_not_meet(place: str) -> None:
    document = FIELDS[place]
    told = {str(value): refusal(document(value)) for value in VALUES}
    for value in VALUES:
        if text := told[str(value)]:
            assert violates(value, text.splitlines()[0]), (value, text)
            assert "\n" not in text, text
    if told["0"]:
        assert not any(map(inclusive_zero, told.values())), told


@pytest.mark.parametrize("place", OF_POLICY)
def test_so_does_a_policy(place: str, tmp_path: Path) -> None:
    for value in (each for each in VALUES if not (place == ".delta" and each == 0)):  # pure
        written = {math.inf: ".inf", -math.inf: "-.inf"}.get(value, value) if isinstance(value, float) else value
        path = tmp_path / "policy.yaml"
        path.write_text(f"{place[1:]}: {'.nan' if value != value else written}\n", encoding="utf-8")
        if value == {} or parse_yaml(path.read_text(encoding="utf-8")) is None:
            continue
        with pytest.raises(SpecError) as refused:
            Policy.load(path)
        assert violates(value, str(refused.value)), (value, str(refused.value))


def test_the_form_of_a_field_is_shown() -> None:
    def edges(graph: Any) -> str:
        return refusal(whole({"topology": {"graph": graph}}))

    shown = "write edges: [[0, 1], [1, 2]]"
    assert edges("edges").endswith("is required: write graph: {kind: edges, edges: [[0, 1], [1, 2]]}")
    assert edges({"kind": "edges"}).endswith(f"is required: {shown}")
    assert edges({"kind": "edges", "edges": 5}).endswith(f"must be a list, got 5: {shown}")
    assert edges({"kind": "edges", "edges": [[0, 1, 2]]}).endswith(f"got [0, 1, 2]: {shown}")
    assert edges("erdos_renyi").endswith("is required: write graph: {kind: erdos_renyi, probability: ...}")
