"""Owns one request and its response between a client and a target, framing read and written anew on both sides.

Does not decide, dial or read request heads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from proxy.decision import Code, Deny
from proxy.head import Framing, Malformed, RequestHead, ResponseHead, parse_response, take_head
from proxy.request import LAST_CHUNK, BodyReader, chunk, forward_response, response_framing

if TYPE_CHECKING:
    from proxy.connection import Connection
    from proxy.stream import Stream

_SWITCHING = 101
_FINAL = 200
_PROXY_AUTHENTICATION = 407


class Exchange:
    """The upstream side of one forwarded request, from its first byte to the last of the response."""

    __slots__ = (
        "_body",
        "_buffer",
        "_client",
        "_connection",
        "_finished",
        "_head",
        "_out",
        "_reader",
        "_scanned",
        "_up",
        "_via",
    )

    def __init__(
        self,
        connection: Connection,
        client: Stream,
        upstream: Stream,
        head: RequestHead,
        via: bytes,
    ) -> None:
        self._connection = connection
        self._client = client
        self._up = upstream
        self._head = head
        self._via = via
        self._body = BodyReader(head.framing, head.length)
        self._buffer = bytearray()
        self._scanned = 0
        self._reader: BodyReader | None = None
        self._out = Framing.NONE
        self._finished = False

    def start(self, first: bytes, early: bytes) -> None:
        """Send the forwarded head, then what came of the body already. The upstream side is not reading yet."""
        self._up.set_end(self)
        self._up.resume_reading()
        self._up.write(first)
        if early:
            self.client_data(early)

    def client_data(self, data: bytes) -> None:
        """Pass on what belongs to the request's body; the rest is the next request's."""
        if self._finished:
            return
        out: list[bytes] = []
        used = self._body.feed(data, out)
        if self._body.broken is not None:
            self._fail(Deny(Code.MALFORMED, self._body.broken))
            return
        if self._head.framing is Framing.CHUNKED:
            out = [chunk(piece) for piece in out]
            if used and self._body.done:
                out.append(LAST_CHUNK)
        if out:
            self._up.write(b"".join(out))
        if used < len(data):
            self._connection.keep(data[used:])

    def client_ended(self) -> None:
        """Note that the client sends no more: with half a body sent, nothing is left to do."""
        if not self._body.done:
            self._finished = True
            self._connection.abort()

    def slow(self) -> None:
        """Stop reading what the client does not take."""
        self._up.pause_reading()

    def fast(self) -> None:
        """Read on."""
        if not self._finished:
            self._up.resume_reading()

    def data_received(self, data: memoryview) -> None:
        """Take bytes of the response."""
        self._connection.moved = True
        if self._finished:
            return
        if self._reader is not None:
            self._pass_on(self._reader, bytes(data))
            return
        self._buffer += data
        while (taken := take_head(self._buffer, self._scanned)) is not None:
            self._scanned = 0
            if not self._answer(parse_response(taken, method=self._head.method) if isinstance(taken, bytes) else taken):
                return
        self._scanned = len(self._buffer)

    def _answer(self, head: ResponseHead | Malformed) -> bool:
        """Take one head; True when another is to come, because this one was an interim response's."""
        if isinstance(head, Malformed):
            self._fail(Deny(Code.BAD_RESPONSE, head.message))
        elif head.status in (_SWITCHING, _PROXY_AUTHENTICATION):
            # `Upgrade` was not forwarded, and no origin may ask for a proxy's credentials
            self._fail(Deny(Code.BAD_RESPONSE, f"the target answered {head.status}, which nobody asked for"))
        elif head.status < _FINAL:
            if self._head.minor:
                self._client.write(forward_response(head, framing=Framing.NONE, persistent=True, via=self._via))
            return True
        else:
            self._out = response_framing(head, minor=self._head.minor)
            persistent = self._head.persistent and self._out is not Framing.UNTIL_CLOSE
            self._client.write(forward_response(head, framing=self._out, persistent=persistent, via=self._via))
            self._reader = BodyReader(head.framing, head.length)
            rest = bytes(self._buffer)
            self._buffer.clear()
            self._pass_on(self._reader, rest)
        return False

    def _pass_on(self, reader: BodyReader, data: bytes) -> None:
        out: list[bytes] = []
        reader.feed(data, out)
        if self._out is Framing.CHUNKED:
            out = [chunk(piece) for piece in out if piece]
        if out:
            self._client.write(b"".join(out))
        if reader.broken is not None:
            self._fail(Deny(Code.BAD_RESPONSE, reader.broken))
        elif reader.done:
            self._finish()

    def _finish(self) -> None:
        self._finished = True
        if self._out is Framing.CHUNKED:
            self._client.write(LAST_CHUNK)
        self._up.abort()
        persistent = self._head.persistent and self._out is not Framing.UNTIL_CLOSE
        self._connection.answered(persistent=persistent and self._body.done, read_all=self._body.done)

    def _fail(self, deny: Deny) -> None:
        self._finished = True
        self._up.abort()
        if self._reader is None:
            self._connection.failed(deny)
        else:
            # the client must see that what it got is not the whole
            self._connection.abort()

    def eof_received(self) -> bool:
        """Complete a body that ends with the connection."""
        if not self._finished:
            if self._reader is None:
                self._fail(Deny(Code.BAD_RESPONSE, "the target closed the connection without a response"))
            else:
                self._reader.end()
                if self._reader.done:
                    self._finish()
                else:
                    self._fail(Deny(Code.BAD_RESPONSE, "the target closed the connection in the middle of a response"))
        return False

    def connection_lost(self, exc: OSError | None) -> None:
        """Note that the target is gone; before the response's end that is a failure."""
        del exc
        if not self._finished:
            self._fail(Deny(Code.BAD_RESPONSE, "the target broke the connection"))

    def pause_writing(self) -> None:
        """Stop reading a request body that the target does not take."""
        self._client.pause_reading()

    def resume_writing(self) -> None:
        """Read on."""
        self._connection.read_on()
