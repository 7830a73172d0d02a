"""Tunnels: bytes both ways, how each side's end is mirrored, what port 443 and port 80 carry, and new generations."""

from __future__ import annotations

import socket
import ssl
import struct
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

from proxy.answer import credentials
from tests.proxy.examples import layer, policy
from tests.proxy.harness import ADDRESS, LOOPS, Client, Proxy
from tests.proxy.test_client_hello import REAL, built, hello, host_name, sni
from tests.rig import Mode, answer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.rig import Rig

pytestmark = pytest.mark.rig
DB = "db.example.com:5432"
OPEN = policy(allow=["example.com", "*.example.com", "db.example.com:5432", "db.example.com:25", "db.example.com:9001"])


@pytest.fixture(scope="module", params=LOOPS)
def running(rig_session: Rig, request: pytest.FixtureRequest) -> Iterator[Proxy]:
    with Proxy(rig_session, OPEN, arguments=["--loop", request.param]) as proxy:
        yield proxy


@pytest.fixture
def fresh(rig: Rig, running: Proxy) -> Proxy:
    assert running.replace(allow=OPEN.allow, deny=(), layers=(), connections=256, client_secret=None)["accepted"]
    rig.clear()
    return running


def flood(sock: socket.socket, limit: int) -> int:
    """Send until nothing more is taken for a while; how much was."""
    sent = 0
    try:
        while sent < limit:
            sent += sock.send(bytes(1 << 16))
    except TimeoutError:
        pass
    return sent


def opened(proxy: Proxy, target: str) -> Client:
    client, head = proxy.tunnel(target)
    assert head.status == 200
    return client


def test_bytes_go_both_ways_and_a_half_close_leaves_the_other_way_open(rig: Rig, fresh: Proxy) -> None:
    with opened(fresh, DB) as client:
        client.send(b"a" * 100_000)
        assert client.until(lambda data: len(data) >= 100_000) == b"a" * 100_000
        client.send(b"last")
        client.sock.shutdown(socket.SHUT_WR)
        assert client.until(lambda _: False).endswith(b"last")
        assert client.ended
    assert rig.until(lambda: [one.ended for one in rig.arrivals(port=5432)] == ["eof"])


def test_a_server_that_speaks_first_is_heard(fresh: Proxy) -> None:
    with opened(fresh, "db.example.com:25") as client:
        assert client.until(lambda data: b"\n" in data)


def test_a_reset_of_the_client_resets_the_target(rig: Rig, fresh: Proxy) -> None:
    client = opened(fresh, DB)
    client.send(b"x")
    client.until(bool)
    client.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.sock.close()
    assert rig.until(lambda: [one.ended not in (None, "eof") for one in rig.arrivals(port=5432)] == [True])


def test_a_reset_of_the_target_resets_the_client(rig: Rig, fresh: Proxy) -> None:
    rig.listen(9001, Mode.RESET)
    client, head = fresh.tunnel("db.example.com:9001")
    with client:
        if head.status == 200:
            client.sock.settimeout(5)
            # the echo of a tunnel that is open for a moment may come first, a plain end never
            with pytest.raises(ConnectionResetError):
                _ = b"".join(iter(lambda: client.sock.recv(100), b""))
        else:
            assert head.reason == "connect_failed"


def test_a_reader_that_stalls_stops_the_sender_and_costs_no_memory(fresh: Proxy) -> None:
    def resident() -> int:
        with open(f"/proc/{fresh.process.pid}/statm", "rb") as statm:  # noqa: PTH123 — not a path of ours
            return int(statm.read().split()[1]) * 4096

    with opened(fresh, DB) as client:
        client.sock.settimeout(1)
        before = resident()
        # the echo comes back and is not read, so everything in between fills up
        sent = flood(client.sock, 256 << 20)
        assert sent < 256 << 20
        assert resident() - before < 4 << 20
        got = 0
        client.sock.settimeout(5)
        while got < min(sent, 1 << 20):
            got += len(client.sock.recv(1 << 16))


def test_a_client_that_leaves_ends_its_dial(rig: Rig, fresh: Proxy) -> None:
    client = fresh.connect()
    client.send(b"CONNECT blackhole.example.com:443 HTTP/1.1\r\nHost: blackhole.example.com\r\n\r\n")
    assert rig.until(lambda: any(packet.address == "93.184.216.99" for packet in rig.packets(kind="tcp")))
    client.sock.close()

    def dialling() -> bool:
        return b"93.184.216.99" in rig.run(["ss", "-Htn", "state", "syn-sent"]).stdout

    assert rig.until(lambda: not dialling(), timeout_s=3)


