"""Owns what a cluster must have before a fence can be tried at all, and what to do where it does not.

Builds no fence: that all of this is there proves nothing yet.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import anyio.to_thread

from reconciler.backends import k8s_proof
from reconciler.backends.k8s_client import ClusterError, Kind
from reconciler.backends.together import both
from reconciler.core.choose import Missing
from reconciler.core.policy import BackendName

if TYPE_CHECKING:
    from collections.abc import Mapping

    from reconciler.backends.k8s_client import Cluster
    from reconciler.host import K8sSettings

Plain = dict[str, Any]

_SERVER = re.compile(r"https://(?:\[([0-9A-Fa-f:.]+)\]|([^/:\[\]]+))(?::([0-9]+))?/?")
_HTTPS_PORT = 443
_APPLY = "kubectl apply -f deploy/k3s/sandbox/agent-sandbox.yaml"
_UNSCHEDULED = frozenset({"NoSchedule", "NoExecute"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One node on which a sandbox may run: its addresses, and the versions of what a fence there depends on."""

    name: str
    hostname: str
    addresses: tuple[str, ...]
    versions: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What was found: the RuntimeClass to use, the nodes that match, and versions for the cache."""

    runtime_class: str | None
    nodes: tuple[Node, ...]
    all_nodes: tuple[Node, ...]
    addresses: tuple[str, ...]
    """Of every node of the cluster, whether a sandbox may run there or not."""
    api: tuple[tuple[str, int], ...]
    versions: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """What to try, the strongest runtime first; `skipped` says why a stronger one is not tried."""

    tries: tuple[Surroundings, ...]
    skipped: tuple[str, ...]


async def look(settings: K8sSettings, cluster: Cluster) -> Candidates | Missing:
    """Look for everything that is needed, in the order in which it is needed."""
    try:
        return await _look(settings, cluster)
    except ClusterError as error:
        if error.no_right:
            return missing("no_rights", f"the daemon's account lacks a right: {error} ({_APPLY} gives them)")
        return missing("no_cluster", f"the cluster at {cluster.server} does not answer: {error}")


async def _look(settings: K8sSettings, cluster: Cluster) -> Candidates | Missing:
    version, nodes = await both(cluster.versions, cluster.nodes)
    policies = await cluster.find(Kind.POLICY)
    if not k8s_proof.denies_by_default(policies):
        return missing(
            "no_default_deny",
            f"no NetworkPolicy of the namespace {cluster.namespace} denies every pod everything: {_APPLY}",
        )
    if strays := [
        each["metadata"]["name"]
        for each in policies
        if (each["spec"].get("ingress") or each["spec"].get("egress"))
        and not any((each["spec"].get("podSelector") or {}).values())
    ]:
        return missing(
            "open_namespace",
            f"policy {', '.join(strays)} of the namespace {cluster.namespace} selects every pod and allows something:"
            " remove it, or give sandboxes a namespace of their own",
        )
    wanted = settings.runtime_class
    found = None if wanted is None else await cluster.runtime_class(wanted)
    api = await anyio.to_thread.run_sync(_api, cluster.server)
    common = {"server": str(version.get("gitVersion")), "proxy_image": settings.proxy_image or ""}
    addresses = tuple(dict.fromkeys(address for node in nodes for address in _addresses(node)))

    def surroundings(name: str | None, selector: Mapping[str, str]) -> Surroundings:
        matching = tuple(_node(node) for node in nodes if _takes(node, selector))
        seen: dict[str, str] = {}
        for key in ("kubelet", "runtime", "kernel"):
            seen[key] = ", ".join(sorted({node.versions[key] for node in matching}))
        return Surroundings(
            runtime_class=name,
            nodes=matching,
            all_nodes=tuple(_node(node) for node in nodes),
            addresses=addresses,
            api=api,
            versions={**common, "runtime_class": name or "none", **seen},
        )

    tries, skipped = [], []
    if found is not None:
        selector = (found.get("scheduling") or {}).get("nodeSelector") or {}
        each = surroundings(wanted, selector)
        if each.nodes:
            tries.append(each)
        else:
            skipped.append(f"no node that takes pods has the labels that RuntimeClass {wanted} selects by")
    elif wanted is not None:
        skipped.append(
            f"the cluster has no RuntimeClass {wanted}: install gVisor on its nodes, then kubectl apply -f"
            " deploy/k3s/sandbox/runtimeclass-gvisor.yaml"
        )
    plain = surroundings(None, {})
    if not plain.nodes:
        return missing("no_node", "no node of the cluster is ready and takes pods: see kubectl get nodes")
    return Candidates(tries=(*tries, plain), skipped=tuple(skipped))


def missing(code: str, message: str) -> Missing:
    """Say what this backend lacks."""
    return Missing(backend=BackendName.K8S, code=code, message=message)


def _takes(node: Plain, selector: Mapping[str, str]) -> bool:
    """Say whether a node is ready, takes pods, and has these labels."""
    if node["spec"].get("unschedulable"):
        return False
    if any(taint.get("effect") in _UNSCHEDULED for taint in node["spec"].get("taints") or ()):
        return False
    conditions = {each["type"]: each["status"] for each in node["status"].get("conditions") or ()}
    labels = node["metadata"].get("labels") or {}
    return conditions.get("Ready") == "True" and all(labels.get(key) == value for key, value in selector.items())


def _node(node: Plain) -> Node:
    info = node["status"].get("nodeInfo") or {}
    name = node["metadata"]["name"]
    return Node(
        name=name,
        hostname=(node["metadata"].get("labels") or {}).get("kubernetes.io/hostname", name),
        addresses=_addresses(node),
        versions={
            "kubelet": str(info.get("kubeletVersion")),
            "runtime": str(info.get("containerRuntimeVersion")),
            "kernel": str(info.get("kernelVersion")),
        },
    )


def _addresses(node: Plain) -> tuple[str, ...]:
    found = []
    for each in node["status"].get("addresses") or ():
        try:
            found.append(str(ipaddress.ip_address(each["address"])))
        except ValueError:
            # Names of nodes are among them.
            continue
    return tuple(found)


def _api(server: str) -> tuple[tuple[str, int], ...]:
    """Give where the API server is met: its addresses, and the port."""
    found = _SERVER.fullmatch(server)
    if found is None:
        return ()
    port = int(found[3] or _HTTPS_PORT)
    if found[1]:
        return ((str(ipaddress.ip_address(found[1])), port),)
    try:
        rows = socket.getaddrinfo(found[2], port, type=socket.SOCK_STREAM)
    except OSError:
        return ()
    return tuple(dict.fromkeys((str(row[4][0]), port) for row in rows if "%" not in str(row[4][0])))
