"""DNS messages: what counts as an answer to a question, and what does not."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.dns_message import MAX_ADDRESSES, Answer, Failure, NotOurs, RecordType, Truncated, parse, query

HOST = "www.example.com"
A, AAAA = RecordType.A, RecordType.AAAA
IPV4 = bytes([93, 184, 216, 34])
POINTER = b"\xc0\x0c"


def name(text: str) -> bytes:
    return b"".join(bytes([len(label)]) + label.encode() for label in text.split(".")) + b"\0"


def record(owner: bytes, rtype: int, value: bytes, *, ttl: int = 300, rclass: int = 1) -> bytes:
    return owner + struct.pack("!HHIH", rtype, rclass, ttl, len(value)) + value


def answer(
    *records: bytes, flags: int = 0x8180, identity: int = 7, question: bytes | None = None, count: int | None = None
) -> bytes:
    asked = query(7, HOST, A)[12:] if question is None else question
    header = struct.pack("!HHHHHH", identity, flags, 1, len(records) if count is None else count, 0, 0)
    return header + asked + b"".join(records)


def read(data: bytes, kind: RecordType = A) -> object:
    return parse(data, 7, HOST, kind)


def test_a_question_is_one_absolute_name() -> None:
    data = query(0x1234, HOST, AAAA)
    assert data == b"\x12\x34\x01\x00\x00\x01\x00\x00\x00\x00\x00\x00\x03www\x07example\x03com\x00\x00\x1c\x00\x01"


def test_addresses_of_the_name_are_the_answer_with_the_least_ttl() -> None:
    data = answer(record(POINTER, 1, IPV4), record(name("WWW.example.COM"), 1, b"\x08\x08\x08\x08", ttl=20))
    assert read(data) == Answer((IPV4, b"\x08\x08\x08\x08"), 20)


def test_a_chain_of_aliases_is_followed_inside_the_answer() -> None:
    data = answer(
        record(name("b.net"), 1, IPV4, ttl=200),
        record(POINTER, 5, name("a.net"), ttl=100),
        record(name("a.net"), 5, name("b.net")),
    )
    assert read(data) == Answer((IPV4,), 100)


def test_a_ttl_with_its_top_bit_set_is_zero() -> None:
    assert read(answer(record(POINTER, 1, IPV4, ttl=0x80000001))) == Answer((IPV4,), 0)


def test_at_most_sixteen_addresses_are_kept() -> None:
    found = read(answer(*(record(POINTER, 1, bytes([8, 8, 8, at])) for at in range(40))))
    assert isinstance(found, Answer)
    assert len(found.addresses) == MAX_ADDRESSES


@pytest.mark.parametrize(
    ("data", "failure"),
    [
        (answer(flags=0x8183), Failure.NXDOMAIN),
        (answer(flags=0x8182), Failure.SERVFAIL),
        (answer(flags=0x8185), Failure.SERVFAIL),
        (answer(), Failure.EMPTY),
        (answer(record(POINTER, 5, name("a.net"))), Failure.EMPTY),
        (answer(record(POINTER, 16, b"\x01x")), Failure.EMPTY),
        (answer(record(POINTER, 1, IPV4, rclass=3)), Failure.EMPTY),
        (answer(record(name("other.net"), 1, IPV4)), Failure.MALFORMED),
        (answer(record(POINTER, 5, POINTER)), Failure.MALFORMED),
        (answer(record(POINTER, 5, name("a.net")), record(name("a.net"), 5, POINTER)), Failure.MALFORMED),
        (answer(record(POINTER, 5, name("a.net")), record(POINTER, 5, name("b.net"))), Failure.MALFORMED),
        (answer(record(POINTER, 5, name("a.net")), record(POINTER, 1, IPV4)), Failure.MALFORMED),
        (answer(record(POINTER, 1, IPV4 + b"x")), Failure.MALFORMED),
        (answer(record(POINTER, 1, bytes(16))), Failure.MALFORMED),
        (answer(record(POINTER, 1, IPV4), count=2), Failure.MALFORMED),
        (answer(record(POINTER, 1, IPV4)[:-1], count=1), Failure.MALFORMED),
        (answer(record(b"\xc0\xff", 1, IPV4)), Failure.MALFORMED),
        (answer(record(b"\xc0\x21", 1, IPV4)), Failure.MALFORMED),
        (answer(record(b"\x40a\0", 1, IPV4)), Failure.MALFORMED),
    ],
    ids=[
        "no such name",
        "server failure",
        "refused",
        "no data",
        "an alias that leads nowhere",
        "another type",
        "another class",
        "an address of another name",
        "an alias of itself",
        "a loop of aliases",
        "two aliases of one name",
        "an alias beside an address",
        "an address that is too long",
        "IPv6 where IPv4 was asked",
        "fewer records than counted",
        "a cut record",
        "a pointer beyond the end",
        "a pointer to itself",
        "a label of an unknown kind",
    ],
)
def test_an_answer_without_usable_addresses_says_why(data: bytes, failure: Failure) -> None:
    assert read(data) is failure


@pytest.mark.parametrize(
    "data",
    [
        b"",
        answer(record(POINTER, 1, IPV4), identity=8),
        answer(record(POINTER, 1, IPV4), flags=0x0180),
        answer(record(POINTER, 1, IPV4), flags=0x9180),
        answer(record(POINTER, 1, IPV4), question=query(7, "www.example.net", A)[12:]),
        answer(record(POINTER, 1, IPV4), question=query(7, HOST, AAAA)[12:]),
        answer(record(POINTER, 1, IPV4), question=b""),
        query(7, HOST, A),
    ],
    ids=[
        "nothing",
        "another id",
        "a question",
        "another opcode",
        "another name",
        "another type",
        "no question",
        "echo",
    ],
)
def test_what_does_not_repeat_the_question_is_not_ours(data: bytes) -> None:
    assert read(data) == NotOurs()


def test_an_answer_that_did_not_fit_is_asked_for_again() -> None:
    assert read(answer(flags=0x8380)) == Truncated()


@given(st.binary(max_size=300), st.booleans())
def test_no_bytes_break_the_reader(data: bytes, behind: bool) -> None:
    parse(answer(data, count=3) if behind else data, 7, HOST, A)


@given(st.lists(st.tuples(st.integers(0, 80), st.integers(0, 255)), max_size=6))
def test_a_damaged_answer_never_has_an_address_that_nobody_sent(damage: list[tuple[int, int]]) -> None:
    data = bytearray(answer(record(POINTER, 5, name("a.net")), record(name("a.net"), 1, IPV4)))
    for at, value in damage:
        data[at % len(data)] = value
    found = parse(bytes(data), 7, HOST, A)
    if isinstance(found, Answer):
        assert all(address in bytes(data) for address in found.addresses)
