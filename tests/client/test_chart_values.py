"""`sottovoce spec values`: what the chart must know of runs, by their own networks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from sottovoce_client.cli import app
from sottovoce_client.helm import derive_chart_values, format_yaml
from sottovoce_core.errors import AssumptionViolated, SpecError
from sottovoce_core.spec import RunSpec, parse_spec

NAMES = ["anna", "ben", "cleo", "dora"]
RING = [["anna", "ben"], ["anna", "dora"], ["ben", "cleo"], ["cleo", "dora"]]
SPEC: dict[str, Any] = {
    "name": "study",
    "rounds": 10,
    "learners": NAMES,
    "algorithm": {"name": "dsgd"},
    "data": {"source": "live", "features": 3},
}


def spec_of(**more: Any) -> RunSpec:
    return parse_spec({**SPEC, **more}, allow_imports=False)


def edges(*pairs: tuple[int, int], directed: bool = True) -> dict[str, Any]:
    return {"kind": "edges", "directed": directed, "edges": [list(pair) for pair in pairs]}


def test_a_release_of_its_own_needs_nothing_more() -> None:
    assert derive_chart_values([spec_of()]) == {
        "learners": {name: {} for name in NAMES},
        "edges": RING,
        "capture": "none",
    }


def test_a_directed_edge_is_opened_by_the_lower_index_whoever_tells() -> None:
    topology = {"graph": edges((3, 2), (2, 1), (1, 0), (0, 3)), "weights": "out_degree"}

    assert derive_chart_values([spec_of(topology=topology)])["edges"] == RING


def test_a_network_that_changes_has_the_edges_of_all_its_rounds() -> None:
    first, then = edges((0, 1), (1, 2), directed=False), edges((2, 3), directed=False)
    topology = {"sequence": {"kind": "periodic", "graphs": [first, then]}}

    assert derive_chart_values([spec_of(topology=topology)])["edges"] == [
        ["anna", "ben"],
        ["ben", "cleo"],
        ["cleo", "dora"],
    ]


def test_of_a_random_one_every_pair_may_come() -> None:
    topology = {"sequence": {"kind": "random", "probability": 0.5}}

    assert len(derive_chart_values([spec_of(topology=topology)])["edges"]) == 6


def test_whoever_is_away_may_join_later() -> None:
    complete = {"graph": {"kind": "complete"}}
    away = spec_of(topology=complete, offline_intervals=[{"learner": "dora"}])

    assert derive_chart_values([away]) == derive_chart_values([spec_of(topology=complete)])


def test_runs_of_one_deployment_are_put_together() -> None:
    other = spec_of(learners=["dora", "emil"], capture="relay")
    values = derive_chart_values([spec_of(), other])

    assert list(values["learners"]) == [*NAMES, "emil"]
    assert values["edges"] == [*RING, ["dora", "emil"]]
    assert values["capture"] == "relay"


def test_an_organisation_is_told_of_its_neighbours_alone() -> None:
    values = derive_chart_values([spec_of(capture="mirror")], ["ben"])

    assert values["learners"] == {"ben": {}}
    assert values["edges"] == [["anna", "ben"], ["ben", "cleo"]]
    assert list(values["elsewhere"]) == ["anna", "cleo"]
    assert {"coordinator", "eavesdropper"} < values.keys()
    assert "eavesdropper" not in derive_chart_values([spec_of()], ["ben"])


@pytest.mark.parametrize("own", [[], ["ben"]])
def test_the_coordinators_release_knows_all(own: list[str]) -> None:
    values = derive_chart_values([spec_of()], own, coordinator=True)

    assert list(values["learners"]) == own
    assert values["edges"] == RING
    assert {*values["elsewhere"], *own} == set(NAMES)
    assert "coordinator" not in values


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(SpecError, match="must be of the run spec, got 'emil'; there are anna, ben, cleo, dora"):
        derive_chart_values([spec_of()], ["emil"])
    with pytest.raises(SpecError, match="have one capture mode, got relay and mirror"):
        derive_chart_values([spec_of(capture="relay"), spec_of(capture="mirror")])
    with pytest.raises(AssumptionViolated, match="not connected"):
        derive_chart_values([spec_of(topology={"graph": edges((0, 1), directed=False)})])


def test_it_is_printed_as_a_file_of_values(tmp_path: Path) -> None:
    spec = tmp_path / "spec.yaml"
    spec.write_text(yaml.safe_dump({**SPEC, "learners": ["1", "no", "Ä b"]}), encoding="utf-8")
    said = CliRunner().invoke(app, ["spec", "values", str(spec), "--own", "no"])

    assert said.exit_code == 0, said.output
    assert said.output == format_yaml(derive_chart_values([spec_of(learners=["1", "no", "Ä b"])], ["no"]))
    read = yaml.safe_load(said.output)
    assert list(read["learners"]) == ["no"]
    assert list(read["elsewhere"]) == ["1", "Ä b"]
