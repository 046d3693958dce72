"""Network policies let through the edges of the topology, and nothing else."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from sottovoce_client.helm import derive_chart_values
from sottovoce_core.spec import RunSpec, parse_spec
from tests.deploy_chart.policies import Pod, allowed, ends
from tests.deploy_chart.rendering import ISSUED, NAMESPACE, RELEASE, Rendered, Values, merged, rendered

NAMES = ["anna", "ben", "cleo", "dora", "Emil 2"]
COORDINATOR, LEARNER, EAVESDROPPER, METRICS, RELAY = 7400, 7401, 7500, 9400, 40_000
PORTS = (COORDINATOR, LEARNER, EAVESDROPPER, METRICS, RELAY, 22)

FEEDER = Pod("feeder", {"sottovoce/feeds": "ben"})
OPERATOR = Pod("operator", {"sottovoce/operates": RELEASE})
PROMETHEUS = Pod("prometheus", {"app": "prometheus"}, "monitoring")
STRANGERS = [
    Pod("stranger"),
    Pod("feeder elsewhere", FEEDER.labels, "other"),
    Pod("operator of another release", {"sottovoce/operates": "other"}),
    Pod("learner of another release", {"app.kubernetes.io/component": "learner", "sottovoce/learner": "anna"}),
    Pod("machine", namespace=None, address="203.0.113.9"),
]
OUTSIDE = [FEEDER, OPERATOR, PROMETHEUS, *STRANGERS]

GRAPHS: dict[str, dict[str, Any]] = {
    "ring": {"graph": {"kind": "ring"}},
    "star": {"graph": {"kind": "star"}},
    "path": {"graph": {"kind": "path"}},
    "complete": {"graph": {"kind": "complete"}},
    "directed": {
        "graph": {"kind": "edges", "directed": True, "edges": [[0, 1], [1, 2], [2, 3], [3, 4], [4, 0], [2, 0]]},
        "weights": "out_degree",
    },
    "periodic": {
        "sequence": {
            "kind": "periodic",
            "graphs": [
                {"kind": "edges", "directed": True, "edges": [[0, 1], [3, 2], [4, 3]]},
                {"kind": "edges", "directed": True, "edges": [[1, 4], [2, 0]]},
            ],
        },
        "weights": "out_degree",
    },
    "random": {"sequence": {"kind": "random", "probability": 0.5}},
}


def spec_of(graph: str, **more: Any) -> RunSpec:
    document = {
        "name": "study",
        "rounds": 40,
        "learners": NAMES,
        "topology": GRAPHS[graph],
        "algorithm": {"name": "dsgd"},
        "data": {"source": "live", "features": 3},
        **more,
    }
    return parse_spec(document, allow_imports=False)


def edges_of(spec: RunSpec) -> set[tuple[str, str]]:
    """Of all rounds, by their weights: the lower index opens the stream. Whoever is away may still be let in later."""
    network = spec.topology.build_network(spec.n_learners, spec.rounds)
    heard = np.any([network.mixing(t).neighbour_weights > 0 for t in range(network.horizon)], axis=0)
    either = heard | heard.T
    return {(NAMES[i], NAMES[j]) for i, j in itertools.combinations(range(len(NAMES)), 2) if either[i, j]}


def pods_of(release: Rendered) -> dict[str, Pod]:
    """Pods of a release, by what the tests call them."""
    found = {}
    for name, template in release.pods():
        labels = template["metadata"]["labels"]
        role = labels["app.kubernetes.io/component"]
        arguments = template["spec"]["containers"][0]["args"]
        own = arguments[arguments.index("--name") + 1] if role == "learner" else role
        found[own] = Pod(own, labels)
        assert name
    return found


def passes(release: Rendered, *, testing: bool = False) -> set[tuple[str, str, int]]:
    """All that passes, from whom to whom on which port."""
    policies = [each for each in release.of("NetworkPolicy") if testing or not _of_a_test(each)]
    pods = [pod for name, pod in pods_of(release).items() if name != "doctor" or testing]
    pairs = [(a, b) for a, b in itertools.permutations([*pods, *OUTSIDE], 2) if a in pods or b in pods]
    return {
        (caller.name, callee.name, port)
        for caller, callee in pairs
        for port in PORTS
        if allowed(policies, NAMESPACE, caller, callee, port)
    }


def _of_a_test(policy: dict[str, Any]) -> bool:
    return bool(policy["metadata"].get("annotations", {}).get("helm.sh/hook") == "test")


def always(names: list[str]) -> set[tuple[str, str, int]]:
    """Beside the edges: learners join, one feeder brings records to whom it feeds, an operator asks the coordinator."""
    joined = {(name, "coordinator", COORDINATOR) for name in names}
    return joined | {("feeder", "ben", LEARNER), ("operator", "coordinator", COORDINATOR)}


def recorded(edges: set[tuple[str, str]], capture: str) -> set[tuple[str, str, int]]:
    """What a capture needs."""
    if capture == "none":
        return set()
    asked = {("coordinator", "eavesdropper", EAVESDROPPER), ("operator", "eavesdropper", EAVESDROPPER)}
    if capture == "mirror":
        return asked | {(name, "eavesdropper", EAVESDROPPER) for name in NAMES}
    into = {(caller, "eavesdropper", RELAY) for caller, _ in edges}
    return asked | into | {("eavesdropper", callee, LEARNER) for _, callee in edges}


def whole(spec: RunSpec, more: Values | None = None) -> Rendered:
    return rendered(merged(ISSUED, derive_chart_values([spec]), more or {}))


@pytest.mark.parametrize("graph", GRAPHS)
def test_the_edges_of_the_topology_pass_and_nothing_else(graph: str) -> None:
    spec = spec_of(graph)
    edges = edges_of(spec)

    assert passes(whole(spec)) == {(a, b, LEARNER) for a, b in edges} | always(NAMES)


@pytest.mark.parametrize("capture", ["relay", "mirror", "wiretap"])
def test_an_eavesdropper_is_let_in_as_its_kind_of_capture_needs_it(capture: str) -> None:
    spec = spec_of("ring", capture=capture)
    edges = edges_of(spec)

    assert passes(whole(spec)) == {(a, b, LEARNER) for a, b in edges} | always(NAMES) | recorded(edges, capture)


def test_relays_in_pods_of_their_own_are_let_in_and_the_eavesdropper_is_not_reached_by_learners() -> None:
    spec = spec_of("ring", capture="relay")
    edges = edges_of(spec)
    moved = {
        (*(("relays" if end == "eavesdropper" and port in (RELAY, LEARNER) else end) for end in ends), port)
        for *ends, port in recorded(edges, "relay")
    } | {("relays", "eavesdropper", EAVESDROPPER)}
    release = whole(spec, {"eavesdropper": {"workers": 2}})

    assert passes(release) == {(a, b, LEARNER) for a, b in edges} | always(NAMES) | moved


@pytest.mark.parametrize("capture", ["none", "relay", "mirror", "wiretap"])
def test_each_end_by_itself_lets_through_the_same(capture: str) -> None:
    """Where one fence is down, or in another cluster, the other one holds."""
    release = whole(spec_of("ring", capture=capture))
    policies = [each for each in release.of("NetworkPolicy") if not _of_a_test(each)]
    pods = [pod for name, pod in pods_of(release).items() if name != "doctor"]
    differs = {
        (caller.name, callee.name, port)
        for caller, callee in itertools.permutations(pods, 2)
        for port in PORTS
        if len(set(ends(policies, NAMESPACE, caller, callee, port))) == 2
    }

    assert differs == set()


def test_a_learner_that_is_away_keeps_its_edges_for_it_may_join_later() -> None:
    away = spec_of("complete", offline_intervals=[{"learner": "dora"}, {"learner": "ben", "until_round": 20}])

    assert passes(whole(away)) == passes(whole(spec_of("complete")))


def test_runs_of_one_deployment_share_what_they_need() -> None:
    specs = [spec_of("ring"), spec_of("star", capture="mirror")]
    edges = edges_of(specs[0]) | edges_of(specs[1])
    release = rendered(merged(ISSUED, derive_chart_values(specs)))

    assert passes(release) == {(a, b, LEARNER) for a, b in edges} | always(NAMES) | recorded(edges, "mirror")


def test_who_asks_for_metrics_reaches_their_port_alone() -> None:
    monitoring = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}
    spec = spec_of("ring")
    more = passes(whole(spec, {"metrics": {"enabled": True, "from": [monitoring]}})) - passes(whole(spec))

    assert more == {("prometheus", name, METRICS) for name in [*NAMES, "coordinator"]}


def test_an_operator_reaches_the_learners_that_name_one() -> None:
    spec = spec_of("ring")
    own = {"learners": {"ben": {"feeders": ["operator/alice"]}, "anna": {"owners": ["feeder/anna"]}}}

    assert passes(whole(spec, own)) - passes(whole(spec)) == {("operator", "ben", LEARNER)}


def test_while_helm_test_runs_its_pod_reaches_all_services_and_nobody_reaches_it() -> None:
    release = whole(spec_of("ring", capture="relay"))
    asked = {("doctor", name, LEARNER) for name in NAMES} | {
        ("doctor", "coordinator", COORDINATOR),
        ("doctor", "eavesdropper", EAVESDROPPER),
    }
    more = {each for each in passes(release, testing=True) - passes(release) if each[2] in _port_of(each[1])}

    assert more == asked


def _port_of(name: str) -> tuple[int, ...]:
    """What a service listens on, of `PORTS`: on others nobody answers."""
    return {"coordinator": (COORDINATOR,), "eavesdropper": (EAVESDROPPER, RELAY), "doctor": PORTS}.get(name, (LEARNER,))


def test_names_are_asked_for_where_they_are_known() -> None:
    release = whole(spec_of("ring"))
    dns = Pod("dns", {"k8s-app": "kube-dns"}, "kube-system")
    for pod in pods_of(release).values():
        for protocol in ("UDP", "TCP"):
            assert allowed(release.of("NetworkPolicy"), NAMESPACE, pod, dns, 53, protocol)
            assert not allowed(release.of("NetworkPolicy"), NAMESPACE, pod, STRANGERS[0], 53, protocol)


@pytest.mark.parametrize("capture", ["none", "relay", "mirror", "wiretap"])
def test_no_rule_is_open_to_everybody(capture: str) -> None:
    """A rule with an empty list of peers or ports lets everybody through."""
    for policy in whole(spec_of("ring", capture=capture)).of("NetworkPolicy"):
        for direction, peers in (("ingress", "from"), ("egress", "to")):
            for rule in policy["spec"].get(direction, []):
                assert rule[peers] and all(rule[peers]), policy["metadata"]["name"]
                assert rule["ports"], policy["metadata"]["name"]


# ---- one release for each organisation ---------------------------------------------------------------------------

NORTH = Pod("anna's machine", namespace=None, address="198.51.100.7")
CENTRE = Pod("the coordinator's machine", namespace=None, address="192.0.2.4")


def alone(spec: RunSpec, name: str) -> Rendered:
    """The release of an organisation with one learner: everybody else is elsewhere."""
    values = derive_chart_values([spec], [name])
    for other in values.get("elsewhere", {}):
        values["elsewhere"][other]["peers"] = [{"ipBlock": {"cidr": f"{NORTH.address}/32"}}]
    for role, port in (("coordinator", 7400), ("eavesdropper", 7500)):
        if role in values:
            peers = [{"ipBlock": {"cidr": f"{CENTRE.address}/32"}}]
            values[role] = {"elsewhere": {"address": f"{role}.ward.example:{port}", "peers": peers}}
    return rendered(merged(ISSUED, values))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("graph", ["ring", "star", "directed"])
def test_an_organisation_reaches_its_learners_neighbours_and_the_coordinator(graph: str, name: str) -> None:
    spec = spec_of(graph)
    calls = {edge for edge in edges_of(spec) if name in edge}
    release = alone(spec, name)
    policies = [each for each in release.of("NetworkPolicy") if not _of_a_test(each)]
    own = pods_of(release)[name]

    assert set(pods_of(release)) == {name, "doctor"}
    assert allowed(policies, NAMESPACE, own, NORTH, LEARNER) == any(caller == name for caller, _ in calls)
    assert allowed(policies, NAMESPACE, NORTH, own, LEARNER) == any(callee == name for _, callee in calls)
    assert allowed(policies, NAMESPACE, own, CENTRE, COORDINATOR)
    assert not allowed(policies, NAMESPACE, CENTRE, own, LEARNER)
    for port in set(PORTS) - {LEARNER, COORDINATOR}:
        assert not any(allowed(policies, NAMESPACE, own, each, port) for each in (NORTH, CENTRE, *OUTSIDE))
        assert not any(allowed(policies, NAMESPACE, each, own, port) for each in (NORTH, CENTRE, *OUTSIDE))


@pytest.mark.parametrize("capture", ["relay", "mirror"])
def test_an_organisation_is_recorded_by_an_eavesdropper_elsewhere(capture: str) -> None:
    spec = spec_of("path", capture=capture)
    for name in NAMES:
        release = alone(spec, name)
        policies = [each for each in release.of("NetworkPolicy") if not _of_a_test(each)]
        own, edges = pods_of(release)[name], edges_of(spec)
        opens, accepts = any(a == name for a, _ in edges), any(b == name for _, b in edges)

        assert allowed(policies, NAMESPACE, own, CENTRE, RELAY) == (capture == "relay" and opens)
        assert allowed(policies, NAMESPACE, CENTRE, own, LEARNER) == (capture == "relay" and accepts)
        assert allowed(policies, NAMESPACE, own, CENTRE, EAVESDROPPER) == (capture == "mirror")


def test_a_coordinator_alone_lets_in_the_learners_that_it_knows() -> None:
    values = derive_chart_values([spec_of("ring", capture="relay")], coordinator=True)
    for name in values["elsewhere"]:
        values["elsewhere"][name]["peers"] = [{"ipBlock": {"cidr": f"{NORTH.address}/32"}}]
    release = rendered(merged(ISSUED, values))
    policies = [each for each in release.of("NetworkPolicy") if not _of_a_test(each)]
    pods = pods_of(release)

    assert set(pods) == {"coordinator", "eavesdropper", "doctor"}
    assert allowed(policies, NAMESPACE, NORTH, pods["coordinator"], COORDINATOR)
    assert allowed(policies, NAMESPACE, NORTH, pods["eavesdropper"], RELAY)
    assert allowed(policies, NAMESPACE, pods["eavesdropper"], NORTH, LEARNER)
    assert not allowed(policies, NAMESPACE, STRANGERS[-1], pods["coordinator"], COORDINATOR)
    assert not allowed(policies, NAMESPACE, STRANGERS[-1], pods["eavesdropper"], RELAY)
    assert not allowed(policies, NAMESPACE, pods["coordinator"], NORTH, LEARNER)
