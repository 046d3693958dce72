"""Class scores and per-record gradients of a PyTorch module.

In the core, only this module imports PyTorch; `losses.torch` imports it when a run needs it.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from sottovoce_core.arrays import Batch, FloatArray
from sottovoce_core.errors import SpecError
from sottovoce_core.registry import import_object

_SHAPES = {"mnist-cnn": (1, 28, 28), "cifar-cnn": (3, 32, 32)}
"""Shape of a record for the small CNN, by its name in a spec."""

MAX_CHUNK_RECORDS = 256
"""Maximum number of records in one call of the network."""
_MAX_CHUNK_NUMBERS = 2**24
"""Maximum numbers in the gradients of one call, unless it has one record: 128 MiB in float64."""


@dataclass(frozen=True, slots=True, eq=False)
class TorchModule:
    """A PyTorch module as a function of a flat parameter vector theta and records.

    theta is the concatenation of the module's trainable parameters, each in row-major order, in the order of
    `named_parameters`. The module is in evaluation mode and is never written to: every call works on a copy of its own, so
    calls may run in several threads.

    Attributes:
        module: maps a record `(1, *shape)` to scores `(1, classes)`. Learning starts from its parameters.
        shape: shape of a record as input of the module; a feature row has its numbers in row-major order.
        classes: number of classes.
        dtype: number type in which the module computes.
    """

    module: nn.Module
    shape: tuple[int, ...]
    classes: int
    dtype: torch.dtype

    @property
    def dim(self) -> int:
        """Number of trainable parameters."""
        return sum(parameter.numel() for parameter in _trainable(self.module).values())

    @property
    def initial_parameters(self) -> FloatArray:
        """The module's own parameters, `(dim,)`."""
        parameters = _trainable(self.module).values()
        return np.concatenate([each.detach().numpy().ravel() for each in parameters], dtype=np.float64)

    def gradient_sum(self, theta: FloatArray, batch: Batch, clip: float) -> FloatArray:
        """Return the sum of the records' gradients of the cross-entropy, each clipped to norm `clip`: `(..., dim)`."""
        theta = _align(theta, batch.features)
        total = np.zeros(theta.shape)
        present = _broadcast_records(np.ones_like(batch.labels) if batch.mask is None else batch.mask, theta, 1)
        for at, part, gradients in self._map(grad(FlatModule(self.module).loss), theta, batch.features, batch.labels):
            total[at] += _clipped_sum(gradients, present[at][part], clip)
        return total

    def values(self, theta: FloatArray, batch: Batch) -> FloatArray:
        """Return the cross-entropy of every record, `(..., records)`."""
        theta = _align(theta, batch.features)
        scores = self.scores(theta, batch.features)
        labels = _broadcast_records(batch.labels, theta, 1).astype(np.int64)
        chosen: FloatArray = np.take_along_axis(scores, labels[..., None], axis=-1)[..., 0]
        values: FloatArray = np.logaddexp.reduce(scores, axis=-1) - chosen
        return values

    def scores(self, theta: FloatArray, features: FloatArray) -> FloatArray:
        """Return the class scores `(..., records, classes)`."""
        theta = _align(theta, features)
        result = np.empty((*theta.shape[:-1], features.shape[-2], self.classes))
        with torch.no_grad():
            for at, part, scores in self._map(FlatModule(self.module).scores, theta, features):
                result[at][part] = scores
        return result

    def _map(
        self, function: Callable[..., Tensor], theta: FloatArray, features: FloatArray, labels: FloatArray | None = None
    ) -> Iterator[tuple[tuple[int, ...], slice, FloatArray]]:
        """Apply `function(theta, record[, label])` to every parameter vector and its records, in chunks of bounded memory.

        Yields the vector's index in the leading axes of theta, the slice of its records, and `(records of the chunk, ...)`.
        """
        vectorised = vmap(function, in_dims=(None, 0) if labels is None else (None, 0, 0))
        rows = _broadcast_records(features, theta, 2)
        classes = None if labels is None else _broadcast_records(labels, theta, 1)
        size = min(max(1, _MAX_CHUNK_NUMBERS // theta.shape[-1]), MAX_CHUNK_RECORDS)
        for at in np.ndindex(theta.shape[:-1]):
            vector = torch.tensor(theta[at], dtype=self.dtype)
            for first in range(0, features.shape[-2], size):
                part = slice(first, first + size)
                arguments = [torch.tensor(rows[at][part], dtype=self.dtype).reshape(-1, *self.shape)]
                if classes is not None:
                    arguments.append(torch.tensor(classes[at][part], dtype=torch.int64))
                yield at, part, vectorised(vector, *arguments).numpy().astype(np.float64)


class FlatModule:
    """A PyTorch module as a function of a flat parameter vector and one record."""

    def __init__(self, module: nn.Module) -> None:
        self._module = copy.deepcopy(module)  # a functional call puts its parameters into the module while it runs
        self._shapes = {name: parameter.shape for name, parameter in _trainable(module).items()}

    def scores(self, theta: Tensor, record: Tensor) -> Tensor:
        """Return the class scores `(classes,)`."""
        parts = torch.split(theta, [shape.numel() for shape in self._shapes.values()])
        parameters = {name: part.view(shape) for part, (name, shape) in zip(parts, self._shapes.items(), strict=True)}
        scores: Tensor = functional_call(self._module, parameters, (record.unsqueeze(0),))
        return scores.squeeze(0)

    def loss(self, theta: Tensor, record: Tensor, label: Tensor) -> Tensor:
        """Return the cross-entropy, `()`."""
        return nn.functional.cross_entropy(self.scores(theta, record), label)


def _trainable(module: nn.Module) -> Mapping[str, nn.Parameter]:
    """Return the trainable parameters. Those with `requires_grad` off keep their initial values."""
    return {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}


def _clipped_sum(gradients: FloatArray, present: FloatArray, clip_norm: float) -> FloatArray:
    """Sum the records' gradients, each scaled down to norm at most `clip_norm`: `(dim,)`.

    A gradient whose norm is not finite counts as zero: an error, or a state that is not finite, would leak information.

    Args:
        gradients: `(records, dim)`.
        present: `(records,)`, 1.0 for a record and 0.0 for padding.
        clip_norm: G.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        norms = np.sqrt(np.vecdot(gradients, gradients))
    finite = np.isfinite(norms)
    if not finite.all():
        norms, gradients = np.where(finite, norms, 0.0), np.where(finite[:, None], gradients, 0.0)
    total: FloatArray = (present * clip_norm / np.maximum(norms, clip_norm)) @ gradients
    return total


def _align(theta: FloatArray, features: FloatArray) -> FloatArray:
    """Repeat the parameters along the leading axes that only the records have (`losses.loss`)."""
    lead = np.broadcast_shapes(theta.shape[:-2], features.shape[:-2])
    return np.broadcast_to(theta, (*lead, *theta.shape[-2:]))


def _broadcast_records(per_record: FloatArray, theta: FloatArray, axes: int) -> FloatArray:
    """Repeat an array, whose last `axes` axes are a learner's records, along the axes of theta that it lacks."""
    if theta.ndim > 1:
        per_record = np.expand_dims(per_record, -axes - 1)  # the replicas of a learner share its records
    return np.broadcast_to(per_record, (*theta.shape[:-1], *per_record.shape[-axes:]))


# ---- construction from a spec -------------------------------------------------------------------------------


def make_module(
    name: str, options: Mapping[str, Any], shape: tuple[int, ...] | None, classes: int, dtype: str, seed: int
) -> TorchModule:
    """Create the module of a spec and test it on one record.

    PyTorch's generator is seeded by `seed` to initialise it, and restored afterwards.

    Raises:
        SpecError: no such module, or one that cannot be created, run on one record, or differentiated record by record.
    """
    shape = shape or _SHAPES.get(name)
    if shape is None:
        raise SpecError(f"loss.shape is required where loss.module is your own, {name!r}, got none")
    make = _factory(name, options, shape, classes)
    number = {"float32": torch.float32, "float64": torch.float64}[dtype]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            module = make().to(number).eval()
            scores = module(torch.zeros(1, *shape, dtype=number))  # also creates lazy parameters
            created = TorchModule(module, shape, classes, number)
            _require_differentiable(created, scores.shape)
        except SpecError:
            raise
        except Exception as error:  # foreign modules may raise any error
            text = f"loss.module {name!r} must map (1, {', '.join(map(str, shape))}) to (1, {classes})"
            raise SpecError(f"{text} and work under torch.func: {type(error).__name__}: {error}") from error
    return created


def _require_differentiable(created: TorchModule, scores: torch.Size) -> None:
    """Compute a gradient of two records, so that a module without per-record gradients fails before the run starts."""
    if tuple(scores) != (1, created.classes):
        raise SpecError(f"loss.module must give one record scores of shape (1, {created.classes}), got {tuple(scores)}")
    if not _trainable(created.module):
        raise SpecError("loss.module must have parameters with requires_grad, got none")
    created.gradient_sum(created.initial_parameters, Batch(np.zeros((2, math.prod(created.shape))), np.zeros(2)), 1.0)


def _factory(name: str, options: Mapping[str, Any], shape: tuple[int, ...], classes: int) -> Callable[[], nn.Module]:
    """Return the constructor of the module.

    Raises:
        SpecError: neither a built-in name nor an importable class of modules.
    """
    if name in _SHAPES:
        return lambda: _small_cnn(shape, classes, **options)
    if ":" not in name:
        raise SpecError(f"loss.module must be one of {', '.join(_SHAPES)}, or package.module:Class, got {name!r}")
    found = import_object(name, "loss.module", is_own=True)
    # Only subclasses of Module: a spec may come from another party and must not call arbitrary installed code.
    if not (isinstance(found, type) and issubclass(found, nn.Module)):
        raise SpecError(f"loss.module: {name!r} must be a subclass of torch.nn.Module, got {found!r}")
    return lambda: found(**options)


def _small_cnn(shape: tuple[int, ...], classes: int, channels: tuple[int, int] = (8, 16)) -> nn.Module:
    """Return a small LeNet for images `(channels, height, width)`: two 5x5 convolutions with ReLU and 2x2 pooling, one layer.

    Chen & Wang (2025) use an unspecified CNN for MNIST and CIFAR-10. This one has few parameters, because the noise of a
    message grows with their number: 5 994 for MNIST, 7 834 for CIFAR-10.
    """
    height, width = (((side - 4) // 2 - 4) // 2 for side in shape[1:])
    return nn.Sequential(
        nn.Conv2d(shape[0], channels[0], kernel_size=5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(channels[0], channels[1], kernel_size=5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(channels[1] * height * width, classes),
    )
