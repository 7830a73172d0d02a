"""Owns the way of a tunnel from its 200 to its bytes: on port 443 the ClientHello, and whether a second one is to come.

Moves no bytes of an open tunnel, and reads no HTTP.
"""

from __future__ import annotations

from typing import assert_never

from proxy.client import HELLO_DEADLINE_S, IDLE_S, Client, Phase
from proxy.client_hello import Incomplete, NoServerName, NotTls, ServerName, beside
from proxy.client_hello import parse as parse_hello
from proxy.decision import Code, Deny
from proxy.record import printable
from proxy.server_hello import Answered
from proxy.server_hello import parse as parse_answer
from proxy.tunnel import TunnelEnd

HTTPS_PORT = 443


class Handshake(Client):
    """One client in whose tunnel nothing moves unseen yet."""

    __slots__ = ()

    def read_hello(self) -> None:
        """Read a ClientHello, which must name the tunnel's host."""
        hello = parse_hello(self._buffer)
        if isinstance(hello, Incomplete):
            return
        host = "" if self._target is None else self._target.host
        match hello:
            case ServerName(name, size):
                if name == host:
                    self._pass_hello(size)
                    return
                deny = Deny(Code.SNI_MISMATCH, f"the ClientHello asks for {printable(name)} in a tunnel to {host}")
            case NoServerName():
                deny = Deny(Code.SNI_MISSING, f"the ClientHello in a tunnel to {host} names no server")
            case NotTls():
                deny = _not_tls(hello)
            case _:
                assert_never(hello)
        self._record(deny)
        self._close()

    def _pass_hello(self, size: int) -> None:
        """Send a ClientHello on. After the first, nothing more is until the server says that it wants no other."""
        if self._upstream is None:
            return
        if self._phase is Phase.RETRY:
            self.join()
            return
        self._phase = Phase.ANSWER
        self._deadline = self._server.now() + IDLE_S
        self._upstream.write(self._buffer[:size])
        del self._buffer[:size]
        if self._ended and not self._buffer:
            self._upstream.write_eof()
        self._upstream.resume_reading()

    def answer_received(self, data: memoryview) -> None:
        """Take what a server says to a ClientHello: pass it on, and see whether another ClientHello is to come."""
        if self._phase is Phase.RETRY:
            self._stream.write(data)
            return
        said = self._answer + data if self._answer else data
        answered = parse_answer(said)
        self._answer = bytes(said) if answered is Answered.INCOMPLETE else b""
        if answered is Answered.OTHER:
            # before what it said is written, so that a client that does not take it stops the tunnel
            self.join()
        self._stream.write(data)
        if answered is Answered.RETRY:
            self._phase = Phase.RETRY
            self._deadline = self._server.now() + HELLO_DEADLINE_S
            self.read_retry()

    def answer_ended(self) -> None:
        """Note that a server ended its side before a tunnel was open: there is nothing to wait for."""
        if self._phase is Phase.ANSWER:
            self.join()
            self._stream.write_eof()
        elif self._phase is Phase.RETRY:
            self._close()

    def read_retry(self) -> None:
        """Read what comes after a HelloRetryRequest up to the second ClientHello, which must name the same server."""
        before = beside(self._buffer)
        if isinstance(before, NotTls):
            self._record(_not_tls(before))
            self._close()
        elif before is not None and self._upstream is not None:
            self._upstream.write(self._buffer[:before])
            del self._buffer[:before]
            if beside(self._buffer) == 0:
                self.read_hello()
            if self._phase is Phase.RETRY:
                self.read_on()

    def join(self) -> None:
        """Open the tunnel."""
        if self._upstream is None:
            return
        self._phase = Phase.TUNNEL
        self._deadline = self._server.now() + IDLE_S
        self._sides = 2
        early = bytes(self._buffer)
        self._buffer.clear()
        TunnelEnd.join(self, self._stream, self._upstream, early, ended=self._ended)

    def upstream_lost(self, exc: OSError | None) -> None:
        """Note that the target went away before the tunnel was open."""
        if self._phase in (Phase.HELLO, Phase.ANSWER, Phase.RETRY, Phase.HEAD):
            self._upstream = None
            if exc is None:
                self._close()
            else:
                self.abort()


def _not_tls(found: NotTls) -> Deny:
    return Deny(Code.NOT_TLS, f"a tunnel to port {HTTPS_PORT} carries TLS only: {found.message}")
