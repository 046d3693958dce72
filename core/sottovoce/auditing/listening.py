"""Who listens, what they hear, and which claim is held against it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from sottovoce.arrays import FloatArray, IntArray, as_floats
from sottovoce.auditing.blackbox import ROUNDS, WIDTH
from sottovoce.auditing.simulated import Recording, Share, concerned, overhear
from sottovoce.auditing.worlds import Worlds
from sottovoce.data import PlacedData
from sottovoce.errors import SpecError
from sottovoce.noise import SeededNoise
from sottovoce.privacy.guarantee import Guarantee, ThreatModel
from sottovoce.running.replay import Replay
from sottovoce.running.run import Run


@dataclass(frozen=True, slots=True)
class Listener:
    """A threat model, made definite.

    Attributes:
        threat: on every channel, at one neighbour, or to published decisions only.
        neighbour: index of the neighbour, at a neighbour only.
        replayable: it hears all that a replay needs, so the exact loss of what it hears is known.
        rounds: `(rounds seen,)` the rounds that a black box looks at: the first ones that cost anything.
    """

    threat: ThreatModel
    neighbour: int | None
    replayable: bool
    rounds: IntArray

    def seen(self, part: Recording, worlds: Worlds, run: Run) -> FloatArray:
        """The first numbers of what a black box sees, all fields and holders side by side: `(runs, rounds, numbers)`."""
        if self.threat is ThreatModel.OUTPUT:
            assert part.decisions is not None  # noqa: S101 - whoever simulates for this listener keeps them
            fields, who = [part.decisions], list(range(run.spec.n_learners))
        else:
            fields = list(part.transcript.fields.values())
            who = [i for i in worlds.holders(run) if i != self.neighbour]
        most = max(1, WIDTH // len(self.rounds))
        flat = [f[self.rounds].reshape(len(self.rounds), *f.shape[1:3], -1)[:, who, :, :most] for f in fields]
        # Coordinate by coordinate, the holders side by side: the first numbers are of all of them.
        side_by_side = np.concatenate([f.transpose(2, 0, 3, 1).reshape(f.shape[2], len(f), -1) for f in flat], axis=2)
        # Not-a-number where a learner was away: that is public.
        return as_floats(np.nan_to_num(side_by_side[:, :, :most]))


def listener(
    run: Run, worlds: Worlds, guarantee: Guarantee, threat: ThreatModel, neighbour: int | None = None
) -> Listener:
    """Who listens.

    Args:
        run: what is run.
        worlds: the two worlds.
        guarantee: of this swap.
        threat: the threat model.
        neighbour: index of the neighbour that listens (default: the first one that hears the learner).

    Raises:
        SpecError: nobody hears the learner, or the listener holds the record itself.
    """
    costly = np.flatnonzero(guarantee.per_round > 0) if threat is not ThreatModel.OUTPUT else _published(guarantee)
    rounds = costly[:ROUNDS] if len(costly) else np.arange(min(ROUNDS, run.spec.rounds))
    if threat is not ThreatModel.NEIGHBOUR:
        return Listener(threat, None, threat is ThreatModel.WIRE, rounds)
    if worlds.shared:
        raise SpecError(f"{run.algorithm.name}: all learners hold the record, so a neighbour knows it; audit the wire")
    mixings = [run.network.at(t) for t in range(run.spec.rounds)]
    hearers = [j for j in range(run.spec.n_learners) if any(worlds.learner in m.heard_by(j) for m in mixings)]
    names = run.spec.names
    if not hearers:
        raise SpecError(
            f"nobody ever hears {run.spec.names[worlds.learner]}, so no neighbour can listen: audit the wire"
        )
    if neighbour is not None and neighbour not in hearers:
        raise SpecError(
            f"the neighbour must be one of {', '.join(names[j] for j in hearers)}, who ever hear {names[worlds.learner]}"
        )
    neighbour = hearers[0] if neighbour is None else neighbour
    needed = set(concerned(run, worlds)) - {neighbour}
    return Listener(threat, neighbour, all(needed <= set(m.heard_by(neighbour)) for m in mixings), rounds)


def _published(guarantee: Guarantee) -> IntArray:
    """Rounds, spread over the run, after the first one that costs anything."""
    claim, _ = held(guarantee, ThreatModel.OUTPUT)
    costly = np.flatnonzero(claim > 0)
    first = int(costly[0]) if len(costly) else 0
    return np.unique(np.linspace(first, len(claim) - 1, ROUNDS).astype(np.int64))


def of_decisions(
    guarantee: Guarantee, run: Run, data: PlacedData, worlds: Worlds, seed: np.random.SeedSequence
) -> Guarantee:
    """What is promised to somebody who sees published decisions.

    Decisions that follow from messages cost nothing beside these. About others nothing is promised, unless an algorithm says so.

    Args:
        guarantee: of this swap.
        run: what is run.
        data: of all learners.
        worlds: the two worlds.
        seed: of the noise of a run in which this is looked at.
    """
    if guarantee.output is not None or _follow(run, data, worlds, seed):
        return guarantee
    return replace(guarantee, output=np.full(run.spec.rounds, np.inf))


def _follow(run: Run, data: PlacedData, worlds: Worlds, seed: np.random.SeedSequence) -> bool:
    """Whether decisions are the same in both worlds, if the same was said."""
    said = overhear(run, data, worlds, Share(0, 1, seed), SeededNoise).transcript
    for holder in worlds.holders(run):
        machine = Replay(run, holder, worlds=2)
        for t in range(said.rounds):
            machine.step(said.messages(t, holder, machine.concerned), *(worlds.of(world).batch(t) for world in (0, 1)))
            first, second = np.broadcast_to(machine.decision, (2, 1, run.algorithm.dim))
            if not np.allclose(first, second, rtol=1e-9, atol=1e-12):
                return False
    return True


def held(guarantee: Guarantee, threat: ThreatModel) -> tuple[FloatArray, ThreatModel]:
    """The claim to hold against what is heard, `(rounds,)` cumulative epsilon, and for whom it was made.

    Where nothing finite is promised about messages, but something about published decisions, that is held against the
    messages, too: it is all that is claimed.
    """
    if guarantee.output is None:
        return guarantee.cumulative, guarantee.grounds.threat_model
    if threat is ThreatModel.OUTPUT or not np.isfinite(guarantee.cumulative).all():
        return guarantee.output, ThreatModel.OUTPUT
    return guarantee.cumulative, guarantee.grounds.threat_model
