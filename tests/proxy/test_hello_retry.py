"""A server that asks for a second ClientHello: that one must name the tunnel's host too, whatever comes before it."""

from __future__ import annotations

import ssl
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.client_hello import NotTls, beside
from proxy.server_hello import MAX_ANSWER, Answered, parse
from tests.proxy.examples import policy
from tests.proxy.harness import LOOPS, Proxy
from tests.proxy.test_client_hello import REAL, body, hello, records
from tests.rig import Mode
from tests.rig.origin import HELLO_RETRY_REQUEST

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.rig import Rig

TELLS = 5 + 6 + 32
"""How many bytes of a HelloRetryRequest tell it from everything else."""

ORDINARY = HELLO_RETRY_REQUEST[: TELLS - 1] + b"\0" + HELLO_RETRY_REQUEST[TELLS:]
ALERT = b"\x15\x03\x03\x00\x02\x01\x70"
CHANGE = b"\x14\x03\x03\x00\x01\x01"
EARLY = b"\x17\x03\x03\x00\x05early"
SECOND = hello("example.com")
EVIL = hello("evil.example")
TUNNEL = b"CONNECT example.com:443 HTTP/1.1\r\nHost: example.com\r\n\r\n"


def test_every_beginning_of_a_retry_request_is_too_little_until_its_random_is_whole() -> None:
    for end in range(TELLS):
        assert parse(HELLO_RETRY_REQUEST[:end]) is Answered.INCOMPLETE
    for end in range(TELLS, len(HELLO_RETRY_REQUEST) + 1):
        assert parse(HELLO_RETRY_REQUEST[:end]) is Answered.RETRY


@pytest.mark.parametrize("size", [1, 2, 7, 40])
def test_a_retry_request_is_seen_in_records_of_any_size_and_behind_alerts(size: int) -> None:
    cut = records(body(HELLO_RETRY_REQUEST), size)
    assert parse(cut) is Answered.RETRY
    assert parse(ALERT * 3 + cut) is Answered.RETRY


@pytest.mark.parametrize(
    "data",
    [
        ORDINARY,
        records(body(ORDINARY), 1),
        REAL,
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b"\x16\x03\x03\x00\x04\x0e\x00\x00\x00",
        b"\x15\x03\x03\xff\xff" + bytes(MAX_ANSWER),
    ],
    ids=["a ServerHello", "one in small records", "a ClientHello", "HTTP", "another message", "an endless alert"],
)
def test_what_is_no_retry_request_opens_the_tunnel(data: bytes) -> None:
    assert parse(data) is Answered.OTHER


@given(st.binary(max_size=200), st.integers(0, len(HELLO_RETRY_REQUEST)))
def test_what_is_judged_once_is_judged_so_with_more_bytes_too(more: bytes, at: int) -> None:
    data = HELLO_RETRY_REQUEST[:at] + more
    judged = [parse(data[:end]) for end in range(len(data) + 1)]
    settled = [one for one in judged if one is not Answered.INCOMPLETE]
    assert len(set(settled)) <= 1
    assert judged[len(judged) - len(settled) :] == settled


def test_only_whole_records_that_are_no_hello_stand_before_the_second() -> None:
    assert beside(b"") == 0
    assert beside(SECOND) == 0
    assert beside(CHANGE + EARLY + SECOND) == len(CHANGE + EARLY)
    for end in range(1, len(CHANGE)):
        assert beside(CHANGE[:end]) is None
        assert beside(EARLY + CHANGE[:end]) == len(EARLY)
    assert isinstance(beside(b"\x17\x03\x03\xff\xff"), NotTls)


@pytest.fixture(scope="module", params=LOOPS)
def running(rig_session: Rig, request: pytest.FixtureRequest) -> Iterator[Proxy]:
    allowed = policy(allow=["example.com", "*.example.com"])
    with Proxy(rig_session, allowed, arguments=["--loop", request.param]) as proxy:
        yield proxy


