"""What an owner does with its learner's model: predictions of a file, the model as a file, and what handing them out costs."""

from __future__ import annotations

import asyncio
import csv
import io
import json
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import structlog
import yaml

from sottovoce_client.live.sender import LearnerEndpoint
from sottovoce_client.models import exporting, predicting
from sottovoce_client.models.input_format import InputFormat
from sottovoce_core.arrays import FloatArray
from sottovoce_core.errors import DataError, FailedPrecondition, SpecError
from sottovoce_core.experiment import prepare
from sottovoce_core.spec import load_spec
from sottovoce_rpc.credentials import Credentials
from sottovoce_rpc.learner_status import LearnerState
from tests.client.test_cli import here as here
from tests.client.test_live_learner import CLOCK, NAMES
from tests.examples import small_spec
from tests.services.identities import Identities
from tests.services.network import OPERATOR, Network, network

COVERED = {"name": "pd-ogd", "noise": {"kind": "calibrated", "epsilon": 2.0}, "play": "mixed"}
CLEAN = {"name": "ldp-dol", "sigma": 1.0}
WIDTH, SECRET = 3, 31_337

Here = Callable[..., tuple[int, str, str]]


def raw(records: int = 12, width: int = WIDTH) -> FloatArray:
    """Some of them far longer than the feature bound; whatever a model is, the last two are of different classes."""
    features = np.random.default_rng(3).normal(size=(records, width)) * np.geomspace(0.1, 1e7, records)[:, None]
    features[-1] = -features[-2]
    return features


def spec_file(folder: Path, algorithm: Mapping[str, Any], *, classes: int = 2, **more: Any) -> Path:
    """A spec whose labels are words, in a folder of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    features = np.random.default_rng(0).normal(3.0, 2.0, size=(60, WIDTH))
    called = ["home", "died", "moved"][:classes]
    with (folder / "wards.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["age", "pulse", "weight", "outcome"])
        writer.writerows([[*row, called[k % classes]] for k, row in enumerate(features.tolist())])
    document: dict[str, Any] = {
        "rounds": 5,
        "learners": NAMES,
        "algorithm": dict(algorithm),
        "data": {"source": "wards.csv", "label": "outcome", "scale": "standard"},
        "durability": "process",
        "telemetry": {"predict": True},
    }
    if classes == 2:
        document["data"]["positive"] = ["died"]
    else:
        document["loss"] = {"kind": "softmax", "classes": classes}
    for section, change in more.items():
        document[section] = {**document.get(section, {}), **change}
    (folder / "wards.yaml").write_text(yaml.safe_dump(document), encoding="utf-8")
    return folder / "wards.yaml"


@asynccontextmanager
async def learned(folder: Path, file: Path, identities: Identities | None = None) -> AsyncIterator[Network]:
    """Learners that have finished the run of a spec; what is logged is apart from what commands print."""
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    spec = load_spec(file)
    data = prepare(spec, folders=()).data
    async with network(folder, NAMES, identities=identities) as up:
        await up.run(spec, data)
        yield up


async def ran(here: Here, *arguments: object) -> tuple[int, str, str]:
    """A command, beside the services that it asks."""
    return await asyncio.to_thread(here, *map(str, arguments))


def scores_of(file: Path, features: FloatArray) -> FloatArray:
    """What a .npz file says of records, by the program of docs/guides/models.md."""
    page = (Path(__file__).parents[2] / "docs" / "guides" / "models.md").read_text(encoding="utf-8")
    program = page.split("```python\n")[1].split("```")[0]
    names: dict[str, Any] = {"features": features}
    exec(program.replace('"north.npz"', repr(str(file))), names)  # noqa: S102 - a page of ours
    return np.asarray(names["scores"])


def by_onnx(file: Path, features: FloatArray) -> dict[str, Any]:
    """What a .onnx file says of them, by ONNX's own evaluator."""
    onnx = pytest.importorskip("onnx")
    reference = pytest.importorskip("onnx.reference")
    model = onnx.load(file)
    with np.errstate(all="ignore"):  # its sigmoid of a score that is far from 0 computes both branches
        found = reference.ReferenceEvaluator(model).run(None, {"features": features})
    return dict(zip([each.name for each in model.graph.output], found, strict=True))


