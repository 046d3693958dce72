"""The run spec: every refusal names the field and the value; what is printed can be read back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from sottovoce_core.errors import AssumptionViolated, SpecError
from sottovoce_core.runs.run import build_run
from sottovoce_core.spec import RunSpec, build_spec_json_schema, dump_spec, load_spec, parse_spec
from sottovoce_core.yaml_files import parse_yaml

pytestmark = pytest.mark.each

LEAST: dict[str, Any] = {"rounds": 10, "algorithm": {"name": "ldp-dol"}}


def document(**changes: Any) -> dict[str, Any]:
    return {**LEAST, **changes}


def refusal(**changes: Any) -> str:
    with pytest.raises(SpecError) as failure:
        parse_spec(document(**changes), source="s.yaml", allow_imports=True)
    return str(failure.value)


# ---- refused ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"roundz": 3}, ["unknown field roundz", "the fields are name, rounds, learners"]),
        ({"loss": {"kind": "logistic", "rigde": 1}}, ["unknown field loss.rigde"]),
        ({"topology": {"graph": {"kind": "ring", "size": 3}}}, ["unknown field topology.graph.size"]),
        ({"algorithm": {"name": "sgd"}}, ["algorithm.name", "ldp-dol", "module:Class", "got 'sgd'"]),
        (
            {"algorithm": {"name": "ldp-dol", "accounting": "magic"}},
            ["algorithm.accounting", "'loose'", "'best'", "'magic'"],
        ),
        ({"algorithm": {}}, ["field algorithm.name is required"]),
        ({"rounds": 0}, ["rounds", "greater than 0", "got 0"]),
        ({"rounds": "many"}, ["rounds: must be a whole number, got 'many'"]),
        (
            {"name": "no spaces"},
            ["name: a run's name must be 1 to 63 of the letters a to z, digits", "got 'no spaces'"],
        ),
        ({"topology": {"graph": "moebius"}}, ["topology.graph.kind", "'moebius'", "ring", "complete"]),
        ({"topology": {"weights": {"kind": "constant", "value": -1}}}, ["topology.weights.value", "got -1"]),
        ({"loss": {"kind": "huber"}}, ["loss.kind", "logistic, ridge, smoothed_hinge, softmax", "got 'huber'"]),
        ({"loss": {"kind": "logistic", "label_bound": 1.0}}, ["unknown field loss.label_bound"]),
        ({"loss": {"history": "pass_glm"}}, ["loss", "score_bound must be given with history pass_glm"]),
        (
            {"loss": {"history": "pass_glm", "score_bound": 4.0, "clip_norm": 1.0}},
            ["loss", "clip_norm must not be given with history pass_glm"],
        ),
        ({"loss": {"kind": "softmax"}}, ["field loss.classes is required"]),
        ({"loss": {"kind": "softmax", "classes": 1}}, ["loss.classes", "greater than or equal to 2", "got 1"]),
        ({"loss": 3}, ["loss", "mapping of fields", "got 3"]),
        ({"loss": {"feature_bound": 0}}, ["loss.feature_bound", "greater than 0", "got 0"]),
        ({"loss": {"clip_norm": float("nan")}}, ["loss.clip_norm", "got nan"]),
        ({"decision_set": {"kind": "l2_ball", "radius": float("inf")}}, ["decision_set.radius", "got inf"]),
        (
            {"data": {"partition": {"kind": "dirichlet", "concentration": 0}}},
            ["concentration", "greater than 0", "got 0"],
        ),
        ({"data": {"batch_size": 0}}, ["data.batch_size", "greater than 0", "got 0"]),
        ({"clock": {"mode": "paced"}}, ["clock", "period_s must be given in paced mode"]),
        (
            {"clock": {"mode": "paced", "period_s": 1e-9}},
            ["clock.period_s", "greater than or equal to 0.002", "got 1e-09"],
        ),
        ({"clock": {"period_s": 1.0}}, ["clock", "period_s must be given in paced mode, and only there"]),
        ({"learners": ["a", "b", "a"]}, ["learner names must differ", "['a', 'b', 'a']"]),
        ({"learners": 0}, ["learners", "greater than 0", "got 0"]),
        ({"learners": 4097}, ["learners", "less than or equal to 4096", "got 4097"]),
        ({"learners": [f"a{i}" for i in range(4097)]}, ["learners", "at most 4096 items", "'a0'"]),
        ({"rounds": 10**30}, ["rounds", "less than or equal to 9007199254740992", f"got {10**30}"]),
        ({"clock": {"window": 10**30}}, ["clock.window", "less than or equal to 9007199254740992"]),
        ({"data": {"batch_size": 10**18}}, ["data.batch_size", "less than or equal to 9007199254740992"]),
        ({"learners": []}, ["learners", "at least 1", "got []"]),
        (
            {"learners": ["a", "../b"]},
            ["learners.1: a learner's name must be 1 to 63 letters and digits", "got '../b'"],
        ),
        ({"capture": "all"}, ["capture", "'relay', 'mirror', 'wiretap' or 'none'", "got 'all'"]),
        ({"durability": "none"}, ["durability", "'process' or 'power'", "got 'none'"]),
    ],
    ids=str,
)
def test_a_refusal_names_the_field_what_is_allowed_and_what_came(changes: dict[str, Any], words: list[str]) -> None:
    text = refusal(**changes)
    assert text.startswith("s.yaml: ")
    for word in words:
        assert word in text


def test_what_is_wrong_with_fields_together_is_told_without_the_section() -> None:
    text = refusal(loss={"kind": "logistic", "history": "pass_glm", "ridge": 0.25})
    assert "feature_bound times the radius of the decision set" in text and "docs/reference/losses.md" in text
    assert "got" not in text and "0.25" not in text


def test_every_problem_gets_a_line() -> None:
    lines = refusal(rounds=-1, colour="red", loss={"kind": "huber"}).splitlines()
    assert len(lines) == 3
    assert all(line.startswith("s.yaml: ") for line in lines)


@pytest.mark.parametrize("value", [0, 0.0, -2.5, float("nan"), float("inf")])
def test_a_noise_scale_must_be_positive(value: float) -> None:
    spec = parse_spec(document(algorithm={"name": "ldp-dol", "sigma": value}), allow_imports=True)
    with pytest.raises(AssumptionViolated, match=rf"sigma must be positive and finite, got {float(value)} \[SIGMA\]"):
        build_run(spec, 3)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"algorithm": {"name": "ldp-dol", "sigma": [1.0, 2.0]}},
            r"algorithm.sigma: .* one number per learner \(5\), got 2",
        ),
        ({"algorithm": {"name": "ldp-dol", "varsigma": [0.1]}}, r"algorithm.varsigma: .* \(5\), got 1"),
        ({"privacy": {"budget": [1.0] * 6}}, r"privacy.budget: a list must have one number per learner \(5\), got 6"),
    ],
)
def test_a_list_needs_one_number_per_learner(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(SpecError, match=text):
        build_run(parse_spec(document(**changes), allow_imports=True), 3)


@pytest.mark.parametrize(
    ("content", "form"), [(None, "nothing"), (3, "a number"), ("text", "text"), (["rounds"], "a list")]
)
def test_a_spec_is_a_mapping(content: object, form: str) -> None:
    with pytest.raises(SpecError, match=f"must be a mapping of fields, got {form}$"):
        parse_spec(content, allow_imports=True)


@pytest.mark.parametrize("content", ["rounds: [1, 2", "a: b: c", "\t- x", "!!python/object/apply:os.getcwd []"])
def test_a_file_must_be_yaml(tmp_path: Path, content: str) -> None:
    path = tmp_path / "s.yaml"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(SpecError, match=r"s\.yaml is not YAML: ") as failure:
        load_spec(path)
    assert "\n" not in str(failure.value)


@pytest.mark.parametrize(
    "content",
    ["rounds: 5\nrounds: 6", "{rounds: 5, algorithm: {name: ldp-dol, sigma: 1, sigma: 2}}", "rounds: 5\n'rounds': 6"],
)
def test_nothing_is_said_twice(tmp_path: Path, content: str) -> None:
    path = tmp_path / "s.yaml"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(
        SpecError,
        match=r"s\.yaml is not YAML: a name must be unique, got '(rounds|sigma)' twice \(line \d, column \d+\)",
    ):
        load_spec(path)


def test_what_is_merged_may_be_said_again() -> None:
    said = parse_yaml("usual: &u {a: 1, b: 2}\nown: {<<: *u, b: 3}\nboth: {<<: [*u, {c: 4}], 'a': 5}")
    assert said["own"] == {"a": 1, "b": 3} and said["both"] == {"a": 5, "b": 2, "c": 4}


@pytest.mark.parametrize(
    "content", ["rounds: " + "[" * 5000, "rounds: 5\nalgorithm: " + "{name: " * 500 + "1" + "}" * 500], ids=len
)
def test_a_file_nested_too_deep_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "s.yaml"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(SpecError, match="nested too deeply"):
        load_spec(path)


@pytest.mark.parametrize("value", ["2026-13-45", "9" * 5000])
def test_a_value_that_yaml_cannot_hold_is_refused(tmp_path: Path, value: str) -> None:
    path = tmp_path / "s.yaml"
    path.write_text(f"rounds: {value}", encoding="utf-8")
    with pytest.raises(SpecError, match=r"s\.yaml is not YAML: "):
        load_spec(path)


def test_aliases_do_not_make_a_refusal_long() -> None:
    """Nine lists of nine times the one before: a thousand million words, if all were quoted."""
    bomb: object = "x"
    for _ in range(9):
        bomb = [bomb] * 9
    assert len(refusal(rounds=bomb, learners=bomb, clock={"window": bomb}, capture=bomb)) < 50_000


@pytest.mark.parametrize("content", [None, b"\xff\xfe\x00"])
def test_a_file_must_be_readable(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "s.yaml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(SpecError, match=r"cannot read the run spec .*s\.yaml"):
        load_spec(path)


# ---- accepted --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["metropolis", "max_degree"])
@pytest.mark.parametrize("graph", ["ring", "path", "star", "complete"])
def test_a_word_stands_for_its_kind(graph: str, rule: str) -> None:
    topology = parse_spec(document(topology={"graph": graph, "weights": rule}), allow_imports=True).topology
    assert topology.graph is not None
    assert (topology.graph.kind, topology.weights.kind) == (graph, rule)


def test_learners_are_a_number_or_names() -> None:
    assert parse_spec(document(learners=2), allow_imports=True).names == ("learner-0", "learner-1")
    assert parse_spec(document(learners=["a", "b"]), allow_imports=True).names == ("a", "b")


def test_a_spec_does_not_change() -> None:
    with pytest.raises(ValueError, match="frozen"):
        parse_spec(LEAST, allow_imports=True).rounds = 3  # type: ignore[misc] # that it cannot is the point


budgets = st.floats(0.01, 9)
specs = st.fixed_dictionaries(
    {"rounds": st.integers(1, 10**6), "algorithm": st.fixed_dictionaries({"name": st.just("ldp-dol")}, optional={
        "sigma": st.one_of(st.floats(0.01, 1e6), st.lists(st.floats(0.01, 9.0), min_size=1, max_size=4)),
        "u": st.floats(0.5, 1.0),
        "accounting": st.sampled_from(["loose", "smooth", "convex", "clip", "best"]),
    })},
    optional={
        "name": st.from_regex(r"\A[A-Za-z0-9][A-Za-z0-9._-]{0,10}\Z"),
        "learners": st.one_of(st.integers(1, 9), st.lists(st.sampled_from("abcdef"), min_size=1, max_size=6, unique=True)),
        "loss": st.builds(
            lambda kind, common: {**kind, **common},
            st.sampled_from([
                {}, {"kind": "logistic", "history": "pass_glm", "score_bound": 4.0, "clip_norm": None},
                {"kind": "ridge"}, {"kind": "least_squares", "label_bound": 2.0}, {"kind": "hinge"},
                {"kind": "smoothed_hinge", "width": 0.5}, {"kind": "softmax", "classes": 10},
            ]),
            st.fixed_dictionaries({}, optional={"ridge": st.floats(0, 9), "feature_bound": st.floats(0.01, 9.0)}),
        ),
        "decision_set": st.one_of(
            st.builds(lambda r: {"kind": "l2_ball", "radius": r}, st.floats(0.01, 1e9)),
            st.builds(lambda a, b: {"kind": "box", "low": a, "high": a + b}, st.floats(-9, 9), st.floats(0.01, 9)),
            st.just({"kind": "product", "blocks": [{"size": 2, "set": {"kind": "simplex"}}]}),
        ),
        "topology": st.fixed_dictionaries({"graph": st.one_of(
            st.sampled_from(["ring", "star"]),
            st.builds(lambda p: {"kind": "erdos_renyi", "probability": p}, st.floats(0.01, 1)),
            st.just({"kind": "edges", "edges": [[0, 1], [1, 2]]}),
            st.just({"kind": "file", "path": "graph.graphml"}),
        )}),
        "data": st.fixed_dictionaries({}, optional={"positive": st.just([1, "b"]), "partition": st.just("iid")}),
        "clock": st.one_of(st.just({"mode": "paced", "period_s": 0.5}), st.builds(lambda w: {"window": w}, st.integers(1, 9))),
        "privacy": st.builds(lambda b: {"budget": b}, st.one_of(st.none(), budgets, st.lists(budgets, min_size=1))),
        "capture": st.sampled_from(["relay", "mirror", "none"]),
    },
)  # fmt: skip


@given(specs)
def test_a_dumped_spec_reads_back_equal(fields: dict[str, Any]) -> None:
    spec = parse_spec(fields, allow_imports=True)
    assert parse_spec(yaml.safe_load(dump_spec(spec)), allow_imports=True) == spec
    assert parse_spec(json.loads(json.dumps(spec.model_dump(mode="json"))), allow_imports=True) == spec


def test_a_dumped_spec_shows_the_defaults() -> None:
    shown = yaml.safe_load(dump_spec(parse_spec(LEAST, allow_imports=True)))
    assert shown["durability"] == "power"
    unset = dict.fromkeys(("period_s", "staleness", "stale_after_s", "outage_timeout_s"))
    assert shown["clock"] == {"mode": "free", "window": 100, "deadline_s": 60.0, **unset}


def test_the_schema_describes_every_field_and_refuses_others() -> None:
    schema = json.loads(build_spec_json_schema())

    assert schema["properties"].keys() == RunSpec.model_fields.keys()
    assert schema["required"] == ["rounds", "algorithm"]
    assert schema["additionalProperties"] is False
    references = {part["$ref"] for part in _parts(schema) if "$ref" in part}
    assert references == {f"#/$defs/{name}" for name in schema["$defs"]}


def _parts(value: Any) -> list[dict[str, Any]]:
    if isinstance(value, dict):
        return [value, *(part for each in value.values() for part in _parts(each))]
    return [part for each in value for part in _parts(each)] if isinstance(value, list) else []


@pytest.mark.parametrize(
    "changes",
    [{"algorithm": {"name": "tests.gossip:GossipSpec"}}, {"loss": {"kind": "torch", "module": "os:system"}}],
    ids=["algorithm", "loss"],
)
def test_code_that_a_spec_from_elsewhere_names_is_not_imported(changes: dict[str, Any]) -> None:
    document = {"rounds": 3, "algorithm": {"name": "ldp-dol"}, **changes}
    with pytest.raises(SpecError, match="--allow-imports") as refused:
        parse_spec(document, allow_imports=False)
    assert ":" in str(refused.value)
    assert parse_spec({"rounds": 3, "algorithm": {"name": "ldp-dol"}}, allow_imports=False).rounds == 3


def test_an_algorithm_without_parameters_is_its_name() -> None:
    assert parse_spec({"rounds": 3, "algorithm": "dsgd"}, allow_imports=True).algorithm.name == "dsgd"


def test_near_misses_are_named() -> None:
    with pytest.raises(SpecError, match=r"did you mean pd-ftgl\?"):
        parse_spec({"rounds": 3, "algorithm": {"name": "pdftgl"}}, allow_imports=True)
    with pytest.raises(SpecError, match=r"unknown field algorithm.alfa; the fields are name, .*alpha"):
        parse_spec({"rounds": 3, "algorithm": {"name": "dvp", "alfa": 1.0}}, allow_imports=True)


@pytest.mark.parametrize(
    ("graph", "said"),
    [
        ("circle", "got 'circle'; did you mean ring?"),
        ("compleet", "got 'compleet'; did you mean complete?"),
        ("ring,circle", "got 'ring,circle'; it is one of them, not several, and 'circle' is none: did you mean ring?"),
        ("ring, star", "got 'ring, star'; it is one of them, not several"),
        ("zzz", "got 'zzz'"),
    ],
)
def test_a_graph_of_another_name_is_suggested_its_own(graph: str, said: str) -> None:
    with pytest.raises(SpecError) as refused:
        parse_spec({"rounds": 3, "algorithm": "dsgd", "topology": {"graph": graph}}, allow_imports=True)
    assert str(refused.value).endswith(said)


def test_the_fields_of_a_section_are_listed_once() -> None:
    document = {"rounds": 3, "algorithm": {"name": "dvp", "a": 1, "b": 2}, "foo": 1, "bar": 1}
    with pytest.raises(SpecError) as refused:
        parse_spec(document, allow_imports=True)
    lines = str(refused.value).splitlines()
    assert [line.partition("; ")[0] for line in lines] == [
        f"spec: unknown field {name}" for name in ("algorithm.a", "algorithm.b", "foo", "bar")
    ]
    assert ["the fields are" in line for line in lines] == [True, False, True, False]


def test_a_spec_without_an_algorithm_says_so() -> None:
    for document in ({"rounds": 5}, {}):
        with pytest.raises(SpecError, match="field algorithm is required"):
            parse_spec(document, allow_imports=True)
