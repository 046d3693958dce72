"""An audit's runs side by side: the same findings whatever works on them."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sottovoce_client.backends import Backend, open_mapper
from sottovoce_core.auditing import audit as core
from sottovoce_core.auditing.plan import AuditPlan, plan_audit
from sottovoce_core.auditing.verdict import Findings
from sottovoce_core.errors import SpecError
from tests.examples import made_up, small_run


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch) -> AuditPlan:
    monkeypatch.setattr(core, "MAX_CHUNK_RUNS", 25)  # several shares of each world
    run = small_run(6)
    return plan_audit(run, made_up(run.spec), 0, runs=60)


def found(plan: AuditPlan, backend: Backend, jobs: int) -> Findings:
    with open_mapper(backend, jobs) as mapper:
        return core.audit_simulated(plan, mapper=mapper).findings


@pytest.mark.each
@pytest.mark.parametrize(
    "backend",
    ["processes", pytest.param("dask", marks=pytest.mark.external), pytest.param("ray", marks=pytest.mark.external)],
)
def test_what_is_found_does_not_depend_on_who_works(plan: AuditPlan, backend: Backend) -> None:
    if backend != "processes":
        pytest.importorskip(
            {"dask": "distributed", "ray": "ray"}[backend], reason=f"the extra `{backend}` is not installed"
        )
    here, there = found(plan, "processes", 1), found(plan, backend, 2)
    assert here.tests == there.tests
    # Learned from equal numbers, a threshold still differs in its last digit with the place of an array in memory.
    assert [bound.threshold for bound in here.bounds] == pytest.approx(
        [bound.threshold for bound in there.bounds], rel=1e-9
    )
    assert [replace(bound, threshold=0.0) for bound in here.bounds] == [
        replace(bound, threshold=0.0) for bound in there.bounds
    ]


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.import_module

    def without(name: str, *more: Any) -> Any:
        if name == "distributed":
            raise ImportError
        return real(name, *more)

    monkeypatch.setattr(importlib, "import_module", without)
    with (
        pytest.raises(SpecError, match=r"in a clone of the repository, pip install '\.\[dask\]'"),
        open_mapper("dask", 2),
    ):
        pass


def test_workers_that_are_used_again_work_in_the_folder_of_today(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        with open_mapper("processes", 2) as over:
            assert set(over(Path.absolute, [Path()] * 4)) == {tmp_path / name}
