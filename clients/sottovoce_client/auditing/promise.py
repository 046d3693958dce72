"""What captures are held to: the spec in `capture.json`, which no learner has signed, unless somebody gives another one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path, PurePath
from typing import Any

from sottovoce.errors import CaptureError, SpecError
from sottovoce.spec import RunSpec, parse_spec, read_document
from sottovoce_client.auditing.worlds import as_audited
from sottovoce_eavesdropper.reading import Capture
from sottovoce_eavesdropper.storage import Folder

SPEC_FILE, _FOLDER = "spec.yaml", "captures"
_NAMED = 3
"""Fields that differ, at most, that are named."""

TAKEN = (
    "What was promised is taken from capture.json, which nobody signed: whoever kept the capture could have written another "
    "promise there, which no learner made."
)


def require_promised(spec: RunSpec, captures: Sequence[Capture], place: Folder | None = None) -> None:
    """Hold the spec in captures against the `spec.yaml` that lies beside them, where one does: `up` leaves it.

    Args:
        spec: that captures say was run.
        captures: in folders of this machine; of others nothing is looked for.
        place: the folder that was named, if it was one.

    Raises:
        CaptureError: it is another one, or cannot be read.
    """
    for path in _beside(captures, place):
        try:
            found = parse_spec(read_document(path), source=str(path), imports=False)
        except SpecError as error:
            raise CaptureError(f"{path} lies beside the captures, and cannot be held against them: {error}") from None
        promised = partial(_promised, network=_has_network(found))
        if where := list(islice(differences(promised(spec), promised(found)), _NAMED)):
            raise CaptureError(
                f"{captures[0].name} and {path} must be of the same run spec, and differ in {'; '.join(where)}: one of them was "
                f"changed, and neither is signed. Give the spec that you were told: sottovoce audit SPEC --captures ..."
            )


def _beside(captures: Sequence[Capture], place: Folder | None) -> list[Path]:
    """Files `spec.yaml`: in the folder that was named, in a capture's own, and in that which has its folder `captures`."""
    local = [Path(each.name) for each in (place, *captures) if each is not None and "://" not in each.name]
    runs = [each.parent.parent for each in local if each.parent.name == _FOLDER]
    runs += [each.parent for each in local if each.name == _FOLDER]
    paths = (each / SPEC_FILE for each in dict.fromkeys((*local, *runs)))
    return [path for path in paths if path.is_file()]


def _has_network(spec: RunSpec) -> bool:
    """Whether a graph that a spec names as a file can be read here."""
    try:
        spec.topology.without_files(spec.names)
    except SpecError:
        return False
    return True


def _promised(spec: RunSpec, *, network: bool) -> dict[str, Any]:
    """What an audit takes from a spec, but for where data lie, and who was away in the end: `spec.yaml` may lack that."""
    kept = spec if network else spec.model_copy(update={"topology": type(spec.topology)()})
    document = as_audited(kept).model_dump(mode="json")
    source = document["data"]["source"]
    return {**document, "absences": None, "data": {**document["data"], "source": PurePath(str(source)).name}}


def difference(one: Any, other: Any) -> str | None:
    """The first place where two JSON documents differ, and what stands there; None: nowhere."""
    return next(differences(one, other), None)


def differences(one: Any, other: Any, where: str = "") -> Iterator[str]:
    """All places where two JSON documents differ, and what stands there."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key in sorted({*one, *other}, key=lambda key: (key != "name", key)):  # what it is comes before how it is
            yield from differences(one.get(key), other.get(key), f"{where}.{key}" if where else str(key))
    elif one != other:
        yield f"{where or 'all of it'}: {str(one)[:60]} and {str(other)[:60]}"