@pytest.mark.parametrize("tls", [False, True])
async def test_a_model_and_what_it_says_leave_their_owner(tmp_path: Path, here: Here, tls: bool) -> None:
    identities = Identities(tmp_path / "ids") if tls else None
    who = [] if identities is None else ["--identity", identities.at(OPERATOR)]
    file, records = spec_file(tmp_path / "here", COVERED), tmp_path / "new.csv"
    with records.open("w", newline="", encoding="utf-8") as text:  # in another order, with what nobody asked for
        writer = csv.writer(text)
        writer.writerow(["id", "weight", "age", "pulse"])
        writer.writerows([[str(k), row[2], row[0], row[1]] for k, row in enumerate(raw().tolist())])
    async with learned(tmp_path, file, identities) as up:
        at, own = up.addresses["ann"], ["--spec", file, "--learner", "ann", *who]
        spent = (await up.status("ann")).epsilon_spent
        said = await ran(here, "predict", at, records, *own)
        told = await ran(here, "predict", at, records, *own, "--json")
        written = await ran(here, "predict", at, records, *own, "--out", tmp_path / "said.parquet")
        exported = await ran(here, "models", "export", at, "--out", tmp_path / "ann.npz", *own, "--json")
        shown = await ran(here, "models", "export", at, "--out", tmp_path / "ann.onnx", *own)
        again = await ran(here, "models", "export", at, "--out", tmp_path / "ann.npz", *own)
        other = await ran(here, "predict", at, records, "--spec", file, "--learner", "ben", *who)
        stranger = [] if identities is None else ["--identity", identities.at("operator/mallory")]
        refused = await ran(here, "predict", at, records, "--spec", file, *stranger) if stranger else None
    assert [each[0] for each in (said, told, written, exported, shown)] == [0] * 5, said[2] + exported[2]
    rows = list(csv.DictReader(io.StringIO(said[1])))
    scores = scores_of(tmp_path / "ann.npz", raw())
    np.testing.assert_allclose([float(row["score"]) for row in rows], scores, rtol=0, atol=1e-9)
    assert [row["label"] for row in rows] == ["died" if score > 0 else "home" for score in scores]
    assert {row["label"] for row in rows} == {"died", "home"}
    np.testing.assert_allclose([float(row["probability died"]) for row in rows], 1 / (1 + np.exp(-scores)), atol=1e-9)
    document, about = json.loads(told[1]), json.loads(exported[1])
    assert [each["score"] for each in document["predictions"]] == [float(row["score"]) for row in rows]
    assert pq.read_table(tmp_path / "said.parquet").column("score").to_pylist() == [float(r["score"]) for r in rows]
    assert document["privacy"]["epsilon"] == about["privacy"]["epsilon"] == spent > 0
    assert (about["learner"], about["rounds_done"], about["privacy"]["protected_by"]) == ("ann", 5, "messages")
    assert (about["columns"], about["label"]["classes"]) == (["age", "pulse", "weight"], ["home", "died"])
    assert "to publish them: the model of pd-ogd follows from messages" in said[2]
    assert "constants of held-out records, which are not protected" in shown[1] and "yes, epsilon" in shown[1]
    found = by_onnx(tmp_path / "ann.onnx", raw())
    np.testing.assert_allclose(found["scores"], scores, rtol=0, atol=1e-9)
    np.testing.assert_allclose(found["probabilities"], 1 / (1 + np.exp(-scores)), atol=1e-9)
    assert found["classes"].tolist() == (scores > 0).tolist()
    assert again[0] == 2 and "there is a file" in again[2]
    assert other[0] == 2 and "'ben'" in other[2] if not tls else other[0] == 2
    assert refused is None or (
        refused[0] == 2 and "operator/mallory must be authorised for this by the owner" in refused[2]
    )


