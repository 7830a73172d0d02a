"""Owns `x-format`: how text in a document becomes a canonical value, and back; knows no schema and no document.

Nothing here is left to `pattern` or `format`: `$` lets a trailing newline pass, and `format` is not asserted.
"""

from __future__ import annotations

import functools
import ipaddress
import re
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from proxy.entry import BadEntry, Entry, parse_port
from reconciler.core.hostnames import parse_deny_entry, parse_entry

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class Bad:
    """A text that has not the form wanted; `message` says what to write, `code` is for machines where there is one."""

    message: str
    code: str = "format"


_REMEMBERED = 8192
"""Texts of which the value is kept: in a large estate most are written many times."""
_LONGEST_REMEMBERED = 512
"""Characters of such a text: hostile ones would be kept for ever at 256 KiB each."""

Value = str | int
"""What a text of some format means: canonical text, bytes, seconds, or Unix seconds."""

_SIZE_UNITS: Mapping[str, int] = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_DURATION_UNITS: Mapping[str, int] = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_QUANTITY = re.compile(r"(0|[1-9][0-9]{0,14})([A-Za-z]+)")
_NAME = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")
_USER = re.compile(r"[a-z_][a-z0-9_-]{0,30}[a-z0-9_$-]?")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
_REASON_ID = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,98}[A-Za-z0-9])?")
_AUDIENCE = re.compile(r"[A-Za-z0-9.*?_-]{1,253}")
_TIME = re.compile(r"([0-9]{4})-([0-9]{2})-([0-9]{2})T([0-9]{2}):([0-9]{2}):([0-9]{2})Z")
_POINTER = re.compile(r"(?:/(?:[^~/]|~[01])*)+")
_IMAGE = re.compile(
    r"(?:[a-z0-9](?:[a-z0-9.-]*[a-z0-9])?(?::[0-9]{1,5})?/)?"  # registry
    r"[a-z0-9]+(?:(?:\.|_{1,2}|-+)[a-z0-9]+)*(?:/[a-z0-9]+(?:(?:\.|_{1,2}|-+)[a-z0-9]+)*)*"  # path
    r"(?::[A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?@sha256:[0-9a-f]{64}"
)

