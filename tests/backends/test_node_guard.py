"""The node guard on a bridge as a cluster has it: what an agent's pod reaches without it, and with it."""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from reconciler.backends import guard, node_guard, pod_guard
from reconciler.backends.guard import GuardFailed
from reconciler.backends.pod_guard import Fenced
from tests.backends.world import inside
from tests.rig import network

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.rig import Rig

GATEWAY, AGENT, PROXY, OTHER = "10.244.7.1", "10.244.7.5", "10.244.7.6", "10.244.7.7"
NODE_PORT, API_PORT = 30500, 6443
SILENCE_S = 0.2


def sh(*argv: str) -> str:
    return subprocess.run(
        [network.program(argv[0]), *argv[1:]], text=True, capture_output=True, check=True, timeout=20
    ).stdout


@dataclass(frozen=True, slots=True)
class Pod:
    """A network namespace on the bridge, held by a process that sleeps."""

    holder: subprocess.Popen[bytes]
    address: str

    @property
    def namespace(self) -> Path:
        return Path(f"/proc/{self.holder.pid}/ns/net")

    @property
    def mac(self) -> str:
        with inside(self.namespace):
            return _link_address("eth0")

    @property
    def link_local(self) -> str:
        with inside(self.namespace):
            return _link_local("eth0")


def _link_address(link: str) -> str:
    return next(line.split()[1] for line in sh("ip", "link", "show", link).splitlines() if "link/ether" in line)


def _link_local(link: str) -> str:
    found = sh("ip", "-6", "addr", "show", "dev", link, "scope", "link")
    return next(line.split()[1].partition("/")[0] for line in found.splitlines() if "inet6" in line)


@dataclass(frozen=True, slots=True)
class Node:
    """A node with three pods on its bridge, and what listens there."""

    agent: Pod
    proxy: Pod
    other: Pod
    listeners: dict[str, socket.socket]

    @property
    def fenced(self) -> Fenced:
        return Fenced(agent=AGENT, mac=self.agent.mac, proxy=PROXY)

    def attempts(self) -> dict[str, bool]:
        """Try everything from the agent's pod; True means that something arrived, which the other side saw itself."""
        self._empty()
        local = _link_local("rfcni0")
        tries = {
            "proxy": ("tcp", PROXY, 3128),
            "proxy canary": ("tcp", PROXY, 3129),
            "node port": ("tcp", GATEWAY, NODE_PORT),
            "node port by another address": ("tcp", self_address(), NODE_PORT),
            "node, UDP": ("udp", GATEWAY, NODE_PORT),
            "node by link-local": ("tcp6", local, API_PORT),
            "pod": ("tcp", OTHER, 80),
            "pod by link-local": ("tcp6", self.other.link_local, 80),
            "ping of the node": ("icmp", GATEWAY, 0),
            "ping of a pod": ("icmp", OTHER, 0),
        }
        with inside(self.agent.namespace):
            said = {name: _try(*each) for name, each in tries.items()}
        arrived = {name: _arrived(listener) for name, listener in self.listeners.items()}
        for name, came in arrived.items():
            assert came == said[name] or name == "node, UDP", (name, came, said[name])
        return {**said, "node, UDP": arrived["node, UDP"]}

    def _empty(self) -> None:
        for listener in self.listeners.values():
            while _arrived(listener, wait=0.0):
                pass


def self_address() -> str:
    return "198.51.100.77"


def _arrived(listener: socket.socket, wait: float = 0.05) -> bool:
    if not select.select([listener], [], [], wait)[0]:
        return False
    if listener.type == socket.SOCK_DGRAM:
        listener.recv(64)
    else:
        listener.accept()[0].close()
    return True


def _try(kind: str, address: str, port: int) -> bool:
    if kind == "icmp":
        return _ping(address)
    if kind == "udp":
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
            one.sendto(b"x", (address, port))
        return True
    family = socket.AF_INET6 if kind == "tcp6" else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as one:
        one.settimeout(SILENCE_S)
        try:
            one.connect((address, port, 0, socket.if_nametoindex("eth0")) if kind == "tcp6" else (address, port))
        except OSError:
            return False
    return True


def _ping(address: str) -> bool:
    body = struct.pack("!BBHHH", 8, 0, 0, 7, 1)
    checksum = 0xFFFF - sum(struct.unpack("!4H", body))
    with socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP) as one:
        one.sendto(struct.pack("!BBHHH", 8, 0, checksum, 7, 1), (address, 0))
        until = time.monotonic() + SILENCE_S
        while (left := until - time.monotonic()) > 0:
            if select.select([one], [], [], left)[0] and one.recv(256)[20] == 0:
                return True
    return False


