"""Heads and targets: what is refused with which code, and agreement with h11 on what is accepted."""

from __future__ import annotations

import h11
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from proxy.decision import Code, Target
from proxy.head import (
    MAX_FIELDS,
    MAX_HEAD,
    Framing,
    Malformed,
    RequestHead,
    ResponseHead,
    parse_request,
    parse_response,
    refuse_early,
    take_head,
)
from proxy.target import asked, host_shown, parse_host, target_of
from tests.proxy.examples import cases

GET = b"GET http://example.com/ HTTP/1.1\r\nHost: example.com\r\n"
WIRE = [bytes.fromhex(row["send_hex"]) if "send_hex" in row else row["send"].encode("latin-1") for row in cases("wire")]


def whole(data: bytes) -> RequestHead | Malformed:
    """Read the first head of `data`."""
    taken = take_head(bytearray(data), 0)
    if isinstance(taken, bytes):
        return parse_request(taken)
    return taken or refuse_early(bytearray(data)) or Malformed(Code.HEAD_TIMEOUT, "incomplete")


def target(data: bytes) -> Target | Malformed:
    """Read the first head of `data` and its target."""
    head = whole(data)
    wanted = head if isinstance(head, Malformed) else asked(head)
    if isinstance(wanted, Malformed) or isinstance(head, Malformed):
        return wanted if isinstance(wanted, Malformed) else Malformed(Code.INTERNAL, "")
    return target_of(wanted, head)


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (GET[:-2] + b"\n\r\n", Code.MALFORMED),
        (GET + b"X : y\r\n\r\n", Code.MALFORMED),
        (GET + b"X y\r\n\r\n", Code.MALFORMED),
        (GET + b": y\r\n\r\n", Code.MALFORMED),
        (GET + b"X: a\0b\r\n\r\n", Code.MALFORMED),
        (GET + b"X: a\rb\r\n\r\n", Code.MALFORMED),
        (GET + b"X: a\x0bb\r\n\r\n", Code.MALFORMED),
        (GET + b" X: folded at the start\r\n\r\n", Code.MALFORMED),
        (GET + b"\tfolded\r\n\r\n", Code.MALFORMED),
        (GET + b"Host: example.com\r\n\r\n", Code.MALFORMED),
        (GET + b"Content-Length: 3\r\nContent-Length: 3\r\n\r\n", Code.MALFORMED),
        (GET + b"Content-Length: 3, 3\r\n\r\n", Code.MALFORMED),
        (GET + b"Content-Length: 03\r\n\r\n", Code.MALFORMED),
        (GET + b"Content-Length: 0x3\r\n\r\n", Code.MALFORMED),
        (GET + b"Content-Length: 3_0\r\n\r\n", Code.MALFORMED),
        (GET + b"Content-Length: -1\r\n\r\n", Code.MALFORMED),
        (GET + b"Content-Length:\r\n\r\n", Code.MALFORMED),
        (GET + b"Content-Length: 99999999999999999999\r\n\r\n", Code.MALFORMED),
        (GET + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n", Code.UNKNOWN_CODING),
        (GET + b"Transfer-Encoding: identity\r\n\r\n", Code.UNKNOWN_CODING),
        (GET + b"Transfer-Encoding: xchunked\r\n\r\n", Code.UNKNOWN_CODING),
        (GET + b"Transfer-Encoding:\r\n\r\n", Code.UNKNOWN_CODING),
        (GET.replace(b"1.1", b"1.0") + b"Transfer-Encoding: chunked\r\n\r\n", Code.MALFORMED),
        (GET + b"Connection: keep-alive, Content-Length\r\n\r\n", Code.MALFORMED),
        (GET + b"Connection: transfer-encoding\r\n\r\n", Code.MALFORMED),
        (GET + b"Connection: a b\r\n\r\n", Code.MALFORMED),
        (b"GET  http://example.com/ HTTP/1.1\r\nHost: a\r\n\r\n", Code.MALFORMED),
        (b"GET http://example.com/ HTTP/1.1 \r\nHost: a\r\n\r\n", Code.MALFORMED),
        (b"GET\thttp://example.com/ HTTP/1.1\r\nHost: a\r\n\r\n", Code.MALFORMED),
        (b"\r\nGET http://example.com/ HTTP/1.1\r\nHost: a\r\n\r\n", Code.MALFORMED),
        (b"GET http://example.com/ http/1.1\r\nHost: a\r\n\r\n", Code.MALFORMED),
        (b"GET http://example.com/ HTTP/1.1.1\r\nHost: a\r\n\r\n", Code.MALFORMED),
        (b"GET http://example.com/ HTTP/1.2\r\nHost: a\r\n\r\n", Code.VERSION),
        (b"GET http://example.com/ HTTP/0.9\r\n\r\n", Code.VERSION),
        (b"GET http://example.com/ HTTP/2.0\r\n\r\n", Code.VERSION),
        (b"G@T http://example.com/ HTTP/1.1\r\nHost: a\r\n\r\n", Code.MALFORMED),
        (GET.replace(b"Host: example.com", b"Host: exam ple.com") + b"\r\n", Code.MALFORMED),
        (GET.replace(b"Host: example.com", b"Host: a@b") + b"\r\n", Code.MALFORMED),
        (b"GET /" + b"a" * 9000 + b" HTTP/1.1\r\n\r\n", Code.TARGET_TOO_LONG),
        (b"G" * 9000, Code.TARGET_TOO_LONG),
        (GET + b"X: " + b"y" * MAX_HEAD, Code.HEAD_TOO_LARGE),
        (GET + b"X: y\r\n" * MAX_FIELDS + b"\r\n", Code.HEAD_TOO_LARGE),
    ],
    ids=lambda value: ascii(value[-40:]) if isinstance(value, bytes) else str(value),
)
def test_a_malformed_head_is_refused_with_its_code(data: bytes, code: Code) -> None:
    refused = whole(data)
    assert isinstance(refused, Malformed)
    assert refused.code is code


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01",
        b"\0",
        b" GET",
        b"SSH-2.0-x\r\n",
        b"GET /\r\n",
        b"GET http://a/ HTTP/3.0\r\n",
        b"GET /\n",
    ],
    ids=ascii,
)
def test_what_can_never_become_a_request_is_refused_before_its_head_is_whole(data: bytes) -> None:
    buffer = bytearray(data)
    assert isinstance(take_head(buffer, 0) or refuse_early(buffer), Malformed)


