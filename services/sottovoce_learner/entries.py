"""Entries of a log: how one is written, and how far a log can be believed. No file, no clock.

An entry is, little endian and padded to 8 bytes,

    length u32 | kind u8 | 0 | sequence u64 | round u64 | incarnation u64 | spent f64 | in all f64 | crc32 of body u32 | 0
    body
    chain 16

with `chain_k = SHA-256(chain_{k-1} | header of entry k)[:16]`. The header holds the body's checksum, so an entry is right only
behind exactly those that were before it.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

_HEADER = struct.Struct("<IB3xQQQddI4x")
CHAIN = 16
START = bytes(CHAIN)
"""What the first entry of all stands behind."""


class Kind(IntEnum):
    """What an entry says; the numbers are those on disk."""

    OPEN = 1
    GRANT = 2
    BATCH = 3
    ROUND = 4
    CLOSE = 5
    SNAPSHOT = 6


_KINDS = frozenset(Kind)


class Entry(NamedTuple):
    """One entry.

    Attributes:
        kind: what it says.
        sequence: how many entries of the run stand before it.
        round: that it is about.
        spent: epsilon of the run, with what this entry charges.
        in_all: epsilon of all runs of the learner, this one included.
        body: by its kind; `bodies.py` reads and writes it.
        incarnation: of the process that wrote it.
    """

    kind: Kind
    sequence: int
    round: int
    spent: float
    in_all: float
    body: bytes
    incarnation: int = 0


@dataclass(frozen=True, slots=True)
class Placed:
    """An entry where it was found.

    Attributes:
        entry: the entry.
        chain: behind it.
        end: first byte behind it.
    """

    entry: Entry
    chain: bytes
    end: int


def encode(entry: Entry, chain: bytes) -> tuple[bytes, bytes]:
    """The bytes of an entry that stands behind `chain`, and the chain behind it."""
    header = _HEADER.pack(
        len(entry.body),
        entry.kind,
        entry.sequence,
        entry.round,
        entry.incarnation,
        entry.spent,
        entry.in_all,
        zlib.crc32(entry.body),
    )
    after = _after(chain, header)
    return b"".join((header, entry.body, bytes(-len(entry.body) % 8), after)), after


def decode(raw: bytes, at: int, sequence: int, chain: bytes) -> Placed | None:
    """The entry at a place of a log; None where none stands there that belongs behind `chain`."""
    body_at = at + _HEADER.size
    if body_at > len(raw):
        return None
    length, kind, number, t, incarnation, spent, in_all, checksum = _HEADER.unpack_from(raw, at)
    chain_at = body_at + length + -length % 8
    end = chain_at + CHAIN
    if kind not in _KINDS or number != sequence or end > len(raw):
        return None
    header, body = raw[at:body_at], raw[body_at : body_at + length]
    # The bytes without a meaning are zero, and under the chain or compared here: no bit may be another one.
    whole = raw[chain_at:end] == _after(chain, header) and not any(raw[body_at + length : chain_at])
    if not whole or zlib.crc32(body) != checksum:
        return None
    return Placed(Entry(Kind(kind), number, t, spent, in_all, body, incarnation), raw[chain_at:end], end)


def walk(raw: bytes, at: int = 0, sequence: int = 0, chain: bytes = START) -> list[Placed]:
    """All entries from a place on, up to the first that is not right."""
    found: list[Placed] = []
    while (placed := decode(raw, at, sequence, chain)) is not None:
        found.append(placed)
        at, sequence, chain = placed.end, sequence + 1, placed.chain
    return found


def _after(chain: bytes, header: bytes) -> bytes:
    return hashlib.sha256(chain + header).digest()[:CHAIN]
