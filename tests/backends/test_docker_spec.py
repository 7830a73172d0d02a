"""What one run is made of on a Docker engine, as data: golden, and what must never be in it."""

from __future__ import annotations

import dataclasses
import ipaddress
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reconciler.backends import docker_filter, docker_place
from reconciler.backends import docker_spec as spec
from reconciler.backends.docker_filter import Filters
from reconciler.backends.docker_place import Role, Slices, Where
from reconciler.backends.docker_versions import hazards
from tests.backends.world import launch

GOLDEN = Path(__file__).parents[1] / "data" / "docker_spec.json"
SLICES = Slices(fence=ipaddress.IPv4Network("10.202.0.8/29"), egress=ipaddress.IPv4Network("10.202.0.16/29"))
WHERE = Where(
    run="20260102T030405-0a1b2c3d",
    owner="host-01234567",
    agent="helper",
    expires=1_800_000_000,
    slices=SLICES,
    runtime="runc",
    ipv6=True,
    filters=Filters(sandbox='{"defaultAction":"SCMP_ACT_ERRNO"}', proxy='{"defaultAction":"SCMP_ACT_KILL"}'),
)
GVISOR = dataclasses.replace(WHERE, runtime="runsc")
CURRENT, OLD = hazards((29, 8, 0)), hazards((20, 10, 24))
JOB = launch("sh", "-c", "true", environment={"TOKEN": "t", "HTTP_PROXY": "http://elsewhere:1"}, run=WHERE.run)


def everything(where: Where) -> dict[str, spec.Plain]:
    """All objects of a run by name."""
    return {
        "fence": spec.fence_network(where, CURRENT),
        "fence on an old engine": spec.fence_network(where, OLD),
        "egress": spec.egress_network(where),
        "proxy": spec.proxy_container(where, "sha256:proxy"),
        "gate": spec.gate_container(where, "sha256:proxy", JOB),
        "agent": spec.agent_container(where, "sha256:agent", JOB, ["/data"]),
    }


@pytest.mark.parametrize("where", [WHERE, GVISOR], ids=["under runc", "under gVisor"])
def test_what_is_created_is_what_was_looked_at_when_it_was_written(where: Where) -> None:
    """A change here is a change of the fence: look at each line of the difference before the file is written anew."""
    kept = json.loads(GOLDEN.read_text("utf-8"))
    assert everything(where) == kept[where.runtime]


CONTAINERS = [
    pytest.param(made, id=f"{name}, {where.runtime}")
    for where in (WHERE, GVISOR)
    for name, made in everything(where).items()
    if "HostConfig" in made
]


@pytest.mark.parametrize("made", CONTAINERS)
def test_every_container_is_shut_in(made: spec.Plain) -> None:
    host = made["HostConfig"]
    assert host["CapDrop"] == ["ALL"]
    assert host["SecurityOpt"][0] == "no-new-privileges"
    assert "seccomp=unconfined" not in host["SecurityOpt"]
    assert host["ReadonlyRootfs"] is True
    assert host["Memory"] == host["MemorySwap"] > 0
    assert host["PidsLimit"] > 0
    assert host["NanoCpus"] > 0
    assert host["RestartPolicy"]["Name"] == "no"
    assert host["LogConfig"]["Config"].keys() == {"max-size", "max-file"}
    (nameserver,) = host["Dns"]
    assert nameserver == ("192.0.2.1" if made["Labels"]["ringfence.role"] == "proxy" else "100::1")
    assert host["Sysctls"]["net.ipv4.ip_forward"] == "0"
    assert made["User"].split(":")[0] not in ("", "0", "root")
    for name in ("Binds", "Devices", "PortBindings", "ExtraHosts", "CapAdd", "VolumesFrom", "Privileged"):
        assert not host[name], name
    for name in ("PidMode", "UTSMode", "UsernsMode"):
        assert host[name] == "", name
    assert host["IpcMode"] == "private"


def test_open_files_are_bounded_and_the_bound_is_not_for_the_command_to_raise() -> None:
    for made in everything(WHERE).values():
        if "HostConfig" in made:
            assert {"Name": "nofile", "Soft": 1024, "Hard": 4096} in made["HostConfig"]["Ulimits"]


def families(text: str) -> list[object]:
    """The argument lists under which a filter lets `socket` through."""
    rows = json.loads(text)["syscalls"]
    return [row.get("args") for row in rows if "socket" in row["names"] and row["action"] == "SCMP_ACT_ALLOW"]


def test_a_sandbox_has_sockets_of_three_families_and_its_proxy_may_ask_for_addresses() -> None:
    allowed = [[{"index": 0, "value": family, "op": "SCMP_CMP_EQ"}] for family in (1, 2, 10)]
    filters = docker_filter.read()
    assert families(filters.sandbox) == allowed
    route = [{"index": 0, "value": 16, "op": "SCMP_CMP_EQ"}, {"index": 2, "value": 0, "op": "SCMP_CMP_EQ"}]
    assert families(filters.proxy) == [*allowed, route]
    options = {
        name: made["HostConfig"]["SecurityOpt"][1:] for name, made in everything(WHERE).items() if "User" in made
    }
    assert options["agent"] == options["gate"] != options["proxy"]


