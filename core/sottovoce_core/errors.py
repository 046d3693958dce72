"""Errors of the project, by cause and by the side at fault.

Every message names the requirement and the value that came. `sottovoce_rpc.error_status` maps these classes to gRPC
status codes; the command line prints them in one line and exits with code 2.
"""

from __future__ import annotations

from enum import Enum
from typing import Any


class ViolationKind(Enum):
    """Violations of the protocol that no correct neighbour commits, despite any failure; the value describes one in words."""

    ENCODING = "bytes that are not the one encoding of a message of the run's fields"
    VALUE = "a number that is not finite, or too large for any parameter"
    ROUND = "a round that was not its turn"
    SENDER = "a message in the name of another sender"
    EQUIVOCATION = "two different things in one round"
    SIGNATURE = "rounds that it did not sign, or with another key"


class SottovoceError(Exception):
    """Base of every error that this project raises on purpose."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle without calling `__init__`, whose arguments may differ from those of `Exception`: errors cross processes."""
        return _unpickle_error, (type(self), self.args), self.__dict__


def _unpickle_error(error: type[SottovoceError], args: tuple[Any, ...]) -> SottovoceError:
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
    """Raise an error if condition `code` does not hold.

    Raises:
        AssumptionViolated: `holds` is false.
    """
    if not holds:
        raise AssumptionViolated(code, text)


class DataError(SottovoceError):
    """Records are unusable: wrong shape, non-finite, outside the loss's domain."""


class CorruptStateError(SottovoceError):
    """Stored state is damaged, incomplete, or contradicts itself or another service."""


class FailedPrecondition(SottovoceError):
    """The service cannot answer this request in its present state."""


class LimitReached(FailedPrecondition):
    """A limit of the service is reached: learners, captures, or bytes of messages."""


class NotFound(SottovoceError):
    """No run, learner or capture of this name is known."""


class AlreadyExists(SottovoceError):
    """The object to create or open exists already."""


class RunEnded(FailedPrecondition):
    """The run has ended for a learner, and will not be resumed.

    Attributes:
        state: final state of the run as this learner reports it, in one word.
    """

    def __init__(self, text: str, state: str = "") -> None:
        super().__init__(text)
        self.state = state


class LocalProtocolError(SottovoceError):
    """This side broke the exchange protocol: a bug here, never the peer's fault."""


class RemoteProtocolError(SottovoceError):
    """A peer broke the exchange protocol: wrong round, shape, sender, or a non-finite value.

    Attributes:
        rule: violated rule; None: a correct peer may cause the error, too.
    """

    violation: ViolationKind | None = None

    def __init__(self, text: str, rule: ViolationKind | None = None) -> None:
        super().__init__(text)
        self.violation = rule or type(self).violation


class PermissionDenied(RemoteProtocolError):
    """A party that is not a neighbour in this run tried to take part in it."""


class EquivocationError(RemoteProtocolError):
    """A peer sent two different messages in one round."""

    violation = ViolationKind.EQUIVOCATION


class BudgetExhausted(SottovoceError):
    """The next message would spend more than the learner's privacy budget."""


class CaptureError(SottovoceError):
    """A capture or transcript is unreadable, incomplete or of another run."""


class Unavailable(SottovoceError):
    """Another service could not be reached in time."""
