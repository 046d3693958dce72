"""Records by HTTP into a real learner: answered when they are in keeping, or told why they are not."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from sottovoce_client.feeding import http_endpoint as http
from sottovoce_client.feeding.broker import HTTP, BrokerCredentials
from sottovoce_client.feeding.feeder import FeedOptions, FeedTarget
from sottovoce_client.feeding.progress import FeedCounters
from sottovoce_core.errors import FailedPrecondition, SpecError, Unavailable
from tests.client.test_live_learner import NAMES, RECORD, SCHEMA, ann_in, learned, spec_of
from tests.services.identities import Identities
from tests.services.network import Network, network

SECRET = 31_337
WRONG = {**RECORD, "age": SECRET}


@asynccontextmanager
async def endpoint(
    up: Network,
    terms: FeedOptions | None = None,
    patience_s: float = 20.0,
    url: str = "http://127.0.0.1:0",
    access: BrokerCredentials | None = None,
    **more: Any,
) -> AsyncIterator[tuple[httpx.AsyncClient, FeedCounters]]:
    """An endpoint, and a client of it."""
    account, stop, told = FeedCounters(), asyncio.Event(), asyncio.get_running_loop().create_future()
    target = FeedTarget(up.addresses["ann"], "http", patience_s=patience_s)
    work = http.serve(
        HTTP.parse_url(url, credentials=access or BrokerCredentials()),
        target,
        terms or FeedOptions(),
        told.set_result,
        **more,
    )
    serving = asyncio.ensure_future(work(account, stop))
    await asyncio.wait([serving, told], return_when=asyncio.FIRST_COMPLETED)
    try:
        if told.done():
            address = told.result().removesuffix("/records")
            async with httpx.AsyncClient(base_url=address, timeout=100.0) as client:
                yield client, account
    finally:
        stop.set()
        await serving


async def post(client: httpx.AsyncClient, records: Any, **query: Any) -> tuple[int, Any]:
    answer = await client.post("/records", json=records, params=query)
    assert str(SECRET) not in answer.text
    return answer.status_code, answer.json()


async def test_records_are_answered_when_they_are_in_keeping(tmp_path: Path) -> None:
    async with ann_in(tmp_path, spec_of({"schema": SCHEMA})) as (up, learner):
        async with endpoint(up) as (client, account):
            assert await post(client, RECORD) == (200, {"records": 1, "new": 1, "positions": [0, 0]})
            assert (await learner.fetch_status()).records == 1
            assert await post(client, [RECORD] * 3) == (200, {"records": 3, "new": 3, "positions": [1, 3]})
            for new in (2, 0):
                found = await post(client, [RECORD] * 2, source="ward", positions="7")
                assert found == (200, {"records": 2, "new": new, "positions": [7, 8]})
            found = await post(client, [RECORD] * 3, source="ward", positions="8,9,12")
            assert found == (200, {"records": 3, "new": 2, "positions": [8, 12]})
        async with endpoint(up) as (client, _):  # it goes on where the one before it ended
            assert await post(client, RECORD) == (200, {"records": 1, "new": 1, "positions": [4, 4]})
        await learned(learner, 9)
        assert (account.records_fed, account.duplicate_count, account.sources) == (8, 3, {"http", "ward"})


async def test_what_does_not_fit_is_refused_whole_by_number_and_reason(tmp_path: Path) -> None:
    async with ann_in(tmp_path, spec_of({"schema": SCHEMA})) as (up, learner), endpoint(up) as (client, account):
        code, told = await post(client, [RECORD, WRONG, {**RECORD, "more": SECRET}])
        assert code == 400 and told["error"].startswith("record 1 (counted from 0): age: beyond its bounds, and 1 more")
        assert told["refused"].keys() == {"1", "2"}
        code, told = await post(client, [WRONG] * 500)
        assert code == 400 and len(told["refused"]) == 100
        refused: list[tuple[Any, dict[str, Any]]] = [
            ([RECORD] * 2, {"positions": "1,2,3"}),
            ([RECORD] * 2, {"positions": "2,2"}),
            (RECORD, {"positions": "-1"}),
            (RECORD, {"positions": "9" * 19}),
            (RECORD, {"source": "x" * 200}),
            (RECORD, {"source": "x\x1b[2J"}),
            (RECORD, {"sauce": "x"}),
            ([], {}),
            ([RECORD, SECRET], {}),
            (SECRET, {}),
        ]
        for records, query in refused:
            assert (await post(client, records, **query))[0] == 400, query
        json_type = {"Content-Type": "application/json"}
        for body in (b"{", b"\xff", b"[" * 50_000, b'{"age": 1, "age": 2}'):
            assert (await client.post("/records", content=body, headers=json_type)).status_code == 400
        assert (await client.post("/records", content=b"{}")).status_code == 415
        assert (await client.post("/records", json=RECORD, headers={"Idempotency-Key": "k"})).status_code == 400
        assert (await client.get("/records")).status_code == 405
        assert await post(client, RECORD) == (200, {"records": 1, "new": 1, "positions": [0, 0]})
        assert (await learner.fetch_status()).records == 1
        assert account.refusals.total() == 502 and account.dropped_count == 0


async def test_a_field_says_the_positions(tmp_path: Path) -> None:
    terms = FeedOptions(position="seq")
    async with ann_in(tmp_path, spec_of({"schema": SCHEMA})) as (up, learner), endpoint(up, terms) as (client, _):
        rows = [{**RECORD, "seq": at} for at in (3, 8)]
        assert await post(client, rows) == (200, {"records": 2, "new": 2, "positions": [3, 8]})
        assert await post(client, rows) == (200, {"records": 2, "new": 0, "positions": [3, 8]})
        code, told = await post(client, [*reversed(rows), RECORD])
        assert code == 400 and told["refused"].keys() == {"1", "2"}
        assert (await learner.fetch_status()).records == 2


async def test_a_request_is_bounded(tmp_path: Path) -> None:
    async with (
        ann_in(tmp_path, spec_of({"schema": SCHEMA})) as (up, _),
        endpoint(up, url="http://127.0.0.1:0?max-bytes=500") as (client, _),
    ):
        assert (await post(client, [RECORD] * 100))[0] == 413

        async def parts() -> AsyncIterator[bytes]:
            for _ in range(100):
                yield b" " * 10

        answer = await client.post("/records", content=parts(), headers={"Content-Type": "application/json"})
        assert answer.status_code == 413
        assert (await post(client, RECORD))[0] == 200


@pytest.mark.parametrize(("when_full", "code"), [("reject", 429), ("wait", 503)])
async def test_while_too_many_wait_others_do_or_are_refused(
    tmp_path: Path, when_full: str, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The learner is held up, as by a full disk; then it goes on."""
    monkeypatch.setattr(http, "MAX_WAITING_MESSAGES", 3)
    url = f"http://127.0.0.1:0?when-full={when_full}"
    async with (
        ann_in(tmp_path, spec_of({"schema": SCHEMA})) as (up, learner),
        endpoint(up, url=url, patience_s=0.5) as (client, account),
    ):
        assert (await post(client, RECORD))[0] == 200
        session = up.learners["ann"]._session
        assert session is not None
        go_on = asyncio.Event()
        settled = session.ingestor.receipts.wait_durable

        async def held() -> None:
            await go_on.wait()
            await settled()

        session.ingestor.receipts.wait_durable = held  # type: ignore[method-assign]
        taken = asyncio.ensure_future(post(client, [RECORD] * 3))
        while account.messages_waiting < 3:  # noqa: ASYNC110 - a number is no event
            await asyncio.sleep(0.01)
        answer = await client.post("/records", json=RECORD)
        assert (answer.status_code, answer.headers["retry-after"]) == (code, "1")
        go_on.set()
        assert await taken == (200, {"records": 3, "new": 3, "positions": [1, 3]})
        assert await post(client, RECORD) == (200, {"records": 1, "new": 1, "positions": [4, 4]})
        assert (await learner.fetch_status()).records == 5