@pytest.mark.parametrize(
    "data", [b"", b"C", b"CONNECT", b"CONNECT a:1 HTTP/1.1\r", GET, GET + b"X: y\r\n\r"], ids=ascii
)
def test_the_start_of_a_request_is_waited_for(data: bytes) -> None:
    buffer = bytearray(data)
    assert take_head(buffer, 0) is None
    assert refuse_early(buffer) is None


@given(st.sampled_from([one for one in WIRE if one.endswith(b"\r\n\r\n")]), st.data())
def test_a_head_reads_the_same_however_it_is_cut(data: bytes, draw: st.DataObject) -> None:
    expected = whole(data)
    cuts = sorted(draw.draw(st.lists(st.integers(0, len(data)), max_size=6)))
    buffer, scanned, found = bytearray(), 0, None
    for start, stop in zip([0, *cuts], [*cuts, len(data)], strict=True):
        buffer += data[start:stop]
        found = take_head(buffer, scanned)
        if found is not None:
            break
        early = refuse_early(buffer) if buffer else None
        if early is not None:
            found = early
            break
        scanned = len(buffer)
    result = parse_request(found) if isinstance(found, bytes) else found
    if isinstance(expected, Malformed):
        assert isinstance(result, Malformed)
        assert result.code is expected.code
    else:
        assert result == expected


# Agreement with h11: an independent reader of the same RFC.

METHODS = st.sampled_from(["GET", "POST", "CONNECT", "HEAD", "OPTIONS", "PUT", "G-T", "get"])
FORMS = st.sampled_from(
    [
        "http://example.com/",
        "http://example.com:8080/x?y=z",
        "example.com:443",
        "/",
        "*",
        "http://a.b/\\",
        "a b",
        "\x7f",
        "é",
    ]
)
FIELD_LINES = st.sampled_from(
    [
        b"Host: example.com",
        b"Host: example.com:443",
        b"host:example.com",
        b"Content-Length: 5",
        b"Content-Length: 0",
        b"Content-Length: +5",
        b"Content-Length: 5, 5",
        b"Transfer-Encoding: chunked",
        b"Transfer-Encoding: Chunked ",
        b"Transfer-Encoding: gzip, chunked",
        b"Connection: close",
        b"Connection: keep-alive",
        b"X: y",
        b"X:",
        b"X: \xff\xfe",
        b"X:\ty\t",
        b"X : y",
        b" folded",
        b"X: a\0b",
        b"X: a\rb",
        b"Expect: 100-continue",
    ]
)
ENDS = st.sampled_from([b"\r\n"] * 9 + [b"\n"])
REQUESTS = st.builds(
    lambda method, form, version, lines, end: (
        f"{method} {form} HTTP/{version}".encode()
        + b"\r\nHost: example.com\r\n"
        + b"".join(line + end for line in lines)
        + b"\r\n"
    ),
    METHODS,
    FORMS,
    st.sampled_from(["1.1", "1.1", "1.0", "1.2", "2.0", "x"]),
    st.lists(FIELD_LINES, max_size=4),
    ENDS,
)


def mutated(data: bytes, at: int, byte: int) -> bytes:
    at %= max(len(data), 1)
    return data[:at] + bytes([byte]) + data[at + 1 :]


