"""What holds in all tests of services."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sottovoce_coordinator import capture_client
from sottovoce_core.errors import ViolationKind
from sottovoce_learner import coordinator_client, mirror, progress
from sottovoce_learner.peers import connection
from sottovoce_learner.peers.inbox import MessageReceiver
from sottovoce_rpc import server
from sottovoce_rpc.learner_status import Attribution

BACKOFF = "grpc.initial_reconnect_backoff_ms", "grpc.max_reconnect_backoff_ms"
SOON_S = 0.05


@pytest.fixture(autouse=True)
def _nobody_is_accused(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No correct learner is said to break a rule, whatever dies, breaks, is late, leaves or comes back in a test."""
    if request.node.get_closest_marker("misbehaves"):
        yield
        return
    notice, noticed = MessageReceiver.record_violation, []

    def noted(
        hearing: MessageReceiver, neighbour: int, rule: ViolationKind, known_by: Attribution, *, has_ended: bool
    ) -> bool:
        noticed.append((hearing._role.name, neighbour, rule))
        return notice(hearing, neighbour, rule, known_by, has_ended=has_ended)

    monkeypatch.setattr(MessageReceiver, "record_violation", noted)
    yield
    assert noticed == []


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the pauses before services reconnect, rejoin or report a missing neighbour: in a test, all are back in a moment."""
    monkeypatch.setattr(coordinator_client, "_MIN_REJOIN_PAUSE_S", SOON_S)
    monkeypatch.setattr(coordinator_client, "_MAX_REJOIN_PAUSE_S", 4 * SOON_S)
    monkeypatch.setattr(connection, "_BACKOFF_S", (SOON_S,))
    monkeypatch.setattr(progress, "REPORTABLE_WAIT_S", 4 * SOON_S)
    monkeypatch.setattr(mirror, "_BACKOFF_S", (SOON_S, 4 * SOON_S))
    monkeypatch.setattr(capture_client, "_CHECK_INTERVAL_S", 4 * SOON_S)
    options = {**dict(server.CHANNEL_OPTIONS), **dict.fromkeys(BACKOFF, int(SOON_S * 1000))}
    monkeypatch.setattr(server, "CHANNEL_OPTIONS", tuple(options.items()))
