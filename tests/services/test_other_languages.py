"""Learners are fed from other languages: by the docs' own calls of grpcurl, and by the example in JavaScript."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import yaml

from sottovoce_core.auditing.http2_frames import find_violations
from sottovoce_core.spec import RunSpec, parse_spec
from sottovoce_eavesdropper.capture_reader import open_capture
from sottovoce_eavesdropper.grpc_proxy import StandaloneProxy, StandaloneProxyConfig
from sottovoce_rpc.learner_status import LearnerState
from tests.services.network import PATIENCE_S, Network, network

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/guides/live.md").read_text(encoding="utf-8")
MODULES = os.path.abspath(given) if (given := os.environ.get("TEST_NODE_MODULES")) else ""
"""Folder `node_modules` that has @grpc/grpc-js and @grpc/proto-loader."""
NAMES = ["north", "south", "east"]


def page_spec() -> RunSpec:
    """The page's own, with rounds that need no waiting and no end of the budget."""
    (text,) = re.findall(r"```yaml\n(# wards\.yaml\n.*?)```", PAGE, re.DOTALL)
    document = yaml.safe_load(text)
    document |= {"privacy": {}, "clock": {"mode": "paced", "period_s": 0.02}, "durability": "process"}
    return parse_spec(document, allow_imports=False)


@asynccontextmanager
async def wards(folder: Path) -> AsyncIterator[Network]:
    async with network(folder, NAMES) as up:
        run = await up.start(page_spec(), 4)
        assert run.run_id
        await up.until("south", LearnerState.RUNNING)
        yield up


async def said_by(*command: str, given: bytes = b"") -> str:
    process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, stderr=PIPE)
    async with asyncio.timeout(PATIENCE_S):
        out, errors = await process.communicate(given)
    assert process.returncode == 0, errors.decode()
    return out.decode()


@pytest.mark.skipif(shutil.which("grpcurl") is None, reason="grpcurl is not installed")
async def test_the_pages_calls_of_grpcurl_feed_a_learner(tmp_path: Path) -> None:
    ask, give = re.findall(r"^grpcurl -plaintext -d '(.*?)' 127\.0\.0\.1:7401 (\S+)$", PAGE, re.DOTALL | re.MULTILINE)
    async with wards(tmp_path) as up:
        at = up.addresses["south"]
        told = json.loads(await said_by("grpcurl", "-plaintext", "-d", ask[0], at, ask[1]))
        assert json.loads(told["spec"])["data"]["schema"]["label"]["name"] == "outcome"
        assert told.get("receipt", {}) == {}
        receipts = await said_by("grpcurl", "-plaintext", "-d", give[0], at, give[1])
        assert '"position": "0"' in receipts
        assert (await up.status("south")).records == 1


@pytest.fixture
def example(tmp_path: Path) -> str:
    """The example in JavaScript, where it finds its modules and protocol."""
    if shutil.which("node") is None:
        pytest.skip("Node.js is not installed")
    if not MODULES:
        pytest.skip("TEST_NODE_MODULES names no node_modules with @grpc/grpc-js and @grpc/proto-loader")
    (tmp_path / "node_modules").symlink_to(MODULES)
    shutil.copytree(ROOT / "proto/sottovoce_wire", tmp_path / "proto/sottovoce_wire")
    (tmp_path / "examples").mkdir()
    return str(shutil.copy(ROOT / "examples/feed.mjs", tmp_path / "examples/feed.mjs"))


def records(count: int) -> bytes:
    """Lines for the example."""
    wards = ("icu", "surgery")
    return "\n".join(
        json.dumps({"age": k % 120, "ward": wards[k % 2], "outcome": "home"}) for k in range(count)
    ).encode()


async def test_the_example_in_javascript_feeds_each_record_once_though_it_is_killed(
    example: str, tmp_path: Path
) -> None:
    given = records(3_000)
    async with wards(tmp_path / "up") as up:
        command = ("node", example, up.addresses["south"], "ward-3")
        for part in (500, 1_000, 1_500):
            process = await asyncio.create_subprocess_exec(*command, stdin=PIPE)
            assert process.stdin is not None
            process.stdin.write(given)
            async with asyncio.timeout(PATIENCE_S):
                while up.learners["south"].status.records < part:
                    assert process.returncode is None, "the example ended early"
                    await asyncio.sleep(0)
            process.send_signal(signal.SIGKILL)
            await process.wait()
        assert await said_by(*command, given=given) == "the learner has stored 3000 records\n"
        assert up.learners["south"].status.records == 3_000


async def test_the_example_in_javascript_feeds_through_a_relay(example: str, tmp_path: Path) -> None:
    """It is passed on whole, and its library sends no frame that ours does not send."""
    async with wards(tmp_path / "up") as up:
        relay = StandaloneProxy(StandaloneProxyConfig(up.addresses["south"], folder=tmp_path))
        address = await relay.start()
        assert (
            await said_by("node", example, address, "ward-3", given=records(500))
            == "the learner has stored 500 records\n"
        )
        await relay.stop()
    rows = [row for batch in open_capture(relay.folder).read_batches() for row in batch.to_pylist()]
    frames = [row["payload"] for row in rows if row["kind"] == "http2"]
    assert {row["kind"] for row in rows} == {"metadata", "message", "trailers", "http2"}
    assert not [text for each in frames for text in find_violations(each)]
