"""Owns connected sockets on the loop: reading, writing, backpressure, half-closes, resets. Looks at no byte.

One epoll of our own, watched by whichever loop runs, in place of the loop's transports: half the processor time for a
connection, no thread behind a connect, one buffer for all that is read, and the same behaviour on every loop. What is
called is named as in asyncio: `data_received`, `eof_received`, `connection_lost`, `pause_writing`, `resume_writing`.
"""

from __future__ import annotations

import errno
import select
import socket
import struct
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

BUFFER = 128 * 1024
"""Bytes that are read at once, and so the most that a stream whose peer is slow holds for it."""

MAX_ACCEPTED = 64
"""Connections that are accepted before anything else gets its turn."""

MAX_READS = 4
"""How often one stream is read before another gets its turn, as long as it fills the buffer."""

ACCEPT_AGAIN_S = 0.2
_RESET = struct.pack("ii", 1, 0)
_IN, _OUT, _BROKEN = select.EPOLLIN, select.EPOLLOUT, select.EPOLLERR | select.EPOLLHUP
_NO_ROOM = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


class End(Protocol):
    """Who is told what happens on a stream. Called on the loop, one call at a time."""

    def data_received(self, data: memoryview) -> None:
        """Take bytes; `data` is the poller's own buffer, to be copied or sent before this returns."""

    def eof_received(self) -> bool:
        """Note that the other side sends no more; False closes the stream after what is still to be written."""

    def connection_lost(self, exc: OSError | None) -> None:
        """Note the end of the stream, once: None when this side closed it."""

    def pause_writing(self) -> None:
        """Write no more: what was written is not taken."""

    def resume_writing(self) -> None:
        """Write on."""


