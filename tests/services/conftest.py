"""What holds in all tests of services."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sottovoce.errors import Rule
from sottovoce_learner.session import Session
from sottovoce_rpc.misconduct import KnownBy


@pytest.fixture(autouse=True)
def _nobody_is_accused(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No correct learner is said to break a rule, whatever dies, breaks, is late, leaves or comes back in a test."""
    if request.node.get_closest_marker("misbehaves"):
        yield
        return
    notice, noticed = Session.notice, []

    def noted(session: Session, neighbour: int, rule: Rule, known_by: KnownBy) -> None:
        noticed.append((session.role.name, neighbour, rule))
        notice(session, neighbour, rule, known_by)

    monkeypatch.setattr(Session, "notice", noted)
    yield
    assert noticed == []
