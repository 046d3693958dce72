"""Ring of p2pfl: gRPC nodes in separate processes that average a vector without training."""

# ruff: noqa: E402 - a setting must precede the other imports
from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pandas as pd
from p2pfl.settings import Settings

Settings.general.DISABLE_RAY = True  # before any other import of p2pfl
from p2pfl.learning.dataset.p2pfl_dataset import P2PFLDataset
from p2pfl.learning.frameworks.learner import Learner
from p2pfl.learning.frameworks.p2pfl_model import P2PFLModel
from p2pfl.node import Node
from p2pfl.utils.utils import set_standalone_settings
from progress import record_round


class Vector(P2PFLModel):
    """Model that consists of one vector."""

    def get_parameters(self) -> list[Any]:
        """Return a list of one array."""
        return [self.model]

    def set_parameters(self, params: list[Any] | bytes) -> None:
        """Set the vector from arrays, or from bytes of another node."""
        if isinstance(params, bytes):
            params, self.additional_info = self.decode_parameters(params)
        (self.model,) = params

    def get_framework(self) -> str:
        return "numpy"


class Idle(Learner):
    """Learner that adds its index in each round, so that all rise by the mean index; each call of `fit` begins a round."""

    def __init__(self, index: int, learners: int) -> None:
        super().__init__()
        self.index, self.mean, self.rounds = index, (learners - 1) / 2, 0

    def fit(self) -> P2PFLModel:
        """Return the model plus the index; all rounds before are done."""
        (value,) = self.get_model().get_parameters()
        if self.index == 0:
            assert np.allclose(value, self.mean * self.rounds)
            record_round(self.rounds)
        self.rounds += 1
        self.get_model().set_parameters([value + self.index])
        self.get_model().set_contribution([self.addr], 1)
        return self.get_model()

    def interrupt_fit(self) -> None:
        """Do nothing: `fit` returns at once."""

    def evaluate(self) -> dict[str, float]:
        return {}

    def get_framework(self) -> str:
        return "numpy"


def apply_settings(period_s: float) -> None:
    """Apply the settings of p2pfl's examples; with a period, use it for all waits of a round."""
    set_standalone_settings()
    Settings.heartbeat.TIMEOUT = 60  # with the default of 5 s, nodes of a busy machine treated each other as failed
    if period_s:
        Settings.general.GRPC_TIMEOUT = 1  # limits the deadlock of a cycle of nodes that wait for each other
        Settings.gossip.PERIOD = Settings.gossip.MODELS_PERIOD = period_s
        Settings.gossip.EXIT_ON_X_EQUAL_ROUNDS = 10_000


def run_node(index: int, options: argparse.Namespace, pipe: Connection) -> None:
    """Run one node: send its address, connect to the received address; the first node starts the rounds."""
    apply_settings(options.period_s)
    learner = Idle(index, options.learners)
    data = P2PFLDataset.from_pandas(pd.DataFrame({"x": [0.0]}))
    node = Node(Vector(np.zeros(options.dim)), data, learner=learner)
    node.start()
    pipe.send(node.addr)
    pipe.send(node.connect(pipe.recv()))
    pipe.recv()
    if index == 0:
        while len(node.get_neighbors()) < options.learners - 1:
            time.sleep(0.1)
        node.set_start_learning(rounds=options.rounds, epochs=1, trainset_size=options.learners)
    pipe.recv()


def main() -> None:
    """Run until the process is killed."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("--learners", "--dim", "--rounds"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument(
        "--period-s", type=float, default=0.0, help="period of the gossip (default: that of p2pfl's examples)"
    )
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in range(options.learners)]
    processes = [
        context.Process(target=run_node, args=(i, options, child_end)) for i, (_, child_end) in enumerate(pipes)
    ]
    for process in processes:
        process.start()
    ends = [parent_end for parent_end, _ in pipes]
    addresses = [end.recv() for end in ends]
    for i, end in enumerate(ends):  # one by one: five nodes that connect in a cycle at once wait for each other
        end.send(addresses[(i + 1) % len(addresses)])
        if not end.recv():
            sys.exit(f"node {i} could not connect")
    for end in ends:
        end.send(True)
    processes[0].join()


if __name__ == "__main__":
    main()
