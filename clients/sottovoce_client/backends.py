"""Parallel map over local processes, or a Ray or Dask cluster; and progress of the work across processes."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import struct
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

from sottovoce_client.atomic_files import create_scratch_folder
from sottovoce_core.errors import SpecError, Unavailable
from sottovoce_core.optional import import_optional
from sottovoce_rpc.addresses import parse_address

Backend = str
"""Name of a backend, `processes`, `ray` or `dask`, or the address of a cluster, `ray://HOST:PORT` or `dask://HOST:PORT`."""

Mapper = Callable[[Callable[[Any], Any], Sequence[Any]], Iterator[Any]]
"""Function like `map`, which may process pieces in parallel; results are in order."""

_CONNECT_TIMEOUT_S = 20
_PARENT_CHECK_PERIOD_S = 0.2
"""Seconds between two checks of a worker that its parent process is alive."""
_SAFE_PATH_VARIABLE = "PYTHONSAFEPATH"
_MAX_RETRIES = 3
"""Maximum number of retries on Ray of a piece whose worker dies."""
_MAX_TASKS_PER_CORE = 4
"""Maximum number of submitted pieces per core of a Ray cluster."""


def parse_backend(backend: Backend) -> tuple[str, str]:
    """Return the engine, `processes`, `ray` or `dask`, and the address of its cluster, from the name or the environment.

    An empty address means local workers.

    Raises:
        SpecError: There is no such backend.
    """
    engine, scheme, address = backend.partition("://")
    if engine not in ("processes", "ray", "dask") or (scheme and (engine == "processes" or not address)):
        raise SpecError(f"a backend must be processes, ray, dask, ray://HOST:PORT or dask://HOST:PORT, got {backend!r}")
    if address:
        parse_address(
            address.rpartition("://")[2], f"--backend {engine}://"
        )  # Dask's own addresses start with tcp:// or tls://
    elif engine != "processes":
        address = os.environ.get({"ray": "RAY_ADDRESS", "dask": "DASK_SCHEDULER_ADDRESS"}[engine], "")
        return engine, address
    return engine, backend if engine == "ray" and address else address


@contextlib.contextmanager
def open_mapper(backend: Backend, jobs: int | None = None) -> Iterator[Mapper]:
    """Yield a `map` over processes, Ray or Dask; results are identical on all.

    Args:
        backend: `processes` of this machine; `ray` or `dask`: the cluster that RAY_ADDRESS or DASK_SCHEDULER_ADDRESS names, or
            a temporary one on this machine; or the address of a cluster, `ray://HOST:PORT` or `dask://HOST:PORT`.
        jobs: Number of parallel jobs (default: one for each core; on an existing cluster, its capacity).

    Raises:
        SpecError: No such backend, or its optional dependency is not installed.
        Unavailable: The cluster does not answer, or workers died repeatedly while processing a piece.
    """
    engine, address = parse_backend(backend)
    with {"processes": _open_processes, "ray": _open_ray, "dask": _open_dask}[engine](address, jobs) as mapper:
        yield mapper


@contextlib.contextmanager
def _open_processes(address: str, jobs: int | None) -> Iterator[Mapper]:
    jobs = jobs or os.cpu_count() or 1
    if jobs == 1:
        yield map
        return
    joblib, parent = import_optional("joblib", "joblib", "several jobs at a time"), os.getpid()

    def map_pieces(work: Callable[[Any], Any], pieces: Sequence[Any]) -> Iterator[Any]:
        if len(pieces) < 2:  # starting processes would take longer
            return map(work, pieces)
        with _block_signals():
            resource_tracker.ensure_running()  # joblib needs it; up to Python 3.11 its start unblocks the signals
        with _block_signals():
            results = joblib.Parallel(return_as="generator")(
                joblib.delayed(_run_in_worker)(parent, Path.cwd(), work, piece) for piece in pieces
            )
            pending.callback(_cancel, results)
        return iter(results)

    with _protect_search_path(), joblib.parallel_config("loky", n_jobs=jobs), contextlib.ExitStack() as pending:
        yield map_pieces


@contextlib.contextmanager
def _protect_search_path() -> Iterator[None]:
    """Keep the working folder out of the front of the search path of processes started in the block.

    Else a file of it with the name of an installed module would be imported in its place. They receive `sys.path` of this one.
    """
    before = os.environ.get(_SAFE_PATH_VARIABLE)
    os.environ[_SAFE_PATH_VARIABLE] = "1"
    try:
        yield
    finally:
        os.environ.pop(_SAFE_PATH_VARIABLE)
        if before is not None:
            os.environ[_SAFE_PATH_VARIABLE] = before


def _run_in_worker(parent: int, folder: Path, work: Callable[[Any], Any], piece: Any) -> Any:
    """Process a piece in a worker, which an earlier call may have used in another folder."""
    if os.getpid() != parent:  # joblib runs the piece in this process if it can start none
        _exit_with_parent(parent)
        os.chdir(folder)
    return work(piece)


@functools.cache
def _exit_with_parent(parent: int) -> None:
    """Start a thread that ends this worker when its parent has ended, even in the middle of a piece."""

    def watch_parent() -> None:
        while os.getppid() == parent:
            time.sleep(_PARENT_CHECK_PERIOD_S)
        os._exit(1)

    threading.Thread(target=watch_parent, name="parent", daemon=True).start()


def _cancel(results: Generator[Any]) -> None:
    """Kill the workers that still process pieces."""
    with warnings.catch_warnings(action="ignore"):  # joblib warns about results that were not consumed
        results.close()


@contextlib.contextmanager
def _block_signals() -> Iterator[None]:
    """Block SIGINT and SIGHUP for processes started in the block: their parent ends them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def _open_dask(address: str, jobs: int | None) -> Iterator[Mapper]:
    distributed = import_optional("distributed", "dask", "--backend dask", "dask")
    local = {"n_workers": jobs or os.cpu_count() or 1, "threads_per_worker": 1, "dashboard_address": "127.0.0.1:0"}
    with _convert_connect_errors("Dask", address), _protect_search_path():
        client = distributed.Client(address or None, timeout=_CONNECT_TIMEOUT_S, **({} if address else local))
    joblib = import_optional("joblib", "joblib", "--backend dask")

    def map_pieces(work: Callable[[Any], Any], pieces: Sequence[Any]) -> Iterator[Any]:
        results: Iterator[Any] = joblib.Parallel(return_as="generator")(joblib.delayed(work)(piece) for piece in pieces)
        return results

    dead = distributed.KilledWorker
    with client, _convert_worker_errors("Dask", dead), joblib.parallel_config("dask", n_jobs=jobs or -1):
        yield map_pieces


