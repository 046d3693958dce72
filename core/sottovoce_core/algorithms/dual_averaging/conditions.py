"""The conditions of dual averaging over a network (Cheng, Liao & Li 2023), corrected.

What would void the privacy guarantee, or let a run converge to something else than the minimiser, is refused. What only
voids a theorem is a finding.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import numpy as np

from sottovoce_core.algorithms.setting import Caveat, Setting
from sottovoce_core.decision_sets import Box, DecisionSet
from sottovoce_core.errors import require
from sottovoce_core.losses import Loss
from sottovoce_core.network.network import cut_off
from sottovoce_core.network.weights import Mixing

Stochastic = Literal["doubly", "columns"]
"""What the weights of every round must sum to one along: rows and columns, or columns only."""

_LONGEST_LOOK = 4096
"""Rounds whose weights are checked: a period of a changing network is shorter, and drawn graphs follow a rule."""

_ROUNDING = 1e-9
"""How far sums of weights may be from one."""


def check_network(setting: Setting, kind: Stochastic, *, rows_suffice: bool) -> Iterator[Caveat]:
    """W_SHAPE, W_NEGATIVE, SELF_WEIGHT, DOUBLY_STOCHASTIC or COLUMN_STOCHASTIC; reports ROW_STOCHASTIC, CONNECTIVITY.

    Args:
        setting: with the network whose weights are checked, up to `_LONGEST_LOOK` of the planned rounds.
        kind: what the weights must be.
        rows_suffice: report weights of which only the rows sum to one, instead of refusing them.
    """
    network, rounds = setting.network, setting.rounds
    hears, only_rows = np.zeros((network.n_learners, network.n_learners), dtype=bool), None
    for t in range(min(rounds, network.horizon, _LONGEST_LOOK)):
        mixing = network.planned(t)
        _check_entries(mixing, network.n_learners, t)
        if not _check_sums(mixing, t, kind, rows_suffice) and only_rows is None:
            only_rows = t
        hears |= mixing.neighbours > 0
    if only_rows is not None:
        text = "weights are row-stochastic only: every block gets a step size of its own, and no regret bound holds"
        yield Caveat("ROW_STOCHASTIC", f"{text}, got columns that do not sum to one in round {only_rows}")
    if lost := cut_off(hears, setting.names):
        text = "what some learners say never reaches others: the regret bounds do not apply"
        yield Caveat("CONNECTIVITY", f"{text}, got {lost} in all rounds")


def _check_entries(mixing: Mixing, n: int, t: int) -> None:
    shapes = mixing.neighbours.shape, mixing.own.shape
    require(shapes == ((n, n), (n,)), "W_SHAPE", f"weights must be ({n}, {n}) and ({n},), got {shapes} in round {t}")
    matrix = mixing.matrix
    finite = int(np.isfinite(matrix).sum())
    require(finite == n * n, "W_SHAPE", f"all {n * n} weights must be finite, got {finite} in round {t}")
    require(bool((matrix >= 0).all()), "W_NEGATIVE", f"weights must be non-negative, got {matrix.min()} in round {t}")
    own = float(mixing.own.min())
    require(own > 0, "SELF_WEIGHT", f"every learner needs a positive self weight, got {own:.6g} in round {t}")


def _check_sums(mixing: Mixing, t: int, kind: Stochastic, rows_suffice: bool) -> bool:
    """Whether the weights are as they must be; False where that is only reported."""
    rows, columns = (float(np.abs(mixing.matrix.sum(axis=axis) - 1.0).max()) for axis in (1, 0))
    got = f"got rows off one by {rows:.3g} and columns by {columns:.3g} in round {t}"
    if kind == "columns":
        text = "DPSDA-PS and DPPS need column-stochastic weights, 1/outdegree of the sender, itself counted"
        require(columns <= _ROUNDING, "COLUMN_STOCHASTIC", f"{text} (out_degree weights), {got}")
        return True
    if rows <= _ROUNDING < columns and rows_suffice:
        return False
    text = "DPSDA-C needs doubly stochastic weights, for example Metropolis (dpsda-ps takes directed graphs)"
    require(max(rows, columns) <= _ROUNDING, "DOUBLY_STOCHASTIC", f"{text}, {got}")
    return True


def method_findings(
    loss: Loss, decision_set: DecisionSet, *, split: bool, noised: bool, sigma: float
) -> Iterator[Caveat]:
    """NOT_CONVEX, PRODUCT_SET, CLEAN_PRIMAL, NO_NOISE.

    Args:
        loss, decision_set: of the run.
        split: several learners own a block each.
        noised: decisions are made from messages.
        sigma: noise scale.
    """
    if not loss.convex:
        yield Caveat("NOT_CONVEX", f"no regret bound holds for a loss that is not convex, got {type(loss).__name__}")
    if split and not isinstance(decision_set, Box):
        text = "decision_set is no product of the learners' blocks (a box is): the decision put together of all blocks"
        yield Caveat("PRODUCT_SET", f"{text} can lie outside while learners disagree, got {decision_set}")
    if not noised and sigma > 0:
        text = (
            "primal: clean promises nothing once decisions are seen: with the messages, a decision gives its gradient"
        )
        yield Caveat("CLEAN_PRIMAL", f"{text} exactly; primal: noised covers both")
    if sigma == 0:
        yield Caveat("NO_NOISE", "sigma is 0: messages are said as they are, and nothing is promised")
