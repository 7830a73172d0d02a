"""The gate, run where no fence is: it reaches what is there, says so, and exits 1; without its input it exits 2."""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import proxy
from reconciler.backends import canary, gate_targets, host_network
from reconciler.core.gate_report import Target, TargetKind
from tests.rig import addresses

if TYPE_CHECKING:
    from tests.rig import Rig

pytestmark = pytest.mark.rig
GATE = Path(proxy.__file__).parent / "gate.py"


def gate(rig: Rig, targets: tuple[Target, ...], interfaces: tuple[str, ...] = ("lo",)) -> tuple[int, dict[str, Any]]:
    """Run the gate in the rig's host namespace; its exit status and report."""
    question = gate_targets.Question(
        proxy="127.0.0.1:9",
        challenge="00" * 16,
        answer="11" * 32,
        targets=targets,
        rounds=1,
        interval=0.0,
        budget=1.0,
        interfaces=interfaces,
    )
    ended = rig.run(
        ["/usr/bin/python3", "-I", "-S", str(GATE)], stdin=json.dumps(question.to_object()).encode(), env={}
    )
    return ended.returncode, json.loads(ended.stdout)


def seen(report: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """What was seen at each target."""
    return {target["name"]: (target["verdict"], target["seen"]) for target in report["targets"]}


def test_every_live_canary_and_every_listener_beyond_is_reached(in_rig: Rig, tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with canary.open_canaries(tmp_path, host_network.addresses()) as opened:
        strong = tuple(target for target in opened.targets if target.kind is not TargetKind.UDP)
        beyond = (
            Target(name="metadata", kind=TargetKind.TCP, address="169.254.169.254", port=80, alive=False),
            Target(name="metadata6", kind=TargetKind.TCP, address="fd00:ec2::254", port=80, alive=False),
            Target(name="packet", kind=TargetKind.PACKET, address="", port=None, alive=False),
        )
        status, report = gate(in_rig, (*strong, *beyond))
        assert status == 1
        assert not report["passed"]
        found = seen(report)
        for target in (*strong, *beyond):
            assert found[target.name] == ("reached", "answered"), target
        assert opened.arrivals() == {target.name for target in strong}
    assert "anchor" in report["failures"]
    assert any(name.startswith("interface:") for name in report["failures"])


def test_datagrams_are_tried_only_when_nothing_else_was_reached(in_rig: Rig) -> None:
    resolver = addresses.RESOLVER_V4
    over_udp = Target(name="udp", kind=TargetKind.DNS_UDP, address=resolver, port=53, alive=False)
    over_tcp = Target(name="tcp", kind=TargetKind.DNS_TCP, address=resolver, port=53, alive=False)
    closed = Target(name="closed", kind=TargetKind.TCP, address=resolver, port=1, alive=False)
    _, report = gate(in_rig, (over_tcp, over_udp))
    assert seen(report)["tcp"] == ("reached", "answered")
    assert seen(report)["udp"] == ("unproven", "not_tried")
    assert [packet for packet in in_rig.packets() if packet.kind == "udp"] == []
    _, report = gate(in_rig, (closed, over_udp))
    assert seen(report)["closed"] == ("unproven", "ECONNREFUSED")
    assert seen(report)["udp"] == ("reached", "answered")


@pytest.mark.parametrize("kind", [TargetKind.ICMP, TargetKind.ICMP_RAW])
@pytest.mark.parametrize("address", [addresses.RESOLVER_V4, addresses.RESOLVER_V6])
def test_an_echo_that_is_answered_is_reached(in_rig: Rig, kind: TargetKind, address: str) -> None:
    target = Target(name="echo", kind=kind, address=address, port=None, alive=False)
    _, report = gate(in_rig, (target,))
    # Ping sockets are open only to the groups of a setting of the namespace's.
    expected = {("reached", "answered")} | ({("denied", "EACCES")} if kind is TargetKind.ICMP else set())
    assert seen(report)["echo"] in expected


def test_silence_is_what_is_seen_where_nothing_answers(in_rig: Rig) -> None:
    target = Target(name="hole", kind=TargetKind.TCP, address=addresses.BLACK_HOLE, port=443, alive=True)
    _, report = gate(in_rig, (target,))
    assert seen(report)["hole"] == ("denied", "silence")


def test_a_path_socket_anywhere_is_found(in_rig: Rig, tmp_path: Path) -> None:
    path = tmp_path / "service.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        _, report = gate(in_rig, ())
    assert any(name.startswith(("socket:", "more than")) for name in report["failures"])


@pytest.mark.parametrize("text", [b"", b"[]", b"{}", b"{", b'{"targets": 1}'], ids=ascii)
def test_without_usable_input_it_exits_2_and_reports_nothing(rig: Rig, text: bytes) -> None:
    ended = rig.run([sys.executable, "-I", "-S", str(GATE)], stdin=text, env={})
    assert ended.returncode == 2
    assert ended.stdout == b""
    assert b"ringfence-gate" in ended.stderr
