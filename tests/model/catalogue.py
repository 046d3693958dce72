"""All mistakes, each with the least world in which it shows."""

from __future__ import annotations

from dataclasses import dataclass

from tests.model import mistakes as m
from tests.model import mistakes_of_change as c
from tests.model.runs import Shape
from tests.model.state import NONE, Faults
from tests.model.world import BEGUN, HEARD, World


@dataclass(frozen=True, slots=True)
class Mistake:
    """A mistake, and the least world in which it shows.

    Attributes:
        world: what goes wrong.
        breaks: the invariants that do not hold then.
        shape: of the run. What is said in the first round, before any record was learned, costs nothing.
        faults, fed, movable, begun: of the world.
    """

    world: type[World]
    breaks: tuple[str, ...]
    shape: Shape
    faults: Faults = NONE
    fed: tuple[int, ...] = ()
    movable: tuple[int, ...] | None = None
    begun: tuple[str, ...] = ()

    def judged(self, invariant: str) -> World:
        """Its world, held to one invariant."""
        return self.world(self.shape, self.faults, self.fed, self.movable, begun=self.begun, judged=(invariant,))

    @property
    def right(self) -> World:
        """The same without the mistake."""
        return World(self.shape, self.faults, self.fed, self.movable, begun=self.begun)

    @property
    def said(self) -> str:
        """In words."""
        return (self.world.__doc__ or "").removesuffix(".")


ALONE, ONE, TWO = Shape(1, 1), Shape(2, 1), Shape(2, 2)
HOLD = Shape(2, 3, window=1, late="reuse")
PLACE = '[{"learner": "learner-1", "first_round": 0, "until_round": null, "missed_from_rounds": {}}]'
JOIN = Shape(2, 1, window=2, late="drop", offline_intervals=PLACE)
DROP = ONE._replace(window=2, late="drop")

MISTAKES = (
    Mistake(m.SendsFirst, ("P1", "P2", "P6"), TWO, Faults(deaths=1)),
    Mistake(m.DrawsAgain, ("P1",), ONE, Faults(deaths=1)),
    Mistake(m.ChargesLater, ("P2",), TWO),
    Mistake(m.NoMark, ("P1", "P2"), Shape(1, 2), Faults(deaths=1, cuts=1)),
    Mistake(m.MarksMessagesOnly, ("P5",), ALONE, Faults(deaths=1, cuts=1), fed=(0,)),
    Mistake(m.ReceiptFirst, ("P5",), ALONE, Faults(deaths=1), fed=(0,)),
    Mistake(m.TakesAgain, ("P3",), Shape(1, 2), Faults(answers=1), fed=(0,)),
    Mistake(m.KeepsOne, ("P5",), TWO, Faults(deaths=1)),
    Mistake(m.ResendsNothing, ("P5",), ONE, Faults(streams=1)),
    Mistake(m.FinishedLeaves, ("P5",), ONE, Faults(streams=1)),
    Mistake(m.NoConfirmation, ("P5",), ALONE, Faults(answers=1)),
    Mistake(m.SpeaksUnconfirmed, ("P1",), ALONE, Faults(deaths=1, copies=1)),
    Mistake(m.NoIncarnations, ("P1",), ALONE, Faults(deaths=1, copies=1)),
    Mistake(m.ConfirmsAny, ("P1",), ALONE, Faults(copies=1)),
    Mistake(m.ForgetsMembers, ("P1",), ALONE, Faults(deaths=1, copies=1, coordinator=1)),
    Mistake(c.StatesWhatWasDue, ("P7",), HOLD, begun=BEGUN),
    Mistake(c.UsesTheNewest, ("P7",), HOLD._replace(window=2), begun=BEGUN),
    Mistake(c.UsesAnyAge, ("P7",), HOLD._replace(rounds=4), begun=BEGUN),
    Mistake(c.RefusesThePast, ("P5",), HOLD, begun=BEGUN),
    Mistake(c.TellsFirst, ("P5", "P8"), DROP, Faults(leave=1, coordinator=1), begun=BEGUN),
    Mistake(c.HearsOtherPlans, ("P9",), JOIN, Faults(join=1, coordinator=1), fed=(1,), begun=BEGUN),
    Mistake(c.ChangesWhatWasSaid, ("P5", "P8"), DROP._replace(rounds=2), Faults(leave=1), begun=BEGUN),
    Mistake(c.TakesAnySpec, ("P7",), DROP._replace(rounds=2), Faults(leave=1), begun=BEGUN),
    Mistake(c.WaitsForNobody, ("P8",), DROP._replace(rounds=2), Faults(leave=1), begun=BEGUN),
    Mistake(c.ChangesWithoutSome, ("P8",), DROP, Faults(leave=1, lost=1), movable=(1,), begun=HEARD),
    Mistake(c.RestsOn, ("P8",), DROP, Faults(leave=2, coordinator=1), movable=(1,), begun=BEGUN),
    Mistake(c.BriefsWhoReturns, ("P5", "P8"), DROP, Faults(leave=1, streams=1), begun=BEGUN),
    Mistake(c.LosesFromTheReport, ("P8",), DROP, Faults(streams=1, lost=1), begun=BEGUN),
    Mistake(c.ForgetsGrants, ("P8",), DROP._replace(rounds=2, window=1), Faults(coordinator=1, lost=1), begun=BEGUN),
    Mistake(c.CountsAsHeard, ("P5",), DROP, Faults(streams=1, lost=1), begun=BEGUN),
    Mistake(c.ForgetsWhatClosed, ("P7",), DROP, Faults(deaths=1, streams=1, lost=1), begun=HEARD),
)
