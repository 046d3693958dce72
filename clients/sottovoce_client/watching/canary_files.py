"""Files of canaries: the secret one, and the commitment to it that is published before the run."""

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
    """Canaries are not those that were committed to before the run."""


def commit_canaries(prepared: PreparedRun, count: int, folder: Path) -> PreparedRun:
    """Hide canaries in the records of a run, and commit to them: `canaries.json`, `commitment.json`, and a printed line.

    Args:
        prepared: the run that is about to start.
        count: how many.
        folder: of the run.

    Raises:
        SpecError: this run cannot have so many.
    """
    if prepared.run.spec.data.is_live:
        raise SpecError("canaries take the places of records that are there before the run, and live ones are not")
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
    """Write both files; returns the SHA-256 of the secret one, in hexadecimal."""
    document = {"format": "sottovoce-canaries-1", "nonce": secrets.token_hex(32), **asdict(canaries)}
    content = (json.dumps(document, indent=1) + "\n").encode()
    digest = hashlib.sha256(content).hexdigest()
    with open(folder / _SECRET, "wb", opener=open_private) as file:
        file.write(content)
    public = {"sha256": digest, "canaries": len(canaries.positions), "window": canaries.window, "claim": canaries.claim}
    (folder / _COMMITMENT).write_text(json.dumps(public, indent=2) + "\n", encoding="utf-8")
    return digest


def load_canaries(path: Path, commitment: str | None = None) -> Canaries:
    """Read canaries, if they are those that were committed to.

    Args:
        path: `canaries.json`.
        commitment: its SHA-256 as it was published (default: what `commitment.json` beside it says).

    Raises:
        CommitmentError: they are others.
        CaptureError: unreadable, or no canaries.
    """
    try:
        content = path.read_bytes()
        beside = path.with_name(_COMMITMENT)
        promised = commitment or json.loads(beside.read_text(encoding="utf-8"))["sha256"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CaptureError(f"cannot read the canaries {path} and their commitment: {error}") from None
    found = hashlib.sha256(content).hexdigest()
    if found != str(promised).lower():
        raise CommitmentError(f"{path} must have the SHA-256 {promised}, to which the run committed, got {found}")
    try:
        return _parsed(json.loads(content))
    except (ValueError, KeyError, TypeError) as error:
        raise CaptureError(f"{path} has no canaries: {error!r}") from None


def _parsed(document: dict[str, Any]) -> Canaries:
    places = tuple(CanaryPosition(int(each["round"]), int(each["learner"])) for each in document["places"])
    coins = tuple(int(coin) for coin in document["coins"])
    size, label, tau, claim = (float(document[name]) for name in ("size", "label", "tau", "claim"))
    window, pair = int(document["window"]), document.get("pair")
    if pair is not None:
        first, second = (tuple(map(float, record)) for record in pair)
        pair = first, second
    if len(places) != len(coins) or list(places) != sorted(set(places)) or window < 1 or not math.isfinite(claim):
        raise ValueError("places in order, a coin for each, a window and a finite claim are needed")
    return Canaries(places, coins, window, size, label, tau, claim, pair)


def insert_canaries(prepared: PreparedRun, canaries: Canaries) -> PreparedRun:
    """A run's records with the canaries in them.

    Raises:
        CaptureError: they are of another run.
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
    """The commitment of a run's canaries, where a capture of it lies in the run's folder; None: there is none."""
    if "://" in place:
        return None
    folder = Path(place).absolute()
    return next((each / _COMMITMENT for each in (folder, *folder.parents[:2]) if (each / _COMMITMENT).is_file()), None)
