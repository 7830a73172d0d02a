"""What stands in a real cluster, and what it stops: default-deny, and the node guard on top of network policies."""

from __future__ import annotations

import contextlib
import copy
import json
import select
import socket
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
from pyroute2 import IPRoute

from reconciler.backends import guard, node_guard, pod_guard
from reconciler.backends.pod_guard import Fenced
from tests.backends.world import inside
from tests.deploy import shapes
from tests.deploy.manifests import DAEMON_IMAGE, NAMESPACE, SANDBOX, documents
from tests.rig import network
from tests.rig.k8s.plan import GATEWAY, NODE_ADDRESS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.deploy.conftest import Deployed
    from tests.rig.k8s import Cluster

pytestmark = [pytest.mark.k8s, pytest.mark.rig, pytest.mark.timeout(300)]

NODE_PORT = 30500
RUNTIMES = [pytest.param(None, id="runc"), pytest.param("gvisor", id="gVisor")]
TRY = """
import json, socket, sys
def tried(kind, address, port):
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    if kind == "icmp":
        one = socket.socket(family, socket.SOCK_DGRAM, socket.IPPROTO_ICMP)
        data = b"\\x08\\0\\xf7\\xff\\0\\0\\0\\0"
    else:
        one = socket.socket(family, socket.SOCK_STREAM if kind == "tcp" else socket.SOCK_DGRAM)
        data = b"x"
    one.settimeout(0.5)
    try:
        if kind == "tcp":
            one.connect(socket.getaddrinfo(address, port)[0][4])
        else:
            one.sendto(data, (address, port))
            one.recv(64)
    except OSError:
        return False
    finally:
        one.close()
    return True
print(json.dumps({name: tried(*each) for name, each in json.loads(sys.argv[1]).items()}))
"""
SERVE = """
import socket, threading, sys
def serve(port):
    listener = socket.create_server(("0.0.0.0", port))
    while True:
        listener.accept()[0].close()
for port in (3128, 3129):
    threading.Thread(target=serve, args=(port,)).start()
"""


def wait(cluster: Cluster, pod: str, namespace: str = NAMESPACE) -> dict[str, Any]:
    until = time.monotonic() + 60
    while True:
        found: dict[str, Any] = cluster.get(f"/api/v1/namespaces/{namespace}/pods/{pod}")
        if found["status"]["phase"] == "Running" and all(
            each["ready"] for each in found["status"]["containerStatuses"]
        ):
            return found
        if time.monotonic() > until or found["status"]["phase"] in {"Failed", "Succeeded"}:
            pytest.fail(json.dumps(found["status"], indent=1))
        time.sleep(0.1)


@dataclass(frozen=True, slots=True)
class Run:
    """An agent's pod and its proxy's, with the policies of the run in force, and what listens on the node."""

    deployed: Deployed
    agent: dict[str, Any]
    proxy: dict[str, Any]
    listeners: dict[str, socket.socket]

    @property
    def fenced(self) -> Fenced:
        """What the daemon on the node would say of it."""
        address = self.agent["status"]["podIP"]
        return Fenced(agent=address, mac=node_guard.mac_of(address), proxy=self.proxy["status"]["podIP"])

    def attempts(self, pod: str = "guarded", namespace: str = NAMESPACE) -> dict[str, bool]:
        """Try from a pod; True where something answered, which the node's own listeners must bear out."""
        for listener in self.listeners.values():
            while select.select([listener], [], [], 0)[0]:
                listener.accept()[0].close()
        local = f"{_link_local()}%eth0"
        proxy = self.proxy["status"]["podIP"]
        tries = {
            "proxy": ("tcp", proxy, 3128),
            "proxy canary": ("tcp", proxy, 3129),
            "node port": ("tcp", NODE_ADDRESS, NODE_PORT),
            "node port by the gateway": ("tcp", GATEWAY, NODE_PORT),
            "node port by link-local": ("tcp", local, NODE_PORT),
            "API server by link-local": ("tcp", local, 6443),
            "API server": ("tcp", NODE_ADDRESS, 6443),
            "API service": ("tcp", "10.96.0.1", 443),
            "kubelet": ("tcp", NODE_ADDRESS, 10250),
            "DNS": ("tcp", "10.96.0.10", 53),
            "ping": ("icmp", NODE_ADDRESS, 0),
        }
        done = self.deployed.cluster.kubectl(
            "exec", pod, "-n", namespace, "--", "python3", "-c", TRY, json.dumps(tries), check=True
        )
        said: dict[str, bool] = json.loads(done.stdout)
        for name, listener in self.listeners.items():
            came = bool(select.select([listener], [], [], 0.1)[0])
            names = ["node port", "node port by the gateway"] if name == "IPv4" else ["node port by link-local"]
            assert came == any(said[each] for each in names), (name, said)
        return said

    def opened(self, *, until: set[str], seconds: float = 20) -> set[str]:
        """Try until exactly these answer, and give those that did at last: policies take a moment, and stay."""
        end = time.monotonic() + seconds
        while (found := {name for name, came in self.attempts().items() if came}) != until and time.monotonic() < end:
            time.sleep(0.3)
        return found


def _link_local() -> str:
    with IPRoute() as route:
        (index,) = route.link_lookup(ifname="cni0")
        found = route.get_addr(family=socket.AF_INET6, index=index)
    return str(next(each.get("IFA_ADDRESS") for each in found if str(each.get("IFA_ADDRESS")).startswith("fe80")))


