"""Owns the strict reading of HTTP/1 heads, requests' and responses'; does not read a target, decide or forward.

What is accepted here, h11 accepts with the same method, target and framing. Rules: RFC 9112, tightened.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

from proxy.decision import Code

MAX_HEAD = 16 * 1024
MAX_LINE = 8 * 1024
MAX_FIELDS = 100

_TOKEN = rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+"
_REQUEST_LINE = re.compile(rb"(" + _TOKEN + rb") ([\x21-\x7e]+) HTTP/([0-9])\.([0-9])")
_STATUS_LINE = re.compile(rb"HTTP/1\.([01]) ([1-5][0-9]{2})(?: ([\t\x20-\x7e\x80-\xff]*))?")
_FIELD = re.compile(rb"(" + _TOKEN + rb"):([\t\x20-\x7e\x80-\xff]*)")
_TOKEN_BYTES = re.compile(_TOKEN)
_LENGTH = re.compile(rb"0|[1-9][0-9]{0,17}")
_HOST_FIELD = re.compile(rb"[A-Za-z0-9._~:%\[\]-]*")
_NEVER_NOMINATED = frozenset({b"host", b"content-length", b"transfer-encoding"})


@dataclass(frozen=True, slots=True)
class Malformed:
    """Bytes that are not an acceptable head or target. `code` settles the status; `message` holds none of the bytes."""

    code: Code
    message: str


class Framing(Enum):
    """How the end of a body is found."""

    NONE = "none"
    LENGTH = "length"
    CHUNKED = "chunked"
    UNTIL_CLOSE = "until close"


Field = tuple[bytes, bytes, bytes]
"""A field's name in lower case, its name as it came, and its value without the space around it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestHead:
    """One request's head. `target` is as on the wire; `dropped` is what `Connection` nominates, lower-case."""

    method: str
    target: str
    minor: int
    fields: tuple[Field, ...]
    dropped: frozenset[bytes]
    host: bytes | None
    framing: Framing
    length: int
    persistent: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseHead:
    """One response's head, with the framing that it has for the request that it answers."""

    status: int
    reason: bytes
    fields: tuple[Field, ...]
    dropped: frozenset[bytes]
    framing: Framing
    length: int


def take_head(buffer: bytearray, scanned: int) -> bytes | Malformed | None:
    """Take one whole head (with its empty line) off the buffer's front; None while there is more to come.

    `scanned` is how much of the buffer an earlier call saw. What can never become a head is refused at once: a peer
    that speaks something else must not wait for a deadline.
    """
    end = buffer.find(b"\r\n\r\n", max(0, scanned - 3))
    seen = len(buffer) if end == -1 else end + 4
    if buffer.count(b"\n", scanned, seen) != buffer.count(b"\r\n", max(0, scanned - 1), seen):
        return Malformed(Code.MALFORMED, "a line of the head ends in a bare LF; end each with CR LF")
    if seen > MAX_LINE and buffer.find(b"\r\n", 0, MAX_LINE) == -1:
        return Malformed(Code.TARGET_TOO_LONG, f"the request line is longer than {MAX_LINE} bytes")
    if seen > MAX_HEAD or (end == -1 and seen == MAX_HEAD):
        return Malformed(Code.HEAD_TOO_LARGE, f"the head is larger than {MAX_HEAD} bytes")
    if end == -1:
        return None
    head = bytes(buffer[:seen])
    del buffer[:seen]
    return head


def refuse_early(buffer: bytearray) -> Malformed | None:
    """Judge the start of a request head that is not complete yet: what its first bytes already rule out."""
    if _TOKEN_BYTES.match(buffer) is None and buffer:
        return Malformed(Code.MALFORMED, "this is not an HTTP request; the proxy speaks plain HTTP/1.1")
    line, ended, _ = buffer.partition(b"\r\n")
    if ended:
        judged = _request_line(bytes(line))
        return judged if isinstance(judged, Malformed) else None
    return None


def parse_request(head: bytes) -> RequestHead | Malformed:
    """Read one whole request head, as `take_head` gives it."""
    lines = head[:-4].split(b"\r\n")
    first = _request_line(lines[0])
    if isinstance(first, Malformed):
        return first
    method, target, minor = first
    fields = _fields(lines)
    if isinstance(fields, Malformed):
        return fields
    hosts = [value for name, _, value in fields if name == b"host"]
    if len(hosts) > 1 or (minor == 1 and not hosts):
        return Malformed(Code.MALFORMED, "the request needs exactly one Host field")
    if hosts and _HOST_FIELD.fullmatch(hosts[0]) is None:
        return Malformed(Code.MALFORMED, "the Host field is not a host")
    dropped = _nominated(fields)
    if isinstance(dropped, Malformed):
        return dropped
    framing = _request_framing(fields, method, minor)
    if isinstance(framing, Malformed):
        return framing
    return RequestHead(
        method=method,
        target=target,
        minor=minor,
        fields=fields,
        dropped=dropped,
        host=hosts[0] if hosts else None,
        framing=framing[0],
        length=framing[1],
        persistent=minor == 1 and b"close" not in dropped,
    )


