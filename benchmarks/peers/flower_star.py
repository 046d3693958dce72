"""Star of Flower: a SuperLink and SuperNodes on one machine, federated averaging of a vector in every round."""

from __future__ import annotations

import argparse
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from progress import record_round

PROJECT = """
[project]
description = "averages a vector"
name = "star"
version = "1.0.0"
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "bench"

[tool.flwr.app.components]
serverapp = "flower_star:server"
clientapp = "flower_star:client"

[tool.flwr.app.config]
learners = {learners}
dim = {dim}
rounds = {rounds}
"""
CONNECTION = """
[superlink]
default = "here"

[superlink.here]
address = "127.0.0.1:{port}"
insecure = true
"""

client = ClientApp()
server = ServerApp()


@client.train()
def train(message: Message, context: Context) -> Message:
    """Return the received vector plus the index of the node."""
    (value,) = message.content["arrays"].to_numpy_ndarrays()
    arrays = ArrayRecord([value + context.node_config["index"]])
    return Message(RecordDict({"arrays": arrays, "metrics": MetricRecord({"num-examples": 1})}), reply_to=message)


class RecordingFedAvg(FedAvg):
    """Federated averaging that records its progress."""

    def aggregate_train(self, server_round: int, replies: Any) -> Any:
        """Aggregate a round, check the mean, and record the round."""
        replies = list(replies)
        arrays, metrics = super().aggregate_train(server_round, replies)
        (value,) = arrays.to_numpy_ndarrays()
        assert np.allclose(value, server_round * (len(replies) - 1) / 2)
        record_round(server_round)
        return arrays, metrics


@server.main()
def serve(grid: Grid, context: Context) -> None:
    """Run all rounds."""
    learners, dim, rounds = (int(context.run_config[name]) for name in ("learners", "dim", "rounds"))
    strategy = RecordingFedAvg(fraction_evaluate=0.0, min_train_nodes=learners, min_available_nodes=learners)
    strategy.start(grid, ArrayRecord([np.zeros(dim)]), num_rounds=rounds)


def find_free_ports(count: int) -> list[int]:
    """Return free TCP ports."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def main() -> None:
    """Run until the process is killed; all files go to the current folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("--learners", "--dim", "--rounds"):
        parser.add_argument(name, type=int, required=True)
    options = parser.parse_args()
    here, own = Path.cwd(), Path(sys.executable).parent
    app, home = here / "star", here / "home"
    app.mkdir()
    home.mkdir()
    (app / "pyproject.toml").write_text(PROJECT.format(**vars(options)), encoding="utf-8")
    for name in ("flower_star.py", "progress.py"):
        shutil.copy(Path(__file__).with_name(name), app)
    link, *nodes = find_free_ports(1 + options.learners)
    (home / "config.toml").write_text(CONNECTION.format(port=link), encoding="utf-8")
    os.environ |= {"FLWR_HOME": str(home), "FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
    os.environ["PATH"] = f"{own}{os.pathsep}{os.environ['PATH']}"
    common = ["--insecure", "--host", "127.0.0.1"]
    subprocess.Popen(
        [own / "flower-superlink", *common, "--port", str(link), "--disable-runtime-dependency-installation"]
    )
    for i, port in enumerate(nodes):
        to = ["--superlink", f"127.0.0.1:{link}", "--node-config", f"index={i}"]
        subprocess.Popen([own / "flower-supernode", *common, "--port", str(port), *to])
    while subprocess.run([own / "flwr", "run", app, "--stream"], check=False).returncode != 0:
        time.sleep(0.5)
    time.sleep(3600)


if __name__ == "__main__":
    main()