async def test_many_clients_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "MAX_WAITING_MESSAGES", 50)
    spec = spec_of({"schema": SCHEMA, "batch_size": 1_000})
    async with ann_in(tmp_path, spec) as (up, learner), endpoint(up) as (client, _):
        found = await asyncio.gather(*(post(client, [RECORD] * 7, source=f"s{n % 3}") for n in range(60)))
        assert {code for code, _ in found} == {200}
        for source in range(3):
            spans = sorted(tuple(told["positions"]) for _, told in found[source::3])
            assert spans == [(first, first + 6) for first in range(0, 140, 7)]
        await learned(learner, 420)


async def test_sources_come_and_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "MAX_SOURCES", 2)
    async with ann_in(tmp_path, spec_of({"schema": SCHEMA})) as (up, _), endpoint(up) as (client, account):
        for turn in range(2):
            for source in ("a", "b", "c"):
                assert (await post(client, RECORD, source=source))[1]["positions"] == [turn, turn]
        assert account.sources == {"a", "b", "c", "http"}


async def test_a_learner_that_is_away_is_said_and_comes_back(tmp_path: Path) -> None:
    spec = spec_of({"schema": SCHEMA}, rounds=60)
    async with network(tmp_path, NAMES) as up:
        await up.start(spec, 4)
        async with endpoint(up, patience_s=1.0) as (client, _):
            assert (await post(client, RECORD))[0] == 200
            while (answer := await client.post("/records", json=RECORD)).status_code == 200:  # noqa: ASYNC110 - asked anew
                await asyncio.sleep(0.05)
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
            assert "may have stored these records" in answer.json()["error"]
            await up.start(spec_of({"schema": SCHEMA}), 4)
            while (answer := await client.post("/records", json=RECORD)).status_code == 503:  # noqa: ASYNC110 - asked anew
                await asyncio.sleep(0.05)
            assert answer.json() == {"records": 1, "new": 1, "positions": [0, 0]}  # positions count within a run


