"""Services as processes of their own, as they are deployed: their metrics, and one trace a round across them."""

from __future__ import annotations

import asyncio
import json
import sys
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from sottovoce_client.runs.run_client import run_on_services
from sottovoce_learner.tracing import Tracing
from tests.examples import ALLOWING_FILE, made_up, small_spec
from tests.services.network import OPERATOR, PATIENCE_S
from tests.services.scrapes import asked, series
from tests.services.test_tracing import collecting, facts, rounds

pytest.importorskip("prometheus_client")

ROUNDS = 10
LATE_S = 3 * PATIENCE_S
"""Three processes start at a time."""


@asynccontextmanager
async def service(*arguments: str, says: int) -> AsyncIterator[dict[str, str]]:
    """A process, and what it announced: addresses by name, or by kind of service."""
    command = [sys.executable, "-m", "sottovoce_client", *arguments, "--stop-with-stdin", "--log-format", "json"]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
    assert process.stdin is not None and process.stdout is not None
    try:
        async with asyncio.timeout(LATE_S):
            told = [json.loads(await process.stdout.readline()) for _ in range(says)]
        yield {each.get("name", each["service"]): each["address"] for each in told}
    finally:
        process.stdin.close()
        async with asyncio.timeout(LATE_S):
            assert await process.wait() == 0


def learners(coordinator: str, state: Path, *names: str) -> list[str]:
    """The command line of learners of one process."""
    named = [each for name in names for each in ("--name", name)]
    trusted = ["--policy", str(ALLOWING_FILE), "--owner", OPERATOR]
    told = ["--metrics", "127.0.0.1:0", "--trace", "--trace-every", "2"]
    return ["learner", *named, "--coordinator", coordinator, "--state", str(state), *trusted, *told]


@pytest.mark.slow
async def test_a_run_of_processes_in_numbers_and_traces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["ann", "ben", "cleo"]
    spec = small_spec(ROUNDS, names)
    metrics = ("--metrics", "127.0.0.1:0")
    async with (
        collecting(monkeypatch) as found,
        service("coordinator", "--listen", "127.0.0.1:0", *metrics, says=2) as main,
    ):
        at = main["coordinator"]
        async with (
            service(*learners(at, tmp_path, "ann", "ben"), says=3) as pair,
            service(*learners(at, tmp_path, "cleo"), says=2) as other,
        ):
            async with asyncio.timeout(LATE_S):
                outcome = await run_on_services(at, spec, made_up(spec), lambda progress, state: None, None)
            assert outcome.state == "finished"
            told = dict[str, float]()
            for each in (main, pair, other):
                told |= series((await asked(each["metrics"])).body)
    assert {name: told[f'sottovoce_learner_rounds_total{{learner="{name}"}}'] for name in names} == dict.fromkeys(
        names, ROUNDS
    )
    assert told['sottovoce_coordinator_runs{state="finished"}'] == 1

    traces = defaultdict[bytes, set[Any]](set)
    for span, _ in rounds(found):
        traces[span.trace_id].add(facts(span)["sottovoce.learner"])
    assert traces == {
        Tracing.compute_trace_id(outcome.run_id, t).to_bytes(16, "big"): set(names) for t in range(0, ROUNDS, 2)
    }
