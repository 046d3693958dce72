"""What lies in deploy/observability: it fits what services tell, Prometheus takes it, and an alert fires when it should."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import socket
import subprocess
import urllib.parse
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from sottovoce_client.watching.display import Gauges
from sottovoce_coordinator.metrics import CATALOGUE as COORDINATOR
from sottovoce_eavesdropper.service import CATALOGUE as EAVESDROPPER
from sottovoce_learner.host import collect_metrics
from sottovoce_learner.metrics import CATALOGUE as LEARNER
from sottovoce_rpc.access import Refusals
from sottovoce_rpc.metrics import COMMON_METRICS, Exposition, MetricsEndpoint, serve_metrics
from tests.examples import made_up, small_spec
from tests.services.identities import DOMAIN, Identities
from tests.services.network import PATIENCE_S, Network, network

pytest.importorskip("prometheus_client")

CHECKOUT = Path(__file__).parents[2]
FOLDER = CHECKOUT / "deploy" / "observability"
PROMTOOL, PROMETHEUS = shutil.which("promtool"), shutil.which("prometheus")
needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed (Debian: prometheus)")

OWN = {
    each.name: set(each.labels)
    for kind in (COMMON_METRICS, LEARNER, COORDINATOR, EAVESDROPPER)
    for each in kind.metrics
}
THEIRS = {"up": set[str](), "ALERTS": {"alertname", "alertstate"}}
"""Prometheus' own."""
PROMETHEUS_LABELS = {"job", "instance"}
WORDS = {"and", "or", "unless", "bool", "offset", "sum", "min", "max", "avg", "count"}
"""Of PromQL, where no bracket follows."""


def documents(name: str) -> Any:
    return yaml.safe_load((FOLDER / name).read_text(encoding="utf-8"))


def rules() -> list[dict[str, Any]]:
    return [rule for group in documents("alerts.yaml")["groups"] for rule in group["rules"]]


def panels() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((FOLDER / "sottovoce.json").read_text(encoding="utf-8"))["panels"]
    return found


def questions() -> Iterator[str]:
    """All that dashboard and alerts ask."""
    yield from (rule["expr"] for rule in rules())
    yield from (target["expr"] for panel in panels() for target in panel.get("targets", ()))
    board = json.loads((FOLDER / "sottovoce.json").read_text(encoding="utf-8"))
    for each in board["templating"]["list"]:
        if each["type"] == "query":
            found = re.fullmatch(r"label_values\((.*), (\w+)\)", each["definition"])
            assert found is not None
            yield f'{found[1]}{{{found[2]}="x"}}'


def names_in(question: str) -> dict[str, set[str]]:
    """The metrics that PromQL names, and the labels by which each is chosen."""
    plain = re.sub(r"\[[^\]]*\]", "", re.sub(r'"[^"]*"', '""', question))
    outside = re.sub(r"\b(by|on|without|ignoring)\s*\([^)]*\)", "", re.sub(r"\{[^}]*\}", "", plain))
    tokens = re.findall(r"(?<![\w.])([a-zA-Z_:][\w:]*)(?!\w*\s*\()", outside)
    found = {token: set[str]() for token in tokens if token not in WORDS}
    for name, chosen in re.findall(r"([a-zA-Z_:][\w:]*)\{([^}]*)\}", plain):
        found.setdefault(name, set()).update(re.findall(r"(\w+)\s*[=!]", chosen))
    return found


@pytest.fixture(scope="module")
def exported() -> dict[str, set[str]]:
    """All metrics that there are, and their labels: services', the watch's and the process collector's."""
    gauges = Gauges("127.0.0.1:0")
    with gauges, urllib.request.urlopen(f"http://{gauges.address}/metrics") as answer:
        watched = re.findall(r"# TYPE (sottovoce_watch_\w+)", answer.read().decode())
    text = Exposition([], include_process=True).render_text([])[1].decode()
    process = re.findall(r"# TYPE (process_\w+)", text)
    assert watched and process
    return OWN | THEIRS | {name: {"learner", "run"} for name in watched} | {name: set[str]() for name in process}


# ---- nothing ages ----------------------------------------------------------------------------------------------------


def test_what_promql_names_is_found() -> None:
    assert names_in('sum by (job) (rate(a_total{x="y{"}[5m])) > 2 and on (job) b or vector(0)') == {
        "a_total": {"x"},
        "b": set(),
    }


@pytest.mark.parametrize("question", sorted(set(questions())))
def test_dashboard_and_alerts_ask_for_what_services_tell(question: str, exported: dict[str, set[str]]) -> None:
    found = names_in(question)
    assert found and found.keys() <= exported.keys()
    for name, labels in found.items():
        assert labels <= exported[name] | PROMETHEUS_LABELS, name


