"""Lists in pages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from sottovoce.errors import SpecError

T = TypeVar("T")

USUAL, MOST = 100, 1_000


def page(items: Mapping[str, T], size: int, token: str) -> tuple[list[T], str]:
    """One page of items.

    Args:
        items: by id, in the order of the list.
        size: items on a page; 0: the usual.
        token: of the page, as the page before gave it: the id of its last item; empty: the first page.

    Returns:
        The items, and the token of the next page; empty: there is none.

    Raises:
        SpecError: a token that is none, or of an item that is no longer here.
    """
    ids = list(items)
    if token and token not in items:
        raise SpecError(f"the page token must be one that this service gave, got {token!r}: begin with the first page")
    first = ids.index(token) + 1 if token else 0
    last = first + min(size or USUAL, MOST)
    return [items[each] for each in ids[first:last]], ids[last - 1] if last < len(ids) else ""
