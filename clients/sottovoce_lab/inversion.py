"""Deep leakage from gradients (Zhu, Liu, Han 2019): search for the record whose gradient is the one overheard.

Needs PyTorch. A dummy record and dummy label logits are moved by L-BFGS until the dummy's clipped gradient fits:

    minimise || clip(grad_theta loss(theta; record, softmax(logits))) - gradient ||^2

It works for smooth activations, at parameters that are not yet trained, for one record a gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import grad

from sottovoce_core.arrays import FloatArray
from sottovoce_core.losses.torch import TorchLoss
from sottovoce_core.losses.torch_module import FlatModule

_FITS = 1e-8
"""A mismatch below it: the gradient is met."""


class SmoothNet(nn.Module):  # type: ignore[misc]
    """A small network for 8x8 pictures with sigmoid activations: one convolution with stride 2, one layer; 690 parameters."""

    def __init__(self, channels: int = 4, classes: int = 10) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(1, channels, kernel_size=3, stride=2, padding=1)
        self.last = nn.Linear(channels * 16, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Scores `(records, classes)` of images `(records, 1, 8, 8)`."""
        scores: Tensor = self.last(torch.sigmoid(self.convolution(images)).flatten(1))
        return scores


@dataclass(frozen=True, slots=True)
class _Inverted:
    """What the search came to.

    Attributes:
        record: `(features,)`.
        label: the class that the dummy label settled on.
        mismatch: squared distance of the gradients, relative to the overheard one's square; 0: it fits.
    """

    record: FloatArray
    label: int
    mismatch: float


def invert(
    loss: TorchLoss,
    at: FloatArray,
    gradient: FloatArray,
    seed: int,
    *,
    max_searches: int = 2,
    max_iterations: int = 100,
) -> _Inverted:
    """The record and label whose gradient fits best.

    Args:
        loss: the network.
        at: `(dim,)` parameters that the gradient was taken at.
        gradient: `(dim,)` overheard.
        seed: of the dummies that the search starts from.
        starts: searches at most; one that fits is the last.
        iterations: of L-BFGS in a search.
    """
    theta, target = (torch.tensor(each, dtype=torch.float64) for each in (at, gradient))
    mismatch = _mismatch(loss, theta, target)
    generator, best = np.random.default_rng(seed), _Inverted(np.zeros(0), 0, np.inf)
    with _one_thread():
        for _ in range(max_searches):
            found = _search(loss, mismatch, generator, max_iterations)
            best = min(best, found, key=lambda each: each.mismatch)
            if best.mismatch < _FITS:
                break
    return best


@contextmanager
def _one_thread() -> Iterator[None]:
    """Several threads take eight times as long: the tensors are so small that they wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _mismatch(loss: TorchLoss, theta: Tensor, target: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """How badly the gradient of a dummy fits."""
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
) -> _Inverted:
    """One search from a random dummy."""
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
    return _Inverted(found.copy(), int(logits.argmax()), value if np.isfinite(found).all() else np.inf)
