"""Run specs on the wire: written with their format, read tolerantly, compared; and what no channel could carry."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping

import structlog

from sottovoce_core.errors import RemoteProtocolError, SpecError
from sottovoce_core.spec import RunSpec, parse_spec
from sottovoce_core.spec_versions import add_format, drop_unknown_fields
from sottovoce_core.text import abbreviate_names
from sottovoce_rpc.server import MAX_MESSAGE_BYTES

log = structlog.get_logger()


def spec_to_wire(spec: RunSpec) -> str:
    """The spec as a document, JSON."""
    return json.dumps(add_format(spec.model_dump(mode="json")))


def document_from_wire(text: str) -> object:
    """A document as this version takes it; fields of a newer one are left out, and their names logged.

    Raises:
        SpecError: not JSON, or a format that is none.
    """
    try:
        document, left_out = drop_unknown_fields(json.loads(text), RunSpec)
    except (ValueError, RecursionError) as error:  # a number of too many digits, or nested too deep
        raise SpecError(f"the run spec must be JSON: {error}") from None
    if left_out:
        log.warning("the run spec is of a newer version: fields are left out", fields=left_out)
    return document


def spec_from_wire(text: str, *, imports: bool) -> RunSpec:
    """The spec of a document.

    Args:
        text: JSON.
        imports: whether it may name code to import.

    Raises:
        SpecError: it is not valid.
    """
    return parse_spec(document_from_wire(text), allow_imports=imports)


def compute_plan_hash(spec: RunSpec, n_features: int) -> bytes:
    """SHA-256 of what all learners of a run must have been told alike: its spec and the features of a record.

    What is None is left out, so that a field that a later version adds changes nothing as long as nobody sets it.
    """
    plan = {"spec": spec.model_dump(mode="json", exclude_none=True), "n_features": n_features}
    return hashlib.sha256(json.dumps(plan, sort_keys=True, separators=(",", ":")).encode()).digest()


def check_size(shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse a run whose messages no channel carries, before anything as large is made.

    Args:
        shapes: of the fields of a round's message.

    Raises:
        SpecError: they are too long.
    """
    size = 8 * sum(math.prod(shape) for shape in shapes.values())
    if size > MAX_MESSAGE_BYTES:
        raise SpecError(f"a message may have {MAX_MESSAGE_BYTES} bytes, got {size}: n_features is too large")


def require_run_id(run_id: str) -> None:
    """Refuse what cannot be part of a file's name, as a run's id is.

    Raises:
        RemoteProtocolError: it cannot.
    """
    if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", run_id) is None:
        raise RemoteProtocolError(
            f"a run id must be letters, digits, dots, dashes and underscores, at most 128, got {run_id[:200]!r}"
        )


def resolve_run_id(given: str, known: Iterable[str]) -> str:
    """The id of a run of which somebody gives as much as tells it from others; what begins none is returned as it is.

    Args:
        given: an id, or its beginning; empty: none.
        known: ids.

    Raises:
        SpecError: several begin with it.
    """
    ids = list(dict.fromkeys(known))
    found = [each for each in ids if given and each.startswith(given)]
    if given in ids or len(found) < 2:
        return given if given in ids or not found else found[0]
    raise SpecError(
        f"a run's id, or a beginning that no other one has, is required, got {given!r}, with which several begin: "
        f"{abbreviate_names(found)}"
    )


# ---- pace of looks at a run ------------------------------------------------------------------------------------------


REPORT_DIVISOR = 8


def compute_next_report_round(rounds: int, learners: int) -> int:
    """The number of rounds after which the next look is due, where the last one was after `rounds`.

    Looks are ever further apart, by an eighth of all rounds so far. So of T rounds about `20 + 8 ln(T / 20)` are looked at (20
    of 25, 46 of 500, 85 of 50,000), and what looks cost a round vanishes. Of many learners the first looks are further
    apart, too: all of them together tell at most about eight times a round.

    >>> compute_next_report_round(3, 5), compute_next_report_round(400, 5), compute_next_report_round(3, 800)
    (4, 450, 103)
    """
    return rounds + max(1, rounds // REPORT_DIVISOR, learners // REPORT_DIVISOR)
