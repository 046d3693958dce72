"""The Helm chart, by real Helm: it renders what Kubernetes takes, and refuses what is no value."""

from __future__ import annotations

import functools
import itertools
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from sottovoce_client.cli import app
from sottovoce_client.cli.common_options import get_common_options
from sottovoce_rpc.principals import Principal
from tests.deploy_chart.rendering import (
    CHART,
    DOMAIN,
    ISSUED,
    NAMESPACE,
    RELEASE,
    Document,
    Values,
    helm,
    merged,
    rendered,
    selects,
    tool,
)

KUBERNETES = "1.37"
NAMES = ["north", "East 1", "a--b"]
LEARNERS: dict[str, Any] = {
    "learners": {name: {} for name in NAMES},
    "edges": [["north", "East 1"], ["East 1", "a--b"]],
}
ELSEWHERE = {"peers": [{"ipBlock": {"cidr": "198.51.100.7/32"}}]}
NAMED = {
    "domain": DOMAIN,
    "learners": {name: {"identity": f"own-{i}"} for i, name in enumerate(NAMES)},
    "edges": LEARNERS["edges"],
    "coordinator": {"identity": "own-coordinator"},
}
MONITORED = {
    "metrics": {
        "enabled": True,
        "from": [{"namespaceSelector": {}}],
        "serviceMonitor": {"enabled": True, "identity": "prometheus", "labels": {"release": "prometheus"}},
    }
}
OWN = {
    "budget": 2.5,
    "policy": "epsilon: 3.0\n",
    "owners": ["operator/alice"],
    "feeders": ["feeder/lab", "operator/alice"],
    "keepLog": True,
    "address": "north.ward.example:7401",
    "service": {"type": "LoadBalancer", "annotations": {"a": "b"}},
    "env": {"GRPC_VERBOSITY": "info"},
    "volume": {"storageClass": "fast", "accessMode": "ReadWriteOnce"},
    "nodeSelector": {"disk": "local"},
    "tolerations": [{"key": "ward", "operator": "Exists"}],
}
RELEASES: dict[str, Values] = {
    "one release": merged(ISSUED, LEARNERS),
    "secrets": NAMED,
    "secrets and a test": merged(NAMED, {"doctor": {"identity": "own-test"}}),
    "relay": merged(ISSUED, LEARNERS, {"capture": "relay"}),
    "relays in pods of their own": merged(
        ISSUED,
        LEARNERS,
        MONITORED,
        {
            "capture": "relay",
            "eavesdropper": {"workers": 3, "envFrom": [{"secretRef": {"name": "store"}}], "captures": "s3://bucket/c"},
        },
    ),
    "mirror": merged(ISSUED, LEARNERS, {"capture": "mirror", "eavesdropper": {"name": "Ear 2"}}),
    "wiretap into a store": merged(
        ISSUED,
        LEARNERS,
        {
            "capture": "wiretap",
            "eavesdropper": {
                "captures": "s3://bucket/captures",
                "envFrom": [{"secretRef": {"name": "store"}}],
                "egress": [
                    {"to": [{"ipBlock": {"cidr": "203.0.113.0/24"}}], "ports": [{"protocol": "TCP", "port": 443}]}
                ],
            },
        },
    ),
    "metrics": merged(ISSUED, LEARNERS, MONITORED, {"capture": "relay"}),
    "an organisation's own": merged(
        ISSUED,
        {
            "learners": {"north": OWN},
            "edges": LEARNERS["edges"],
            "elsewhere": {"East 1": {**ELSEWHERE, "port": 30401}},
            "capture": "mirror",
            "coordinator": {"elsewhere": {"address": "centre.ward.example:7400", **ELSEWHERE}},
            "eavesdropper": {"elsewhere": {"address": "centre.ward.example:7500", **ELSEWHERE}},
        },
    ),
    "the coordinator alone": merged(
        ISSUED,
        {
            "edges": LEARNERS["edges"],
            "elsewhere": dict.fromkeys(NAMES, ELSEWHERE),
            "coordinator": {"service": {"type": "NodePort", "nodePort": 30400}},
        },
    ),
    "no policies": merged(ISSUED, LEARNERS, {"networkPolicy": {"enabled": False}, "logLevel": "debug"}),
    "a long name": merged(ISSUED, LEARNERS, {"learners": {"n" * 63: {}}, "capture": "relay"}),
}
everywhere = pytest.mark.parametrize("values", RELEASES.values(), ids=list(RELEASES))