MUTATED = st.builds(mutated, REQUESTS | st.sampled_from(WIRE), st.integers(0, 400), st.integers(0, 255))


@settings(max_examples=1000)
@given(REQUESTS | MUTATED)
@example(GET + b"\r\n")
@example(GET + b"Transfer-Encoding: chunked\r\n\r\n")
def test_whatever_is_accepted_h11_accepts_with_the_same_method_target_and_framing(data: bytes) -> None:
    buffer = bytearray(data)
    taken = take_head(buffer, 0)
    ours = parse_request(taken) if isinstance(taken, bytes) else None
    if not isinstance(ours, RequestHead) or not isinstance(taken, bytes):
        return
    theirs = h11.Connection(h11.SERVER)
    theirs.receive_data(taken)
    event = theirs.next_event()
    assert isinstance(event, h11.Request)
    assert event.method.decode() == ours.method
    assert event.target.decode() == ours.target
    assert event.http_version == f"1.{ours.minor}".encode()
    assert [(name, value) for name, _, value in ours.fields if name != b"transfer-encoding"] == [
        (bytes(name), bytes(value)) for name, value in event.headers if name != b"transfer-encoding"
    ]
    lengths = [int(value) for name, value in event.headers if name == b"content-length"]
    chunked = any(name == b"transfer-encoding" for name, _ in event.headers)
    match ours.framing:
        case Framing.CHUNKED:
            assert chunked
        case Framing.LENGTH:
            assert lengths == [ours.length]
            assert not chunked
        case Framing.NONE:
            assert lengths in ([], [0])
            assert not chunked
        case Framing.UNTIL_CLOSE:
            pytest.fail("a request never lasts until the connection closes")


@given(st.binary(max_size=200) | MUTATED)
def test_no_bytes_break_the_reader(data: bytes) -> None:
    target(data)
    taken = take_head(bytearray(data), 0)
    if isinstance(taken, bytes):
        parse_response(taken, method="GET")


# Targets.


@pytest.mark.parametrize(
    ("line", "code"),
    [
        (b"CONNECT http://example.com:443 HTTP/1.1\r\nHost: example.com", Code.MALFORMED),
        (b"CONNECT example.com:443/ HTTP/1.1\r\nHost: example.com", Code.MALFORMED),
        (b"CONNECT example.com: HTTP/1.1\r\nHost: example.com", Code.MALFORMED),
        (b"CONNECT example.com:+443 HTTP/1.1\r\nHost: example.com", Code.MALFORMED),
        (b"CONNECT example.com:443 HTTP/1.1\r\nHost: example.com:80", Code.HOST_MISMATCH),
        (b"CONNECT example.com:443 HTTP/1.1\r\nHost: example.com:", Code.HOST_MISMATCH),
        (b"CONNECT example.com:443 HTTP/1.1\r\nHost:", Code.HOST_MISMATCH),
        (b"CONNECT example.com:443 HTTP/1.0\r\nHost: evil.com", Code.HOST_MISMATCH),
        (b"CONNECT example.com:443 HTTP/1.1\r\nHost: example.com\r\nContent-Length: 0", Code.MALFORMED),
        (b"CONNECT example.com:443 HTTP/1.1\r\nHost: example.com\r\nTransfer-Encoding: chunked", Code.MALFORMED),
        (b"CONNECT 127.0.0.1.:443 HTTP/1.1\r\nHost: 127.0.0.1", Code.IP_LITERAL),
        (b"CONNECT 0177.0.0.1:443 HTTP/1.1\r\nHost: a", Code.IP_LITERAL),
        (b"CONNECT a.0xff:443 HTTP/1.1\r\nHost: a", Code.IP_LITERAL),
        (b"CONNECT [::ffff:7f00:1]:443 HTTP/1.1\r\nHost: a", Code.IP_LITERAL),
        (b"CONNECT [v1.a]:443 HTTP/1.1\r\nHost: a", Code.MALFORMED),
        (b"CONNECT [127.0.0.1]:443 HTTP/1.1\r\nHost: a", Code.MALFORMED),
        (b"GET //example.com/ HTTP/1.1\r\nHost: example.com", Code.MALFORMED),
        (b"GET ftp://example.com/ HTTP/1.1\r\nHost: example.com", Code.MALFORMED),
        (b"GET http:/example.com/ HTTP/1.1\r\nHost: example.com", Code.MALFORMED),
        (b"GET http:///path HTTP/1.1\r\nHost: example.com", Code.MALFORMED),
        (b"GET http://example.com:/ HTTP/1.1\r\nHost: example.com", Code.MALFORMED),
        (b"GET http://example.com:080/ HTTP/1.1\r\nHost: example.com", Code.MALFORMED),
        (b"GET http://a:b@example.com/ HTTP/1.1\r\nHost: example.com", Code.MALFORMED),
        (b"GET http://example.com/#x HTTP/1.1\r\nHost: example.com", Code.MALFORMED),
        (b"GET http://example.com#@evil.com/ HTTP/1.1\r\nHost: example.com", Code.MALFORMED),
        (b"GET http://example.com?@evil.com/ HTTP/1.0", None),
        (b"GET http://10.0.0.1/ HTTP/1.1\r\nHost: example.com", Code.IP_LITERAL),
        (b"OPTIONS * HTTP/1.1\r\nHost: example.com", Code.MALFORMED),
        (b"trace http://example.com/ HTTP/1.1\r\nHost: example.com", Code.METHOD),
        (b"connect http://example.com/ HTTP/1.1\r\nHost: example.com", Code.MALFORMED),
        (b"connect example.com:443 HTTP/1.1\r\nHost: example.com", Code.MALFORMED),
    ],
    ids=ascii,
)
def test_a_target_that_is_not_one_is_refused_with_its_code(line: bytes, code: Code | None) -> None:
    found = target(line + b"\r\n\r\n")
    if code is None:
        assert found == Target("example.com", 80)
    else:
        assert isinstance(found, Malformed)
        assert found.code is code


