"""Flower, as it was until 1.13 and can still be called: a server and clients that live as long as the run, by gRPC."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import socket
from typing import Any

os.environ["FLWR_TELEMETRY_ENABLED"] = "0"  # looked at when it is imported
import numpy as np
from flwr.client import NumPyClient, start_client
from flwr.common import parameters_to_ndarrays
from flwr.server import ServerConfig, start_server
from flwr.server.strategy import FedAvg
from progress import reached


class Idle(NumPyClient):
    """Adds its index in each round, so that the mean rises by theirs."""

    def __init__(self, index: int, dim: int) -> None:
        self.index, self.dim = index, dim

    def get_parameters(self, config: Any) -> list[Any]:
        """The first ones."""
        return [np.zeros(self.dim)]

    def fit(self, parameters: list[Any], config: Any) -> tuple[list[Any], int, dict[str, Any]]:
        """The vector that came goes back, a little more."""
        return [parameters[0] + self.index], 1, {}


class Counting(FedAvg):
    """Says how far it is."""

    def aggregate_fit(self, server_round: int, results: Any, failures: Any) -> Any:
        """A round is over."""
        if failures:
            raise RuntimeError(f"{len(failures)} clients failed in round {server_round}: {failures[0]}")
        aggregated = super().aggregate_fit(server_round, results, failures)
        (value,) = parameters_to_ndarrays(aggregated[0])
        assert np.allclose(value, server_round * (len(results) - 1) / 2)
        reached(server_round)
        return aggregated


def client(address: str, index: int, dim: int) -> None:
    """One client."""
    start_client(server_address=address, client=Idle(index, dim).to_client(), insecure=True)


def main() -> None:
    """Run until somebody ends it."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("--learners", "--dim", "--rounds"):
        parser.add_argument(name, type=int, required=True)
    options = parser.parse_args()
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    context = multiprocessing.get_context("spawn")
    for i in range(options.learners):
        context.Process(target=client, args=(address, i, options.dim), daemon=True).start()
    everyone = {f"min_{what}_clients": options.learners for what in ("fit", "available")}
    strategy = Counting(fraction_evaluate=0.0, **everyone)
    start_server(server_address=address, config=ServerConfig(num_rounds=options.rounds), strategy=strategy)


if __name__ == "__main__":
    main()
