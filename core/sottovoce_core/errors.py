"""What can go wrong, and who erred.

Every message names the requirement and the value that came. `sottovoce_rpc.error_status` maps these classes to gRPC
status codes; the command line prints them in one line and exits with code 2.
"""

from __future__ import annotations

from enum import Enum
from typing import Any


class ViolationKind(Enum):
    """What no correct neighbour does, whatever happens to it and to the network between; the value is that, in words."""

    ENCODING = "something that is no message of the run's fields in its one encoding"
    VALUE = "a number that is not finite, or too large for any parameter"
    ROUND = "a round that was not its turn"
    SENDER = "a message in the name of somebody else"
    EQUIVOCATION = "two different things in one round"
    SIGNATURE = "rounds that it did not sign, or with another key"


class SottovoceError(Exception):
    """Base of every error that this project raises on purpose."""

    def __reduce__(self) -> tuple[Any, ...]:
        """As it is, without `__init__`, whose arguments need not be those of `Exception`: it must reach other processes."""
        return _again, (type(self), self.args), self.__dict__


def _again(error: type[SottovoceError], args: tuple[Any, ...]) -> SottovoceError:
    return error.__new__(error, *args)


class SpecError(SottovoceError):
    """A run spec, or a value in it, is not allowed."""


class AssumptionViolated(SpecError):
    """A validity condition of an algorithm does not hold; `code` is the condition's name in the docs."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(f"{text} [{code}]")
        self.code = code
        self.text = text


def require(holds: bool, code: str, text: str) -> None:
    """Refuse a run whose condition `code` does not hold.

    Raises:
        AssumptionViolated: it does not.
    """
    if not holds:
        raise AssumptionViolated(code, text)


class DataError(SottovoceError):
    """Records are unusable: wrong shape, non-finite, outside the loss's domain."""


class CorruptStateError(SottovoceError):
    """Stored state is damaged, incomplete, or contradicts itself or another service."""


class FailedPrecondition(SottovoceError):
    """Asked for something that this service cannot give in its present state."""


class LimitReached(FailedPrecondition):
    """A service would serve more than it can at a time: learners, captures, or bytes of messages."""


class NotFound(SottovoceError):
    """A run, a learner or a capture of this name is not known here."""


class AlreadyExists(SottovoceError):
    """What was to be made or taken up is here already."""


class RunEnded(FailedPrecondition):
    """A run is over for a learner, for good: nobody will take it up again.

    Attributes:
        state: how it ended for the learner that says so, in a word.
    """

    def __init__(self, text: str, state: str = "") -> None:
        super().__init__(text)
        self.state = state


class LocalProtocolError(SottovoceError):
    """Our own side broke the exchange protocol: a bug here, never the peer's fault."""


class RemoteProtocolError(SottovoceError):
    """A peer broke the exchange protocol: wrong round, shape, sender, or a non-finite value.

    Attributes:
        rule: that it has broken, where that is misconduct; None: a correct peer may get there, too.
    """

    violation: ViolationKind | None = None

    def __init__(self, text: str, rule: ViolationKind | None = None) -> None:
        super().__init__(text)
        self.violation = rule or type(self).violation


class PermissionDenied(RemoteProtocolError):
    """Somebody who is not a neighbour in this run tried to take part in it."""


class EquivocationError(RemoteProtocolError):
    """A peer said two different things in one round."""

    violation = ViolationKind.EQUIVOCATION


class BudgetExhausted(SottovoceError):
    """Saying the next message would spend more than the learner's privacy budget."""


class CaptureError(SottovoceError):
    """A capture or transcript is unreadable, incomplete or of another run."""


class Unavailable(SottovoceError):
    """Another service could not be reached in time."""
