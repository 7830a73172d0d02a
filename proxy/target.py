"""Owns which target a request names: its form, its host's syntax, its port; does not decide whether it is allowed.

Wire bytes never go through `urllib.parse`, the `idna` codec or `int` alone: each of them repairs what must be refused.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from proxy.address import parse_address
from proxy.decision import Code, Target
from proxy.entry import MAX_NAME, is_address_like, parse_port
from proxy.head import Framing, Malformed, RequestHead

HTTP_PORT = 80
_WIRE_NAME = re.compile(r"(?:[A-Za-z0-9_-]{1,63}\.)*[A-Za-z0-9_-]{1,63}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a request asks for, before its host's syntax is judged: `authority` is host and port as on the wire.

    `origin` is the target to forward, empty for CONNECT.
    """

    connect: bool
    authority: str
    origin: str


def asked(head: RequestHead) -> Asked | Malformed:
    """Read the target's form: authority form for CONNECT, `http://` absolute form for everything else."""
    target = head.target
    if head.method.upper() == "TRACE":
        return Malformed(Code.METHOD, "TRACE would echo the request's own fields; it is not forwarded")
    if head.method == "CONNECT":
        if head.framing is not Framing.NONE or any(name == b"content-length" for name, _, _ in head.fields):
            return Malformed(
                Code.MALFORMED, "CONNECT carries no body; send neither Content-Length nor Transfer-Encoding"
            )
        return Asked(connect=True, authority=target, origin="")
    if head.method.upper() == "CONNECT":
        return Malformed(Code.MALFORMED, "methods are case-sensitive; write CONNECT in capitals")
    scheme, separator, rest = target.partition("://")
    if not separator or scheme.lower() != "http":
        return Malformed(
            Code.MALFORMED,
            "write the whole URL, http://host/path; for https, wss and everything else use CONNECT host:port",
        )
    if "#" in rest:
        return Malformed(Code.MALFORMED, "a request target has no fragment")
    cut = min(at for at in (rest.find("/"), rest.find("?"), len(rest)) if at != -1)
    origin = rest[cut:]
    if not origin.startswith("/"):
        # RFC 9112 section 3.2.4: OPTIONS with neither path nor query asks about the server as a whole
        origin = "*" if not origin and head.method == "OPTIONS" else "/" + origin
    return Asked(connect=False, authority=rest[:cut], origin=origin)


def target_of(wanted: Asked, head: RequestHead) -> Target | Malformed:
    """Read the host and port that are asked for; the code is `ip_literal` for an address in any spelling."""
    name, port = _split(wanted.authority)
    if port is None and wanted.connect:
        return Malformed(Code.MALFORMED, "CONNECT needs host:port")
    number = HTTP_PORT if port is None else parse_port(port)
    if number is None:
        return Malformed(Code.MALFORMED, "the port is not a decimal number from 1 to 65535 without leading zeros")
    host = parse_host(name)
    if isinstance(host, Malformed):
        return host
    target = Target(host, number)
    if wanted.connect and head.host is not None:
        same = head.host == wanted.authority.encode("ascii") or names(head.host, target, default=number)
        return target if same else _host_differs()
    return target


def names(field: bytes, target: Target, *, default: int) -> bool:
    """Say whether a Host field names exactly this target; a port that is left out is `default`."""
    name, port = _split(field.decode("latin-1"))
    return parse_host(name) == target.host and (default if port is None else parse_port(port)) == target.port


def parse_host(text: str) -> str | Malformed:
    """Canonicalise a host from the wire, or say that it is an address (`ip_literal`) or no name at all."""
    if text.startswith("[") and text.endswith("]") and parse_address(text[1:-1]) is not None and ":" in text:
        return _literal()
    name = text.removesuffix(".")
    if len(name) > MAX_NAME or _WIRE_NAME.fullmatch(name) is None:
        return Malformed(Code.MALFORMED, "the host is not a name of ASCII letters, digits, '-' and '_' joined by dots")
    name = name.lower()
    return _literal() if is_address_like(name) else name


def _literal() -> Malformed:
    return Malformed(Code.IP_LITERAL, "addresses are never allowed; ask for the host by its name")


def _host_differs() -> Malformed:
    return Malformed(Code.HOST_MISMATCH, "the Host field names another host or port than CONNECT does")


def _split(authority: str) -> tuple[str, str | None]:
    """Split host and port text at the last colon outside brackets; port None when there is no colon."""
    if authority.endswith("]"):
        return authority, None
    name, colon, port = authority.rpartition(":")
    return (name, port) if colon else (authority, None)


def asked_inside(head: RequestHead) -> Malformed | None:
    """Judge the target's form inside a tunnel, where only a path may stand (RFC 9112 section 3.2.1)."""
    if head.method.upper() == "TRACE":
        return Malformed(Code.METHOD, "TRACE would echo the request's own fields; it is not forwarded")
    if head.method.upper() == "CONNECT":
        # a server that takes it would open a tunnel of its own, to wherever the path says
        return Malformed(Code.MALFORMED, "a tunnel is asked for outside any other")
    if head.target.startswith("/") or (head.method == "OPTIONS" and head.target == "*"):
        return None
    return Malformed(Code.MALFORMED, "inside a tunnel to port 80 a request's target is a path")


def host_shown(wanted: Asked) -> str:
    """Say what to write down for a target that could not be read: never userinfo, which may hold a password."""
    return _split(wanted.authority.rpartition("@")[2])[0]


def port_shown(wanted: Asked) -> int | None:
    """Say which port to write down for it; None where there is none to be read."""
    port = _split(wanted.authority)[1]
    if port is None:
        return None if wanted.connect else HTTP_PORT
    return parse_port(port)
