"""What a container reaches on each kind of network, measured: the reasons for how the Docker fence is built."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from tests.rig import Rig
from tests.rig.docker import Engine, Firewall, Runtime, Which, networks
from tests.rig.docker.fixtures import Images, Setup
from tests.rig.docker.networks import (
    INHIBITED,
    INTERNAL,
    ISOLATED,
    ISOLATED_BOTH,
    ISOLATED_WITH_SIX,
    NETWORKS,
    ORDINARY,
    Network,
    Reach,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

pytestmark = [pytest.mark.docker, pytest.mark.rig]

NONE: frozenset[str] = frozenset()
EVERYONE = frozenset({"internet", "metadata", "neighbour"})


def reach(
    *, bridge: set[str], link: set[str], elsewhere: bool = False, ping: bool = False, bound: set[str] | None = None
) -> Reach:
    """A network that leads to the host at most."""
    return Reach(
        bridge=frozenset(bridge),
        link=frozenset(link),
        elsewhere=elsewhere,
        ping=ping,
        outside=NONE,
        lookups=0,
        bound=frozenset(bound or ()),
    )


def ordinary(runtime: Runtime) -> Reach:
    return Reach(
        bridge=frozenset({"v4", "ll"}),
        link=frozenset({"v4"}),
        elsewhere=True,
        ping=True,
        outside=EVERYONE,
        lookups=2 if runtime is Runtime.RUNC else 0,  # gVisor has a loopback of its own, without dockerd's 127.0.0.11
        bound=frozenset({"tcp", "udp"}),
    )


def current(runtime: Runtime, *, rp_filter: int) -> Mapping[Network, Reach]:
    """No default route, so another address of the host is reached by SO_BINDTODEVICE alone, which gVisor confines."""
    runc = runtime is Runtime.RUNC
    datagrams = {"udp"} if runc and rp_filter == 0 else set()
    return {
        ORDINARY: ordinary(runtime),
        INTERNAL: reach(bridge={"v4", "ll"}, link={"v4"}, ping=True, bound={"tcp", "udp"} if runc else set()),
        INHIBITED: reach(bridge={"ll"}, link=set(), bound=datagrams),
        ISOLATED: reach(bridge={"ll"}, link=set(), bound=datagrams),
        ISOLATED_WITH_SIX: reach(bridge={"v6", "ll"}, link={"v6", "ll"}, bound=datagrams),
        ISOLATED_BOTH: reach(bridge=set(), link=set(), bound=datagrams),
    }


def debian(runtime: Runtime) -> Mapping[Network, Reach]:
    """A default route to the gateway on every network, and options of a later engine taken without a word."""
    internal = reach(bridge={"v4", "ll"}, link={"v4"}, elsewhere=True, ping=True, bound={"tcp", "udp"})
    six = reach(bridge={"v4", "v6", "ll"}, link={"v4", "v6", "ll"}, elsewhere=True, ping=True, bound={"tcp", "udp"})
    return {
        ORDINARY: ordinary(runtime),
        INTERNAL: internal,
        INHIBITED: reach(bridge={"ll"}, link=set()),
        ISOLATED: internal,
        ISOLATED_WITH_SIX: six,
        ISOLATED_BOTH: six,
    }


@pytest.mark.parametrize(
    "docker_engine",
    [
        Setup(),
        Setup(firewall=Firewall.NFTABLES),
        Setup(rp_filter=2),
        Setup(which=Which.DEBIAN),
    ],
    indirect=True,
    ids=str,
)
def test_each_kind_of_network_leads_where_it_was_seen_to_lead(docker_engine: Engine) -> None:
    seen = networks.measure(docker_engine)
    sys.stdout.write(networks.table(seen) + "\n")
    for runtime in Runtime:
        expected = (
            debian(runtime)
            if docker_engine.which is Which.DEBIAN
            else current(runtime, rp_filter=docker_engine.rp_filter)
        )
        assert {each.name: seen[runtime, each] for each in NETWORKS} == {
            each.name: expected[each] for each in NETWORKS
        }, runtime


@pytest.mark.parametrize("which", Which, ids=str)
def test_a_name_leaves_an_internal_network_of_debians_engine_when_the_host_has_a_resolver_of_its_own(
    which: Which, docker_images: Images
) -> None:
    """CVE-2024-29018: dockerd asks a loopback resolver in the host's namespace, whatever the container's network."""
    with Rig() as rig, Engine(rig, which=which, local_resolver=True) as engine:
        engine.load(docker_images.agent.archive)
        engine.docker("network", "create", *INTERNAL.options, "fence", check=True)

        def look_up(name: str, *options: str) -> list[str]:
            script = f"import socket; print(socket.getaddrinfo({name!r}, 80))"
            run = ("run", "--rm", "--network", "fence", *options, docker_images.agent.name)
            engine.docker(*run, "python3", "-c", script)
            return [query.name for query in rig.queries(name)]

        leaks = which is Which.DEBIAN
        assert bool(look_up("leak.example.com")) == leaks
        assert look_up("closed.example.com", "--dns", "192.0.2.1", "--dns-option", "timeout:1") == []