class Poller:
    """Watches descriptors for one loop. `report` is told of what a handler raised, which ends its descriptor only."""

    __slots__ = ("_deferred", "_dispatching", "_epoll", "_handlers", "_report", "loop", "view")

    def __init__(self, loop: asyncio.AbstractEventLoop, report: Callable[[BaseException], None]) -> None:
        self.loop = loop
        self.view = memoryview(bytearray(BUFFER))
        self._report = report
        self._handlers: dict[int, tuple[Callable[[int], None], Callable[[], None]]] = {}
        self._deferred: list[tuple[Callable[[OSError | None], None], OSError | None]] = []
        self._dispatching = False
        self._epoll = select.epoll()
        loop.add_reader(self._epoll.fileno(), self._dispatch)

    def watch(self, fd: int, events: int, handler: Callable[[int], None], broken: Callable[[], None]) -> None:
        """Call `handler` with what happened at `fd`, and `broken` where it raised. Raises OSError (ENOSPC, ENOMEM)."""
        self._epoll.register(fd, events)
        self._handlers[fd] = (handler, broken)

    def change(self, fd: int, events: int) -> None:
        """Watch for something else."""
        self._epoll.modify(fd, events)

    def leave(self, fd: int) -> None:
        """Watch `fd` no more, which is about to be closed."""
        del self._handlers[fd]

    def unwatch(self, fd: int) -> None:
        """Watch `fd` no more, which stays open."""
        if self._handlers.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    def defer(self, call: Callable[[OSError | None], None], exc: OSError | None) -> None:
        """Call it soon, but not before every event that has come is told."""
        if self._dispatching:
            self._deferred.append((call, exc))
        else:
            self.loop.call_soon(call, exc)

    def _dispatch(self) -> None:
        handlers = self._handlers
        self._dispatching = True
        for fd, events in self._epoll.poll(0):
            found = handlers.get(fd)
            if found is not None:
                try:
                    found[0](events)
                except Exception as raised:  # noqa: BLE001 — one broken connection must not take the others with it
                    self._report(raised)
                    found[1]()
        self._dispatching = False
        deferred, self._deferred = self._deferred, []
        for call, exc in deferred:
            try:
                call(exc)
            except Exception as raised:  # noqa: BLE001 — the same
                self._report(raised)

    async def connect(self, sock: socket.socket, address: tuple[str, int], limit_s: float) -> str:
        """Connect a non-blocking socket to a numeric address, and say which address answered.

        Raises OSError, TimeoutError after so long.
        """
        try:
            sock.connect(address)
        except BlockingIOError:
            if not await self._ready(sock.fileno(), _OUT, limit_s):
                raise TimeoutError from None
        try:
            return str(sock.getpeername()[0])
        except OSError:
            # it is not connected, and why is told by another call
            failed = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            raise OSError(failed or errno.ENOTCONN, "the connection was not made") from None

    async def receive(self, sock: socket.socket, size: int, limit_s: float) -> bytes | None:
        """Wait for bytes of a non-blocking socket: at most so many, none at a stream's end, None after so long.

        Raises OSError.
        """
        end = self.loop.time() + limit_s
        while (left := end - self.loop.time()) > 0:
            if not await self._ready(sock.fileno(), _IN, left):
                return None
            with suppress(BlockingIOError):
                return sock.recv(size)
        return None

    async def _ready(self, fd: int, events: int, limit_s: float | None = None) -> bool:
        """Wait for events; False when the time is over."""
        done: asyncio.Future[bool] = self.loop.create_future()

        def ready(happened: int = 1) -> None:
            if not done.done():
                done.set_result(bool(happened))

        timer = None if limit_s is None else self.loop.call_later(limit_s, ready, 0)
        # one shot: what is ready stays so until whoever waits has had its turn
        self.watch(fd, events | select.EPOLLONESHOT, ready, ready)
        try:
            return await done
        finally:
            self.unwatch(fd)
            if timer is not None:
                timer.cancel()


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
        poller.watch(sock.fileno(), _IN, self._accept, self._survive)

    def close(self) -> None:
        """Accept no more; who waits to be accepted is refused by the kernel."""
        if self._sock.fileno() != -1:
            self._poller.unwatch(self._sock.fileno())
            self._sock.close()

    def _accept(self, _: int) -> None:
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

    def _survive(self) -> None:
        """Go on: what was raised over one connection is reported, and the door stays open for the next."""

    def _again(self) -> None:
        if self._sock.fileno() != -1:
            self._poller.watch(self._sock.fileno(), _IN, self._accept, self._survive)


class _Nobody:
    """Whom a stream tells that is no more."""

    def data_received(self, data: memoryview) -> None:
        """Note nothing."""

    def eof_received(self) -> bool:
        """Note nothing."""
        return False

    def connection_lost(self, exc: OSError | None) -> None:
        """Note nothing."""

    def pause_writing(self) -> None:
        """Note nothing."""

    def resume_writing(self) -> None:
        """Note nothing."""


_NOBODY = _Nobody()


