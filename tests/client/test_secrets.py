"""Nothing that a run leaves behind holds a record's values or a key: planted ones are looked for in all of it, decoded or not."""

from __future__ import annotations

import base64
import re
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import yaml

from sottovoce_core.arrays import FloatArray
from sottovoce_eavesdropper.capture_reader import open_capture
from tests.client.test_cli import TINY, ran

DIGITS = 9
"""Of a value, by which its text is known: some hundred values are looked for among some hundred thousand numbers, so that one
is found by chance in one of ten thousand tests."""


def planted(rows: int = 60, columns: int = 3) -> FloatArray:
    """Records whose values are in no other place."""
    return np.random.default_rng(20).uniform(0.11, 0.98, size=(rows, columns))


def unpacked(path: Path) -> Iterator[bytes]:
    """What a file holds: as it is, its arrays in base64, and the payloads of a capture."""
    raw = path.read_bytes()
    yield raw
    for packed in re.findall(rb'"bdata":\s*"([A-Za-z0-9+/=\\u]*)"', raw):
        yield base64.b64decode(packed.replace(b"\\u002f", b"/"))
    if path.name == "capture.json":
        for batch in open_capture(path.parent).read_batches(("payload",)):
            yield from batch.column("payload").to_pylist()


def holding(folder: Path, values: FloatArray) -> list[tuple[str, float]]:
    """Files with a value in them, as text or as a number, single or double."""
    found = []
    for path in sorted(folder.rglob("*")):
        for content in unpacked(path) if path.is_file() else ():
            for value in values.ravel().tolist():
                text = f"{value:.{DIGITS + 2}f}"[: DIGITS + 2].encode()
                if text in content or struct.pack("<d", value) in content:
                    found.append((path.name, value))
    return found


def keys_in(folder: Path) -> list[str]:
    return [path.name for path in folder.rglob("*") if path.is_file() and b"PRIVATE KEY" in path.read_bytes()]


def test_the_search_finds_what_is_there(tmp_path: Path) -> None:
    """As text, as bytes, and within a page's figures."""
    values = planted(1, 3)
    one, two, three = values[0].tolist()
    (tmp_path / "a.log").write_text(f'{{"what": {one!r}}}')
    (tmp_path / "b.bin").write_bytes(b"??" + struct.pack("<d", two))
    figure = base64.b64encode(np.array([1.0, three]).tobytes()).decode()
    (tmp_path / "c.html").write_text(f'{{"dtype":"f8","bdata":"{figure}"}}')
    (tmp_path / "d.key").write_text("-----BEGIN PRIVATE KEY-----")
    assert holding(tmp_path, values) == [("a.log", one), ("b.bin", two), ("c.html", three)]
    assert keys_in(tmp_path) == ["d.key"]


@pytest.mark.slow
def test_nothing_of_a_record_is_left_behind(tmp_path: Path) -> None:
    """Over encrypted channels, with a capture, accuracies and a report."""
    features = planted()
    np.savez(tmp_path / "records.npz", X=features, y=(features[:, 0] > 0.5).astype(int))
    data = {**TINY["data"], "source": str(tmp_path / "records.npz"), "scale": "none"}
    (tmp_path / "spec.yaml").write_text(yaml.safe_dump({**TINY, "data": data}), encoding="utf-8")
    out = tmp_path / "out"
    code, said, complaints = ran("up", str(tmp_path / "spec.yaml"), "--tls", "--out", str(out))
    assert code == 0, complaints
    (out / "said.txt").write_text(said + complaints, encoding="utf-8")
    assert {"report.html", "capture.json", "summary.json"} <= {path.name for path in out.rglob("*")}
    assert holding(out, features) == []
    assert keys_in(out) == []
    assert holding(tmp_path, features) != []  # the records themselves
