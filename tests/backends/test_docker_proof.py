"""What an engine and the kernel show: as it must be it passes, and each thing that is another is named."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest

from reconciler.backends import docker_proof as proof
from reconciler.backends.docker_place import Role
from reconciler.backends.links import Bridge
from tests.backends.test_docker_spec import GVISOR, WHERE, everything

AGENT = everything(WHERE)["agent"]
FENCE = everything(WHERE)["fence"]


def inspected(*, running: bool = True) -> dict[str, Any]:
    """What engine 29.8 shows of the agent, cut to what is read, with what it adds by itself."""
    host = copy.deepcopy(AGENT["HostConfig"]) | {
        "ContainerIDFile": "",
        "ConsoleSize": [0, 0],
        "DeviceRequests": None,
        "OomKillDisable": False,
        "CpuQuota": 0,
        "MaskedPaths": [*proof._MASKED, "/proc/asound"],
        "ReadonlyPaths": [*proof._READ_ONLY],
    }
    config = {key: copy.deepcopy(AGENT[key]) for key in proof._CONFIG if key in AGENT}
    config["Env"].append("PATH=/usr/bin")
    name = WHERE.name(Role.FENCE)
    return {
        "Image": "sha256:agent",
        "HostConfig": host,
        "Config": config,
        "State": {"Running": running},
        "ExecIDs": None,
        "Mounts": [
            {"Type": "volume", "Name": WHERE.name(Role.JOB), "Destination": "/job", "Driver": "local", "RW": False}
        ],
        "NetworkSettings": {
            "Ports": {},
            "Networks": {
                name: {
                    "IPAMConfig": {"IPv4Address": "10.202.0.11"},
                    "IPAddress": "10.202.0.11" if running else "",
                }
            },
        },
    }


@pytest.mark.parametrize("running", [True, False])
def test_an_agent_as_it_was_asked_for(running: bool) -> None:
    assert proof.container(WHERE, Role.AGENT, AGENT, inspected(running=running), running=running) == ()


def test_a_container_that_is_gone_is_named() -> None:
    assert proof.container(WHERE, Role.AGENT, AGENT, None, running=True) == ("agent: the container is gone",)


BINDS = ["/:/host"]


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        (("Image",), "sha256:other", "the image is"),
        (("HostConfig", "Privileged"), True, "Privileged"),
        (("HostConfig", "Binds"), BINDS, "Binds"),
        (("HostConfig", "CapAdd"), ["CAP_NET_ADMIN"], "CapAdd"),
        (("HostConfig", "CapDrop"), [], "CapDrop"),
        (("HostConfig", "SecurityOpt"), ["seccomp=unconfined"], "SecurityOpt"),
        (("HostConfig", "NetworkMode"), "host", "NetworkMode"),
        (("HostConfig", "PidMode"), "host", "PidMode"),
        (("HostConfig", "IpcMode"), "host", "IpcMode"),
        (("HostConfig", "UTSMode"), "host", "UTSMode"),
        (("HostConfig", "UsernsMode"), "host", "UsernsMode"),
        (("HostConfig", "PortBindings"), {"80/tcp": [{"HostPort": "80"}]}, "PortBindings"),
        (("HostConfig", "ExtraHosts"), ["host.docker.internal:host-gateway"], "ExtraHosts"),
        (("HostConfig", "Devices"), [{"PathOnHost": "/dev/kvm"}], "Devices"),
        (("HostConfig", "DeviceRequests"), [{"Driver": "nvidia"}], "DeviceRequests"),
        (("HostConfig", "OomKillDisable"), True, "OomKillDisable"),
        (("HostConfig", "SomethingNew"), "on", "SomethingNew"),
        (("HostConfig", "Memory"), 0, "Memory"),
        (("HostConfig", "MemorySwap"), -1, "MemorySwap"),
        (("HostConfig", "PidsLimit"), None, "PidsLimit"),
        (("HostConfig", "ReadonlyRootfs"), False, "ReadonlyRootfs"),
        (("HostConfig", "Runtime"), "runsc", "Runtime"),
        (("HostConfig", "Dns"), ["8.8.8.8"], "Dns"),
        (("HostConfig", "Sysctls"), {}, "Sysctls"),
        (("HostConfig", "RestartPolicy"), {"Name": "always"}, "RestartPolicy"),
        (("HostConfig", "MaskedPaths"), None, "masked"),
        (("HostConfig", "ReadonlyPaths"), [], "read-only"),
        (("Config", "User"), "0:0", "User"),
        (("Config", "Entrypoint"), ["sh"], "Entrypoint"),
        (("Config", "Env"), [], "Env"),
        (("Config", "Healthcheck"), {"Test": ["CMD", "x"]}, "Healthcheck"),
        (("Config", "Labels"), {}, "Labels"),
        (("Mounts",), [], "mounts"),
        (("Mounts",), [{"Type": "bind", "Source": "/run/docker.sock", "Destination": "/s", "RW": True}], "mounts"),
        (("NetworkSettings", "Networks"), {"bridge": {}}, "networks are bridge"),
        (("NetworkSettings", "Ports"), {"80/tcp": [{"HostIp": "0.0.0.0"}]}, "ports"),
        (("State", "Running"), False, "does not run"),
        (("ExecIDs",), ["abc"], "executes"),
    ],
    ids=lambda value: ".".join(value) if isinstance(value, tuple) else None,
)
def test_each_thing_that_is_another_is_named(path: tuple[str, ...], value: object, named: str) -> None:
    found = inspected()
    place = found
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    lines = proof.container(WHERE, Role.AGENT, AGENT, found, running=True)
    assert any(named in line for line in lines), lines
    assert all(line.startswith("agent: ") for line in lines)


def test_a_second_network_and_another_address_are_named() -> None:
    found = inspected()
    found["NetworkSettings"]["Networks"]["bridge"] = {"IPAddress": "172.17.0.2"}
    assert proof.container(WHERE, Role.AGENT, AGENT, found, running=True)
    found = inspected()
    found["NetworkSettings"]["Networks"][WHERE.name(Role.FENCE)]["IPAddress"] = "10.202.0.12"
    assert proof.container(WHERE, Role.AGENT, AGENT, found, running=True)


def test_no_value_of_the_environment_is_in_a_line() -> None:
    found = inspected()
    found["Config"]["Env"] = ["TOKEN=swordfish"]
    found["Config"]["Entrypoint"] = ["swordfish"]
    assert "swordfish" not in " ".join(proof.container(WHERE, Role.AGENT, AGENT, found, running=True))


def network_shown() -> dict[str, Any]:
    return {
        "Driver": "bridge",
        "Internal": True,
        "EnableIPv6": True,
        "Attachable": False,
        "Ingress": False,
        "Options": dict(FENCE["options"]),
        "Labels": dict(FENCE["labels"]),
        "IPAM": {"Config": [{"Subnet": "fd72:6e67:0aca:0008::/64"}, {"Subnet": "10.202.0.8/29"}]},
        "Containers": {"a": {"Name": WHERE.name(Role.PROXY)}},
    }


MEMBERS = (Role.PROXY, Role.AGENT)


def test_a_network_as_it_was_asked_for() -> None:
    assert proof.network(WHERE, Role.FENCE, FENCE, network_shown(), MEMBERS) == ()


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("Internal", False, "Internal"),
        ("Driver", "macvlan", "Driver"),
        ("EnableIPv6", False, "EnableIPv6"),
        ("Attachable", True, "Attachable"),
        ("Options", {}, "Options"),
        ("Labels", {}, "labels"),
        ("IPAM", {"Config": [{"Subnet": "10.0.0.0/8"}]}, "ranges"),
        ("Containers", {"a": {"Name": "stranger"}}, "stranger is on it"),
    ],
)
def test_each_thing_of_a_network_that_is_another_is_named(key: str, value: object, named: str) -> None:
    lines = proof.network(WHERE, Role.FENCE, FENCE, network_shown() | {key: value}, MEMBERS)
    assert any(named in line for line in lines), lines


HARD = (("ipv4/conf/x/arp_ignore", "2"),)


@pytest.mark.parametrize(
    ("found", "soft", "named"),
    [
        pytest.param(None, (), "not on this host", id="a bridge elsewhere"),
        pytest.param(Bridge(addresses=("10.202.0.9",), ports=(), settings=HARD), (), "10.202.0.9", id="an address"),
        pytest.param(Bridge(addresses=("fe80::1",), ports=(), settings=HARD), (), "fe80::1", id="a link-local address"),
        pytest.param(Bridge(addresses=(), ports=("a", "b", "c"), settings=HARD), (), "3 ports", id="a third member"),
        pytest.param(Bridge(addresses=(), ports=(), settings=HARD), ("arp_ignore is 0",), "arp_ignore", id="soft"),
    ],
)
def test_a_bridge_that_is_not_as_it_must_be(found: Bridge | None, soft: tuple[str, ...], named: str) -> None:
    assert any(named in line for line in proof.bridge("rf0", found, soft, most_ports=2))


def test_a_bridge_without_the_host_on_it() -> None:
    assert proof.bridge("rf0", Bridge(addresses=(), ports=("a", "b"), settings=HARD), (), most_ports=2) == ()


STATUS = {
    "CapInh": "0000000000000000",
    "CapPrm": "0000000000000000",
    "CapEff": "0000000000000000",
    "CapBnd": "0000000000000000",
    "CapAmb": "0000000000000000",
    "Uid": "1000\t1000\t1000\t1000",
    "Gid": "1000\t1000\t1000\t1000",
    "NoNewPrivs": "1",
    "Seccomp": "2",
}


OBSERVED = proof.Observed(network=7, interfaces=("lo", "eth0"), status=STATUS)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({}, None),
        ({"network": 1}, "host's network namespace"),
        ({"interfaces": ("lo", "eth0", "eth1")}, "eth1"),
        ({"status": STATUS | {"CapEff": "0000000000003000"}}, "CapEff"),
        ({"status": STATUS | {"Uid": "0\t0\t0\t0"}}, "Uid"),
        ({"status": STATUS | {"NoNewPrivs": "0"}}, "no_new_privs"),
        ({"status": STATUS | {"Seccomp": "0"}}, "filter"),
    ],
)
def test_a_first_process(changed: dict[str, Any], named: str | None) -> None:
    lines = proof.process(WHERE, Role.AGENT, dataclasses.replace(OBSERVED, **changed), own_network=1, user=1000)
    assert bool(lines) == (named is not None)
    assert named is None or named in lines[0]


@pytest.mark.parametrize(
    ("where", "kernel", "holds"),
    [
        (WHERE, "Linux version 6.18.0 (x) #1 SMP", True),
        (WHERE, "Linux version 4.19.0-gvisor #1 SMP", False),
        (GVISOR, "Linux version 4.19.0-gvisor #1 SMP", True),
        (GVISOR, "Linux version 4.4.0 #1 SMP Sun Jan 10 15:06:54 PST 2016", True),
        (GVISOR, "Linux version 6.18.0 (x) #1 SMP", False),
        (GVISOR, None, False),
    ],
)
def test_the_kernel_that_the_gate_saw_is_that_of_the_runtime(where: Any, kernel: object, holds: bool) -> None:
    assert (proof.runtime(where, kernel) == ()) is holds