class Stream:
    """One connected TCP socket, which it owns. It reads from the start unless `paused`."""

    __slots__ = (
        "_closing",
        "_end",
        "_events",
        "_fd",
        "_half",
        "_lost",
        "_out",
        "_paused",
        "_poller",
        "_watched",
        "ended",
        "sock",
    )

    def __init__(self, poller: Poller, sock: socket.socket, end: End, *, paused: bool = False) -> None:
        self._poller = poller
        self.sock = sock
        self._end = end
        self._fd = sock.fileno()
        self._out = bytearray()
        self._paused = paused
        self.ended = False
        """The other side sends no more."""
        self._half = False
        """This side writes no more, after what is in `_out`."""
        self._closing = False
        self._lost = False
        self._events = 0 if paused else _IN
        self._watched = True
        try:
            poller.watch(self._fd, self._events, self._happened, self.abort)
        except OSError:
            sock.close()
            raise

    # What its owner asks for.

    def set_end(self, end: End) -> None:
        """Tell somebody else from now on."""
        self._end = end

    def is_closing(self) -> bool:
        """Say whether it is closed, or will be after what is still to be written."""
        return self._closing

    @property
    def takes(self) -> bool:
        """Say whether all that was written is gone."""
        return not self._out

    def pause_reading(self) -> None:
        """Leave what comes in the kernel."""
        if not self._paused:
            self._paused = True
            self._watch()

    def resume_reading(self) -> None:
        """Read on."""
        if self._paused:
            self._paused = False
            self._watch()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Send now what the kernel takes, and keep a copy of the rest."""
        if self._closing or self._half or not data:
            return
        if not self._out:
            try:
                sent = self.sock.send(data)
            except BlockingIOError:
                sent = 0
            except OSError as broken:
                self._lose(broken)
                return
            if sent == len(data):
                return
            self._out += memoryview(data)[sent:]
            self._watch()
            self._end.pause_writing()
        else:
            self._out += data

    def write_eof(self) -> None:
        """Send no more after what was written."""
        if not self._half and not self._closing:
            self._half = True
            if not self._out:
                self._shut()

    def close(self) -> None:
        """Read no more, and close after what was written is gone."""
        if not self._closing:
            self._closing = True
            if self._out:
                self._watch()
            else:
                self._lose(None)

    def abort(self) -> None:
        """Close now."""
        self._closing = True
        self._lose(None)

    def reset(self) -> None:
        """Close now and with a reset: the other side must not take a broken stream for a finished one."""
        if not self._lost:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            self.abort()

    # What happens.

    def _happened(self, events: int) -> None:
        if events & _OUT and self._out:
            self._flush()
        if self._lost:
            return
        if events & _IN and self._events & _IN:
            self._read()
        elif events & _BROKEN:
            failed = self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if failed:
                self._lose(OSError(failed, "the connection broke"))
            elif not self._events & _IN:
                # both sides have ended, which is told again and again; what came before may still be read
                self._unwatch()

    def _read(self) -> None:
        view = self._poller.view
        for _turn in range(MAX_READS):
            try:
                size = self.sock.recv_into(view)
            except BlockingIOError:
                return
            except OSError as broken:
                self._lose(broken)
                return
            if not size:
                break
            self._end.data_received(view[:size])
            if size < BUFFER or not self._events & _IN or self._lost:
                return
        else:
            return
        self.ended = True
        if not self._end.eof_received():
            self.close()
        self._watch()

    def _flush(self) -> None:
        try:
            del self._out[: self.sock.send(self._out)]
        except BlockingIOError:
            return
        except OSError as broken:
            self._lose(broken)
            return
        if self._out:
            return
        if self._closing:
            self._lose(None)
            return
        self._watch()
        if self._half:
            self._shut()
        else:
            self._end.resume_writing()

    def _shut(self) -> None:
        try:
            self.sock.shutdown(socket.SHUT_WR)
        except OSError as broken:
            self._lose(broken)

    def _watch(self) -> None:
        """Bring what is watched for in line with what is wanted."""
        if self._lost:
            return
        wanted = 0 if self._paused or self.ended or self._closing else _IN
        if self._out:
            wanted |= _OUT
        if not self._watched:
            if wanted:
                self._watched = True
                self._events = wanted
                self._poller.watch(self._fd, wanted, self._happened, self.abort)
        elif wanted != self._events:
            self._events = wanted
            self._poller.change(self._fd, wanted)

    def _unwatch(self) -> None:
        if self._watched:
            self._watched = False
            self._poller.unwatch(self._fd)

    def _lose(self, exc: OSError | None) -> None:
        """End it. The descriptor is closed in a later turn of the loop: no event of this one may meet another's."""
        if not self._lost:
            self._lost = self._closing = True
            self._out.clear()
            if self._watched:
                self._poller.leave(self._fd)
            self._poller.defer(self._gone, exc)

    def _gone(self, exc: OSError | None) -> None:
        self.sock.close()
        # its end holds it, and it held its end: without this only the garbage collector would free the two
        end, self._end = self._end, _NOBODY
        end.connection_lost(exc)
