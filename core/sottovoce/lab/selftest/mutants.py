"""Broken learners that an audit must catch: correct ones, but for one thing that people got wrong.

A mutant says how it breaks a run, on which small run it is tried (`bases.BASES`), which family of tests is expected to see it,
and within how many runs of each world. One of your own::

    LOUD = Mutant("loud", "noise of 0.7 of its scale", noisy(lambda generator: times(0.7)), "conformance", 20)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from sottovoce.arrays import FloatArray
from sottovoce.auditing.plan import AuditPlan
from sottovoce.auditing.simulated import NoiseOf, Share, children, overhear
from sottovoce.auditing.swaps import PILOT
from sottovoce.auditing.worlds import Worlds
from sottovoce.data import PlacedData
from sottovoce.errors import SpecError
from sottovoce.lab.selftest import breaking, doctoring
from sottovoce.lab.selftest.breaking import Change, Inside, changed
from sottovoce.lab.selftest.doctoring import Doctored
from sottovoce.noise import Noise, SeededNoise
from sottovoce.running.replay import replay
from sottovoce.running.run import Run

Family = Literal["conformance", "likelihood", "black box", "notices", "ledger"]
"""What sees a mutant: the three families of an audit, the rules of `noticing`, or the sum of what was heard."""


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
    """

    name: str
    what: str
    breaks: Breaks
    family: Family
    runs: int
    base: str = "ldp-dol"
    swap: Swap | None = None


# ---- how -------------------------------------------------------------------------------------------------------------


def noisy(make: Callable[[np.random.Generator], Change]) -> Breaks:
    """Other noise. `make` gets a generator, and is asked once for every source."""

    def source(seed: np.random.SeedSequence) -> Noise:
        correct, other = children(seed, 2)
        return changed(SeededNoise(correct), make(np.random.default_rng(other)))

    def breaks(plan: AuditPlan) -> Broken:
        breaking.laws(plan)
        return Broken(noise=source)

    return breaks


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


def _where(fits: Callable[[AuditPlan], bool], why: str) -> Callable[[Breaks], Breaks]:
    """Refuses the runs that it does not fit, and says why."""

    def only(breaks: Breaks) -> Breaks:
        def checked(plan: AuditPlan) -> Broken:
            if not fits(plan):
                raise SpecError(why)
            return breaks(plan)

        return checked

    return only


_lattice_only = _where(
    lambda plan: "spherical" not in breaking.laws(plan), "its noise is on no lattice in the first place"
)
_together = _where(lambda plan: plan.run.spec.n_learners >= 2, "there is one learner only")


def _without_a_round(plan: AuditPlan) -> Broken:
    """No noise in the last of the rounds that a black box would look at."""
    return noisy(lambda _: breaking.but_one(int(plan.listener.rounds[-1])))(plan)


def _summed(plan: AuditPlan) -> Broken:
    sizes = np.diff(plan.data.learners[plan.worlds.learner].offsets)
    if sizes.max() < 2:
        raise SpecError("no round brings more than one record")
    return with_loss(lambda loss: breaking.Louder(loss, float(sizes.max())))(plan)


def _understating(share: Callable[[Run], float]) -> Breaks:
    """The claim is too small. One that is far above what anybody can hear may be made smaller, and still hold."""

    def breaks(plan: AuditPlan) -> Broken:
        run, worlds = plan.run, plan.worlds
        said = overhear(run, plan.data, worlds, Share(0, PILOT, plan.seeds.rehearsal), SeededNoise).transcript
        each = [replay(run, said, i, [worlds.first, worlds.second]).supremum.max() for i in worlds.holders(run)]
        most, claim = float(sum(each)), share(run) * plan.epsilon
        if not most > claim:
            raise SpecError(f"messages show {most:.3g} at most, so a claim of {claim:.4g} may well hold")
        return Broken(understated=share(run))

    return breaks


_says_f = _where(lambda plan: plan.run.spec.algorithm.name == "pvp", "only pvp has a minimiser to hide")(
    altered(breaking.SaysMinimiser)
)
_twice_zeta = _where(lambda plan: plan.run.spec.algorithm.name == "dvp", "only dvp has a rate of alpha_hat")(
    altered(lambda dvp: replace(dvp, calibration=replace(dvp.calibration, scale="printed")))
)


