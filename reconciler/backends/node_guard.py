"""Owns the node guard in the kernel of this node: its tables, who is in their sets, and which MAC address a pod has.

Works in the network namespace of the calling thread, which must be the node's. Asks no cluster who its pods are.
"""

from __future__ import annotations

import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING

from pyroute2 import IPRoute, NetlinkError

from reconciler.backends import guard, nft_table, pod_guard
from reconciler.backends.guard import GuardFailed

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from reconciler.backends.pod_guard import Fenced

_BRIDGED = Path("/proc/sys/net/bridge/bridge-nf-call-iptables")
_NTF_USE = 1
"""Flag of RTM_NEWNEIGH (linux/neighbour.h): look the neighbour up as if a packet were for it; none is sent but ARP."""
_LOOK_S = 0.02


def ensure(name: str = pod_guard.DAEMON) -> GuardFailed | None:
    """Have the tables in place, what their sets hold untouched where they are; None when they are."""
    if (failed := unbridged()) is not None:
        return failed
    tables = pod_guard.tables(name)
    return None if guard.check(tables) is None else guard.load(tables)


def unbridged() -> GuardFailed | None:
    """Say why network policies do not hold between pods of one bridge here; None when they do or there is none."""
    try:
        passed = _BRIDGED.read_text("ascii").strip()
    except OSError:
        # Without br_netfilter the setting is not there; then no policy of a bridged cluster would hold either.
        return GuardFailed(("br_netfilter is not loaded: modprobe br_netfilter",)) if _bridges() else None
    if passed != "1" and _bridges():
        return GuardFailed(
            ("pods of one bridge pass network policies by: sysctl -w net.bridge.bridge-nf-call-iptables=1",)
        )
    return None


def put(pods: Iterable[Fenced], *, seconds: int, name: str = pod_guard.DAEMON) -> GuardFailed | None:
    """Fence pods in for so many seconds, at most, and read it back; the tables must be there."""
    pods = tuple(pods)
    failed = guard.change(pod_guard.put(name, pods, seconds))
    if failed is None and (lines := missing(pods, name=name)):
        return GuardFailed(lines)
    return failed


def take(pods: Iterable[Fenced], *, name: str = pod_guard.DAEMON) -> GuardFailed | None:
    """Let pods out that are gone. Idempotent; without tables there is nothing to do."""
    if not isinstance(guard.listed(pod_guard.inet(name)), dict):
        return None
    return guard.change(pod_guard.take(pod_guard.held(name, pods)))


def only(pods: Sequence[Fenced], *, seconds: int, name: str) -> GuardFailed | None:
    """Fence exactly these pods in; what is not theirs is taken out after that, so that none is open in between.

    Who is in already keeps the end that was given then.
    """
    wanted = pod_guard.held(name, pods)
    if (failed := ensure(name)) is not None:
        return failed
    found = _listed(name)
    if isinstance(found, GuardFailed):
        return found
    if pod_guard.missing(wanted, found) and (failed := put(pods, seconds=seconds, name=name)) is not None:
        return failed
    gone = pod_guard.take(pod_guard.stale(wanted, found))
    return guard.change(gone) if gone else None


def missing(pods: Iterable[Fenced], *, name: str = pod_guard.DAEMON) -> tuple[str, ...]:
    """Name what is not as it must be for these pods to be fenced in: of the tables, then of what their sets hold."""
    found = _listed(name)
    if isinstance(found, GuardFailed):
        return found.lines
    lines = [line for table in pod_guard.tables(name) for line in nft_table.differences(table, found[table.family])]
    return tuple(lines) or pod_guard.missing(pod_guard.held(name, pods), found)


def _listed(name: str) -> dict[str, object] | GuardFailed:
    shown: dict[str, object] = {}
    for table in pod_guard.tables(name):
        found = guard.listed(table)
        if isinstance(found, GuardFailed):
            return found
        shown[table.family] = found
    return shown


def mac_of(address: str, *, seconds: float = 1.0) -> str | None:
    """Ask the link that an IPv4 address of this node's pods is on for its MAC; None when it is on none, or silent.

    Raises:
        OSError: the kernel does not say.
    """
    until = time.monotonic() + seconds
    with IPRoute() as route:
        link = _link(route, address)
        while link is not None:
            for message in route.get_neighbours(family=socket.AF_INET, dst=address, ifindex=link):
                found = message.get("NDA_LLADDR")
                if isinstance(found, str):
                    return found
            if time.monotonic() > until:
                return None
            route.neigh("replace", dst=address, ifindex=link, flags=_NTF_USE)
            time.sleep(_LOOK_S)
    return None


def _link(route: IPRoute, address: str) -> int | None:
    """Give the index of the link that an address is on; None when the way to it leads over another host."""
    try:
        found = list(route.route("get", dst=address))
    except NetlinkError:
        return None
    if not found or found[0].get("RTA_GATEWAY") is not None:
        return None
    index = found[0].get("RTA_OIF")
    return index if isinstance(index, int) else None


def _bridges() -> bool:
    with IPRoute() as route:
        return any(message.get_nested("IFLA_LINKINFO", "IFLA_INFO_KIND") == "bridge" for message in route.get_links())