@contextlib.contextmanager
def _open_ray(address: str, jobs: int | None) -> Iterator[Mapper]:
    ray = import_optional("ray", "ray", "--backend ray", "ray")
    local = {"num_cpus": jobs or os.cpu_count() or 1, "include_dashboard": False}
    with _convert_connect_errors("Ray", address):
        ray.init(address or None, log_to_driver=False, logging_level="error", **({} if address else local))

    def get_result(reference: Any) -> Any:
        try:
            return ray.get(reference)
        except ray.exceptions.RayTaskError as error:  # its text is the worker's traceback
            raise error.cause from None

    try:
        max_pending = jobs or _MAX_TASKS_PER_CORE * max(int(ray.cluster_resources().get("CPU", 1)), 1)
        task = ray.remote(_run).options(max_retries=_MAX_RETRIES)
        with _convert_worker_errors("Ray", ray.exceptions.RayError):
            yield lambda work, pieces: _map_in_order(
                pieces, max_pending, lambda piece: task.remote(work, piece), get_result
            )
    finally:
        ray.shutdown()


def _run(work: Callable[[Any], Any], piece: Any) -> Any:
    return work(piece)


def _map_in_order(
    pieces: Sequence[Any], max_pending: int, submit: Callable[[Any], Any], get_result: Callable[[Any], Any]
) -> Iterator[Any]:
    """Yield results of pieces in order, with at most `max_pending` submitted at a time."""
    pending = deque[Any]()
    for piece in pieces:
        if len(pending) == max_pending:
            yield get_result(pending.popleft())
        pending.append(submit(piece))
    while pending:
        yield get_result(pending.popleft())


