"""Each hazard of a Docker host, with its remedy taken out: the launch is refused, and says what is open.

A remedy whose absence nobody notices is no remedy. What the gate can see, the gate must name.
"""

from __future__ import annotations

import dataclasses
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from reconciler.backends import docker_gate, docker_spec, gate_targets, guard, links, nft
from tests.backends.docker_world import OWNER, Kind, beside
from tests.backends.mutations import (
    CURRENT,
    DEBIAN,
    blind,
    no_guard,
    on,
    plain_internal,
    reached,
    try_launch,
    weaken,
    without,
)
from tests.backends.world import Recorder, built, launch
from tests.rig.docker import Runtime, Which
from tests.rig.docker.fixtures import Setup

if TYPE_CHECKING:
    from collections.abc import Iterator

    from reconciler.backends.docker_place import Where
    from reconciler.backends.docker_versions import Hazards
    from reconciler.core.gate_report import Target
    from tests.backends.docker_world import DockerOnRig, Engines

pytestmark = [pytest.mark.docker, pytest.mark.rig]
FORWARDING = Setup(which=Which.DEBIAN, local_resolver=True)


@on(CURRENT, DEBIAN, runtimes=tuple(Runtime))
def test_a_plain_internal_network_is_seen_by_the_gate_alone(
    docker: DockerOnRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_guard(docker)
    blind(monkeypatch)
    without(monkeypatch, "fence_network", plain_internal)
    found = try_launch(docker)
    assert [name for name in reached(found) if name.startswith(("canary tcp:", "gateway tcp:"))]
    assert found.report is not None
    assert found.report.arrivals


@on(CURRENT, DEBIAN)
def test_a_plain_internal_network_is_seen_on_the_bridge(docker: DockerOnRig, monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, "fence_network", plain_internal)
    found = try_launch(docker)
    assert found.code == "fence_failed"
    assert "has the host's address 10.202." in found.message


@on(CURRENT)
def test_an_option_that_an_engine_ignores_is_seen_on_the_bridge(
    docker: DockerOnRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def misspell(spec: dict[str, Any]) -> None:
        spec["options"]["com.docker.network.bridge.gateway_mode_ipv5"] = spec["options"].pop(
            "com.docker.network.bridge.gateway_mode_ipv4"
        )

    without(monkeypatch, "fence_network", misspell)
    assert "has the host's address" in try_launch(docker).message


def believing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Believe an engine that takes our options, whatever its version says."""
    real = docker_spec.fence_network

    def isolated(where: Where, hazards: Hazards) -> Any:
        return real(where, dataclasses.replace(hazards, isolated=True))

    monkeypatch.setattr(docker_spec, "fence_network", isolated)


@on(DEBIAN)
def test_an_old_engine_that_is_believed_is_seen_on_the_bridge(
    docker: DockerOnRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    believing(monkeypatch)
    found = try_launch(docker)
    assert found.code == "fence_failed"
    assert "has the host's address" in found.message


@on(DEBIAN)
def test_an_old_engine_that_is_believed_is_seen_by_the_gate_alone(
    docker: DockerOnRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_guard(docker)
    blind(monkeypatch)
    believing(monkeypatch)
    assert [name for name in reached(try_launch(docker)) if name.startswith("canary tcp:")]


def bridge_keeps_ipv6(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take out every remedy against IPv6 on the link: the bridge's mode, what we set on it, the containers' sysctls."""

    def change(spec: dict[str, Any]) -> None:
        spec["options"].pop("com.docker.network.bridge.gateway_mode_ipv6")

    def with_ipv6(spec: dict[str, Any]) -> None:
        sysctls = spec["HostConfig"]["Sysctls"]
        spec["HostConfig"]["Sysctls"] = {key: value for key, value in sysctls.items() if "ipv6" not in key}

    without(monkeypatch, "fence_network", change)
    without(monkeypatch, "gate_container", with_ipv6)
    without(monkeypatch, "proxy_container", with_ipv6)
    monkeypatch.setattr(links, "harden", lambda _name: None)


@on(CURRENT)
def test_ipv6_on_the_link_is_seen_by_the_gate_alone(docker: DockerOnRig, monkeypatch: pytest.MonkeyPatch) -> None:
    no_guard(docker)
    blind(monkeypatch)
    bridge_keeps_ipv6(monkeypatch)
    # An address is nobody's while the kernel looks whether somebody else has it: longer than a gate takes.
    docker.engine.tool("sysctl", "-qw", "net.ipv6.conf.default.accept_dad=0")
    try:
        found = try_launch(docker)
    finally:
        docker.engine.tool("sysctl", "-qw", "net.ipv6.conf.default.accept_dad=1")
    assert [name for name in reached(found) if name.startswith("canary tcp:[fe80::") and "%rf" in name]


@on(CURRENT)
def test_ipv6_on_the_link_is_seen_on_the_bridge(docker: DockerOnRig, monkeypatch: pytest.MonkeyPatch) -> None:
    bridge_keeps_ipv6(monkeypatch)
    found = try_launch(docker)
    assert "disable_ipv6 is 0" in found.message
    assert "has the host's address f" in found.message


@on(CURRENT, DEBIAN)
def test_the_guard_alone_holds_a_plain_internal_network(docker: DockerOnRig, monkeypatch: pytest.MonkeyPatch) -> None:
    assert guard.load() is None
    blind(monkeypatch)
    without(monkeypatch, "fence_network", plain_internal)

    async def main() -> None:
        async with docker.launch(launch("true"), Recorder()) as sandbox:
            assert built(sandbox).report.arrivals == ()

    anyio.run(main)


@on(CURRENT)
def test_datagrams_from_a_socket_that_is_bound_to_the_link_are_seen_by_the_gate_alone(
    docker: DockerOnRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fence is as it must be, but for the settings of its bridge and the guard: one way is open then."""
    no_guard(docker)
    blind(monkeypatch)
    assert [name for name in reached(try_launch(docker)) if name.startswith("canary udp:") and " from 10.202." in name]


@on(CURRENT, DEBIAN)
def test_connections_from_a_socket_that_is_bound_to_the_link_are_seen_by_it_alone(
    docker: DockerOnRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_guard(docker)
    blind(monkeypatch)
    without(monkeypatch, "fence_network", plain_internal)
    real = gate_targets.targets

    def bound_alone(*, canaries: tuple[Target, ...], **given: Any) -> tuple[Target, ...]:
        del given
        return tuple(
            each
            for each in real(canaries=canaries, addresses=(), nameservers=(), neighbours=())
            if "bound" in each.kind
        )

    monkeypatch.setattr(gate_targets, "targets", bound_alone)
    assert [name for name in reached(try_launch(docker)) if name.startswith("canary tcp-bound:")]


def no_filter_on_bridged_frames(docker: DockerOnRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have bridged frames pass by every firewall, as where br_netfilter is not loaded; an engine switches it on."""
    real = docker_gate.question

    def off(*given: Any, **named: Any) -> Any:
        if Path("/proc/sys/net/bridge").is_dir():
            docker.engine.tool("sysctl", "-qw", "net.bridge.bridge-nf-call-iptables=0")
        return real(*given, **named)

    # Once all networks are there.
    monkeypatch.setattr(docker_gate, "question", off)


@on(CURRENT)
def test_a_proxy_that_listens_on_its_outer_address_too_is_seen_by_the_gate(
    docker: DockerOnRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def everywhere(spec: dict[str, Any]) -> None:
        spec["Cmd"] = ["--listen", "0.0.0.0:3128"]

    blind(monkeypatch)
    no_filter_on_bridged_frames(docker, monkeypatch)
    without(monkeypatch, "proxy_container", everywhere)
    assert [name for name in reached(try_launch(docker)) if name.startswith("neighbour tcp-bound:")]


KNOCK = """
import socket, sys, time
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as knocking:
    for _ in range(60):
        try:
            knocking.sendto(b"through", (sys.argv[1], int(sys.argv[2])))
        except OSError:
            pass
        time.sleep(0.05)
"""


@on(CURRENT)
@pytest.mark.parametrize("forwards", [False, True], ids=["it does not", "with the remedy taken out it does"])
def test_a_proxy_forwards_nothing_for_whoever_has_a_route_through_it(
    docker: DockerOnRig, monkeypatch: pytest.MonkeyPatch, forwards: bool
) -> None:
    """A command cannot make itself that route; an engine may."""
    if forwards:
        without(monkeypatch, "proxy_container", weaken("Sysctls", {"net.ipv4.ip_forward": "1"}))
    blind(monkeypatch)
    no_guard(docker)
    no_filter_on_bridged_frames(docker, monkeypatch)
    # The gate rightly refuses what this test needs open: it is not asked.
    monkeypatch.setattr(docker_gate, "_at", lambda _address, _canaries: ())
    monkeypatch.setattr(gate_targets, "targets", lambda **_given: ())
    engine = docker.engine

    async def main(address: str, port: int) -> None:
        job = launch("python3", "-c", KNOCK, address, str(port))
        async with docker.launch(job, Recorder()) as sandbox:
            live = built(sandbox)
            await live.start()
            proxy = str(live.report.anchor["address"]).rpartition(":")[0]
            pid = engine.get(f"/containers/ringfence-{job.run}-agent/json")["State"]["Pid"]
            network = f"/proc/{engine.pid}/root/proc/{pid}/ns/net"
            route = ["nsenter", f"--net={network}", "--", "ip", "route", "add", "default", "via", proxy]
            await anyio.run_process(route)
            await live.wait()

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as listener:
        listener.bind(("0.0.0.0", 0))
        listener.setblocking(False)
        anyio.run(main, "172.17.0.1", listener.getsockname()[1])
        try:
            arrived = listener.recvfrom(64)
        except BlockingIOError:
            arrived = None
    assert (arrived is not None) is forwards


@pytest.fixture
def forwarding(docker_engines: Engines, monkeypatch: pytest.MonkeyPatch) -> Iterator[DockerOnRig]:
    """A backend on an old engine whose host names a resolver on its own loopback."""
    with beside(docker_engines.engine(FORWARDING), monkeypatch):
        yield docker_engines.backend(Kind(setup=FORWARDING, runtime=Runtime.RUNC), OWNER)


def test_a_resolver_that_forwards_is_named_by_the_gate(
    forwarding: DockerOnRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def as_the_host_has_it(spec: dict[str, Any]) -> None:
        # A search list of our own has the engine forget where the host's servers are, which closes it as well.
        spec["HostConfig"] |= {"Dns": [], "DnsSearch": []}

    without(monkeypatch, "gate_container", as_the_host_has_it)
    found = try_launch(forwarding)
    assert found.code == "gate_failed"
    assert "dns dns-relay:127.0.0.11:53" in found.message


def test_a_resolver_that_would_forward_has_nobody_to_ask(forwarding: DockerOnRig) -> None:
    forwarding.engine.rig.clear()

    async def main() -> None:
        async with forwarding.launch(launch("true"), Recorder()) as sandbox:
            built(sandbox)

    anyio.run(main)
    assert forwarding.engine.rig.queries("gate.ringfence.invalid") == []


ASK = """
import socket
query = bytes.fromhex("4711010000010000000000000470617374076578616d706c6503636f6d0000010001")
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
    asking.sendto(query, ("127.0.0.11", 53))
"""


@on(DEBIAN)
@pytest.mark.parametrize("waits", [False, True], ids=["it does not", "with the remedy taken out it does"])
def test_nobody_waits_for_the_server_that_is_nowhere(
    docker: DockerOnRig, monkeypatch: pytest.MonkeyPatch, waits: bool
) -> None:
    """An old engine tells of a container's end once its resolver has answered, or has given up after 4 s."""
    if waits:
        without(monkeypatch, "agent_container", weaken("Dns", [nft.NOWHERE]))

    async def main() -> float:
        async with docker.launch(launch("python3", "-c", ASK), Recorder()) as sandbox:
            await built(sandbox).start()
            began = anyio.current_time()
            assert (await built(sandbox).wait()).status == 0
            return anyio.current_time() - began

    assert (anyio.run(main) > 3) is waits


@on(CURRENT, DEBIAN)
def test_soft_settings_of_the_bridge_are_seen(docker: DockerOnRig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "harden", lambda _name: None)
    assert "arp_ignore is 0" in try_launch(docker).message


@on(CURRENT, DEBIAN, runtimes=tuple(Runtime))
def test_two_sandboxes_do_not_reach_each_others_proxy(docker: DockerOnRig) -> None:
    async def main() -> None:
        one, other = launch("sleep", "30"), launch("sleep", "30")
        async with docker.launch(one, Recorder()) as first:
            await built(first).start()
            proxy = built(first).report.anchor["address"]
            assert isinstance(proxy, str)
            neighbour = (proxy.rpartition(":")[0], 3128)
            async with docker.launch(dataclasses.replace(other, neighbours=(neighbour,)), Recorder()) as second:
                report = built(second).report
                (seen,) = [each for each in report.targets if each.name == f"neighbour tcp:{neighbour[0]}:3128"]
                assert seen.verdict != "reached"
                assert report.anchor["address"] != proxy

    anyio.run(main)