@pytest.fixture
def fresh(rig: Rig, running: Proxy) -> Proxy:
    assert running.replace()["accepted"]
    rig.clear()
    return running


class Handshake:
    """OpenSSL as a client, whose bytes are ours to carry and to change."""

    def __init__(self, rig: Rig) -> None:
        context = ssl.create_default_context(cafile=str(rig.ca))
        self.to, self.out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.tls = context.wrap_bio(self.to, self.out, server_hostname="example.com")

    def turn(self, heard: bytes = b"") -> bytes:
        """Take what the server said; what the client says to it."""
        self.to.write(heard)
        with pytest.raises(ssl.SSLWantReadError):
            self.tls.do_handshake()
        return self.out.read()


@pytest.mark.rig
def test_a_real_server_that_asks_again_is_reached_by_a_real_client(rig: Rig, fresh: Proxy) -> None:
    rig.listen(443, Mode.RETRY)
    context = ssl.create_default_context(cafile=str(rig.ca))
    client, head = fresh.tunnel("example.com:443")
    assert head.status == 200
    client.sock.settimeout(5)
    with client, context.wrap_socket(client.sock, server_hostname="example.com") as tls:
        tls.sendall(b"GET /x HTTP/1.1\r\nHost: example.com\r\nConnection: close\r\n\r\n")
        assert b'"target": "/x"' in tls.recv(4096) + tls.recv(4096)
    assert [arrival.sni for arrival in rig.arrivals(port=443)] == ["example.com"]
    assert [record.code for record in fresh.decisions()] == ["allowed"]


@pytest.mark.rig
@pytest.mark.parametrize("size", [1, 5000], ids=["in single bytes", "at once"])
def test_a_real_second_hello_for_another_host_goes_no_further(rig: Rig, fresh: Proxy, size: int) -> None:
    rig.listen(443, Mode.RETRY)
    handshake = Handshake(rig)
    client, _ = fresh.tunnel("example.com:443")
    with client:
        client.send(handshake.turn())
        heard = client.until(lambda data: len(data) >= TELLS)
        assert parse(heard) is Answered.RETRY
        client.data.clear()
        second = handshake.turn(heard)
        assert b"example.com" in second
        second = second.replace(b"example.com", b"exempla.com")
        for at in range(0, len(second), size):
            client.send(second[at : at + size])
        assert client.closes()
    decided = fresh.decided("sni_mismatch")
    assert (decided.host, decided.address is None) == ("example.com", False)
    assert "exempla.com" in decided.message


