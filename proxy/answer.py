"""Owns what the proxy itself says on the wire: refusals, the 200 of a tunnel, the gate's proof; decides none of it."""

from __future__ import annotations

import binascii
import hmac
import re
from typing import TYPE_CHECKING

from proxy.decision import Code
from proxy.record import printable

if TYPE_CHECKING:
    from proxy.decision import Deny

GATE_HOST = "gate.ringfence.invalid"
"""The host that the proxy answers itself; `.invalid` can never be listed (RFC 6761)."""

ESTABLISHED = b"HTTP/1.1 200 Connection established\r\n\r\n"

_CHALLENGE = re.compile(r"/([0-9a-f]{16,256})")
_USER = b"run:"

_ANSWERS: dict[Code, tuple[int, str]] = {
    Code.NOT_LISTED: (403, "http_request_denied"),
    Code.DENIED: (403, "http_request_denied"),
    Code.ORG_DENIED: (403, "http_request_denied"),
    Code.PORT: (403, "http_request_denied"),
    Code.IP_LITERAL: (403, "http_request_denied"),
    Code.ADDRESS_PRIVATE: (403, "destination_ip_prohibited"),
    Code.ADDRESS_LOCAL: (403, "destination_ip_prohibited"),
    Code.MIXED_ANSWER: (403, "destination_ip_prohibited"),
    Code.ADDRESS_DENIED: (403, "destination_ip_prohibited"),
    Code.POLICY_CHANGED: (403, "http_request_denied"),
    Code.DNS_NXDOMAIN: (502, "dns_error"),
    Code.DNS_SERVFAIL: (502, "dns_error"),
    Code.DNS_EMPTY: (502, "dns_error"),
    Code.DNS_MALFORMED: (502, "dns_error"),
    Code.DNS_TIMEOUT: (504, "dns_timeout"),
    Code.CONNECT_FAILED: (502, "connection_refused"),
    Code.CONNECT_TIMEOUT: (504, "connection_timeout"),
    Code.PEER_MISMATCH: (502, "destination_unavailable"),
    Code.BAD_RESPONSE: (502, "http_protocol_error"),
    Code.MALFORMED: (400, "http_request_error"),
    Code.HOST_MISMATCH: (400, "http_request_error"),
    Code.METHOD: (405, "http_request_error"),
    Code.VERSION: (505, "http_request_error"),
    Code.TARGET_TOO_LONG: (414, "http_request_error"),
    Code.HEAD_TOO_LARGE: (431, "http_request_error"),
    Code.HEAD_TIMEOUT: (408, "http_request_error"),
    Code.UNKNOWN_CODING: (501, "http_request_error"),
    Code.CLIENT_SECRET: (407, "http_request_denied"),
    Code.LOOP: (508, "proxy_loop_detected"),
    Code.TOO_MANY_CONNECTIONS: (503, "connection_limit_reached"),
    Code.SINK_FAILED: (503, "proxy_internal_error"),
    Code.INTERNAL: (502, "proxy_internal_error"),
    # An open tunnel is closed without a word; these are for the table to be whole.
    Code.SNI_MISMATCH: (403, "http_request_denied"),
    Code.SNI_MISSING: (403, "http_request_denied"),
    Code.NOT_TLS: (403, "http_request_denied"),
}
"""Status, and error type of RFC 9209 section 2.3, of every refusal."""


def status_of(code: Code) -> int:
    """Say which status a refusal has on the wire. Raises KeyError for `allowed`, which is none."""
    return _ANSWERS[code][0]


def refusal(deny: Deny, *, with_body: bool) -> bytes:
    """Write a whole refusal: the code is the reason phrase, because clients show that of a refused CONNECT."""
    status, error = _ANSWERS[deny.code]
    layer = "" if deny.layer is None else f" ({printable(deny.layer)})"
    body = f"ringfence: {deny.code}{layer}: {printable(deny.message)}\n".encode("ascii")
    details = f"{deny.code}{layer}".replace("\\", "").replace('"', "")
    extra = 'Proxy-Authenticate: Basic realm="ringfence"\r\n' if deny.code is Code.CLIENT_SECRET else ""
    extra += "Allow: CONNECT, GET, HEAD, POST, PUT, PATCH, DELETE, OPTIONS\r\n" if deny.code is Code.METHOD else ""
    head = (
        f"HTTP/1.1 {status} {deny.code}\r\n"
        f'Proxy-Status: ringfence; error={error}; details="{details}"\r\n'
        f"{extra}Content-Type: text/plain\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    ).encode("ascii")
    return head + body if with_body else head


def proof(origin: str, key: bytes) -> bytes | None:
    """Answer the gate's URL: the HMAC of its challenge under the proof key; None when there is no challenge in it."""
    found = _CHALLENGE.fullmatch(origin)
    if found is None:
        return None
    body = hmac.digest(key, found[1].encode("ascii"), "sha256").hex().encode("ascii")
    return (
        b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nCache-Control: no-store\r\nContent-Length: %d\r\n"
        b"Connection: close\r\n\r\n%b"
    ) % (len(body), body)


def credentials(secret: str | None) -> bytes | None:
    """Say what follows `Basic ` where clients must show the secret (RFC 7617, user `run`); None where they need not."""
    return None if secret is None else binascii.b2a_base64(_USER + secret.encode("ascii"), newline=False)


def shows(expected: bytes, shown: list[bytes]) -> bool:
    """Say whether the values of `Proxy-Authorization` are exactly one that shows the expected credentials."""
    if len(shown) != 1:
        return False
    scheme, _, given = shown[0].partition(b" ")
    return hmac.compare_digest(given.strip(b" "), expected) and scheme.lower() == b"basic"
