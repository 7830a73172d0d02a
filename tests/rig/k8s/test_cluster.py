"""The cluster itself: what is later said about a fence of pods is worth as much as it is like a real one."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.rig import Rig, addresses, network
from tests.rig.k8s import DNS_SERVICE, NODE, NODE_ADDRESS, Cluster, Netpol
from tests.rig.k8s.fixtures import ENFORCED, Setup, Standing
from tests.rig.keeper import cgroups
from tests.rig.rig import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.k8s, pytest.mark.rig]

runtimes = pytest.mark.parametrize("runtime", [None, "gvisor"], ids=["runc", "gvisor"])
any_enforcer = pytest.mark.parametrize("k8s", [Setup()], indirect=True, ids=str)
REACH = """
import socket, sys
for word in sys.argv[1:]:
    host, port = word.rsplit(":", 1)
    try:
        socket.create_connection((host, int(port)), timeout=2).close()
        print(word, "reached")
    except OSError as refused:
        print(word, "not")
"""


class Pods:
    """Pods of one test in the namespace `default`, gone after it."""

    def __init__(self, on: Standing) -> None:
        self._on = on
        self._names: list[str] = []

    def create(self, name: str, *command: str, runtime: str | None = None, **labels: str) -> None:
        """Create a pod that runs a command once."""
        container = {"name": "c", "image": self._on.agent, "imagePullPolicy": "Never", "command": command}
        spec: dict[str, object] = {
            "restartPolicy": "Never",
            "automountServiceAccountToken": False,
            "terminationGracePeriodSeconds": 0,
            "containers": [container],
        }
        if runtime is not None:
            spec["runtimeClassName"] = runtime
        metadata = {"name": name, "labels": labels}
        self._on.cluster.apply({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec})
        self._names.append(name)

    def status(self, name: str) -> Any:
        """Return a pod's status."""
        return self._on.cluster.get(f"/api/v1/namespaces/default/pods/{name}")["status"]

    def run(self, name: str, *command: str, runtime: str | None = None, **labels: str) -> str:
        """Run a pod to its end; what it wrote."""
        self.create(name, *command, runtime=runtime, **labels)
        self.until(name, "Succeeded", "Failed")
        return self._on.cluster.kubectl("logs", name, check=True).stdout

    def serve(self, name: str, port: int, **labels: str) -> str:
        """Run a web server; its address once it answers."""
        self.create(name, "python3", "-m", "http.server", str(port), **labels)
        self.until(name, "Running")
        address = str(self.status(name)["podIP"])
        assert self._on.cluster.rig.until(lambda: answers(self._on.cluster, address, port), timeout_s=20)
        return address

    def until(self, name: str, *phases: str) -> None:
        """Wait for a phase."""
        assert self._on.cluster.rig.until(lambda: self.status(name).get("phase") in phases, timeout_s=60), self.status(
            name
        )

    def remove(self) -> None:
        """Remove all."""
        if self._names:
            self._on.cluster.kubectl("delete", "pod", "--grace-period=0", "--force", *self._names, check=True)


def answers(cluster: Cluster, address: str, port: int) -> bool:
    try:
        cluster.rig.connect(address, port, timeout_s=1).close()
    except OSError:
        return False
    return True


@pytest.fixture
def pods(k8s: Standing) -> Iterator[Pods]:
    made = Pods(k8s)
    yield made
    made.remove()


@any_enforcer
def test_the_node_is_ready_and_says_what_it_is(k8s: Standing) -> None:
    status = k8s.cluster.get(f"/api/v1/nodes/{NODE}")["status"]
    assert {"type": "InternalIP", "address": NODE_ADDRESS} in status["addresses"]
    assert status["nodeInfo"]["containerRuntimeVersion"].startswith("containerd://2.")
    assert status["nodeInfo"]["kubeletVersion"].startswith("v1.")
    assert {each["name"] for each in status["runtimeHandlers"]} >= {"runc", "runsc"}


@any_enforcer
@runtimes
def test_a_pod_runs_its_command_and_its_status_is_told(k8s: Standing, pods: Pods, runtime: str | None) -> None:
    script = "import sys; print(open('/proc/version').read()); sys.exit(7)"
    version = pods.run("version", "python3", "-c", script, runtime=runtime)
    (container,) = pods.status("version")["containerStatuses"]
    assert container["state"]["terminated"]["exitCode"] == 7
    assert container["imageID"].rpartition("@")[2] == k8s.agent.rpartition("@")[2]
    assert ("gvisor" in version) == (runtime == "gvisor")


@any_enforcer
@runtimes
def test_a_pod_without_a_policy_reaches_the_rigs_internet_by_name(
    k8s: Standing, pods: Pods, runtime: str | None
) -> None:
    script = "import socket; print(socket.create_connection(('example.com', 8080), timeout=5).getpeername()[0])"
    assert pods.run("open", "python3", "-c", script, runtime=runtime).strip() in addresses.EXAMPLE
    (arrival,) = k8s.cluster.rig.arrivals(port=8080)
    assert arrival.peer == pods.status("open")["podIP"], "what arrives tells the pod that sent it"
    assert k8s.cluster.rig.queries("example.com"), "the cluster's DNS asks the rig's resolver"


