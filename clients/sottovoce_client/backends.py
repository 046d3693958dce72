"""Much work side by side: joblib's processes here, or a Ray or Dask cluster."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

from sottovoce.data.files import import_extra

Backend = Literal["processes", "ray", "dask"]

Mapper = Callable[[Callable[[Any], Any], Sequence[Any]], Iterator[Any]]
"""As `map`: works on pieces, one after the other or side by side; results come in order."""


@contextlib.contextmanager
def mapper_over(backend: Backend, jobs: int | None = None) -> Iterator[Mapper]:
    """How pieces of work are worked on; what comes of them does not depend on it.

    Args:
        backend: `processes` of this machine; `ray` or `dask`: the cluster that RAY_ADDRESS or DASK_SCHEDULER_ADDRESS names, or
            one of this machine's own for the time being.
        jobs: at a time (default: one for each core).

    Raises:
        SpecError: the extra is not installed.
    """
    jobs = jobs or os.cpu_count() or 1
    if backend == "processes" and jobs == 1:
        yield map
        return
    joblib = import_extra("joblib", "joblib", "several jobs at a time")
    kind = "list" if backend == "ray" else "generator"  # Ray's backend gives all back at once

    def over(work: Callable[[Any], Any], pieces: Sequence[Any]) -> Iterator[Any]:
        if backend == "processes" and len(pieces) < 2:  # not worth starting processes for
            return map(work, pieces)
        results = joblib.Parallel(return_as=kind)(joblib.delayed(work)(piece) for piece in pieces)
        return iter(results)

    with _cluster(backend, jobs) as name, joblib.parallel_config(name, n_jobs=jobs):
        yield over


@contextlib.contextmanager
def _cluster(backend: Backend, jobs: int) -> Iterator[str]:
    """The name of joblib's backend, while what it needs is up."""
    if backend == "processes":
        yield "loky"
    elif backend == "dask":
        here = {"n_workers": jobs, "threads_per_worker": 1, "dashboard_address": "127.0.0.1:0"}
        address = os.environ.get("DASK_SCHEDULER_ADDRESS")
        with import_extra("distributed", "dask", "--backend dask", "dask").Client(address, **({} if address else here)):
            yield "dask"
    else:
        ray = import_extra("ray", "ray", "--backend ray", "ray")
        here = {} if os.environ.get("RAY_ADDRESS") else {"num_cpus": jobs}
        ray.init(include_dashboard=False, log_to_driver=False, logging_level="error", **here)
        try:
            import_extra("ray.util.joblib", "ray", "--backend ray", "ray").register_ray()
            yield "ray"
        finally:
            ray.shutdown()