def test_tls_to_the_tunnels_own_host_works_end_to_end(rig: Rig, fresh: Proxy) -> None:
    context = ssl.create_default_context(cafile=str(rig.ca))
    client = opened(fresh, "example.com:443")
    client.sock.settimeout(5)
    with client, context.wrap_socket(client.sock, server_hostname="example.com") as tls:
        tls.sendall(b"GET /x HTTP/1.1\r\nHost: example.com\r\nConnection: close\r\n\r\n")
        assert b'"target": "/x"' in tls.recv(4096) + tls.recv(4096)
    assert [arrival.sni for arrival in rig.arrivals(port=443)] == ["example.com"]


@pytest.mark.parametrize("size", [1, 7])
def test_a_hello_in_many_segments_passes_whole(rig: Rig, fresh: Proxy, size: int) -> None:
    with opened(fresh, "example.com:443") as client:
        for at in range(0, len(REAL), size):
            client.send(REAL[at : at + size])
        # the origin's answer to a ClientHello is a handshake record
        assert client.until(lambda data: len(data) > 5)[:1] == b"\x16"
    assert rig.arrivals(port=443)[0].first == REAL


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (hello("evil.com"), "sni_mismatch"),
        (hello("www.example.com"), "sni_mismatch"),
        (built(sni(host_name(b"93.184.216.34"))), "sni_mismatch"),
        (hello(None), "sni_missing"),
        (b"GET / HTTP/1.1\r\nHost: example.com\r\n\r\n", "not_tls"),
        (b"\x16\x03\x01\xff\xff", "not_tls"),
    ],
    ids=["another host", "a host below", "an address", "no name", "HTTP", "an impossible record"],
)
@pytest.mark.parametrize("early", [False, True], ids=["after the 200", "with the CONNECT"])
def test_a_tunnel_to_443_that_is_not_for_its_host_is_closed_without_a_word(
    rig: Rig, fresh: Proxy, data: bytes, code: str, early: bool
) -> None:
    request = b"CONNECT example.com:443 HTTP/1.1\r\nHost: example.com\r\n\r\n"
    with fresh.connect() as client:
        client.send(request + (data if early else b""))
        assert client.head().status == 200
        if not early:
            client.send(data)
        assert client.closes()
    assert fresh.decided(code).host == "example.com"
    assert [(one.first, one.sni) for one in rig.arrivals(port=443)] in ([], [(b"", None)])


def test_nothing_of_a_server_is_heard_on_443_before_the_hello(rig: Rig, fresh: Proxy) -> None:
    with opened(fresh, "example.com:443") as client:
        assert not client.more(0.5)
    assert rig.until(lambda: len(rig.arrivals(port=443)) == 1)


@pytest.mark.parametrize("early", [False, True], ids=["after the 200", "with the CONNECT"])
def test_http_inside_a_tunnel_to_80_is_forwarded_request_by_request(rig: Rig, fresh: Proxy, early: bool) -> None:
    first = b"GET /a HTTP/1.1\r\nHost: example.com\r\nProxy-Authorization: x\r\nUpgrade: websocket\r\n\r\n"
    with fresh.connect() as client:
        client.send(b"CONNECT example.com:80 HTTP/1.1\r\nHost: example.com:80\r\n\r\n" + (first if early else b""))
        assert client.head().status == 200
        if not early:
            client.send(first)
        seen = client.response().json
        assert seen["target"] == "/a"
        assert {"proxy-authorization", "upgrade"}.isdisjoint(name.lower() for name, _ in seen["headers"])
        client.send(b"POST /b HTTP/1.1\r\nHost: EXAMPLE.com:80\r\nContent-Length: 2\r\n\r\nhi")
        assert client.response().json["body"] == "hi"
    assert len(rig.arrivals(port=80)) == 2


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"GET / HTTP/1.1\r\nHost: evil.com\r\n\r\n", "host_mismatch"),
        (b"GET http://evil.com/ HTTP/1.1\r\nHost: example.com\r\n\r\n", "malformed"),
        (b"\x16\x03\x01\x00\x05hello", "malformed"),
        (b"CONNECT evil.com:443 HTTP/1.1\r\nHost: evil.com\r\n\r\n", "malformed"),
        (b"GET / HTTP/1.1\nHost: example.com\n\n", "malformed"),
    ],
    ids=["fronting", "absolute form", "TLS", "CONNECT", "bare LF"],
)
def test_what_the_http_rules_refuse_in_a_tunnel_to_80_closes_it_without_a_word(
    rig: Rig, fresh: Proxy, data: bytes, code: str
) -> None:
    with opened(fresh, "example.com:80") as client:
        client.send(data)
        assert client.closes()
    assert fresh.decided(code).host in ("example.com", "")
    assert rig.until(lambda: all(one.first == b"" for one in rig.arrivals(port=80)))


