"""Deep leakage from gradients (Zhu, Liu, Han 2019): search for a record with the captured gradient.

Needs PyTorch. L-BFGS moves a dummy record and dummy label logits until the dummy's clipped gradient fits:

    minimise || clip(grad_theta loss(theta; record, softmax(logits))) - gradient ||^2

The attack works for smooth activations, at untrained parameters, for one record per gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import grad

from sottovoce_core.arrays import FloatArray
from sottovoce_core.losses.torch import TorchLoss
from sottovoce_core.losses.torch_module import FlatModule

_MAX_MISMATCH = 1e-8
"""Maximum mismatch of a gradient that fits."""


class SmoothNet(nn.Sequential):  # type: ignore[misc]
    """A small network for square grey pictures with sigmoid activations: convolutions with stride 2, and a linear layer.

    Args:
        channels: output channels of each convolution.
        kernel_size: side of their kernels, odd.
        side: side of a picture.
        classes: number of classes.

    With the defaults it has 690 parameters. With two convolutions of 6 channels and kernels of side 5 for pictures of side 28 it
    has 4,012, and is a smaller form of the network of Zhu, Liu, Han (2019).
    """

    def __init__(self, channels: Sequence[int] = (4,), kernel_size: int = 3, side: int = 8, classes: int = 10) -> None:
        layers, previous = list[nn.Module](), 1
        for width in channels:
            layers += [nn.Conv2d(previous, width, kernel_size, stride=2, padding=kernel_size // 2), nn.Sigmoid()]
            previous, side = width, (side + 1) // 2
        super().__init__(*layers, nn.Flatten(), nn.Linear(previous * side * side, classes))


@dataclass(frozen=True, slots=True)
class _SearchResult:
    """Result of a search.

    Attributes:
        record: `(features,)`.
        label: class with the largest logit.
        mismatch: squared distance of the gradients, relative to the square of the captured one; 0: it fits.
    """

    record: FloatArray
    label: int
    mismatch: float


def invert(
    loss: TorchLoss,
    parameters: FloatArray,
    gradient: FloatArray,
    seed: int,
    *,
    max_searches: int = 2,
    max_iterations: int = 100,
) -> _SearchResult:
    """Return the record and label whose gradient fits best.

    Args:
        loss: the network.
        parameters: `(dim,)` parameters at which the gradient was taken.
        gradient: `(dim,)` captured gradient.
        seed: seed of the initial dummies.
        max_searches: maximum number of searches; one that fits is the last.
        max_iterations: maximum L-BFGS iterations of a search.
    """
    theta, target = (torch.tensor(each, dtype=torch.float64) for each in (parameters, gradient))
    mismatch = _build_mismatch(loss, theta, target)
    generator, best = np.random.default_rng(seed), _SearchResult(np.zeros(0), 0, np.inf)
    with _use_one_thread():
        for _ in range(max_searches):
            found = _search(loss, mismatch, generator, max_iterations)
            best = min(best, found, key=lambda each: each.mismatch)
            if best.mismatch < _MAX_MISMATCH:
                break
    return best


@contextmanager
def _use_one_thread() -> Iterator[None]:
    """Run PyTorch in one thread: with tensors this small, synchronisation makes several threads eight times slower."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _build_mismatch(loss: TorchLoss, theta: Tensor, target: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """Build the mismatch of a dummy's gradient as a function of record and logits."""
    network, size = FlatModule(loss.loaded_module.module), target.square().sum()

    def dummy_loss(parameters: Tensor, record: Tensor, logits: Tensor) -> Tensor:
        scores = network.scores(parameters, record.reshape(loss.loaded_module.shape))
        value: Tensor = nn.functional.cross_entropy(scores, torch.softmax(logits, 0))
        return value

    def mismatch(record: Tensor, logits: Tensor) -> Tensor:
        dummy = grad(dummy_loss)(theta, record, logits)
        dummy = dummy * torch.clamp(loss.clip_threshold / dummy.norm(), max=1.0)
        return (dummy - target).square().sum() / size

    return mismatch


def _search(
    loss: TorchLoss, mismatch: Callable[[Tensor, Tensor], Tensor], generator: np.random.Generator, iterations: int
) -> _SearchResult:
    """Run one search from a random dummy."""
    record = torch.tensor(
        generator.random(int(np.prod(loss.loaded_module.shape))), dtype=torch.float64, requires_grad=True
    )
    logits = torch.tensor(generator.standard_normal(loss.classes), dtype=torch.float64, requires_grad=True)
    search = torch.optim.LBFGS(
        [record, logits],
        max_iter=iterations,
        tolerance_grad=1e-12,
        tolerance_change=1e-9,
        line_search_fn="strong_wolfe",
    )

    def closure() -> Tensor:
        search.zero_grad()
        value = mismatch(record, logits)
        value.backward()
        return value

    search.step(closure)
    with torch.no_grad():
        value = float(mismatch(record, logits))
    found = record.detach().numpy()
    return _SearchResult(found.copy(), int(logits.argmax()), value if np.isfinite(found).all() else np.inf)