def test_what_a_legend_or_a_summary_says_is_a_label_of_what_it_is_about(exported: dict[str, set[str]]) -> None:
    asked = [(rule["expr"], rule["annotations"]["summary"], r"\$labels\.(\w+)") for rule in rules()]
    targets = [target for panel in panels() for target in panel.get("targets", ())]
    asked += [(target["expr"], target["legendFormat"], r"\{\{(\w+)\}\}") for target in targets]
    for question, text, pattern in asked:
        labels = set().union(*(exported[name] for name in names_in(question))) | PROMETHEUS_LABELS
        assert set(re.findall(pattern, text)) <= labels, question


def test_every_alert_is_tried_and_told_of() -> None:
    tried = {case["alertname"] for test in documents("alerts.test.yaml")["tests"] for case in test["alert_rule_test"]}
    names = {rule["alert"] for rule in rules()}
    page = (CHECKOUT / "docs" / "operate" / "observability.md").read_text(encoding="utf-8")
    assert tried == names == set(re.findall(r"^\| `([A-Z]\w+)` \|", page, re.MULTILINE))


def test_the_page_has_all_metrics() -> None:
    page = (CHECKOUT / "docs" / "reference" / "service-metrics.md").read_text(encoding="utf-8")
    for kind in (COMMON_METRICS, LEARNER, COORDINATOR, EAVESDROPPER):
        for each in kind.metrics:
            assert f"| `{each.name}` | {', '.join(each.labels)} | {each.description} |" in page
    assert len(re.findall(r"^\| `sottovoce_", page, re.MULTILINE)) == len(OWN)


def test_panels_do_not_overlap() -> None:
    taken = set[tuple[int, int]]()
    for panel in panels():
        at = panel["gridPos"]
        own = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not own & taken and at["x"] + at["w"] <= 24, panel["title"]
        taken |= own
    assert len({panel["id"] for panel in panels()}) == len(panels())


# ---- Prometheus takes it ---------------------------------------------------------------------------------------------


def promtool(*arguments: str, folder: Path = FOLDER) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(PROMTOOL), *arguments], cwd=folder, capture_output=True, text=True)


@needs_promtool
@pytest.mark.parametrize("arguments", [("check", "rules", "alerts.yaml"), ("test", "rules", "alerts.test.yaml")])
def test_promtool_takes_the_rules(arguments: tuple[str, ...]) -> None:
    done = promtool(*arguments)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_an_alert_that_does_not_fire_is_seen(tmp_path: Path) -> None:
    """The cases say something of the rules: another threshold, and they fail."""
    shutil.copy(FOLDER / "alerts.test.yaml", tmp_path)
    text = (FOLDER / "alerts.yaml").read_text(encoding="utf-8")
    assert text.count("< 0.1 *") == 1
    (tmp_path / "alerts.yaml").write_text(text.replace("< 0.1 *", "< 0.01 *"), encoding="utf-8")
    done = promtool("test", "rules", "alerts.test.yaml", folder=tmp_path)
    assert done.returncode == 1 and "BudgetNearlySpent" in done.stdout + done.stderr


def laid_out(folder: Path, ids: Identities, targets: dict[str, str] | None = None) -> Path:
    """A copy of what is deployed, with an identity; where there are targets, they take the place of the composition's."""
    shutil.copytree(FOLDER, folder)
    shutil.copytree(ids.at("monitor/prometheus"), folder / "identity")
    config = documents("prometheus.yaml")
    for job in config["scrape_configs"]:  # paths are taken from where the file lies
        tls = job["tls_config"]
        job["tls_config"] = {
            name: value.replace("/etc/sottovoce/", "").replace("demo.example", DOMAIN) for name, value in tls.items()
        }
    if targets is not None:
        for job in config["scrape_configs"]:
            for how in ("dns_sd_configs", "relabel_configs"):
                job.pop(how, None)
            job["static_configs"] = [{"targets": [targets[job["job_name"]]]}]
        config["global"] = {"scrape_interval": "500ms", "evaluation_interval": "500ms", "scrape_timeout": "500ms"}
        alerts = (folder / "alerts.yaml").read_text(encoding="utf-8")
        (folder / "alerts.yaml").write_text(re.sub(r"for: \d+m", "for: 0s", alerts), encoding="utf-8")
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    return folder


@needs_promtool
def test_promtool_takes_the_scrape_config(tmp_path: Path) -> None:
    folder = laid_out(tmp_path / "made", Identities(tmp_path / "ids"))
    done = promtool("check", "config", "prometheus.yaml", folder=folder)
    assert done.returncode == 0, done.stdout + done.stderr