def parse_response(head: bytes, *, method: str) -> ResponseHead | Malformed:
    """Read one whole response head to a request of this method (RFC 9112 section 6.3)."""
    lines = head[:-4].split(b"\r\n")
    first = _STATUS_LINE.fullmatch(lines[0])
    if first is None:
        return _bad_response("its status line is not HTTP/1.0 or 1.1")
    fields = _fields(lines)
    dropped = fields if isinstance(fields, Malformed) else _nominated(fields)
    if isinstance(fields, Malformed) or isinstance(dropped, Malformed):
        return _bad_response("a field of its head is malformed")
    status = int(first[2])
    framing = _response_framing(fields, status, method)
    if isinstance(framing, Malformed):
        return framing
    return ResponseHead(
        status=status,
        reason=first[3] or b"",
        fields=fields,
        dropped=dropped,
        framing=framing[0],
        length=framing[1],
    )


def parse_fields(block: bytes) -> tuple[Field, ...] | Malformed:
    """Read trailer fields: lines that each end in CR LF, without the empty line."""
    return _fields([b"", *block.removesuffix(b"\r\n").split(b"\r\n")])


def _request_line(line: bytes) -> tuple[str, str, int] | Malformed:
    found = _REQUEST_LINE.fullmatch(line)
    if found is None:
        return Malformed(Code.MALFORMED, "the request line is not 'METHOD target HTTP/1.1'")
    method, target, major, minor = found.groups()
    if major != b"1" or minor not in b"01":
        return Malformed(Code.VERSION, "the proxy speaks HTTP/1.1 and HTTP/1.0 only")
    return method.decode("ascii"), target.decode("ascii"), int(minor)


def _fields(lines: list[bytes]) -> tuple[Field, ...] | Malformed:
    """Read every line but the first."""
    if len(lines) - 1 > MAX_FIELDS:
        return Malformed(Code.HEAD_TOO_LARGE, f"the head has more than {MAX_FIELDS} fields")
    fields = []
    for line in lines[1:]:
        found = _FIELD.fullmatch(line)
        if found is None:
            # a folded line, a space before the colon, NUL, a bare CR: each has been used to smuggle a field
            return Malformed(Code.MALFORMED, "a field of the head is not 'Name: value' on one line")
        name, value = found.groups()
        fields.append((name.lower(), name, value.strip(b" \t")))
    return tuple(fields)


def _nominated(fields: tuple[Field, ...]) -> frozenset[bytes] | Malformed:
    """Collect what `Connection` nominates, lower-case; its options such as `close` are among them."""
    found = set()
    for name, _, value in fields:
        if name == b"connection":
            for item in value.split(b","):
                option = item.strip(b" \t").lower()
                if option and _TOKEN_BYTES.fullmatch(option) is None:
                    return Malformed(Code.MALFORMED, "the Connection field is not a list of names")
                found.add(option)
    if found & _NEVER_NOMINATED:
        return Malformed(Code.MALFORMED, "the Connection field nominates a field that a request cannot do without")
    return frozenset(found)


def _request_framing(fields: tuple[Field, ...], method: str, minor: int) -> tuple[Framing, int] | Malformed:
    codings, lengths = _framing_fields(fields)
    if codings:
        if lengths or minor == 0:
            return Malformed(Code.MALFORMED, "Transfer-Encoding goes neither with Content-Length nor with HTTP/1.0")
        if method == "CONNECT":
            return Malformed(Code.MALFORMED, "CONNECT carries no body; send no Transfer-Encoding")
        if codings != [b"chunked"]:
            return Malformed(Code.UNKNOWN_CODING, "the only transfer coding that is understood is exactly 'chunked'")
        return Framing.CHUNKED, 0
    if not lengths:
        return Framing.NONE, 0
    if len(lengths) > 1 or _LENGTH.fullmatch(lengths[0]) is None:
        return Malformed(Code.MALFORMED, "Content-Length is not one plain decimal number")
    length = int(lengths[0])
    return (Framing.LENGTH if length else Framing.NONE), length


def _response_framing(fields: tuple[Field, ...], status: int, method: str) -> tuple[Framing, int] | Malformed:
    codings, lengths = _framing_fields(fields)
    if (codings and (lengths or codings != [b"chunked"])) or len(lengths) > 1:
        return _bad_response("its framing is ambiguous")
    if lengths and _LENGTH.fullmatch(lengths[0]) is None:
        return _bad_response("its Content-Length is not one plain decimal number")
    if method == "HEAD" or status in (204, 304) or status < 200:  # noqa: PLR2004 — RFC 9112 section 6.3, item 1
        return Framing.NONE, 0
    if codings:
        return Framing.CHUNKED, 0
    if lengths:
        length = int(lengths[0])
        return (Framing.LENGTH if length else Framing.NONE), length
    return Framing.UNTIL_CLOSE, 0


def _framing_fields(fields: tuple[Field, ...]) -> tuple[list[bytes], list[bytes]]:
    codings = [value.lower() for name, _, value in fields if name == b"transfer-encoding"]
    lengths = [value for name, _, value in fields if name == b"content-length"]
    return codings, lengths


def _bad_response(what: str) -> Malformed:
    return Malformed(Code.BAD_RESPONSE, f"the target's response is not acceptable: {what}")
