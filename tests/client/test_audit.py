"""`sottovoce audit`: what it prints, writes and refuses, and its exit code."""

from __future__ import annotations

import io
import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from rich.console import Console
from typer.testing import CliRunner

from sottovoce.audit.simulated import audit
from sottovoce.errors import SpecError
from sottovoce.noise import NoNoise
from sottovoce.spec import load_spec
from sottovoce_client import audit as command
from sottovoce_client.cli import app
from sottovoce_client.prepare import Prepared, prepare


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    features = np.random.default_rng(0).normal(size=(60, 3))
    np.savez(tmp_path / "records.npz", X=features, y=(features[:, 0] > 0).astype(int))
    document = {
        "name": "small",
        "rounds": 8,
        "learners": ["a", "b", "c"],
        "algorithm": {"name": "ldp-dol", "sigma": [2.0, 1.0, 2.0]},
        "data": {"source": str(tmp_path / "records.npz")},
    }
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump(document), encoding="utf-8")
    return path


def shown(prepared: Prepared, folder: Path, **more: Any) -> tuple[int, str, dict[str, Any]]:
    """Exit code, what was printed, and audit.json."""
    out = io.StringIO()
    given = {"learner": None, "runs": 60, "confidence": 0.95, "seed": 0, **more}
    code = command.audit_to(folder, prepared, console=Console(file=out, width=160), **given)
    return code, out.getvalue(), json.loads((folder / "audit.json").read_text(encoding="utf-8"))


def test_what_holds_exits_with_zero(spec: Path, tmp_path: Path) -> None:
    flags = ["--runs", "60", "--learner", "c", "--out", str(tmp_path / "out")]
    done = CliRunner().invoke(app, ["audit", str(spec), *flags])
    assert done.exit_code == 0, done.output
    assert "CONSISTENT" in done.output and "black box" in done.output and "conformance" in done.output
    document = json.loads((tmp_path / "out" / "audit.json").read_text(encoding="utf-8"))
    assert document["learner"] == "c" and document["verdict"]["kind"] == "consistent"
    assert document["epsilon"]["lower_bound"] <= document["epsilon"]["largest_realised"]
    assert document["epsilon"]["largest_realised"] <= document["epsilon"]["promised"]
    assert {attempt["model"] for attempt in document["black_box"]["attempts"]} == {
        "logistic regression",
        "gradient boosting",
    }


def test_what_does_not_exits_with_one(spec: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A learner that says its parameters as they are: its loss is infinite, which JSON does not know."""
    monkeypatch.setattr(command, "audit", partial(audit, noise=lambda seed: NoNoise()))
    code, text, document = shown(prepare(load_spec(spec)), tmp_path)
    assert code == 1 and "b REFUTED" in text and "also:" in text
    assert document["verdict"]["kind"] == "refuted" and document["verdict"]["evidence"]


def test_without_a_name_the_learner_that_may_spend_most_is_audited(spec: Path) -> None:
    prepared = prepare(load_spec(spec))
    assert command.index_of(prepared, None) == 1
    assert command.index_of(prepared, "c") == 2
    with pytest.raises(SpecError, match="one of a, b, c, got d"):
        command.index_of(prepared, "d")


def test_nothing_promised_is_said(spec: Path, tmp_path: Path) -> None:
    document = yaml.safe_load(spec.read_text(encoding="utf-8"))
    document["algorithm"] = {"name": "d-ogd"}
    spec.write_text(yaml.safe_dump(document), encoding="utf-8")
    code, text, written = shown(prepare(load_spec(spec)), tmp_path)
    assert code == 0 and "UNPROMISED" in text and "no noise to test" in text
    assert written["epsilon"]["promised"] is None and written["epsilon"]["lower_bound"] > 1.0
