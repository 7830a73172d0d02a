"""What is read of the daemon's network namespace, and which targets a gate gets from it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from reconciler.backends import gate_targets, host_network
from reconciler.core.gate_report import Target, TargetKind

if TYPE_CHECKING:
    from pathlib import Path

    from tests.rig import Rig

FIB_TRIE = """\
Main:
  +-- 0.0.0.0/0 3 0 5
     |-- 0.0.0.0
        /0 universe UNICAST
     +-- 10.9.9.0/24 2 0 2
        +-- 10.9.9.0/31 1 0 0
           |-- 10.9.9.0
              /24 link UNICAST
           |-- 10.9.9.1
              /32 host LOCAL
        |-- 10.9.9.255
           /32 link BROADCAST
     +-- 127.0.0.0/8 2 0 2
           |-- 127.0.0.0
              /8 host LOCAL
           |-- 127.0.0.1
              /32 host LOCAL
Local:
           |-- 10.9.9.1
              /32 host LOCAL
"""
IF_INET6 = """\
00000000000000000000000000000001 01 80 10 80       lo
fe8000000000000000fc00fffe000001 02 40 20 80     eth0
26064700000000000000000000000001 02 40 00 80     eth0
"""


def test_only_addresses_of_the_host_itself_are_read_from_the_trie_once_each() -> None:
    assert host_network.parse_fib_trie(FIB_TRIE) == ("10.9.9.1", "127.0.0.1")


def test_a_link_local_address_carries_its_zone() -> None:
    assert host_network.parse_if_inet6(IF_INET6) == ("::1", "2606:4700::1", "fe80::fc:ff:fe00:1%eth0")


@pytest.mark.rig
def test_every_address_of_the_namespace_that_this_thread_is_in_is_found(in_rig: Rig) -> None:
    assert {*in_rig.host_addresses, "127.0.0.1", "::1"} <= set(host_network.addresses())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param("nameserver 192.0.2.1\n", ("192.0.2.1",), id="one"),
        pytest.param("nameserver fe80::1%eth0\nnameserver\t::1\n", ("fe80::1", "::1"), id="IPv6, zones dropped"),
        pytest.param("# nameserver 1.1.1.1\nsearch a\nnameserver x\nnameserver\n", (), id="nothing usable"),
    ],
)
def test_nameservers(tmp_path: Path, text: str, expected: tuple[str, ...]) -> None:
    (tmp_path / "resolv.conf").write_text(text)
    assert host_network.nameservers(tmp_path / "resolv.conf") == expected


def test_without_a_resolv_conf_there_is_no_nameserver(tmp_path: Path) -> None:
    assert host_network.nameservers(tmp_path / "none") == ()


def test_resolvers_are_those_of_settings_and_host_once_each() -> None:
    settings = ("192.0.2.1", "192.0.2.1:5353", "[2001:db8::1]:53", "2001:db8::2")
    assert host_network.resolvers(settings, ("192.0.2.1", "127.0.0.53")) == (
        ("192.0.2.1", 53),
        ("192.0.2.1", 5353),
        ("2001:db8::1", 53),
        ("2001:db8::2", 53),
        ("127.0.0.53", 53),
    )


def test_a_gate_tries_canaries_metadata_resolvers_neighbours_and_what_no_namespace_holds() -> None:
    canary = Target(name="canary", kind=TargetKind.TCP, address="10.9.9.1", port=4711, alive=True)
    found = gate_targets.targets(
        canaries=[canary],
        addresses=["127.0.0.1", "::1", "10.9.9.1", "fe80::1%eth0"],
        nameservers=[("192.0.2.1", 53), ("192.0.2.1", 53)],
        neighbours=[("10.0.0.2", 3128)],
    )
    names = [target.name for target in found]
    assert len(names) == len(set(names))
    assert found[0] is canary
    for name in (
        "metadata tcp:169.254.169.254:80",
        "metadata tcp:169.254.170.2:80",
        "metadata tcp:[fd00:ec2::254]:80",
        "dns dns-tcp:192.0.2.1:53",
        "dns dns-udp:192.0.2.1:53",
        "dns dns-udp:127.0.0.11:53",
        "neighbour tcp:10.0.0.2:3128",
        "echo icmp:10.9.9.1",
        "echo icmp-raw:fe80::1%eth0",
        "packet socket",
        "vsock socket",
    ):
        assert name in names
    assert "echo icmp:127.0.0.1" not in names


def test_the_answer_to_the_challenge_goes_in_only_as_its_digest() -> None:
    answer = gate_targets.answer(b"k" * 32, "00ff")
    question = gate_targets.Question(
        proxy="127.0.0.1:3128", challenge="00ff", answer=answer, targets=(), rounds=2, interval=0.1, budget=5.0
    )
    assert answer not in str(question.to_object())
    assert answer not in repr(question)