@pytest.fixture
def node(rig: Rig) -> Iterator[Node]:
    with contextlib.ExitStack() as stack:
        stack.enter_context(inside(network.NETNS / rig.host))
        if not Path("/proc/sys/net/bridge").is_dir():
            pytest.skip("the kernel has no br_netfilter (modprobe br_netfilter)")
        sh("ip", "link", "add", "rfcni0", "type", "bridge")
        stack.callback(sh, "ip", "link", "del", "rfcni0")
        sh("ip", "addr", "add", f"{GATEWAY}/24", "dev", "rfcni0")
        sh("ip", "addr", "add", f"{self_address()}/32", "dev", "lo")
        stack.callback(sh, "ip", "addr", "del", f"{self_address()}/32", "dev", "lo")
        sh("ip", "link", "set", "rfcni0", "up")
        sh("sysctl", "-qw", "net.bridge.bridge-nf-call-iptables=1")
        agent, proxy, other = (_pod(stack, f"rfv-{address}", address) for address in (AGENT, PROXY, OTHER))
        listeners: dict[str, socket.socket] = {}

        def listen(name: str, family: int, kind: int, address: tuple[str, int]) -> None:
            one = stack.enter_context(socket.socket(family, kind))
            one.bind(address)
            if kind == socket.SOCK_STREAM:
                one.listen()
            listeners[name] = one

        v4, v6, tcp = socket.AF_INET, socket.AF_INET6, socket.SOCK_STREAM
        listen("node port", v4, tcp, (GATEWAY, NODE_PORT))
        listen("node port by another address", v4, tcp, (self_address(), NODE_PORT))
        listen("node, UDP", v4, socket.SOCK_DGRAM, ("0.0.0.0", NODE_PORT))
        listen("node by link-local", v6, tcp, ("::", API_PORT))
        with inside(proxy.namespace):
            listen("proxy", v4, tcp, ("0.0.0.0", 3128))
            listen("proxy canary", v4, tcp, ("0.0.0.0", 3129))
        with inside(other.namespace):
            listen("pod", v4, tcp, ("0.0.0.0", 80))
            # IPV6_V6ONLY, because the port is taken on IPv4.
            one = stack.enter_context(socket.socket(v6, tcp))
            one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            one.bind(("::", 80))
            one.listen()
            listeners["pod by link-local"] = one
        stack.callback(_unload)
        yield Node(agent, proxy, other, listeners)


def _unload() -> None:
    for name in (pod_guard.DAEMON, pod_guard.DAEMON_SET):
        for table in pod_guard.tables(name):
            if isinstance(guard.listed(table), dict):
                assert guard.change(f"delete table {table}") is None


def _pod(stack: contextlib.ExitStack, link: str, address: str) -> Pod:
    holder = subprocess.Popen([network.program("unshare"), "--net", network.program("sleep"), "infinity"])

    def end() -> None:
        holder.kill()
        holder.wait()

    stack.callback(end)
    pod = Pod(holder, address)
    ours = Path("/proc/thread-self/ns/net").stat().st_ino
    until = time.monotonic() + 5
    while pod.namespace.stat().st_ino == ours:
        assert time.monotonic() < until
        time.sleep(0.005)
    sh("ip", "link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", str(holder.pid))
    # A namespace takes its links along only after its last process has gone.
    stack.callback(sh, "ip", "link", "del", link)
    sh("ip", "link", "set", link, "master", "rfcni0", "up")
    with inside(pod.namespace):
        sh("sysctl", "-qw", "net.ipv6.conf.all.accept_dad=0", "net.ipv6.conf.default.accept_dad=0")
        sh("sysctl", "-qw", "net.ipv6.conf.eth0.accept_dad=0")
        sh("ip", "link", "set", "lo", "up")
        sh("ip", "link", "set", "eth0", "up")
        sh("ip", "addr", "add", f"{address}/24", "dev", "eth0")
        sh("ip", "route", "add", "default", "via", GATEWAY)
    return pod


@pytest.mark.rig
def test_without_it_everything_is_reachable_and_with_it_the_proxy_alone(node: Node) -> None:
    open_ = node.attempts()
    assert all(open_.values()), open_
    assert node_guard.ensure() is None
    # Tables without anybody in their sets change nothing for anybody.
    assert node.attempts() == open_
    assert node_guard.put([node.fenced], seconds=60) is None
    assert node.attempts() == {name: name == "proxy" for name in open_}
    assert node_guard.take([node.fenced]) is None
    assert node.attempts() == open_


@pytest.mark.rig
def test_without_its_bridge_table_frames_between_pods_pass_by_link_local_addresses(node: Node) -> None:
    assert node_guard.ensure() is None
    assert node_guard.put([node.fenced], seconds=60) is None
    # Where br_netfilter shows bridged IPv6 to the routed table, that drops it too; not every node has it so.
    sh("sysctl", "-qw", "net.bridge.bridge-nf-call-ip6tables=0")
    try:
        assert [name for name, came in node.attempts().items() if came] == ["proxy"]
        assert guard.change(f"delete table {pod_guard.bridge(pod_guard.DAEMON)}") is None
        assert [name for name, came in node.attempts().items() if came] == ["proxy", "pod by link-local"]
    finally:
        sh("sysctl", "-qw", "net.bridge.bridge-nf-call-ip6tables=1")


