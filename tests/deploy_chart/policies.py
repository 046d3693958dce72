"""What network policies let through, by the rules of networking.k8s.io/v1: an evaluator, small enough to be read."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.deploy_chart.rendering import Document, selects


@dataclass(frozen=True)
class Pod:
    """Somebody on the network.

    Attributes:
        name: for whoever reads a failure.
        labels: its own.
        namespace: the labels of the namespace that it is in; None: it is in no namespace of this cluster.
        address: its own.
    """

    name: str
    labels: Mapping[str, str] = field(default_factory=dict)
    namespace: str | None = "wards"
    address: str = "10.0.0.1"


def allowed(
    policies: Sequence[Document], namespace: str, caller: Pod, callee: Pod, port: int, protocol: str = "TCP"
) -> bool:
    """Whether a caller's connection comes about: neither end's policies may be against it."""
    return all(ends(policies, namespace, caller, callee, port, protocol))


def ends(
    policies: Sequence[Document], namespace: str, caller: Pod, callee: Pod, port: int, protocol: str = "TCP"
) -> tuple[bool, bool]:
    """Whether the caller's end lets it out, and the callee's lets it in."""
    return (
        _lets(policies, namespace, "Egress", caller, callee, port, protocol),
        _lets(policies, namespace, "Ingress", callee, caller, port, protocol),
    )


def _lets(
    policies: Iterable[Document], namespace: str, direction: str, own: Pod, other: Pod, port: int, protocol: str
) -> bool:
    if own.namespace != namespace:
        return True
    binding = [
        each["spec"]
        for each in policies
        if direction in each["spec"]["policyTypes"] and selects(each["spec"]["podSelector"], own.labels)
    ]
    rules = [rule for spec in binding for rule in spec.get(direction.lower()) or []]
    return not binding or any(_rule(rule, direction, namespace, other, port, protocol) for rule in rules)


def _rule(rule: Mapping[str, Any], direction: str, namespace: str, other: Pod, port: int, protocol: str) -> bool:
    peers = rule.get("from" if direction == "Ingress" else "to")
    ports = rule.get("ports")
    # An empty list lets everybody through, which no rule of ours should.
    fits_peer = not peers or any(_peer(peer, namespace, other) for peer in peers)
    fits_port = not ports or any(_port(each, port, protocol) for each in ports)
    return fits_peer and fits_port


def _port(said: Mapping[str, Any], port: int, protocol: str) -> bool:
    assert isinstance(said["port"], int), "a named port: where it leads depends on the pod"
    return bool(said.get("protocol", "TCP") == protocol and said["port"] <= port <= said.get("endPort", said["port"]))


def _peer(peer: Mapping[str, Any], namespace: str, other: Pod) -> bool:
    if "ipBlock" in peer:
        assert peer.keys() == {"ipBlock"}, peer
        block = peer["ipBlock"]
        address = ipaddress.ip_address(other.address)
        return address in ipaddress.ip_network(block["cidr"]) and not any(
            address in ipaddress.ip_network(each) for each in block.get("except", [])
        )
    if other.namespace is None:
        return False
    if "namespaceSelector" in peer:
        own = {"kubernetes.io/metadata.name": other.namespace}
        fits = selects(peer["namespaceSelector"], own)
    else:
        fits = other.namespace == namespace
    return fits and selects(peer.get("podSelector", {}), other.labels)
