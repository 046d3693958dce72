"""Clusters of several nodes on this machine: the same numbers as here, also where a worker dies; where there is none, a line."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sottovoce_client import backends
from sottovoce_client.backends import open_mapper, parse_backend
from sottovoce_client.runs.sweep import sweep
from sottovoce_core.errors import SpecError, Unavailable
from sottovoce_core.experiment import Experiment
from tests.brokers import free_port

PATIENCE_S = 300.0
_ENDING_S = 3.0
"""What does not end by then is killed: how it ends is not tested."""


@contextmanager
def started(*commands: list[str]) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Processes, which end with the test; a worker that still looks for its scheduler may not listen."""
    silent = subprocess.DEVNULL
    processes = [subprocess.Popen(command, stdout=silent, stderr=silent) for command in commands]
    try:
        yield processes
    finally:
        for process in reversed(processes):  # who was started last needs the others
            process.terminate()
        for process in reversed(processes):
            try:
                process.wait(_ENDING_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@contextmanager
def dask_cluster() -> Iterator[str]:
    """A scheduler and two workers, each a process of its own; gives the backend that names them."""
    pytest.importorskip("distributed", reason="the extra `dask` is not installed")
    distributed: Any = importlib.import_module("distributed")
    port = free_port()
    at = f"tcp://127.0.0.1:{port}"
    program = [sys.executable, "-m", "distributed.cli.dask_scheduler"]
    scheduler = [*program, "--host", "127.0.0.1", "--port", str(port), "--dashboard-address", "127.0.0.1:0"]
    worker = [sys.executable, "-m", "distributed.cli.dask_worker", at, "--nthreads", "1", "--no-nanny"]
    worker += ["--host", "127.0.0.1", "--dashboard-address", "127.0.0.1:0"]
    with started(scheduler, worker, worker):
        with distributed.Client(at, timeout=PATIENCE_S) as client:
            client.wait_for_workers(2, timeout=PATIENCE_S)
        yield f"dask://127.0.0.1:{port}"


@contextmanager
def ray_cluster() -> Iterator[str]:
    """Two nodes; gives their address."""
    pytest.importorskip("ray", reason="the extra `ray` is not installed")
    nodes: Any = importlib.import_module("ray.cluster_utils")
    cluster = nodes.Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        cluster.add_node(num_cpus=1)
        cluster.wait_for_nodes()
        yield cluster.address
    finally:
        cluster.shutdown()


@pytest.fixture(scope="module", params=["dask", "ray"])
def at(request: pytest.FixtureRequest) -> Iterator[str]:
    """A cluster for all tests, which is there without the worker that one of them lets die, too."""
    with dask_cluster() if request.param == "dask" else ray_cluster() as address:
        yield address


@pytest.fixture
def cluster(at: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The backend that names it."""
    if at.startswith("dask"):
        return at
    monkeypatch.setenv("RAY_ADDRESS", at)
    return "ray"


def squared(where: tuple[int, Path]) -> int:
    """A piece of work; the first to come to number 5 dies of it."""
    number, folder = where
    (folder / f"{number}-{os.getpid()}").touch()
    if number == 5 and len(list(folder.glob("5-*"))) == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return number * number


@pytest.mark.external
@pytest.mark.slow
def test_a_worker_that_dies_is_no_loss(cluster: str, tmp_path: Path) -> None:
    with open_mapper(cluster) as mapper:
        found = list(mapper(_of_this_module(squared), [(number, tmp_path) for number in range(12)]))
    assert found == [number * number for number in range(12)]
    assert len(list(tmp_path.glob("5-*"))) == 2


def _of_this_module(work: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A function that goes to workers as it is: they cannot import the tests."""
    cloudpickle: Any = importlib.import_module("cloudpickle")
    cloudpickle.register_pickle_by_value(sys.modules[work.__module__])
    return work


@pytest.mark.external
@pytest.mark.slow
def test_a_sweep_gives_the_same_table_wherever_it_is_worked_on(cluster: str) -> None:
    experiment = Experiment(rounds=5, learners=3, algorithm="ldp-dol")
    changes = {"algorithm.sigma": [1, 2]}
    here = sweep(experiment, changes, replicas=3, vary_data=True, jobs=1)
    progress: list[tuple[int, int]] = []
    there = sweep(
        experiment, changes, replicas=3, vary_data=True, backend=cluster, progress=lambda *done: progress.append(done)
    )
    assert str(here) == str(there)
    for one, other in ((here.metrics, there.metrics), (here.summary(), there.summary())):
        np.testing.assert_equal(one.to_dict(), other.to_dict())
    assert progress == [(k, 6) for k in range(1, 7)]


def test_a_cluster_that_nobody_reaches_is_said_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("distributed", reason="the extra `dask` is not installed")
    monkeypatch.setattr(backends, "_CONNECT_TIMEOUT_S", 1)
    wanted = pytest.raises(Unavailable, match=r"cannot reach the Dask cluster at 127\.0\.0\.1:9: ")
    with wanted as said, open_mapper("dask://127.0.0.1:9"):
        pass
    assert "\n" not in str(said.value)


@pytest.mark.parametrize("backend", ["spark", "processes://x", "dask://", "ray:8786", ""])
def test_a_backend_that_there_is_not_is_refused(backend: str) -> None:
    with pytest.raises(SpecError, match="a backend must be processes, ray, dask, "):
        parse_backend(backend)


def test_an_address_may_stand_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DASK_SCHEDULER_ADDRESS", "tls://head:8786")
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    assert parse_backend("dask") == ("dask", "tls://head:8786")
    assert parse_backend("ray") == ("ray", "head:6379")
    assert parse_backend("dask://other:1") == ("dask", "other:1")
    assert parse_backend("ray://other:1") == ("ray", "ray://other:1")
