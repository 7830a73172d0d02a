"""Owns reading from and writing to the pipes and ends of child processes without blocking the loop.

Starts no process.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

import anyio
import anyio.lowlevel

if TYPE_CHECKING:
    from collections.abc import Iterator

_PIECE = 64 * 1024


async def read_some(descriptor: int) -> bytes:
    """Read what there is, at most 64 KiB; empty when the other end is closed. A slow reader holds the writer back."""
    os.set_blocking(descriptor, False)
    await anyio.lowlevel.checkpoint()
    while True:
        try:
            return os.read(descriptor, _PIECE)
        except BlockingIOError:
            await anyio.wait_readable(descriptor)


class Lines:
    """The lines that come out of a descriptor, one by one; it stays its owner's to close."""

    __slots__ = ("_descriptor", "_kept", "_most")

    def __init__(self, descriptor: int, *, most: int) -> None:
        """Read from `descriptor`; a line of more than `most` bytes counts as the end."""
        self._descriptor = descriptor
        self._most = most
        self._kept = bytearray()

    async def next(self) -> bytes | None:
        """Wait for one whole line, without its end; None when there is none any more."""
        while (at := self._kept.find(b"\n")) < 0 and len(self._kept) <= self._most:
            data = await read_some(self._descriptor)
            # What was cut off in the middle is no line.
            if not data:
                return None
            self._kept += data
        # Of the line, not of what was read with it: a busy writer's short lines come many at a time.
        if not 0 <= at <= self._most:
            return None
        line = bytes(self._kept[:at])
        del self._kept[: at + 1]
        return line


async def write(descriptor: int, data: bytes) -> bool:
    """Write everything; False when nobody reads any more."""
    os.set_blocking(descriptor, False)
    left = memoryview(data)
    while left:
        try:
            left = left[os.write(descriptor, left) :]
        except BlockingIOError:
            await anyio.wait_writable(descriptor)
        except BrokenPipeError:
            return False
    return True


async def ended(pidfd: int) -> None:
    """Wait until the process behind a pidfd has ended; it still has to be reaped."""
    await anyio.wait_readable(pidfd)


class Descriptor:
    """One descriptor that is closed once, whoever comes first."""

    __slots__ = ("_number",)

    def __init__(self, number: int) -> None:
        """Take over an open descriptor."""
        self._number = number

    @property
    def number(self) -> int:
        """The descriptor's number, -1 once it is closed."""
        return self._number

    def close(self) -> None:
        """Close it, if it is still open."""
        number, self._number = self._number, -1
        if number >= 0:
            os.close(number)


@contextlib.contextmanager
def memory_file(content: bytes) -> Iterator[int]:
    """Give a descriptor from which `content` can be read, without a name in any file system."""
    descriptor = os.memfd_create("ringfence", os.MFD_CLOEXEC)
    try:
        with os.fdopen(os.dup(descriptor), "wb") as file:
            file.write(content)
        os.lseek(descriptor, 0, os.SEEK_SET)
        yield descriptor
    finally:
        os.close(descriptor)
