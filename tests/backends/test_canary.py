"""Canaries are alive at every address of the host, and count what comes to them."""

from __future__ import annotations

import socket
import time
from typing import TYPE_CHECKING

import pytest

from reconciler.backends import canary, host_network
from reconciler.core.gate_report import TargetKind

if TYPE_CHECKING:
    from pathlib import Path

    from reconciler.backends.canary import Canaries
    from reconciler.core.gate_report import Target
    from tests.rig import Rig


def meet(target: Target, listeners: Canaries) -> None:
    """Connect or send to one canary, as a leaking sandbox would."""
    match target.kind:
        case TargetKind.UNIX_ABSTRACT | TargetKind.UNIX_PATH:
            listener = next(one for one, name in listeners.listeners.items() if name == target.name)
            with socket.socket(socket.AF_UNIX) as visitor:
                visitor.connect(listener.getsockname())
        case _:
            address, _, zone = target.address.partition("%")
            v6 = ":" in address
            kind = socket.SOCK_DGRAM if target.kind is TargetKind.UDP else socket.SOCK_STREAM
            with socket.socket(socket.AF_INET6 if v6 else socket.AF_INET, kind) as visitor:
                where = (address, target.port, 0, socket.if_nametoindex(zone) if zone else 0)
                visitor.connect(where if v6 else where[:2])
                if target.kind is TargetKind.UDP:
                    visitor.send(b"x")


@pytest.mark.rig
def test_every_address_has_canaries_that_are_alive_and_count(in_rig: Rig, tmp_path: Path) -> None:
    addresses = host_network.addresses()
    assert set(in_rig.host_addresses) <= set(addresses)
    with canary.open_canaries(tmp_path, addresses) as opened:
        assert [target.name for target in opened.targets if not target.alive] == []
        assert len(opened.targets) == 2 * len(addresses) + 2
        assert opened.arrivals() == frozenset()
        for target in opened.targets:
            meet(target, opened)
            arrived = opened.arrivals()
            assert len(arrived) == 1
            assert target.name in arrived or target.kind is TargetKind.UDP
        assert opened.arrivals() == frozenset()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.rig
def test_an_arrival_by_a_link_that_is_gone_counts(in_rig: Rig, tmp_path: Path) -> None:
    """Links of other sandboxes come and go while canaries are met."""
    assert in_rig.run(["ip", "link", "add", "passing", "type", "veth", "peer", "name", "other-end"]).returncode == 0
    try:
        for end in ("passing", "other-end"):
            assert in_rig.run(["ip", "link", "set", end, "up"]).returncode == 0
        deadline = time.monotonic() + 10
        # Until an address is proven unique it is nobody's.
        while "tentative" in in_rig.run(["ip", "-6", "address", "show", "dev", "passing"]).stdout.decode():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        (address,) = [address for address in host_network.addresses() if address.endswith("%passing")]
        with canary.open_canaries(tmp_path, [address]) as opened:
            (target,) = [each for each in opened.targets if each.kind is TargetKind.TCP]
            assert target.alive
            index = socket.if_nametoindex("passing")
            meet(target, opened)
            assert in_rig.run(["ip", "link", "delete", "passing"]).returncode == 0
            assert opened.arrivals() == {target.name.replace("%passing", f"%{index}")}
    finally:
        in_rig.run(["ip", "link", "delete", "passing"])


def test_a_path_longer_than_an_address_is_no_hindrance(tmp_path: Path) -> None:
    deep = tmp_path / ("x" * 120)
    deep.mkdir()
    with canary.open_canaries(deep, ["127.0.0.1"]) as opened:
        path = opened.targets[-1]
        assert (path.kind, path.address, path.alive) == (TargetKind.UNIX_PATH, str(deep / "canary.sock"), True)


def test_a_host_without_ipv6_has_none_there(tmp_path: Path) -> None:
    with canary.open_canaries(tmp_path, ["127.0.0.1"]) as opened:
        assert {target.kind for target in opened.targets if ":" in target.address and target.port} == set()
