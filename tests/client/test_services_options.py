"""What the command line says of logs, metrics and traces comes to the services."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from sottovoce_client.cli import app
from sottovoce_client.runs.local_services import LocalServices
from sottovoce_rpc.metrics import MetricsEndpoint
from tests.examples import small_spec

COMMANDS = {
    "coordinator": ["coordinator"],
    "learner": ["learner", "--name", "ann", "--name", "ben", "--coordinator", "127.0.0.1:1"],
    "eavesdropper": ["eavesdropper"],
}


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What services and logs are told; nothing is started."""
    found = dict[str, Any]()

    async def serve(config: Any, **more: Any) -> None:
        found.update(more, config=config)

    for service in COMMANDS:
        monkeypatch.setattr(f"sottovoce_{service}.{'host' if service == 'learner' else 'service'}.serve", serve)
    monkeypatch.setattr("sottovoce_rpc.logs.configure_logs", lambda *logs: found.update(logs=logs))
    monkeypatch.setattr("sottovoce_rpc.logs.set_private_umask", lambda: None)
    return found


def run(*arguments: str, **environment: str) -> None:
    done = CliRunner().invoke(app, arguments, env=environment)
    assert done.exit_code == 0, done.output


@pytest.mark.parametrize("service", COMMANDS)
def test_without_options_nothing_is_told_to_anybody(told: dict[str, Any], service: str) -> None:
    run(*COMMANDS[service])
    assert told["metrics"] is None and told.get("trace_interval_rounds") is None
    assert told["logs"] == ("info", "auto")


@pytest.mark.parametrize("service", COMMANDS)
def test_the_options_are_passed_on(told: dict[str, Any], service: str, tmp_path: Path) -> None:
    run(*COMMANDS[service], "--metrics", "127.0.0.1:9400", "--identity", str(tmp_path), "--log-format", "json")
    config = told["config"][0] if service == "learner" else told["config"]
    assert told["metrics"] == MetricsEndpoint(
        "127.0.0.1:9400", config.credentials, include_process=service != "learner"
    )
    assert told["logs"] == ("info", "json")


@pytest.mark.slow
async def test_services_of_one_command_do_not_share_a_port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`sottovoce up` starts many: what the environment says of metrics is not for each of them."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setenv("SOTTOVOCE_METRICS", f"127.0.0.1:{taken.getsockname()[1]}")
        async with LocalServices(small_spec(3, ["ann", "ben"]), tmp_path) as up:
            assert up.coordinator and set(up.learner_addresses) == {"ann", "ben"}


@pytest.mark.parametrize("service", COMMANDS)
def test_so_is_the_environment(told: dict[str, Any], service: str) -> None:
    run(*COMMANDS[service], SOTTOVOCE_METRICS="[::1]:9400", SOTTOVOCE_LOG_FORMAT="people")
    assert told["metrics"].parse_listen_address() == ("::1", 9400)
    assert told["logs"] == ("info", "people")


def test_a_learner_tells_what_its_owner_turns_on(told: dict[str, Any]) -> None:
    run(*COMMANDS["learner"], "--metrics", "127.0.0.1:0", "--metrics-process", "--trace", "--trace-every", "50")
    assert told["metrics"].include_process and told["trace_interval_rounds"] == 50
    run(*COMMANDS["learner"], "--trace-every", "50")
    assert told["trace_interval_rounds"] is None
