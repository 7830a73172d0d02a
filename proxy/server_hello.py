"""Owns telling a HelloRetryRequest from every other first answer of a TLS server; reads nothing else of it.

After a HelloRetryRequest the client sends a second ClientHello, in the clear like the first (RFC 8446 section 4.1.2).
"""

from __future__ import annotations

from enum import Enum

MAX_ANSWER = 4 * 1024
"""Most bytes that are looked at for the start of a ServerHello."""

_ALERT = 21
_HANDSHAKE = 22
_CHANGE_CIPHER_SPEC = 20
_HEADER = 5
_RANDOM = 6
"""Where a ServerHello's random stands in its message: after type, length and version."""

_START = bytes([2])
_RETRY = bytes.fromhex("cf21ad74e59a6111be1d8c021e65b891c2a211167abb8c5e079e09e2c8a8339c")
"""SHA-256 of `HelloRetryRequest`: the random that makes a ServerHello one (RFC 8446 section 4.1.3)."""


class Answered(Enum):
    """What a server's first bytes are."""

    RETRY = "a HelloRetryRequest"
    OTHER = "anything else: no second ClientHello will follow in the clear"
    INCOMPLETE = "too few to tell"


def parse(data: bytes | bytearray | memoryview) -> Answered:
    """Judge the start of what a server says. Alerts may come first, and a message may lie in records of any size."""
    message = bytearray()
    at = 0
    while at < len(data):
        kind = data[at]
        if kind not in (_HANDSHAKE, _ALERT, _CHANGE_CIPHER_SPEC):
            return Answered.OTHER
        if at + _HEADER > len(data):
            return Answered.INCOMPLETE
        end = at + _HEADER + (data[at + 3] << 8 | data[at + 4])
        if kind == _HANDSHAKE:
            message += data[at + _HEADER : min(end, at + _HEADER + _RANDOM + len(_RETRY))]
            random = bytes(message[_RANDOM : _RANDOM + len(_RETRY)])
            if message[:1] not in (b"", _START) or not _RETRY.startswith(random):
                return Answered.OTHER
            if len(random) == len(_RETRY):
                return Answered.RETRY
        at = end
    return Answered.INCOMPLETE if len(data) < MAX_ANSWER else Answered.OTHER
