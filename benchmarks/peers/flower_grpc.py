"""Star of Flower with its interface until 1.13, which still exists: server and clients run for the whole run, over gRPC."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import socket
from typing import Any

os.environ["FLWR_TELEMETRY_ENABLED"] = "0"  # before the import, which reads it
import numpy as np
from flwr.client import NumPyClient, start_client
from flwr.common import parameters_to_ndarrays
from flwr.server import ServerConfig, start_server
from flwr.server.strategy import FedAvg
from progress import record_round


class Idle(NumPyClient):
    """Client that adds its index in each round, so that the mean rises by the mean of the indices."""

    def __init__(self, index: int, dim: int) -> None:
        self.index, self.dim = index, dim

    def get_parameters(self, config: Any) -> list[Any]:
        """Return the initial parameters."""
        return [np.zeros(self.dim)]

    def fit(self, parameters: list[Any], config: Any) -> tuple[list[Any], int, dict[str, Any]]:
        """Return the received vector plus the index."""
        return [parameters[0] + self.index], 1, {}


class RecordingFedAvg(FedAvg):
    """Federated averaging that records its progress."""

    def aggregate_fit(self, server_round: int, results: Any, failures: Any) -> Any:
        """Aggregate a round, check the mean, and record the round."""
        if failures:
            raise RuntimeError(f"{len(failures)} clients failed in round {server_round}: {failures[0]}")
        aggregated = super().aggregate_fit(server_round, results, failures)
        (value,) = parameters_to_ndarrays(aggregated[0])
        assert np.allclose(value, server_round * (len(results) - 1) / 2)
        record_round(server_round)
        return aggregated


def client(address: str, index: int, dim: int) -> None:
    """Run one client."""
    start_client(server_address=address, client=Idle(index, dim).to_client(), insecure=True)


def main() -> None:
    """Run until the process is killed."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("--learners", "--dim", "--rounds"):
        parser.add_argument(name, type=int, required=True)
    options = parser.parse_args()
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    context = multiprocessing.get_context("spawn")
    for i in range(options.learners):
        context.Process(target=client, args=(address, i, options.dim), daemon=True).start()
    minimums = {f"min_{stage}_clients": options.learners for stage in ("fit", "available")}
    strategy = RecordingFedAvg(fraction_evaluate=0.0, **minimums)
    start_server(server_address=address, config=ServerConfig(num_rounds=options.rounds), strategy=strategy)


if __name__ == "__main__":
    main()
