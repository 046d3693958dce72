"""`sottovoce lab gallery`: what it shows, of simulated runs and of what crossed a real wire."""

from __future__ import annotations

import io
import json
import re
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from rich.console import Console
from scipy.special import ndtr, ndtri
from typer.testing import CliRunner

from sottovoce_client.cli import app
from sottovoce_client.formatting import format_number
from sottovoce_core.errors import CaptureError
from sottovoce_core.experiment import Experiment, prepare
from sottovoce_core.spec import parse_spec
from sottovoce_lab import simulated_attacks
from sottovoce_lab.gallery import MAX_PICTURES_PER_ROW, _encode_png, compute_roc_band, write_capture_gallery
from sottovoce_lab.simulated_attacks import _roc
from tests.docs.pages import CHECKOUT
from tests.services.network import network

for module in ("sklearn", "scipy", "jinja2"):
    pytest.importorskip(module, reason="the extra `audit` is not installed")


@pytest.fixture
def no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if PyTorch were not installed."""
    monkeypatch.setattr(simulated_attacks, "find_spec", lambda name: None)


def test_the_gallery_is_printed_and_written(tmp_path: Path, no_torch: None) -> None:
    flags = ["--epsilons", "1,100000", "--runs", "200", "--out", str(tmp_path)]
    done = CliRunner().invoke(app, ["lab", "gallery", *flags], terminal_width=100)
    assert done.exit_code == 0, done.output
    said = " ".join(done.output.split())  # lines are wrapped
    assert "pip install '.[torch]'" in said and "The attack on a network needs PyTorch" in said

    document = json.loads((tmp_path / "gallery.json").read_text(encoding="utf-8"))
    linear, gossip = document["attacks"]["linear"], document["attacks"]["gossip"]
    assert [each["protection"] for each in linear] == ["no noise", "ε = 100,000", "ε = 1"]
    assert linear[0]["recognised"] == 1.0 and linear[0]["mean_squared_error"] < 1e-12
    assert abs(linear[2]["similarity"]) < 0.1 and linear[2]["recognised"] < 0.05
    assert gossip[0]["protection"] == "as published, ε = 1 for decisions" and gossip[0]["recognised"] == 1.0
    assert gossip[-1]["recognised"] < 0.05
    assert document["attacks"]["network"] == []
    *covered, last = document["membership"]
    assert all(each["epsilon_lower_bound"] <= each["claim"] for each in covered)
    assert last["correct"] == last["runs"] == 200 and not last["is_covered_by_claim"]

    page = (tmp_path / "gallery.html").read_text(encoding="utf-8")
    assert "pip install &#39;.[torch]&#39;" in page and "proves nothing" in page
    assert not re.search(r"<(?:img|script|link)[^>]+(?:src|href)=\"(?!data:)", page)
    rows = 7 + 7  # of two attacks: the true records, three strips, and three guesses
    assert page.count('<img src="data:image/png;base64,') == MAX_PICTURES_PER_ROW * rows


def test_every_row_of_guesses_has_a_plot_with_its_band_and_its_numbers(tmp_path: Path, no_torch: None) -> None:
    done = CliRunner().invoke(app, ["lab", "gallery", "--epsilons", "1", "--runs", "100", "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    rows = json.loads((tmp_path / "gallery.json").read_text(encoding="utf-8"))["membership"]
    page = (tmp_path / "gallery.html").read_text(encoding="utf-8")
    plots = re.findall(r'<figure class="plot" id="plot-roc-(\d+)">(.*?)</figure>', page, re.DOTALL)
    assert [int(number) for number, _ in plots] == list(range(len(rows)))
    for (_, plot), row in zip(plots, rows, strict=True):
        assert "95 % band" in plot and "<title>guesses</title>" in plot
        assert ("<title>limit of ε" in plot) == row["is_covered_by_claim"]
        assert f"{row['algorithm']}, ε = {format_number(row['claim'])}: {row['record']}, from {row['seen']}" in page
    assert len(page.encode()) < 500_000


def test_a_band_contains_the_true_curve() -> None:
    """Of 400 curves of normal scores at least 95 % are covered; fewer than 368 with probability below 0.005."""
    generator, across, covered = np.random.default_rng(0), np.linspace(0.0, 1.0, 101), 0
    truth = ndtr(ndtri(across) + 1.0)
    for _ in range(400):
        false, true = _roc(generator.normal(1.0, size=200), generator.normal(size=200))
        at, low, high = compute_roc_band(false, true, 200)
        assert at == pytest.approx(across)
        covered += bool(np.all((low <= truth + 1e-12) & (truth <= high + 1e-12)))
    assert covered >= 368


def test_a_band_by_hand() -> None:
    """With a half-width above 1 nothing is excluded; with many runs the band is the curve."""
    rates = np.array([0.0, 0.5, 1.0])
    _, low, high = compute_roc_band(rates, rates, 1)
    assert low.max() == 0.0 and high.min() == 1.0
    across, low, high = compute_roc_band(np.linspace(0, 1, 10_001), np.linspace(0, 1, 10_001), 10**8)
    assert low == pytest.approx(across, abs=1e-3) and high == pytest.approx(across, abs=1e-3)


def test_a_picture_is_a_grey_png() -> None:
    """1 is black, 0 is white."""
    data = _encode_png(np.array([[0.0, 1.0, 0.5]]))
    assert data.startswith(b"\x89PNG\r\n\x1a\n") and data[16:24] == bytes([0, 0, 0, 3, 0, 0, 0, 1])
    begin = data.index(b"IDAT") + 4
    assert zlib.decompress(data[begin : data.index(b"IEND") - 8]) == bytes([0, 255, 0, 128])


# ---- of a spec -------------------------------------------------------------------------------------------------------


def shown_of(folder: Path, spec: dict[str, Any], *flags: str) -> tuple[str, list[dict[str, Any]]]:
    """Run the gallery of a spec; return its printed text and the results in gallery.json."""
    (folder / "spec.yaml").write_text(yaml.safe_dump(spec), encoding="utf-8")
    words = ["lab", "gallery", str(folder / "spec.yaml"), "--out", str(folder / "out"), *flags]
    done = CliRunner().invoke(app, words, terminal_width=120)
    assert done.exit_code == 0, done.output
    document = json.loads((folder / "out" / "gallery.json").read_text(encoding="utf-8"))
    assert document["membership"] == []
    return done.output, document["attacks"]["spec"]


def test_records_of_another_data_set_are_rebuilt_from_the_messages_of_a_spec(tmp_path: Path) -> None:
    spec = {
        "rounds": 20,
        "learners": 2,
        "algorithm": {"name": "ldp-dol", "sigma": 100.0},
        "data": {"source": "breast_cancer", "scale": "range"},
    }
    text, found = shown_of(tmp_path, spec, "--epsilons", "1,1000000", "--noise-factors", "1,2")
    epsilon = Experiment.model_validate(spec).epsilon()
    assert [each["protection"] for each in found] == [
        f"as in the spec, ε = {format_number(epsilon)}",
        "no noise",
        f"noise × 2, ε = {format_number(epsilon / 2)}",
        "ε = 1,000,000",
        "ε = 1",
    ]
    own, bare, _, little, much = found
    best = min(own["reference_errors"].values())
    assert all(each["reference_errors"] == own["reference_errors"] and each["records"] == 2 * 8 for each in found)
    assert bare["mean_squared_error"] < 1e-12 and bare["label_found"] == bare["recognised"] == 1.0
    assert little["mean_squared_error"] < best < min(own["mean_squared_error"], much["mean_squared_error"])
    said = " ".join(text.split())
    error = format_number(own["mean_squared_error"], 3)
    assert f"no better than a guess without any message: its error is {error}, that of the mean record" in said
    page = (tmp_path / "out" / "gallery.html").read_text(encoding="utf-8")
    assert "no better than a guess" in page and "guess: a blank picture" in page
    assert {(tmp_path / "out" / name).stat().st_mode & 0o777 for name in ("gallery.json", "gallery.html")} == {0o600}


def test_a_spec_without_noise_has_one_row(tmp_path: Path) -> None:
    data = {"source": "digits", "batch_size": 3}
    _, (only,) = shown_of(tmp_path, {"rounds": 5, "algorithm": {"name": "d-ogd"}, "data": data})
    assert only["protection"] == "as in the spec, no claim" and only["pairwise_accuracy"] is None
    assert only["records"] == 5 * 4  # each of three records: four of five rounds are seen in the message after them


def made_pictures(folder: Path) -> None:
    """A small file in the place of MNIST: bright squares on black."""
    generator, pictures = np.random.default_rng(0), np.zeros((60, 28, 28), dtype=np.uint8)
    for each, (x, y) in zip(pictures, generator.integers(4, 16, size=(60, 2)), strict=True):
        each[x : x + 8, y : y + 8] = 255
    labels = generator.integers(0, 10, size=60).astype(np.uint8)
    labels[:10] = np.arange(10)
    np.savez(folder / "mnist.npz", X_train=pictures[:40], y_train=labels[:40], X_test=pictures[40:], y_test=labels[40:])


def test_the_experiment_of_chen_and_wang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The results are those on MNIST: pictures are found without noise only, labels always."""
    pytest.importorskip("torch", reason="the extra `torch` is not installed")
    made_pictures(tmp_path)
    monkeypatch.setenv("SOTTOVOCE_DATA", str(tmp_path))
    item = yaml.safe_load((CHECKOUT / "experiments" / "ldp-dol" / "table-2-dlg.yaml").read_text(encoding="utf-8"))
    spec = item["base"]
    spec["learners"], spec["algorithm"]["sigma"], spec["algorithm"]["varsigma"] = 2, 0.07, [0.11, 0.12]
    _, found = shown_of(tmp_path, spec, "--noise-factors", "0.5")
    own, bare, half = found
    best = min(own["reference_errors"].values())
    assert [each["label_found"] for each in found] == [1.0] * 3 and bare["mean_squared_error"] < best / 2
    assert min(own["mean_squared_error"], half["mean_squared_error"]) > 2 * best