@contextlib.contextmanager
def _convert_connect_errors(engine: str, address: str) -> Iterator[None]:
    """Convert errors of an engine that finds no cluster to `Unavailable`."""
    try:
        yield
    except (OSError, RuntimeError, ValueError) as error:
        first = next(iter(str(error).strip().splitlines()), type(error).__name__)
        cluster = f"the {engine} cluster at {address}" if address else f"a {engine} cluster of this machine"
        raise Unavailable(f"cannot reach {cluster}: {first}") from None


@contextlib.contextmanager
def _convert_worker_errors(engine: str, dead: type[Exception]) -> Iterator[None]:
    """Convert errors of workers that died, or that lack a package, to one line."""
    try:
        yield
    except dead as error:
        raise Unavailable(
            f"{engine}'s workers died repeatedly at one piece of work ({type(error).__name__}): do they have enough memory?"
        ) from None
    except ImportError as error:
        raise SpecError(f"{engine}'s workers must have the packages of this process: {error}") from None


# ---- progress of pieces ----------------------------------------------------------------------------------------------


_WRITE_PERIOD_S = 0.1
"""Minimum seconds between two writes of a piece's progress, so that frequent reports do not slow it down."""
_READ_PERIOD_S = 0.3
"""Seconds between two reports to the caller."""
_SHARE = struct.Struct("=d")

CountCallback = Callable[[int, int], None]
"""Callback for progress: (done, total)."""


def map_with_progress(mapper: Mapper, size: Callable[[Any], int], on_count: CountCallback) -> Mapper:
    """Wrap a mapper so that it reports its progress while it works.

    Args:
        mapper: Mapper over pieces with a field `on_progress`, which they call with their finished share, in [0, 1].
        size: Function that returns the size of a piece.
        on_count: Callback, called from a separate thread. A piece on another machine counts only when its result arrives.
    """

    def map_pieces(work: Callable[[Any], Any], pieces: Sequence[Any]) -> Iterator[Any]:
        sizes = [size(piece) for piece in pieces]
        with contextlib.ExitStack() as files:
            try:
                path = files.enter_context(create_scratch_folder("sottovoce-count-")) / "done"
                path.write_bytes(bytes(_SHARE.size * len(pieces)))
            except OSError:  # the work goes on without progress reports
                yield from mapper(work, pieces)
                return
            files.enter_context(_watch_progress(path, sizes, on_count))
            writers = [_ProgressWriter(path, k) for k in range(len(pieces))]
            reporting = [replace(piece, on_progress=writer) for piece, writer in zip(pieces, writers, strict=True)]
            for writer, result in zip(writers, mapper(work, reporting), strict=True):
                writer(1.0)
                yield result

    return map_pieces


class _ProgressWriter:
    """Picklable callback that writes the finished share of a piece to a file."""

    def __init__(self, path: Path, index: int) -> None:
        self._path, self._index, self._due = path, index, 0.0

    def __call__(self, done: float) -> None:
        now = time.monotonic()
        if done < 1.0 and now < self._due:
            return
        self._due = now + _WRITE_PERIOD_S
        with contextlib.suppress(OSError), self._path.open("r+b", buffering=0) as file:  # missing on other machines
            file.seek(_SHARE.size * self._index)
            file.write(_SHARE.pack(done))

    def __getstate__(self) -> tuple[Path, int]:
        return self._path, self._index

    def __setstate__(self, state: tuple[Path, int]) -> None:
        self._path, self._index = state
        self._due = 0.0  # monotonic clocks of two machines are unrelated


@contextlib.contextmanager
def _watch_progress(path: Path, sizes: Sequence[int], on_count: CountCallback) -> Iterator[None]:
    """Report the written progress at the start, periodically, and at the end of the block."""
    ended = threading.Event()

    def report() -> None:
        with contextlib.suppress(OSError):  # the file may have been removed
            shares = [share for (share,) in _SHARE.iter_unpack(path.read_bytes())]
            on_count(int(sum(share * size for share, size in zip(shares, sizes, strict=True))), sum(sizes))

    def report_periodically() -> None:
        while not ended.wait(_READ_PERIOD_S):
            report()

    report()
    thread = threading.Thread(target=report_periodically, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
    report()
