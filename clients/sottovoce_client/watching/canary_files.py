"""Files of canaries: the secret one, and the commitment that is published before the run."""

from __future__ import annotations

import hashlib
import json
import math
import secrets
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from sottovoce_client import terminal
from sottovoce_client.atomic_files import open_private
from sottovoce_client.formatting import format_number
from sottovoce_core.auditing.online.canaries import Canaries, CanaryPosition, draw_canaries
from sottovoce_core.errors import CaptureError, SottovoceError, SpecError
from sottovoce_core.experiment import PreparedRun
from sottovoce_core.text import format_learner_name

_SECRET, _COMMITMENT = "canaries.json", "commitment.json"


class CommitmentError(SottovoceError):
    """Canaries differ from those that were committed to before the run."""


def commit_canaries(prepared: PreparedRun, count: int, folder: Path) -> PreparedRun:
    """Insert canaries into the records of a run, and commit to them: `canaries.json`, `commitment.json`, and a printed line.

    Args:
        prepared: the run, before its start.
        count: number of canaries.
        folder: folder of the run.

    Raises:
        SpecError: This run cannot have so many.
    """
    if prepared.run.spec.data.is_live:
        raise SpecError("canaries replace records that exist before the run, and this run has live records")
    generator = np.random.default_rng(secrets.randbits(256))
    canaries = draw_canaries(prepared.run, prepared.data, count, generator)
    digest = _save(canaries, folder)
    terminal.create_console(stderr=True, highlight=False).print(
        f"{count} canaries for {format_number(canaries.claim)} epsilon or less; committed to: sha256 {digest}\n"
        "They replace records: the run learns less from those rounds.",
        soft_wrap=True,
    )
    return replace(prepared, data=canaries.insert_into(prepared.data))


def _save(canaries: Canaries, folder: Path) -> str:
    """Write both files; return the SHA-256 of the secret one, in hexadecimal."""
    document = {"format": "sottovoce-canaries-1", "nonce": secrets.token_hex(32), **asdict(canaries)}
    content = (json.dumps(document, indent=1) + "\n").encode()
    digest = hashlib.sha256(content).hexdigest()
    with open(folder / _SECRET, "wb", opener=open_private) as file:
        file.write(content)
    public = {"sha256": digest, "canaries": len(canaries.positions), "window": canaries.window, "claim": canaries.claim}
    (folder / _COMMITMENT).write_text(json.dumps(public, indent=2) + "\n", encoding="utf-8")
    return digest


def load_canaries(path: Path, commitment: str | None = None) -> Canaries:
    """Load canaries, and check them against their commitment.

    Args:
        path: `canaries.json`.
        commitment: published SHA-256 (default: that in `commitment.json` next to the file).

    Raises:
        CommitmentError: The canaries differ from the committed ones.
        CaptureError: The file cannot be read, or has no canaries.
    """
    try:
        content = path.read_bytes()
        commitment_file = path.with_name(_COMMITMENT)
        expected = commitment or json.loads(commitment_file.read_text(encoding="utf-8"))["sha256"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CaptureError(f"cannot read the canaries {path} and their commitment: {error}") from None
    found = hashlib.sha256(content).hexdigest()
    if found != str(expected).lower():
        raise CommitmentError(f"{path} must have the SHA-256 {expected}, to which the run committed, got {found}")
    try:
        return _parse_canaries(json.loads(content))
    except (ValueError, KeyError, TypeError) as error:
        raise CaptureError(f"{path} must have canaries: {error!r}") from None


def _parse_canaries(document: dict[str, Any]) -> Canaries:
    positions = tuple(CanaryPosition(int(each["round"]), int(each["learner"])) for each in document["positions"])
    coins = tuple(int(coin) for coin in document["coins"])
    size, label, tau, claim = (float(document[name]) for name in ("size", "label", "tau", "claim"))
    window, pair = int(document["window"]), document.get("record_pair")
    if pair is not None:
        first, second = (tuple(map(float, record)) for record in pair)
        pair = first, second
    is_ordered = list(positions) == sorted(set(positions))
    if len(positions) != len(coins) or not is_ordered or window < 1 or not math.isfinite(claim):
        raise ValueError("needed: positions in order, a coin for each, a window and a finite claim")
    return Canaries(positions, coins, window, size, label, tau, claim, pair)


def insert_canaries(prepared: PreparedRun, canaries: Canaries) -> PreparedRun:
    """Insert canaries into a run's records.

    Raises:
        CaptureError: They are of another run.
    """
    if canaries.record_pair is not None and {*map(len, canaries.record_pair)} != {prepared.data.n_features}:
        raise CaptureError(f"these canaries are of another run: records here have {prepared.data.n_features} features")
    for place in canaries.positions:
        own = prepared.data.learners[place.learner : place.learner + 1]
        if not own or not 0 <= place.round < own[0].rounds or not len(own[0].rows(place.round)):
            name = format_learner_name(prepared.run.spec.names, place.learner)
            raise CaptureError(f"these canaries are of another run: {name} has no record in round {place.round} here")
    return replace(prepared, data=canaries.insert_into(prepared.data))


def find_commitment(place: str) -> Path | None:
    """Find the commitment of a run's canaries, if the capture is in the run's folder; None if there is none."""
    if "://" in place:
        return None
    folder = Path(place).absolute()
    return next((each / _COMMITMENT for each in (folder, *folder.parents[:2]) if (each / _COMMITMENT).is_file()), None)