@everywhere
def test_helm_has_nothing_to_say_against_it(values: Values) -> None:
    said = helm("lint", "--strict", values=values)

    assert said.returncode == 0, said.stdout + said.stderr


@everywhere
def test_kubernetes_takes_it(values: Values, tmp_path: Path) -> None:
    known = [
        each for each in rendered(values).documents if "k8s.io" in each["apiVersion"] or "." not in each["apiVersion"]
    ]
    file = tmp_path / "release.yaml"
    file.write_text(yaml.safe_dump_all(known), encoding="utf-8")
    command = [tool("kubernetes-validate"), "--strict", "-k", KUBERNETES, str(file)]
    said = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    told = said.stdout + said.stderr

    assert said.returncode == 0, told
    assert told.count("passed for resource") == len(known) > 0, told


@everywhere
def test_of_each_learner_there_is_one_pod_at_most(values: Values) -> None:
    release = rendered(values)
    sets = release.of("StatefulSet")
    for each in sets:
        spec = each["spec"]
        relays = values.get("eavesdropper", {}).get("workers", 0)
        assert spec["replicas"] == (relays if each["metadata"]["name"].endswith("-relays") else 1)
        assert spec["updateStrategy"] == {"type": "RollingUpdate"}  # the old pod ends before the new one is made
        for claim in spec.get("volumeClaimTemplates", []):
            asked = values.get("learners", {}).get("north", {}).get("volume", {}).get("accessMode", "ReadWriteOncePod")
            assert claim["spec"]["accessModes"] == [asked]
            assert set(spec["persistentVolumeClaimRetentionPolicy"].values()) == {"Retain"}
    learners = [
        arguments[arguments.index("--name") + 1]
        for arguments in (each["spec"]["template"]["spec"]["containers"][0]["args"] for each in sets)
        if arguments[0] == "learner"
    ]

    assert sorted(learners) == sorted(values.get("learners", {}))
    assert not [
        each["kind"] for each in release.documents if each["kind"] in ("Deployment", "ReplicaSet", "DaemonSet", "Job")
    ]


@everywhere
def test_every_pod_is_restricted(values: Values) -> None:
    for name, pod in rendered(values).pods():
        spec = pod["spec"]
        assert spec["automountServiceAccountToken"] is False, name
        assert spec["enableServiceLinks"] is False, name
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["runAsUser"] > 0
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not spec.keys() & {"hostNetwork", "hostPID", "hostIPC"}
        assert {kind for volume in spec["volumes"] for kind in volume if kind != "name"} <= {
            "secret",
            "configMap",
            "emptyDir",
        }
        for container in spec["containers"]:
            own = container["securityContext"]
            assert own == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert container["resources"]["limits"]["memory"]