# ---- a real Prometheus, real services --------------------------------------------------------------------------------


@asynccontextmanager
async def prometheus(folder: Path) -> AsyncIterator[str]:
    """A Prometheus on a folder that is laid out; gives its address."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with (folder / "log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            str(PROMETHEUS),
            "--config.file=prometheus.yaml",
            f"--web.listen-address={address}",
            f"--storage.tsdb.path={folder / 'data'}",
            cwd=folder,
            stdout=log,
            stderr=log,
        )
    try:
        yield address
    finally:
        process.terminate()
        await process.wait()


async def answered(address: str, path: str, holds: Callable[[Any], object], **query: str) -> Any:
    """What Prometheus answers, once that is something."""
    url = f"http://{address}/api/v1/{path}?{urllib.parse.urlencode(query)}"

    def ask() -> Any:
        try:
            with urllib.request.urlopen(url, timeout=PATIENCE_S) as answer:
                return json.load(answer)["data"]
        except OSError:  # it has just been started
            return None

    async with asyncio.timeout(PATIENCE_S):
        while True:
            data = await asyncio.to_thread(ask)
            if data is not None and holds(data):
                return data
            await asyncio.sleep(0.1)


def away(alerts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those that say that a learner is away."""
    return [each for each in alerts if each["labels"]["alertname"] == "LearnerAway" and each["state"] == "firing"]


@asynccontextmanager
async def told(up: Network) -> AsyncIterator[dict[str, str]]:
    """Where the services of a network tell metrics, over TLS."""
    coordinator, eavesdropper, refused = up.coordinating, up.eavesdropping, Refusals()
    assert coordinator is not None and eavesdropper is not None

    def at(credentials: Any) -> MetricsEndpoint:
        return MetricsEndpoint("127.0.0.1:0", credentials, include_process=False)

    own = up.learners["ann"].config.credentials
    async with (
        serve_metrics(at(own), LEARNER, lambda: collect_metrics([*up.learners.values()], refused), refused) as learners,
        serve_metrics(
            at(coordinator.config.credentials), COORDINATOR, lambda: coordinator.collect_metrics(refused), refused
        ) as main,
        serve_metrics(
            at(eavesdropper.config.credentials), EAVESDROPPER, lambda: eavesdropper.collect_metrics(refused), refused
        ) as ear,
    ):
        yield {"learner": learners, "coordinator": main, "eavesdropper": ear}


@pytest.mark.external
@pytest.mark.slow
@pytest.mark.skipif(PROMETHEUS is None, reason="prometheus is not installed (Debian: prometheus)")
async def test_prometheus_scrapes_services_and_an_alert_fires(tmp_path: Path) -> None:
    """Over TLS, as deployed, but for the addresses, and for how long something must last before it is told."""
    ids, names = Identities(tmp_path / "ids"), ["ann", "ben", "cleo"]
    spec = small_spec(20, names)
    async with network(tmp_path, names, identities=ids, durable=True) as up, told(up) as targets:
        folder = laid_out(tmp_path / "made", ids, targets)
        async with prometheus(folder) as at:
            up_now = await answered(
                at, "targets", lambda data: [each["health"] for each in data["activeTargets"]] == ["up"] * 3
            )
            assert {each["labels"]["job"] for each in up_now["activeTargets"]} == set(targets)
            assert (await up.run(spec, made_up(spec))).state == "finished"
            rounds = await answered(
                at,
                "query",
                lambda data: [each["value"][1] for each in data["result"]] == ["20"] * 3,
                query="sottovoce_learner_rounds_total",
            )
            assert {each["metric"]["learner"] for each in rounds["result"]} == set(names)
            every = await answered(at, "label/__name__/values", bool)
            assert {each for each in every if each.startswith("sottovoce_")} <= set(OWN)
            ends = await answered(
                at,
                "query",
                lambda data: len(data["result"]) == 5,
                query="sottovoce_certificate_expiry_timestamp_seconds",
            )
            assert {each["metric"]["identity"] for each in ends["result"]} >= {"learner/ann", "coordinator/main"}
            await answered(at, "alerts", lambda data: not data["alerts"])

            await up.start(small_spec(10_000, names), 3)
            await answered(
                at,
                "query",
                lambda data: data["result"],
                query='sottovoce_coordinator_learner_disconnected{learner="ben"}',
            )
            await up.leave("ben")
            found = await answered(at, "alerts", lambda data: away(data["alerts"]))
    (alert,) = away(found["alerts"])
    assert alert["annotations"]["summary"] == "learner ben is away from its run"
