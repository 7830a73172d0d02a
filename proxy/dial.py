"""Owns connecting to addresses that were decided on; chooses among them by who answers first and decides nothing."""

from __future__ import annotations

import errno
import os
import socket
from typing import TYPE_CHECKING

from proxy.address import IPV4_LENGTH, Address, parse_address, text_of
from proxy.decision import Code, Deny
from proxy.poller import EDGE, OUT

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from proxy.decision import Dial
    from proxy.poller import Poller

CONNECT_DEADLINE_S = 10.0
ATTEMPT_DELAY_S = 0.25
"""How long one address is waited for before the next is tried beside it (RFC 8305 section 5)."""

Connected = tuple[socket.socket, Address]
"""A connected socket that is watched for nothing, and the address at its other end; whoever gets it owns it."""

_KIND = socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC


class Dialling:
    """Connects to one of the allowed addresses, never to a name, makes sure of who answered, and tells `done` once."""

    __slots__ = ("_attempts", "_done", "_last", "_poller", "_target", "_timer", "_waiting")

    def __init__(self, poller: Poller, allowed: Dial, done: Callable[[Connected | Deny], None]) -> None:
        self._poller = poller
        self._target = allowed.target
        self._done = done
        self._waiting = _interleaved(allowed.addresses)
        self._attempts: list[_Attempt] = []
        self._timer: asyncio.TimerHandle | None = None
        self._last = OSError()

    def start(self) -> None:
        """Try the first address, and the others in turn."""
        while self._waiting:
            if self._try(self._waiting.pop()):
                if self._waiting:
                    self._timer = self._poller.loop.call_later(ATTEMPT_DELAY_S, self.start)
                return
        if not self._attempts:
            why = os.strerror(self._last.errno) if self._last.errno else type(self._last).__name__
            self._done(Deny(Code.CONNECT_FAILED, f"{self._target} could not be reached: {why}"))

    def cancel(self) -> None:
        """Give every attempt up, and tell nobody."""
        self._wait_no_more()
        attempts, self._attempts = self._attempts, []
        for attempt in attempts:
            self._poller.unwatch(attempt.sock.fileno())
            attempt.sock.close()

    def late(self) -> None:
        """Give up, because it took too long."""
        self.cancel()
        message = f"{self._target} did not answer within {CONNECT_DEADLINE_S:g} s"
        self._done(Deny(Code.CONNECT_TIMEOUT, message))

    def _try(self, address: Address) -> bool:
        """Begin with one address; False where that failed at once."""
        family = socket.AF_INET if len(address) == IPV4_LENGTH else socket.AF_INET6
        text = text_of(address)
        try:
            sock = socket.socket(family, _KIND)
        except OSError as broken:
            self._last = broken
            return False
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            failed = sock.connect_ex((text, self._target.port))
            if failed in (0, errno.EINPROGRESS):
                attempt = _Attempt(self, sock, address, text)
                # told once that it is connected; that it broke is told in any case
                self._poller.watch(sock.fileno(), OUT | EDGE, attempt)
                self._attempts.append(attempt)
                return True
            self._last = OSError(failed, "the connection was not made")
        except OSError as broken:
            self._last = broken
        sock.close()
        return False

    def ended(self, attempt: _Attempt) -> None:
        """Look at how an attempt ended."""
        self._attempts.remove(attempt)
        sock = attempt.sock
        try:
            peer = sock.getpeername()[0]
        except OSError:
            # it is not connected, and why is told by another call
            failed = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            self._last = OSError(failed or errno.ENOTCONN, "the connection was not made")
            self._drop(sock)
            self._wait_no_more()
            self.start()
            return
        self.cancel()
        if peer != attempt.text and parse_address(peer) != attempt.address:
            self._drop(sock)
            message = f"{self._target} was dialled at {attempt.text}, and something else answered"
            self._done(Deny(Code.PEER_MISMATCH, message))
        else:
            self._done((sock, attempt.address))

    def _drop(self, sock: socket.socket) -> None:
        self._poller.unwatch(sock.fileno())
        sock.close()

    def _wait_no_more(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class _Attempt:
    """One address that is being connected to."""

    __slots__ = ("_dialling", "address", "sock", "text")

    def __init__(self, dialling: Dialling, sock: socket.socket, address: Address, text: str) -> None:
        self._dialling = dialling
        self.sock = sock
        self.address = address
        self.text = text

    def happened(self, events: int) -> None:
        """Note that it is connected, or not."""
        del events
        self._dialling.ended(self)

    def abort(self) -> None:
        """Note nothing: who is told takes what it raises itself."""


def _interleaved(addresses: tuple[Address, ...]) -> list[Address]:
    """Order the addresses, the first last: IPv6, then the families in turn, as answered (RFC 8305 section 4)."""
    if len(addresses) == 1:
        return list(addresses)
    six = [address for address in addresses if len(address) != IPV4_LENGTH]
    four = [address for address in addresses if len(address) == IPV4_LENGTH]
    ordered = []
    for at in range(max(len(six), len(four))):
        ordered += six[at : at + 1] + four[at : at + 1]
    return ordered[::-1]
