"""An audit's runs side by side: the same findings whatever works on them."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

from sottovoce.auditing import audit as core
from sottovoce.auditing.plan import AuditPlan, plan_audit
from sottovoce.auditing.verdict import Findings
from sottovoce.errors import SpecError
from sottovoce_client.backends import Backend, mapper_over
from tests.examples import made_up, small_run


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch) -> AuditPlan:
    monkeypatch.setattr(core, "SHARE_RUNS", 25)  # several shares of each world
    run = small_run(6)
    return plan_audit(run, made_up(run.spec), 0, runs=60)


def found(plan: AuditPlan, backend: Backend, jobs: int) -> Findings:
    with mapper_over(backend, jobs) as mapper:
        return core.audit_simulated(plan, mapper=mapper).found


@pytest.mark.parametrize("backend", ["processes", "dask", "ray"])
def test_what_is_found_does_not_depend_on_who_works(plan: AuditPlan, backend: Backend) -> None:
    if backend != "processes":
        pytest.importorskip(
            {"dask": "distributed", "ray": "ray"}[backend], reason=f"the extra `{backend}` is not installed"
        )
    here, there = found(plan, "processes", 1), found(plan, backend, 2)
    assert (here.tests, here.bounds) == (there.tests, there.bounds)


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.import_module

    def without(name: str, *more: Any) -> Any:
        if name == "distributed":
            raise ImportError
        return real(name, *more)

    monkeypatch.setattr(importlib, "import_module", without)
    with pytest.raises(SpecError, match=r"pip install 'sottovoce\[dask\]'"), mapper_over("dask", 2):
        pass