# ---- who may ---------------------------------------------------------------------------------------------------------


def served(url: str, **more: Any) -> Any:
    own = {name: more.pop(name) for name in ("certificate", "key") if name in more}
    return http.serve(
        HTTP.parse_url(url, credentials=BrokerCredentials(**own)),
        FeedTarget("127.0.0.1:1"),
        FeedOptions(),
        print,
        **more,
    )


@pytest.mark.parametrize(
    ("scheme", "more", "text"),
    [
        ("http", {}, "needs --token-file, --tls-cert and --tls-key; or --insecure"),
        ("http", {"token_file": "token"}, "needs --token-file"),
        ("https", {"certificate": "c", "key": "k"}, "needs --token-file"),
        ("http", {"certificate": "c", "key": "k"}, "https:// needs --tls-cert and --tls-key, and http:// has neither"),
        ("https", {"certificate": "c"}, "give both --tls-cert and --tls-key"),
        ("https", {}, "https:// needs --tls-cert and --tls-key"),
    ],
)
def test_other_machines_are_not_listened_to_by_accident(
    tmp_path: Path, scheme: str, more: dict[str, str], text: str
) -> None:
    (tmp_path / "token").write_text("0123456789abcdef")
    paths: dict[str, Any] = {name: tmp_path / path for name, path in more.items()}
    for listen in ("0.0.0.0:1", "[::]:1", "ward.example:1"):
        with pytest.raises(SpecError, match=text):
            served(f"{scheme}://{listen}", **paths)
    served("http://0.0.0.0:1", insecure=True)


def test_a_token_is_long_enough_to_be_one(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("short\n")
    with pytest.raises(SpecError, match="must have at least 16 characters"):
        served("http://127.0.0.1", token_file=tmp_path / "token")
    with pytest.raises(FailedPrecondition, match="no token in"):
        served("http://127.0.0.1", token_file=tmp_path / "none")


async def test_a_token_and_tls_let_in_whom_they_should(tmp_path: Path) -> None:
    ids, token = Identities(tmp_path / "ids", "localhost"), "0123456789abcdef"
    (tmp_path / "token").write_text(f"{token}\n")
    own = ids.at("learner/ann")
    more: dict[str, Any] = {"token_file": tmp_path / "token", "url": "https://127.0.0.1:0"}
    trust = ssl.create_default_context(cafile=str(own / "ca.crt"))
    trust.check_hostname = False
    async with (
        ann_in(tmp_path, spec_of({"schema": SCHEMA})) as (up, learner),
        endpoint(up, access=BrokerCredentials(certificate=own / "tls.crt", key=own / "tls.key"), **more) as (plain, _),
        httpx.AsyncClient(base_url=plain.base_url, verify=trust, timeout=100.0) as client,
    ):
        assert str(client.base_url).startswith("https://")
        for header in ({}, {"Authorization": "Bearer 0123456789abcdeg"}, {"Authorization": f"Basic {token}"}):
            answer = await client.post("/records", json=RECORD, headers=header)
            assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
        answer = await client.post("/records", json=RECORD, headers={"Authorization": f"Bearer {token}"})
        assert answer.status_code == 200
        assert (await learner.fetch_status()).records == 1
        (tmp_path / "no.key").write_text("")
        with pytest.raises(SpecError, match="the files for TLS cannot be used"):
            async with endpoint(
                up, access=BrokerCredentials(certificate=own / "tls.crt", key=tmp_path / "no.key"), **more
            ):
                pass


async def test_an_endpoint_ends_when_it_is_told_to(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="cannot reach"):
        await http.serve(
            HTTP.parse_url("http://127.0.0.1"), FeedTarget("127.0.0.1:1", "a", patience_s=0.2), FeedOptions(), print
        )(FeedCounters(), asyncio.Event())
    async with ann_in(tmp_path, spec_of({"schema": SCHEMA})) as (up, _), endpoint(up) as (client, _):
        assert (await client.post("/records", json=RECORD)).status_code == 200
        with pytest.raises(SpecError, match="cannot listen on"):
            async with endpoint(up, url=str(client.base_url)):
                pass