def test_values_of_the_environment_are_the_agents_alone() -> None:
    assert "TOKEN=t" in everything(WHERE)["agent"]["Env"]
    for name, made in everything(WHERE).items():
        assert name == "agent" or "TOKEN" not in json.dumps(made), name


def test_a_job_cannot_name_another_proxy() -> None:
    given_to_agent = dict(line.split("=", 1) for line in everything(WHERE)["agent"]["Env"])
    assert {given_to_agent[name] for name in ("HTTP_PROXY", "https_proxy", "ALL_PROXY")} == {"http://10.202.0.10:3128"}
    assert given_to_agent["NO_PROXY"] == given_to_agent["no_proxy"] == ""


def test_the_gate_is_the_agents_twin() -> None:
    made = everything(GVISOR)
    gate, agent = made["gate"], made["agent"]
    assert gate["NetworkingConfig"] == agent["NetworkingConfig"]
    assert gate["User"] == agent["User"]
    same = agent["HostConfig"].keys() - {"Mounts", "Tmpfs", "Init"}
    assert {key: gate["HostConfig"][key] for key in same} == {key: agent["HostConfig"][key] for key in same}


def test_the_agent_has_an_init_under_runc_and_none_under_gvisor() -> None:
    assert everything(WHERE)["agent"]["HostConfig"]["Init"] is True
    assert everything(GVISOR)["agent"]["HostConfig"]["Init"] is False


def test_under_gvisor_there_is_room_for_its_own_threads() -> None:
    small = dataclasses.replace(JOB, limits=dataclasses.replace(JOB.limits, pids=1))
    containers = (
        spec.agent_container(GVISOR, "sha256:agent", small, ()),
        spec.gate_container(GVISOR, "sha256:proxy", small),
        spec.proxy_container(GVISOR, "sha256:proxy"),
    )
    assert [made["HostConfig"]["PidsLimit"] for made in containers if made["HostConfig"]["PidsLimit"] <= 128] == []


def test_volumes_of_the_image_are_bounded_and_in_memory() -> None:
    tmpfs = everything(WHERE)["agent"]["HostConfig"]["Tmpfs"]
    assert tmpfs.keys() == {"/tmp", "/data"}  # noqa: S108 - the sandbox's own
    assert all("size=" in options for options in tmpfs.values())


def test_without_ipv6_in_the_kernel_nothing_asks_for_it() -> None:
    made = everything(dataclasses.replace(WHERE, ipv6=False))
    assert made["fence"]["enable_ipv6"] is False
    assert "ipv6" not in json.dumps(made["agent"]["HostConfig"]["Sysctls"])
    assert not [key for key in made["fence"]["options"] if "ipv6" in key]


def test_bridges_are_named_for_the_guard_and_fit_into_a_links_name() -> None:
    assert WHERE.fence_link.startswith("rf")
    assert WHERE.egress_link.startswith("rx")
    assert len(WHERE.fence_link) == len(WHERE.egress_link) == 10


NETWORKS = st.integers(0, 63).map(lambda number: f"10.202.{number // 32}.{number % 32 * 8}/29")
TAKEN = st.lists(
    st.one_of(
        NETWORKS,
        st.sampled_from(
            ["10.202.0.0/24", "10.202.0.4/30", "10.202.1.255/32", "10.0.0.0/16", "fd00::/64", "0.0.0.0/32"]
        ),
    ),
    max_size=70,
)


@given(TAKEN, st.integers(1, 3))
def test_no_allocated_range_touches_a_taken_one_or_another(taken: list[str], count: int) -> None:
    pool = ipaddress.IPv4Network("10.202.0.0/23")
    found = docker_place.allocate(str(pool), taken, count)
    used = [network for text in taken if (network := ipaddress.ip_network(text)).version == 4]
    for index, network in enumerate(found):
        assert network.prefixlen == 29
        assert network.subnet_of(pool)
        assert not any(network.overlaps(other) for other in (*used, *found[:index]))
    if len(found) < count:
        free = [each for each in pool.subnets(new_prefix=29) if not any(each.overlaps(other) for other in used)]
        assert len(free) == len(found)


def test_a_used_up_pool_gives_fewer() -> None:
    assert docker_place.allocate("10.202.0.0/29", (), 2) == (ipaddress.IPv4Network("10.202.0.0/29"),)
    assert docker_place.allocate("10.202.0.0/29", ("10.202.0.0/24",), 1) == ()


def test_who_is_where() -> None:
    assert (SLICES.gateway, SLICES.proxy, SLICES.inside, SLICES.outside) == (
        "10.202.0.9",
        "10.202.0.10",
        "10.202.0.11",
        "10.202.0.18",
    )
    assert ipaddress.IPv6Network(SLICES.fence6).is_private


def test_every_object_carries_the_labels_that_the_reaper_goes_by() -> None:
    for name, made in everything(WHERE).items():
        labels = made.get("labels") or made["Labels"]
        assert labels["ringfence.owner"] == WHERE.owner, name
        assert labels["ringfence.run"] == WHERE.run, name
        assert labels["ringfence.expires"] == "1800000000", name
        assert labels["ringfence.role"] in set(Role), name