async def test_a_model_that_no_epsilon_covers_stays_unless_its_owner_insists(tmp_path: Path, here: Here) -> None:
    file, out = spec_file(tmp_path / "here", CLEAN), tmp_path / "ann.npz"
    np.savez(tmp_path / "new.npz", X=raw())
    async with learned(tmp_path, file) as up:
        arguments = ["models", "export", up.addresses["ann"], "--spec", file, "--out", out]
        code, said, err = await ran(here, *arguments)
        assert (code, said, out.exists()) == (2, "", False)
        assert (
            "this one is not protected: the model of ldp-dol" in err
            and "to export it nevertheless, give --unprotected" in err
        )
        code, said, _ = await ran(here, *arguments, "--unprotected")
        predicted = await ran(here, "predict", up.addresses["ann"], tmp_path / "new.npz", "--spec", file)
    assert code == 0 and "NO, no epsilon" in said
    with np.load(out) as model:
        assert json.loads(str(model["metadata"]))["privacy"]["epsilon"] is None
    assert predicted[0] == 0 and "no epsilon covers it" in predicted[2]


KINDS: dict[str, dict[str, Any]] = {
    "softmax": {"classes": 3},
    "no intercept, as they are": {"data": {"intercept": False, "scale": "none"}},
    "range": {"data": {"scale": "range"}},
    "clipped": {"data": {"scale": {"kind": "standard", "clip": 0.7}}},
    "long rows": {"loss": {"kind": "logistic", "feature_bound": 40.0}},
    "short rows": {"loss": {"kind": "hinge", "feature_bound": 0.3}},
}


@pytest.mark.parametrize("kind", KINDS)
async def test_a_file_says_what_its_learner_does(tmp_path: Path, kind: str) -> None:
    file, records = spec_file(tmp_path / "here", COVERED, **KINDS[kind]), tmp_path / "new.npz"
    np.savez(records, X=raw())
    async with learned(tmp_path, file) as up:
        at, own = LearnerEndpoint(up.addresses["ben"], "ben", Credentials()), load_spec(file)
        model = await exporting.fetch_learner_model(at, own)
        said = (await predicting.predict(at, records, own)).table
    for name in ("ben.npz", "ben.onnx"):
        exporting.require_writable(tmp_path / name)
        model.write(tmp_path / name)
    classes = model.inputs.classes
    assert classes is not None
    heads = ["score"] if len(classes) == 2 else [f"score {name}" for name in classes]
    told = np.stack([said[head] for head in heads], axis=1).squeeze()
    np.testing.assert_allclose(scores_of(tmp_path / "ben.npz", raw()), told, rtol=0, atol=1e-9)
    found = by_onnx(tmp_path / "ben.onnx", raw())
    np.testing.assert_allclose(found["scores"], told, rtol=0, atol=1e-9)
    assert [classes[k] for k in found["classes"].astype(int)] == said["label"].tolist()


async def test_numbers_are_told_in_the_unit_of_the_records(tmp_path: Path) -> None:
    """By a model of live records that has heard nothing but noise."""
    fields = {
        "features": {"age": {"type": "number", "bounds": [0, 120]}, "pulse": {"type": "number", "bounds": [0, 200]}},
        "label": {"name": "days", "type": "number", "bounds": [10, 50]},
    }
    sections: dict[str, Any] = {
        "data": {"source": "live", "schema": fields},
        "loss": {"kind": "least_squares"},
        "clock": CLOCK,
    }
    spec, records = small_spec(5, NAMES, telemetry={"predict": True}, **sections), tmp_path / "new.csv"
    records.write_text("age,pulse\n61,80\n8,130\n100,60\n", encoding="utf-8")
    async with network(tmp_path, NAMES) as up:
        await up.start(spec, spec.data.width or 0)
        await up.until("ann", LearnerState.FINISHED)
        at = LearnerEndpoint(up.addresses["ann"], "", Credentials())
        said = (await predicting.predict(at, records, None)).table["label"]
        model = await exporting.fetch_learner_model(at, None)
    for name in ("ann.npz", "ann.onnx"):
        model.write(tmp_path / name)
    rows = model.inputs.read_rows(records)[:, :-1]
    assert len(set(said.tolist())) == 3
    label = model.metadata["label"]
    meant = label["low"] + (scores_of(tmp_path / "ann.npz", rows) + 1) * (label["high"] - label["low"]) / 2
    np.testing.assert_allclose(meant, said, rtol=0, atol=1e-9)
    np.testing.assert_allclose(by_onnx(tmp_path / "ann.onnx", rows)["values"], said, rtol=0, atol=1e-9)


