"""Owns connected sockets: reading, writing, backpressure, half-closes, resets. Looks at no byte.

In place of a loop's transports, with one buffer for all that is read. What is called is named as in asyncio:
`data_received`, `eof_received`, `connection_lost`, `pause_writing`, `resume_writing`.
"""

from __future__ import annotations

import socket
import struct
from typing import TYPE_CHECKING, Protocol

from proxy.poller import BROKEN, BUFFER, IN, OUT

if TYPE_CHECKING:
    from proxy.poller import Poller

MAX_READS = 4
"""How often one stream is read before another gets its turn, as long as it fills the buffer."""

_RESET = struct.pack("ii", 1, 0)
_NOW = socket.MSG_DONTWAIT
"""Never wait in a call: what is accepted is not made non-blocking, which would be one more call."""


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
    """One connected TCP socket, which it owns. It reads from the start, unless it was `dialled` (see `proxy.dial`)."""

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

    def __init__(self, poller: Poller, sock: socket.socket, end: End, *, dialled: bool = False) -> None:
        self._poller = poller
        self.sock = sock
        self._end = end
        self._fd = sock.fileno()
        self._out = bytearray()
        self._paused = dialled
        self.ended = False
        """The other side sends no more."""
        self._half = False
        """This side writes no more, after what is in `_out`."""
        self._closing = False
        self._lost = False
        self._events = 0 if dialled else IN
        self._watched = True
        if dialled:
            # watched already, and for nothing that comes again
            poller.hand_over(self._fd, self)
            return
        try:
            poller.watch(self._fd, self._events, self)
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
                sent = self.sock.send(data, _NOW)
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

    def happened(self, events: int) -> None:
        """Take what epoll says of the socket."""
        if events & OUT and self._out:
            self._flush()
        if self._lost:
            return
        if events & IN and self._events & IN:
            self._read()
        elif events & BROKEN:
            failed = self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if failed:
                self._lose(OSError(failed, "the connection broke"))
            elif not self._events & IN:
                # both sides have ended, which is told again and again; what came before may still be read
                self._unwatch()

    def _read(self) -> None:
        view = self._poller.view
        for _turn in range(MAX_READS):
            try:
                size = self.sock.recv_into(view, 0, _NOW)
            except BlockingIOError:
                return
            except OSError as broken:
                self._lose(broken)
                return
            if not size:
                break
            self._end.data_received(view[:size])
            if size < BUFFER or not self._events & IN or self._lost:
                return
        else:
            return
        self.ended = True
        if not self._end.eof_received():
            self.close()
        self._watch()

    def _flush(self) -> None:
        try:
            del self._out[: self.sock.send(self._out, _NOW)]
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
        wanted = 0 if self._paused or self.ended or self._closing else IN
        if self._out:
            wanted |= OUT
        if not self._watched:
            if wanted:
                self._watched = True
                self._events = wanted
                self._poller.watch(self._fd, wanted, self)
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
