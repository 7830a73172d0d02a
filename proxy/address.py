"""Owns what an IP address is and whether it is public, by our own literal table; knows no policy and opens nothing.

`ipaddress.is_global` is not used: on 3.11 to 3.13 it says True for multicast, `fec0::/10`, NAT64 of 169.254.169.254
and 6to4 of 127.0.0.1.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from socket import AF_INET, AF_INET6, inet_ntop, inet_pton

Address = bytes
"""An address in network order: 4 bytes or 16."""

IPV4_LENGTH = 4
IPV6_LENGTH = 16


class Kind(StrEnum):
    """What an address is for. Only `PUBLIC` may ever be dialled."""

    PUBLIC = "public"
    UNSPECIFIED = "unspecified"
    PRIVATE = "private"
    SHARED = "shared"
    LOOPBACK = "loopback"
    LINK_LOCAL = "link-local"
    PLATFORM = "cloud platform"
    PROTOCOL = "protocol assignment"
    DOCUMENTATION = "documentation"
    BENCHMARKING = "benchmarking"
    RELAY = "6to4 relay"
    MULTICAST = "multicast"
    RESERVED = "reserved"
    EMBEDDED = "IPv4 embedded in IPv6"


@dataclass(frozen=True, slots=True)
class Network:
    """A range of addresses of one family: `base` has no bit set outside the first `prefix` bits."""

    base: bytes
    prefix: int

    def __contains__(self, address: Address) -> bool:
        whole, rest = divmod(self.prefix, 8)
        if len(address) != len(self.base) or address[:whole] != self.base[:whole]:
            return False
        return not rest or (address[whole] ^ self.base[whole]) >> (8 - rest) == 0

    def __str__(self) -> str:
        return f"{text_of(self.base)}/{self.prefix}"


def parse_address(text: str) -> Address | None:
    """Read an address in its standard spelling; a zone id, a short form or a leading zero is not one."""
    try:
        return inet_pton(AF_INET6 if ":" in text else AF_INET, text)
    except (OSError, ValueError):
        return None


def text_of(address: Address) -> str:
    """Write an address canonically (RFC 5952 as the C library has it)."""
    return inet_ntop(AF_INET if len(address) == IPV4_LENGTH else AF_INET6, address)


def parse_network(text: str) -> Network | None:
    """Read `address/prefix`, or an address alone; a bit set outside the prefix makes it unusable.

    A range of IPv4-mapped addresses becomes the IPv4 range that it means, because addresses are unwrapped before
    they are compared.
    """
    name, slash, length = text.partition("/")
    base = parse_address(name)
    if base is None:
        return None
    bits = 8 * len(base)
    if slash and not (
        length.isascii() and length.isdecimal() and str(int(length[:3])) == length and int(length) <= bits
    ):
        return None
    prefix = int(length) if slash else bits
    if int.from_bytes(base, "big") & ((1 << (bits - prefix)) - 1):
        return None
    if base.startswith(_MAPPED) and prefix >= 8 * len(_MAPPED):
        return Network(base[len(_MAPPED) :], prefix - 8 * len(_MAPPED))
    return Network(base, prefix)


def parse_nat64_prefix(text: str) -> Network | None:
    """Read a NAT64 prefix: an IPv6 range of one of the lengths of RFC 6052 section 2.2."""
    network = parse_network(text)
    if network is None or len(network.base) != IPV6_LENGTH or network.prefix not in _NAT64_OFFSETS:
        return None
    return network


def unwrap(address: Address, nat64: tuple[Network, ...] = ()) -> Address:
    """Say which address is really reached: the IPv4 inside an IPv4-mapped one, or inside one of the NAT64 prefixes."""
    if len(address) == IPV6_LENGTH:
        if address.startswith(_MAPPED):
            return address[len(_MAPPED) :]
        for prefix in nat64:
            if address in prefix:
                return bytes(address[offset] for offset in _NAT64_OFFSETS[prefix.prefix])
    return address


def classify(address: Address, nat64: tuple[Network, ...] = ()) -> Kind:
    """Say what an address is for; whatever the table does not call public is not public."""
    reached = unwrap(address, nat64)
    if len(reached) == IPV4_LENGTH:
        return _lookup(reached, _IPV4_BY_BYTE.get(reached[0], ()), Kind.PUBLIC)
    if len(reached) == IPV6_LENGTH and reached in _GLOBAL_UNICAST:
        return _lookup(reached, _IPV6_INSIDE, Kind.PUBLIC)
    return _lookup(reached, _IPV6_OUTSIDE, Kind.RESERVED)


_Table = tuple[tuple[Network, Kind], ...]


def _lookup(address: Address, table: _Table, otherwise: Kind) -> Kind:
    for network, kind in table:
        if address in network:
            return kind
    return otherwise


def _row(text: str, kind: Kind) -> tuple[Network, Kind]:
    network = parse_network(text)
    if network is None:
        raise ValueError(text)
    return network, kind


_MAPPED = bytes(10) + b"\xff\xff"

_NAT64_OFFSETS = {
    32: (4, 5, 6, 7),
    40: (5, 6, 7, 9),
    48: (6, 7, 9, 10),
    56: (7, 9, 10, 11),
    64: (9, 10, 11, 12),
    96: (12, 13, 14, 15),
}
"""Where the IPv4 address lies by prefix length; byte 8 is never part of it (RFC 6052 section 2.2)."""

_IPV4 = (
    _row("0.0.0.0/8", Kind.UNSPECIFIED),
    _row("10.0.0.0/8", Kind.PRIVATE),
    _row("100.64.0.0/10", Kind.SHARED),
    _row("127.0.0.0/8", Kind.LOOPBACK),
    _row("169.254.0.0/16", Kind.LINK_LOCAL),
    _row("172.16.0.0/12", Kind.PRIVATE),
    _row("192.0.0.0/24", Kind.PROTOCOL),
    _row("192.0.2.0/24", Kind.DOCUMENTATION),
    _row("192.88.99.0/24", Kind.RELAY),
    _row("192.168.0.0/16", Kind.PRIVATE),
    _row("198.18.0.0/15", Kind.BENCHMARKING),
    _row("198.51.100.0/24", Kind.DOCUMENTATION),
    _row("203.0.113.0/24", Kind.DOCUMENTATION),
    _row("224.0.0.0/4", Kind.MULTICAST),
    _row("240.0.0.0/4", Kind.RESERVED),
    _row("168.63.129.16", Kind.PLATFORM),
)

NON_PUBLIC_IPV4 = tuple(f"{inet_ntop(AF_INET, network.base)}/{network.prefix}" for network, _ in _IPV4)
"""Every IPv4 range that is never dialled, for whoever keeps the proxy from them by other means too."""


def _by_first_byte(table: _Table) -> dict[int, _Table]:
    found: dict[int, _Table] = {}
    for row in table:
        for first in range(row[0].base[0], row[0].base[0] + (1 << max(0, 8 - row[0].prefix))):
            found[first] = (*found.get(first, ()), row)
    return found


_IPV4_BY_BYTE = _by_first_byte(_IPV4)
"""The rows that can hold an address by its first byte: for most public addresses there are none to go through."""

_GLOBAL_UNICAST = _row("2000::/3", Kind.PUBLIC)[0]

_IPV6_INSIDE = (
    _row("2001::/23", Kind.PROTOCOL),
    _row("2001:db8::/32", Kind.DOCUMENTATION),
    _row("2002::/16", Kind.EMBEDDED),
    _row("3fff::/20", Kind.DOCUMENTATION),
)

_IPV6_OUTSIDE = (
    _row("::", Kind.UNSPECIFIED),
    _row("::1", Kind.LOOPBACK),
    _row("::/96", Kind.EMBEDDED),
    _row("::ffff:0:0:0/96", Kind.EMBEDDED),
    _row("64:ff9b::/96", Kind.EMBEDDED),
    _row("64:ff9b:1::/48", Kind.EMBEDDED),
    _row("fc00::/7", Kind.PRIVATE),
    _row("fe80::/10", Kind.LINK_LOCAL),
    _row("fec0::/10", Kind.PRIVATE),
    _row("ff00::/8", Kind.MULTICAST),
)
"""Names for messages only: everything outside 2000::/3 is refused, listed here or not."""
