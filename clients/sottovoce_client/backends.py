"""Much work side by side: processes here, or a Ray or Dask cluster; and how much of it is done, here or in other processes."""

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
"""`processes`, `ray`, `dask`, or the address of a cluster: `ray://HOST:PORT`, `dask://HOST:PORT`."""

Mapper = Callable[[Callable[[Any], Any], Sequence[Any]], Iterator[Any]]
"""As `map`: works on pieces, one after the other or side by side; results come in order."""

_CONNECT_TIMEOUT_S = 20
_PARENT_CHECK_PERIOD_S = 0.2
"""Between two looks of a worker, whether whoever started it is still there."""
_MAX_RETRIES = 3
"""Of a piece on Ray whose worker dies."""
_MAX_TASKS_PER_CORE = 4
"""Pieces that are on their way for each core of a cluster of Ray."""


def parse_backend(backend: Backend) -> tuple[str, str]:
    """What works, `processes`, `ray` or `dask`, and at which address; empty: the one that the environment names, or none.

    Raises:
        SpecError: there is no such backend.
    """
    engine, scheme, address = backend.partition("://")
    if engine not in ("processes", "ray", "dask") or (scheme and (engine == "processes" or not address)):
        raise SpecError(f"a backend must be processes, ray, dask, ray://HOST:PORT or dask://HOST:PORT, got {backend!r}")
    if address:
        parse_address(address.rpartition("://")[2], f"--backend {engine}://")  # Dask's own begin with tcp:// or tls://
    elif engine != "processes":
        address = os.environ.get({"ray": "RAY_ADDRESS", "dask": "DASK_SCHEDULER_ADDRESS"}[engine], "")
        return engine, address
    return engine, backend if engine == "ray" and address else address


@contextlib.contextmanager
def open_mapper(backend: Backend, jobs: int | None = None) -> Iterator[Mapper]:
    """How pieces of work are worked on; what comes of them does not depend on it.

    Args:
        backend: `processes` of this machine; `ray` or `dask`: the cluster that RAY_ADDRESS or DASK_SCHEDULER_ADDRESS names, or
            one of this machine's own for the time being; or the address of a cluster, `ray://HOST:PORT` or `dask://HOST:PORT`.
        jobs: at a time (default: one for each core; on a cluster that is there, what it has room for).

    Raises:
        SpecError: no such backend, or the extra is not installed.
        Unavailable: nobody answers at the address; or, while pieces are worked on, workers died again and again.
    """
    engine, address = parse_backend(backend)
    with {"processes": _processes, "ray": _ray, "dask": _dask}[engine](address, jobs) as mapper:
        yield mapper


@contextlib.contextmanager
def _processes(address: str, jobs: int | None) -> Iterator[Mapper]:
    jobs = jobs or os.cpu_count() or 1
    if jobs == 1:
        yield map
        return
    joblib, parent = import_optional("joblib", "joblib", "several jobs at a time"), os.getpid()

    def over(work: Callable[[Any], Any], pieces: Sequence[Any]) -> Iterator[Any]:
        if len(pieces) < 2:  # not worth starting processes for
            return map(work, pieces)
        with _deaf():
            resource_tracker.ensure_running()  # joblib needs it, and up to Python 3.11 starting it ends the deafness
        with _deaf():
            results = joblib.Parallel(return_as="generator")(
                joblib.delayed(_done_for)(parent, Path.cwd(), work, piece) for piece in pieces
            )
            begun.callback(_ended, results)
        return iter(results)

    with joblib.parallel_config("loky", n_jobs=jobs), contextlib.ExitStack() as begun:
        yield over


def _done_for(parent: int, folder: Path, work: Callable[[Any], Any], piece: Any) -> Any:
    """In a worker, which may have worked for the same parent before, in another folder."""
    if os.getpid() != parent:  # where joblib may start none, it works here
        _end_with(parent)
        os.chdir(folder)
    return work(piece)


@functools.cache
def _end_with(parent: int) -> None:
    """In a worker: it ends when whoever started it is gone, however that ended, in the middle of a piece, too."""

    def look() -> None:
        while os.getppid() == parent:
            time.sleep(_PARENT_CHECK_PERIOD_S)
        os._exit(1)

    threading.Thread(target=look, name="parent", daemon=True).start()


def _ended(results: Generator[Any]) -> None:
    """Nobody waits for these any more: whatever still works on them is killed."""
    with warnings.catch_warnings(action="ignore"):  # that they were not all taken
        results.close()


