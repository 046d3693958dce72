"""Fixtures that all tests share."""

from __future__ import annotations

import gc
import os
import re
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import structlog
from hypothesis import HealthCheck, settings

from sottovoce_client.entry_point import set_environment_defaults

set_environment_defaults()  # before a test imports NumPy

# Services flush to disk before they speak, and their tests would mostly wait for that: in memory a flush costs nothing.
MEMORY, ROOM = "/dev/shm", 2**31  # noqa: S108 - each session has a folder of its own there
if os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free > ROOM:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", MEMORY)

PATIENCE_S = 60.0
COUNTS = pytest.StashKey[Counter[str]]()
KEPT_BY_LIBRARIES = 32
"""Descriptors that one module may make libraries open for good: a loop of gRPC's has three, Ray's client some twenty."""

# Examples have no deadline: how long one takes says more about the machine than about the code.
settings.register_profile("house", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("few", parent=settings.get_profile("house"), max_examples=10)
settings.load_profile("house")


def pytest_addoption(parser: pytest.Parser) -> None:
    what = "run a test with its first parameters only, unless it is marked `each`, and few examples of a property"
    parser.addoption("--once", action="store_true", help=what)


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--once"):
        settings.load_profile("few")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Start one process more than there are cores, because tests of services mostly wait."""
    return (os.cpu_count() or 1) + 1


@pytest.hookimpl(trylast=True)  # of those that -m and -k leave
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--once"):
        return
    kept, again, seen = list[pytest.Item](), list[pytest.Item](), set[str]()
    for item in items:
        name = item.nodeid.partition("[")[0]
        once = name in seen and item.get_closest_marker("each") is None
        (again if once else kept).append(item)
        seen.add(name)
    config.hook.pytest_deselected(items=again)
    items[:] = kept


def _left_out(config: pytest.Config) -> list[str]:
    """Markers of the tests that the default `-m` leaves out; a test counts under the first that it has."""
    return [name for name in re.findall(r"\w+", config.getini("addopts")[-1]) if name not in {"not", "or"}]


def pytest_deselected(items: list[pytest.Item]) -> None:
    """Count the tests that the default `-m` leaves out, by marker."""
    for item in items:
        found = next((mark for mark in _left_out(item.config) if item.get_closest_marker(mark)), None)
        if found is not None:
            item.config.stash.setdefault(COUNTS, Counter())[found] += 1


def pytest_sessionfinish(session: pytest.Session) -> None:
    output = getattr(session.config, "workeroutput", None)  # pytest-xdist: tests are collected by workers alone
    if output is not None:
        counts = session.config.stash.get(COUNTS, Counter[str]())
        output["left_out"] = dict(counts)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take the counts of a worker: every worker collects all tests."""
    node.config.stash[COUNTS] = Counter(getattr(node, "workeroutput", {}).get("left_out", {}))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say which tests were left out by default, and how to run them."""
    counts = config.stash.get(COUNTS, Counter[str]())
    if counts and config.option.markexpr == config.getini("addopts")[-1]:
        names = ", ".join(f"{counts[mark]} {mark}" for mark in _left_out(config) if counts[mark])
        terminalreporter.write_line(
            f"Left out: {names}. To run all but long ones: nox -s full, or pytest -m 'not long'"
        )


def pytest_collection_finish() -> None:
    """Modules and tests stay to the end: the collector need not walk through all of them after every module.

    What a module leaves is collected after it. So collections within one can be rare; they took a tenth of the time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000)


@pytest.fixture(autouse=True)
def same_umask() -> Iterator[None]:
    """Commands that are run in the test's own process take it away from others, for good."""
    before = os.umask(0o022)
    os.umask(before)
    yield
    os.umask(before)


@pytest.fixture(autouse=True)
def same_logs() -> Iterator[None]:
    """Such commands also say how logs are written, and where to: a stream that is closed once the test is over."""
    yield
    structlog.reset_defaults()


@pytest.fixture(scope="session")
def data_folder() -> Path:
    """The folder of the real data sets, which are too large to ship: `$SOTTOVOCE_DATA`."""
    folder = Path(os.environ.get("SOTTOVOCE_DATA", "nowhere"))
    if not folder.is_dir():
        pytest.skip(f"no real data sets: {folder} is not a folder (set SOTTOVOCE_DATA)")
    return folder


def _open_files() -> Counter[str]:
    """What this process has open, by name; nothing where the system has no such list."""
    names = Counter[str]()
    for descriptor in Path("/proc/self/fd").glob("*"):
        with suppress(FileNotFoundError):  # closed since, as the list itself is
            names[os.readlink(descriptor)] += 1
    return names


@pytest.fixture(scope="module", autouse=True)
def _left_behind(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What a module leaves unclosed is told of it, not of a later one in which the collector runs, or no descriptor is left.

    No file in the folder of the tests stays open. What else does is a library's, for as long as the process lives.
    """
    ours, before = str(tmp_path_factory.getbasetemp()), _open_files()
    yield
    gc.collect()
    patience = time.monotonic() + PATIENCE_S  # threads, gRPC's among them, may be about to close some
    while True:
        left = _open_files() - before
        files = [name for name in left if name.startswith(f"{ours}/")]
        if not files and left.total() <= KEPT_BY_LIBRARIES:
            return
        if time.monotonic() > patience:
            break
        time.sleep(0.1)
        gc.collect()
    pytest.fail(
        f"no file of a test may stay open, nor more than {KEPT_BY_LIBRARIES} descriptors of others: this module leaves "
        f"{left.total()}, of them {len(files)} names of files, such as {(files or [*left])[:3]}; close what its tests open"
    )
