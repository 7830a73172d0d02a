"""Owns the framing of an attached container's outputs; opens and reads no socket.

Docker Engine API, "Attach to a container": each frame is a stream's number (0, 1, 2), three zeros, a big-endian length,
and so many bytes.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from reconciler.backends.base import Stream

if TYPE_CHECKING:
    from collections.abc import Iterator

_HEADER = struct.Struct("!B3xI")
_STREAMS = {0: Stream.STDOUT, 1: Stream.STDOUT, 2: Stream.STDERR}


class Frames:
    """Takes bytes as they come and gives the pieces in them; holds at most a header back, never a payload."""

    __slots__ = ("_header", "_left", "_stream", "broken")

    def __init__(self) -> None:
        """Begin at the start of a frame."""
        self._header = b""
        self._left = 0
        self._stream = Stream.STDOUT
        self.broken = False
        """Set once something came that is no frame; nothing more is given then."""

    def feed(self, data: bytes) -> Iterator[tuple[Stream, bytes]]:
        """Give each piece of a payload in `data`, in order, with the stream that it is of."""
        at = 0
        while at < len(data) and not self.broken:
            if self._left:
                piece = data[at : at + self._left]
                at += len(piece)
                self._left -= len(piece)
                yield self._stream, piece
                continue
            wanted = _HEADER.size - len(self._header)
            self._header += data[at : at + wanted]
            at += wanted
            if len(self._header) == _HEADER.size:
                number, self._left = _HEADER.unpack(self._header)
                self._header = b""
                if number not in _STREAMS:
                    self.broken = True
                else:
                    self._stream = _STREAMS[number]
