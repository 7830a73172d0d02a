"""Owns one client's connection: its requests one after the other, judged in order, until it becomes a tunnel.

Does not decide, resolve or dial: it asks the server, and carries the answer out.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, assert_never

from proxy.address import text_of
from proxy.answer import ESTABLISHED
from proxy.client import (
    HEAD_DEADLINE_S,
    HELLO_DEADLINE_S,
    IDLE_S,
    KEEP_ALIVE_S,
    MAX_DRAINED,
    UNWRITABLE,
    Client,
    Phase,
)
from proxy.client_hello import Incomplete, NoServerName, NotTls, ServerName, beside
from proxy.client_hello import parse as parse_hello
from proxy.decision import Code, Deny
from proxy.exchange import Exchange
from proxy.head import Malformed, refuse_early, take_head
from proxy.judgement import Asking, Open, Proof, Refused, judge
from proxy.record import printable
from proxy.server_hello import Answered
from proxy.server_hello import parse as parse_answer
from proxy.stream import Stream
from proxy.target import HTTP_PORT
from proxy.tunnel import Held, TunnelEnd

if TYPE_CHECKING:
    import socket

    from proxy.policy import ProxyPolicy
    from proxy.server import Reached

HTTPS_PORT = 443


class Connection(Client):
    """One client and what it asks for."""

    __slots__ = ()

    # What the client does.

    def connection_made(self, sock: socket.socket) -> None:
        """Take the connection, or say why not. Raises OSError when it is gone already."""
        self._stream = Stream(self._server.poller, sock, self)
        deny = self._server.admit(self)
        if deny is not None:
            self._refuse(Refused(deny, Asking()))

    def data_received(self, data: memoryview) -> None:
        """Take bytes of the client."""
        match self._phase:
            case Phase.EXCHANGE:
                self.moved = True
                if self._exchange is not None:
                    self._exchange.client_data(bytes(data))
            case Phase.HEAD:
                if not self._buffer:
                    self._deadline = min(self._deadline, self._server.now() + HEAD_DEADLINE_S)
                self._buffer += data
                self._read_head()
            case Phase.HELLO:
                self._buffer += data
                self._read_hello()
            case Phase.OPENING | Phase.ANSWER:
                self.keep(data)
            case Phase.RETRY:
                self._buffer += data
                self._read_retry()
            case Phase.DRAIN:
                self._drained += len(data)
                if self._drained > MAX_DRAINED:
                    self.abort()
            case Phase.TUNNEL | Phase.CLOSED:
                pass

    def eof_received(self) -> bool:
        """Note that the client sends no more. It may still read, but not ask."""
        self._ended = True
        match self._phase:
            case Phase.EXCHANGE:
                if self._exchange is not None:
                    self._exchange.client_ended()
                return True
            case Phase.OPENING:
                if self._asking.method == "CONNECT" and not self._buffer:
                    # nothing was sent and nothing will be: the client has left, and its dial is for nobody
                    self._close()
                return True
            case Phase.ANSWER:
                if not self._buffer and self._upstream is not None:
                    self._upstream.write_eof()
                return True
            case Phase.HELLO | Phase.RETRY | Phase.HEAD | Phase.DRAIN | Phase.TUNNEL | Phase.CLOSED:
                self._close()
                return False

    def connection_lost(self, exc: OSError | None) -> None:
        """Let go of everything that was for this client."""
        del exc
        self._close()
        self.side_lost()

    def pause_writing(self) -> None:
        """Stop reading a response that the client does not take."""
        if self._exchange is not None:
            self._exchange.slow()
        elif self._upstream is not None:
            self._upstream.pause_reading()

    def resume_writing(self) -> None:
        """Read on."""
        if self._exchange is not None:
            self._exchange.fast()
        elif self._upstream is not None and self._phase in (Phase.ANSWER, Phase.RETRY):
            self._upstream.resume_reading()

    # One request.

    def _read_head(self) -> None:
        taken = take_head(self._buffer, self._scanned)
        if taken is None:
            taken = refuse_early(self._buffer)
            if taken is None:
                self._scanned = len(self._buffer)
                return
        self._scanned = 0
        if isinstance(taken, Malformed):
            self._refuse(Refused(Deny(taken.code, taken.message), Asking()))
            return
        server = self._server
        judged = judge(taken, server.policy, inside=self._inside, via=server.via)
        match judged:
            case Refused():
                self._refuse(judged)
            case Proof(response):
                self._stream.write(response)
                self._linger()
            case Open():
                self._asking = judged.asking
                if server.decisions.crowded:
                    self._refuse(Refused(UNWRITABLE, judged.asking))
                elif self._inside is not None and self._upstream is not None and judged.forward is not None:
                    # the tunnel's own connection serves its first request
                    self._forward(judged, judged.forward, self._upstream)
                else:
                    self._phase = Phase.OPENING
                    self._deadline = math.inf
                    # the connection owns this task: whatever ends the one cancels the other
                    self._opening = server.loop.create_task(self._open(judged, server.policy))

    async def _open(self, judged: Open, judged_by: ProxyPolicy) -> None:
        """Resolve, decide, dial; then forward or open the tunnel."""
        try:
            reached = await self._server.reach(judged.resolved, judged_by)
            deny = reached if isinstance(reached, Deny) else self._hold(reached, judged)
        except Exception as broken:  # noqa: BLE001 — one broken connection must not take the others with it
            self._server.report(broken)
            deny = Deny(Code.INTERNAL, f"the proxy failed: {type(broken).__name__}")
        self._opening = None
        if deny is not None:
            self._refuse(Refused(deny, judged.asking))

    def _hold(self, reached: Reached, judged: Open) -> Deny | None:
        """Make the connected socket the upstream side, and go on with it."""
        server, target, address = self._server, judged.resolved.target, reached.address
        upstream = Stream(server.poller, reached.sock, Held(self), paused=True)
        deny = None if server.policy is reached.policy else server.judge_open(server.policy, target, address)
        if deny is None and server.decisions.crowded:
            deny = UNWRITABLE
        if deny is not None:
            upstream.abort()
            return deny
        self._upstream, self._target, self._address = upstream, target, address
        server.decisions.allow(target, method=judged.head.method, address=text_of(address))
        if judged.forward is not None:
            self._forward(judged, judged.forward, upstream)
            return None
        self._stream.write(ESTABLISHED)
        if target.port == HTTP_PORT:
            self._inside = target
            self._next_head()
        elif target.port == HTTPS_PORT:
            self._phase = Phase.HELLO
            self._deadline = server.now() + HELLO_DEADLINE_S
            self.read_on()
            self._read_hello()
        else:
            self._join()
        return None

    def _forward(self, judged: Open, first: bytes, upstream: Stream) -> None:
        self._phase = Phase.EXCHANGE
        self._deadline = self._server.now() + IDLE_S
        self._exchange = Exchange(self, self._stream, upstream, judged.head, self._server.via)
        early = bytes(self._buffer)
        self._buffer.clear()
        self.read_on()
        self._exchange.start(first, early)
        if self._ended and self._exchange is not None:
            self._exchange.client_ended()

    def answered(self, *, persistent: bool, read_all: bool) -> None:
        """Go on after a whole response; `read_all` says that the client owes no more of its request."""
        self._exchange = self._upstream = None
        if self._inside is None:
            self._target = self._address = None
        if persistent and not self._server.draining and (self._buffer or not self._ended):
            self._next_head()
        elif read_all:
            self._close()
        else:
            self._linger()

    def failed(self, deny: Deny) -> None:
        """Answer for a target that gave no response."""
        self._exchange = self._upstream = None
        self._refuse(Refused(deny, self._asking))

    def _next_head(self) -> None:
        self._phase = Phase.HEAD
        self._deadline = self._server.now() + (HEAD_DEADLINE_S if self._buffer else KEEP_ALIVE_S)
        self.read_on()
        if self._buffer:
            self._read_head()
        if self._ended and self._phase is Phase.HEAD:
            self._close()

    # One tunnel.

    def _read_hello(self) -> None:
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
            self._join()
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
            self._join()
        self._stream.write(data)
        if answered is Answered.RETRY:
            self._phase = Phase.RETRY
            self._deadline = self._server.now() + HELLO_DEADLINE_S
            self._read_retry()

    def answer_ended(self) -> None:
        """Note that a server ended its side before a tunnel was open: there is nothing to wait for."""
        if self._phase is Phase.ANSWER:
            self._join()
            self._stream.write_eof()
        elif self._phase is Phase.RETRY:
            self._close()

    def _read_retry(self) -> None:
        """Read what comes after a HelloRetryRequest up to the second ClientHello, which must name the same server."""
        before = beside(self._buffer)
        if isinstance(before, NotTls):
            self._record(_not_tls(before))
            self._close()
        elif before is not None and self._upstream is not None:
            self._upstream.write(self._buffer[:before])
            del self._buffer[:before]
            if beside(self._buffer) == 0:
                self._read_hello()
            if self._phase is Phase.RETRY:
                self.read_on()

    def _join(self) -> None:
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
