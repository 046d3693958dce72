"""Scales: stated constants, constants of the held-out part, clipping, and the warning of what scaling makes of rare features."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sottovoce_core.data.spec import DataSpec
from sottovoce_core.errors import DataError, SottovoceError, SpecError
from sottovoce_core.experiment import Experiment, prepare
from sottovoce_core.runs.placement import FeatureTransform
from sottovoce_core.spec import parse_spec

HELD_OUT = np.array([[0.0, 10.0], [4.0, 30.0]])


def scaled(scale: Any, features: Any, held_out: Any = HELD_OUT) -> list[list[float]]:
    rule = DataSpec.model_validate({"scale": scale}).scale
    transform = FeatureTransform.from_scale(rule, 2, intercept=False, held_out=held_out)
    found: list[list[float]] = transform(np.array(features, dtype=float)).tolist()
    return found


@pytest.mark.parametrize(
    ("scale", "expected"),
    [
        ("none", [8, 20]),
        ("standard", [3, 0]),
        ("range", [2, 0.5]),
        ({"kind": "standard", "clip": 2.5}, [2.5, 0]),
        ({"kind": "standard", "mean": 0}, [4, 2]),
        ({"kind": "standard", "deviation": [3, 5]}, [2, 0]),
        ({"kind": "range", "onto": [-1, 1]}, [3, 0]),
        ({"kind": "range", "low": 0}, [2, 20 / 30]),
        ({"kind": "range", "high": 40}, [0.2, 10 / 30]),
    ],
)
def test_scales_by_the_held_out_part(scale: Any, expected: list[float]) -> None:
    assert scaled(scale, [[8, 20]]) == [pytest.approx(expected)]


@pytest.mark.parametrize(
    ("scale", "expected"),
    [
        ({"kind": "standard", "mean": 4, "deviation": 2}, [2, 8]),
        ({"kind": "standard", "mean": [4, 20], "deviation": [2, 1], "clip": 1}, [1, 0]),
        ({"kind": "range", "low": 0, "high": 16}, [0.5, 1.25]),
        ({"kind": "range", "low": 0, "high": 16, "onto": [-1, 1]}, [0, 1.5]),
        ({"kind": "range", "low": [0, 10], "high": [16, 30], "onto": [-1, 1]}, [0, 0]),
    ],
)
def test_stated_constants_need_no_records(scale: Any, expected: list[float]) -> None:
    assert DataSpec.model_validate({"scale": scale}).scale.is_stated
    assert scaled(scale, [[8, 20]], None) == [pytest.approx(expected)]


def test_letters_come_out_in_minus_one_to_one_exactly() -> None:
    """The data set letter has the whole numbers 0 to 15; LIBSVM's letter.scale has them like this, rounded."""
    found = scaled({"kind": "range", "low": 0, "high": 15, "onto": [-1, 1]}, [[0, 15], [5, 10]], None)
    assert found[0] == [-1, 1]
    assert found[1] == pytest.approx([-1 / 3, 1 / 3])


@pytest.mark.parametrize("scale", ["standard", "range", {"kind": "standard", "mean": 0}, {"kind": "range", "low": 0}])
def test_what_is_not_stated_needs_held_out_records(scale: Any) -> None:
    for nothing in (None, np.empty((0, 2))):
        with pytest.raises(SpecError, match="takes its constants from held-out records, and this source has none"):
            scaled(scale, [[1, 2]], nothing)


@pytest.mark.parametrize(
    ("scale", "message"),
    [
        ("max", r"scale\.kind must be one of none, range, standard, got 'max'"),
        ({"kind": "standard", "deviation": 0}, "must be greater than 0, got 0"),
        ({"kind": "standard", "clip": -1}, "clip: must be greater than 0, got -1"),
        ({"kind": "standard", "low": 1}, "unknown field data.scale.low"),
        ({"kind": "range", "onto": [1, -1]}, r"onto must be two ascending numbers, such as \[-1, 1\], got"),
        ({"kind": "range", "onto": [1]}, r"at least 2 items, got \[1\]: write onto: \[-1, 1\]"),
        (
            {"kind": "standard", "mean": [1, 2, 3], "deviation": 1},
            "mean must be one number, or one for each of the 64 features",
        ),
        ({"kind": "range", "low": 3, "high": 3}, r"low must be below high in column 0 \(counted from 0\), got 3 and 3"),
        ({"kind": "range", "low": 99}, "low must be below high in column 0 .*, got a held-out record beyond it"),
    ],
)
def test_refused(scale: Any, message: str) -> None:
    with pytest.raises(SottovoceError, match=message):
        Experiment(rounds=2, algorithm="ldp-dol", data={"source": "digits", "scale": scale}).records  # noqa: B018


