"""Owns which addresses this host's interfaces have right now, by rtnetlink; decides nothing about them."""

from __future__ import annotations

import socket
import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from proxy.address import Address

_RTM_NEWADDR = 20
_RTM_GETADDR = 22
_NLMSG_ERROR = 2
_NLMSG_DONE = 3
_NLM_F_REQUEST_DUMP = 0x301
_NLM_F_DUMP_INTR = 0x10
_IFA_ADDRESS = 1
_IFA_LOCAL = 2
_RTMGRP_IPV4_IFADDR = 0x10
_RTMGRP_IPV6_IFADDR = 0x100
_MESSAGE = struct.Struct("=IHHII")
_IFADDR = struct.Struct("=BBBBI")
_ATTRIBUTE = struct.Struct("=HH")
_TIMEOUT_S = 1.0
_ATTEMPTS = 5
_BUFFER = 65536


class Interfaces:
    """The addresses of this network namespace.

    The kernel queues a notice before the call that changes an address returns. So a list that was dumped earlier is
    the list of now as long as no notice lies in the queue, and looking costs one system call.
    """

    __slots__ = ("_known", "_notices")

    def __init__(self) -> None:
        self._known: frozenset[Address] | None = None
        self._notices = _notices()

    def addresses(self) -> frozenset[Address]:
        """Read the addresses of all interfaces now. Raises OSError when the kernel does not say."""
        if self._notices is None or self._changed(self._notices) or self._known is None:
            self._known = None
            self._known = _dump()
        return self._known

    def close(self) -> None:
        """Close the queue of notices."""
        if self._notices is not None:
            self._notices.close()

    @staticmethod
    def _changed(notices: socket.socket) -> bool:
        changed = False
        while True:
            try:
                notices.recv(_BUFFER)
            except BlockingIOError:
                return changed
            except OSError:
                # ENOBUFS: notices were lost, which is a notice too
                changed = True
            else:
                changed = True


def _notices() -> socket.socket | None:
    """Subscribe; None where the kernel has no such groups (gVisor), and every look is a dump."""
    notices = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, socket.NETLINK_ROUTE)
    notices.setblocking(False)
    try:
        notices.bind((0, _RTMGRP_IPV4_IFADDR | _RTMGRP_IPV6_IFADDR))
    except OSError:
        notices.close()
        return None
    return notices


def _dump() -> frozenset[Address]:
    for _ in range(_ATTEMPTS):
        found = _dump_once()
        if found is not None:
            return found
    raise OSError("the kernel's list of addresses changes faster than it can be read")


def _dump_once() -> frozenset[Address] | None:
    """Ask for every address of every family; None when the list changed in between."""
    found: set[Address] = set()
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, socket.NETLINK_ROUTE) as route:
        route.settimeout(_TIMEOUT_S)
        body = _IFADDR.pack(socket.AF_UNSPEC, 0, 0, 0, 0)
        route.sendto(_MESSAGE.pack(_MESSAGE.size + len(body), _RTM_GETADDR, _NLM_F_REQUEST_DUMP, 1, 0) + body, (0, 0))
        whole = True
        while True:
            data = memoryview(route.recv(_BUFFER))
            while len(data) >= _MESSAGE.size:
                length, kind, flags, _, _ = _MESSAGE.unpack_from(data)
                whole = whole and not flags & _NLM_F_DUMP_INTR
                if kind == _NLMSG_DONE:
                    return frozenset(found) if whole else None
                if kind == _NLMSG_ERROR or length < _MESSAGE.size:
                    raise OSError("the kernel refuses to list the addresses")
                if kind == _RTM_NEWADDR:
                    found.update(_addresses(data[_MESSAGE.size + _IFADDR.size : length]))
                data = data[_aligned(length) :]


def _addresses(attributes: memoryview) -> set[Address]:
    """Read the interface's own address: `IFA_LOCAL` where there is one, because `IFA_ADDRESS` may be a peer's."""
    values: dict[int, Address] = {}
    while len(attributes) >= _ATTRIBUTE.size:
        length, kind = _ATTRIBUTE.unpack_from(attributes)
        if length < _ATTRIBUTE.size:
            break
        values[kind] = bytes(attributes[_ATTRIBUTE.size : length])
        attributes = attributes[_aligned(length) :]
    own = values.get(_IFA_LOCAL, values.get(_IFA_ADDRESS))
    return set() if own is None else {own}


def _aligned(length: int) -> int:
    return (length + 3) & ~3
