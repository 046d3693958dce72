"""Folders for the time being, and what is left of them where a process was killed."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sottovoce_client.atomic_files import create_scratch_folder

STAYS = """
import sys
from pathlib import Path
from sottovoce_client.atomic_files import create_scratch_folder
with create_scratch_folder(".iris-", Path(sys.argv[1])) as made:
    (made / "half").write_text("of it")
    print(made, flush=True)
    sys.stdin.read()
"""


def test_a_folder_is_gone_in_the_end(tmp_path: Path) -> None:
    with create_scratch_folder(".iris-", tmp_path) as made:
        (made / "half").write_text("of it")
        assert made.parent == tmp_path
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_process_left_is_cleared_and_nothing_else(tmp_path: Path) -> None:
    """Not where somebody still works, nor a folder that only has such a name."""
    (tmp_path / ".iris-mine").mkdir()
    with subprocess.Popen(
        [sys.executable, "-c", STAYS, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        theirs = Path(other.stdout.readline().strip())
        with create_scratch_folder(".iris-", tmp_path) as made:
            assert {theirs, made, tmp_path / ".iris-mine"} == set(tmp_path.iterdir())
        other.kill()
    assert (theirs / "half").exists()
    with create_scratch_folder(".iris-", tmp_path) as made:
        assert {made, tmp_path / ".iris-mine"} == set(tmp_path.iterdir())


def test_of_another_prefix_nothing_is_cleared(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", STAYS, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        theirs = Path(other.stdout.readline().strip())
        other.kill()
    with create_scratch_folder(".wine-", tmp_path):
        assert theirs.exists()


@pytest.mark.timeout(60)
def test_a_pipe_where_the_mark_should_be_is_not_waited_on(tmp_path: Path) -> None:
    (tmp_path / ".iris-trap").mkdir()
    os.mkfifo(tmp_path / ".iris-trap" / ".sottovoce-scratch")
    with create_scratch_folder(".iris-", tmp_path) as made:
        assert made.is_dir()


def test_a_folder_is_known_as_one_only_once_it_is_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another one begins right before the lock: it clears nothing of this one."""
    lock = fcntl.flock

    def late(file: Any, how: int) -> None:
        monkeypatch.setattr(fcntl, "flock", lock)
        with create_scratch_folder(".iris-", tmp_path):
            pass
        lock(file, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with create_scratch_folder(".iris-", tmp_path) as made:
        assert made.is_dir()
