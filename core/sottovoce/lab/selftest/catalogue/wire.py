"""What crosses the wire beside the numbers: side channels, and messages that should never be."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from sottovoce.arrays import FloatArray
from sottovoce.auditing.plan import AuditPlan
from sottovoce.auditing.worlds import Share
from sottovoce.lab.selftest import doctoring
from sottovoce.lab.selftest.breaking import Inside, inside
from sottovoce.lab.selftest.mutants import MOST, SEEN, Breaks, Mutant, Swap, heard, leaking, mirrored, where

# ---- side channels ---------------------------------------------------------------------------------------------------


def _norms(inside: Inside) -> FloatArray:
    """The gradient's norm, in every message's metadata."""
    return inside.norms


def _digit(inside: Inside) -> FloatArray:
    """The gradient's norm in tenths, in the metadata of the first message after it."""
    return np.rint(10.0 * inside.norms[:, :1])


def _sizes(inside: Inside) -> FloatArray:
    """Bytes of every message, where numbers whose gradient is zero are left out."""
    sent: FloatArray = 16.0 + 9.0 * np.count_nonzero(inside.gradients, axis=2).T
    return sent


def _some_are_zero(plan: AuditPlan) -> bool:
    """Whether a number of a gradient is zero in some run of either world."""
    looked = (inside(plan, Share(world, SEEN, plan.seeds.audited)) for world in (0, 1))
    return any(bool(np.any(each.gradients == 0.0)) for each in looked)


def _packed(inside: Inside) -> FloatArray:
    """Bytes of every message, which are compressed: a larger gradient costs some more, and so does chance."""
    return np.rint(200.0 + 8.0 * inside.norms + inside.generator.normal(0.0, 4.0, inside.norms.shape))


def _delays(inside: Inside, extra: float, jitter: float) -> FloatArray:
    """Milliseconds of every round: 1, some more for a record that must be scaled down, and jitter."""
    own, bound = inside.plan.worlds.of(inside.world), inside.plan.run.loss.feature_bound
    rounds, runs = inside.gradients.shape[:2]
    slow = [np.count_nonzero(np.linalg.norm(own.batch(t).features, axis=1) > bound) for t in range(rounds)]
    return 1.0 + extra * np.array(slow, np.float64) + inside.generator.exponential(jitter, (runs, rounds))


def _waits(inside: Inside, factor: float) -> FloatArray:
    """Milliseconds of every round, longer by a factor times the gradient's norm; and jitter of one."""
    return 1.0 + factor * inside.norms + inside.generator.exponential(1.0, inside.norms.shape)


def _order(inside: Inside) -> FloatArray:
    """Which of two neighbours is told first: by the sign of the gradient's largest number, seven times in eight."""
    largest = np.take_along_axis(inside.gradients, np.abs(inside.gradients).argmax(axis=2)[..., None], axis=2)
    fair = inside.generator.random(inside.norms.shape) < 0.25
    chance = inside.generator.random(inside.norms.shape) < 0.5
    return np.where(fair, chance, largest[..., 0].T > 0.0).astype(np.float64)


def _failures(inside: Inside, share: float) -> FloatArray:
    """Messages of a run: in some runs of one world the learner fails after the first."""
    runs = inside.gradients.shape[1]
    failed = (inside.generator.random((runs, 1)) < share) & (inside.world == 0)
    return np.where(failed, 1.0, float(inside.plan.run.spec.rounds))


def _status(inside: Inside) -> FloatArray:
    """Characters of the status text, which names a first record that had to be scaled down; half of the time it is cut."""
    own, bound = inside.plan.worlds.of(inside.world), inside.plan.run.loss.feature_bound
    runs = inside.gradients.shape[1]
    scaled = np.any(np.linalg.norm(own.batch(0).features, axis=1) > bound)
    cut = inside.generator.random((runs, 1)) < 0.5
    return np.where(cut | (not scaled), 2.0, 24.0)


_QUIET = "ldp-dol, epsilon 1"
"""The less is claimed, the fewer runs show that more is given away."""

_BEYOND = mirrored(2.0, 0.0)
"""For what only a record shows that must be scaled down; no audit has one of its own."""


def _leak(
    name: str,
    what: str,
    leak: Callable[[Inside], FloatArray],
    runs: int = MOST,
    *,
    swap: Swap | None = None,
    quick: bool = False,
    only: Callable[[Breaks], Breaks] = lambda breaks: breaks,
) -> Mutant:
    breaks = only(leaking(leak))
    return Mutant(name, what, breaks, "black box", runs, _QUIET, swap, "beside the numbers", quick=quick)


# ---- protocol --------------------------------------------------------------------------------------------------------

_protocol = partial(Mutant, family="notices", runs=1, kind="beside the numbers")

WIRE = (
    _leak("norm in metadata", "gradient norm beside messages", _norms, 500, quick=True),
    _leak(
        "length",
        "zero gradients are not sent",
        _sizes,
        500,
        quick=True,
        only=where(_some_are_zero, "no number of a gradient is ever zero"),
    ),
    _leak(
        "slow path",
        "clipping takes half a millisecond",
        partial(_delays, extra=0.5, jitter=0.3),
        swap=_BEYOND,
        quick=True,
    ),
    _leak(
        "slow path, 0.2 ms",
        "clipping takes less than the jitter",
        partial(_delays, extra=0.2, jitter=0.3),
        swap=_BEYOND,
    ),
    _leak("one digit", "the first gradient norm in tenths", _digit),
    _leak("packed", "length of compressed messages", _packed),
    _leak("20 ms a norm", "delays grow with the norm", partial(_waits, factor=20.0)),
    _leak("3 ms a norm", "delays grow by little more than the jitter", partial(_waits, factor=3.0)),
    _leak("order", "who is told first follows a sign", _order),
    _leak("status", "a status text names a clipped record", _status, swap=_BEYOND),
    *(
        _leak(f"{100 * share:g} % fail", "runs of one world end early", partial(_failures, share=share))
        for share in (0.5, 0.1)
    ),
    _protocol("retry", "a round said again, fresh noise", heard(doctoring.retried)),
    _protocol("two faces", "one neighbour hears other bytes", heard(doctoring.two_faced)),
    _protocol(
        "forgetful",
        "a restart forgets what was spent",
        heard(doctoring.forgetful),
        family="ledger",
        base="ldp-dol, budget",
    ),
)
"""What is given away beside the numbers, and messages that should never be."""