# ---- worlds ----------------------------------------------------------------------------------------------------------


def _mirrored(times: float, other: float) -> Swap:
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


LOUD_OR_SILENT = _mirrored(2.0, 0.0)
"""For what is not of the values: a record that must be scaled down, against one without features."""


_SEEN = 20
"""Runs of each world where conformance is expected to see it: as many as it ever looks at."""

_QUIET = "ldp-dol, epsilon 1"
"""The less is claimed, the fewer runs show that more is given away."""

_NOISE: tuple[tuple[str, str, Breaks], ...] = (
    ("half the noise", "noise of half its scale", noisy(lambda _: breaking.times(0.5))),
    ("0.9 of the scale", "noise of 0.9 of its scale", noisy(lambda _: breaking.times(0.9))),
    ("Gaussian", "Gaussian noise, equal variance", noisy(breaking.gaussian)),
    ("said again", "noise repeated every other round", noisy(lambda _: breaking.again())),
    ("first only", "noise on the first message alone", noisy(lambda _: breaking.first_only())),
    ("a round left out", "no noise in one round", _without_a_round),
    ("a coordinate left out", "no noise on the last coordinate", noisy(lambda _: breaking.but_the_last)),
    ("zeros left out", "no noise on zero coordinates", altered(breaking.SkipsZeros)),
    ("one seed", "all learners draw from one seed", _together(noisy(lambda _: breaking.one_seed))),
    ("constant seed", "every run draws from the same seed", noisy(lambda _: breaking.every_run_alike)),
    ("clock as seed", "the starting second is the seed", _together(noisy(breaking.clock_seeded))),
    ("raw doubles", "noise on no lattice", _lattice_only(noisy(breaking.off_lattice))),
)
"""Other noise, which conformance sees: name, what is broken, and how."""

_LEAKS: tuple[tuple[str, str, Callable[[Inside], FloatArray], int], ...] = (
    ("norm in metadata", "gradient norm beside messages", breaking.norms, 500),
    ("length", "zero gradients are not sent", breaking.sizes, 500),
    ("slow path", "clipping takes half a millisecond", breaking.delays, 2000),
)
"""What crosses the wire beside the numbers: name, what, how, and within how many runs it must be caught."""

MUTANTS: tuple[Mutant, ...] = (
    *(Mutant(name, what, breaks, "conformance", _SEEN) for name, what, breaks in _NOISE),
    Mutant(
        "biased sampler",
        "1.5 % too much mass near zero",
        _lattice_only(noisy(breaking.biased)),
        "conformance",
        _SEEN,
        base="ldp-dol, 60,000 numbers",
    ),
    Mutant("pvp says f", "the minimiser is sent, not f + e", _says_f, "conformance", _SEEN, base="pvp"),
    Mutant("dvp, twice zeta", "zeta is alpha_hat: half the noise", _twice_zeta, "likelihood", 4000, base="dvp"),
    Mutant("summed", "gradients summed, not averaged", _summed, "conformance", _SEEN, base="dola, batches of 4"),
    Mutant(
        "not clipped",
        "records at ten times their bound",
        with_loss(breaking.Unclipped),
        "conformance",
        _SEEN,
        base="dola",
        swap=_mirrored(10.0, -10.0),
    ),
    Mutant(
        "half the sensitivity",
        "half the sensitivity is charged",
        _understating(lambda run: 0.5),
        "likelihood",
        500,
        base="dola, 1 feature",
    ),
    Mutant(
        "clipped in l2",
        "an l2 norm charged: short by √d",
        _understating(lambda run: float(run.algorithm.dim) ** -0.5),
        "likelihood",
        500,
        base="dola, 9 features",
    ),
    *(
        Mutant(name, what, leaking(leak), "black box", runs, _QUIET, LOUD_OR_SILENT)
        for name, what, leak, runs in _LEAKS
    ),
    Mutant("retry", "a round said again, fresh noise", heard(doctoring.retried), "notices", 1),
    Mutant("two faces", "one neighbour hears other bytes", heard(doctoring.two_faced), "notices", 1),
    Mutant(
        "forgetful", "a restart forgets what was spent", heard(doctoring.forgetful), "ledger", 1, base="ldp-dol, budget"
    ),
)
