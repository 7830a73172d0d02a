"""The rig's zone and DNS bytes, without a socket."""

from __future__ import annotations

import struct

import pytest

from tests.rig import Answer, Shape, answer
from tests.rig.dns_wire import parse, reply
from tests.rig.zone import DEFAULT, Record, RecordType, from_json, lookup

A, AAAA, CNAME = 1, 28, 5


def query(name: str, kind: int = A, identity: int = 7) -> bytes:
    labels = b"".join(bytes([len(label)]) + label.encode() for label in name.split("."))
    return struct.pack("!HHHHHH", identity, 0x100, 1, 0, 0, 0) + labels + b"\0" + struct.pack("!HH", kind, 1)


def sent(spec: Answer, name: str = "example.com", kind: int = A, *, nth: int = 0, tcp: bool = False) -> bytes | None:
    question = parse(query(name, kind))
    assert question is not None
    return reply(question, spec, nth=nth, tcp=tcp)


def flags(message: bytes) -> tuple[int, int, int]:
    """Return id, response code, number of answers."""
    identity, bits, _questions, answers = struct.unpack_from("!HHHH", message)
    return identity, bits & 0xF, answers


@pytest.mark.parametrize("shape", list(Shape), ids=str)
def test_every_shape_survives_the_control_socket(shape: Shape) -> None:
    before = answer(shape.value, ttl=9, delay_s=0.5)
    assert from_json(before.to_json()) == before
    assert before.shape is shape


def test_a_word_that_is_no_shape_is_refused() -> None:
    with pytest.raises(ValueError, match="nxdomian"):
        answer("nxdomian")


def test_a_chain_is_written_as_a_list() -> None:
    built = answer([{"cname": "internal.corp.test"}, {"a": "10.1.2.3"}])
    assert built.records == (Record(RecordType.CNAME, "internal.corp.test"), Record(RecordType.A, "10.1.2.3"))


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        pytest.param("example.com", Shape.RECORDS, id="a name with a line of its own"),
        pytest.param("deep.down.example.com", Shape.RECORDS, id="a wildcard answers at any depth"),
        pytest.param("silent.example.com", Shape.SILENCE, id="a line of its own beats the wildcard"),
        pytest.param("notexample.com", Shape.NXDOMAIN, id="a wildcard ends at a label"),
        pytest.param("unheard.of", Shape.NXDOMAIN, id="an unknown name does not exist"),
    ],
)
def test_lookup(name: str, shape: Shape) -> None:
    assert lookup(DEFAULT, name).shape is shape


@pytest.mark.parametrize(
    ("spec", "kind", "expected"),
    [
        pytest.param("public", A, (7, 0, 1), id="an address"),
        pytest.param("public", AAAA, (7, 0, 1), id="an IPv6 address"),
        pytest.param("nxdomain", A, (7, 3, 0), id="a name that does not exist"),
        pytest.param("servfail", A, (7, 2, 0), id="a server that fails"),
        pytest.param("nodata", A, (7, 0, 0), id="a name without addresses"),
        pytest.param("mixed", A, (7, 0, 2), id="a public and a private address in one answer"),
        pytest.param("cname_loop", A, (7, 0, 2), id="two aliases of each other"),
        pytest.param("wrong_id", A, (7 ^ 0x5555, 0, 1), id="an answer to another query"),
    ],
)
def test_what_is_sent(spec: str, kind: int, expected: tuple[int, int, int]) -> None:
    message = sent(answer(spec), kind=kind)
    assert message is not None
    assert flags(message) == expected


def test_silence_sends_nothing() -> None:
    assert sent(answer("silence")) is None


def test_an_ipv4_only_name_has_no_ipv6_data() -> None:
    message = sent(answer(["10.1.2.3"]), kind=AAAA)
    assert message is not None
    assert flags(message) == (7, 0, 0)


def test_truncation_ends_with_tcp() -> None:
    udp, tcp = (sent(answer("truncated_then_tcp"), tcp=each) for each in (False, True))
    assert udp is not None
    assert tcp is not None
    assert udp[2] & 2
    assert not tcp[2] & 2
    assert (flags(udp)[2], flags(tcp)[2]) == (0, 1)


def test_rebinding_turns_after_the_first_query() -> None:
    spec = answer("rebinding")
    first, second = sent(spec, nth=0), sent(spec, nth=1)
    assert first is not None
    assert second is not None
    assert first.endswith(b"\x5d\xb8\xd8\x22")
    assert second.endswith(b"\x7f\0\0\1")


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(query("example.com")[:-3], id="a cut question"),
        pytest.param(b"\0\7\x81\x80" + query("example.com")[4:], id="a response"),
        pytest.param(query("example.com")[:12] + b"\xc0\x0c\0\1\0\1", id="a pointer"),
    ],
)
def test_what_is_no_query_is_not_answered(data: bytes) -> None:
    assert parse(data) is None