@everywhere
def test_what_a_pod_names_is_there(values: Values) -> None:
    release = rendered(values)
    issued = {each["spec"]["secretName"] for each in release.of("Certificate")}
    own = values.get("learners", {}).values()
    named = {
        each["identity"]
        for each in [*own, values.get("coordinator", {}), values.get("doctor", {})]
        if "identity" in each
    }
    maps = {each["metadata"]["name"] for each in release.of("ConfigMap")}
    accounts = {each["metadata"]["name"] for each in release.of("ServiceAccount")}
    claims = {
        each["metadata"]["name"]: {claim["metadata"]["name"] for claim in each["spec"].get("volumeClaimTemplates", [])}
        for each in release.of("StatefulSet")
    }
    used = set()
    for name, pod in release.pods():
        spec = pod["spec"]
        assert spec["serviceAccountName"] in accounts
        volumes = {volume["name"] for volume in spec["volumes"]} | claims.get(name, set())
        assert {mount["name"] for mount in spec["containers"][0]["volumeMounts"]} == volumes
        used |= {volume["secret"]["secretName"] for volume in spec["volumes"] if "secret" in volume}
        assert {volume["configMap"]["name"] for volume in spec["volumes"] if "configMap" in volume} <= maps
        assert all(volume["secret"]["defaultMode"] == 0o440 for volume in spec["volumes"] if "secret" in volume)

    assert used == issued | named
    relays = bool(values.get("eavesdropper", {}).get("workers"))  # they have that of the eavesdropper
    assert len(used) == len(list(release.pods())) - relays  # nobody else has another one's identity


def test_relays_have_no_credentials_of_the_store_and_call_the_eavesdropper() -> None:
    release = rendered(RELEASES["relays in pods of their own"])
    pods = {name: pod["spec"]["containers"][0] for name, pod in release.pods()}
    recording, relays = pods["study-eavesdropper"], pods["study-relays"]
    assert "envFrom" in recording and "envFrom" not in relays
    options = dict(itertools.pairwise(relays["args"]))
    service = release.named("Service", "study-eavesdropper")["metadata"]["name"]
    assert options["--join"] == f"{service}.{NAMESPACE}.svc.cluster.local:7500"
    assert options["--advertise-host"] == f"$(POD_NAME).study-relays.{NAMESPACE}.svc.cluster.local"
    assert dict(itertools.pairwise(recording["args"]))["--remote-workers"] == "3"


def test_a_mirror_needs_no_relays() -> None:
    release = rendered(merged(ISSUED, LEARNERS, {"capture": "mirror", "eavesdropper": {"workers": 3}}))
    assert "study-relays" not in dict(release.pods())


@everywhere
def test_selectors_find_the_pods_that_they_are_for(values: Values) -> None:
    release = rendered(values)
    labels = {name: pod["metadata"]["labels"] for name, pod in release.pods()}
    sets = {each["metadata"]["name"]: each["spec"] for each in release.of("StatefulSet")}

    def found(selector: dict[str, Any]) -> set[str]:
        return {name for name, own in labels.items() if selects(selector, own)}

    for name, spec in sets.items():
        assert found(spec["selector"]) == {name}
        assert spec["serviceName"] == name
        assert found({"matchLabels": release.named("Service", name)["spec"]["selector"]}) == {name}
    others = [each for each in release.of("Service") if each["metadata"]["name"] not in sets]
    for each in others:  # of metrics, which nobody outside is to reach
        assert each["spec"]["clusterIP"] == "None"
        assert found({"matchLabels": each["spec"]["selector"]}) <= set(sets)
        assert [port["port"] for port in each["spec"]["ports"]] == [9400]
    (budget,) = release.of("PodDisruptionBudget")
    assert found(budget["spec"]["selector"]) == set(sets)
    for policy in release.of("NetworkPolicy"):
        assert found(policy["spec"]["podSelector"]), policy["metadata"]["name"]
    monitors = release.of("ServiceMonitor")
    watched = [
        service["metadata"]["name"]
        for monitor in monitors
        for service in release.of("Service")
        if selects(monitor["spec"]["selector"], service["metadata"]["labels"])
    ]
    assert sorted(watched) == (sorted(each["metadata"]["name"] for each in others) if monitors else [])
    assert all(monitor["spec"]["endpoints"][0]["port"] == "metrics" for monitor in monitors)


