"""Ring of Decent-DP: PyTorch processes over gloo; each averages with one of its two neighbours per round, in turn."""

from __future__ import annotations

import argparse
import os
import sys

import torch
from decent_dp.ddp import DecentralizedDataParallel
from decent_dp.utils import initialize_dist
from progress import record_round

MIXED_ROUND = 100


class Vector(torch.nn.Module):
    """Model whose parameters are a vector, with a loss of constant gradient, different in each process."""

    def __init__(self, dim: int, slope: float) -> None:
        super().__init__()
        self.slope = slope
        self.vector = torch.nn.Parameter(torch.zeros(dim, dtype=torch.float64))

    def forward(self) -> torch.Tensor:
        """Return the loss."""
        return self.slope * self.vector.sum()


def main() -> None:
    """Run until the process is killed: started directly, all processes; started by torchrun, one of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("--learners", "--dim", "--rounds"):
        parser.add_argument(name, type=int, required=True)
    options = parser.parse_args()
    if "LOCAL_RANK" not in os.environ:
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(options.learners)]
        os.execv(sys.executable, [sys.executable, *launch, *sys.argv])  # noqa: S606 - torchrun replaces this process
    rank, _ = initialize_dist()
    vector = Vector(options.dim, float(rank))
    model = DecentralizedDataParallel(
        vector,
        lambda parameters: torch.optim.SGD([parameter for _, parameter in parameters], lr=1.0),
        topology="ring",
    )
    model.train()
    for t in range(options.rounds):
        model().backward()
        if t == MIXED_ROUND:  # in each round all decreased by about the mean of their slopes
            assert torch.allclose(
                vector.vector / t, torch.tensor((1.0 - options.learners) / 2, dtype=torch.float64), rtol=0.1
            )
        if rank == 0:
            record_round(t + 1)


if __name__ == "__main__":
    main()