def test_a_built_in_network_is_attacked(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="the extra `torch` is not installed")
    made_pictures(tmp_path)
    scale = {"kind": "range", "low": 0, "high": 255}
    spec = {
        "rounds": 2,
        "learners": 2,
        "algorithm": {"name": "pd-ogd", "noise": {"kind": "none"}},
        "loss": {"kind": "torch", "module": "mnist-cnn", "clip_norm": 10.0},
        "data": {"source": str(tmp_path / "mnist.npz"), "scale": scale, "intercept": False},
    }
    _, (only,) = shown_of(tmp_path, spec)
    assert only["records"] == 2 and only["label_found"] == 1.0 and len(only["pictures"][0]) == 784


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["spec.yaml", "--captures", "folder"], "got both"),
        (["--noise-factors", "2"], "need SPEC"),
        (["spec.yaml", "--noise-factors", "0"], "--noise-factors must be above 0"),
    ],
)
def test_flags_that_do_not_fit_are_refused(flags: list[str], message: str) -> None:
    done = CliRunner().invoke(app, ["lab", "gallery", *flags])
    assert done.exit_code != 0 and message in str(done.exception)


# ---- of a capture ----------------------------------------------------------------------------------------------------


async def captured(folder: Path, algorithm: dict[str, Any], **sections: Any) -> Path:
    """The capture of a run over the network."""
    document = {
        "rounds": 5,
        "learners": ["a", "b", "c"],
        "algorithm": algorithm,
        "loss": {"kind": "softmax", "classes": 10},
        "decision_set": {"kind": "l2_ball", "radius": 1000.0},
        "data": {"source": "digits"},
        "capture": "relay",
        "durability": "process",
        **sections,
    }
    prepared = prepare(parse_spec(document, allow_imports=True))
    async with network(folder, prepared.run.spec.names) as up:
        outcome = await up.run(prepared.run.spec, prepared.data)
    assert outcome.state == "finished" and outcome.capture_location is not None
    return Path(outcome.capture_location)


