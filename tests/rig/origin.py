"""Owns the listeners of the rig's internet and the record of what arrived; decides nothing about DNS or HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import time
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Final, assert_never

from tests.rig import addresses, http_origin
from tests.rig.datagrams import Datagram, DatagramSocket

if TYPE_CHECKING:
    import ssl
    from collections.abc import Awaitable, Callable

    from tests.rig.certificates import Authority
    from tests.rig.dns_server import DnsServer

BANNER: Final = b"220 origin speaks first\r\n"
HELLO_RETRY_REQUEST: Final = bytes.fromhex(
    # one record: a ServerHello with the random of RFC 8446 section 4.1.3, TLS 1.3, and a key share of secp384r1 wanted
    "1603030038"
    "02000034"
    "0303"
    "cf21ad74e59a6111be1d8c021e65b891c2a211167abb8c5e079e09e2c8a8339c"
    "00"
    "1301"
    "00"
    "000c"
    "002b00020304"
    "003300020018"
)
_KEEP: Final = 16384
_FAMILIES: Final = (socket.AF_INET, socket.AF_INET6)


class Mode(StrEnum):
    """What a TCP listener does with a connection."""

    HTTP = "http"
    TLS = "tls"
    """HTTP inside TLS."""
    RETRY = "retry"
    """The same, by a server whose only group no client has a key share for: it asks for a second hello."""
    SAYS_RETRY = "says retry"
    """Answers the first bytes with a HelloRetryRequest, a byte at a time, and takes whatever comes then."""
    ECHO = "echo"
    BANNER = "banner"
    """Speaks first, then echoes."""
    SILENT = "silent"
    """Accepts and never reads: a stalled peer."""
    RESET = "reset"
    """Accepts and resets at once."""
    DNS = "dns"


@dataclass(slots=True, kw_only=True)
class _Arrival:
    row: dict[str, object]
    first: bytearray = field(default_factory=bytearray)
    plain: bytearray = field(default_factory=bytearray)

    def keep(self, data: bytes) -> None:
        self.first += data[: _KEEP - len(self.first)]

    def keep_plain(self, data: bytes) -> None:
        self.plain += data[: _KEEP - len(self.plain)]

    def to_json(self) -> dict[str, object]:
        return {**self.row, "first": self.first.hex(), "plain": self.plain.hex()}


class Origin:
    """Listens on every address of the namespace; `arrivals` are in order of acceptance."""

    def __init__(self, group: asyncio.TaskGroup, tls: Authority, dns: DnsServer) -> None:
        """Open the standing listeners on the running loop; connections run in `group`."""
        self._group = group
        self._tls = tls
        self._dns = dns
        self._arrivals: list[_Arrival] = []
        self._listeners: dict[tuple[int, int], tuple[socket.socket, Callable[[], None]]] = {}
        self._datagrams: dict[tuple[int, int], DatagramSocket] = {}
        for port, mode in self._standing():
            self.listen(port, mode)
        for port in addresses.UDP_PORTS:
            self.listen_udp(port)

    @staticmethod
    def _standing() -> list[tuple[int, Mode]]:
        fixed = [(80, Mode.HTTP), (443, Mode.TLS), (53, Mode.DNS)]
        fixed += [(port, Mode.ECHO) for port in addresses.ECHO_PORTS]
        return fixed + [(port, Mode.BANNER) for port in addresses.BANNER_PORTS]

    def listen(self, port: int, mode: Mode) -> None:
        """Open `port` on every address, or change what it does; raises OSError."""
        for family in _FAMILIES:
            self._close(family, port)
            listener = socket.create_server(("", port), family=family, backlog=1024)
            listener.setblocking(False)
            accept = self._acceptor(listener, mode)
            asyncio.get_running_loop().add_reader(listener, accept)
            self._listeners[family, port] = (listener, accept)

    def listen_udp(self, port: int) -> None:
        """Open a UDP echo on every address; raises OSError."""
        for family in _FAMILIES:
            if (family, port) not in self._datagrams:
                self._datagrams[family, port] = DatagramSocket(family, port, self._datagram)

    def arrivals(self) -> list[dict[str, object]]:
        """Return what has arrived by now, accepted or still waiting to be."""
        self.drain()
        return [arrival.to_json() for arrival in self._arrivals]

    def forget(self) -> None:
        """Clear the record."""
        self.drain()
        self._arrivals.clear()

    def drain(self) -> None:
        """Accept and read all that has arrived by now."""
        for _listener, accept in self._listeners.values():
            accept()
        for each in self._datagrams.values():
            each.drain()

    def reset(self) -> None:
        """Bring the standing listeners back and close the others."""
        standing = dict(self._standing())
        for family, port in list(self._listeners):
            if port not in standing:
                self._close(family, port)
        for port, mode in standing.items():
            self.listen(port, mode)

    def close(self) -> None:
        """Close every listener."""
        for family, port in list(self._listeners):
            self._close(family, port)
        for each in self._datagrams.values():
            each.close()

    def _close(self, family: int, port: int) -> None:
        listener, _accept = self._listeners.pop((family, port), (None, None))
        if listener is not None:
            asyncio.get_running_loop().remove_reader(listener)
            listener.close()

    def _datagram(self, through: DatagramSocket, datagram: Datagram) -> None:
        arrival = self._arrived("udp", datagram.address, datagram.port, datagram.peer, datagram.peer_port)
        arrival.keep(datagram.data)
        through.answer(datagram, datagram.data)

    def _arrived(self, kind: str, address: str, port: int, peer: str, peer_port: int) -> _Arrival:
        row: dict[str, object] = {"kind": kind, "address": address, "port": port, "peer": peer, "peer_port": peer_port}
        arrival = _Arrival(row={**row, "time": time.time(), "sni": None, "ended": None})
        self._arrivals.append(arrival)
        return arrival

    def _acceptor(self, listener: socket.socket, mode: Mode) -> Callable[[], None]:
        def accept() -> None:
            while True:
                try:
                    connection, peer = listener.accept()
                except (BlockingIOError, ConnectionError):
                    return
                connection.setblocking(False)
                name = connection.getsockname()
                arrival = self._arrived("tcp", name[0], name[1], peer[0], peer[1])
                self._group.create_task(self._serve(connection, arrival, mode))

        return accept

    async def _serve(self, connection: socket.socket, arrival: _Arrival, mode: Mode) -> None:
        try:
            await self._conversation(connection, arrival, mode)
            arrival.row["ended"] = "eof"
        except asyncio.IncompleteReadError:
            arrival.row["ended"] = "eof"
        except (OSError, ValueError, asyncio.LimitOverrunError) as broken:  # ssl.SSLError is an OSError
            arrival.row["ended"] = type(broken).__name__
        finally:
            connection.close()

    async def _conversation(self, connection: socket.socket, arrival: _Arrival, mode: Mode) -> None:
        match mode:
            case Mode.RESET:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            case Mode.SILENT:
                await asyncio.Event().wait()
            case Mode.BANNER:
                await asyncio.get_running_loop().sock_sendall(connection, BANNER)
                await _echo(connection, arrival)
            case Mode.ECHO:
                await _echo(connection, arrival)
            case Mode.HTTP:
                await _with_streams(connection, None, arrival, self._http)
            case Mode.TLS:
                await _readable(connection)
                arrival.keep(connection.recv(4096, socket.MSG_PEEK))
                await _with_streams(connection, self._tls, arrival, self._http)
            case Mode.RETRY:
                await _with_streams(connection, self._tls, arrival, self._http, context=self._tls.retrying)
            case Mode.SAYS_RETRY:
                await _retry(connection, arrival)
            case Mode.DNS:
                await _with_streams(connection, None, arrival, self._dns_over_tcp)
            case _:
                assert_never(mode)

    async def _http(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, arrival: _Arrival) -> None:
        tls = writer.get_extra_info("ssl_object")
        row = arrival.row
        recording = http_origin.Recording(reader, arrival.keep_plain if tls else arrival.keep)
        about = {"address": row["address"], "port": row["port"], "peer": row["peer"], "sni": row["sni"]}
        await http_origin.serve(recording, writer, about)

    async def _dns_over_tcp(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, arrival: _Arrival
    ) -> None:
        await self._dns.serve(reader, writer, str(arrival.row["address"]), str(arrival.row["peer"]))


async def _readable(connection: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()

    def report() -> None:
        loop.remove_reader(connection)
        ready.set_result(None)

    loop.add_reader(connection, report)
    try:
        await ready
    finally:
        loop.remove_reader(connection)


async def _echo(connection: socket.socket, arrival: _Arrival) -> None:
    loop = asyncio.get_running_loop()
    while data := await loop.sock_recv(connection, 65536):
        arrival.keep(data)
        await loop.sock_sendall(connection, data)


async def _retry(connection: socket.socket, arrival: _Arrival) -> None:
    loop = asyncio.get_running_loop()
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    said = False
    while data := await loop.sock_recv(connection, 65536):
        arrival.keep(data)
        if not said:
            said = True
            for at in range(len(HELLO_RETRY_REQUEST)):
                await loop.sock_sendall(connection, HELLO_RETRY_REQUEST[at : at + 1])


async def _with_streams(
    connection: socket.socket,
    tls: Authority | None,
    arrival: _Arrival,
    talk: Callable[[asyncio.StreamReader, asyncio.StreamWriter, _Arrival], Awaitable[None]],
    *,
    context: ssl.SSLContext | None = None,
) -> None:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=2**20)
    protocol = asyncio.StreamReaderProtocol(reader)
    context = context or (tls.context if tls else None)
    transport, _ = await loop.connect_accepted_socket(lambda: protocol, connection, ssl=context)
    writer = asyncio.StreamWriter(transport, protocol, reader, loop)
    if tls is not None:
        arrival.row["sni"] = tls.asked_for(transport.get_extra_info("ssl_object"))
    try:
        await talk(reader, writer, arrival)
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
