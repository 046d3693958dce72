"""Deployment settings of a learner."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from sottovoce_core.errors import SpecError
from sottovoce_core.runs.policy import Policy
from sottovoce_core.spec import LEARNER_NAME_PATTERN, LEARNER_NAME_RULE
from sottovoce_rpc import principals
from sottovoce_rpc.addresses import is_loopback, require_address
from sottovoce_rpc.credentials import Credentials
from sottovoce_rpc.server import MAX_MESSAGE_BYTES, MAX_OVERHEAD_BYTES

_Sampler = Literal["bitwise", "opendp"]


_MAX_RECORDS_BYTES = 64 * 1024 * 1024
"""Maximum size of the records of one round, which arrive in one message."""


def compute_max_message_bytes(policy: Policy) -> int:
    """Return the maximum size of a received message: the records of a round, or a model as large as the policy allows."""
    if policy.max_parameters is None:
        return MAX_MESSAGE_BYTES
    return min(MAX_MESSAGE_BYTES, max(_MAX_RECORDS_BYTES, 8 * policy.max_parameters) + MAX_OVERHEAD_BYTES)


@dataclass(frozen=True, slots=True)
class LearnerConfig:
    """Deployment settings of one learner.

    Attributes:
        name: learner name, unique at its coordinator.
        coordinator: address of the coordinator.
        listen: `host:port` to listen on; port 0 picks a free port.
        advertise: address given to others, where it differs from `listen`.
        state_folder: folder of the ledger and the write-ahead logs.
        join_timeout_s: how long the coordinator may be unreachable at the start.
        recorded_noise: file of noise used instead of the operating system's: for tests, on loopback only.
        allow_imports: whether a run spec may name code to import.
        budget: maximum epsilon over all runs, by the ledger in `state_folder`; None: no limit.
        noise: noise source: `sottovoce_core.noise.SystemNoise`, or OpenDP (extra `opendp`).
        noise_seed: text from which all noise is derived, with the name of the run: for tests and demos, on loopback only.
        credentials: credentials of this learner; they must hold its name.
        owners: principals besides itself that may read its ledger, request predictions and send records, as `role/name`.
        feeders: principals besides `feeder/NAME` that may send records, as `role/name`.
        policy: owner's policy: which runs the learner joins, and what they may cost.
        keep_log: whether the logs of its runs are kept, with the records in them, for `sottovoce watch --state`.
    """

    name: str
    coordinator: str
    listen: str = "127.0.0.1:0"
    advertise: str | None = None
    state_folder: Path = field(default_factory=lambda: Path("sottovoce-state"))
    join_timeout_s: float = 30.0
    recorded_noise: Path | None = None
    allow_imports: bool = False
    budget: float | None = None
    noise: _Sampler = "bitwise"
    noise_seed: str | None = None
    credentials: Credentials = field(default_factory=Credentials)
    owners: tuple[str, ...] = ()
    feeders: tuple[str, ...] = ()
    policy: Policy = field(default_factory=Policy)
    keep_log: bool = False

    @property
    def own_budget(self) -> float | None:
        """Maximum epsilon over all runs: the budget, or the policy's limit if that is smaller."""
        return min((each for each in (self.budget, self.policy.epsilon) if each is not None), default=None)

    @property
    def is_noise_private(self) -> bool:
        """Return whether the noise is unpredictable: neither recorded nor seeded."""
        return self.recorded_noise is None and self.noise_seed is None

    def check(self) -> None:
        """Reject settings that would give no protection or would leave the learner unreachable.

        Raises:
            SpecError: recorded or seeded noise on an address that others can reach, more than one noise source, no
                address to give to others, an owner or a feeder that is not an identity, or a policy that needs an
                identity.
        """
        if re.fullmatch(LEARNER_NAME_PATTERN, self.name) is None:
            raise SpecError(
                f"a learner's name is part of file names: it must be {LEARNER_NAME_RULE}, got {self.name!r}"
            )
        if self.budget is not None and not 0 < self.budget < math.inf:
            raise SpecError(f"a learner's budget must be a positive, finite number, got {self.budget:g}")
        if not 0 <= self.join_timeout_s < math.inf:
            raise SpecError(f"--join-timeout must be a number of seconds, got {self.join_timeout_s:g}")
        require_address(self.listen, "--listen", allow_port_zero=True)
        require_address(self.coordinator, "--coordinator")
        if self.advertise:
            require_address(self.advertise, "--advertise")
        addresses = [self.listen, *([self.advertise] if self.advertise else [])]
        if not self.is_noise_private and not all(map(is_loopback, addresses)):
            kind = "seeded noise" if self.recorded_noise is None else "recorded noise"
            raise SpecError(f"{kind} gives no privacy and is allowed on loopback addresses only, got {addresses}")
        if self.noise_seed is not None and (self.recorded_noise is not None or self.noise != "bitwise"):
            raise SpecError("a noise seed goes with neither recorded noise nor OpenDP's, which takes no seed")
        for each in (*self.owners, *self.feeders):
            principals.Principal.parse("any", each)
        if self.credentials.folder is None:
            self.policy.require_identity()
        if self.advertise is None and self.listen.startswith(("0.0.0.0:", "[::]:")):
            raise SpecError(
                f"listening on all addresses ({self.listen}) needs --advertise HOST:PORT, the address for others"
            )
