"""Bytes on the wire against a real proxy process, where a single case of the conformance tables cannot show it."""

from __future__ import annotations

import hmac
import time
from typing import TYPE_CHECKING

import pytest

from tests.proxy.harness import LOOPS, Proxy

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.rig import Rig

pytestmark = pytest.mark.rig


@pytest.fixture(scope="module", params=LOOPS)
def proxy(rig_session: Rig, request: pytest.FixtureRequest) -> Iterator[Proxy]:
    """One proxy for the module."""
    with Proxy(rig_session, arguments=["--loop", request.param]) as proxy:
        yield proxy


@pytest.fixture
def running(rig: Rig, proxy: Proxy) -> Proxy:
    """The module's proxy in a generation of its own, so that nothing is cached and no decision is another test's."""
    assert proxy.replace()["accepted"]
    rig.clear()
    return proxy


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
        (b"GET /\r\n", 400),
        (b"SSH-2.0-OpenSSH_9.2\r\n", 400),
        (b"GET http://example.com/ HTTP/1.1\nHost: example.com\n", 400),
        (b"GET http://example.com/" + b"a" * 9000, 414),
        (b"GET http://example.com/ HTTP/1.1\r\nX: " + b"a" * 17000, 431),
    ],
    ids=["TLS", "HTTP/0.9", "SSH", "bare LF", "a long target", "a large head"],
)
def test_what_can_never_become_a_request_is_refused_at_once(rig: Rig, running: Proxy, data: bytes, status: int) -> None:
    with running.connect() as client:
        client.send(data)
        assert client.response(2).status == status
    assert rig.queries() == []


def test_a_denial_names_its_layer_and_the_refusal_says_it_to_people_too(rig: Rig, running: Proxy) -> None:
    refused = running.get("http://evil.com/secret?token=1")
    assert refused.status == 403
    assert refused.headers["proxy-status"] == 'ringfence; error=http_request_denied; details="not_listed (agent)"'
    assert refused.body == b"ringfence: not_listed (agent): evil.com:80 is not on the agent's allow list\n"
    record = running.decided("not_listed")
    assert (record.host, record.port, record.method, record.layer) == ("evil.com", 80, "GET", "agent")
    assert rig.queries() == []


def test_a_refusal_of_head_has_no_body(running: Proxy) -> None:
    with running.connect() as client:
        client.send(b"HEAD http://evil.com/ HTTP/1.1\r\nHost: x\r\n\r\n")
        assert client.head().status == 403
        assert client.closes()


def test_what_is_written_down_holds_no_path_query_or_userinfo(running: Proxy) -> None:
    running.get("http://example.com/hush?hush")
    running.get("http://hush:hush@example.com/")
    running.get("http://evil.com/hush#hush")
    running.decided("malformed")
    assert not [line for line in running.lines("decision") if "hush" in str(line)]


@pytest.mark.parametrize("path", ["/bytes/100000", "/chunked/100000", "/until-close/100000"])
def test_a_large_body_comes_through_whole_whatever_its_framing(running: Proxy, path: str) -> None:
    with running.connect() as client:
        request = f"GET http://example.com{path} HTTP/1.1\r\nHost: x\r\n\r\n".encode()
        client.send(request)
        first = client.head()
        if "content-length" in first.headers:
            client.until(lambda data: len(data) >= 100000)
            assert len(client.data) == 100000
            client.data.clear()
        else:
            assert first.headers["transfer-encoding"] == "chunked"
            client.until(lambda data: data.endswith(b"0\r\n\r\n"))
            assert len(dechunked(bytes(client.data))) == 100000
            client.data.clear()
        # whatever the origin did with its connection, the client's own stays
        client.send(request)
        assert client.head().status == 200


def dechunked(data: bytes) -> bytes:
    content = b""
    while data:
        size, _, data = data.partition(b"\r\n")
        content += data[: int(size, 16)]
        data = data[int(size, 16) + 2 :]
    return content


def test_a_response_that_breaks_off_is_not_taken_for_a_whole_one(running: Proxy) -> None:
    with running.connect() as client:
        client.send(b"GET http://example.com/drop/5000 HTTP/1.1\r\nHost: x\r\n\r\n")
        client.head()
        seen = client.until(lambda _: False, 3)
        assert client.ended
        assert len(seen) <= 5000
        assert not seen.endswith(b"0\r\n\r\n")


def test_a_request_body_goes_through_in_either_framing_and_the_connection_lives_on(running: Proxy) -> None:
    with running.connect() as client:
        client.send(b"POST http://example.com/a HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nhel")
        client.send(b"lo")
        first = client.response()
        assert first.json["body"] == "hello"
        client.send(b"POST http://example.com/b HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nhel\r\n")
        client.send(b"2;x=y\r\nlo\r\n0\r\nTrailer: gone\r\n\r\nGET http://example.com/c HTTP/1.1\r\nHost: x\r\n\r\n")
        second = client.response()
        assert second.json["body"] == "hello"
        assert "Trailer" not in str(second.json["headers"])
        assert client.response().json["target"] == "/c"


def test_a_body_with_broken_framing_ends_the_connection(running: Proxy) -> None:
    with running.connect() as client:
        client.send(b"POST http://example.com/a HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n5\nhello\n")
        assert client.response().status == 400
        assert client.closes()


def test_a_client_that_ends_its_side_still_gets_every_answer_it_asked_for(running: Proxy) -> None:
    with running.connect() as client:
        client.send(
            b"GET http://example.com/a HTTP/1.1\r\nHost: x\r\n\r\nGET http://example.com/b HTTP/1.1\r\nHost: x\r\n\r\n"
        )
        client.sock.shutdown(1)
        assert client.response().json["target"] == "/a"
        assert client.response().json["target"] == "/b"
        assert client.closes()


def test_an_old_client_gets_a_plain_body_and_a_closed_connection(running: Proxy) -> None:
    with running.connect() as client:
        client.send(b"GET http://example.com/chunked/1000 HTTP/1.0\r\n\r\n")
        head = client.head()
        assert "transfer-encoding" not in head.headers
        assert head.headers["connection"] == "close"
        assert len(client.until(lambda _: False)) == 1000


def test_the_proof_is_the_proxys_own_and_asks_nobody(rig: Rig, running: Proxy) -> None:
    answer = running.get("http://gate.ringfence.invalid/00112233445566778899aabbccddeeff")
    expected = hmac.new(running.policy.proof_key, b"00112233445566778899aabbccddeeff", "sha256").hexdigest()
    assert (answer.status, answer.body) == (200, expected.encode())
    assert rig.queries() == []
    assert running.decisions() == []


def test_every_head_on_a_kept_connection_has_its_own_deadline(running: Proxy) -> None:
    with running.connect() as client:
        client.send(b"GET http://example.com/ HTTP/1.1\r\nHost: x\r\n\r\n")
        assert client.response().status == 200
        start = time.monotonic()
        client.send(b"GET http://exam")
        assert client.response(14).reason == "head_timeout"
        assert 9 < time.monotonic() - start < 12


def test_a_loop_through_the_proxy_itself_is_seen(running: Proxy) -> None:
    via = dict(running.get("http://example.com/").json["headers"])["Via"]
    looped = running.ask(f"GET http://example.com/ HTTP/1.1\r\nHost: x\r\nVia: {via}\r\n\r\n".encode())
    assert (looped.status, looped.reason) == (508, "loop")
