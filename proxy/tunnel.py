"""Owns moving bytes both ways between two streams until both sides are done; looks at none of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from proxy.handshake import Handshake
    from proxy.stream import Stream


class Held:
    """The end of a connection to a target before a tunnel is open: only the answer to a ClientHello is read."""

    __slots__ = ("_connection",)

    def __init__(self, connection: Handshake) -> None:
        self._connection = connection

    def data_received(self, data: memoryview) -> None:
        """Take what the server says to a ClientHello."""
        self._connection.answer_received(data)

    def eof_received(self) -> bool:
        """Note that it says no more."""
        self._connection.answer_ended()
        return True

    def connection_lost(self, exc: OSError | None) -> None:
        """Close the client's side too: it was promised a connection."""
        self._connection.upstream_lost(exc)

    def pause_writing(self) -> None:
        """Note nothing: what is written before a tunnel is open is bounded."""

    def resume_writing(self) -> None:
        """Note nothing: nobody was stopped."""


class TunnelEnd:
    """One side of a tunnel: what it reads goes to its peer, and its peer's slowness stops its reading."""

    __slots__ = ("_connection", "_own", "_peer")

    def __init__(self, connection: Handshake, own: Stream, peer: Stream) -> None:
        self._connection = connection
        self._own = own
        self._peer = peer

    def data_received(self, data: memoryview) -> None:
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
        if self._peer.ended:
            self._own.close()
            self._peer.close()
        else:
            self._peer.write_eof()
        return True

    def connection_lost(self, exc: OSError | None) -> None:
        """Mirror the end, or the reset."""
        if exc is None:
            self._peer.close()
        else:
            self._peer.reset()
        self._connection.side_lost()

    @staticmethod
    def join(connection: Handshake, client: Stream, upstream: Stream, early: bytes, *, ended: bool) -> None:
        """Open the tunnel. `early` came from the client before and goes first; `ended` says that it was all."""
        near = TunnelEnd(connection, client, upstream)
        client.set_end(near)
        upstream.set_end(TunnelEnd(connection, upstream, client))
        if client.takes:
            upstream.resume_reading()
        if not ended:
            client.resume_reading()
        if early:
            # after reading goes on, because a target that does not take it stops that again
            upstream.write(early)
        if ended:
            near.eof_received()
