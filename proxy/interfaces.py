"""Owns which addresses are this host's own right now, by rtnetlink; decides nothing about them."""

from __future__ import annotations

import select
import socket
import struct
from typing import TYPE_CHECKING

from proxy.address import IPV4_LENGTH

if TYPE_CHECKING:
    from collections.abc import Iterator

    from proxy.address import Address

_RTM_NEWADDR = 20
_RTM_GETADDR = 22
_RTM_NEWROUTE = 24
_RTM_GETROUTE = 26
_RTN_OURS = frozenset({2, 3, 4, 5})
"""Route types that lead to this host or to all of its neighbours: local, broadcast, anycast, multicast."""

_RTA_DST = 1
_NLMSG_ERROR = 2
_NLMSG_DONE = 3
_NLM_F_REQUEST = 1
_NLM_F_REQUEST_DUMP = 0x301
_NLM_F_DUMP_INTR = 0x10
_IFA_ADDRESS = 1
_IFA_LOCAL = 2
_GROUPS = 0x10 | 0x40 | 0x80 | 0x100 | 0x400 | 0x40000
"""Bits of RTNLGRP_IPV4_IFADDR, _IPV4_ROUTE, _IPV4_RULE, _IPV6_IFADDR, _IPV6_ROUTE, _IPV6_RULE."""

_MESSAGE = struct.Struct("=IHHII")
_IFADDR = struct.Struct("=BBBBI")
_ROUTE = struct.Struct("=BBBBBBBBI")
_ATTRIBUTE = struct.Struct("=HH")
_TIMEOUT_S = 1.0
_ATTEMPTS = 5
_BUFFER = 65536
_MAX_ROUTES = 4096


class Local:
    """What leads to this host: the addresses of its interfaces, and whatever its routing takes in (`local` routes).

    Routing is asked address by address, since only the kernel knows which of its tables count for us; what it said is
    kept as long as this is, which is until something changes.
    """

    __slots__ = ("_addresses", "_routed")

    def __init__(self, addresses: frozenset[Address]) -> None:
        self._addresses = addresses
        self._routed: dict[Address, bool] = {}

    def __contains__(self, address: object) -> bool:
        """Say whether an address is this host's. Raises OSError when the kernel does not say."""
        if not isinstance(address, bytes):
            return False
        known = self._routed.get(address)
        if known is None:
            if len(self._routed) >= _MAX_ROUTES:
                self._routed.clear()
            known = self._routed[address] = address in self._addresses or _leads_here(address)
        return known


class Interfaces:
    """The addresses of this network namespace.

    The kernel queues a notice before the call that changes an address or a route returns. So a list that was dumped
    earlier is the list of now as long as no notice lies in the queue, and looking costs one system call.
    """

    __slots__ = ("_known", "_notices", "_some")

    def __init__(self) -> None:
        self._known: Local | None = None
        self._notices = _notices()
        self._some = select.poll()
        if self._notices is not None:
            self._some.register(self._notices, select.POLLIN)

    def addresses(self) -> Local:
        """Read this host's addresses now. Raises OSError when the kernel does not say."""
        # asking whether there is any is cheaper than being told by an exception that there is none
        if self._notices is None or self._known is None or self._some.poll(0):
            if self._notices is not None:
                self._take(self._notices)
            self._known = None
            self._known = _addresses()
        return self._known

    def close(self) -> None:
        """Close the queue of notices."""
        if self._notices is not None:
            self._notices.close()

    @staticmethod
    def _take(notices: socket.socket) -> None:
        while True:
            try:
                notices.recv(_BUFFER)
            except BlockingIOError:
                return
            except OSError:
                # ENOBUFS: notices were lost, which is a notice too
                continue


def _notices() -> socket.socket | None:
    """Subscribe; None where the kernel has no such groups (gVisor), and every look is a dump."""
    notices = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, socket.NETLINK_ROUTE)
    notices.setblocking(False)
    try:
        notices.bind((0, _GROUPS))
    except OSError:
        notices.close()
        return None
    return notices


def _leads_here(address: Address) -> bool:
    """Ask the kernel where it would send a packet of ours."""
    family, length = (socket.AF_INET, 8 * IPV4_LENGTH) if len(address) == IPV4_LENGTH else (socket.AF_INET6, 128)
    body = _ROUTE.pack(family, length, 0, 0, 0, 0, 0, 0, 0)
    body += _ATTRIBUTE.pack(_ATTRIBUTE.size + len(address), _RTA_DST) + address
    with _route() as route:
        route.sendto(_MESSAGE.pack(_MESSAGE.size + len(body), _RTM_GETROUTE, _NLM_F_REQUEST, 1, 0) + body, (0, 0))
        for kind, _, message in _messages(memoryview(route.recv(_BUFFER))):
            if kind == _RTM_NEWROUTE:
                return _ROUTE.unpack_from(message)[7] in _RTN_OURS
    # no route at all, which connecting will find out too
    return False


def _addresses() -> Local:
    found: set[Address] = set()
    for message in _dump(_RTM_GETADDR, _RTM_NEWADDR, _IFADDR.pack(socket.AF_UNSPEC, 0, 0, 0, 0)):
        values = _attributes(message[_IFADDR.size :])
        # `IFA_LOCAL` where there is one, because `IFA_ADDRESS` may be a peer's
        own = values.get(_IFA_LOCAL, values.get(_IFA_ADDRESS))
        if own is not None:
            found.add(own)
    return Local(frozenset(found))


def _route() -> socket.socket:
    route = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, socket.NETLINK_ROUTE)
    route.settimeout(_TIMEOUT_S)
    return route


def _dump(ask: int, answer: int, body: bytes) -> list[memoryview]:
    for _ in range(_ATTEMPTS):
        found = _dump_once(ask, answer, body)
        if found is not None:
            return found
    raise OSError("the kernel's list of addresses changes faster than it can be read")


def _dump_once(ask: int, answer: int, body: bytes) -> list[memoryview] | None:
    """Ask for every entry of a table; None when the table changed in between."""
    found: list[memoryview] = []
    with _route() as route:
        route.sendto(_MESSAGE.pack(_MESSAGE.size + len(body), ask, _NLM_F_REQUEST_DUMP, 1, 0) + body, (0, 0))
        whole = True
        while True:
            for kind, flags, message in _messages(memoryview(route.recv(_BUFFER))):
                whole = whole and not flags & _NLM_F_DUMP_INTR
                if kind == _NLMSG_DONE:
                    return found if whole else None
                if kind == _NLMSG_ERROR:
                    raise OSError("the kernel refuses to list the addresses")
                if kind == answer:
                    found.append(message)


def _messages(data: memoryview) -> Iterator[tuple[int, int, memoryview]]:
    while len(data) >= _MESSAGE.size:
        length, kind, flags, _, _ = _MESSAGE.unpack_from(data)
        if length < _MESSAGE.size:
            raise OSError("the kernel's list of addresses cannot be read")
        yield kind, flags, data[_MESSAGE.size : length]
        data = data[_aligned(length) :]


def _attributes(data: memoryview) -> dict[int, bytes]:
    values: dict[int, bytes] = {}
    while len(data) >= _ATTRIBUTE.size:
        length, kind = _ATTRIBUTE.unpack_from(data)
        if length < _ATTRIBUTE.size:
            break
        values[kind] = bytes(data[_ATTRIBUTE.size : length])
        data = data[_aligned(length) :]
    return values


def _aligned(length: int) -> int:
    return (length + 3) & ~3
