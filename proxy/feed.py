"""Owns what comes in from the daemon: policies line by line, and a listening socket; does not read what they hold."""

from __future__ import annotations

import asyncio
import os
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_POLICY = 8 << 20
_READ = 1 << 16


class PolicyFeed:
    """Lines from a descriptor (a pipe or a socket). A line that is too long comes out empty, which no policy is."""

    __slots__ = ("_buffer", "_fd", "_lines", "_loop", "_on_end", "_skipping")

    def __init__(self, fd: int, loop: asyncio.AbstractEventLoop, on_end: Callable[[], None]) -> None:
        self._fd = fd
        self._loop = loop
        self._on_end = on_end
        self._buffer = bytearray()
        self._skipping = False
        self._lines: asyncio.Queue[bytes] = asyncio.Queue()
        os.set_blocking(fd, False)
        loop.add_reader(fd, self._read)

    async def line(self) -> bytes:
        """Wait for the next line, without its end."""
        return await self._lines.get()

    def close(self) -> None:
        """Read no more."""
        self._loop.remove_reader(self._fd)
        os.set_blocking(self._fd, True)

    def _read(self) -> None:
        try:
            data = os.read(self._fd, _READ)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._loop.remove_reader(self._fd)
            self._on_end()
            return
        *whole, rest = data.split(b"\n")
        for part in whole:
            self._lines.put_nowait(b"" if self._skipping else bytes(self._buffer) + part)
            self._buffer.clear()
            self._skipping = False
        if not self._skipping:
            self._buffer += rest
        if len(self._buffer) > MAX_POLICY:
            self._buffer.clear()
            self._skipping = True


@dataclass(frozen=True, slots=True)
class NoListener:
    """No usable listening socket came; `message` says why."""

    message: str


async def receive_listener(fd: int) -> socket.socket | NoListener:
    """Receive exactly one listening TCP socket over one end of a Unix socket pair, and close that end."""
    loop = asyncio.get_running_loop()
    try:
        channel = socket.socket(fileno=fd)
    except OSError:
        return NoListener(f"descriptor {fd} is not a socket")
    with channel:
        if channel.family != socket.AF_UNIX:
            return NoListener(f"descriptor {fd} is not a Unix socket")
        channel.setblocking(False)
        readable = loop.create_future()
        loop.add_reader(fd, readable.set_result, None)
        try:
            await readable
        finally:
            loop.remove_reader(fd)
        _, received, flags, _ = socket.recv_fds(channel, 1, 2)
    if flags & socket.MSG_CTRUNC or len(received) != 1:
        for extra in received:
            os.close(extra)
        return NoListener("exactly one listening socket was expected")
    try:
        listener = socket.socket(fileno=received[0])
    except OSError:
        os.close(received[0])
        return NoListener("what was received is not a listening TCP socket")
    if (
        listener.family not in (socket.AF_INET, socket.AF_INET6)
        or listener.type != socket.SOCK_STREAM
        or not listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    ):
        listener.close()
        return NoListener("what was received is not a listening TCP socket")
    return listener
