"""The commands that feed from brokers, into a real learner: each record once, by the learner's log."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests.brokers import open_url
from tests.client import test_feeding_mqtt as mqtt
from tests.client import test_feeding_nats as nats
from tests.client.test_feeding import command, ended, kept_positions, learned_some
from tests.client.test_live_learner import RECORD, SCHEMA, ann_in, learned, spec_of

pytestmark = pytest.mark.external

FIRST, ALL = 40, 80
CLOCK = {"mode": "paced", "period_s": 0.1, "deadline_s": 100.0}  # few rounds, so that the log holds all of them


async def into_ann(folder: Path, publish: Any, url: str) -> list[int]:
    """Positions in the learner's log, of records that were fed by two commands, the first of which was killed."""
    records = [json.dumps({**RECORD, "age": k % 100}).encode() for k in range(ALL)]
    spec = spec_of({"schema": SCHEMA, "batch_size": 1_000}, clock=CLOCK)
    arguments = (url, "--source", "ward", "--log-level", "error")
    async with ann_in(folder, spec) as (up, learner):
        await publish(*records[:FIRST])
        process = command(up, *arguments)
        await learned_some(learner, FIRST)
        process.kill()
        await ended(process)
        await publish(*records[FIRST:])
        process = command(up, *arguments)
        await learned(learner, ALL)
        process.terminate()
        code, _, error = await ended(process)
        assert (code, error) == (0, "")
        assert (await learner.fetch_status()).records == ALL
        return kept_positions(folder / "journals", "ann", "ward/wards" if url.startswith("nats") else "ward/feeder")


async def test_nats_is_fed_by_a_command_that_is_killed(tmp_path: Path) -> None:
    async with nats.server(tmp_path) as at, nats.jetstream(at) as js:
        await js.add_stream(name="wards", subjects=["wards.>"])

        async def publish(*bodies: bytes) -> None:
            for each in bodies:
                await js.publish("wards.north", each)

        assert await into_ann(tmp_path, publish, f"nats://127.0.0.1:{at.port}/wards") == list(range(1, ALL + 1))


async def test_mqtt_is_fed_by_a_command_that_is_killed(tmp_path: Path) -> None:
    async with mqtt.server(tmp_path) as at, mqtt.publishing(at) as publish:
        url = f"mqtt://127.0.0.1:{at.port}/wards/#?client=feeder&state={tmp_path / 'state'}"
        async with open_url(url):
            pass  # the session begins
        assert await into_ann(tmp_path, publish, url) == list(range(ALL))


@pytest.mark.each
@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("nats://ann:secret@host/wards",), "SOURCE must hold no user or password"),
        (("nats://ann:sec/ret@host/wards",), "SOURCE must hold no user or password"),
        (("nats://host/wards?password=secret",), "must hold no user or password"),
        (("redis://host:x/wards",), "must be like redis://HOST:6379"),
        (("kafka://host/wards", "--password-file", "nowhere"), "no password in nowhere"),
        (("mqtt://host/w/#?client=a", "--tls-cert", "a.pem"), "a certificate and its key go together"),
        (("nats://127.0.0.1:1/wards", "--broker-timeout", "0.1"), "was unreachable for 0.1 s"),
    ],
)
async def test_what_cannot_be_is_refused_in_one_line(arguments: tuple[str, ...], text: str) -> None:
    class Nowhere:
        addresses = {"ann": "127.0.0.1:1"}  # noqa: RUF012 - it is one of none

    code, _, error = await asyncio.wait_for(ended(command(Nowhere(), *arguments)), 300)  # type: ignore[arg-type]
    assert code == 2 and text in " ".join(error.split()) and "secret" not in error
