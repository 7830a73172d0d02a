"""Owns the measurement of what a pod reaches behind a policy that allows its proxy alone: at once, and later."""

from __future__ import annotations

import contextlib
import json
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tests.rig import network
from tests.rig.k8s.objects import pod
from tests.rig.k8s.plan import API_SERVICE, DNS_SERVICE, GATEWAY, NODE_ADDRESS
from tests.rig.rig import end

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.rig.k8s.cluster import Cluster

OUTSIDE: Final = "93.184.216.34"
"""Where a pod's first packets go: an echo."""
_ROLE: Final = "role"
_NODE_PORT, _NODE_OTHER = 31999, 9999
_ATTACKER: Final = Path(__file__).parent / "attacker.py"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """What pods of one runtime reached behind one enforcer."""

    pods: int
    leaked: int
    """Pods that had a connection to the outside, though no policy allows one."""
    last_ms: int
    """The latest of those connections, after the command's first instruction."""
    held: int
    """Pods whose first connection still carried data when all was settled."""
    allowed_ms: int
    """When the proxy's port, which is allowed, was first reached, in the slowest pod."""
    settled: frozenset[str]
    """What was reached six seconds later, of what no policy allows."""


def measure(cluster: Cluster, image: str, *, runtime: str | None, pods: int, late: str | None = None) -> Reach:
    """Start as many pods, one after the other, that attack from their first instruction; about 12 s each.

    `late`: a part of the cluster that is held until a second after each pod has started.
    """
    serve = ("python3", "-m", "http.server", "3128")
    cluster.apply(_policy(), *(pod(name, image, serve, labels={_ROLE: name}) for name in ("proxy", "other")))
    doors = [
        cluster.rig.spawn(
            ["/usr/bin/python3", "-m", "http.server", str(port), "--bind", "::"], stderr=subprocess.DEVNULL
        )
        for port in (_NODE_PORT, _NODE_OTHER)
    ]
    try:
        proxy, other = (_address(cluster, name) for name in ("proxy", "other"))
        order = {"outside": f"{OUTSIDE}:8080", "allowed": f"{proxy}:3128", "targets": _targets(cluster, other)}
        attack = ("python3", "-c", _ATTACKER.read_text(), json.dumps(order))
        fenced = {f"fenced-{number}": {_ROLE: "fenced"} for number in range(pods)}
        seen = [
            _run(cluster, name, pod(name, image, attack, labels=labels, runtime=runtime), late)
            for name, labels in fenced.items()
        ]
    finally:
        for door in doors:
            end(door)
        cluster.kubectl("delete", "--force", "--grace-period=0", "pod/proxy", "pod/other", "networkpolicy/fenced")
    return Reach(
        pods=pods,
        leaked=sum(bool(each["leaks"]) for each in seen),
        last_ms=max((each["leaks"][-1] for each in seen if each["leaks"]), default=0),
        held=sum(each["held"] for each in seen),
        allowed_ms=max(each["allowed"] for each in seen),
        settled=frozenset(name for each in seen for name in each["settled"]),
    )


def table(seen: Mapping[str, Reach]) -> str:
    """Write what was seen as Markdown, a column for each enforcer and runtime."""
    rows = {
        "pods whose first packets got out": [f"{each.leaked} of {each.pods}" for each in seen.values()],
        "the last connection that was let out": [f"{each.last_ms} ms" if each.leaked else "" for each in seen.values()],
        "pods whose first connection stayed open": [f"{each.held} of {each.pods}" for each in seen.values()],
        "the allowed port was reached after": [f"{each.allowed_ms} ms" for each in seen.values()],
        "reached when all was settled": [", ".join(sorted(each.settled)) or "nothing" for each in seen.values()],
    }
    lines = [["from the pod", *seen], ["---"] * (len(seen) + 1), *([name, *cells] for name, cells in rows.items())]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _targets(cluster: Cluster, other: str) -> dict[str, str]:
    listed = json.loads(cluster.rig.run([network.program("ip"), "-json", "-6", "address", "show", "cni0"]).stdout)
    link_local = next(each["local"] for each in listed[0]["addr_info"] if each["scope"] == "link")
    return {
        "another pod": f"tcp:{other}:3128",
        "DNS by UDP": f"udp:{DNS_SERVICE}:53",
        "DNS by TCP": f"tcp:{DNS_SERVICE}:53",
        "metadata": "tcp:169.254.169.254:80",
        "outside": f"tcp:{OUTSIDE}:8080",
        "API server by service": f"tcp:{API_SERVICE}:443",
        "API server by node": f"tcp:{NODE_ADDRESS}:6443",
        "API server by bridge": f"tcp:{GATEWAY}:6443",
        "kubelet": f"tcp:{NODE_ADDRESS}:10250",
        "a node process on 30000-32767": f"tcp:{NODE_ADDRESS}:{_NODE_PORT}",
        "a node process elsewhere": f"tcp:{NODE_ADDRESS}:{_NODE_OTHER}",
        "API server by link-local": f"tcp:{link_local}%eth0:6443",
        "kubelet by link-local": f"tcp:{link_local}%eth0:10250",
        "ping of the node": f"icmp:{NODE_ADDRESS}",
        "ping of another pod": f"icmp:{other}",
        "ping of outside": f"icmp:{OUTSIDE}",
    }


def _run(cluster: Cluster, name: str, attacker: Mapping[str, object], late: str | None) -> dict[str, Any]:
    with contextlib.nullcontext() if late is None else cluster.paused(late):
        cluster.apply(attacker)
        if late is not None:
            _wait(cluster, name, "condition=Ready")
            time.sleep(1)
    _wait(cluster, name, "jsonpath={.status.phase}=Succeeded")
    said: dict[str, Any] = json.loads(cluster.kubectl("logs", name, check=True).stdout)
    cluster.kubectl("delete", "--force", "--grace-period=0", "pod", name)
    return said


def _address(cluster: Cluster, name: str) -> str:
    _wait(cluster, name, "condition=Ready")
    return str(cluster.get(f"/api/v1/namespaces/default/pods/{name}")["status"]["podIP"])


def _wait(cluster: Cluster, name: str, what: str) -> None:
    cluster.kubectl("wait", f"--for={what}", f"pod/{name}", "--timeout=120s", timeout_s=130, check=True)


def _policy() -> dict[str, object]:
    proxy = {"podSelector": {"matchLabels": {_ROLE: "proxy"}}}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": "fenced"},
        "spec": {
            "podSelector": {"matchLabels": {_ROLE: "fenced"}},
            "policyTypes": ["Ingress", "Egress"],
            "egress": [{"to": [proxy], "ports": [{"protocol": "TCP", "port": 3128}]}],
        },
    }
