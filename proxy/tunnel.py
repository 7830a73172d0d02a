"""Owns moving bytes both ways between two connections until both sides are done; looks at none of them."""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from proxy.connection import Connection

_RESET = struct.pack("ii", 1, 0)


def reset(transport: asyncio.Transport) -> None:
    """Close at once with a reset: the other side must not take a broken stream for a finished one."""
    sock = transport.get_extra_info("socket")
    if sock is not None and not transport.is_closing():
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        except OSError:
            # the socket is gone already, and so is the stream
            return
    transport.abort()


class Held(asyncio.Protocol):
    """An upstream connection for which nothing is read yet: what its server says waits in the kernel."""

    __slots__ = ("_connection",)

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Stop reading before the first byte."""
        cast("asyncio.Transport", transport).pause_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        """Close the client's side too: it was promised a connection."""
        self._connection.upstream_lost(exc)


class TunnelEnd(asyncio.Protocol):
    """One side of a tunnel: what it reads goes to its peer, and its peer's slowness stops its reading."""

    __slots__ = ("_connection", "_ended", "_other", "_own", "_peer")

    _other: TunnelEnd

    def __init__(self, connection: Connection, own: asyncio.Transport, peer: asyncio.Transport) -> None:
        self._connection = connection
        self._own = own
        self._peer = peer
        self._ended = False

    def data_received(self, data: bytes) -> None:
        """Pass one piece on."""
        self._connection.moved = True
        self._peer.write(data)

    def pause_writing(self) -> None:
        """Stop reading what this side cannot take."""
        self._peer.pause_reading()

    def resume_writing(self) -> None:
        """Read on."""
        self._peer.resume_reading()

    def eof_received(self) -> bool:
        """Mirror a half-close; the other direction stays open until it ends too."""
        self._ended = True
        if self._other._ended:  # noqa: SLF001 — the two ends are one thing
            self._own.close()
            self._peer.close()
        elif self._peer.can_write_eof() and not self._peer.is_closing():
            self._peer.write_eof()
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        """Mirror the end, or the reset."""
        if exc is None:
            self._peer.close()
        else:
            reset(self._peer)
        self._connection.side_lost()

    @staticmethod
    def join(
        connection: Connection, client: asyncio.Transport, upstream: asyncio.Transport, early: bytes, *, ended: bool
    ) -> None:
        """Open the tunnel. `early` came from the client before and goes first; `ended` says that it was all."""
        near = TunnelEnd(connection, client, upstream)
        far = TunnelEnd(connection, upstream, client)
        near._other, far._other = far, near
        client.set_protocol(near)
        upstream.set_protocol(far)
        if not ended:
            client.resume_reading()
        upstream.resume_reading()
        if early:
            upstream.write(early)
        if ended:
            near.eof_received()