def shown(capture: Path, folder: Path) -> tuple[str, dict[str, Any]]:
    """What is printed, and gallery.json."""
    out = io.StringIO()
    write_capture_gallery(capture, folder, 0, (), Console(file=out, width=120))
    return out.getvalue(), json.loads((folder / "gallery.json").read_text(encoding="utf-8"))


async def test_records_are_read_off_the_real_wire(tmp_path: Path) -> None:
    step = {"kind": "power", "scale": 1.0}
    text, document = shown(await captured(tmp_path, {"name": "d-ogd", "step": step}), tmp_path)
    assert "no claim" in text
    (figures,) = document["attacks"]["capture"]
    assert figures["records"] == 3 * 4 and figures["mean_squared_error"] < 1e-12 and figures["recognised"] == 1.0
    assert "5 rounds captured" in document["source"] and str(tmp_path) not in document["source"]
    modes = {name: (tmp_path / name).stat().st_mode & 0o777 for name in ("gallery.json", "gallery.html")}
    assert set(modes.values()) == {0o600}  # they show records
    assert "What this capture gives away" in (tmp_path / "gallery.html").read_text(encoding="utf-8")


async def test_noise_on_the_real_wire_hides_pictures(tmp_path: Path) -> None:
    text, document = shown(await captured(tmp_path, {"name": "ldp-dol", "sigma": 100.0}), tmp_path)
    assert "claimed ε" in text
    (figures,) = document["attacks"]["capture"]
    assert abs(figures["similarity"]) < 0.3 and figures["recognised"] < 0.2


async def test_a_shared_record_is_read_off_the_real_wire(tmp_path: Path) -> None:
    data = {"source": "digits", "partition": "shared"}
    algorithm = {"name": "dpsda-c", "sigma": 0.0}
    text, document = shown(await captured(tmp_path, algorithm, data=data, loss={"kind": "logistic"}), tmp_path)
    (figures,) = document["attacks"]["capture"]
    assert "is better than a guess" in text
    assert figures["records"] == 1 and figures["mean_squared_error"] < 1e-12 and figures["label_found"] == 1.0


def test_what_is_no_capture_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CaptureError):
        write_capture_gallery(tmp_path / "none", tmp_path, 0, ())
