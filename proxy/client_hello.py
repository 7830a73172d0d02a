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
_MAX_OPAQUE = _MAX_RECORD + 256
_RECORD_HEADER = struct.Struct("!BBBH")
_BESIDE = frozenset({20, 21, 23})
"""Record types that may come before a second ClientHello: change_cipher_spec, an alert, early data."""


@dataclass(frozen=True, slots=True)
class ServerName:
    """The name that the client asks the server for, lower-case, as it came otherwise. May be no host name at all.

    `size` is how many bytes the hello's records have.
    """

    name: str
    size: int


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
            if len(message) - 4 + max(0, at - len(data)) > size:
                # it ends with its record (RFC 8446 section 5.1), or a second one could hide behind it
                return NotTls("something follows the ClientHello in its record")
            if len(message) == 4 + size:
                return _hello(bytes(message[4:]), at)
        if at >= len(data):
            return _more(data)


def _more(data: bytes | bytearray) -> Incomplete | NotTls:
    return NotTls("the ClientHello is too large") if len(data) >= MAX_HELLO else Incomplete()


def beside(data: bytes | bytearray) -> int | NotTls | None:
    """Say how many bytes of whole records stand before a second ClientHello; None while one of them is not whole.

    Only what a client may send there, which a server that asked for another ClientHello skips (RFC 8446 4.2.10, D.4).
    """
    at = 0
    while at < len(data) and data[at] in _BESIDE:
        if len(data) - at < _RECORD_HEADER.size:
            return at or None
        end = at + _RECORD_HEADER.size + _RECORD_HEADER.unpack_from(data, at)[3]
        if end - at - _RECORD_HEADER.size > _MAX_OPAQUE:
            return NotTls("a TLS record has an impossible length")
        if end > len(data):
            return at or None
        at = end
    return at


def _hello(body: bytes, records: int) -> ServerName | NoServerName | NotTls:
    """Read a whole ClientHello without its handshake header; its records have so many bytes.

    Offsets, not objects: each tunnel to 443 comes by.
    """
    try:
        at = 2 + 32  # legacy version, random
        at += 1 + body[at]  # session id
        at += 2 + (body[at] << 8 | body[at + 1])  # cipher suites
        at += 1 + body[at]  # compression methods
        if at == len(body):
            return NoServerName()
        end = at + 2 + (body[at] << 8 | body[at + 1])
        at += 2
        if end != len(body):
            return NotTls("the extensions do not end where the ClientHello does")
        name: bytes | None = None
        while at < end:
            kind = body[at] << 8 | body[at + 1]
            value = at + 4
            at = value + (body[at + 2] << 8 | body[at + 3])
            if at > end:
                return NotTls("an extension is longer than the ClientHello")
            if kind == _SERVER_NAME:
                if name is not None:
                    return NotTls("the ClientHello names a server twice")
                name = _server_name(body[value:at])
    except IndexError:
        return NotTls("the ClientHello's parts do not fit its length")
    if name is None:
        return NoServerName()
    try:
        return ServerName(name.decode("ascii").lower(), records)
    except UnicodeDecodeError:
        return NotTls("the server name is not ASCII")


def _server_name(value: bytes) -> bytes:
    """Read a list that holds exactly one host name; anything else would let two readers see two names."""
    listed, kind, size = value[0] << 8 | value[1], value[2], value[3] << 8 | value[4]
    if listed != len(value) - 2 or size != len(value) - 5 or kind != _HOST_NAME or not size:
        raise IndexError
    return value[5:]