def test_stated_constants_scale_records_that_a_file_places(tmp_path: Path) -> None:
    np.savez(tmp_path / "own.npz", X=[[8.0], [16.0]], y=[0, 1], learner=[0, 1])
    document = {
        "rounds": 2,
        "learners": 2,
        "algorithm": "ldp-dol",
        "data": {
            "source": str(tmp_path / "own.npz"),
            "intercept": False,
            "scale": {"kind": "range", "low": 0, "high": 16},
        },
    }
    found = prepare(parse_spec(document, allow_imports=False))
    assert [own.features.tolist() for own in found.data.learners] == [[[0.5]], [[1.0]]]


def test_scaled_numbers_that_overflow_are_refused_unless_clipped() -> None:
    huge = [[1e200, -1e200]]
    with pytest.raises(DataError, match="rescale it first"):
        scaled({"kind": "standard", "mean": 0, "deviation": 1}, huge, None)
    assert scaled({"kind": "standard", "mean": 0, "deviation": 1, "clip": 5}, huge, None) == [[5, -5]]


# ---- rare features ---------------------------------------------------------------------------------------------------


def rare(tmp_path: Path, scale: Any, named: bool = False) -> list[str]:
    """Warnings of a run in which the second feature is 1 once among held-out records, and large in some others."""
    rng = np.random.default_rng(1)
    features, test = rng.normal(size=(200, 3)), rng.normal(size=(100, 3))
    features[:, 1], test[:, 1] = 0.0, 0.0
    features[:3, 1], test[0, 1] = 250.0, 1.0
    arrays: dict[str, Any] = {"X": features, "y": np.arange(200) % 2, "X_test": test, "y_test": np.arange(100) % 2}
    arrays |= {"columns": ["one", "two", "three"]} if named else {}
    np.savez(tmp_path / "rare.npz", **arrays)
    document = {"rounds": 9, "algorithm": "ldp-dol", "data": {"source": str(tmp_path / "rare.npz"), "scale": scale}}
    found = prepare(parse_spec(document, allow_imports=False)).warnings
    return [each.text for each in found if each.code == "SCALED_ROWS"]


@pytest.mark.parametrize(
    ("scale", "advice"),
    [
        ("standard", "clip scaled features (data.scale: {kind: standard, clip: 5})"),
        ({"kind": "standard", "clip": 1000}, "lower data.scale.clip"),
        ("range", "state the possible values (data.scale: {kind: range, low: ..., high: ...})"),
    ],
)
def test_records_that_scaling_makes_long_are_told_with_their_feature(tmp_path: Path, scale: Any, advice: str) -> None:
    (text,) = rare(tmp_path, scale)
    assert "times as long as the median one" in text and ": 1 (counted from 0); " in text and advice in text
    (text,) = rare(tmp_path, scale, named=True)
    assert ": 'two'; " in text


@pytest.mark.parametrize(
    "scale", ["none", {"kind": "standard", "clip": 5}, {"kind": "range", "low": [-4, 0, -4], "high": [4, 250, 4]}]
)
def test_the_advice_ends_the_warning(tmp_path: Path, scale: Any) -> None:
    assert rare(tmp_path, scale) == []


def test_records_that_are_mostly_zero_are_no_matter(tmp_path: Path) -> None:
    features = np.zeros((20, 2))
    features[0] = 100.0
    np.savez(tmp_path / "zero.npz", X=features, y=np.arange(20) % 2)
    scale = {"kind": "standard", "mean": 0, "deviation": 1}
    data = {"source": str(tmp_path / "zero.npz"), "intercept": False, "scale": scale}
    found = prepare(parse_spec({"rounds": 3, "algorithm": "ldp-dol", "data": data}, allow_imports=False)).warnings
    assert "SCALED_ROWS" not in {each.code for each in found}


def test_usual_records_are_no_matter() -> None:
    pytest.importorskip("sklearn")
    for source in ("digits", "breast_cancer"):
        spec = {"rounds": 9, "algorithm": "ldp-dol", "data": {"source": source, "scale": "standard"}}
        found = prepare(parse_spec(spec, allow_imports=False)).warnings
        assert "SCALED_ROWS" not in {each.code for each in found}
