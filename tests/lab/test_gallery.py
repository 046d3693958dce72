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
from rich.console import Console
from typer.testing import CliRunner

from sottovoce_client.cli import app
from sottovoce_core.errors import CaptureError, SpecError
from sottovoce_core.experiment import prepare
from sottovoce_core.spec import parse_spec
from sottovoce_lab import simulated_attacks
from sottovoce_lab.gallery import MAX_PICTURES_PER_ROW, _encode_png, write_capture_gallery
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
    rows = 4 + 4  # of two attacks: the true records, and three strips
    assert page.count('<img src="data:image/png;base64,') == MAX_PICTURES_PER_ROW * rows


def test_a_picture_is_a_grey_png() -> None:
    """1 is black, 0 is white; where numbers may be negative, 0 is grey."""
    data = _encode_png(np.array([[0.0, 1.0, 0.5]]))
    assert data.startswith(b"\x89PNG\r\n\x1a\n") and data[16:24] == bytes([0, 0, 0, 3, 0, 0, 0, 1])
    begin = data.index(b"IDAT") + 4
    assert zlib.decompress(data[begin : data.index(b"IEND") - 8]) == bytes([0, 255, 0, 128])
    signed = _encode_png(np.array([[0.0, 1.0, -1.0]]))
    assert zlib.decompress(signed[signed.index(b"IDAT") + 4 : signed.index(b"IEND") - 8]) == bytes([0, 128, 0, 255])


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


async def test_one_capture_does_not_show_membership(tmp_path: Path) -> None:
    data = {"source": "digits", "partition": "shared"}
    capture = await captured(tmp_path, {"name": "dpsda-c", "sigma": 1.0}, data=data, loss={"kind": "logistic"})
    with pytest.raises(SpecError, match="membership is guessed over many"):
        shown(capture, tmp_path)


def test_what_is_no_capture_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CaptureError):
        write_capture_gallery(tmp_path / "none", tmp_path, 0, ())