@pytest.fixture(params=RUNTIMES)
def run(request: pytest.FixtureRequest, deployed: Deployed) -> Iterator[Run]:
    """One run's pods under one runtime; this thread is in the node's network."""
    cluster = deployed.cluster
    with contextlib.ExitStack() as stack:
        stack.enter_context(inside(network.NETNS / cluster.rig.host))
        classes = f"ringfence.runtime-classes={request.param or 'none'}"
        cluster.kubectl("annotate", "--overwrite", "namespace", NAMESPACE, classes, check=True)
        agent = shapes.agent("guarded", deployed.agent, "sleep", "600")
        proxy = shapes.proxy("proxy", deployed.agent, "python3", "-c", SERVE)
        if request.param is None:
            del agent["spec"]["runtimeClassName"]
        deployed.judge_until(agent, "")
        cluster.apply(shapes.agent_policy("agent"), shapes.proxy_policy("proxy"), agent, proxy)
        stack.callback(_remove, cluster)
        v4 = stack.enter_context(socket.create_server(("0.0.0.0", NODE_PORT)))
        v6 = stack.enter_context(socket.create_server(("::", NODE_PORT), family=socket.AF_INET6))
        yield Run(deployed, wait(cluster, "guarded"), wait(cluster, "proxy"), {"IPv4": v4, "IPv6": v6})


def _remove(cluster: Cluster) -> None:
    cluster.kubectl("delete", "pod,networkpolicy", "-n", NAMESPACE, "-l", "ringfence.run", "--wait", check=True)
    for name in (pod_guard.DAEMON, pod_guard.DAEMON_SET):
        for table in pod_guard.tables(name):
            if isinstance(guard.listed(table), dict):
                assert guard.change(f"delete table {table}") is None


LEFT_OPEN = {"proxy", "node port", "node port by the gateway", "node port by link-local", "API server by link-local"}
"""What this cluster's policies leave open; the API server by that address too, where it listens on it."""


def test_the_guard_of_a_daemon_on_the_node_closes_what_policies_leave_open(run: Run) -> None:
    before = run.opened(until=LEFT_OPEN)
    assert before >= LEFT_OPEN - {"API server by link-local"}, (
        "policies close it by themselves: this test shows nothing"
    )
    assert node_guard.ensure() is None
    pods = [run.fenced]
    assert pods[0].mac is not None
    assert node_guard.put(pods, seconds=300) is None
    assert run.opened(until={"proxy"}) == {"proxy"}
    assert node_guard.missing(pods) == ()
    assert node_guard.take(pods) is None
    assert run.opened(until=before) == before


def test_the_daemon_set_closes_the_same_from_the_labels_of_pods(daemon_image: str, run: Run) -> None:
    assert len(run.opened(until=LEFT_OPEN)) > 1, "policies close it by themselves: this test shows nothing"
    cluster = run.deployed.cluster
    manifest = [copy.deepcopy(each) for each in documents(SANDBOX / "node-guard.yaml")]
    text = json.dumps(manifest).replace(DAEMON_IMAGE, daemon_image)
    cluster.apply(*json.loads(text))
    try:
        assert run.opened(until={"proxy"}, seconds=60) == {"proxy"}, _guards_log(cluster)
        assert "fenced in: 1" in _guards_log(cluster)
        assert node_guard.missing([run.fenced], name=pod_guard.DAEMON_SET) == ()
        # Who flushes it has a second of it.
        assert guard.change(f"flush set {pod_guard.inet(pod_guard.DAEMON_SET)} agents") is None
        time.sleep(2)
        assert run.opened(until={"proxy"}) == {"proxy"}
        cluster.kubectl("delete", "pod", "guarded", "-n", NAMESPACE, "--wait", check=True)
        until = time.monotonic() + 20
        while not node_guard.missing([run.fenced], name=pod_guard.DAEMON_SET):
            assert time.monotonic() < until, "a pod that is gone is still in the sets"
            time.sleep(0.2)
    finally:
        cluster.kubectl("delete", "daemonset", "node-guard", "-n", "ringfence-guard", "--wait", check=True)


def _guards_log(cluster: Cluster) -> str:
    return cluster.kubectl("logs", "-n", "ringfence-guard", "daemonset/node-guard", "--tail=20").stdout


def test_default_deny_shuts_a_pod_that_no_policy_opens(deployed: Deployed) -> None:
    cluster = deployed.cluster
    with inside(network.NETNS / cluster.rig.host), contextlib.ExitStack() as stack:
        v4 = stack.enter_context(socket.create_server(("0.0.0.0", NODE_PORT)))
        v6 = stack.enter_context(socket.create_server(("::", NODE_PORT), family=socket.AF_INET6))
        stack.callback(_remove, cluster)
        pods = [shapes.proxy(name, deployed.agent, "python3", "-c", SERVE) for name in ("shut", "proxy")]
        elsewhere = copy.deepcopy(pods[0])
        elsewhere["metadata"] = {"name": "elsewhere", "namespace": "default"}
        elsewhere["spec"]["serviceAccountName"] = "default"
        cluster.apply(*pods, elsewhere)
        stack.callback(cluster.kubectl, "delete", "pod", "elsewhere", "-n", "default", "--wait")
        shut, proxy = wait(cluster, "shut"), wait(cluster, "proxy")
        wait(cluster, "elsewhere", "default")
        run = Run(deployed, shut, proxy, {"IPv4": v4, "IPv6": v6})
        time.sleep(3)
        open_ = run.attempts("elsewhere", "default")
        found = run.attempts("shut")
        # Nothing in from another namespace, nothing out to anybody but the node itself, which is the node guard's part.
        assert not open_["proxy"]
        for name in ("API server", "API service", "DNS"):
            assert open_[name], f"{name} is closed to everybody: this test shows nothing"
            assert not found[name], name
        assert not found["proxy"]
        assert not found["proxy canary"]
