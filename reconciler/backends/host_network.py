"""Owns what is read of the network namespace that the daemon is in: its addresses and its nameservers.

Decides nothing and sends nothing.
"""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

_DNS_PORT = 53
_V6_LINK_LOCAL = ipaddress.IPv6Network("fe80::/10")


def addresses() -> tuple[str, ...]:
    """Read every local address, IPv4 then IPv6, loopback included; a link-local one carries its zone (`fe80::1%eth0`).

    Raises:
        OSError: /proc is not what Linux makes it.
    """
    v4 = Path("/proc/thread-self/net/fib_trie").read_text("ascii")
    v6 = Path("/proc/thread-self/net/if_inet6")
    # The file is missing where IPv6 is off.
    return (*parse_fib_trie(v4), *(parse_if_inet6(v6.read_text("ascii")) if v6.exists() else ()))


def parse_fib_trie(text: str) -> tuple[str, ...]:
    """Read the addresses marked `/32 host LOCAL` below their `|--` line; broadcast and network ones are others."""
    found: dict[str, None] = {}
    last = ""
    for line in text.splitlines():
        words = line.split()
        if len(words) == 2 and words[0] == "|--":  # noqa: PLR2004 - mark and address
            last = words[1]
        elif words[:3] == ["/32", "host", "LOCAL"]:
            found[last] = None
    return tuple(sorted(found, key=ipaddress.IPv4Address))


def parse_if_inet6(text: str) -> tuple[str, ...]:
    """Read the lines `address index prefix scope flags name`."""
    found = []
    for line in text.splitlines():
        digits, _, _, _, _, name = line.split()
        address = ipaddress.IPv6Address(int(digits, 16))
        found.append((address, f"{address}%{name}" if address in _V6_LINK_LOCAL else str(address)))
    return tuple(text for _, text in sorted(found))


def nameservers(path: Path = Path("/etc/resolv.conf")) -> tuple[str, ...]:
    """Read the `nameserver` addresses of a resolv.conf(5); none where there is no such file."""
    try:
        text = path.read_text("utf-8", "replace")
    except OSError:
        return ()
    found = []
    for line in text.splitlines():
        words = line.split()
        if len(words) > 1 and words[0] == "nameserver":
            try:
                found.append(str(ipaddress.ip_address(words[1].partition("%")[0])))
            except ValueError:
                continue
    return tuple(found)


def resolvers(settings: Sequence[str], found: Sequence[str] | None = None) -> tuple[tuple[str, int], ...]:
    """Give address and port of every resolver that this host uses: those of its settings and of resolv.conf.

    A setting is an address, or `address:port` with `[...]` round an IPv6 one.
    """
    endpoints = [_endpoint(text) for text in settings]
    endpoints += [(address, _DNS_PORT) for address in (nameservers() if found is None else found)]
    return tuple(dict.fromkeys(endpoints))


def _endpoint(text: str) -> tuple[str, int]:
    try:
        return str(ipaddress.ip_address(text)), _DNS_PORT
    except ValueError:
        address, _, port = text.rpartition(":")
        return str(ipaddress.ip_address(address.strip("[]"))), int(port)
