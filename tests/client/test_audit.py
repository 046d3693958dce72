"""`sottovoce audit`: what it prints, writes and refuses, and its exit code."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from rich.console import Console
from typer.testing import CliRunner

from sottovoce_client.auditing import audit as command
from sottovoce_client.cli import app
from sottovoce_client.terminal import ProgressReporter
from sottovoce_core.auditing.audit import Audit, audit_simulated
from sottovoce_core.auditing.plan import AuditPlan
from sottovoce_core.errors import DataError, SpecError
from sottovoce_core.experiment import PreparedRun, prepare
from sottovoce_core.noise import no_noise
from sottovoce_core.privacy.guarantee import ThreatModel
from sottovoce_core.spec import load_spec


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


def simulated(plan: AuditPlan, *, report_progress: ProgressReporter, **more: Any) -> Audit:
    return audit_simulated(plan, on_stage=report_progress, **more)


def shown(
    prepared: PreparedRun, folder: Path, work: command.Auditor = simulated, **more: Any
) -> tuple[int, str, dict[str, Any]]:
    """Exit code, what was printed, and audit.json."""
    out = io.StringIO()
    asked = command.AuditRequest(**{"runs": 60, **more})
    code = command.run_audit(folder, prepared, asked, work, Console(file=out, width=160))
    return code, out.getvalue(), json.loads((folder / "audit.json").read_text(encoding="utf-8"))


def test_what_holds_exits_with_zero(spec: Path, tmp_path: Path) -> None:
    flags = ["--runs", "60", "--learner", "c", "--jobs", "1", "--out", str(tmp_path / "out")]
    done = CliRunner().invoke(app, ["audit", str(spec), *flags])
    assert done.exit_code == 0, done.output
    assert "CONSISTENT" in done.output and "black box" in done.output and "conformance" in done.output
    document = json.loads((tmp_path / "out" / "audit.json").read_text(encoding="utf-8"))
    assert document["learner"] == "c" and document["verdict"]["kind"] == "consistent"
    assert document["source"] == "the simulator" and [each["learner"] for each in document["learners"]] == [
        "a",
        "b",
        "c",
    ]
    assert 0.0 <= document["single_rounds"]["estimate"] <= document["epsilon"]["promised"]
    assert (tmp_path / "out" / "audit.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    assert document["epsilon"]["lower_bound"] <= document["epsilon"]["largest_realised"]
    assert document["epsilon"]["largest_realised"] <= document["epsilon"]["promised"]
    assert {attempt["model"] for attempt in document["black_box"]["attempts"]} == {
        "logistic regression",
        "gradient boosting",
    }


def test_what_does_not_exits_with_one(spec: Path, tmp_path: Path) -> None:
    """A learner that says its parameters as they are: its loss is infinite, which JSON does not know."""
    broken = partial(simulated, noise=lambda seed: no_noise)
    code, text, document = shown(prepare(load_spec(spec)), tmp_path, broken)
    assert code == 1 and text.startswith("the run REFUTED") and "also:" in text  # and so do the others
    assert document["verdict"]["kind"] == "refuted" and document["verdict"]["evidence"]


def test_without_a_name_the_learner_that_may_spend_most_is_audited(spec: Path) -> None:
    prepared = prepare(load_spec(spec))
    assert command.choose_audited_learner(prepared, None) == 1
    assert command.choose_audited_learner(prepared, "c") == 2
    with pytest.raises(SpecError, match="one of a, b, c, got d"):
        command.choose_audited_learner(prepared, "d")


def test_nothing_promised_is_said(spec: Path, tmp_path: Path) -> None:
    document = yaml.safe_load(spec.read_text(encoding="utf-8"))
    document["algorithm"] = {"name": "d-ogd"}
    spec.write_text(yaml.safe_dump(document), encoding="utf-8")
    code, text, written = shown(prepare(load_spec(spec)), tmp_path)
    assert code == 0 and "NO-CLAIM" in text and "no noise to test" in text
    assert written["epsilon"]["promised"] is None and written["epsilon"]["lower_bound"] > 1.0


def test_a_record_and_its_replacement_can_be_chosen(spec: Path, tmp_path: Path) -> None:
    prepared = prepare(load_spec(spec))
    own = prepared.data.learners[0]
    row = int(own.order[2])

    def swap(**asked: Any) -> Any:
        return command.AuditRequest(learner="a", runs=20, **{"record": row, **asked}).plan(prepared).worlds.records_1

    assert np.array_equal(swap().features[row], -own.features[row])
    flipped = swap(replacement="label")
    assert np.array_equal(flipped.features[row], own.features[row]) and flipped.labels[row] != own.labels[row]
    assert np.array_equal(swap(replacement="c:2").features[row], prepared.data.learners[2].features[2])
    other = tmp_path / "other.json"
    other.write_text(json.dumps({"features": [0.5] * prepared.data.n_features, "label": 1}), encoding="utf-8")
    assert swap(replacement=str(other)).features[row].tolist() == [0.5] * prepared.data.n_features
    for wrong, text in (("d:1", "one of a, b, c"), ("c:999", "records, got 999"), ("other", "must be mirror, label")):
        with pytest.raises(SpecError, match=text):
            swap(replacement=wrong)
    with pytest.raises(SpecError, match="--record must be in"):
        swap(record=999)
    idle = next(k for k in range(len(own.labels)) if k not in own.order)
    with pytest.raises(DataError, match="must be learned in some round"):
        swap(record=idle)
    other.write_text("{}", encoding="utf-8")
    with pytest.raises(SpecError, match="must hold a JSON object"):
        swap(replacement=str(other))
    other.write_text(json.dumps({"features": [1.0], "label": 1}), encoding="utf-8")
    with pytest.raises(DataError, match="must have the shape"):
        swap(replacement=str(other))


@pytest.mark.parametrize(
    ("record", "text"),
    [
        ({"features": [0.1] * 4, "label": 7}, "labels of the logistic loss must be 0 or 1"),
        ({"features": [0.1] * 4, "label": 0.5}, "labels of the logistic loss must be 0 or 1"),
        ({"features": [30.0, 0.0, 0.0, 0.0], "label": 1}, "norm 30, where at most 1 is allowed"),
        ({"features": [1e999, 0.0, 0.0, 0.0], "label": 1}, "must be finite"),
    ],
)
def test_a_replacement_that_no_loss_is_defined_for_is_refused(
    spec: Path, tmp_path: Path, record: dict[str, Any], text: str
) -> None:
    """What is promised is about records of the loss: a correct learner would be accused of another one's gradient."""
    prepared = prepare(load_spec(spec))
    assert prepared.data.n_features == 4
    path = tmp_path / "other.json"
    path.write_text(json.dumps(record), encoding="utf-8")
    row = int(prepared.data.learners[0].order[0])
    asked = command.AuditRequest(learner="a", runs=20, record=row, replacement=str(path))
    with pytest.raises(DataError, match=text) as raised:
        asked.plan(prepared)
    assert "\n" not in str(raised.value)


