"""What can be said of deploy's files without an engine: linters, and that they say the same things as each other."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from sottovoce_core.runs.policy import Policy
from sottovoce_core.spec import load_spec
from tests.deploy.engine import engine, require_engine
from tests.deploy.faults import REFUSED
from tests.deploy.images import CHECKOUT, SETTINGS, STANDINS, TARGETS, VERSION
from tests.deploy.stack import COMPOSE, LEARNERS

DEPLOY = CHECKOUT / "deploy"
YAML = "{extends: default, rules: {line-length: {max: 160}, document-start: disable, comments: {min-spaces-from-content: 1}}}"
DEMO: dict[str, Any] = yaml.safe_load(COMPOSE.read_text(encoding="utf-8"))
SERVICES: dict[str, dict[str, Any]] = DEMO["services"]


def program(name: str) -> str:
    return shutil.which(name) or pytest.skip(f"{name} is not installed")


def said(*words: str) -> str:
    done = subprocess.run(
        words, capture_output=True, text=True, check=False, cwd=CHECKOUT, env={**os.environ, "NO_COLOR": "1"}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_dockerfile_passes_its_linter() -> None:
    said(program("hadolint"), str(DEPLOY / "Dockerfile"))


def test_files_of_the_demo_pass_their_linter() -> None:
    said(program("yamllint"), "--strict", "-d", YAML, str(COMPOSE), str(DEPLOY / "demo"))


@pytest.mark.parametrize(
    ("profile", "more"),
    [
        ("live", {"nats", "publish", "run", *(f"feeder-{name}" for name in LEARNERS)}),
        ("record", {"eavesdropper", "record"}),
        ("audit", {"audit"}),
    ],
)
def test_compose_reads_it_and_each_profile_starts_what_it_should(profile: str, more: set[str]) -> None:
    command = [program("docker-compose"), "-f", str(COMPOSE)]
    found = said(*command, "--profile", profile, "config", "--services").split()
    assert set(found) == {"pki", "coordinator", *LEARNERS, "prometheus", "grafana", *more}


def test_without_a_profile_it_is_the_live_demo() -> None:
    command = [program("docker-compose"), "-f", str(COMPOSE), "config", "--services"]
    assert set(said(*command).split()) == set(said(*command[:-2], "--profile", "live", *command[-2:]).split())


@pytest.mark.parametrize("name", SERVICES)
def test_every_container_is_confined(name: str) -> None:
    """Also those of others."""
    own = SERVICES[name]
    assert own["read_only"] is True and own["cap_drop"] == ["ALL"] and own["mem_limit"]
    assert own["security_opt"] == ["no-new-privileges:true"]
    assert own.get("cap_add", []) == (["CHOWN"] if name == "pki" else [])
    assert own.get("user", "") != "0:0" or name == "pki"
    assert "privileged" not in own and own.get("network_mode", "none") == "none"


def test_only_who_issues_sees_the_key_of_the_authority_and_nobody_anothers_identity() -> None:
    for name, own in SERVICES.items():
        volumes = [each.split(":")[0] for each in own.get("volumes", []) if not each.startswith(".")]
        if name == "pki":
            assert "authority" in volumes and own["network_mode"] == "none"
            continue
        identities = [each for each in volumes if each.startswith("identity-")]
        expected = "identity-operator" if name in ("run", "record") else f"identity-{name}"
        assert "authority" not in volumes and identities in ([], [expected]), name


def test_all_networks_but_one_lead_nowhere() -> None:
    assert [name for name, own in DEMO["networks"].items() if not (own or {}).get("internal")] == ["outside"]
    assert [name for name, own in SERVICES.items() if "outside" in own.get("networks", [])] == ["grafana"]
    assert [name for name, own in SERVICES.items() if "ports" in own] == ["grafana"]


def test_versions_are_those_of_the_project() -> None:
    assert SETTINGS["SOTTOVOCE_VERSION"] == VERSION
    dockerfile = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
    assert f"ARG BASE={SETTINGS['SOTTOVOCE_PYTHON']}\n" in dockerfile
    assert set(TARGETS) <= set(re.findall(r"^FROM \S+ AS (\S+)$", dockerfile, re.MULTILINE))
    named = {own["image"] for own in SERVICES.values()}
    assert set(STANDINS.values()) <= named
    assert all(re.search(r":v?[\d.]+(-|$)|:\$\{SOTTOVOCE_VERSION\}$", image) for image in named), named


@pytest.mark.parametrize("name", ["live", "recorded"])
def test_the_demos_specs_are_allowed_by_its_policy(name: str) -> None:
    spec, policy = load_spec(DEPLOY / "demo" / f"{name}.yaml"), Policy.load(DEPLOY / "demo" / "policy.yaml")
    assert tuple(spec.names) == LEARNERS
    assert policy.max_rounds is not None and spec.rounds <= policy.max_rounds and not spec.is_unbounded
    assert spec.capture == ("relay" if name == "recorded" else "none") and "relay" in policy.capture_modes


def test_whatever_is_refused_has_a_row_in_the_documentation() -> None:
    page = (CHECKOUT / "docs" / "operate" / "deploy.md").read_text(encoding="utf-8")
    for each in REFUSED:
        assert f"| {each.what}" in page, each.what


@pytest.mark.container
def test_an_engine_of_our_own_comes_up_and_leaves_nothing(tmp_path: Path) -> None:
    try:
        require_engine()
    except RuntimeError as error:
        pytest.skip(str(error))
    with engine(tmp_path, alone=True) as here:
        assert here("ps", "--quiet") == ""
        namespace = here.namespace
        assert namespace in said("ip", "netns", "list")
    assert namespace not in said("ip", "netns", "list")
