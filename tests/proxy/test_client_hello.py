"""ClientHellos: real ones from the ssl module, cut anywhere, and what only looks like one."""

from __future__ import annotations

import ssl

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.client_hello import MAX_HELLO, Incomplete, NoServerName, NotTls, ServerName, parse


def hello(name: str | None, *, protocols: tuple[str, ...] = ()) -> bytes:
    """Let OpenSSL write a ClientHello."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    if protocols:
        context.set_alpn_protocols(list(protocols))
    out = ssl.MemoryBIO()
    connection = context.wrap_bio(ssl.MemoryBIO(), out, server_hostname=name)
    with pytest.raises(ssl.SSLWantReadError):
        connection.do_handshake()
    return out.read()


REAL = hello("example.com")


def body(data: bytes) -> bytes:
    """Take the handshake message out of its one record."""
    return data[5:]


def records(message: bytes, size: int) -> bytes:
    """Put a handshake message into records of this size."""
    return b"".join(
        b"\x16\x03\x01" + len(part).to_bytes(2, "big") + part
        for part in (message[at : at + size] for at in range(0, len(message), size))
    )


def built(extensions: bytes) -> bytes:
    """Write a ClientHello with these extensions."""
    inner = b"\x03\x03" + bytes(32) + b"\x00" + b"\x00\x02\x13\x01" + b"\x01\x00"
    inner += len(extensions).to_bytes(2, "big") + extensions
    return records(b"\x01" + len(inner).to_bytes(3, "big") + inner, 16000)


def sni(names: bytes) -> bytes:
    """Write a server_name extension around a list's bytes."""
    value = len(names).to_bytes(2, "big") + names
    return b"\x00\x00" + len(value).to_bytes(2, "big") + value


def host_name(name: bytes, kind: int = 0) -> bytes:
    return bytes([kind]) + len(name).to_bytes(2, "big") + name


GREASE = b"\x3a\x3a\x00\x01\x00"


def test_a_real_hello_names_its_server() -> None:
    upper = hello("EXAMPLE.com", protocols=("h2", "http/1.1"))
    assert parse(REAL) == ServerName("example.com", len(REAL))
    assert parse(upper) == ServerName("example.com", len(upper))
    assert parse(hello(None)) == NoServerName()


@pytest.mark.parametrize("size", [1, 5, 64, 511])
def test_a_hello_split_over_records_is_read_as_a_whole(size: int) -> None:
    cut = records(body(REAL), size)
    assert parse(cut) == ServerName("example.com", len(cut))


def test_every_beginning_of_a_hello_is_incomplete_and_what_follows_it_is_not_looked_at() -> None:
    for end in range(len(REAL)):
        assert parse(REAL[:end]) == Incomplete()
    assert parse(REAL + b"\xff" * 10) == ServerName("example.com", len(REAL))


def test_a_hello_of_post_quantum_size_and_with_grease_is_read() -> None:
    key_share = b"\x00\x33" + (1300).to_bytes(2, "big") + bytes(1300)
    large = built(GREASE + key_share + sni(host_name(b"example.com")) + GREASE)
    assert parse(large) == ServerName("example.com", len(large))


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x80\x2e\x01\x03\x01",
        b"\x15\x03\x01\x00\x02\x01\x00",
        b"\x16\x02\x00",
        b"\x16\x03\x01\x00\x00",
        b"\x16\x03\x01\x40\x01",
        b"\x16\x03\x01\x00\x04\x02\x00\x00\x00",
        b"\x16\x03\x01\x00\x04\x01\xff\xff\xff",
        built(sni(host_name(b"a.com") + host_name(b"b.com"))),
        built(sni(host_name(b"a.com")) + sni(host_name(b"b.com"))),
        built(sni(host_name(b"a.com", kind=1))),
        built(sni(host_name(b""))),
        built(sni(b"")),
        built(sni(host_name(b"\xc3\xa9.com"))),
        built(b"\x00\x00\x00\x00"),
        built(b"\x00\x00\x00\x09"),
        built(GREASE[:-1]),
        records(body(REAL)[:6], 16000) + b"\x15\x03\x01\x00\x02\x01\x00",
        records(body(REAL) + b"\x01", 16000),
        records(body(REAL) + body(REAL), 300),
        records(body(REAL) + bytes(100), 16000)[: len(REAL)],
    ],
    ids=[
        "HTTP",
        "SSLv2",
        "an alert",
        "SSL 2 in a record",
        "an empty record",
        "a record that is too long",
        "a ServerHello",
        "a hello that is too long",
        "two names in one list",
        "two lists",
        "a name of another kind",
        "an empty name",
        "an empty list",
        "a name that is not ASCII",
        "an extension without a list",
        "an extension longer than the rest",
        "a cut extension",
        "an alert in the middle",
        "a byte behind it in its record",
        "another hello behind it in its last record",
        "a record that goes on behind it and is not whole yet",
    ],
)
def test_what_a_server_could_read_otherwise_is_not_a_hello(data: bytes) -> None:
    assert isinstance(parse(data), NotTls)


def test_a_hello_that_never_ends_is_given_up() -> None:
    endless = records(b"\x01\x00\x3f\xff" + bytes(16000), 1)
    assert isinstance(parse(endless[:MAX_HELLO]), NotTls)


@given(
    st.binary(max_size=300)
    | st.integers(0, 511).flatmap(lambda at: st.binary(max_size=4).map(lambda x: REAL[:at] + x + REAL[at:]))
)
def test_no_bytes_break_the_reader(data: bytes) -> None:
    parse(data)