def test_a_new_generation_closes_tunnels_to_what_it_allows_no_longer_and_says_so(rig: Rig, fresh: Proxy) -> None:
    with (
        opened(fresh, DB) as gone,
        opened(fresh, "example.com:80") as gone_too,
        opened(fresh, "db.example.com:25") as kept,
    ):
        gone.send(b"x")
        gone.until(bool)
        kept.until(lambda data: b"\n" in data)
        gone.data.clear()
        kept.data.clear()
        start = time.monotonic()
        assert fresh.replace(allow=policy(allow=["db.example.com:25"]).allow)["accepted"]
        assert gone.closes(1)
        assert gone_too.closes(1)
        assert time.monotonic() - start < 1
        kept.send(b"still here\n")
        assert b"still here" in kept.until(lambda data: b"here" in data)
    closed = [record for record in fresh.decisions() if record.code == "policy_changed"]
    assert {(record.host, record.port) for record in closed} == {("db.example.com", 5432), ("example.com", 80)}
    assert all(
        (record.layer == "agent" and record.address and "port" in record.message) or "not_listed" in record.message
        for record in closed
    )
    assert rig.until(lambda: all(one.ended for one in rig.arrivals(port=5432)))


def test_a_denied_range_closes_tunnels_into_it(rig: Rig, fresh: Proxy) -> None:
    rig.names["db.example.com"] = ["93.184.216.35"]
    with opened(fresh, DB) as client:
        fresh.replace(layers=(layer(default_allow=True, deny_ranges=["93.184.216.35"]),))
        assert client.closes(1)
    assert fresh.decided("policy_changed").layer == "egress/org"


def test_a_generation_that_comes_during_a_lookup_is_the_one_that_counts(rig: Rig, fresh: Proxy) -> None:
    rig.names["example.com"] = answer(["93.184.216.34"], ttl=0, delay_s=0.7)
    with fresh.connect() as client:
        client.send(b"CONNECT example.com:443 HTTP/1.1\r\nHost: example.com\r\n\r\n")
        assert rig.until(lambda: bool(rig.asked()))
        fresh.replace(allow=policy(allow=["a.com"]).allow)
        assert client.response().reason == "not_listed"
    assert rig.arrivals(port=443) == []


def test_connections_over_the_limit_are_told_so_and_a_freed_place_is_free(fresh: Proxy) -> None:
    fresh.replace(connections=3)
    with ExitStack() as stack:
        clients = [stack.enter_context(opened(fresh, DB)) for _ in range(3)]
        over = fresh.get("http://example.com/")
        assert (over.status, over.reason) == (503, "too_many_connections")
        clients[0].sock.close()
        time.sleep(0.2)
        assert fresh.get("http://example.com/").status == 200


def test_clients_show_the_secret_where_there_is_one(rig: Rig, fresh: Proxy) -> None:
    fresh.replace(client_secret="hush")  # noqa: S106 — a test's own
    refused = fresh.get("http://example.com/")
    assert (refused.status, refused.reason) == (407, "client_secret")
    assert refused.headers["proxy-authenticate"] == 'Basic realm="ringfence"'
    assert rig.queries() == []
    shown = (credentials("hush") or b"").decode()
    good = fresh.ask(
        f"GET http://example.com/ HTTP/1.1\r\nHost: x\r\nProxy-Authorization: Basic {shown}\r\n\r\n".encode()
    )
    assert good.status == 200
    assert "hush" not in str(fresh.lines("decision"))
    assert shown not in str(good.json)


def test_curl_goes_through_as_it_is_used(rig: Rig, fresh: Proxy, tmp_path: Path) -> None:
    proxied = ["curl", "-sS", "--max-time", "8", "--proxy", f"http://{ADDRESS}:{fresh.port}", "--cacert", str(rig.ca)]
    plain = rig.run([*proxied, "http://example.com/a"])
    secure = rig.run([*proxied, "https://example.com/b"])
    upload = tmp_path / "body"
    upload.write_bytes(b"z" * 300_000)
    posted = rig.run([*proxied, "-T", str(upload), "http://example.com/c"])
    denied = rig.run([*proxied, "https://evil.com/"])
    assert b'"target": "/a"' in plain.stdout
    assert b'"target": "/b"' in secure.stdout
    assert b'"body_size": 300000' in posted.stdout
    assert denied.returncode == 56
    assert b"403" in denied.stderr
