"""Ring of NVFlare: its peer-to-peer application, in its simulator or a proof of concept."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np
from nvflare.apis.dxo import from_shareable
from nvflare.app_opt.p2p.controllers import DistOptController
from nvflare.app_opt.p2p.executors import SyncAlgorithmExecutor
from nvflare.app_opt.p2p.types import Config, Neighbor, Network, Node
from nvflare.job_config.api import FedJob
from nvflare.recipe.poc_env import PocEnv
from progress import record_round

MIXED_ROUND = 50
"""Number of a round after which all vectors equal the mean of the initial ones."""


class Mean(SyncAlgorithmExecutor):
    """Executor that moves to the weighted mean of its vector and its neighbours', as NVFlare's consensus executor does."""

    def __init__(self, learners: int, dim: int) -> None:
        super().__init__(sync_timeout=60)
        self.learners, self.dim = learners, dim

    def run_algorithm(self, fl_ctx: Any, shareable: Any, abort_signal: Any) -> None:
        """Run all rounds."""
        value = np.full(self.dim, float(self.id))
        for t in range(from_shareable(shareable).data["iterations"]):
            if abort_signal.triggered:
                return
            self._exchange_values(fl_ctx, value=value, iteration=t)
            received = self.neighbors_values.pop(t)
            value = self._weight * value + sum(n.weight * received[n.id] for n in self.neighbors)
            if t == MIXED_ROUND:
                assert np.allclose(value, np.mean(range(1, self.learners + 1)))
            if self.id == 1:
                record_round(t + 1)


def build_ring(learners: int) -> Network:
    """Build the ring, with weights of one third."""
    graph = nx.cycle_graph(learners)
    return Network([Node(f"site-{i + 1}", [Neighbor(f"site-{j + 1}", 1 / 3) for j in sorted(graph[i])]) for i in graph])


def main() -> None:
    """Run until the process is killed."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("--learners", "--dim", "--rounds"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument(
        "--poc", action="store_true", help="run a proof of concept: server, clients and job as in a deployment"
    )
    options = parser.parse_args()
    job = FedJob(name="ring", min_clients=options.learners)
    job.to_server(DistOptController(Config(build_ring(options.learners), {"iterations": options.rounds})))
    job.to_clients(Mean(options.learners, options.dim), tasks=["config", "run_algorithm"])
    if options.poc:
        os.environ["NVFLARE_POC_WORKSPACE"] = str(Path("poc").resolve())
        env = PocEnv(num_clients=options.learners)
        env.get_job_result(env.deploy(job))
    else:
        job.simulator_run("simulator", n_clients=options.learners, threads=options.learners)


if __name__ == "__main__":
    main()
