"""p2pfl: nodes of gRPC in processes of their own, a ring, which train nothing and average a vector."""

# ruff: noqa: E402 - one of its settings counts while the rest of it is imported
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

Settings.general.DISABLE_RAY = True  # before anything else of it is imported
from p2pfl.learning.dataset.p2pfl_dataset import P2PFLDataset
from p2pfl.learning.frameworks.learner import Learner
from p2pfl.learning.frameworks.p2pfl_model import P2PFLModel
from p2pfl.node import Node
from p2pfl.utils.utils import set_standalone_settings
from progress import reached


class Vector(P2PFLModel):
    """A model that is a vector."""

    def get_parameters(self) -> list[Any]:
        """Of one array."""
        return [self.model]

    def set_parameters(self, params: list[Any] | bytes) -> None:
        """From arrays, or as they come from others."""
        if isinstance(params, bytes):
            params, self.additional_info = self.decode_parameters(params)
        (self.model,) = params

    def get_framework(self) -> str:
        return "numpy"


class Idle(Learner):
    """Adds its index in each round, so that all rise by their mean; each call of `fit` begins a round."""

    def __init__(self, index: int, learners: int) -> None:
        super().__init__()
        self.index, self.mean, self.rounds = index, (learners - 1) / 2, 0

    def fit(self) -> P2PFLModel:
        """The model, a little more; all rounds before are done."""
        (value,) = self.get_model().get_parameters()
        if self.index == 0:
            assert np.allclose(value, self.mean * self.rounds)
            reached(self.rounds)
        self.rounds += 1
        self.get_model().set_parameters([value + self.index])
        self.get_model().set_contribution([self.addr], 1)
        return self.get_model()

    def interrupt_fit(self) -> None:
        """There is nothing to interrupt."""

    def evaluate(self) -> dict[str, float]:
        return {}

    def get_framework(self) -> str:
        return "numpy"


def settings(period_s: float) -> None:
    """Those of its examples, or with a period of their own for all that a round waits for."""
    set_standalone_settings()
    Settings.heartbeat.TIMEOUT = 60  # at 5 s, its default, nodes of a busy machine took each other for dead
    if period_s:
        Settings.general.GRPC_TIMEOUT = 1  # how long a circle of nodes, each of which waits for the next, stands still
        Settings.gossip.PERIOD = Settings.gossip.MODELS_PERIOD = period_s
        Settings.gossip.EXIT_ON_X_EQUAL_ROUNDS = 10_000


def node(index: int, options: argparse.Namespace, pipe: Connection) -> None:
    """One node: says its address, connects to the one that it is told, and the first of them starts the rounds."""
    settings(options.period_s)
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
    """Run until somebody ends it."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("--learners", "--dim", "--rounds"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("--period-s", type=float, default=0.0, help="of its gossip (default: that of its examples)")
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in range(options.learners)]
    processes = [context.Process(target=node, args=(i, options, theirs)) for i, (_, theirs) in enumerate(pipes)]
    for process in processes:
        process.start()
    ends = [ours for ours, _ in pipes]
    addresses = [end.recv() for end in ends]
    for i, end in enumerate(ends):  # one by one: five that shake hands in a circle wait for each other
        end.send(addresses[(i + 1) % len(addresses)])
        if not end.recv():
            sys.exit(f"node {i} could not connect")
    for end in ends:
        end.send(True)
    processes[0].join()


if __name__ == "__main__":
    main()
