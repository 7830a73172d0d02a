"""Owns what the host's kernel says of bridges, routes and their settings, and the settings that are ours to make.

Reads the network namespace of the calling thread; decides nothing.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path

from pyroute2 import IPRoute

_SYS = Path("/proc/sys/net")
_HARDENED = {
    # Without an address a bridge answers for none; this holds when somebody gives it one: only to who is on its net.
    "ipv4/conf/{}/arp_ignore": "2",
    "ipv4/conf/{}/rp_filter": "1",
    "ipv4/conf/{}/accept_redirects": "0",
    "ipv6/conf/{}/disable_ipv6": "1",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Bridge:
    """One bridge as the kernel shows it: the host's addresses on it, the links that are its ports, its settings."""

    addresses: tuple[str, ...]
    ports: tuple[str, ...]
    settings: tuple[tuple[str, str], ...]


def look(name: str) -> Bridge | None:
    """Look at a bridge; None when this network namespace has none of this name.

    Raises:
        OSError: the kernel does not say.
    """
    with IPRoute() as route:
        found = route.link_lookup(ifname=name)
        if not found:
            return None
        index = found[0]
        addresses = [message.get("IFA_ADDRESS") for message in route.get_addr(index=index)]
        ports = [message.get("IFLA_IFNAME") for message in route.get_links() if message.get("IFLA_MASTER") == index]
    settings = tuple((path.format(name), _read(path.format(name))) for path in _HARDENED)
    return Bridge(addresses=tuple(sorted(addresses)), ports=tuple(sorted(ports)), settings=settings)


def harden(name: str) -> None:
    """Make the settings of a bridge that keep the host from answering on it.

    Raises:
        OSError: a setting cannot be made.
    """
    for path, value in _HARDENED.items():
        file = _SYS / path.format(name)
        if file.exists():
            file.write_text(value)


def soft(bridge: Bridge) -> tuple[str, ...]:
    """Name the settings that are not as `harden` makes them; one that this kernel does not have is empty."""
    wanted = tuple(_HARDENED.values())
    return tuple(
        f"{path} is {value}"
        for (path, value), hard in zip(bridge.settings, wanted, strict=True)
        if value not in ("", hard)
    )


def has_ipv6() -> bool:
    """Say whether the kernel has IPv6 at all."""
    return (_SYS / "ipv6").is_dir()


def routed() -> tuple[str, ...]:
    """List every IPv4 range that has a route of its own: those are in use."""
    with IPRoute() as route:
        found = [
            f"{message.get('RTA_DST')}/{message['dst_len']}"
            for message in route.get_routes(family=socket.AF_INET)
            if message["dst_len"]
        ]
    return tuple(dict.fromkeys(found))


def _read(path: str) -> str:
    try:
        return (_SYS / path).read_text("ascii").strip()
    except OSError:
        return ""
