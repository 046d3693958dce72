"""An experiment: the same as a spec file, in Python."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sottovoce_core.errors import SpecError
from sottovoce_core.experiment import Experiment, load
from sottovoce_core.losses.linear import LogisticLoss
from sottovoce_core.spec import load_spec, parse_spec


def written(folder: Path) -> str:
    """A file of records with two features."""
    features = np.random.default_rng(0).normal(size=(60, 2))
    np.savez(folder / "records.npz", X=features, y=(features[:, 0] > 0).astype(int))
    return str(folder / "records.npz")


def small(folder: Path, **changes: Any) -> Experiment:
    fields = {
        "rounds": 6,
        "learners": ["ann", "ben", "cleo"],
        "algorithm": "ldp-dol",
        "data": {"source": written(folder)},
    }
    return Experiment(**{**fields, **changes})


def test_words_mappings_and_objects_say_the_same() -> None:
    word, mapping, made = (
        Experiment(rounds=5, algorithm={"name": "ldp-dol"}, loss=loss, topology={"graph": graph})
        for loss, graph in (("logistic", "ring"), ({"kind": "logistic"}, {"kind": "ring"}), (LogisticLoss(), "ring"))
    )

    assert word == mapping == made
    assert word != made.replace(rounds=6)


@pytest.mark.parametrize(
    "fields",
    [
        {"rounds": 0, "algorithm": "ldp-dol"},
        {"rounds": 5, "algorithm": "ldp-dool"},
        {"rounds": 5, "algorithm": {"name": "ldp-dol", "sigmal": 1}},
        {"algorithm": "ldp-dol", "learners": ["a", "a"], "rounds": "x", "loss": {"kind": "hinge", "ridge": -1}},
    ],
)
def test_errors_are_those_of_a_spec_file(fields: dict[str, Any]) -> None:
    with pytest.raises(SpecError) as parsed:
        parse_spec(fields, source="experiment", allow_imports=True)
    with pytest.raises(SpecError) as made:
        Experiment(**fields)

    assert str(made.value) == str(parsed.value)


def test_a_file_is_read_as_the_command_line_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "wards.yaml"
    path.write_text(small(tmp_path, name="wards").to_yaml(), encoding="utf-8")

    assert load(path).model_dump() == load_spec(path).model_dump()
    assert small(tmp_path, name="wards").to_yaml(path) == load(str(path)).to_yaml()

    path.write_text("{rounds: 0, algorithm: ldp-dol}", encoding="utf-8")
    with pytest.raises(SpecError, match=r"wards\.yaml: rounds: must be greater than 0, got 0"):
        load(path)
    with pytest.raises(SpecError, match="cannot read the run spec"):
        load(tmp_path / "none.yaml")


def test_replace_changes_a_field_of_a_section_and_checks_it(tmp_path: Path) -> None:
    experiment = small(tmp_path)
    changed = experiment.replace(rounds=7, **{"algorithm.sigma": 3, "topology.graph": "complete"})

    assert (changed.rounds, changed.algorithm.model_dump()["sigma"]) == (7, 3.0)
    assert changed.records.rounds == 7
    assert experiment.rounds == 6
    for place, said in (
        ("decision_set.radius", "decision_set.radius: must be greater than 0, got -1"),
        ("algorithm.nonsense", "unknown field"),
        ("rounds.x", "rounds must be"),
    ):
        with pytest.raises(SpecError, match=said):
            experiment.replace(**{place: -1})


def test_a_copy_has_records_of_its_own(tmp_path: Path) -> None:
    experiment = small(tmp_path)
    assert experiment.records is experiment.records

    assert experiment.model_copy(update={"rounds": 9}).records.rounds == 9
    assert pickle.loads(pickle.dumps(experiment)) == experiment  # noqa: S301 - our own bytes


def test_guarantees_are_those_of_the_records_that_are_learned(tmp_path: Path) -> None:
    experiment = small(tmp_path, algorithm={"name": "ldp-dol", "varsigma": [0.1, 0.2, 0.3]})
    promises = [experiment.guarantee(name).epsilon() for name in experiment.names]

    assert promises == [experiment.guarantee(i).epsilon() for i in range(3)]
    assert experiment.epsilon() == max(promises) == promises[experiment.find_worst_case_learner()]
    for nobody in ("dora", 3, -1):
        with pytest.raises(SpecError, match="one of ann, ben, cleo"):
            experiment.guarantee(nobody)
