"""What learners copy to an eavesdropper, checked: anybody may call, and one row that fits no column would end a capture."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass

from sottovoce.errors import RemoteProtocolError, StrangerError
from sottovoce.network.roster import names_of
from sottovoce.spec import MOST_LEARNERS
from sottovoce.text import called
from sottovoce_eavesdropper.lookout import Row
from sottovoce_eavesdropper.relay import MOST_PAYLOAD
from sottovoce_rpc.principals import Principal, Role
from sottovoce_rpc.signatures import is_signature
from sottovoce_wire.v1 import eavesdropper_pb2

_MOST_COPIES = 1_024
"""In one request: learners send far fewer at a time."""
_MOST_INDEX, _MOST_NS = 2**31 - 1, 2**63 - 1
"""Within the columns of a capture."""


@dataclass(frozen=True, slots=True)
class Participants:
    """Who may be in a capture.

    Attributes:
        learners: how many; as many as a column holds where nobody said.
        mirrored: whether learners send copies. Else a relay hears them, and a copy is somebody else's forgery.
        names: of the learners, in their order; empty where nobody said, or so many that no run has them.
    """

    learners: int
    mirrored: bool
    names: tuple[str, ...] = ()

    @classmethod
    def of(cls, spec: str) -> Participants:
        """Read off a run spec as a document, JSON; it need not be valid."""
        document = json.loads(spec)
        fields = document if isinstance(document, dict) else {}
        told = fields.get("learners")
        n = told if isinstance(told, int) else len(told) if isinstance(told, list) else 0
        n = n if 0 < n <= _MOST_INDEX else _MOST_INDEX
        names = names_of(told) if isinstance(told, int | list) and n <= MOST_LEARNERS else ()
        names = names if all(isinstance(name, str) for name in names) else ()
        return cls(n, fields.get("capture") == "mirror", names)

    def require_itself(self, index: int, caller: Principal | None) -> None:
        """A learner that has shown a certificate speaks for itself; others cannot be told apart.

        Raises:
            StrangerError: it speaks for another one.
        """
        if caller is not None and not caller.is_one_of(
            *(f"{Role.LEARNER}/{name}" for name in self.names[index : index + 1])
        ):
            raise StrangerError(f"{caller} must not speak for {called(self.names, index)}")

    def require(self, *indices: int) -> None:
        """Refuse whoever is not one of them.

        Raises:
            RemoteProtocolError: there is no such learner.
        """
        if wrong := [index for index in indices if index >= self.learners]:
            raise RemoteProtocolError(f"the capture is of {self.learners} learners, got learner {wrong[0]}")

    def ends(self, route: eavesdropper_pb2.Route) -> tuple[str, str]:
        """The names of who opens a stream and who accepts it; empty where nobody said."""
        known = self.names if max(route.caller, route.callee) < len(self.names) else ()
        return (known[route.caller], known[route.callee]) if known else ("", "")

    def rows(self, request: eavesdropper_pb2.MirrorRequest) -> list[Row]:
        """One for each receiver of each message, as a relay would have it, but without metadata or its own times.

        Raises:
            RemoteProtocolError: the capture takes no copies, or one that is none of this run's. Nothing of it is kept.
        """
        if not self.mirrored:
            raise RemoteProtocolError("copies are taken where the run's capture is `mirror`, got a run of another one")
        self.require(request.sender)
        if len(request.messages) > _MOST_COPIES:
            raise RemoteProtocolError(f"a request must have at most {_MOST_COPIES} copies, got {len(request.messages)}")
        now = time.monotonic_ns()
        return [row for message in request.messages for row in self._rows(request.sender, message, now)]

    def _rows(self, sender: int, message: eavesdropper_pb2.MirroredMessage, now: int) -> list[Row]:
        if len(message.receivers) > min(self.learners, MOST_LEARNERS):
            raise RemoteProtocolError(
                f"a message of {self.learners} learners goes to fewer, got {len(message.receivers)}"
            )
        self.require(*message.receivers)
        wall, size = 10**9 * message.sent_at.seconds + message.sent_at.nanos, len(message.payload)
        if size > MOST_PAYLOAD or abs(wall) > _MOST_NS:
            text = f"a copy must have at most {MOST_PAYLOAD} bytes and a time of 64 bits in nanoseconds"
            raise RemoteProtocolError(f"{text}, got {size} and {wall}")
        if sender in message.receivers or len(set(message.receivers)) < len(message.receivers):
            raise RemoteProtocolError(f"a message of {called(self.names, sender)} must go to others, once to each")
        rows, kind = [], "signature" if is_signature(message.payload) else "message"
        for receiver in message.receivers:
            caller, callee = sorted((sender, receiver))
            direction = "out" if sender == caller else "back"
            rows.append(Row(caller, callee, sender, direction, kind, 0, 0, "", wall, now, size, message.payload))
        return rows
