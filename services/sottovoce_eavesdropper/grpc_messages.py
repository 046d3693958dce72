"""Splitter of the data of a gRPC call into messages: each follows a byte that says whether it is compressed, and its length."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field

from sottovoce_core.errors import RemoteProtocolError

_PREFIX_BYTES = 5
"""Bytes before the content of a message."""


@dataclass(slots=True)
class MessageSplitter:
    """Splitter of one direction of a call into messages; of a longer one it keeps `max_bytes` bytes.

    Attributes:
        max_bytes: maximum bytes of a message that is kept.
        max_flag: largest first byte of a message; 1: compressed.
        encoding: how messages that say so are compressed.
        count: number of messages so far.
        is_ended: nothing more comes.
    """

    max_bytes: int
    max_flag: int = 1
    encoding: str = ""
    count: int = 0
    is_ended: bool = False
    _head: bytearray = field(default_factory=bytearray)
    _body: bytearray = field(default_factory=bytearray)
    _remaining: int = 0

    def split(self, data: bytes) -> Iterator[bytes]:
        """Yield every message that ends in these bytes."""
        size = len(data)
        if not self._head and size - _PREFIX_BYTES == int.from_bytes(data[1:5]) and size > _PREFIX_BYTES:
            yield self._unpack(data[0], data[5 : 5 + self.max_bytes])  # one message, which is the rule
            return
        at = 0
        while at < size:
            if len(self._head) < _PREFIX_BYTES:
                missing = _PREFIX_BYTES - len(self._head)
                self._head += data[at : at + missing]
                at += missing
                if len(self._head) < _PREFIX_BYTES:
                    return
                self._remaining = int.from_bytes(self._head[1:])
            taken = min(self._remaining, size - at)
            self._body += data[at : at + min(taken, self.max_bytes - len(self._body))]
            self._remaining, at = self._remaining - taken, at + taken
            if not self._remaining:
                yield self._unpack(self._head[0], bytes(self._body))
                self._head.clear()
                self._body.clear()

    def take_rest(self) -> bytes:
        """Return the bytes of a message that has not ended, with its prefix."""
        rest = bytes(self._head + self._body)
        self._head.clear()
        self._body.clear()
        return rest

    def _unpack(self, flag: int, body: bytes) -> bytes:
        """Return a message; as it is if it cannot be decompressed, or has more bytes than that."""
        if flag > self.max_flag:
            raise RemoteProtocolError(f"the first byte of a message must be at most {self.max_flag}, got {flag}")
        if not flag or self.encoding not in ("gzip", "deflate"):
            return body
        try:
            unpacked = (stream := zlib.decompressobj(wbits=47)).decompress(body, self.max_bytes)  # 47: zlib or gzip
        except zlib.error:
            return body
        return body if stream.unused_data else unpacked
