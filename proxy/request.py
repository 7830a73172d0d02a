"""Owns one HTTP message on its way through: the head that goes on, and a body's framing read and written anew.

Does not read heads, decide, or touch a socket. Rules: RFC 9110 section 7.6, RFC 9112 sections 6 and 7.
"""

from __future__ import annotations

import re
from enum import Enum
from typing import TYPE_CHECKING

from proxy.decision import Code
from proxy.head import MAX_FIELDS, MAX_HEAD, Framing, Malformed, RequestHead, ResponseHead, parse_fields
from proxy.target import HTTP_PORT

if TYPE_CHECKING:
    from proxy.decision import Target

LAST_CHUNK = b"0\r\n\r\n"
MAX_CHUNK_LINE = 256
_HOP_BY_HOP = frozenset(
    {b"connection", b"http2-settings", b"keep-alive", b"te", b"trailer", b"transfer-encoding", b"upgrade"}
)
_REWRITTEN = frozenset({b"host", b"content-length"})
_NEVER_TRAILING = frozenset({b"content-length", b"host", b"transfer-encoding"})
"""Fields that no trailer may have (RFC 9110, section 6.5.1); trailers are dropped, and these are refused."""
_CHUNK_SIZE = re.compile(rb"([0-9A-Fa-f]{1,15})(?:;[\t\x20-\x7e\x80-\xff]*)?")


def forward_request(head: RequestHead, target: Target, origin: str, *, via: bytes) -> bytes | Malformed:
    """Write the head that the target gets: `Host` from the target, our own framing, one request a connection.

    `via` is this process's pseudonym; a request that already went through it is a loop.
    """
    lines = [f"{head.method} {origin} HTTP/1.1\r\nHost: {_authority(target)}\r\n".encode("ascii")]
    for name, spelled, value in head.fields:
        if name == b"via" and via in value:
            return Malformed(Code.LOOP, "the request has been through this proxy before")
        if _end_to_end(name, head.dropped):
            lines.append(b"%b: %b\r\n" % (spelled, value))
    lines.append(_framing(head.framing, head.length))
    if head.framing is Framing.NONE and any(name == b"content-length" for name, _, _ in head.fields):
        lines.append(b"Content-Length: 0\r\n")
    lines.append(b"Via: 1.%d %b\r\nConnection: close\r\n\r\n" % (head.minor, via))
    return b"".join(lines)


def forward_response(head: ResponseHead, *, framing: Framing, persistent: bool, via: bytes) -> bytes:
    """Write the head that the client gets; `framing` is what the body will have on this side."""
    lines = [b"HTTP/1.1 %d %b\r\n" % (head.status, head.reason)]
    bodiless = head.framing is Framing.NONE
    for name, spelled, value in head.fields:
        # the length of a body that HEAD and 304 leave out is the target's to tell
        if _end_to_end(name, head.dropped) or (bodiless and name == b"content-length"):
            lines.append(b"%b: %b\r\n" % (spelled, value))
    lines.append(_framing(framing, head.length))
    lines.append(b"Via: 1.1 %b\r\n" % via)
    if not persistent:
        lines.append(b"Connection: close\r\n")
    lines.append(b"\r\n")
    return b"".join(lines)


def response_framing(head: ResponseHead, *, minor: int) -> Framing:
    """Say which framing a response's body gets towards a client of HTTP/1.`minor`."""
    match head.framing:
        case Framing.NONE | Framing.LENGTH:
            return head.framing
        case Framing.CHUNKED | Framing.UNTIL_CLOSE:
            return Framing.CHUNKED if minor else Framing.UNTIL_CLOSE


def chunk(data: bytes) -> bytes:
    """Frame one piece, which is not empty, as one chunk."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def _authority(target: Target) -> str:
    return target.host if target.port == HTTP_PORT else str(target)


def _framing(framing: Framing, length: int) -> bytes:
    match framing:
        case Framing.CHUNKED:
            return b"Transfer-Encoding: chunked\r\n"
        case Framing.LENGTH:
            return b"Content-Length: %d\r\n" % length
        case Framing.NONE | Framing.UNTIL_CLOSE:
            return b""


def _end_to_end(name: bytes, dropped: frozenset[bytes]) -> bool:
    return not (name in dropped or name in _HOP_BY_HOP or name in _REWRITTEN or name.startswith(b"proxy-"))


class _Part(Enum):
    """Where in a chunked body the reader is."""

    SIZE = "size"
    DATA = "data"
    DATA_END = "data end"
    TRAILER = "trailer"


class BodyReader:
    """Takes one body off a stream of bytes: pieces of content come out, framing and trailers stay behind.

    `done` says that the body is complete, `broken` (a message) that its framing is not acceptable.
    """

    __slots__ = ("_framing", "_left", "_line", "_part", "_trailers", "broken", "done")

    def __init__(self, framing: Framing, length: int = 0) -> None:
        self._framing = framing
        self._left = length
        self._line = bytearray()
        self._part = _Part.SIZE
        self._trailers = 0
        self.done = framing is Framing.NONE
        self.broken: str | None = None

    def feed(self, data: bytes, out: list[bytes]) -> int:
        """Take what belongs to the body off `data`, append its content to `out`, and say how many bytes that was."""
        if self.done or self.broken is not None:
            return 0
        match self._framing:
            case Framing.UNTIL_CLOSE:
                out.append(data)
                return len(data)
            case Framing.CHUNKED:
                return self._feed_chunked(data, out)
            case Framing.NONE | Framing.LENGTH:
                taken = data[: self._left]
                out.append(taken)
                self._left -= len(taken)
                self.done = self._left == 0
                return len(taken)

    def end(self) -> None:
        """Note that the stream ended, which completes a body without other framing."""
        self.done = self.done or self._framing is Framing.UNTIL_CLOSE

    def _feed_chunked(self, data: bytes, out: list[bytes]) -> int:
        at, size = 0, len(data)
        while at < size and not self.done and self.broken is None:
            if self._part is _Part.DATA:
                taken = data[at : at + self._left]
                out.append(taken)
                at += len(taken)
                self._left -= len(taken)
                if not self._left:
                    self._part = _Part.DATA_END
                continue
            end = data.find(b"\n", at)
            stop = size if end == -1 else end + 1
            self._line += data[at:stop]
            at = stop
            if len(self._line) > (MAX_HEAD if self._part is _Part.TRAILER else MAX_CHUNK_LINE):
                self.broken = "a line of a chunked body is too long"
            elif end != -1:
                line = bytes(self._line)
                self._line.clear()
                self.broken = self._take_line(line)
        return at

    def _take_line(self, line: bytes) -> str | None:
        if not line.endswith(b"\r\n"):
            return "a line of a chunked body ends in a bare LF"
        match self._part:
            case _Part.SIZE:
                found = _CHUNK_SIZE.fullmatch(line[:-2])
                if found is None:
                    return "a chunk's size is not a plain hexadecimal number"
                self._left = int(found[1], 16)
                self._part = _Part.DATA if self._left else _Part.TRAILER
            case _Part.DATA_END | _Part.DATA:
                if line != b"\r\n":
                    return "a chunk is longer than its size says"
                self._part = _Part.SIZE
            case _Part.TRAILER:
                if line == b"\r\n":
                    self.done = True
                    return None
                self._trailers += 1
                found_fields = parse_fields(line)
                if self._trailers > MAX_FIELDS or isinstance(found_fields, Malformed):
                    return "the trailer of a chunked body is not acceptable"
                if any(name in _NEVER_TRAILING for name, _, _ in found_fields):
                    return "the trailer of a chunked body holds a field of framing or routing"
        return None
