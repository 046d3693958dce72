"""The two worlds of an audit as a file beside its captures, so that the audit can be repeated from them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from sottovoce.auditing.audit import Coins
from sottovoce.auditing.plan import AuditPlan
from sottovoce.auditing.worlds import Worlds
from sottovoce.data import LearnerData, PlacedData
from sottovoce.errors import CaptureError, DataError, SottovoceError
from sottovoce.experiment import Prepared
from sottovoce.spec import RunSpec
from sottovoce_client.documents import private
from sottovoce_eavesdropper.storage import Folder

FILE, _FORMAT = "worlds.json", "sottovoce-worlds-2"
_OF_ONE_PAIR = "sottovoce-worlds-1"
"""The format of before: one pair of worlds, its facts among the others."""

MOST_BYTES = 64 * 2**20

Document = dict[str, Any]
Way = Literal["relay", "wiretap"]


def as_audited(spec: RunSpec, capture: Way = "relay") -> RunSpec:
    """A spec as an audit runs it: every edge overheard, no end before the last round, nothing told that costs time.

    Args:
        spec: of the user.
        capture: how edges are overheard.
    """
    return spec.model_copy(
        update={
            "capture": capture,
            "privacy": type(spec.privacy)(),
            "telemetry": type(spec.telemetry)(),
            "topology": spec.topology.without_files(spec.names),
        }
    )


def write_worlds(
    folder: Path,
    plan: AuditPlan,
    ledger: str | None = None,
    pair_of_run: Sequence[int] = (),
    *,
    capture: Way = "relay",
    seeded: bool = False,
) -> None:
    """Write down what the worlds are.

    Args:
        folder: of the captures.
        plan: the audit.
        ledger: SHA-256 of the first line of the ledger of its runs; None: none is kept.
        pair_of_run: of every planned run, the pair of worlds that it lives in one of; empty where there is one pair.
        capture: how edges are overheard.
        seeded: whether the coins come from the seed.
    """
    document = {
        "format": _FORMAT,
        "learner": plan.run.spec.names[plan.worlds.learner],
        "shared": plan.worlds.shared,
        "pairs": [_pair(each.worlds) for each in plan.pairs],
        **({"pair_of_run": list(pair_of_run)} if plan.beside else {}),
        "runs": plan.all_runs,
        "seed": plan.seeds.audited.entropy,
        "coins": "seed" if seeded else "operating system",
        "data": digest(plan.data),
        "spec": as_audited(plan.run.spec, capture).model_dump(mode="json"),
        **({} if ledger is None else {"ledger": ledger}),
    }
    with open(folder / FILE, "w", encoding="utf-8", opener=private) as file:  # it holds records
        file.write(json.dumps(document, indent=2) + "\n")


def _pair(worlds: Worlds) -> Document:
    swapped = np.flatnonzero(worlds.swapped())
    use = int(swapped[0])
    return {
        "what": worlds.what,
        **({"use": use} if len(swapped) == 1 else {"row": int(worlds.first.order[use])}),
        "first": _record(worlds.first, use),
        "second": _record(worlds.second, use),
    }


def _record(data: LearnerData, use: int) -> Document:
    row = data.order[use]
    return {"features": data.features[row].tolist(), "label": float(data.labels[row])}


def digest(data: PlacedData) -> str:
    """Equal for equal records in equal rounds."""
    found = hashlib.sha256()
    for own in data.learners:
        for part in (own.features[own.order], own.labels[own.order], own.offsets):
            found.update(np.ascontiguousarray(part).tobytes())
    return found.hexdigest()


def read_worlds(place: Folder) -> Document:
    """The file as it stands.

    Raises:
        CaptureError: it cannot be read, or is none.
    """
    where = f"{place.name}/{FILE}"
    try:
        if (size := place.size(FILE)) > MOST_BYTES:
            raise CaptureError(f"{where} must have at most {MOST_BYTES} bytes, got {size}")
        with place.open(FILE) as file:
            document = json.loads(file.read(MOST_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise CaptureError(f"cannot read {where}: {str(error) or type(error).__name__}") from None
    if not isinstance(document, dict) or document.get("format") not in (_FORMAT, _OF_ONE_PAIR):
        raise CaptureError(f"{where} must say what two worlds are, in the format {_FORMAT}")
    return document


def worlds_from(document: Document, prepared: Prepared, where: str) -> list[Worlds]:
    """All pairs of worlds.

    Args:
        document: the file.
        prepared: the run and its data.
        where: what errors call the file.

    Raises:
        CaptureError: it lacks something, or something is of another kind.
        DataError: made with other data, the worlds are not adjacent, or the loss is not defined for them.
    """
    try:
        names = prepared.run.spec.names
        if document["learner"] not in names:
            raise CaptureError(f"{where}: the learner must be one of {', '.join(names)}, got {document['learner']!r}")
        if document["data"] != digest(prepared.data):
            raise DataError(
                f"{where} is of other records than the spec's data source gives now; SOTTOVOCE_DATA may lead elsewhere"
            )
        learner = names.index(document["learner"])
        own = prepared.data.learners[learner]
        pairs = document["pairs"] if document["format"] == _FORMAT else [document]
        found = [_worlds(pair, learner, own, shared=document["shared"] is True) for pair in pairs]
        for worlds in found:
            worlds.require_learnable(prepared.run.loss)
        return found
    except DataError as error:
        raise DataError(str(error) if where in str(error) else f"{where}: {error}") from None
    except SottovoceError:
        raise
    except (KeyError, TypeError, ValueError) as error:
        raise CaptureError(f"{where} does not say what two worlds are: {error!r}") from None


def _worlds(pair: Document, learner: int, own: LearnerData, *, shared: bool) -> Worlds:
    kind = "use" if "use" in pair else "row"
    swap, index = (own.with_use if kind == "use" else own.with_record), pair[kind]
    if type(index) is not int:
        raise TypeError(f"{kind} must be a number")
    first, second = (
        swap(index, np.asarray(record["features"], dtype=np.float64), float(record["label"]))
        for record in (pair["first"], pair["second"])
    )
    return Worlds(learner, first, second, str(pair["what"]), shared)


def coins_of(document: Document) -> Coins:
    """What chose the world of every run, as far as the file says it."""
    told = document.get("coins")
    return told if told in ("seed", "operating system") else "not known"


def pairs_of(document: Document, where: str) -> Callable[[int | None], int]:
    """Which pair of worlds a run is of, by its replica.

    Args:
        document: the file.
        where: what errors call the file.

    Raises:
        CaptureError: the file does not say it.
    """
    pairs = len(document.get("pairs", [document]))
    if pairs == 1:
        return lambda replica: 0
    told = document.get("pair_of_run")
    if not isinstance(told, list) or not all(type(k) is int and 0 <= k < pairs for k in told):
        raise CaptureError(f"{where}: pair_of_run must say of every run which of the {pairs} pairs of worlds it is of")

    def pair(replica: int | None) -> int:
        if replica is None or not 0 <= replica < len(told):
            raise CaptureError(f"{where} must say of which pair of worlds run {replica} is")
        return int(told[replica])

    return pair
