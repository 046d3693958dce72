"""Lists in pages: all of it, in order, and nothing twice."""

from __future__ import annotations

import pytest

from sottovoce_core.errors import SpecError
from sottovoce_rpc import server
from sottovoce_rpc.server import paginate

ITEMS = {f"run-{k}": k for k in range(7)}


@pytest.mark.parametrize("size", [1, 2, 3, 6, 7, 8])
def test_pages_one_after_the_other_are_the_list(size: int) -> None:
    found, following = paginate(ITEMS, size, "")
    lengths = [len(found)]
    while following:
        more, following = paginate(ITEMS, size, following)
        found += more
        lengths.append(len(more))
    assert found == list(range(7))
    assert all(length == size for length in lengths[:-1]) and 0 < lengths[-1] <= size


def test_an_empty_list_has_one_page() -> None:
    assert paginate({}, 0, "") == ([], "")


def test_no_page_is_longer_than_the_service_thinks_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "DEFAULT_PAGE_SIZE", 2)
    monkeypatch.setattr(server, "MAX_PAGE_SIZE", 3)
    assert paginate(ITEMS, 0, "") == ([0, 1], "run-1")
    assert paginate(ITEMS, 100, "run-1") == ([2, 3, 4], "run-4")


def test_a_token_of_nobody_is_refused() -> None:
    with pytest.raises(SpecError, match="must be one that this service returned, got 'run-9'"):
        paginate(ITEMS, 2, "run-9")
