"""What a daemon does that is on a node: which node that is, its listeners there, and whom it fences in."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio
import pytest

from reconciler.backends import host_network, k8s_node, node_guard
from reconciler.backends.k8s_surroundings import Node
from reconciler.core.gate_report import TargetKind

if TYPE_CHECKING:
    from pathlib import Path


def node(name: str, *addresses: str) -> Node:
    return Node(name=name, hostname=name, addresses=addresses, versions={})


@pytest.mark.parametrize(
    ("addresses", "found"),
    [
        pytest.param({"a": ("192.0.2.1",), "b": ("192.0.2.2", "10.0.0.2")}, "b", id="the one with an address of ours"),
        pytest.param({"a": ("192.0.2.1",)}, None, id="none of them"),
        pytest.param({}, None, id="a cluster without nodes"),
    ],
)
def test_the_node_that_the_daemon_is_on(
    monkeypatch: pytest.MonkeyPatch, addresses: dict[str, tuple[str, ...]], found: str | None
) -> None:
    monkeypatch.setattr(host_network, "addresses", lambda: ("127.0.0.1", "10.0.0.2", "::1", "fe80::1%eth0"))
    assert k8s_node.standing_on([node(name, *given) for name, given in addresses.items()]) == found


def test_listeners_are_at_node_ports_and_those_to_settle_by_count_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(host_network, "addresses", lambda: ("127.0.0.1", "127.0.0.2"))
    tmp_path.chmod(0o755)
    with k8s_node.listeners(tmp_path) as opened:
        ports = {target.port for target in opened.targets if target.kind in (TargetKind.TCP, TargetKind.UDP)}
        assert ports
        assert all(port is not None and 30000 <= port <= 32767 for port in ports)
        assert all(target.alive for target in opened.canaries.targets)
        assert opened.canaries.arrivals() == frozenset()
        assert opened.settling == (), "loopback is nobody's way in"


def test_a_pod_whose_link_does_not_say_its_mac_is_not_half_fenced(monkeypatch: pytest.MonkeyPatch) -> None:
    put: list[object] = []
    monkeypatch.setattr(node_guard, "mac_of", lambda _address: None)
    monkeypatch.setattr(node_guard, "put", lambda pods, **_named: put.append(pods))
    fence = k8s_node.Fence()
    (line,) = anyio.run(lambda: fence.put(agent="10.244.0.9", proxy="10.244.0.8", lasts=60))
    assert "MAC address" in line
    assert (put, fence.pods) == ([], ())