@contextlib.contextmanager
def _deaf() -> Iterator[None]:
    """Processes that are started meanwhile hear neither Ctrl-C nor a closed terminal: whoever started them ends them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def _dask(address: str, jobs: int | None) -> Iterator[Mapper]:
    distributed = import_optional("distributed", "dask", "--backend dask", "dask")
    here = {"n_workers": jobs or os.cpu_count() or 1, "threads_per_worker": 1, "dashboard_address": "127.0.0.1:0"}
    with _reaching("Dask", address):
        client = distributed.Client(address or None, timeout=_CONNECT_TIMEOUT_S, **({} if address else here))
    joblib = import_optional("joblib", "joblib", "--backend dask")

    def over(work: Callable[[Any], Any], pieces: Sequence[Any]) -> Iterator[Any]:
        results: Iterator[Any] = joblib.Parallel(return_as="generator")(joblib.delayed(work)(piece) for piece in pieces)
        return results

    with client, _dying("Dask", distributed.KilledWorker), joblib.parallel_config("dask", n_jobs=jobs or -1):
        yield over


@contextlib.contextmanager
def _ray(address: str, jobs: int | None) -> Iterator[Mapper]:
    ray = import_optional("ray", "ray", "--backend ray", "ray")
    here = {"num_cpus": jobs or os.cpu_count() or 1, "include_dashboard": False}
    with _reaching("Ray", address):
        ray.init(address or None, log_to_driver=False, logging_level="error", **({} if address else here))

    def result(reference: Any) -> Any:
        try:
            return ray.get(reference)
        except ray.exceptions.RayTaskError as error:  # whose text is the worker's traceback
            raise error.cause from None

    try:
        most = jobs or _MAX_TASKS_PER_CORE * max(int(ray.cluster_resources().get("CPU", 1)), 1)
        task = ray.remote(_done).options(max_retries=_MAX_RETRIES)
        with _dying("Ray", ray.exceptions.RayError):
            yield lambda work, pieces: _in_order(pieces, most, lambda piece: task.remote(work, piece), result)
    finally:
        ray.shutdown()


def _done(work: Callable[[Any], Any], piece: Any) -> Any:
    return work(piece)


def _in_order(
    pieces: Sequence[Any], most: int, submit: Callable[[Any], Any], result: Callable[[Any], Any]
) -> Iterator[Any]:
    """Results of pieces, as they come, of which so many are on their way at a time."""
    under_way = deque[Any]()
    for piece in pieces:
        if len(under_way) == most:
            yield result(under_way.popleft())
        under_way.append(submit(piece))
    while under_way:
        yield result(under_way.popleft())


@contextlib.contextmanager
def _reaching(engine: str, address: str) -> Iterator[None]:
    """Whatever an engine raises where it finds no cluster, in a line."""
    try:
        yield
    except (OSError, RuntimeError, ValueError) as error:
        first = next(iter(str(error).strip().splitlines()), type(error).__name__)
        where = f"the {engine} cluster at {address}" if address else f"a {engine} cluster of this machine"
        raise Unavailable(f"cannot reach {where}: {first}") from None


@contextlib.contextmanager
def _dying(engine: str, died: type[Exception]) -> Iterator[None]:
    """Workers that died again and again, or that lack what this process has, in a line."""
    try:
        yield
    except died as error:
        raise Unavailable(
            f"{engine}'s workers died at one piece of work again and again ({type(error).__name__}): have they enough memory?"
        ) from None
    except ImportError as error:
        raise SpecError(f"{engine}'s workers must have what is installed here: {error}") from None


# ---- progress of pieces ----------------------------------------------------------------------------------------------


_WRITE_PERIOD_S = 0.1
"""A piece says how far it is once in so long: what tells it every millisecond is not slowed down."""
_READ_PERIOD_S = 0.3
"""Whoever waits is told anew after so long."""
_SHARE = struct.Struct("=d")

CountCallback = Callable[[int, int], None]
"""Is told how much is done, and of how much."""


def map_with_progress(mapper: Mapper, size: Callable[[Any], int], on_count: CountCallback) -> Mapper:
    """The same mapper; while it works, `count` is told how much of all pieces is done, from a thread of its own.

    Args:
        mapper: works on pieces, which have a field `tell`: it is told what share of them is done, in [0, 1].
        size: of a piece.
        count: is told. Of a piece on another machine nothing is known before its result comes.
    """

    def over(work: Callable[[Any], Any], pieces: Sequence[Any]) -> Iterator[Any]:
        sizes = [size(piece) for piece in pieces]
        with contextlib.ExitStack() as files:
            try:
                path = files.enter_context(create_scratch_folder("sottovoce-count-")) / "done"
                path.write_bytes(bytes(_SHARE.size * len(pieces)))
            except OSError:  # work does not depend on whether it can be counted
                yield from mapper(work, pieces)
                return
            files.enter_context(_watched(path, sizes, on_count))
            tells = [_Tell(path, k) for k in range(len(pieces))]
            told = [replace(piece, tell=tell) for piece, tell in zip(pieces, tells, strict=True)]
            for tell, result in zip(tells, mapper(work, told), strict=True):
                tell(1.0)
                yield result

    return over


class _Tell:
    """Writes down what share of a piece is done. It may be pickled."""

    def __init__(self, path: Path, place: int) -> None:
        self._path, self._place, self._due = path, place, 0.0

    def __call__(self, done: float) -> None:
        now = time.monotonic()
        if done < 1.0 and now < self._due:
            return
        self._due = now + _WRITE_PERIOD_S
        with contextlib.suppress(OSError), self._path.open("r+b", buffering=0) as file:  # elsewhere there is none
            file.seek(_SHARE.size * self._place)
            file.write(_SHARE.pack(done))

    def __getstate__(self) -> tuple[Path, int]:
        return self._path, self._place

    def __setstate__(self, state: tuple[Path, int]) -> None:
        self._path, self._place = state
        self._due = 0.0  # clocks of two machines have nothing to do with each other


@contextlib.contextmanager
def _watched(path: Path, sizes: Sequence[int], count: CountCallback) -> Iterator[None]:
    """Tell what is written down: at once, now and then, and in the end."""
    over = threading.Event()

    def look() -> None:
        with contextlib.suppress(OSError):  # somebody has tidied up
            shares = [share for (share,) in _SHARE.iter_unpack(path.read_bytes())]
            count(int(sum(share * size for share, size in zip(shares, sizes, strict=True))), sum(sizes))

    def watch() -> None:
        while not over.wait(_READ_PERIOD_S):
            look()

    look()
    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
    look()
