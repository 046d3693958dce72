"""SVG path data as the standard has it (SVG 2, section 9.3.9), as far as lines and arcs go."""

from __future__ import annotations

import re

_NUMBER = r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?"
_COUNTS = {"m": 2, "l": 2, "h": 1, "v": 1, "c": 6, "s": 4, "q": 4, "t": 2, "a": 7, "z": 0}
_PIECE = re.compile(rf"\s*([A-Za-z])((?:[\s,]*{_NUMBER})*)[\s,]*")


def is_path(data: str) -> bool:
    """Whether a browser draws all of it: each command has its numbers, and the first one says where it begins."""
    if not data.strip():
        return True  # draws nothing, and is no error
    at = 0
    while at < len(data):
        found = _PIECE.match(data, at)
        if found is None or (at == 0 and found[1] not in "Mm") or found[1].lower() not in _COUNTS:
            return False
        wanted, given = _COUNTS[found[1].lower()], len(re.findall(_NUMBER, found[2]))
        if given != 0 if wanted == 0 else given == 0 or given % wanted != 0:
            return False
        at = found.end()
    return True


def wrong_paths(page: str) -> list[str]:
    """The path data of a page that a browser does not draw."""
    drawn = re.findall(r"<path\b[^>]*?\bd=\"([^\"]*)\"", page)
    return [data for data in drawn if not is_path(data)]
