"""Owns one epoll for all descriptors of a proxy, and accepting on them; reads and writes nothing itself.

Watched by whichever loop runs, in place of the loop's own watching and its transports: half the processor time for a
connection, no thread behind a connect, and the same behaviour on every loop.
"""

from __future__ import annotations

import errno
import select
import socket
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

BUFFER = 128 * 1024
"""Bytes that are read at once, and so the most that a stream whose peer is slow holds for it."""

MAX_ACCEPTED = 64
"""Connections that are accepted before anything else gets its turn."""

ACCEPT_AGAIN_S = 0.2
IN, OUT, BROKEN, EDGE = select.EPOLLIN, select.EPOLLOUT, select.EPOLLERR | select.EPOLLHUP, select.EPOLLET
_NO_ROOM = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


class Watched(Protocol):
    """Who has a descriptor that is watched. Called on the loop, one call at a time."""

    def happened(self, events: int) -> None:
        """Take what epoll says of it."""

    def abort(self) -> None:
        """Give it up: `happened` raised."""


class Poller:
    """Watches descriptors for one loop. `report` is told of what was raised, which ends its descriptor only."""

    __slots__ = ("_deferred", "_dispatching", "_epoll", "_report", "_watched", "loop", "view")

    def __init__(self, loop: asyncio.AbstractEventLoop, report: Callable[[BaseException], None]) -> None:
        self.loop = loop
        self.view = memoryview(bytearray(BUFFER))
        self._report = report
        self._watched: dict[int, Watched] = {}
        self._deferred: list[tuple[Callable[[OSError | None], None], OSError | None]] = []
        self._dispatching = False
        self._epoll = select.epoll()
        loop.add_reader(self._epoll.fileno(), self._dispatch)

    def watch(self, fd: int, events: int, watched: Watched) -> None:
        """Tell of these events at `fd`. Raises OSError (ENOSPC, ENOMEM)."""
        self._epoll.register(fd, events)
        self._watched[fd] = watched

    def hand_over(self, fd: int, watched: Watched) -> None:
        """Tell somebody else of the same events from now on."""
        self._watched[fd] = watched

    def change(self, fd: int, events: int) -> None:
        """Watch for something else."""
        self._epoll.modify(fd, events)

    def leave(self, fd: int) -> None:
        """Watch `fd` no more, which is about to be closed."""
        del self._watched[fd]

    def unwatch(self, fd: int) -> None:
        """Watch `fd` no more, which stays open."""
        if self._watched.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    def defer(self, call: Callable[[OSError | None], None], exc: OSError | None) -> None:
        """Call it soon, but not before every event that has come is told."""
        if self._dispatching:
            self._deferred.append((call, exc))
        else:
            self.loop.call_soon(call, exc)

    def _dispatch(self) -> None:
        watched = self._watched
        self._dispatching = True
        for fd, events in self._epoll.poll(0):
            found = watched.get(fd)
            if found is not None:
                try:
                    found.happened(events)
                except Exception as raised:  # noqa: BLE001 — one broken connection must not take the others with it
                    self._report(raised)
                    found.abort()
        self._dispatching = False
        deferred, self._deferred = self._deferred, []
        for call, exc in deferred:
            try:
                call(exc)
            except Exception as raised:  # noqa: BLE001 — the same
                self._report(raised)

    async def ready(self, fd: int, events: int) -> None:
        """Wait for one of these events, or that it broke."""
        waiter = _Waiter(self.loop.create_future())
        # one shot: what is ready stays so until whoever waits has had its turn
        self.watch(fd, events | select.EPOLLONESHOT, waiter)
        try:
            await waiter.done
        finally:
            self.unwatch(fd)


class _Waiter:
    """A task that waits for a descriptor."""

    __slots__ = ("done",)

    def __init__(self, done: asyncio.Future[None]) -> None:
        self.done = done

    def happened(self, events: int) -> None:
        """Wake it."""
        del events
        self.abort()

    def abort(self) -> None:
        """Wake it."""
        if not self.done.done():
            self.done.set_result(None)


class Listener:
    """Accepts connections until it is closed; `accepted` makes of each what it becomes."""

    __slots__ = ("_accepted", "_poller", "_sock")

    def __init__(self, poller: Poller, sock: socket.socket, accepted: Callable[[socket.socket], None]) -> None:
        self._poller = poller
        self._sock = sock
        self._accepted = accepted
        sock.setblocking(False)
        # inherited by what is accepted
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        poller.watch(sock.fileno(), IN, self)

    def close(self) -> None:
        """Accept no more; who waits to be accepted is refused by the kernel."""
        if self._sock.fileno() != -1:
            self._poller.unwatch(self._sock.fileno())
            self._sock.close()

    def happened(self, events: int) -> None:
        """Accept who waits."""
        del events
        for _turn in range(MAX_ACCEPTED):
            try:
                accepted, _peer = self._sock.accept()
            except BlockingIOError:
                return
            except OSError as failed:
                if failed.errno in _NO_ROOM:
                    # nobody is turned away: they wait in the kernel's queue until something is closed
                    self._poller.unwatch(self._sock.fileno())
                    self._poller.loop.call_later(ACCEPT_AGAIN_S, self._again)
                    return
                continue  # that one had left already (accept(2), "Error handling")
            with suppress(OSError):  # there is no room to watch it, and it is closed
                self._accepted(accepted)

    def abort(self) -> None:
        """Go on: what was raised over one connection is reported, and the door stays open for the next."""

    def _again(self) -> None:
        if self._sock.fileno() != -1:
            self._poller.watch(self._sock.fileno(), IN, self)