@pytest.mark.parametrize(
    ("url", "origin"),
    [
        ("http://example.com", "/"),
        ("http://example.com/", "/"),
        ("HTTP://example.com/a/../b", "/a/../b"),
        ("http://example.com?x=http://evil.com/", "/?x=http://evil.com/"),
        ("http://example.com//evil.com/", "//evil.com/"),
        ("http://example.com:80/x", "/x"),
    ],
)
def test_the_forwarded_path_is_what_follows_the_authority(url: str, origin: str) -> None:
    head = whole(f"GET {url} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    assert isinstance(head, RequestHead)
    wanted = asked(head)
    assert not isinstance(wanted, Malformed)
    assert wanted.origin == origin
    assert target_of(wanted, head) == Target("example.com", 80)


def test_options_without_a_path_asks_about_the_whole_server() -> None:
    head = whole(b"OPTIONS http://example.com HTTP/1.1\r\nHost: x\r\n\r\n")
    assert isinstance(head, RequestHead)
    wanted = asked(head)
    assert not isinstance(wanted, Malformed)
    assert wanted.origin == "*"


def test_userinfo_is_never_written_down() -> None:
    head = whole(b"GET http://user:hush@example.com/ HTTP/1.1\r\nHost: x\r\n\r\n")
    assert isinstance(head, RequestHead)
    wanted = asked(head)
    assert not isinstance(wanted, Malformed)
    assert host_shown(wanted) == "example.com"


@given(st.text(max_size=80))
def test_a_host_from_the_wire_is_a_bounded_name_of_plain_labels_or_refused(text: str) -> None:
    host = parse_host(text)
    if isinstance(host, str):
        assert host == text.removesuffix(".").lower()
        assert host.isascii()
        assert len(host) <= 253
        assert not set(host) - set("abcdefghijklmnopqrstuvwxyz0123456789._-")
        assert all(0 < len(label) <= 63 for label in host.split("."))


# Responses.


@pytest.mark.parametrize(
    ("head", "method", "framing", "length"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n", "GET", Framing.LENGTH, 5),
        (b"HTTP/1.1 200\r\n\r\n", "GET", Framing.UNTIL_CLOSE, 0),
        (b"HTTP/1.0 200 OK\r\n\r\n", "GET", Framing.UNTIL_CLOSE, 0),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", "GET", Framing.CHUNKED, 0),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n", "HEAD", Framing.NONE, 0),
        (b"HTTP/1.1 304 Not Modified\r\nContent-Length: 5\r\n\r\n", "GET", Framing.NONE, 0),
        (b"HTTP/1.1 204 No Content\r\n\r\n", "GET", Framing.NONE, 0),
        (b"HTTP/1.1 100 Continue\r\n\r\n", "POST", Framing.NONE, 0),
    ],
)
def test_a_response_has_the_framing_of_its_status_and_method(
    head: bytes, method: str, framing: Framing, length: int
) -> None:
    parsed = parse_response(head, method=method)
    assert isinstance(parsed, ResponseHead)
    assert (parsed.framing, parsed.length) == (framing, length)


@pytest.mark.parametrize(
    "head",
    [
        b"HTTP/2 200\r\n\r\n",
        b"HTTP/1.1 099 x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX : y\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\n",
        b"ICY 200 OK\r\n\r\n",
    ],
    ids=ascii,
)
def test_an_ambiguous_response_is_not_passed_on(head: bytes) -> None:
    parsed = parse_response(head, method="GET")
    assert isinstance(parsed, Malformed)
    assert parsed.code is Code.BAD_RESPONSE
