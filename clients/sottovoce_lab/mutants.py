"""The class `Mutant`: a learner that is correct but for one fault, which an audit must find.

A mutant says how it breaks a run, on which small run it is tried (`trial.BASES`), which family of tests is expected to see it,
and within how many runs of each world. All of them: `catalogue`. One of your own::

    LOUD = Mutant("loud", "noise of 0.7 of its scale", noisy(lambda generator: times(0.7)), "conformance", 20)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from sottovoce_core.algorithms.interface import Heard, Message
from sottovoce_core.arrays import Batch, FloatArray
from sottovoce_core.auditing.plan import AuditPlan
from sottovoce_core.auditing.worlds import NoiseOf, Worlds, children
from sottovoce_core.data import PlacedData
from sottovoce_core.errors import SpecError
from sottovoce_core.noise import Draw, Noise, SeededNoise, no_noise
from sottovoce_core.running.run import Run
from sottovoce_lab.breaking import Altered, Change, Doctored, Inside, Limit, changed, laws

# ---- mutants ---------------------------------------------------------------------------------------------------------

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


def faults(kind: Kind) -> Callable[..., Mutant]:
    """Return a constructor of mutants of one class, which conformance must find unless more is given."""

    def fault(
        name: str, what: str, breaks: Breaks, limit: Limit | None = None, *, quick: bool = False, **more: Any
    ) -> Mutant:
        usual: dict[str, Any] = {"family": "conformance", "runs": SEEN if quick else MOST, "limit": limit}
        return Mutant(name, what, breaks, kind=kind, quick=quick, **{**usual, **more})

    return fault


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


# ---- following -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Known:
    """What a learner has when it speaks.

    Attributes:
        state: as the correct algorithm has it.
        before: the same, one round earlier.
        batch: the records of the round before; None: there was none.
    """

    state: Any
    before: Any
    batch: Batch | None = None


@dataclass(frozen=True, slots=True)
class Says:
    """What it would say in this round, and what may make its noise another one.

    Attributes:
        centre: without noise.
        moved: by how much that is not what it said before, without noise.
        labels: of the first record of the round before; 0 where there was none. The same for all replicas.
    """

    centre: FloatArray
    moved: FloatArray
    labels: FloatArray


Following = Callable[[FloatArray, Draw, Says], FloatArray]
"""From correct noise, and what it should know nothing of, to what is said in its place."""


@dataclass(frozen=True)
class _Follows(Altered):
    """An algorithm whose noise follows what it should hide."""

    change: Following

    def start(self, who: Any) -> _Known:
        state = self.correct.start(who)
        return _Known(state, state)

    def speak(self, known: _Known, noise: Noise) -> tuple[_Known, Message]:
        _, clean = self.correct.speak(known.state, no_noise)
        _, old = self.correct.speak(known.before, no_noise)
        labels = np.zeros((1, 1, 1)) if known.batch is None else known.batch.labels[..., :1, None]

        def follow(drawn: FloatArray, draw: Draw) -> FloatArray:
            if draw.field not in clean.fields:
                return drawn
            centre = clean[draw.field]
            return self.change(drawn, draw, Says(centre, centre - old[draw.field], labels))

        state, said = self.correct.speak(known.state, changed(noise, follow))
        return replace(known, state=state), said

    def listen(self, known: _Known, heard: Heard, batch: Batch) -> _Known:
        return _Known(self.correct.listen(known.state, heard, batch), known.state, batch if batch.size else None)

    def overheard(self, known: _Known, message: Message) -> tuple[_Known, FloatArray]:
        state, density = self.correct.overheard(known.state, message)
        return replace(known, state=state), density

    def decision(self, known: _Known) -> FloatArray:
        decision: FloatArray = self.correct.decision(known.state)
        return decision


def following(change: Following) -> Breaks:
    """A break of an algorithm: its noise is changed with knowledge of what it should hide."""
    return altered(lambda algorithm: _Follows(algorithm, change))
