"""Run specs and run ids on the wire: encoding, tolerant reading, hashing, size check, and the schedule of progress reports."""

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
    """Encode a spec as a JSON document with its format version."""
    return json.dumps(add_format(spec.model_dump(mode="json")))


def document_from_wire(text: str) -> object:
    """Parse a spec document; drop fields of a newer version and log their names.

    Raises:
        SpecError: the text is not JSON, or its format is not known.
    """
    try:
        document, left_out = drop_unknown_fields(json.loads(text), RunSpec)
    except (ValueError, RecursionError) as error:  # an integer with too many digits, or nesting that is too deep
        raise SpecError(f"the run spec must be JSON: {error}") from None
    if left_out:
        log.warning("the run spec is of a newer version: unknown fields are dropped", fields=left_out)
    return document


def spec_from_wire(text: str, *, imports: bool) -> RunSpec:
    """Parse and validate a spec.

    Args:
        text: JSON.
        imports: allow the spec to name code to import.

    Raises:
        SpecError: the spec is not valid.
    """
    return parse_spec(document_from_wire(text), allow_imports=imports)


def compute_plan_hash(spec: RunSpec, n_features: int) -> bytes:
    """Return the SHA-256 that must be equal for all learners of a run: of its spec and the number of features of a record.

    Fields that are None are left out, so that a field added by a later version changes nothing until it is set.
    """
    plan = {"spec": spec.model_dump(mode="json", exclude_none=True), "n_features": n_features}
    return hashlib.sha256(json.dumps(plan, sort_keys=True, separators=(",", ":")).encode()).digest()


def check_size(shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse a run whose messages are larger than a channel carries, before any array of that size is allocated.

    Args:
        shapes: shapes of the fields of a round's message.

    Raises:
        SpecError: a message is too large.
    """
    size = 8 * sum(math.prod(shape) for shape in shapes.values())
    if size > MAX_MESSAGE_BYTES:
        raise SpecError(f"a message may have at most {MAX_MESSAGE_BYTES} bytes, got {size}: n_features is too large")


def require_run_id(run_id: str) -> None:
    """Require an id that can be part of a file name.

    Raises:
        RemoteProtocolError: it cannot.
    """
    if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", run_id) is None:
        raise RemoteProtocolError(
            f"a run id must be letters, digits, dots, dashes and underscores, at most 128, got {run_id[:200]!r}"
        )


def resolve_run_id(given: str, known: Iterable[str]) -> str:
    """Expand a unique prefix of a run id; return it unchanged if no run matches.

    Args:
        given: a run id or its prefix; an empty one matches nothing.
        known: ids of all runs.

    Raises:
        SpecError: several ids have this prefix.
    """
    ids = list(dict.fromkeys(known))
    found = [each for each in ids if given and each.startswith(given)]
    if given in ids or len(found) < 2:
        return given if given in ids or not found else found[0]
    raise SpecError(
        f"a run id, or a prefix of exactly one, is required, got {given!r}, the prefix of several: {abbreviate_names(found)}"
    )


# ---- schedule of progress reports ------------------------------------------------------------------------------------


REPORT_DIVISOR = 8


def compute_next_report_round(rounds: int, learners: int) -> int:
    """Return the number of rounds after which the next progress report is due, if the last one was after `rounds`.

    The distance between reports grows, by an eighth of all rounds so far: T rounds have about `20 + 8 ln(T / 20)` reports (20 for
    T = 25, 46 for 500, 85 for 50,000), so their cost per round vanishes. With many learners the first reports are further apart,
    too: all learners together send at most about eight reports a round.
    >>> compute_next_report_round(3, 5), compute_next_report_round(400, 5), compute_next_report_round(3, 800)
    (4, 450, 103)
    """
    return rounds + max(1, rounds // REPORT_DIVISOR, learners // REPORT_DIVISOR)
