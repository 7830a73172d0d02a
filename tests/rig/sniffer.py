"""Owns the record of every flow that crosses the link into the internet namespace, listeners or not.

It does not see what the internet namespace sends, nor loopback.
"""

from __future__ import annotations

import asyncio
import ctypes
import socket
import struct
import time
from typing import Final

from tests.rig import addresses

_ETH_P_IP: Final = 0x0800
_ETH_P_IPV6: Final = 0x86DD
_ETH_P_ARP: Final = 0x0806
_SO_ATTACH_FILTER: Final = 26
_SYN: Final = 0x02
_ICMPV6_NEIGHBOURS: Final = frozenset({*range(130, 138), 143})  # RFC 4861 and multicast listening: the link's own talk

# Classic BPF, so that a busy tunnel costs the rig nothing: of TCP only the SYN without ACK, everything else whole.
_IPV4_FILTER: Final = (
    (0x30, 0, 0, 9),  # ldb [9]: protocol
    (0x15, 0, 4, 6),  # TCP? else accept
    (0xB1, 0, 0, 0),  # ldxb 4*([0]&0xf)
    (0x50, 0, 0, 13),  # ldb [x+13]: flags
    (0x54, 0, 0, 0x12),  # and SYN|ACK
    (0x15, 0, 1, _SYN),  # only SYN? else drop
    (0x06, 0, 0, 512),
    (0x06, 0, 0, 0),
)
_IPV6_FILTER: Final = (
    (0x30, 0, 0, 6),  # ldb [6]: next header
    (0x15, 0, 3, 6),  # TCP? else accept
    (0x30, 0, 0, 53),  # ldb [40+13]: flags
    (0x54, 0, 0, 0x12),
    (0x15, 0, 1, _SYN),
    (0x06, 0, 0, 512),
    (0x06, 0, 0, 0),
)


class Sniffer:
    """Reads copies of what arrives on one interface; `log` holds one row for each flow's first packet or datagram."""

    def __init__(self, interface: str = addresses.INTERNET_LINK) -> None:
        """Open the packet sockets (CAP_NET_RAW) and start reading on the running loop."""
        self.log: list[dict[str, object]] = []
        self._sockets: list[socket.socket] = []
        for kind, program in ((_ETH_P_IP, _IPV4_FILTER), (_ETH_P_IPV6, _IPV6_FILTER)):
            each = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(kind))
            each.setblocking(False)
            _attach(each, program)
            each.bind((interface, kind))
            self._sockets.append(each)
        for each in self._sockets:
            asyncio.get_running_loop().add_reader(each, self.drain)

    def drain(self) -> None:
        """Record all that has arrived by now."""
        for each in self._sockets:
            while True:
                try:
                    packet = each.recv(512)
                except BlockingIOError:
                    break
                row = describe(packet)
                if row is not None:
                    self.log.append({**row, "time": time.time()})

    def close(self) -> None:
        """Stop reading and close."""
        for each in self._sockets:
            asyncio.get_running_loop().remove_reader(each)
            each.close()


def describe(packet: bytes) -> dict[str, object] | None:
    """Say what a packet (from its IP header on) is; None for the link's own neighbour talk."""
    version = packet[0] >> 4
    if version == 4:
        size, protocol = (packet[0] & 0xF) * 4, packet[9]
        source, to = (socket.inet_ntop(socket.AF_INET, packet[at : at + 4]) for at in (12, 16))
    else:
        size, protocol = 40, packet[6]
        source, to = (socket.inet_ntop(socket.AF_INET6, packet[at : at + 16]) for at in (8, 24))
    body = packet[size:]
    row: dict[str, object] = {"source": source, "address": to, "source_port": None, "port": None, "first": ""}
    match protocol:
        case socket.IPPROTO_TCP | socket.IPPROTO_UDP:
            row["source_port"], row["port"] = struct.unpack_from("!HH", body)
            udp = protocol == socket.IPPROTO_UDP
            return {**row, "kind": "udp" if udp else "tcp", "first": body[8:].hex() if udp else ""}
        case socket.IPPROTO_ICMP:
            return {**row, "kind": "icmp", "first": body.hex()}
        case socket.IPPROTO_ICMPV6:
            return None if body[0] in _ICMPV6_NEIGHBOURS else {**row, "kind": "icmp", "first": body.hex()}
        case 0:  # hop-by-hop options, which multicast listening uses
            return None
        case _:
            return {**row, "kind": f"ip-{protocol}", "first": body.hex()}


def _attach(each: socket.socket, program: tuple[tuple[int, int, int, int], ...]) -> None:
    code = b"".join(struct.pack("HBBI", *row) for row in program)
    buffer = ctypes.create_string_buffer(code)
    each.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HL", len(program), ctypes.addressof(buffer)))
