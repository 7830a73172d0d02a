"""Owns the bytes of DNS: one question out, one answer in; sends nothing and knows no policy. RFC 1035, RFC 3596."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import Enum

from proxy.address import IPV4_LENGTH, IPV6_LENGTH, Address

MAX_ADDRESSES = 16
"""Most addresses of one answer that are kept."""

MAX_CHAIN = 16
_HEADER = struct.Struct("!HHHHHH")
_QUESTION = struct.Struct("!HH")
_RECORD = struct.Struct("!HHIH")
_IN = 1
_CNAME = 5
_QR = 0x8000
_OPCODE = 0x7800
_TC = 0x0200
_RD = 0x0100
_POINTER = 0xC0
_MAX_JUMPS = 64
_MAX_TTL = 0x7FFFFFFF


class RecordType(Enum):
    """The two questions that are asked."""

    A = 1
    AAAA = 28


class Failure(Enum):
    """Why an answer has no addresses to use."""

    NXDOMAIN = "nxdomain"
    SERVFAIL = "servfail"
    EMPTY = "empty"
    MALFORMED = "malformed"
    TIMEOUT = "timeout"


@dataclass(frozen=True, slots=True)
class Answer:
    """Addresses of one family, at least one and at most `MAX_ADDRESSES`; `ttl` (seconds) is the least on the way."""

    addresses: tuple[Address, ...]
    ttl: int


@dataclass(frozen=True, slots=True)
class Truncated:
    """The answer did not fit a datagram: ask again over TCP."""


@dataclass(frozen=True, slots=True)
class NotOurs:
    """Not an answer to this question: to be ignored, because anybody may send it."""


def query(identity: int, host: str, kind: RecordType) -> bytes:
    """Write the question for an absolute name (canonical, no trailing dot), recursion desired."""
    return _HEADER.pack(identity, _RD, 1, 0, 0, 0) + _question(host, kind)


def _question(host: str, kind: RecordType) -> bytes:
    labels = b"".join(bytes([len(label)]) + label.encode("ascii") for label in host.split("."))
    return labels + b"\0" + _QUESTION.pack(kind.value, _IN)


def parse(data: bytes, identity: int, host: str, kind: RecordType) -> Answer | Failure | Truncated | NotOurs:
    """Read one message as the answer to `query(identity, host, kind)`.

    Addresses count only for the name that was asked, or the end of its chain of aliases within this answer.
    """
    question = _question(host, kind)
    if len(data) < _HEADER.size + len(question):
        return NotOurs()
    found, flags, questions, answers, _, _ = _HEADER.unpack_from(data)
    if found != identity or not flags & _QR or flags & _OPCODE or questions != 1:
        return NotOurs()
    if data[_HEADER.size : _HEADER.size + len(question)].lower() != question.lower():
        return NotOurs()
    if flags & _TC:
        return Truncated()
    match flags & 0xF:
        case 0:
            return _addresses(data, _HEADER.size + len(question), answers, host, kind)
        case 3:
            return Failure.NXDOMAIN
        case _:
            return Failure.SERVFAIL


def _addresses(data: bytes, at: int, count: int, host: str, kind: RecordType) -> Answer | Failure:
    aliases: dict[bytes, tuple[bytes, int]] = {}
    found: dict[bytes, list[tuple[Address, int]]] = {}
    try:
        for _ in range(count):
            owner, at = _name(data, at)
            rtype, rclass, ttl, length = _RECORD.unpack_from(data, at)
            at += _RECORD.size
            value = data[at : at + length]
            if len(value) != length:
                return Failure.MALFORMED
            # RFC 2181 section 8: a TTL with its top bit set is zero
            ttl = ttl if ttl <= _MAX_TTL else 0
            if rclass == _IN and rtype == _CNAME:
                alias, end = _name(data, at)
                if end != at + length or owner in aliases:
                    return Failure.MALFORMED
                aliases[owner] = alias, ttl
            elif rclass == _IN and rtype == kind.value:
                if length != (IPV4_LENGTH if kind is RecordType.A else IPV6_LENGTH):
                    return Failure.MALFORMED
                found.setdefault(owner, []).append((value, ttl))
            at += length
    except (IndexError, struct.error):
        return Failure.MALFORMED
    return _chase(host.encode("ascii"), aliases, found)


def _chase(
    name: bytes, aliases: dict[bytes, tuple[bytes, int]], found: dict[bytes, list[tuple[Address, int]]]
) -> Answer | Failure:
    least = _MAX_TTL
    for _ in range(MAX_CHAIN):
        if name in found:
            if name in aliases:
                return Failure.MALFORMED
            kept = found[name][:MAX_ADDRESSES]
            unique = tuple(dict.fromkeys(address for address, _ in kept))
            return Answer(unique, min(least, *(ttl for _, ttl in kept)))
        if name not in aliases:
            # addresses that belong to nobody on the chain were put there for somebody to take
            return Failure.MALFORMED if found else Failure.EMPTY
        name, ttl = aliases[name]
        least = min(least, ttl)
    return Failure.MALFORMED


def _name(data: bytes, at: int) -> tuple[bytes, int]:
    """Read a name, lower-case and without a trailing dot, and say where it ends. Raises IndexError past the end."""
    labels: list[bytes] = []
    end: int | None = None
    size = 0
    for _ in range(_MAX_JUMPS + 128):
        length = data[at]
        if length & _POINTER == _POINTER:
            end = at + 2 if end is None else end
            target = (length & ~_POINTER) << 8 | data[at + 1]
            if target >= at:
                raise IndexError  # a pointer only ever points back, so that there is no loop
            at = target
        elif length & _POINTER:
            raise IndexError
        elif length == 0:
            return b".".join(labels), at + 1 if end is None else end
        else:
            label = data[at + 1 : at + 1 + length]
            size += length + 1
            if len(label) != length or size > 254:  # noqa: PLR2004 — RFC 1035 section 2.3.4, without the root
                raise IndexError
            # a dot inside a label would read as two labels
            labels.append(label.lower().replace(b".", b"\\."))
            at += 1 + length
    raise IndexError
