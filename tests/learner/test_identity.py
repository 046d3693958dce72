"""A learner's store and incarnation on disk."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sottovoce_core.errors import CorruptStateError
from sottovoce_learner.storage.state_folder import StoreIdentity


def test_a_store_is_drawn_once_for_a_folder_and_a_learner(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    ann = StoreIdentity.load_or_create(tmp_path, "ann")
    assert len(ann.store_id) == 16 and ann.incarnation == 0
    assert StoreIdentity.load_or_create(tmp_path, "ann") == ann
    assert (
        len(
            {
                ann.store_id,
                StoreIdentity.load_or_create(tmp_path, "ben").store_id,
                StoreIdentity.load_or_create(other, "ann").store_id,
            }
        )
        == 3
    )


def test_an_incarnation_that_was_issued_is_known_to_the_next_process(tmp_path: Path) -> None:
    ann = StoreIdentity.load_or_create(tmp_path, "ann")
    assert (
        ann.write_incarnation(7, tmp_path)
        == StoreIdentity.load_or_create(tmp_path, "ann")
        == StoreIdentity("ann", ann.store_id, 7)
    )


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"format": 2}, "must be of format 1, got 2: use the version that wrote it"),
        ({"learner": "ben"}, "must be of learner 'ann', got 'ben'"),
        ({"store_id": "00"}, "is damaged"),
        ({"store_id": "no"}, "is damaged"),
        ({"incarnation": -1}, "is damaged"),
        ({"incarnation": True}, "is damaged"),
        ({"incarnation": None}, "is damaged"),
    ],
)
def test_what_is_not_an_identity_is_refused(tmp_path: Path, change: dict[str, object], text: str) -> None:
    StoreIdentity.load_or_create(tmp_path, "ann")
    path = tmp_path / "ann.identity"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(CorruptStateError, match=text):
        StoreIdentity.load_or_create(tmp_path, "ann")


@pytest.mark.parametrize("kept", [0, 1, 20])
def test_a_cut_identity_is_refused_and_nothing_is_drawn_over_it(tmp_path: Path, kept: int) -> None:
    StoreIdentity.load_or_create(tmp_path, "ann")
    path = tmp_path / "ann.identity"
    path.write_text(path.read_text()[:kept])
    with pytest.raises(CorruptStateError, match=f"{path} is damaged: .*sottovoce rebind"):
        StoreIdentity.load_or_create(tmp_path, "ann")
    assert len(path.read_text()) == kept


def test_a_disk_that_cannot_be_written_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    ann = StoreIdentity.load_or_create(tmp_path, "ann")
    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        with pytest.raises(OSError, match="No space left"):
            ann.write_incarnation(1, tmp_path)
    assert StoreIdentity.load_or_create(tmp_path, "ann") == ann
    assert [path.name for path in tmp_path.iterdir()] == ["ann.identity"]
