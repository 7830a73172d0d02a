"""Owns what comes in from outside: policies from a pipe or a file, a listening socket, the names of DNS servers.

Does not read what a policy holds.
"""

from __future__ import annotations

import asyncio
import os
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING

from proxy.address import parse_address, text_of

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_POLICY = 8 << 20
LOOK_S = 0.1
"""How often a policy's file is looked at: a volume that is replaced is another file under the same name."""
_READ = 1 << 16
_DNS_PORT = 53


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


class PolicyFile:
    """A file that holds one policy and is replaced as a whole, as a mounted ConfigMap is; each content comes out once.

    A file that is gone or cannot be read says nothing: what holds goes on until it expires.
    """

    __slots__ = ("_last", "_path", "_seen")

    def __init__(self, path: str) -> None:
        self._path = path
        self._seen: tuple[int, int, int, int] | None = None
        self._last: bytes | None = None

    async def line(self) -> bytes:
        """Wait for the next content."""
        while True:
            data = self._look()
            if data is not None:
                return data
            await asyncio.sleep(LOOK_S)

    def close(self) -> None:
        """Nothing is held open."""

    def _look(self) -> bytes | None:
        try:
            with open(self._path, "rb") as file:  # noqa: PTH123 - pathlib is 5 ms of start-up
                facts = os.fstat(file.fileno())
                seen = (facts.st_dev, facts.st_ino, facts.st_mtime_ns, facts.st_size)
                if seen == self._seen:
                    return None
                data = file.read(MAX_POLICY + 1)
        except OSError:
            return None
        self._seen = seen
        if data == self._last:
            return None
        self._last = data
        return b"" if len(data) > MAX_POLICY else data.strip()


def nameservers(path: str) -> tuple[tuple[str, int], ...]:
    """Read the servers of a resolv.conf(5), each with its port; one with a zone is left out. None without such a file.

    Where the proxy is a pod, that file is the kubelet's and names the cluster's own DNS.
    """
    try:
        with open(path, encoding="ascii", errors="replace") as file:  # noqa: PTH123 - as above
            lines = [line.split() for line in file.read(_READ).splitlines()]
    except OSError:
        return ()
    named = (parse_address(words[1]) for words in lines if len(words) > 1 and words[0] == "nameserver")
    return tuple((text_of(address), _DNS_PORT) for address in named if address is not None)


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
