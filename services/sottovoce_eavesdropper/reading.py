"""Reading a capture back: from raw bytes to the transcript that replay and audit work on."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sottovoce.arrays import FloatArray
from sottovoce.errors import CaptureError, EquivocationError, RemoteProtocolError
from sottovoce.topology import Network
from sottovoce.transcript import Transcript, parquet
from sottovoce_rpc.codec import decode_round


@dataclass(frozen=True, slots=True)
class Capture:
    """A capture on disk.

    Attributes:
        folder: where it stands.
        facts: what `capture.json` says.
    """

    folder: Path
    facts: Mapping[str, Any]

    @property
    def complete(self) -> bool:
        """False when the eavesdropper ended before it closed the capture; its parts are readable all the same."""
        return bool(self.facts["complete"])

    def messages(self) -> Any:
        """All recorded messages, as an Arrow table.

        Raises:
            CaptureError: a part cannot be read, or there is none.
        """
        parts = sorted(self.folder.glob("part-*.parquet"))
        if not parts:
            raise CaptureError(f"the capture {self.folder} has no messages")
        try:
            table = parquet().read_table(parts, filters=[("kind", "=", "message")])
        except (OSError, ValueError) as error:
            raise CaptureError(f"cannot read the capture {self.folder}: {error}") from None
        return table

    def transcript(
        self, shapes: Mapping[str, tuple[int, ...]], learners: int, network: Network | None = None
    ) -> Transcript:
        """What every learner said, up to the last round in which all were overheard whom anybody heard.

        What nobody heard is not-a-number.

        Args:
            shapes: the fields of a message, and their shapes.
            learners: how many there are.
            network: who tells whom in which round (default: everybody is heard in every round).

        Raises:
            EquivocationError: one learner said different things to different neighbours in one round.
            CaptureError: a message cannot be decoded, or a round is missing.
        """
        said = self._said(shapes)
        last, rounds = max((t for t, _ in said), default=-1), 0
        while rounds <= last and all((rounds, i) in said for i in _heard_of(network, rounds, learners)):
            rounds += 1
        if rounds == 0:
            raise CaptureError(
                f"the capture {self.folder} has no round in which all {learners} learners were overheard"
            )
        return Transcript({name: _stacked(said, name, (rounds, learners, *shape)) for name, shape in shapes.items()})

    def _said(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[tuple[int, int], Mapping[str, FloatArray]]:
        payloads: dict[tuple[int, int], bytes] = {}
        said: dict[tuple[int, int], Mapping[str, FloatArray]] = {}
        table = self.messages()
        for sender, payload in zip(table["sender"].to_pylist(), table["payload"].to_pylist(), strict=True):
            try:
                t, claimed, message = decode_round(payload, shapes)
            except RemoteProtocolError as error:
                raise CaptureError(
                    f"a message of learner {sender} in {self.folder} cannot be decoded: {error}"
                ) from None
            if claimed != sender:
                raise CaptureError(f"learner {sender} spoke as learner {claimed} in round {t}")
            if payloads.setdefault((t, sender), payload) != payload:
                raise EquivocationError(f"learner {sender} said two different things in round {t}")
            said[t, sender] = message.fields
        return said


def _heard_of(network: Network | None, t: int, learners: int) -> Iterable[int]:
    """Those whose message of round t somebody hears."""
    return range(learners) if network is None else np.flatnonzero(network.at(t).neighbours.any(axis=0)).tolist()


def _stacked(said: Mapping[tuple[int, int], Mapping[str, FloatArray]], name: str, shape: tuple[int, ...]) -> FloatArray:
    """One field as `(rounds, learners, 1, dim)`."""
    dense = np.full(shape, np.nan)
    for (t, i), fields in said.items():
        if t < shape[0]:
            dense[t, i] = fields[name]
    return dense[:, :, None]


def open_capture(folder: Path) -> Capture:
    """Open a capture.

    Raises:
        CaptureError: there is none in this folder.
    """
    try:
        facts = json.loads((folder / "capture.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CaptureError(f"{folder} is not a capture: {error}") from None
    if not isinstance(facts, dict) or facts.get("format") != "sottovoce-capture-1":
        raise CaptureError(f"{folder} is not a capture of a known format")
    return Capture(folder, facts)