PROXY_VARIABLES = frozenset(
    {"HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "FTP_PROXY", "FTPS_PROXY", "RSYNC_PROXY"}
)
"""Set by ringfence in each sandbox, in capitals and in small letters."""

_STEERING_VARIABLES = frozenset(
    # As words: a list literal of them would be one line each.
    """
    BASH_ENV CDPATH CLASSPATH ENV GCONV_PATH GIT_EXEC_PATH GLIBC_TUNABLES GOROOT HOME HOSTALIASES IFS
    JAVA_TOOL_OPTIONS JDK_JAVA_OPTIONS LOCALDOMAIN LOCPATH MALLOC_TRACE MANPATH NIS_PATH NLSPATH NODE_EXTRA_CA_CERTS
    NODE_OPTIONS NODE_PATH PATH PERL5DB PERL5LIB PERL5OPT PERLLIB PHPRC PHP_INI_SCAN_DIR PS4 RES_OPTIONS
    RESOLV_HOST_CONF RUBYLIB RUBYOPT SHELL SHELLOPTS SSL_CERT_DIR SSL_CERT_FILE TMPDIR TZDIR _JAVA_OPTIONS
    """.split()  # noqa: SIM905 — see above
)
"""They choose which code a program loads, where it looks things up, or which certificates it trusts."""
_STEERING_PREFIXES = ("LD_", "DYLD_", "PYTHON", "BASH_FUNC_", "RINGFENCE_", "GIT_CONFIG")


def parse(name: str, text: str) -> Value | Bad:
    """Read `text` as the format `name`. An unknown format name raises ValueError: the schema is broken."""
    return (_parse if len(text) <= _LONGEST_REMEMBERED else _parse.__wrapped__)(name, text)


@functools.lru_cache(maxsize=_REMEMBERED)
def _parse(name: str, text: str) -> Value | Bad:  # noqa: C901, PLR0912 — one arm for each format, none decides for another
    match name:
        case "entry":
            return _named(parse_entry(text))
        case "deny-entry":
            return _named(parse_deny_entry(text))
        case "size":
            return _quantity(text, _SIZE_UNITS, "a size such as 512MiB (units B, KiB, MiB, GiB, TiB)")
        case "duration":
            return _quantity(text, _DURATION_UNITS, "a duration such as 10m (units s, m, h, d)")
        case "address-range":
            return _range(text)
        case "name":
            return _matching(_NAME, text, "a name of small letters, digits and '-', at most 63 characters")
        case "scope":
            return text if text == "*" else _matching(_NAME, text, 'an agent\'s name, or "*" for all agents')
        case "user-name":
            return _matching(_USER, text, "a user name of the host, at most 32 characters")
        case "env-name":
            return _variable(text)
        case "image":
            return _image(text)
        case "path":
            return _path(text)
        case "resolver":
            return _resolver(text)
        case "regex":
            return _regex(text)
        case "timestamp":
            return _timestamp(text)
        case "expiry":
            return text if text == "never" else _timestamp(text)
        case "reason-id":
            return _matching(_REASON_ID, text, "an id of letters, digits, '.', '_' and '-', at most 100 characters")
        case "audience":
            return _matching(_AUDIENCE, text, "a host's name, or a glob with * and ?")
        case "document":
            return _document(text)
        case "pointer":
            return _matching(_POINTER, text, "a JSON pointer such as /limits/memory")
        case _:
            raise ValueError(f"no such format: {name}")


def render(name: str | None, value: object) -> str:
    """Write a value of a resolved tree as a document would write it: 536870912 of `size` is `512MiB`."""
    match name, value:
        case "size", int():
            return _with_unit(value, _SIZE_UNITS)
        case "duration", int():
            return _with_unit(value, _DURATION_UNITS)
        case (("timestamp" | "expiry"), int()):
            return datetime.fromtimestamp(value, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        case _, bool():
            return "true" if value else "false"
        case _, None:
            return "null"
        case _:
            return str(value)


def _named(entry: Entry | BadEntry) -> str | Bad:
    return str(entry) if isinstance(entry, Entry) else Bad(entry.message, entry.code)


def _quantity(text: str, units: Mapping[str, int], form: str) -> int | Bad:
    found = _QUANTITY.fullmatch(text)
    if found is None or found[2] not in units:
        return Bad(f"is not a quantity; write {form}, a whole number with its unit")
    return int(found[1]) * units[found[2]]


def _with_unit(value: int, units: Mapping[str, int]) -> str:
    for unit, factor in reversed(tuple(units.items())):
        if value % factor == 0 and value:
            return f"{value // factor}{unit}"
    return f"{value}{next(iter(units))}"


def _matching(pattern: re.Pattern[str], text: str, form: str) -> str | Bad:
    return text if pattern.fullmatch(text) else Bad(f"is not usable; write {form}")


def _range(text: str) -> str | Bad:
    if "/" not in text or "%" in text:
        return Bad("is not an address range; write it with its prefix length, such as 161.26.0.0/16")
    try:
        return str(ipaddress.ip_network(text))
    except ValueError:
        pass
    try:
        return Bad(f"has bits set behind its prefix length; write {ipaddress.ip_network(text, strict=False)}")
    except ValueError:
        return Bad("is not an address range; write one such as 161.26.0.0/16 or 2001:db8::/32")


def _variable(text: str) -> str | Bad:
    if _VARIABLE.fullmatch(text) is None:
        return Bad("is not a variable name; write letters, digits and '_', not beginning with a digit")
    upper = text.upper()
    if upper in PROXY_VARIABLES:
        return Bad("is a proxy variable, which ringfence sets itself; remove it")
    if upper in _STEERING_VARIABLES or upper.startswith(_STEERING_PREFIXES):
        return Bad("steers which code a program loads or where it looks; remove it and pass the value by another name")
    return text


def _image(text: str) -> str | Bad:
    if text == "host" or _IMAGE.fullmatch(text):
        return text
    return Bad("is not an image; write an OCI reference by digest (name@sha256:64 hex digits), or host")


def _path(text: str) -> str | Bad:
    parts = text.split("/")
    if parts[0] or any(part in ("", ".", "..") for part in parts[1:]) or not text.isprintable():
        return Bad("is not a plain absolute path; write it from / without '.', '..' or doubled slashes")
    return text


def _resolver(text: str) -> str | Bad:
    host, _, port_text = text.rpartition(":")
    port = parse_port(port_text)
    bracketed = host.startswith("[") and host.endswith("]")
    try:
        address = ipaddress.ip_address(host[1:-1] if bracketed else host)
    except ValueError:
        return Bad("is not a DNS server; write address:port or [address]:port, such as 192.0.2.53:53")
    if port is None or bracketed != (address.version == 6) or "%" in host:  # noqa: PLR2004 — IP version 6
        return Bad("is not a DNS server; write address:port or [address]:port, such as 192.0.2.53:53")
    return f"[{address}]:{port}" if bracketed else f"{address}:{port}"


def _regex(text: str) -> str | Bad:
    try:
        re.compile(text)
    except re.error as error:
        return Bad(f"is not a regular expression ({error}); correct it")
    return text


def _timestamp(text: str) -> int | Bad:
    found = _TIME.fullmatch(text)
    try:
        if found is not None:
            year, month, day, hour, minute, second = (int(part) for part in found.groups())
            return int(datetime(year, month, day, hour, minute, second, tzinfo=UTC).timestamp())
    except ValueError:
        pass
    return Bad('is not a time; write it in UTC, such as "2027-02-28T00:00:00Z"')


def _document(text: str) -> str | Bad:
    folder, slash, name = text.partition("/")
    if text == "platform" or (slash and folder in ("agents", "egress") and _NAME.fullmatch(name)):
        return text
    return Bad("is not a document that can be loosened; write platform, agents/NAME or egress/NAME")
