"""Owns UDP sockets on every address that know to which address each datagram came; interprets none."""

from __future__ import annotations

import asyncio
import socket
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

IP_PKTINFO: Final = 8  # linux/in.h; the socket module has no name for it


@dataclass(frozen=True, slots=True, kw_only=True)
class Datagram:
    """What came: the address and port it was sent to, and the sender's."""

    address: str
    port: int
    peer: str
    peer_port: int
    data: bytes


class DatagramSocket:
    """One port of one family on every address; calls `receive` for each datagram."""

    def __init__(
        self, family: socket.AddressFamily, port: int, receive: Callable[[DatagramSocket, Datagram], None]
    ) -> None:
        """Bind and start reading on the running loop."""
        self._family = family
        self._port = port
        self._receive = receive
        self._socket = socket.socket(family, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        if family == socket.AF_INET6:
            self._socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            self._socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_RECVPKTINFO, 1)
            self._socket.bind(("::", port))
        else:
            self._socket.setsockopt(socket.IPPROTO_IP, IP_PKTINFO, 1)
            self._socket.bind(("0.0.0.0", port))
        asyncio.get_running_loop().add_reader(self._socket, self.drain)

    def drain(self) -> None:
        """Read all that has arrived by now."""
        while True:
            try:
                data, ancillary, _flags, peer = self._socket.recvmsg(65535, 256)
            except (BlockingIOError, ConnectionError):
                return
            to = ""
            for level, kind, value in ancillary:
                if (level, kind) == (socket.IPPROTO_IP, IP_PKTINFO):
                    to = socket.inet_ntop(socket.AF_INET, value[8:12])
                elif (level, kind) == (socket.IPPROTO_IPV6, socket.IPV6_PKTINFO):
                    to = socket.inet_ntop(socket.AF_INET6, value[:16])
            self._receive(self, Datagram(address=to, port=self._port, peer=peer[0], peer_port=peer[1], data=data))

    def answer(self, datagram: Datagram, data: bytes, *, source: str | None = None) -> None:
        """Send `data` back, from the address that was asked or from `source`; what cannot be sent is lost."""
        address = source if source is not None else datagram.address
        if self._family == socket.AF_INET6:
            packed = struct.pack("16sI", socket.inet_pton(socket.AF_INET6, address), 0)
            info = (socket.IPPROTO_IPV6, socket.IPV6_PKTINFO, packed)
        else:
            packed = struct.pack("I4s4s", 0, socket.inet_pton(socket.AF_INET, address), b"\0" * 4)
            info = (socket.IPPROTO_IP, IP_PKTINFO, packed)
        try:
            self._socket.sendmsg([data], [info], 0, (datagram.peer, datagram.peer_port))
        except OSError:
            return

    def close(self) -> None:
        """Stop reading and close."""
        asyncio.get_running_loop().remove_reader(self._socket)
        self._socket.close()
