"""Owns what is fuzzed and what must hold for each input; makes no inputs.

Each target raises AssertionError when a promise is broken, and lets through whatever else the code raises.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import h11

from proxy import client_hello, dns_message, server_hello
from proxy.client_hello import MAX_HELLO, Incomplete, NoServerName, NotTls, ServerName
from proxy.decision import Code, Target
from proxy.dns_message import MAX_ADDRESSES, Answer, Failure, NotOurs, RecordType, Truncated
from proxy.entry import MAX_NAME
from proxy.head import MAX_HEAD, Framing, Malformed, RequestHead, ResponseHead, parse_request, parse_response, take_head
from proxy.judgement import Open, Proof, Refused, judge
from proxy.policy import BadPolicy, ProxyPolicy
from proxy.policy import parse as parse_policy
from proxy.request import MAX_CHUNK_LINE, BodyReader
from proxy.server_hello import MAX_ANSWER, Answered
from tests.proxy.examples import policy

if TYPE_CHECKING:
    from collections.abc import Callable

POLICY: Final = policy(allow=["example.com", "*.example.com", "db.example.com:5432"])
VIA: Final = b"rf-0123456789abcdef"
_STEPS: Final = (1, 2, 3, 7, 64)


def pieces(data: bytes, step: int) -> list[bytes]:
    """Cut data into pieces of this size."""
    return [data[at : at + step] for at in range(0, len(data), step)]


def _step(data: bytes) -> int:
    """Choose how to cut an input, by the input."""
    return _STEPS[len(data) % len(_STEPS)]


def head(data: bytes) -> None:
    """A request head means the same in one piece and in many, h11 agrees with what is accepted, and it is judged."""
    buffer, scanned = bytearray(), 0
    taken: bytes | Malformed | None = None
    for piece in pieces(data, _step(data)):
        buffer += piece
        taken = take_head(buffer, scanned)
        scanned = len(buffer)
        if taken is not None:
            break
    if isinstance(taken, bytes):
        whole = bytearray(data)
        assert take_head(whole, 0) == taken, "cut in pieces it is another head"
        assert len(taken) <= MAX_HEAD
        _request(taken)
    _request(data[: MAX_HEAD - 4] + b"\r\n\r\n")


def _request(whole: bytes) -> None:
    found = parse_request(whole)
    assert isinstance(found, RequestHead | Malformed)
    if isinstance(found, RequestHead):
        _agrees(found, whole)
    for inside in (None, Target("example.com", 80)):
        judged = judge(whole, POLICY, inside=inside, via=VIA)
        assert isinstance(judged, Open | Refused | Proof)
        if isinstance(judged, Refused):
            assert judged.deny.code in Code
            assert judged.deny.code is not Code.ALLOWED
        if isinstance(judged, Open):
            host = judged.resolved.target.host
            assert host == "example.com" or host.endswith(".example.com")
            assert len(host) <= MAX_NAME
            assert host == host.lower()
            assert host.isascii()


def _agrees(found: RequestHead, whole: bytes) -> None:
    """What we accept, h11 accepts, with the same method, target and framing."""
    connection = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEAD)
    connection.receive_data(whole)
    event = connection.next_event()
    assert isinstance(event, h11.Request), "h11 refuses it"
    assert event.method == found.method.encode()
    assert event.target == found.target.encode()
    lengths = [value for name, value in event.headers if name == b"content-length"]
    coded = any(name == b"transfer-encoding" for name, _ in event.headers)
    if found.framing is Framing.LENGTH:
        assert [int(value) for value in lengths] == [found.length]
    assert coded is (found.framing is Framing.CHUNKED)


def response(data: bytes) -> None:
    """A response head is read or refused for every method that it may answer."""
    whole = data[: MAX_HEAD - 4] + b"\r\n\r\n"
    for method in ("GET", "HEAD"):
        found = parse_response(whole, method=method)
        assert isinstance(found, ResponseHead | Malformed)
        if isinstance(found, ResponseHead):
            assert 100 <= found.status <= 599
            assert found.length >= 0
            if method == "HEAD":
                assert found.framing is Framing.NONE


def hello(data: bytes) -> None:
    """A ClientHello's start never says anything but `Incomplete` or what the whole says, and the cap holds."""
    final: object = None
    for end in sorted({*range(0, len(data), max(1, len(data) // 16)), len(data)}):
        found = client_hello.parse(data[:end])
        assert isinstance(found, ServerName | NoServerName | Incomplete | NotTls)
        assert not isinstance(found, Incomplete) or end < MAX_HELLO
        if final is not None:
            assert found == final, "more bytes change what was read"
        if not isinstance(found, Incomplete):
            final = found
        if isinstance(found, ServerName):
            assert found.name
            assert found.name == found.name.lower()
            assert found.name.isascii()


def answered(data: bytes) -> None:
    """What a server says first is judged once, within the cap, and says the same in records of one byte."""
    judged: list[Answered] = []
    for end in sorted({*range(min(len(data), 300)), len(data)}):
        judged.append(server_hello.parse(data[:end]))
        assert judged[-1] is not Answered.INCOMPLETE or end < MAX_ANSWER
    settled = {one for one in judged if one is not Answered.INCOMPLETE}
    assert len(settled) <= 1
    assert judged[-1] in settled or not settled
    whole, cut = (_handshake(data[:64], size) for size in (64, 1))
    assert server_hello.parse(whole) is server_hello.parse(cut)


def _handshake(message: bytes, size: int) -> bytes:
    return b"".join(b"\x16\x03\x03" + len(part).to_bytes(2, "big") + part for part in pieces(message, size))


def second(data: bytes) -> None:
    """What stands before a second ClientHello is whole records of other kinds, and more bytes only make it more."""
    least = 0
    for end in sorted({*range(0, len(data), max(1, len(data) // 16)), len(data)}):
        found = client_hello.beside(data[:end])
        if isinstance(found, NotTls):
            return
        assert found is None or least <= found <= end
        least = found or least
        assert least == 0 or data[0] in (20, 21, 23)


def dns(data: bytes) -> None:
    """An answer has addresses of its family, no more than are kept, and nothing else is one."""
    for host, kind, size in (("example.com", RecordType.A, 4), ("a.example.com", RecordType.AAAA, 16)):
        asked = dns_message.query(0x1234, host, kind)
        # whatever it is, as it came, and as the rest of an answer to the question
        answered = asked[:2] + b"\x81\x80" + asked[4:6] + data[:6].ljust(6, b"\0") + asked[12:] + data[6:]
        for message in (data, answered):
            found = dns_message.parse(message, 0x1234, host, kind)
            assert isinstance(found, Answer | Failure | Truncated | NotOurs)
            if isinstance(found, Answer):
                assert 0 < len(found.addresses) <= MAX_ADDRESSES
                assert all(len(address) == size for address in found.addresses)
                assert 0 <= found.ttl <= 0x7FFFFFFF


def chunks(data: bytes) -> None:
    """A chunked body means the same in one piece and in many, and h11 reads the same content."""
    whole, once = BodyReader(Framing.CHUNKED), list[bytes]()
    used = whole.feed(data, once)
    assert 0 <= used <= len(data)
    cut, parts, taken = BodyReader(Framing.CHUNKED), list[bytes](), 0
    for piece in pieces(data, _step(data)):
        taken += cut.feed(piece, parts)
        assert len(cut._line) <= max(MAX_CHUNK_LINE, MAX_HEAD) + len(piece)
        if cut.done or cut.broken is not None:
            break
    assert (whole.done, whole.broken) == (cut.done, cut.broken)
    assert b"".join(once) == b"".join(parts)
    if whole.done:
        assert taken == used
        connection = h11.Connection(h11.SERVER, max_incomplete_event_size=1 << 17)
        connection.receive_data(b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" + data[:used])
        content = b""
        while isinstance(event := connection.next_event(), h11.Request | h11.Data):
            content += bytes(event.data) if isinstance(event, h11.Data) else b""
        assert isinstance(event, h11.EndOfMessage)
        assert content == b"".join(once)


def document(data: bytes) -> None:
    """A line of input is a policy that writes itself the same, or it is refused."""
    found = parse_policy(data)
    assert isinstance(found, ProxyPolicy | BadPolicy)
    if isinstance(found, ProxyPolicy):
        assert parse_policy(found.to_json().encode()) == found


TARGETS: Final[dict[str, Callable[[bytes], None]]] = {
    "head": head,
    "response": response,
    "hello": hello,
    "answered": answered,
    "second": second,
    "dns": dns,
    "chunks": chunks,
    "policy": document,
}
MODULES: Final = frozenset(
    {
        *("address", "answer", "client_hello", "decision", "dns_message", "entry"),
        *("head", "judgement", "policy", "request", "server_hello", "target"),
    }
)
"""Modules of the proxy whose lines count as somewhere new."""