@any_enforcer
def test_names_resolve_by_tcp_too(k8s: Standing, pods: Pods) -> None:
    script = f"""
import socket, struct
query = struct.pack(">HHHHHH", 7, 0x100, 1, 0, 0, 0) + b"\\x07example\\x03com\\0" + struct.pack(">HH", 1, 1)
with socket.create_connection(("{DNS_SERVICE}", 53), timeout=5) as asked:
    for _ in range(2):
        asked.sendall(len(query).to_bytes(2, "big") + query)
        print(asked.recv(2000)[2:4] == query[:2])
"""
    assert pods.run("tcp", "python3", "-c", script).split() == ["True", "True"]
    assert [each.transport for each in k8s.cluster.rig.queries("example.com")] == ["tcp", "tcp"]


@pytest.mark.parametrize(
    ("k8s", "held"),
    [*((each, True) for each in ENFORCED), (Setup(netpol=Netpol.NONE), False)],
    indirect=["k8s"],
    ids=["kube-router", "knp", "no enforcer"],
)
@runtimes
def test_a_network_policy_is_enforced(k8s: Standing, pods: Pods, held: bool, runtime: str | None) -> None:
    """In the steady state: the start race of kube-router is another matter, so the pod waits five seconds."""
    policy = {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": "fenced", "namespace": "default"},
        "spec": {
            "podSelector": {"matchLabels": {"role": "fenced"}},
            "policyTypes": ["Ingress", "Egress"],
            "egress": [
                {
                    "to": [{"podSelector": {"matchLabels": {"role": "proxy"}}}],
                    "ports": [{"protocol": "TCP", "port": 3128}],
                }
            ],
        },
    }
    k8s.cluster.apply(policy)
    try:
        proxy, other = pods.serve("proxy", 3128, role="proxy"), pods.serve("other", 3128, role="other")
        allowed, forbidden = f"{proxy}:3128", [f"{other}:3128", "93.184.216.34:8080", f"{DNS_SERVICE}:53"]
        script = f"import time; time.sleep(5)\n{REACH}"
        said = pods.run("fenced", "python3", "-c", script, allowed, *forbidden, runtime=runtime, role="fenced")
    finally:
        k8s.cluster.kubectl("delete", "networkpolicy", "fenced", check=True)
    seen = dict(line.split() for line in said.splitlines())
    assert seen == {allowed: "reached", **dict.fromkeys(forbidden, "not" if held else "reached")}
    assert bool(k8s.cluster.rig.arrivals(address="93.184.216.34")) != held


@any_enforcer
def test_the_api_server_tells_who_asked_for_what(k8s: Standing) -> None:
    k8s.cluster.kubectl("get", "configmap", "asked-for", "--as=system:serviceaccount:default:somebody")
    (asked,) = [each for each in k8s.cluster.requests() if each.name == "asked-for"]
    assert (asked.verb, asked.resource, asked.namespace, asked.status) == ("get", "configmaps", "default", 403)


def test_nothing_crosses_the_link_while_a_cluster_starts(k8s_built: None) -> None:
    del k8s_built
    with Rig() as rig:
        with Cluster(rig):
            pass
        assert [each for each in rig.packets() if each.kind != "icmp"] == []


def test_a_cluster_that_is_stopped_leaves_the_host_namespace_as_it_was(k8s_built: None, rig: Rig) -> None:
    del k8s_built
    links = ["ip", "-brief", "link"]
    before = rig.run(links).stdout
    with Cluster(rig, gvisor=False) as cluster:
        assert rig.run(links).stdout != before
        assert cluster.get("/apis/node.k8s.io/v1/runtimeclasses")["items"] == []
        assert "KUBE-ROUTER" in cluster.tool("nft", "list", "ruleset")
        cluster.tool("ipset", "create", "as-policies-make-them", "hash:ip")
    assert rig.run(links).stdout == before
    assert cluster.tool("nft", "list", "ruleset") == ""
    assert cluster.tool("ipset", "list", "-name") == ""
    assert not cgroups(cluster.cgroup)
    assert not [line for line in Path("/proc/mounts").read_text().splitlines() if str(cluster.directory) in line]


_OWNER = """
import sys
from tests.rig import Rig
from tests.rig.k8s import Cluster
with Rig() as rig, Cluster(rig) as cluster:
    print(rig.instance.name, cluster.cgroup, cluster.pid, flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT], ids=["kill -9", "Ctrl-C"])
def test_nothing_is_left_when_the_owner_dies(k8s_built: None, number: signal.Signals) -> None:
    del k8s_built
    with subprocess.Popen(
        [sys.executable, "-c", _OWNER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=ROOT,
    ) as owner:
        assert owner.stdout is not None
        name, cgroup, pid = owner.stdout.readline().split()
        assert cgroups(cgroup)
        owner.send_signal(number)
        owner.wait(timeout=60)
    places = [Path("/proc", pid), network.NETNS / f"{name}-host", network.Instance(name).directory]
    deadline = time.monotonic() + 20
    while left := [*(path for path in places if path.exists()), *cgroups(cgroup)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)
