"""The units of systemd on a machine that boots: systemd as the first process of a container on an overlay of this one."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml

from tests.deploy_chart.test_units import UNITS

TRY = Path(__file__).with_name("ward_box.sh")
LISTENING = {"coordinator": 7400, "learner-north": 7401, "learner-south": 7402, "eavesdropper": 7500}
SPEC = {
    "name": "wards",
    "rounds": 200,
    "learners": ["north", "south"],
    "topology": {"graph": {"kind": "complete"}},
    "algorithm": {"name": "ldp-dol"},
    "data": {"source": "/etc/sottovoce/records.npz", "scale": "standard", "reuse": True},
    "clock": {"mode": "paced", "period_s": 0.03},
    "capture": "relay",
}
TARGET = """\
[Unit]
Requires=basic.target
After=basic.target
Wants=try.service sottovoce-coordinator.service sottovoce-eavesdropper.service
Wants=sottovoce-learner@north.service sottovoce-learner@south.service
"""
SERVICE = """\
[Service]
Type=oneshot
TimeoutStartSec=300
ExecStart=/bin/bash /etc/sottovoce/try.sh
"""
BOOT = """
set -e
umask 022
mount -t tmpfs tmpfs "$scratch"
mkdir "$scratch"/{changes,work,root}
mount -t overlay overlay -o "lowerdir=/,upperdir=$scratch/changes,workdir=$scratch/work" "$scratch/root"
cp -r --preserve=mode "$files/." "$scratch/root/"
rm -f "$scratch"/root/etc/{fstab,machine-id}
touch "$scratch/root/etc/machine-id"
exec systemd-nspawn --quiet --directory="$scratch/root" --machine="$machine" --private-network --register=no --keep-unit \\
  --console=pipe $binds --bind="$result:/result" --boot systemd.unit=try.target
"""


@pytest.fixture
def bootable() -> None:
    lacking = [name for name in ("systemd-nspawn", "unshare", "systemctl") if shutil.which(name) is None]
    if lacking:
        pytest.skip(f"{', '.join(lacking)} is not there: apt-get install systemd-container")
    if os.geteuid() != 0:
        pytest.skip("only root may boot a container")
    probe = ["unshare", "--mount", "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
    if subprocess.run(probe, capture_output=True, check=False).returncode != 0:
        pytest.skip("this machine lets nobody mount anything")


def _files(folder: Path) -> dict[str, str]:
    """What the machine has that this one has not; returns what is to be seen where, of Python and of what is installed."""
    systemd, own = folder / "etc" / "systemd" / "system", folder / "etc" / "sottovoce"
    for each in (systemd, own / "identities"):
        each.mkdir(parents=True)
    for unit in UNITS.glob("*.service"):
        shutil.copy(unit, systemd)
    (systemd / "try.target").write_text(TARGET, encoding="utf-8")
    (systemd / "try.service").write_text(SERVICE, encoding="utf-8")
    shutil.copy(TRY, own / "try.sh")
    for name, port in LISTENING.items():
        example = (UNITS / f"{name.partition('-')[0]}.env.example").read_text(encoding="utf-8")
        text = example.replace("box.ward.example", "localhost").replace(
            "# SOTTOVOCE_EAVESDROPPER", "SOTTOVOCE_EAVESDROPPER"
        )
        text = text.replace("# SOTTOVOCE_FEEDER", "SOTTOVOCE_FEEDER").replace("7401", str(port))
        (own / f"{name}.env").write_text(text, encoding="utf-8")
    features = np.random.default_rng(0).normal(size=(60, 3))
    np.savez(own / "records.npz", X=features, y=(features[:, 0] > 0).astype(int))
    (own / "spec.yaml").write_text(yaml.safe_dump(SPEC), encoding="utf-8")
    return {**_program(folder), **_issued(own)}


def _program(folder: Path) -> dict[str, str]:
    """The command where units look for it: this Python, and what it imports, seen at places that no sandbox hides."""
    paths = [
        each for each in sys.path if each and Path(each).is_dir() and not Path(each).is_relative_to(sys.base_prefix)
    ]
    seen = {path: f"/opt/path/{i}" for i, path in enumerate(paths)}
    program = folder / "opt" / "sottovoce" / "bin" / "sottovoce"
    program.parent.mkdir(parents=True)
    # A Python that is linked to a library of its own looks for that where it was built.
    python = (
        f"LD_LIBRARY_PATH=/opt/python/lib exec /opt/python/bin/python{sys.version_info.major}.{sys.version_info.minor}"
    )
    program.write_text(f'#!/bin/sh\n{python} -I /opt/sottovoce/main.py "$@"\n', encoding="utf-8")
    program.chmod(0o755)
    (program.parents[1] / "main.py").write_text(
        f"import sys\nsys.path[:0] = {list(seen.values())}\n"
        "from sottovoce_client.entry_point import main\nsys.exit(main())\n",
        encoding="utf-8",
    )
    return {sys.base_prefix: "/opt/python", **seen}


def _issued(own: Path) -> dict[str, str]:
    command = [sys.executable, "-m", "sottovoce_client", "pki"]
    for step in (
        ["init", "--domain", "ward.example"],
        ["issue", "coordinator/main", "eavesdropper/main", "learner/north", "learner/south", "operator/alice"],
    ):
        subprocess.run([*command, *step], cwd=own, check=True, capture_output=True, timeout=120)
    for name in ("coordinator-main", "eavesdropper-main", "operator-alice"):
        short = name.partition("-")[2] if name.startswith("operator") else name.partition("-")[0]
        (own / "identities" / name).rename(own / "identities" / short)
    return {}


@pytest.mark.container
@pytest.mark.usefixtures("bootable")
def test_a_run_on_the_units_outlives_that_a_learner_is_killed(tmp_path: Path) -> None:
    files, scratch, result = (tmp_path / name for name in ("files", "scratch", "result"))
    for folder in (files, scratch, result):
        folder.mkdir()
    binds = [f"--bind-ro={path}:{at}" for path, at in _files(files).items()]
    environment = {
        **os.environ,
        "files": str(files),
        "scratch": str(scratch),
        "result": str(result),
        "binds": shlex.join(binds),
        "machine": f"wardbox{os.getpid()}",
    }
    booted = subprocess.run(
        [str(shutil.which("unshare")), "--mount", "bash", "-c", BOOT],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=400,
    )
    log = result / "log"
    said = booted.stdout + booted.stderr + (log.read_text(encoding="utf-8") if log.exists() else "")

    def left(name: str) -> list[str]:
        assert (result / name).exists(), said
        return (result / name).read_text(encoding="utf-8").splitlines()

    assert left("run") == ["0"], said
    assert int(left("restarts")[0]) >= 1, said
    assert left("ends") == ["success"] * 4, said
    users = dict(line.split() for line in left("users"))
    assert len(set(users.values())) == 4, said
    assert "0" not in users.values()
    folders = [line.split() for line in left("folders")]
    assert {mode for _, mode, _ in folders} == {"700"}
    assert {Path(name).name for name, _, _ in folders} == {*LISTENING, "captures"} - {"eavesdropper"}
