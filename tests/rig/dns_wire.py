"""Owns the bytes of the rig's DNS answers, right ones and wrong ones; opens no socket.

Independent of the product's own parser on purpose: an oracle that shares its code proves nothing.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Final, assert_never

from tests.rig.zone import Answer, Record, RecordType, Shape

TYPES: Final = {
    1: "A",
    2: "NS",
    5: "CNAME",
    6: "SOA",
    15: "MX",
    16: "TXT",
    28: "AAAA",
    33: "SRV",
    65: "HTTPS",
    255: "ANY",
}
_CODES: Final = {RecordType.A: 1, RecordType.CNAME: 5, RecordType.AAAA: 28}
_RESPONSE: Final = 0x8180
_TRUNCATED: Final = 0x0200
_SERVFAIL: Final = 2
_NXDOMAIN: Final = 3
_HEADER: Final = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One query: `name` lower-case without the trailing dot, `section` the question's bytes as they came."""

    id: int
    name: str
    type: str
    section: bytes


def parse(data: bytes) -> Question | None:
    """Read a query with one question, RFC 1035 4.1; None for anything else."""
    if len(data) < _HEADER:
        return None
    identity, flags, count = struct.unpack_from("!HHH", data)
    if flags & 0x8000 or count != 1:
        return None
    labels: list[str] = []
    at = _HEADER
    while at < len(data) and data[at]:
        size = data[at]
        if size > 63 or at + 1 + size >= len(data):  # RFC 1035 2.3.4; a query needs no pointer
            return None
        labels.append(data[at + 1 : at + 1 + size].decode("latin-1").lower())
        at += 1 + size
    if at + 5 > len(data):
        return None
    (kind,) = struct.unpack_from("!H", data, at + 1)
    return Question(
        id=identity, name=".".join(labels), type=TYPES.get(kind, f"TYPE{kind}"), section=data[_HEADER : at + 5]
    )


def reply(question: Question, answer: Answer, *, nth: int, tcp: bool) -> bytes | None:
    """Encode what `answer` says for the nth query (from 0) of this name and type; None means silence."""
    match answer.shape:
        case Shape.RECORDS | Shape.WRONG_SOURCE:
            return _answer(question, answer.records, answer.ttl)
        case Shape.NXDOMAIN:
            return _message(question, rcode=_NXDOMAIN, authority=True)
        case Shape.SERVFAIL:
            return _message(question, rcode=_SERVFAIL)
        case Shape.NODATA:
            return _message(question, authority=True)
        case Shape.SILENCE:
            return None
        case Shape.WRONG_OWNER:
            return _answer(question, answer.records, answer.ttl, owner="other.invalid")
        case Shape.WRONG_ID:
            return struct.pack("!H", question.id ^ 0x5555) + _answer(question, answer.records, answer.ttl)[2:]
        case Shape.WRONG_QUESTION:
            other = Question(
                id=question.id,
                name="other.invalid",
                type=question.type,
                section=_name("other.invalid") + question.section[-4:],
            )
            return _answer(other, answer.records, answer.ttl)
        case Shape.CNAME_LOOP:
            there = f"loop.{question.name}"
            rows = [_record(question, question.name, Record(RecordType.CNAME, there), answer.ttl)]
            rows.append(_record(question, there, Record(RecordType.CNAME, question.name), answer.ttl))
            return _message(question, rows=rows)
        case Shape.POINTER_LOOP:
            itself = struct.pack("!H", 0xC000 | (_HEADER + len(question.section)))
            return _message(question, rows=[itself + struct.pack("!HHIH", 1, 1, answer.ttl, 4) + b"\x5d\xb8\xd8\x22"])
        case Shape.GARBAGE:
            return struct.pack("!H", question.id) + b"\xff" * 7
        case Shape.TRUNCATED_THEN_TCP:
            return _answer(question, answer.records, answer.ttl) if tcp else _message(question, flags=_TRUNCATED)
        case Shape.REBINDING:
            return _answer(question, answer.then if nth else answer.records, answer.ttl)
        case _:
            assert_never(answer.shape)


def _answer(question: Question, records: tuple[Record, ...], ttl: int, *, owner: str | None = None) -> bytes:
    rows: list[bytes] = []
    name = question.name if owner is None else owner
    for record in records:
        if record.type is RecordType.CNAME or question.type in {record.type.value, "ANY"}:
            rows.append(_record(question, name, record, ttl))
        if record.type is RecordType.CNAME:
            name = record.value
    return _message(question, rows=rows, authority=not rows)


def _record(question: Question, owner: str, record: Record, ttl: int) -> bytes:
    # Compressed where real servers compress; the rest in full, so that a parser meets both.
    name = struct.pack("!H", 0xC000 | _HEADER) if owner == question.name else _name(owner)
    data = _name(record.value) if record.type is RecordType.CNAME else ip_address(record.value).packed
    return name + struct.pack("!HHIH", _CODES[record.type], 1, ttl, len(data)) + data


def _message(
    question: Question, *, rcode: int = 0, flags: int = 0, rows: list[bytes] | None = None, authority: bool = False
) -> bytes:
    answers = rows or []
    below = [_authority()] if authority else []
    header = struct.pack("!HHHHHH", question.id, _RESPONSE | flags | rcode, 1, len(answers), len(below), 0)
    return header + question.section + b"".join(answers) + b"".join(below)


def _authority() -> bytes:
    data = _name("ns.invalid") + _name("hostmaster.invalid") + struct.pack("!IIIII", 1, 3600, 600, 86400, 30)
    return b"\0" + struct.pack("!HHIH", 6, 1, 30, len(data)) + data


def _name(name: str) -> bytes:
    labels = [label.encode("ascii") for label in name.split(".") if label]
    return b"".join(bytes([len(label)]) + label for label in labels) + b"\0"