@pytest.mark.rig
@pytest.mark.parametrize(
    ("parts", "reaches", "code"),
    [
        ([REAL, SECOND], REAL + SECOND, None),
        ([REAL, CHANGE + SECOND], REAL + CHANGE + SECOND, None),
        ([REAL, CHANGE[:3], CHANGE[3:] + SECOND[:9], SECOND[9:]], REAL + CHANGE + SECOND, None),
        ([REAL + CHANGE + EARLY, SECOND + b"more"], REAL + CHANGE + EARLY + SECOND + b"more", None),
        ([REAL + CHANGE + EARLY + SECOND], REAL + CHANGE + EARLY + SECOND, None),
        ([REAL, records(body(SECOND), 100)], REAL + records(body(SECOND), 100), None),
        ([REAL, ALERT], REAL + ALERT, None),
        ([REAL, EVIL], REAL, "sni_mismatch"),
        ([REAL + EVIL], REAL, "sni_mismatch"),
        ([REAL, CHANGE + EARLY + EVIL], REAL + CHANGE + EARLY, "sni_mismatch"),
        ([REAL + CHANGE + EVIL + SECOND], REAL + CHANGE, "sni_mismatch"),
        ([REAL, records(body(EVIL), 1)], REAL, "sni_mismatch"),
        ([REAL, hello(None)], REAL, "sni_missing"),
        ([REAL, b"\x16\x03\x03\x00\x04\x14\x00\x00\x00"], REAL, "not_tls"),
        ([REAL, b"\x18\x03\x03\x00\x01\x01"], REAL, "not_tls"),
        ([REAL, b"GET / HTTP/1.1\r\n\r\n"], REAL, "not_tls"),
        ([REAL, records(body(SECOND), 100)[:105] + CHANGE], REAL, "not_tls"),
        ([records(body(REAL) + body(EVIL), 16000)], b"", "not_tls"),
    ],
    ids=[
        "the second hello",
        "behind a change_cipher_spec",
        "cut in places",
        "behind early data that came with the first, with more behind it",
        "sent before the server asked",
        "in many records",
        "an alert in its place",
        "another host",
        "another host, sent before the server asked",
        "another host behind what may stand before it",
        "another host before the right one",
        "another host in many records",
        "no name",
        "another message in its place",
        "another record in its place",
        "HTTP in its place",
        "another record in the middle of it",
        "another hello in the record of the first",
    ],
)
def test_after_a_retry_request_only_a_hello_for_the_host_goes_on(
    rig: Rig, fresh: Proxy, parts: list[bytes], reaches: bytes, code: str | None
) -> None:
    rig.listen(443, Mode.SAYS_RETRY)
    with fresh.connect() as client:
        client.send(TUNNEL)
        assert client.head().status == 200
        client.send(parts[0])
        # the server says it in single bytes, and the client hears each, unless it has said already what ends it
        if reaches:
            size = len(HELLO_RETRY_REQUEST) if parts[1:] or code is None else TELLS
            heard = client.until(lambda data: len(data) >= size)
            assert heard == HELLO_RETRY_REQUEST[: len(heard)]
            client.data.clear()
        for part in parts[1:]:
            client.send(part)
            assert not client.more(0.05) or code
        if code is not None:
            client.until(lambda _: False)
            assert client.ended
            assert fresh.decided(code).host == "example.com"
            # the reset that ends it may overtake what was sent just before, but not a byte is added
            assert rig.until(lambda: all(one.ended for one in rig.arrivals(port=443)))
            assert reaches.startswith(b"".join(one.first for one in rig.arrivals(port=443)))
        else:
            assert rig.until(lambda: b"".join(one.first for one in rig.arrivals(port=443)) == reaches, timeout_s=3)


@pytest.mark.rig
def test_what_a_client_sends_behind_its_hello_waits_for_the_answer_and_comes_whole(rig: Rig, fresh: Proxy) -> None:
    rig.listen(443, Mode.ECHO)
    rest = bytes(range(256)) * 2000
    with fresh.connect() as client:
        client.send(TUNNEL + REAL + rest)
        assert client.head().status == 200
        assert client.until(lambda data: len(data) >= len(REAL + rest)) == REAL + rest
        client.send(b"end")
        assert client.until(lambda data: data.endswith(b"end"))


@pytest.mark.rig
def test_a_server_that_says_nothing_to_a_hello_gets_nothing_more(rig: Rig, fresh: Proxy) -> None:
    rig.listen(443, Mode.SILENT)
    with fresh.connect() as client:
        client.send(TUNNEL + REAL + EARLY * 10)
        assert client.head().status == 200
        assert not client.more(0.5)
        # it may leave all the same
        client.sock.close()
    assert rig.until(lambda: all(record.code == "allowed" for record in fresh.decisions()))


@pytest.mark.rig
def test_a_client_that_ends_its_side_behind_its_hello_still_hears_the_answer(rig: Rig, fresh: Proxy) -> None:
    rig.listen(443, Mode.ECHO)
    with fresh.connect() as client:
        client.send(TUNNEL + REAL)
        client.sock.shutdown(1)
        assert client.head().status == 200
        assert client.until(lambda _: False) == REAL
        assert client.ended
    assert rig.until(lambda: [one.ended for one in rig.arrivals(port=443)] == ["eof"])