@pytest.mark.rig
def test_without_its_routed_table_the_bridge_alone_shuts_the_pod_off(node: Node) -> None:
    assert node_guard.ensure() is None
    assert node_guard.put([node.fenced], seconds=60) is None
    assert guard.change(f"delete table {pod_guard.inet(pod_guard.DAEMON)}") is None
    assert [name for name, came in node.attempts().items() if came] == ["proxy"]


@pytest.mark.rig
def test_an_agent_whose_proxy_is_not_known_yet_reaches_nothing(node: Node) -> None:
    assert node_guard.ensure() is None
    assert node_guard.put([Fenced(agent=AGENT, mac=node.agent.mac, proxy=None)], seconds=60) is None
    assert not any(node.attempts().values())


@pytest.mark.rig
def test_nothing_comes_in_to_an_agent_but_its_proxys_answers(node: Node) -> None:
    with inside(node.agent.namespace):
        listener = socket.create_server((AGENT, 7000))
    with listener:
        with inside(node.other.namespace):
            assert _try("tcp", AGENT, 7000)
        assert node_guard.ensure() is None
        assert node_guard.put([node.fenced], seconds=60) is None
        for pod in (node.other, node.proxy):
            with inside(pod.namespace):
                assert not _try("tcp", AGENT, 7000)


@pytest.mark.rig
def test_the_links_address_of_a_pod_is_asked_of_the_pod(node: Node) -> None:
    assert node_guard.mac_of(AGENT) == node.agent.mac
    assert node_guard.mac_of("10.244.7.99", seconds=0.1) is None
    assert node_guard.mac_of("203.0.113.9", seconds=0.1) is None


@pytest.mark.rig
def test_whoever_is_put_in_again_stays_longer_and_ends_by_itself(node: Node) -> None:
    assert node_guard.ensure() is None
    assert node_guard.put([node.fenced], seconds=60) is None
    assert node_guard.put([node.fenced], seconds=1) is None
    assert node_guard.missing([node.fenced]) == ()
    time.sleep(1.5)
    assert any("agents lacks" in line for line in node_guard.missing([node.fenced]))
    assert all(node.attempts().values())


@pytest.mark.rig
def test_what_somebody_flushed_changed_or_took_out_is_told(node: Node) -> None:
    table = pod_guard.inet(pod_guard.DAEMON)
    assert node_guard.missing([node.fenced]) != ()
    for change in (
        f"flush set {table} agents",
        f"flush set {table} ways",
        f"flush set {pod_guard.bridge(pod_guard.DAEMON)} links",
        f"insert rule {table} prerouting accept",
        f"flush chain {table} prerouting",
        f"delete table {table}",
        "flush ruleset",
    ):
        assert node_guard.ensure() is None
        assert node_guard.put([node.fenced], seconds=60) is None
        assert node_guard.missing([node.fenced]) == (), change
        assert guard.change(change) is None
        assert node_guard.missing([node.fenced]) != (), change


@pytest.mark.rig
def test_only_takes_out_who_is_gone_and_leaves_another_guards_tables_alone(node: Node) -> None:
    gone = Fenced(agent=OTHER, mac=node.other.mac, proxy=PROXY)
    assert node_guard.ensure() is None
    assert node_guard.put([gone], seconds=60) is None
    assert node_guard.only([gone, node.fenced], seconds=60, name=pod_guard.DAEMON_SET) is None
    assert node_guard.only([node.fenced], seconds=60, name=pod_guard.DAEMON_SET) is None
    assert node_guard.missing([node.fenced], name=pod_guard.DAEMON_SET) == ()
    assert node_guard.missing([gone], name=pod_guard.DAEMON_SET) != ()
    assert node_guard.missing([gone]) == ()


@pytest.mark.rig
@pytest.mark.usefixtures("node")
def test_a_bridge_whose_frames_pass_policies_by_is_refused() -> None:
    sh("sysctl", "-qw", "net.bridge.bridge-nf-call-iptables=0")
    try:
        failed = node_guard.ensure()
        assert isinstance(failed, GuardFailed)
        assert "bridge-nf-call-iptables=1" in failed.lines[0]
    finally:
        sh("sysctl", "-qw", "net.bridge.bridge-nf-call-iptables=1")


@pytest.mark.parametrize(
    "parts",
    [
        pytest.param({"agent": "10.0.0.1 } ; flush ruleset"}, id="an address with more behind it"),
        pytest.param({"agent": "010.0.0.1"}, id="an address with a leading zero"),
        pytest.param({"proxy": "fd00::1"}, id="an IPv6 address"),
        pytest.param({"mac": "aa:bb:cc:dd:ee:ff }"}, id="a MAC address with more behind it"),
        pytest.param({"port": 0}, id="no port"),
    ],
)
def test_what_becomes_text_for_nft_is_nothing_else(parts: dict[str, object]) -> None:
    whole: dict[str, object] = {"agent": "10.0.0.1", "mac": "aa:bb:cc:dd:ee:ff", "proxy": "10.0.0.2", **parts}
    with pytest.raises(ValueError, match=r"plain|no port|Octet|Only|Expected|zeros"):
        Fenced(**whole)  # type: ignore[arg-type]  # wrong on purpose
