"""A sieve: of messages, those that are records of the run, as they are learned, and why the others are none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sottovoce.arrays import BoolArray
from sottovoce.data.encoding import Encoded
from sottovoce.data.live import LiveRecords
from sottovoce_client.feeding.fields import WITHOUT_SCHEMA, Fields, Unfit
from sottovoce_client.feeding.source import Message, Unreadable

NO_NUMBERS = "features and label: not a list of as many numbers as the run has features, and a number"


@dataclass(frozen=True, slots=True)
class Sifted:
    """What came of some messages.

    Attributes:
        fitting: records that can be learned, and the positions of those; None: there is none.
        refused: messages that cannot, each with a reason that quotes nothing of it.
        again: how many came a second time, and are passed over.
        last: the highest position so far.
    """

    fitting: tuple[Encoded, list[int]] | None
    refused: Sequence[tuple[Message, str]]
    again: int
    last: int


@dataclass(frozen=True, slots=True)
class Sieve:
    """What a message must be in a run.

    Attributes:
        records: of the run.
        fields: where they stand in a message.
    """

    records: LiveRecords
    fields: Fields

    def sift(self, messages: Sequence[Message], after: int) -> Sifted:
        """Tell records from what is none.

        Args:
            messages: in their order.
            after: the highest position so far; a message at or below it came before.
        """
        readable, found, refused, again = list[Message](), list[Mapping[str, Any]](), list[tuple[Message, str]](), 0
        for message in messages:
            if isinstance(message, Unreadable):
                refused.append((message, message.reason))
            elif message.position <= after:
                again += 1
            else:
                try:
                    found.append(self.fields.record(message.body))
                    readable.append(message)
                except Unfit as why:
                    refused.append((message, str(why)))
            after = max(after, message.position)
        fitting = None
        if found:
            encoded, reasons = self.encode(found)
            refused += [(readable[row], why) for row, why in reasons.items()]
            if len(encoded.labels):
                fits = [message.position for row, message in enumerate(readable) if row not in reasons]
                fitting = (encoded, fits)
        refused.sort(key=lambda each: each[0].position)
        return Sifted(fitting, refused, again, after)

    def encode(self, records: Sequence[Mapping[str, Any]]) -> tuple[Encoded, Mapping[int, str]]:
        """Records by their fields, as they are learned, and why some are not, by their place among all."""
        if self.records.encoder is not None:
            encoded = self.records.encode(records)
            return encoded, encoded.refused
        width = self.records.data.features or 0
        wellformed = np.array([_numbers(record, width) for record in records], dtype=bool)
        rows = [record for record, fine in zip(records, wellformed, strict=True) if fine]
        features = np.array([record["features"] for record in rows], dtype=np.float64).reshape(len(rows), width)
        encoded = self.records.encode(features, [record["label"] for record in rows])
        return encoded, _all_reasons(wellformed, encoded.refused)


def _all_reasons(wellformed: BoolArray, refused: Mapping[int, str]) -> dict[int, str]:
    """By place among all, where `refused` counts those that are well formed alone."""
    reasons = dict.fromkeys(np.flatnonzero(~wellformed).tolist(), NO_NUMBERS)
    places = np.flatnonzero(wellformed)
    return dict(sorted((reasons | {int(places[row]): why for row, why in refused.items()}).items()))


def _numbers(record: Mapping[str, Any], width: int) -> bool:
    """Whether this is a record of a run without a schema."""
    features, label = record.get("features"), record.get("label")
    whole = isinstance(features, list) and len(features) == width and record.keys() == set(WITHOUT_SCHEMA)
    return whole and all(map(_is_number, [*(features or ()), label]))


def _is_number(value: Any) -> bool:
    return type(value) is float or (type(value) is int and abs(value) < 10**300)
