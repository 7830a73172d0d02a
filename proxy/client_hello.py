"""Owns reading the server name out of a TLS ClientHello; decides nothing and forwards nothing.

What counts is the outer name (RFC 6066): with Encrypted Client Hello that is the one that is visible. RFC 8446 sections
4.1.2 and 5.1 for the layout.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

MAX_HELLO = 16 * 1024
"""Most bytes of records that are read before the hello must be complete."""

_HANDSHAKE = 22
_CLIENT_HELLO = 1
_SERVER_NAME = 0
_HOST_NAME = 0
_MAX_RECORD = 1 << 14
_RECORD_HEADER = struct.Struct("!BBBH")


@dataclass(frozen=True, slots=True)
class ServerName:
    """The name that the client asks the server for, lower-case, as it came otherwise. May be no host name at all."""

    name: str


@dataclass(frozen=True, slots=True)
class NoServerName:
    """A well-formed ClientHello that names no server."""


@dataclass(frozen=True, slots=True)
class Incomplete:
    """So far a ClientHello, with more to come."""


@dataclass(frozen=True, slots=True)
class NotTls:
    """Not a ClientHello that a server could accept."""

    message: str


def parse(data: bytes | bytearray) -> ServerName | NoServerName | Incomplete | NotTls:
    """Read the records at the start of `data`; what follows the ClientHello is not looked at."""
    message = bytearray()
    at = 0
    while True:
        rest = len(data) - at
        # Judged byte by byte, so that something else than TLS is refused at its first byte.
        if (rest > 0 and data[at] != _HANDSHAKE) or (rest > 1 and data[at + 1] != 3):  # noqa: PLR2004 — TLS is version 3.x
            return NotTls("the first bytes are not a TLS handshake record")
        if rest < _RECORD_HEADER.size:
            return _more(data)
        length = _RECORD_HEADER.unpack_from(data, at)[3]
        if not 0 < length <= _MAX_RECORD:
            return NotTls("a TLS record has an impossible length")
        message += data[at + _RECORD_HEADER.size : at + _RECORD_HEADER.size + length]
        if message[0:1] not in (b"", bytes([_CLIENT_HELLO])):
            return NotTls("the first handshake message is not a ClientHello")
        at += _RECORD_HEADER.size + length
        if len(message) >= 4:  # noqa: PLR2004 — type and length of a handshake message
            size = int.from_bytes(message[1:4], "big")
            if size > MAX_HELLO:
                return NotTls("the ClientHello is too large")
            if len(message) >= 4 + size:
                return _hello(bytes(message[4 : 4 + size]))
        if at >= len(data):
            return _more(data)


def _more(data: bytes | bytearray) -> Incomplete | NotTls:
    return NotTls("the ClientHello is too large") if len(data) >= MAX_HELLO else Incomplete()


class _Cursor:
    """Reads length-prefixed parts; past the end it raises IndexError, which `_hello` turns into a value."""

    __slots__ = ("at", "data")

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0

    def take(self, count: int) -> bytes:
        part = self.data[self.at : self.at + count]
        if len(part) != count:
            raise IndexError
        self.at += count
        return part

    def vector(self, prefix: int) -> bytes:
        return self.take(int.from_bytes(self.take(prefix), "big"))

    def more(self) -> bool:
        return self.at < len(self.data)


def _hello(body: bytes) -> ServerName | NoServerName | NotTls:
    try:
        cursor = _Cursor(body)
        cursor.take(2 + 32)  # legacy version, random
        cursor.vector(1)  # session id
        cursor.vector(2)  # cipher suites
        cursor.vector(1)  # compression methods
        if not cursor.more():
            return NoServerName()
        extensions = _Cursor(cursor.vector(2))
        if cursor.more():
            return NotTls("bytes follow the extensions of the ClientHello")
        name: bytes | None = None
        while extensions.more():
            kind = int.from_bytes(extensions.take(2), "big")
            value = extensions.vector(2)
            if kind == _SERVER_NAME:
                if name is not None:
                    return NotTls("the ClientHello names a server twice")
                name = _server_name(value)
    except IndexError:
        return NotTls("the ClientHello's parts do not fit its length")
    if name is None:
        return NoServerName()
    try:
        return ServerName(name.decode("ascii").lower())
    except UnicodeDecodeError:
        return NotTls("the server name is not ASCII")


def _server_name(value: bytes) -> bytes:
    """Read a list that holds exactly one host name; anything else would let two readers see two names."""
    names = _Cursor(_Cursor(value).vector(2))
    if len(names.data) + 2 != len(value) or names.take(1) != bytes([_HOST_NAME]):
        raise IndexError
    name = names.vector(2)
    if names.more() or not name:
        raise IndexError
    return name
