"""Owns one client's connection: its requests one after the other, judged in order, until it becomes a tunnel.

Does not decide, resolve or dial: it asks the server, and carries the answer out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from proxy.address import text_of
from proxy.answer import ESTABLISHED
from proxy.client import (
    HEAD_DEADLINE_S,
    HELLO_DEADLINE_S,
    IDLE_S,
    KEEP_ALIVE_S,
    MAX_DRAINED,
    UNWRITABLE,
    Phase,
)
from proxy.decision import Deny
from proxy.exchange import Exchange
from proxy.handshake import HTTPS_PORT, Handshake
from proxy.head import Malformed, refuse_early, take_head
from proxy.judgement import Asking, Open, Proof, Refused
from proxy.opening import Opening
from proxy.stream import Stream
from proxy.target import HTTP_PORT
from proxy.tunnel import Held

if TYPE_CHECKING:
    import socket

    from proxy.opening import Reached


class Connection(Handshake):
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
                self.read_hello()
            case Phase.OPENING | Phase.ANSWER:
                self.keep(data)
            case Phase.RETRY:
                self._buffer += data
                self.read_retry()
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
        judged = server.judge.judge(taken, self._inside)
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
                    # whatever ends the connection cancels it
                    self._opening = Opening(server, judged, self._opened)
                    self._opening.start()

    def _opened(self, opening: Opening, reached: Reached | Deny) -> None:
        """Go on with a target that was reached, or not."""
        self._opening = None
        deny = reached if isinstance(reached, Deny) else self._hold(reached, opening.judged)
        if deny is not None:
            self._refuse(Refused(deny, opening.judged.asking))

    def _hold(self, reached: Reached, judged: Open) -> Deny | None:
        """Make the connected socket the upstream side, and go on with it."""
        server, target, address = self._server, judged.resolved.target, reached.address
        upstream = Stream(server.poller, reached.sock, Held(self), dialled=True)
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
            if self._buffer:
                self.read_hello()
        else:
            self.join()
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
