"""The coupling matrix W of one undirected graph (Chen & Wang 2025).

`w_ij >= 0` is the weight that learner i gives to what it hears from j, zero where there is no edge. W is symmetric and
its rows sum to zero (`w_ii = -sum_j w_ij`), so -W is a weighted graph Laplacian: all eigenvalues are at most 0, and 0
is a simple one exactly if the graph is connected. `I + W` is the mixing matrix.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from sottovoce.arrays import FloatArray
from sottovoce.errors import CheckFailed
from sottovoce.network.graph_files import Edge
from sottovoce.network.mixing import ROUNDING, Mixing
from sottovoce.network.network import Network, reached


@dataclass(frozen=True, slots=True, eq=False)
class FixedNetwork(Network):
    """A connected graph of learners and its coupling matrix. Make one with `from_weights`.

    Instances compare by identity; compare `weights` to compare matrices.
    """

    weights: FloatArray
    """W, shape (n, n)."""
    _spectrum: FloatArray = field(init=False, repr=False)
    """Eigenvalues of W, ascending, shape (n,)."""
    _mixing: Mixing = field(init=False, repr=False)

    def __post_init__(self) -> None:
        _check_entries(self.weights)
        _check_reachable(self.weights)
        spectrum: FloatArray = np.linalg.eigvalsh(self.weights).astype(np.float64)
        _check_gap(spectrum)
        object.__setattr__(self, "_spectrum", spectrum)
        object.__setattr__(self, "_mixing", Mixing(_off_diagonal(self.weights), 1.0 + np.diag(self.weights)))

    @classmethod
    def from_weights(cls, matrix: Any) -> FixedNetwork:
        """The network with this coupling matrix, copied and then read-only.

        Raises:
            CheckFailed: W_SHAPE, W_NEGATIVE, W_ASYMMETRIC, W_ROW_SUM or W_DISCONNECTED, whichever fails first.
        """
        try:
            weights: FloatArray = np.array(matrix, dtype=np.float64)
        except (TypeError, ValueError) as error:
            raise CheckFailed("W_SHAPE", f"weights must be a finite square matrix, got {error}") from None
        weights.setflags(write=False)
        return cls(weights)

    @property
    def n_learners(self) -> int:
        return len(self.weights)

    @property
    def horizon(self) -> int:
        return 1

    @property
    def edges(self) -> tuple[Edge, ...]:
        """Undirected edges (i, j) with i < j, ascending."""
        rows, columns = np.nonzero(np.triu(self.weights, k=1))
        return tuple(zip(rows.tolist(), columns.tolist(), strict=True))

    def neighbours(self, learner: int) -> frozenset[int]:
        return self._mixing.neighbours_of(learner)

    @property
    def delta_2(self) -> float:
        """Second largest eigenvalue of W, always negative: the slowest rate at which disagreement dies out.

        It is the largest Rayleigh quotient of W over the non-zero vectors that sum to zero. One learner alone has no
        such vector, so its delta_2 is the supremum of the empty set, -inf: every upper limit proportional to -delta_2
        is then no limit.
        """
        return float(self._spectrum[-2]) if self.n_learners > 1 else float("-inf")

    @property
    def delta_m(self) -> float:
        """Smallest eigenvalue of W (0 for one learner alone)."""
        return float(self._spectrum[0])

    def at(self, t: int) -> Mixing:
        """The weights, the same in every round: neighbours' `w_ij`, and `1 - |w_ii|` for the own value."""
        return self._mixing

    def own_weight(self, learner: int) -> float:
        """|w_ii|, the sum of the learner's neighbour weights."""
        return abs(float(self.weights[learner, learner]))


# ---- checks of W -----------------------------------------------------------------------------------------


def _off_diagonal(weights: FloatArray) -> FloatArray:
    """A copy with zeros on the diagonal."""
    coupling = weights.copy()
    np.fill_diagonal(coupling, 0.0)
    return coupling


def _check_entries(weights: FloatArray) -> None:
    """W_SHAPE, W_NEGATIVE, W_ASYMMETRIC, W_ROW_SUM."""
    if weights.ndim != 2 or weights.shape[0] != weights.shape[1] or weights.size == 0:
        raise CheckFailed("W_SHAPE", f"weights must be a finite square matrix, got shape {weights.shape}")
    _refuse("W_SHAPE", "weights must be a finite square matrix", weights, ~np.isfinite(weights))
    _refuse("W_NEGATIVE", "coupling weights must be non-negative", weights, _off_diagonal(weights) < 0)
    # Against the largest entry, so that the checks mean the same for weights of any size and cannot overflow.
    relative = weights / (np.abs(weights).max() or 1.0)
    # However small the weight, an edge that one end alone knows would leave its other end waited for.
    one_sided = (weights > 0) != (weights.T > 0)
    asymmetric = (np.abs(relative - relative.T) > ROUNDING) | one_sided
    _refuse("W_ASYMMETRIC", "coupling weights must be symmetric", weights, asymmetric)
    unbalanced = np.diag(np.abs(relative.sum(axis=1)) > ROUNDING)
    text = "each diagonal weight must equal minus the sum of its row's neighbour weights"
    _refuse("W_ROW_SUM", text, weights, unbalanced)


def _refuse(code: str, text: str, weights: FloatArray, wrong: npt.NDArray[np.bool_]) -> None:
    """Raise about the first entry that is `wrong`, naming what the entry had to match."""
    if not wrong.any():
        return
    i, j = (int(index) for index in np.argwhere(wrong)[0])
    got = f"w[{i}][{j}]={float(weights[i, j])!r}"
    if code == "W_ASYMMETRIC":
        got += f" but w[{j}][{i}]={float(weights[j, i])!r}"
    if code == "W_ROW_SUM":
        got += f" but neighbour weights that sum to {float(_off_diagonal(weights)[i].sum())!r}"
    raise CheckFailed(code, f"{text}, got {got}")


def _check_reachable(weights: FloatArray) -> None:
    """W_DISCONNECTED, by breadth-first search from learner 0: exact, and it can name who is cut off."""
    missing = np.flatnonzero(~reached(_off_diagonal(weights)))
    if missing.size:
        raise CheckFailed(
            "W_DISCONNECTED",
            "the communication graph is not connected, got no path from learner 0 "
            f"to learner {int(missing[0])} ({missing.size} of {len(weights)} learners are cut off from learner 0)",
        )


def _check_gap(spectrum: FloatArray) -> None:
    """W_DISCONNECTED for a graph held together only by weights that vanish in rounding.

    Users of delta_2 divide by it and take powers of it, so its sign must be certain. The error of a computed eigenvalue
    is about n machine epsilons times the spectral radius.
    """
    if len(spectrum) < 2:
        return
    error = len(spectrum) * float(np.finfo(np.float64).eps) * abs(float(spectrum[0]))
    if spectrum[-2] >= -error:
        raise CheckFailed(
            "W_DISCONNECTED",
            "the communication graph is not connected, "
            f"got delta_2={float(spectrum[-2]):.3g}, which is zero up to rounding ({error:.1g}): "
            "its weakest link is too small beside the largest weight",
        )
