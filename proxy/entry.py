"""Owns one allow-list entry: syntax, canonical form, what it matches and what it covers.

Does not know the public suffix list, IDNA, documents or decisions.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from functools import total_ordering
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

WEB_PORTS = frozenset({80, 443})
"""What an allow-list entry without a port means."""

SPECIAL_NAMES = frozenset(
    {
        "alt",
        "arpa",
        "cluster.local",
        "corp",
        "home",
        "home.arpa",
        "internal",
        "intranet",
        "invalid",
        "lan",
        "local",
        "localdomain",
        "localhost",
        "onion",
        "svc",
        "test",
    }
)
"""Names that never lead to a public host, nor does anything below them (RFC 6761, RFC 9476, ICANN's `internal`)."""

MAX_NAME = 253
_LABEL = re.compile(r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?")
_PORT = re.compile(r"[1-9][0-9]{0,4}")
_NUMERIC_LABEL = re.compile(r"[0-9]+|0x.*", re.DOTALL)
_IPV6_LIKE = re.compile(r"[0-9A-Fa-f:.]*(?:%[^\]]*)?")


class EntryCode(StrEnum):
    """Why a text is not an entry. The policy side's validator finds `bad_a_label` and most of `public_suffix`."""

    BARE_WILDCARD = "bare_wildcard"
    SYNTAX = "syntax"
    NOT_ASCII = "not_ascii"
    BAD_A_LABEL = "bad_a_label"
    IP_ADDRESS = "ip_address"
    SPECIAL_NAME = "special_name"
    SINGLE_LABEL = "single_label"
    PUBLIC_SUFFIX = "public_suffix"
    PORT = "port"


@dataclass(frozen=True, slots=True)
class BadEntry:
    """A text that is not an entry; `message` names the form to write and is printable ASCII."""

    code: EntryCode
    message: str


@total_ordering
@dataclass(frozen=True, slots=True)
class Entry:
    """One canonical entry, made by `parse` and `parse_deny`.

    `host` is lower-case ASCII without a trailing dot; with `wildcard` it is the suffix of `*.suffix`.
    `port` None means {80, 443} on an allow list and every port on a deny list.
    """

    host: str
    wildcard: bool
    port: int | None

    def __str__(self) -> str:
        name = f"*.{self.host}" if self.wildcard else self.host
        return name if self.port is None else f"{name}:{self.port}"

    def __lt__(self, other: object) -> bool:
        return _sort_key(self) < _sort_key(other) if isinstance(other, Entry) else NotImplemented


def _sort_key(entry: Entry) -> tuple[list[str], bool, int]:
    return entry.host.split(".")[::-1], entry.wildcard, entry.port or 0


def parse(text: str) -> Entry | BadEntry:
    """Read one entry of an allow list: `host` or `*.suffix`, each with an optional `:port`.

    A wildcard on a single label is `public_suffix` without asking any list: each top-level name is one
    (the default `*` of the public suffix algorithm).
    """
    entry = parse_deny(text)
    if isinstance(entry, Entry) and entry.wildcard and "." not in entry.host:
        return BadEntry(
            EntryCode.PUBLIC_SUFFIX,
            f"{_quoted(text)} covers a whole top-level domain; write the domain that is meant,"
            f" such as '*.example.{entry.host}'",
        )
    return entry


def parse_deny(text: str) -> Entry | BadEntry:
    """Read one entry of a deny list: the same grammar, but a wildcard may stand on a top-level name (it tightens)."""
    if found := _not_a_name(text):
        return found
    name, colon, port_text = text.partition(":")
    host = _host(text, name)
    if isinstance(host, BadEntry):
        return host
    port = None
    if colon:
        port = parse_port(port_text)
        if port is None:
            return BadEntry(
                EntryCode.PORT,
                f"{_quoted(text)} has no usable port; write one decimal number from 1 to 65535 without a sign or"
                " leading zeros, one entry for each port",
            )
    return Entry(host.removeprefix("*."), host.startswith("*."), port)


def parse_port(text: str) -> int | None:
    """Read a port as exactly `[1-9][0-9]{0,4}` up to 65535, else None (`int` alone takes signs, `_`, other digits)."""
    if _PORT.fullmatch(text) is None:
        return None
    port = int(text)
    return port if port <= 65535 else None  # noqa: PLR2004 — the largest port


def is_address_like(host: str) -> bool:
    """Say whether some resolver would take this name for an IPv4 address: the last label is numeric or begins `0x`.

    `host` is lower-case and without a trailing dot (WHATWG URL, "ends in a number").
    """
    return _NUMERIC_LABEL.fullmatch(host.rpartition(".")[2]) is not None


def _not_a_name(text: str) -> BadEntry | None:
    """Find what is recognisably something else than an entry, and say what to write instead."""
    if text == "*" or text.startswith("*:"):
        return BadEntry(
            EntryCode.BARE_WILDCARD,
            f"{_quoted(text)} would allow every host; list the hosts, or a suffix such as '*.example.com'",
        )
    if any(character <= " " or character == "\x7f" for character in text):
        return BadEntry(EntryCode.SYNTAX, f"{_quoted(text)} holds a space or a control character; remove it")
    bare = text.partition("/")[0].removeprefix("[").partition("]")[0]
    if bare.count(":") > 1 and _IPV6_LIKE.fullmatch(bare):
        return _address(text)
    if "://" in text or "/" in text or "@" in text:
        candidate = text.rpartition("://")[2].partition("/")[0].rpartition("@")[2].partition("?")[0]
        if "://" not in text and is_address_like(candidate.partition(":")[0]):
            return _address(text)
        advice = f"write '{candidate}'" if isinstance(_plain(candidate), Entry) else "write only the host name"
        return BadEntry(EntryCode.SYNTAX, f"{_quoted(text)} is a URL, not a host; {advice}")
    return None


def _plain(text: str) -> Entry | BadEntry:
    if not text or "/" in text or "@" in text:
        return BadEntry(EntryCode.SYNTAX, "")
    return parse(text)


def _host(text: str, name: str) -> str | BadEntry:
    """Check and canonicalise the host part, `*.` included."""
    if not name.isascii():
        return BadEntry(EntryCode.NOT_ASCII, f"{_quoted(text)} is not ASCII; write the name's A-label form (xn--...)")
    wildcard = name.startswith("*.")
    host = name.lower().removeprefix("*.").removesuffix(".")
    labels = host.split(".")
    if "*" in host or (not wildcard and name.startswith("*")):
        return BadEntry(
            EntryCode.SYNTAX,
            f"{_quoted(text)} has a wildcard where none can be; write it once, as the whole first label:"
            " '*.example.com'",
        )
    if is_address_like(host):
        return _address(text)
    if len(host) + 2 * wildcard > MAX_NAME or any(_LABEL.fullmatch(label) is None for label in labels):
        return BadEntry(
            EntryCode.SYNTAX,
            f"{_quoted(text)} is not a host name; write labels of letters, digits, '-' and '_' joined by single dots,"
            " such as 'api.example.com', at most 63 characters a label and 253 in all",
        )
    for start in range(len(labels)):
        special = ".".join(labels[start:])
        if special in SPECIAL_NAMES:
            return BadEntry(
                EntryCode.SPECIAL_NAME,
                f"{_quoted(text)} is under the special-use name '{special}', which is never public; remove it",
            )
    if len(labels) == 1 and not wildcard:
        return BadEntry(
            EntryCode.SINGLE_LABEL,
            f"{_quoted(text)} has one label only; write the full name, such as '{host}.example.com'",
        )
    return f"*.{host}" if wildcard else host


def _address(text: str) -> BadEntry:
    return BadEntry(
        EntryCode.IP_ADDRESS,
        f"{_quoted(text)} is an IP address; write the host name that is meant, such as 'api.example.com'",
    )


def _quoted(text: str) -> str:
    shown = text if len(text) <= MAX_NAME else text[:MAX_NAME] + "..."
    return ascii(shown)


def ports(entry: Entry) -> frozenset[int]:
    """Say which ports an allow-list entry covers: its own, or 80 and 443."""
    return WEB_PORTS if entry.port is None else frozenset({entry.port})


def matches_host(entry: Entry, host: str) -> bool:
    """Say whether `host` (canonical) is the entry's name or, with a wildcard, at least one label below it."""
    return host.endswith("." + entry.host) if entry.wildcard else host == entry.host


def matches(entry: Entry, host: str, port: int) -> bool:
    """Say whether this allow-list entry covers the target."""
    return port in ports(entry) and matches_host(entry, host)


def denies(entry: Entry, host: str, port: int) -> bool:
    """Say whether this deny-list entry covers the target; without a port it denies every port."""
    return entry.port in (None, port) and matches_host(entry, host)


def covers(entries: Iterable[Entry], entry: Entry) -> bool:
    """Say whether everything that the allow-list entry allows is allowed by `entries`.

    Entries are nested or disjoint, so each port of `entry` is covered iff one of `entries` covers it whole.
    """
    index = EntryIndex(allow=entries)
    return all(index.covers(entry, port) for port in ports(entry))


def covers_deny(entries: Iterable[Entry], entry: Entry) -> bool:
    """Say whether everything that the deny-list entry denies is denied by `entries`. No port is every port."""
    return EntryIndex(deny=entries).covers(entry, entry.port)


class EntryIndex:
    """Many entries of one list, looked up in time that depends on the name's labels and not on the list's length.

    Give exactly one of `allow` and `deny`: it settles what an entry without a port means. Port None is "every port".
    """

    __slots__ = ("_exact", "_suffix")

    def __init__(self, *, allow: Iterable[Entry] = (), deny: Iterable[Entry] = ()) -> None:
        exact: dict[str, set[int | None]] = {}
        suffix: dict[str, set[int | None]] = {}
        for entry in allow:
            (suffix if entry.wildcard else exact).setdefault(entry.host, set()).update(ports(entry))
        for entry in deny:
            (suffix if entry.wildcard else exact).setdefault(entry.host, set()).add(entry.port)
        self._exact = exact
        self._suffix = suffix

    def matches(self, host: str, port: int) -> bool:
        """Say whether some entry covers the target; `host` is canonical."""
        return _any_port(self._exact.get(host), port) or any(_any_port(found, port) for found in self._above(host))

    def matches_host(self, host: str) -> bool:
        """Say whether some entry covers the host at any port."""
        return host in self._exact or any(True for _ in self._above(host))

    def covers(self, entry: Entry, port: int | None) -> bool:
        """Say whether one entry covers the whole atom (`entry`'s name, `port`); port None asks for every port."""
        same = self._suffix if entry.wildcard else self._exact
        return _any_port(same.get(entry.host), port) or any(_any_port(found, port) for found in self._above(entry.host))

    def _above(self, host: str) -> Iterator[set[int | None]]:
        suffix = self._suffix
        if not suffix:
            return
        at = host.find(".")
        while at != -1:
            found = suffix.get(host[at + 1 :])
            if found is not None:
                yield found
            at = host.find(".", at + 1)


def _any_port(found: set[int | None] | None, port: int | None) -> bool:
    return found is not None and (port in found or None in found)