@everywhere
def test_the_real_command_line_takes_what_a_pod_is_started_with(
    values: Values, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, pod in rendered(values).pods():
        (container,) = pod["spec"]["containers"]
        assert container["command"] == ["sottovoce"]
        command, *arguments = container["args"]
        if "--metrics" in arguments and not _takes(command, "--metrics"):
            pytest.skip("this version has no --metrics")
        for each in container.get("env", []):
            monkeypatch.setenv(each["name"], each.get("value", name))
        _parsed(command, arguments)
        known = {each.envvar for each in _options(command)}
        own = {each["name"] for each in container.get("env", []) if each["name"].startswith("SOTTOVOCE_")}
        assert own <= known, name


@functools.cache
def _root() -> Any:
    """As Typer makes it: of click, or of Typer's own copy of that."""
    return typer.main.get_command(app)


def _options(name: str) -> list[Any]:
    """Options of a command, those included that it shares with others."""
    command = _root().commands[name]
    return [*command.params, *(each for each in _root().params if each.name in command.common_options)]


def _takes(command: str, option: str) -> bool:
    return any(option in each.opts for each in _options(command))


def _parsed(command: str, arguments: list[str]) -> Any:
    """Refuses what the command would refuse."""
    outer = typer.Context(_root(), info_name="sottovoce")
    return _root().commands[command].make_context(command, list(arguments), parent=outer)


def test_a_command_line_that_is_wrong_would_be_noticed() -> None:
    with pytest.raises(Exception, match=r"No such option.*--lisen"):
        _parsed("learner", ["--name", "north", "--coordinator", "a:1", "--lisen", "b:2"])


def test_a_pod_is_started_as_its_values_say() -> None:
    release = rendered(RELEASES["an organisation's own"])
    (container,) = release.named("StatefulSet", f"{RELEASE}-learner-north")["spec"]["template"]["spec"]["containers"]
    taken = _parsed("learner", container["args"][1:]).params

    assert taken["name"] == ["north"]
    assert get_common_options().coordinator == "centre.ward.example:7400"
    assert taken["advertise"] == OWN["address"]
    assert (taken["budget"], taken["keep_log"]) == (OWN["budget"], True)
    assert (taken["owner"], taken["feeder"]) == (OWN["owners"], OWN["feeders"])
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    (policy,) = release.of("ConfigMap")
    assert Path(taken["policy"]).parent == Path(mounts["policy"])
    assert policy["data"][Path(taken["policy"]).name] == OWN["policy"]
    assert Path(taken["state"]).parent == Path(mounts["state"])
    assert {each["name"]: each["value"] for each in container["env"]}["SOTTOVOCE_IDENTITY"] == mounts["identity"]
    assert release.named("Service", f"{RELEASE}-learner-north")["spec"]["type"] == "LoadBalancer"


def test_another_policy_starts_the_learner_again() -> None:
    def template(policy: str) -> Document:
        values = merged(ISSUED, LEARNERS, {"learners": {"north": {"policy": policy}}})
        found: Document = rendered(values).named("StatefulSet", f"{RELEASE}-learner-north")["spec"]["template"]
        return found

    assert template("epsilon: 1\n") != template("epsilon: 2\n")


@everywhere
def test_certificates_name_who_the_services_insist_on(values: Values) -> None:
    release = rendered(values)
    for each in release.of("Certificate"):
        (uri,) = each["spec"]["uris"]
        principal = Principal.from_uri(uri)
        assert principal is not None, uri
        assert principal.uri == uri
        if principal.role == "feeder":
            assert "dnsNames" not in each["spec"]
        else:
            assert each["spec"]["dnsNames"] == [principal.host, f"{principal.role}.{DOMAIN}"]
            assert {"server auth", "client auth", "digital signature"} <= set(each["spec"]["usages"])
    issued = {str(Principal.from_uri(each["spec"]["uris"][0])) for each in release.of("Certificate")}
    if "identities" in values:
        assert {f"learner/{name}" for name in values.get("learners", {})} <= issued


def test_the_authorities_of_several_organisations_stand_in_every_identity() -> None:
    """A name in full is that of its own certificate; the key and the certificate are the secret's alone."""
    own, other = f"north@{DOMAIN}", "east@east.example"
    values = {"learners": {own: {}}, "edges": [[own, other]], "elsewhere": {other: ELSEWHERE}}
    release = rendered(merged(ISSUED, values, {"identities": {"authorities": "all"}}))
    plain = rendered(merged(ISSUED, {"learners": {"north": {}}}))
    names = [
        [each["spec"]["uris"] + each["spec"].get("dnsNames", []) for each in one.of("Certificate")]
        for one in (release, plain)
    ]
    assert names[0] == names[1]
    pods = list(release.pods())
    assert len(pods) == 3
    for _, pod in pods:
        (volume,) = (each for each in pod["spec"]["volumes"] if each["name"] == "identity")
        secret, authorities = volume["projected"]["sources"]
        assert [each["path"] for each in secret["secret"]["items"]] == ["tls.crt", "tls.key"]
        assert authorities == {"configMap": {"name": "all"}}
        assert volume["projected"]["defaultMode"] == 0o440
    arguments = release.named("StatefulSet", f"{RELEASE}-learner-north")["spec"]["template"]["spec"]["containers"][0][
        "args"
    ]
    assert arguments[arguments.index("--name") + 1] == own


def test_names_stay_short_and_differ() -> None:
    """A pod's labels hold its StatefulSet's name and a hash of eleven characters, in 63."""
    names = ["n" * 63, "n" * 62, f"{'n' * 62}m", "N", "n", "n-", "n--n", "Ä"]
    release = rendered(merged(ISSUED, {"learners": {name: {} for name in names}, "capture": "relay"}), release="r" * 40)
    found = [each["metadata"]["name"] for each in release.of("StatefulSet")]

    assert len(set(found)) == len(found) == len(names) + 2
    assert max(map(len, found)) <= 52
    assert all(re.fullmatch(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?", name) for name in found)


def test_a_second_release_in_the_namespace_is_another_one() -> None:
    one, other = rendered(RELEASES["relay"]), rendered(RELEASES["relay"], release="other")
    names = [{(each["kind"], each["metadata"]["name"]) for each in release.documents} for release in (one, other)]
    assert not names[0] & names[1]
    for policy in one.of("NetworkPolicy"):
        assert not any(selects(policy["spec"]["podSelector"], pod["metadata"]["labels"]) for _, pod in other.pods())


# ---- what is refused ---------------------------------------------------------------------------------------------

WHOLE = RELEASES["one release"]
WRONG: dict[str, tuple[Values, str]] = {
    "no domain": ({"learners": {"north": {}}}, "domain"),
    "a domain that is none": (merged(WHOLE, {"domain": "Ward"}), "/domain"),
    "an unknown key": (merged(WHOLE, {"learnerz": {}}), "learnerz"),
    "an unknown key of a learner": (merged(WHOLE, {"learners": {"north": {"budgets": 1}}}), "budgets"),
    "an unknown key of the image": (merged(WHOLE, {"image": {"name": "a"}}), "name"),
    "learners as a list": ({**WHOLE, "learners": ["north"]}, "/learners"),
    "a coordinator of another domain": (
        merged(WHOLE, {"coordinator": {"name": "main@east.example"}}),
        "/coordinator/name",
    ),
    "a name that is none": (merged(WHOLE, {"learners": {"a/b": {}}}), "a/b"),
    "a budget as text": (merged(WHOLE, {"learners": {"north": {"budget": "3"}}}), "/learners/north"),
    "a budget of nothing": (merged(WHOLE, {"learners": {"north": {"budget": 0}}}), "/learners/north"),
    "a feeder that is none": (merged(WHOLE, {"learners": {"north": {"feeders": ["alice"]}}}), "/learners/north"),
    "an edge of three": (merged(WHOLE, {"edges": [["a", "b", "c"]]}), "/edges/0"),
    "an edge twice": (merged(WHOLE, {"edges": [["north", "a--b"], ["north", "a--b"]]}), "/edges"),
    "an edge to nobody": (
        merged(WHOLE, {"edges": [["north", "west"]]}),
        "west, which is neither in learners nor in elsewhere",
    ),
    "nobody's peers": (merged(WHOLE, {"elsewhere": {"west": {"peers": []}}}), "/elsewhere/west/peers"),
    "a learner that is here and elsewhere": (
        merged(WHOLE, {"elsewhere": {"north": ELSEWHERE}}),
        "north is in learners and in elsewhere",
    ),
    "a peer that is none": (merged(WHOLE, {"elsewhere": {"west": {"peers": [{}]}}}), "/elsewhere/west/peers/0"),
    "a peer with a misspelt key": (merged(WHOLE, {"operators": [{"podSelektor": {}}]}), "podSelektor"),
    "a coordinator without an address": (
        merged(WHOLE, {"coordinator": {"elsewhere": ELSEWHERE}}),
        "/coordinator/elsewhere",
    ),
    "a coordinator's address without a port": (
        merged(WHOLE, {"coordinator": {"elsewhere": {**ELSEWHERE, "address": "centre"}}}),
        "/coordinator/elsewhere/address",
    ),
    "a capture that is none": (merged(WHOLE, {"capture": "tap"}), "/capture"),
    "metrics for nobody": (merged(WHOLE, {"metrics": {"enabled": True}}), "/metrics/from"),
    "root": (merged(WHOLE, {"image": {"user": 0}}), "/image/user"),
    "a volume of many": (
        merged(WHOLE, {"learner": {"volume": {"accessMode": "ReadWriteMany"}}}),
        "/learner/volume/accessMode",
    ),
    "no identity": ({"domain": DOMAIN, "learners": {"north": {}}}, "learner/north needs an identity"),
    "no identity of the coordinator": ({"domain": DOMAIN}, "coordinator/main needs an identity"),
    "metrics that nobody can read": (
        merged(WHOLE, MONITORED, {"metrics": {"serviceMonitor": {"identity": ""}}}),
        "serviceMonitor.identity must name",
    ),
}


@pytest.mark.parametrize(("values", "said"), WRONG.values(), ids=list(WRONG))
def test_what_is_no_value_is_refused_by_its_name(values: Values, said: str) -> None:
    refused = helm("template", values=values)

    assert refused.returncode != 0
    assert said in refused.stderr


def test_a_learner_that_is_named_twice_is_one(tmp_path: Path) -> None:
    """Learners are a mapping."""
    twice = tmp_path / "values.yaml"
    twice.write_text("learners:\n  north: {budget: 1}\n  north: {budget: 2}\n", encoding="utf-8")
    said = helm("template", "--values", str(twice), values=ISSUED)

    assert said.stdout.count("kind: StatefulSet") == 2  # with the coordinator
    assert said.stdout.count('"--name"') == said.stdout.count('"--budget"') == 1


def test_all_values_stand_in_the_schema_and_are_explained() -> None:
    schema = yaml.safe_load((CHART / "values.schema.json").read_text(encoding="utf-8"))
    values = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    explained = dict(_described(schema, schema))
    assert set(values) <= {path.split(".")[0] for path in explained}
    assert [path for path, text in explained.items() if not text] == []


def _described(whole: dict[str, Any], part: dict[str, Any], place: str = "") -> Iterator[tuple[str, str]]:
    """Every key that a mapping may have, and what the schema says of it."""
    if "$ref" in part:
        part = whole["definitions"][part["$ref"].rpartition("/")[2]] | {k: v for k, v in part.items() if k != "$ref"}
    for key, value in part.get("properties", {}).items():
        path = f"{place}.{key}" if place else key
        target = whole["definitions"][value["$ref"].rpartition("/")[2]] if "$ref" in value else value
        yield path, value.get("description") or target.get("description", "")
        yield from _described(whole, value, path)


def test_the_chart_has_the_version_of_the_services() -> None:
    import tomllib

    project = tomllib.loads((CHART.parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))

    assert chart["version"] == chart["appVersion"] == project["version"]
