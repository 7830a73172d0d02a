"""Forwarding: which fields go on, and bodies whose framing is written anew."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import h11
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from proxy.answer import credentials, proof, shows
from proxy.decision import Code, Deny, Target, decide_name
from proxy.head import Framing, Malformed, RequestHead, ResponseHead, parse_request, parse_response
from proxy.judgement import Open, Proof, Refused, judge
from proxy.request import LAST_CHUNK, BodyReader, chunk, forward_request, forward_response, response_framing
from tests.proxy.examples import HOSTS, POLICIES, PORTS, policy

if TYPE_CHECKING:
    from proxy.policy import ProxyPolicy

VIA = b"rf-0123456789abcdef"
TARGET = Target("example.com", 80)


def request(fields: bytes, *, line: bytes = b"GET http://example.com/x HTTP/1.1") -> RequestHead:
    head = parse_request(line + b"\r\nHost: evil.com\r\n" + fields + b"\r\n")
    assert isinstance(head, RequestHead)
    return head


def forwarded(fields: bytes, *, target: Target = TARGET) -> list[bytes]:
    head = forward_request(request(fields), target, "/x", via=VIA)
    assert isinstance(head, bytes)
    assert head.endswith(b"\r\n\r\n")
    return head[:-4].split(b"\r\n")


def test_the_host_that_goes_on_is_the_targets_and_never_the_clients() -> None:
    assert forwarded(b"") == [b"GET /x HTTP/1.1", b"Host: example.com", b"Via: 1.1 " + VIA, b"Connection: close"]
    assert b"Host: example.com:8080" in forwarded(b"", target=Target("example.com", 8080))


@pytest.mark.parametrize(
    "field",
    [
        b"Proxy-Authorization: Basic x",
        b"Proxy-Connection: keep-alive",
        b"Proxy-Anything: x",
        b"Keep-Alive: timeout=5",
        b"TE: trailers",
        b"Trailer: X",
        b"Upgrade: h2c",
        b"HTTP2-Settings: AAMA",
        b"Connection: X-Mine\r\nX-Mine: 1",
        b"Connection: keep-alive, x-mine\r\nX-MINE: 1",
    ],
)
def test_a_hop_by_hop_field_does_not_go_on(field: bytes) -> None:
    assert forwarded(field + b"\r\n") == forwarded(b"")


def test_every_other_field_goes_on_as_it_came_and_in_order() -> None:
    lines = forwarded(b"Accept: */*\r\nX-A: 1\r\nx-a:  2 \r\nCookie: a=b\r\nAuthorization: y\r\n")
    assert lines[2:-2] == [b"Accept: */*", b"X-A: 1", b"x-a: 2", b"Cookie: a=b", b"Authorization: y"]


def test_a_request_that_was_here_before_is_a_loop() -> None:
    looped = forward_request(request(b"Via: 1.1 other, 1.1 " + VIA + b"\r\n"), TARGET, "/", via=VIA)
    assert isinstance(looped, Malformed)
    assert looped.code is Code.LOOP
    assert b"Via: 1.1 other" in forwarded(b"Via: 1.1 other\r\n")


def test_an_empty_body_stays_one_with_a_length() -> None:
    assert b"Content-Length: 0" in forwarded(b"Content-Length: 0\r\n")
    assert b"Content-Length: 5" in forwarded(b"Content-Length: 5\r\n")
    assert b"Transfer-Encoding: chunked" in forwarded(b"Transfer-Encoding: chunked\r\n")


def response(data: bytes, method: str = "GET") -> ResponseHead:
    head = parse_response(data, method=method)
    assert isinstance(head, ResponseHead)
    return head


def test_a_response_goes_back_without_what_was_for_this_hop_only() -> None:
    head = response(
        b"HTTP/1.1 200 Fine\r\nContent-Length: 5\r\nConnection: close, X-Mine\r\nX-Mine: 1\r\nKeep-Alive: x\r\n"
        b"Proxy-Authenticate: Basic\r\nProxy-Status: other\r\nSet-Cookie: a\r\nLocation: http://evil.com/\r\n\r\n"
    )
    assert forward_response(head, framing=Framing.LENGTH, persistent=True, via=VIA).split(b"\r\n") == [
        b"HTTP/1.1 200 Fine",
        b"Set-Cookie: a",
        b"Location: http://evil.com/",
        b"Content-Length: 5",
        b"Via: 1.1 " + VIA,
        b"",
        b"",
    ]


def test_the_length_of_a_body_that_is_left_out_is_still_told() -> None:
    head = response(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n", method="HEAD")
    sent = forward_response(head, framing=Framing.NONE, persistent=False, via=VIA)
    assert sent.count(b"Content-Length: 5") == 1
    assert b"Connection: close" in sent


@pytest.mark.parametrize(
    ("framing", "minor", "becomes"),
    [
        (Framing.CHUNKED, 1, Framing.CHUNKED),
        (Framing.UNTIL_CLOSE, 1, Framing.CHUNKED),
        (Framing.CHUNKED, 0, Framing.UNTIL_CLOSE),
        (Framing.LENGTH, 0, Framing.LENGTH),
        (Framing.NONE, 1, Framing.NONE),
    ],
)
def test_a_body_without_a_length_is_chunked_for_who_understands_that(
    framing: Framing, minor: int, becomes: Framing
) -> None:
    head = ResponseHead(status=200, reason=b"", fields=(), dropped=frozenset(), framing=framing, length=0)
    assert response_framing(head, minor=minor) is becomes


def read(data: bytes, cuts: list[int], framing: Framing, length: int = 0) -> tuple[bytes, BodyReader, int]:
    """Feed `data` cut in pieces; the content, the reader, and how many bytes it took."""
    reader = BodyReader(framing, length)
    out: list[bytes] = []
    taken = 0
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    for start, stop in itertools.pairwise(edges):
        if start < stop:
            taken += reader.feed(data[start:stop], out)
    return b"".join(out), reader, taken


CUTS = st.lists(st.integers(0, 1000), max_size=8)


@given(st.lists(st.binary(min_size=1, max_size=40), max_size=5), CUTS, st.sampled_from([b"", b"X: y\r\n"]), st.binary())
def test_a_chunked_body_comes_out_whole_however_it_is_cut_and_takes_nothing_that_follows(
    pieces: list[bytes], cuts: list[int], trailer: bytes, rest: bytes
) -> None:
    body = b"".join(chunk(piece) for piece in pieces) + LAST_CHUNK[:-2] + trailer + b"\r\n"
    content, reader, taken = read(body + rest, cuts, Framing.CHUNKED)
    assert reader.broken is None
    assert reader.done
    assert content == b"".join(pieces)
    assert taken == len(body)


@given(st.binary(min_size=1, max_size=60), CUTS, st.binary())
def test_a_body_with_a_length_ends_at_its_length(body: bytes, cuts: list[int], rest: bytes) -> None:
    content, reader, taken = read(body + rest, cuts, Framing.LENGTH, len(body))
    assert (content, reader.done, taken) == (body, True, len(body))


@pytest.mark.parametrize(
    "body",
    [
        b"5\nhello\r\n0\r\n\r\n",
        b"5\r\nhello\n0\r\n\r\n",
        b"5\r\nhelloX\r\n0\r\n\r\n",
        b"0x5\r\nhello\r\n0\r\n\r\n",
        b"+5\r\nhello\r\n0\r\n\r\n",
        b"5 \r\nhello\r\n0\r\n\r\n",
        b"-0\r\n\r\n",
        b"\r\n",
        b"5;a\0b\r\nhello\r\n0\r\n\r\n",
        b"ffffffffffffffff\r\n",
        b"5;" + b"a" * 300 + b"\r\nhello\r\n0\r\n\r\n",
        b"0\r\nX : y\r\n\r\n",
        b"0\r\n folded\r\n\r\n",
        b"0\r\n" + b"X: y\r\n" * 101 + b"\r\n",
        b"0\n\n",
    ],
    ids=lambda body: ascii(body[:24]),
)
def test_a_chunked_body_with_odd_framing_is_broken(body: bytes) -> None:
    _, reader, _ = read(body, [], Framing.CHUNKED)
    assert reader.broken


@given(
    st.lists(
        st.sampled_from(
            [b"5\r\n", b"hello", b"\r\n", b"0\r\n", b"\n", b"a;b=c\r\n", b"X: y\r\n", b"\r", b"0123456789"]
        ),
        max_size=10,
    ).map(b"".join),
    CUTS,
)
def test_a_chunked_body_that_is_accepted_h11_accepts_with_the_same_content(body: bytes, cuts: list[int]) -> None:
    content, reader, taken = read(body, cuts, Framing.CHUNKED)
    if not reader.done or reader.broken:
        return
    theirs = h11.Connection(h11.SERVER)
    theirs.receive_data(b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n" + body[:taken])
    assert isinstance(theirs.next_event(), h11.Request)
    seen = b""
    while isinstance(event := theirs.next_event(), h11.Data):
        seen += bytes(event.data)
    assert isinstance(event, h11.EndOfMessage)
    assert seen == content


@given(st.binary(max_size=200), CUTS)
def test_no_bytes_break_the_reader_of_bodies(body: bytes, cuts: list[int]) -> None:
    read(body, cuts, Framing.CHUNKED)


# The order of checks.

SHOWN = b"Proxy-Authorization: Basic cnVuOmh1c2g=\r\n"
SECRET = policy(client_secret="hush")  # noqa: S106 — a test's own


@pytest.mark.parametrize(
    ("head", "code"),
    [
        (b"GET http://evil.com\\@x/ HTTP/1.1\r\nHost: x\nX: y\r\n\r\n", Code.MALFORMED),
        (b"GET https://evil.com/ HTTP/1.1\r\nHost: x\r\n\r\n", Code.MALFORMED),
        (b"TRACE http://a..b/ HTTP/1.1\r\nHost: x\r\n\r\n", Code.METHOD),
        (b"GET http://a..b/ HTTP/1.1\r\nHost: x\r\n\r\n", Code.CLIENT_SECRET),
        (b"GET http://example.com/ HTTP/1.1\r\nHost: x\r\n\r\n", Code.CLIENT_SECRET),
        (b"GET http://gate.ringfence.invalid/00112233445566778899 HTTP/1.1\r\nHost: x\r\n\r\n", Code.CLIENT_SECRET),
        (b"GET http://evil.com/ HTTP/1.1\r\nHost: x\r\n" + SHOWN + b"\r\n", Code.NOT_LISTED),
        (b"GET http://a..b/ HTTP/1.1\r\nHost: x\r\n" + SHOWN.lower() + b"\r\n", Code.CLIENT_SECRET),
        (b"GET http://a..b/ HTTP/1.1\r\nHost: x\r\n" + SHOWN + b"\r\n", Code.MALFORMED),
    ],
    ids=[
        "head",
        "form",
        "method",
        "secret before host",
        "secret",
        "secret before the gate",
        "lists",
        "wrong secret",
        "host",
    ],
)
def test_checks_run_in_order_and_the_first_failure_is_the_answer(head: bytes, code: Code) -> None:
    refused = judge(head, SECRET, inside=None, via=VIA)
    assert isinstance(refused, Refused)
    assert refused.deny.code is code


@pytest.mark.parametrize(
    "shown",
    [
        [],
        [b"Basic"],
        [b"Basic cnVuOmh1c2g"],
        [b"Bearer cnVuOmh1c2g="],
        [b"Basic cnVuOmh1c2g= x"],
        [b"Basic cnVuOmh1c2g=", b"Basic cnVuOmh1c2g="],
    ],
)
def test_only_exactly_the_right_credentials_are_right(shown: list[bytes]) -> None:
    expected = credentials("hush")
    assert expected == b"cnVuOmh1c2g="
    assert not shows(expected, shown)
    assert shows(expected, [b"Basic cnVuOmh1c2g="])


def test_the_gates_question_is_answered_under_the_key_and_is_no_decision() -> None:
    answer = judge(
        b"GET http://gate.ringfence.invalid/00112233445566778899 HTTP/1.1\r\nHost: x\r\n\r\n",
        policy(),
        inside=None,
        via=VIA,
    )
    assert isinstance(answer, Proof)
    assert answer.response == proof("/00112233445566778899", policy().proof_key)
    assert proof("/00112233445566778899", b"another") != answer.response


@pytest.mark.parametrize(
    "line",
    [
        b"GET http://gate.ringfence.invalid/ HTTP/1.1",
        b"GET http://gate.ringfence.invalid/XYZ HTTP/1.1",
        b"GET http://gate.ringfence.invalid:81/00112233445566778899 HTTP/1.1",
        b"POST http://gate.ringfence.invalid/00112233445566778899 HTTP/1.1",
        b"GET http://x.gate.ringfence.invalid/00112233445566778899 HTTP/1.1",
    ],
)
def test_only_the_gates_own_question_is_answered(line: bytes) -> None:
    refused = judge(line + b"\r\nHost: x\r\n\r\n", policy(), inside=None, via=VIA)
    assert isinstance(refused, Refused)
    assert refused.deny.code is Code.NOT_LISTED


@pytest.mark.parametrize(
    ("head", "code"),
    [
        (b"GET / HTTP/1.1\r\nHost: evil.com\r\n\r\n", Code.HOST_MISMATCH),
        (b"GET / HTTP/1.1\r\nHost: example.com:81\r\n\r\n", Code.HOST_MISMATCH),
        (b"GET / HTTP/1.0\r\n\r\n", Code.HOST_MISMATCH),
        (b"GET http://example.com/ HTTP/1.1\r\nHost: example.com\r\n\r\n", Code.MALFORMED),
        (b"CONNECT example.com:443 HTTP/1.1\r\nHost: example.com\r\n\r\n", Code.MALFORMED),
        (b"CONNECT /evil.com:443 HTTP/1.1\r\nHost: example.com\r\nContent-Length: 9\r\n\r\n", Code.MALFORMED),
        (b"connect /evil.com:443 HTTP/1.1\r\nHost: example.com\r\n\r\n", Code.MALFORMED),
        (b"TRACE / HTTP/1.1\r\nHost: example.com\r\n\r\n", Code.METHOD),
        (b"GET / HTTP/1.1\r\nHost: EXAMPLE.com.:80\r\n\r\n", None),
        (b"OPTIONS * HTTP/1.1\r\nHost: example.com\r\n\r\n", None),
    ],
    ids=ascii,
)
def test_a_request_inside_a_tunnel_to_port_80_asks_for_the_tunnels_target_only(head: bytes, code: Code | None) -> None:
    judged = judge(head, policy(), inside=TARGET, via=VIA)
    if code is None:
        assert isinstance(judged, Open)
        assert judged.forward is not None
        assert b"\r\nHost: example.com\r\n" in judged.forward
    else:
        assert isinstance(judged, Refused)
        assert judged.deny.code is code


@given(st.binary(max_size=120))
def test_nothing_but_a_listed_name_is_ever_opened(data: bytes) -> None:
    judged = judge(b"CONNECT " + data + b" HTTP/1.1\r\nHost: example.com\r\n\r\n", policy(), inside=None, via=VIA)
    if isinstance(judged, Open):
        assert judged.resolved.target.host == "example.com"
        assert judged.resolved.target.port in (80, 443)


@given(POLICIES, st.builds(Target, HOSTS, PORTS))
def test_a_denied_name_never_yields_what_the_resolver_takes(made: ProxyPolicy, target: Target) -> None:
    """The resolver takes a `Resolve` only, and only an `Open` carries one: the very one of the decision."""
    assume(made.client_secret is None)
    judged = judge(f"CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n\r\n".encode(), made, inside=None, via=VIA)
    decided = decide_name(made, target)
    if isinstance(decided, Deny):
        assert isinstance(judged, Refused)
        assert judged.deny == decided
    else:
        assert isinstance(judged, Open)
        assert judged.resolved == decided