async def test_what_is_no_record_of_the_run_is_refused(tmp_path: Path) -> None:
    file = spec_file(tmp_path / "here", COVERED)
    own = load_spec(file)
    (tmp_path / "short.csv").write_text("age,pulse\n1,2\n", encoding="utf-8")
    (tmp_path / "words.csv").write_text(f"age,pulse,weight\n1,2,x{SECRET}\n", encoding="utf-8")
    np.savez(tmp_path / "wide.npz", X=raw(width=WIDTH + 1))
    np.savez(tmp_path / "nan.npz", X=np.full((2, WIDTH), np.nan))
    wrong: list[tuple[str, type[Exception], str]] = [
        ("short.csv", DataError, "a column for every feature of the run, and has none for .*weight"),
        ("words.csv", DataError, "column 'weight' must be numeric"),
        ("wide.npz", DataError, "a record must have 3 features, got 4"),
        ("nan.npz", DataError, r"row 0 \(counted from 0\) must have only finite numbers"),
        ("none.csv", SpecError, "must be in a file that exists"),
        ("new.txt", SpecError, "FILE must be a .* file of records"),
    ]
    async with learned(tmp_path, file) as up:
        at = LearnerEndpoint(up.addresses["ann"], "", Credentials())
        for name, error, text in wrong:
            with pytest.raises(error, match=text) as said:
                await predicting.predict(at, tmp_path / name, own)
            assert str(SECRET) not in str(said.value)
        with pytest.raises(SpecError, match="give the run's spec with --spec"):
            await exporting.fetch_learner_model(at, None)
        other = load_spec(spec_file(tmp_path / "other", COVERED, data={"scale": "range"}))
        with pytest.raises(SpecError, match="its section data differs"):
            await exporting.fetch_learner_model(at, other)
        with pytest.raises(FailedPrecondition, match="'ann', not 'ben'"):
            await exporting.fetch_learner_model(LearnerEndpoint(at.address, "ben", Credentials()), own)
    silent = spec_file(tmp_path / "silent", COVERED, telemetry={"predict": False})
    async with learned(tmp_path / "silent", silent) as up:
        with pytest.raises(FailedPrecondition, match="did not opt in"):
            await exporting.fetch_learner_model(
                LearnerEndpoint(up.addresses["ann"], "", Credentials()), load_spec(silent)
            )


def test_constants_that_a_spec_states_need_no_records(tmp_path: Path) -> None:
    stated = {"kind": "range", "low": 0, "high": [1, 2, 4], "onto": [-1, 1]}
    spec = load_spec(spec_file(tmp_path, COVERED, data={"scale": stated, "source": "elsewhere.csv"}))
    rows = InputFormat.from_spec(spec, WIDTH + 1).preparation(np.ones((1, WIDTH)))
    assert rows.tolist() == [[1, 0, -0.5, 1]]


def test_files_of_other_formats_are_not_written(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"--out must be a \.npz or \.onnx file"):
        exporting.require_writable(tmp_path / "model.pkl")
    with pytest.raises(SpecError, match=r"--out must be a \.csv or \.parquet file"):
        predicting.require_writable(tmp_path / "said.xlsx")


def test_a_simulated_model_is_a_file_but_its_noise_protects_nobody(tmp_path: Path, here: Here) -> None:
    file, out = spec_file(tmp_path / "here", COVERED), tmp_path / "ben.npz"
    code, _, err = here("simulate", str(file), "--replicas", "2", "--out", str(tmp_path / "sim"))
    assert code == 0, err
    arguments = ["models", "export", str(tmp_path / "sim"), "--learner", "ben", "--replica", "1", "--out", str(out)]
    code, _, err = here(*arguments)
    assert code == 2 and "from a seed or a recording, which protects nothing" in err and not out.exists()
    code, _, err = here(*arguments, "--unprotected")
    assert code == 0, err
    decisions = pq.read_table(tmp_path / "sim" / "models.parquet").to_pylist()
    last = [row["value"] for row in decisions if (row["round"], row["sender"], row["replica"]) == (5, 1, 1)]
    with np.load(out) as model:
        assert [[*model["weights"], float(model["intercept"])]] == last
    for wrong, text in (
        (["--learner", "zoe"], "must be one of ann, ben"),
        (["--replica", "7"], "--replica must be a simulated repetition, got 7"),
    ):
        code, _, err = here(*arguments[:3], *wrong, "--out", str(out.with_name("x.npz")), "--unprotected")
        assert code == 2 and text in err
