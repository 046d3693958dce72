"""What an eavesdropper tells Prometheus: captures, what was recorded and what was noticed, and whether it could be written."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from sottovoce_eavesdropper.records import CaptureFile
from sottovoce_rpc.metrics import Catalogue, Reading

CATALOGUE = Catalogue("sottovoce_eavesdropper")
_metric = CATALOGUE.add

_OPEN = _metric("captures_open", "Captures that are being recorded.")
_CAPTURES = _metric("captures_total", "Captures that were opened, or taken up again, since it started.")
_MESSAGES = _metric("messages_total", "Messages recorded; of a wiretap, records of TLS.")
_BYTES = _metric("recorded_bytes_total", "Bytes of them.")
_PARTS = _metric("parts_total", "Parts of captures that were written.")
_ROWS = _metric("rows_waiting", "Rows in memory, that are yet to be written.")
_HELD = _metric("rows_waiting_bytes", "Bytes of messages in them.")
_NOTICES = _metric("notices_total", "Things that must never happen on a channel, and did, by kind.", "kind")
_UNCHECKED = _metric("captures_unchecked", "Captures that are being recorded in which not everything can be noticed.")
_GAPS = _metric(
    "missing_rounds", "Rounds that are known to be missing, or stretches of them, in captures that are being recorded."
)
_ERRORS = _metric(
    "storage_errors_total", "Captures that could not be written any more: nothing more of them is recorded."
)


def readings(captures: Iterable[CaptureFile]) -> Iterator[Reading]:
    """Of an eavesdropper; captures: all of this process."""
    files = list(captures)
    recorded = [file for file in files if file.open]
    yield _OPEN.of(len(recorded))
    yield _CAPTURES.of(len(files))
    yield _MESSAGES.of(sum(file.messages if file.ciphertext is None else file.ciphertext.records for file in files))
    yield _BYTES.of(sum(file.bytes if file.ciphertext is None else file.ciphertext.bytes for file in files))
    yield _PARTS.of(sum(file.parts for file in files))
    rows, held = zip(*(file.unwritten for file in files), strict=True) if files else ((), ())
    yield _ROWS.of(sum(rows))
    yield _HELD.of(sum(held))
    noticed = Counter[str]()
    for file in files:
        noticed.update(dict(file.lookout.kinds))  # a copy: parts are looked at in a thread
    for kind, count in noticed.items():
        yield _NOTICES.of(count, kind)
    yield _UNCHECKED.of(sum(file.lookout.not_checked is not None for file in recorded))
    yield _GAPS.of(sum(file.gaps.missing for file in recorded))
    yield _ERRORS.of(sum(file.broken is not None for file in files))
