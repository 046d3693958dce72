"""Broken learners that an audit must catch: correct ones, but for one thing that people got wrong.

A mutant says how it breaks a run, on which small run it is tried (`bases.BASES`), which family of tests is expected to see it,
and within how many runs of each world. All of them: `catalogue`. One of your own::

    LOUD = Mutant("loud", "noise of 0.7 of its scale", noisy(lambda generator: times(0.7)), "conformance", 20)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from sottovoce.arrays import FloatArray
from sottovoce.auditing.plan import AuditPlan
from sottovoce.auditing.worlds import NoiseOf, Worlds, children
from sottovoce.data import PlacedData
from sottovoce.errors import SpecError
from sottovoce.lab.selftest.breaking import Change, Inside, changed, laws
from sottovoce.lab.selftest.doctoring import Doctored
from sottovoce.lab.selftest.evidence import Limit
from sottovoce.noise import Noise, SeededNoise
from sottovoce.running.run import Run

Family = Literal["conformance", "likelihood", "black box", "notices", "ledger"]
"""What sees a mutant: the three families of an audit, the rules of `noticing`, or the sum of what was heard."""

Kind = Literal[
    "scale",
    "tails and shape",
    "support and atoms",
    "lattice and low bits",
    "reuse within a run",
    "across learners",
    "across runs",
    "centre",
    "noise that follows data",
    "beside the numbers",
]
"""What is broken: the ten classes of the catalogue."""


@dataclass(frozen=True, slots=True)
class Broken:
    """What a learner really does; what is left out is as it should be.

    Attributes:
        noise: where its noise comes from.
        actual: what runs.
        understated: its claim is this part of what holds.
        leak: what it gives away beside its numbers, `(runs, features)`.
        heard: its messages, where numbers do not show what is wrong with them.
    """

    noise: NoiseOf = SeededNoise
    actual: Run | None = None
    understated: float = 1.0
    leak: Callable[[Inside], FloatArray] | None = None
    heard: Doctored | None = None


Breaks = Callable[[AuditPlan], Broken]
Swap = Callable[[Run, PlacedData, int], Worlds]


@dataclass(frozen=True, slots=True)
class Mutant:
    """A broken learner.

    Attributes:
        name: in a word or two.
        what: is broken, in a few words.
        breaks: how; it raises a `SpecError` that says why, where it does not fit a run.
        family: expected to see it.
        runs: of each world, within which it must be caught.
        base: name of the run that it is tried on, unless one is given.
        swap: chooses the two worlds from run, data and learner; None: the swap that shows most.
        kind: its class in the catalogue.
        limit: runs of each world that carry the evidence it takes; None: that is not known.
        quick: whether every self-test tries it, or only one that measures power.
    """

    name: str
    what: str
    breaks: Breaks
    family: Family
    runs: int
    base: str = "ldp-dol"
    swap: Swap | None = None
    kind: Kind | None = None
    limit: Limit | None = None
    quick: bool = True


# ---- how -------------------------------------------------------------------------------------------------------------


def noisy(make: Callable[[np.random.Generator], Change]) -> Breaks:
    """Other noise. `make` gets a generator, and is asked once for every source."""

    def source(seed: np.random.SeedSequence) -> Noise:
        correct, other = children(seed, 2)
        return changed(SeededNoise(correct), make(np.random.default_rng(other)))

    def breaks(plan: AuditPlan) -> Broken:
        laws(plan)
        return Broken(noise=source)

    return breaks


def unaided(make: Callable[[], Change]) -> Breaks:
    """Other noise, for which no random numbers are needed but those that it changes."""
    return noisy(lambda _: make())


def altered(change: Callable[[Any], Any]) -> Breaks:
    """Another algorithm."""
    return lambda plan: Broken(actual=replace(plan.run, algorithm=change(plan.run.algorithm)))


def with_loss(change: Callable[[Any], Any]) -> Breaks:
    """An algorithm that follows another loss; it has gradients of a loss of its own."""

    def changed_in(algorithm: Any) -> Any:
        if hasattr(algorithm, "descent"):
            return replace(algorithm, descent=changed_in(algorithm.descent))
        if not hasattr(algorithm, "loss") or hasattr(algorithm, "calibration"):
            raise SpecError(f"{algorithm.name} follows no gradient of its loss")
        return replace(algorithm, loss=change(algorithm.loss))

    return altered(changed_in)


def leaking(leak: Callable[[Inside], FloatArray]) -> Breaks:
    """Something crosses the wire beside the numbers."""
    return lambda plan: Broken(leak=leak)


def heard(doctored: Doctored) -> Breaks:
    """Other messages, or more of them."""
    return lambda plan: Broken(heard=doctored)


def where(fits: Callable[[AuditPlan], bool], why: str) -> Callable[[Breaks], Breaks]:
    """A break that refuses the runs that it does not fit, and says why."""

    def only(breaks: Breaks) -> Breaks:
        def checked(plan: AuditPlan) -> Broken:
            if not fits(plan):
                raise SpecError(why)
            return breaks(plan)

        return checked

    return only


lattice_only = where(lambda plan: "spherical" not in laws(plan), "its noise is on no lattice in the first place")
laplace_only = where(lambda plan: laws(plan) == {"laplace"}, "its noise is no Laplace noise")
together = where(lambda plan: plan.run.spec.n_learners >= 2, "there is one learner only")

# ---- worlds ----------------------------------------------------------------------------------------------------------


def mirrored(times: float, other: float) -> Swap:
    """The first record with all weight in one feature, so many times the loss's bound, against another multiple."""

    def swap(run: Run, data: PlacedData, learner: int) -> Worlds:
        own = data.learners[learner]
        bound = run.loss.feature_bound if np.isfinite(run.loss.feature_bound) else 1.0
        spike, label = bound * np.eye(data.n_features)[0], float(own.labels.max())
        what = f"a first record of {times:g} times the bound, against one of {other:g} times"
        shared = run.algorithm.accountant(learner).shared
        first, second = (own.with_use(0, factor * spike, label) for factor in (times, other))
        return Worlds(learner, first, second, what, shared)

    return swap


SEEN, MOST = 20, 2000
"""Runs of each world in which conformance sees what is gross, and in which it must see whatever it can see."""
