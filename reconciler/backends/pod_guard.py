"""Owns the node guard, as text and as the kernel must show it back: tables that fence agents' pods in on their node.

Pure; loads nothing and knows no cluster. It closes what network policies leave open: a node's own processes, IPv6
link-local addresses, ICMP, and the second before a policy is in force. Its sets `agents` and `links` shut a pod, `ways`
opens its proxy again.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from reconciler.backends import nft_table
from reconciler.backends.nft import PROXY_PORT
from reconciler.backends.nft_table import Table

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

DAEMON: Final = "ringfence_pods"
"""The tables of a daemon that runs on the node."""
DAEMON_SET: Final = "ringfence_node"
"""Those of the DaemonSet: its own, so that neither of the two removes what the other put."""
_MAC: Final = re.compile(r"[0-9a-f]{2}(:[0-9a-f]{2}){5}\Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fenced:
    """One agent's pod: its IPv4 address, its link's MAC address, and its proxy's IPv4 address and port.

    Without `mac` it is not known on a bridge, without `proxy` it reaches nothing.
    """

    agent: str
    mac: str | None
    proxy: str | None
    port: int = PROXY_PORT

    def __post_init__(self) -> None:
        """Raise ValueError where a part is not what it says: all of them become text that the kernel's tool reads."""
        for address in (self.agent, self.proxy):
            if address is not None and str(ipaddress.IPv4Address(address)) != address:
                raise ValueError(f"{address} is not a plain IPv4 address")
        if self.mac is not None and not _MAC.match(self.mac):
            raise ValueError(f"{self.mac} is not a plain MAC address")
        if not 0 < self.port < 1 << 16:
            raise ValueError(f"{self.port} is no port")


def inet(name: str) -> Table:
    """Give the table that every packet passes which the node routes or takes itself, before connections are tracked."""
    return Table(
        family="inet",
        name=name,
        priority=-250,
        sets={
            "agents": ("ipv4_addr",),
            "links": ("ether_addr",),
            "ways": ("ipv4_addr", "ipv4_addr", "inet_service"),
        },
        chains={
            "prerouting": (
                ((("ip saddr . ip daddr . tcp dport", "@ways"),), "accept"),
                ((("ip saddr", "@agents"),), "drop"),
                ((("ip daddr . ip saddr . tcp sport", "@ways"),), "accept"),
                ((("ip daddr", "@agents"),), "drop"),
                # Its link has an IPv6 address by itself, whatever the cluster's family. Its MAC it cannot change.
                ((("ether saddr", "@links"), ("meta nfproto", "ipv6")), "drop"),
            )
        },
    )


def bridge(name: str) -> Table:
    """Give the table that frames between the ports of one bridge pass, which routing never sees."""
    return Table(
        family="bridge",
        name=name,
        priority=-310,
        sets={"links": ("ether_addr",), "ways": ("ether_addr", "ipv4_addr", "ipv4_addr", "inet_service")},
        chains={
            "prerouting": (
                ((("ether saddr . ip saddr . ip daddr . tcp dport", "@ways"),), "accept"),
                ((("ether saddr", "@links"), ("ether type", "arp")), "accept"),
                ((("ether saddr", "@links"),), "drop"),
            )
        },
    )


def tables(name: str) -> tuple[Table, Table]:
    """Give both."""
    return inet(name), bridge(name)


@dataclass(frozen=True, slots=True)
class Held:
    """What one set of a table holds, or must hold, as `nft -j` shows it."""

    table: Table
    name: str
    elements: frozenset[tuple[object, ...]]

    @property
    def texts(self) -> list[str]:
        """Give each element as nft reads it."""
        return sorted(" . ".join(map(str, each)) for each in self.elements)


def held(name: str, pods: Iterable[Fenced]) -> tuple[Held, ...]:
    """Give what each set must hold for these pods."""
    pods = tuple(pods)
    routed, bridged = tables(name)
    shut = [pod for pod in pods if pod.mac is not None]
    open_ = [pod for pod in pods if pod.proxy is not None]
    bridged_ways = frozenset((pod.mac, pod.agent, pod.proxy, pod.port) for pod in open_ if pod.mac is not None)
    return (
        Held(routed, "agents", frozenset((pod.agent,) for pod in pods)),
        Held(routed, "links", frozenset((pod.mac,) for pod in shut)),
        Held(routed, "ways", frozenset((pod.agent, pod.proxy, pod.port) for pod in open_)),
        Held(bridged, "links", frozenset((pod.mac,) for pod in shut)),
        Held(bridged, "ways", bridged_ways),
    )


def put(name: str, pods: Iterable[Fenced], seconds: int) -> str:
    """Give the text that puts pods in for so many seconds from now, whether they are there already or not."""
    lines = []
    for one in held(name, pods):
        for element in one.texts:
            # Adding what is there keeps its old end on older kernels.
            lines += [
                f"add element {one.table} {one.name} {{ {element} }}",
                f"delete element {one.table} {one.name} {{ {element} }}",
                f"add element {one.table} {one.name} {{ {element} timeout {seconds}s }}",
            ]
    return "\n".join([*lines, ""])


def take(gone: Iterable[Held]) -> str:
    """Give the text that takes elements out, whether they are there or not; empty when there is nothing to take."""
    lines = []
    for one in gone:
        for element in one.texts:
            lines += [
                f"add element {one.table} {one.name} {{ {element} }}",
                f"delete element {one.table} {one.name} {{ {element} }}",
            ]
    return "\n".join([*lines, ""]) if lines else ""


def missing(wanted: Iterable[Held], listed: Mapping[str, object]) -> tuple[str, ...]:
    """Name what the kernel's sets lack; `listed` is the listing of each table, by its family."""
    return tuple(
        f"{one.table} {one.name} lacks {' '.join(map(str, element))}"
        for one in wanted
        for element in sorted(one.elements - nft_table.elements(listed.get(one.table.family), one.name), key=str)
    )


def stale(wanted: Iterable[Held], listed: Mapping[str, object]) -> tuple[Held, ...]:
    """Give what the kernel's sets hold beyond what is wanted."""
    return tuple(
        Held(one.table, one.name, nft_table.elements(listed.get(one.table.family), one.name) - one.elements)
        for one in wanted
    )
