"""Owns asking one DNS server: over UDP for both families of a name at once, over TCP for one; knows no other server."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from proxy.dns_message import Answer, Failure, NotOurs, RecordType, Truncated, parse, query
from proxy.poller import IN, OUT

if TYPE_CHECKING:
    import asyncio

    from proxy.poller import Poller

_MAX_STRAY = 64
_MAX_DATAGRAM = 4096

Server = tuple[str, int]


class Asker(Protocol):
    """Who is told what a server said."""

    def answered(self, kind: RecordType, result: Answer | Failure, server: Server, attempt: int) -> None:
        """Take an answer."""

    def truncated(self, kind: RecordType, server: Server, attempt: int, limit_s: float) -> None:
        """Note that the answer fits no datagram."""

    def timed_out(self, kinds: tuple[RecordType, ...], attempt: int) -> None:
        """Note that no answer came for these."""

    def ended(self, question: Question) -> None:
        """Note that a question is closed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asking:
    """Which server is asked for what, and how long it is waited for (seconds)."""

    poller: Poller
    server: Server
    host: str
    kinds: tuple[RecordType, ...]
    limit_s: float


class Question:
    """What one server is asked about a name in one datagram for each family, and how long it is waited for."""

    __slots__ = ("_asker", "_asking", "_attempt", "_identities", "_sock", "_stray", "_timer")

    def __init__(self, asker: Asker, asking: Asking, attempt: int) -> None:
        self._asker = asker
        self._asking = asking
        self._attempt = attempt
        self._stray = 0
        self._sock: socket.socket | None = None
        self._timer: asyncio.TimerHandle | None = None
        kinds = asking.kinds
        random = os.urandom(2 * len(kinds))
        self._identities = {kind: int.from_bytes(random[2 * at : 2 * at + 2], "big") for at, kind in enumerate(kinds)}
        """What is not answered yet."""

    def start(self) -> None:
        """Send the questions."""
        self._timer = self._asking.poller.loop.call_later(self._asking.limit_s, self._late)
        try:
            sock = self._sock = _socket(self._asking.server, socket.SOCK_DGRAM)
            sock.connect(self._asking.server)
            for kind, identity in self._identities.items():
                sock.send(query(identity, self._asking.host, kind))
            self._asking.poller.watch(sock.fileno(), IN, self)
        except OSError:
            self.abort()

    def happened(self, events: int) -> None:
        """Read an answer."""
        del events
        if self._sock is None:
            return
        try:
            # one at a time: another is told of again, and that there is none costs an exception
            data = self._sock.recv(_MAX_DATAGRAM)
        except BlockingIOError:
            return
        except OSError:
            # the server's host refuses
            self.abort()
            return
        self._read(data)

    def _read(self, data: bytes) -> None:
        for kind, identity in self._identities.items():
            result = parse(data, identity, self._asking.host, kind)
            if isinstance(result, NotOurs):
                continue
            del self._identities[kind]
            if not self._identities:
                self.close()
            if isinstance(result, Truncated):
                self._asker.truncated(kind, self._asking.server, self._attempt, self._asking.limit_s)
            else:
                self._asker.answered(kind, result, self._asking.server, self._attempt)
            return
        self._stray += 1
        if self._stray >= _MAX_STRAY:
            self._fail(Failure.MALFORMED)

    def abort(self) -> None:
        """Give it up: the server cannot be asked."""
        self._fail(Failure.SERVFAIL)

    def _fail(self, failure: Failure) -> None:
        kinds = tuple(self._identities)
        self.close()
        for kind in kinds:
            self._asker.answered(kind, failure, self._asking.server, self._attempt)

    def _late(self) -> None:
        kinds = tuple(self._identities)
        self.close()
        self._asker.timed_out(kinds, self._attempt)

    def close(self) -> None:
        """Wait for nothing more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self._asker.ended(self)
        if self._sock is not None:
            self._asking.poller.unwatch(self._sock.fileno())
            self._sock.close()
            self._sock = None


def _socket(server: Server, kind: socket.SocketKind) -> socket.socket:
    family = socket.AF_INET6 if ":" in server[0] else socket.AF_INET
    return socket.socket(family, kind | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)


async def exchange(poller: Poller, server: Server, host: str, kind: RecordType) -> Answer | Failure:
    """Ask over TCP (RFC 7766): each message has its length before it. Raises OSError where the connection breaks."""
    identity = int.from_bytes(os.urandom(2), "big")
    question = query(identity, host, kind)
    with _socket(server, socket.SOCK_STREAM) as sock:
        try:
            sock.connect(server)
        except BlockingIOError:
            await poller.ready(sock.fileno(), OUT)
        # it always fits into an empty send buffer; where it is not connected this says why
        sock.send(len(question).to_bytes(2, "big") + question)
        data = await _read_exactly(poller, sock, int.from_bytes(await _read_exactly(poller, sock, 2), "big"))
    result = parse(data, identity, host, kind)
    return Failure.MALFORMED if isinstance(result, NotOurs | Truncated) else result


async def _read_exactly(poller: Poller, sock: socket.socket, size: int) -> bytes:
    """Read `size` bytes. Raises ConnectionError where the stream ends before."""
    data = b""
    while len(data) < size:
        await poller.ready(sock.fileno(), IN)
        try:
            more = sock.recv(size - len(data))
        except BlockingIOError:
            continue
        if not more:
            raise ConnectionError("the server closed the stream in the middle of an answer")
        data += more
    return data
