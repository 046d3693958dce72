"""The sections of one's own in docs/guides/extending.md run as they stand there."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import yaml

from sottovoce_core.arrays import Batch
from sottovoce_core.data import load_dataset
from sottovoce_core.errors import SpecError
from sottovoce_core.noise import SeededNoise
from sottovoce_core.runs.placement import place_data
from sottovoce_core.runs.run import build_run
from sottovoce_core.runs.simulator import simulate_rounds
from sottovoce_core.spec import find_first_import, parse_spec

PAGE = (Path(__file__).parent.parent / "docs" / "guides" / "extending.md").read_text(encoding="utf-8")


@pytest.fixture
def document(monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """The page's spec, with the page's module importable."""
    own = ModuleType("own")
    code = re.search(r"```python\n(# own\.py\n.*?)```", PAGE, re.DOTALL)
    spec = re.search(r"```yaml\n(# own\.yaml\n.*?)```", PAGE, re.DOTALL)
    assert code is not None and spec is not None
    monkeypatch.setitem(__import__("sys").modules, "own", own)
    exec(code[1], own.__dict__)  # noqa: S102 - our own page
    parsed = yaml.safe_load(spec[1])
    assert isinstance(parsed, dict)
    return parsed


def test_sections_of_ones_own_run(document: dict[str, object]) -> None:
    spec = parse_spec(document, allow_imports=True)
    assert parse_spec(spec.model_dump(mode="json"), allow_imports=True) == spec
    data = place_data(spec, load_dataset(spec.data, spec.loss))
    run = build_run(spec, data.n_features)
    assert run.guarantee(0).epsilon() < np.inf
    last = list(simulate_rounds(run, data, SeededNoise(1), 2))[-1].decisions_after
    assert last.shape == (5, 2, data.n_features)
    np.testing.assert_allclose(last, last[..., :1] + np.zeros_like(last), atol=1e-12)  # on the segment
    assert sorted(run.network.edges) == [(0, 1), (0, 2), (0, 3), (0, 4), (1, 2), (1, 4), (2, 3), (3, 4)]


def test_a_loss_of_ones_own_says_the_truth_about_itself(document: dict[str, object]) -> None:
    loss = parse_spec(document, allow_imports=True).loss
    generator = np.random.default_rng(3)
    features, labels = loss.enforce_bounds(generator.normal(size=(40, 3)), generator.integers(0, 2, 40).astype(float))
    theta, step = generator.normal(size=3), 1e-6
    for row, label in zip(features, labels, strict=True):
        batch = Batch(row[None], np.array([label]))
        gradient = loss.gradient_sum(theta, batch)
        slopes = [(loss.values(theta + step * e, batch) - loss.values(theta - step * e, batch))[0] for e in np.eye(3)]
        np.testing.assert_allclose(gradient, np.array(slopes) / (2 * step), atol=1e-5)
        assert np.linalg.norm(gradient) <= loss.gradient_bound(np.inf) + 1e-12


def test_what_is_told_to_learners_needs_no_code_for_the_graph(document: dict[str, object]) -> None:
    spec = parse_spec(document, allow_imports=True)
    told = spec.model_copy(update={"topology": spec.topology.to_edge_list(5)}).model_dump(mode="json")
    assert told["topology"]["graph"]["kind"] == "edges"
    assert find_first_import(told["topology"]["graph"]) is None
    assert find_first_import(told) is not None
    with pytest.raises(SpecError, match="imports no code"):
        parse_spec(told, allow_imports=False)


def test_a_source_of_ones_own_generates_records(document: dict[str, object]) -> None:
    own = {**document, "data": {"source": {"kind": "own:Coins", "records": 60}}}
    spec = parse_spec(own, allow_imports=True)
    assert parse_spec(spec.model_dump(mode="json"), allow_imports=True) == spec
    assert place_data(spec, load_dataset(spec.data, spec.loss)).n_features == 4
    assert find_first_import({"data": own["data"]}) is not None
    with pytest.raises(SpecError, match="imports no code"):
        parse_spec(
            {**own, "loss": "logistic", "decision_set": "l2_ball", "topology": {"graph": "ring"}}, allow_imports=False
        )