def test_whoever_sees_decisions_only_replays_nothing(spec: Path, tmp_path: Path) -> None:
    _, text, document = shown(prepare(load_spec(spec)), tmp_path, threat=ThreatModel.OUTPUT)
    assert "published decisions only" in text and "not known to this adversary" in text
    assert document["likelihood"] is None and document["single_rounds"] is None and document["threat_model"] == "output"
    assert document["epsilon"]["largest_realised"] is None


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--replacement", "label"], "--replacement needs --record"),
        (["--neighbour", "b"], "--neighbour needs --threat neighbour"),
        (["--captures", "here", "--runs", "20"], "cannot be used with --runs, or with --on network"),
        (["--captures", "here", "--on", "network"], "cannot be used with --runs, or with --on network"),
    ],
)
def test_no_option_is_passed_over_in_silence(spec: Path, flags: list[str], text: str) -> None:
    done = CliRunner().invoke(app, ["audit", str(spec), *flags])
    assert isinstance(done.exception, SpecError) and text in str(done.exception)


def test_results_do_not_replace_those_of_captures(spec: Path, tmp_path: Path) -> None:
    (tmp_path / "net" / "captures").mkdir(parents=True)
    done = CliRunner().invoke(app, ["audit", str(spec), "--out", str(tmp_path / "net")])
    assert isinstance(done.exception, SpecError) and "choose another --out" in str(done.exception)


def test_what_an_auditor_must_know_stands_in_the_file(spec: Path, tmp_path: Path) -> None:
    prepared = prepare(load_spec(spec))
    _, text, document = shown(prepared, tmp_path)
    assert document["spec"]["name"] == "small" and len(document["data_sha256"]) == 64 and document["sottovoce"]
    assert document["black_box"]["varying_values_by_view"]["values"] > 0
    assert "rejects" in text
    assert "cannot refute this claim; exact losses, single rounds and conformance can." in text


def test_only_what_was_looked_at_is_said_to_refute_what_guesses_cannot(spec: Path) -> None:
    prepared = prepare(load_spec(spec))
    done = audit_simulated(command.AuditRequest(runs=20).plan(prepared))
    captured = replace(
        done, findings=replace(done.findings, round_bounds=None), varying_counts={**done.varying_counts, "sizes": 1}
    )
    blind = replace(done, findings=replace(done.findings, round_bounds=None, tests=()), run_losses=None)
    said = [list(command._list_notes(each, 0))[-1] for each in (captured, blind)]
    assert said[0].endswith("exact losses, conformance and side channels can.")
    assert said[1] == "So guesses of whole runs, which are all there is here, cannot refute this claim."


def test_a_narrow_terminal_gets_paragraphs_instead_of_a_cramped_table() -> None:
    rows = [("black box", "a tree on lengths", "7 of 14 right", "0", "3"), ("conformance", "noise", "none", "–", "–")]
    wide, narrow = (io.StringIO() for _ in range(2))
    for out, width in ((wide, 80), (narrow, 79)):
        command._print_rows(rows, Console(file=out, width=width))
    assert "tested" in wide.getvalue()
    assert narrow.getvalue().splitlines() == [
        "black box, a tree on lengths: 7 of 14 right; ε at least 0, claimed 3",
        "conformance, noise: none",
    ]
