"""Owns the life of one client's connection: deadlines, what is kept for later, refusals, its end.

Does not read requests or move bytes: what a connection carries is built on this.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from proxy.address import text_of
from proxy.answer import refusal
from proxy.decision import Code, Deny
from proxy.judgement import Asking, Refused

if TYPE_CHECKING:
    from proxy.address import Address
    from proxy.decision import Target
    from proxy.exchange import Exchange
    from proxy.opening import Opening
    from proxy.policy import ProxyPolicy
    from proxy.server import Server
    from proxy.stream import Stream

HEAD_DEADLINE_S = 10.0
HELLO_DEADLINE_S = 10.0
KEEP_ALIVE_S = 60.0
IDLE_S = 600.0
DRAIN_S = 2.0
MAX_EARLY = 64 * 1024
MAX_DRAINED = 1 << 20
NOBODY = Asking()
UNWRITABLE = Deny(Code.SINK_FAILED, "what is decided cannot be written down, so nothing is allowed")


class Phase(Enum):
    """What a connection is doing."""

    HEAD = "reading a head"
    OPENING = "resolving and dialling"
    HELLO = "reading a ClientHello"
    ANSWER = "waiting for what the server says to it"
    RETRY = "reading the ClientHello that the server asked for"
    EXCHANGE = "forwarding a request"
    TUNNEL = "moving bytes"
    DRAIN = "refused, reading what the client still sends"
    CLOSED = "closed"


class Client:
    """One client. `moved` is set by every piece of data and cleared by `tick`, which watches for idle ones."""

    __slots__ = (
        "_address",
        "_answer",
        "_asking",
        "_buffer",
        "_deadline",
        "_drained",
        "_ended",
        "_exchange",
        "_inside",
        "_opening",
        "_phase",
        "_scanned",
        "_server",
        "_sides",
        "_stream",
        "_target",
        "_upstream",
        "moved",
    )

    _stream: Stream

    def __init__(self, server: Server) -> None:
        self._server = server
        self._buffer = bytearray()
        self._scanned = 0
        self._phase = Phase.HEAD
        self._deadline = server.now() + HEAD_DEADLINE_S
        self._ended = False
        self._drained = 0
        self._sides = 1
        self._opening: Opening | None = None
        self._exchange: Exchange | None = None
        self._upstream: Stream | None = None
        self._inside: Target | None = None
        self._target: Target | None = None
        self._address: Address | None = None
        self._asking = NOBODY
        self._answer = b""
        """The start of what the server said to a ClientHello, as long as it is too little to judge."""
        self.moved = False

    def tick(self, now: float) -> None:
        """Close what is past its deadline; whatever moves has a new one."""
        moved, self.moved = self.moved, False
        if moved and self._phase in (Phase.EXCHANGE, Phase.TUNNEL):
            self._deadline = now + IDLE_S
        elif self._opening is not None:
            if now >= self._opening.deadline:
                self._opening.late()
        elif now >= self._deadline:
            self._expired()

    def reconsider(self, policy: ProxyPolicy) -> None:
        """Close what a new generation allows no longer."""
        if self._target is None or self._address is None:
            return
        deny = self._server.judge_open(policy, self._target, self._address)
        if deny is not None:
            where = f"a new policy closes the connection to {self._target}: {deny.code}"
            self._record(Deny(Code.POLICY_CHANGED, where, deny.layer))
            self.abort()

    def retire(self) -> None:
        """Close now if the client waits for nothing; else after what it waits for."""
        if self._phase is Phase.HEAD:
            self._close()

    def abort(self) -> None:
        """Close both sides with a reset."""
        self._phase = Phase.CLOSED
        self._drop()
        self._stream.reset()

    # The end.

    def _refuse(self, refused: Refused) -> None:
        if self._phase is Phase.CLOSED:
            return
        self._asking = refused.asking
        self._record(refused.deny)
        if self._inside is not None:
            # an open tunnel belongs to the two ends: an answer of ours in it would be taken for the target's
            self._close()
            return
        method = refused.asking.method
        self._stream.write(refusal(refused.deny, with_body=method != "HEAD"))
        if method == "CONNECT":
            # RFC 9931: what follows a refused CONNECT was meant for the target, so not a byte of it is read
            self._close()
        else:
            self._linger()

    def _linger(self) -> None:
        """Let the client read the answer before the connection goes: closing on unread bytes would reset it."""
        self._buffer.clear()
        self._phase = Phase.DRAIN
        self._deadline = self._server.now() + DRAIN_S
        if self._ended:
            self._close()
        else:
            self._stream.write_eof()
            self.read_on()

    def _expired(self) -> None:
        match self._phase:
            case Phase.HEAD if self._inside is None and (self._buffer or not self._asking.method):
                message = f"no whole request head came within {HEAD_DEADLINE_S:g} s"
                self._refuse(Refused(Deny(Code.HEAD_TIMEOUT, message), Asking()))
            case Phase.HEAD | Phase.DRAIN:
                self._close()
            case Phase.HELLO | Phase.RETRY:
                self._record(Deny(Code.NOT_TLS, f"no whole ClientHello came within {HELLO_DEADLINE_S:g} s"))
                self._close()
            case Phase.OPENING | Phase.ANSWER | Phase.EXCHANGE | Phase.TUNNEL | Phase.CLOSED:
                self.abort()

    def _close(self) -> None:
        """Close after what was written is gone; the target's side at once."""
        if self._phase is not Phase.CLOSED:
            self._phase = Phase.CLOSED
            self._deadline = self._server.now() + IDLE_S
            self._drop()
            self._stream.close()

    def _drop(self) -> None:
        self._buffer.clear()
        self._exchange = self._target = None
        opening, self._opening = self._opening, None
        if opening is not None:
            opening.cancel()
        upstream, self._upstream = self._upstream, None
        if upstream is not None:
            upstream.reset()

    # What both do.

    def keep(self, data: bytes | memoryview) -> None:
        """Keep what is for later, and stop reading when that is much."""
        self._buffer += data
        if len(self._buffer) > MAX_EARLY:
            self._stream.pause_reading()

    def read_on(self) -> None:
        """Read on, unless the client said that it is done or too much is kept already."""
        if not self._ended and len(self._buffer) <= MAX_EARLY:
            self._stream.resume_reading()

    def _record(self, deny: Deny) -> None:
        asking = self._asking
        address = None if self._address is None else text_of(self._address)
        self._server.decisions.deny(deny, method=asking.method, host=asking.host, port=asking.port, address=address)

    def side_lost(self) -> None:
        """Note that one side is gone; with the last one the connection counts no more."""
        self._sides -= 1
        if self._sides == 0:
            self._server.release(self)
