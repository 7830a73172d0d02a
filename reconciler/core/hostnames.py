"""Owns what the public suffix list and IDNA say of an entry, on top of its syntax; does not know documents."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import idna
from publicsuffixlist import PublicSuffixList

from proxy import entry as syntax
from proxy.entry import BadEntry, Entry, EntryCode


def parse_entry(text: str) -> Entry | BadEntry:
    """Read one entry of an allow list; a wildcard on or above a public suffix is refused."""
    entry = _checked(text, syntax.parse(text))
    if isinstance(entry, Entry) and entry.wildcard and _suffixes().icann.holds(entry.host):
        return BadEntry(
            EntryCode.PUBLIC_SUFFIX,
            f"'*.{entry.host}' covers a whole public suffix;"
            f" write the domain that you mean, such as '*.example.{entry.host}'",
        )
    return entry


def parse_deny_entry(text: str) -> Entry | BadEntry:
    """Read one entry of a deny list; public suffixes are accepted, for they only tighten."""
    return _checked(text, syntax.parse_deny(text))


def unicode_form(text: str) -> str | None:
    """Give the Unicode form of an entry that holds A-labels, for people to read beside it; None when there is none."""
    if "xn--" not in text:
        return None
    host, colon, port = text.partition(":")
    try:
        labels = [idna.ulabel(label) if label.startswith("xn--") else label for label in host.split(".")]
    except (idna.IDNAError, UnicodeError):
        return None
    return f"{'.'.join(labels)}{colon}{port}"


def anybody_can_register_below(entry: Entry) -> bool:
    """Say whether this wildcard stands on or above a private suffix (`*.github.io`, `*.amazonaws.com`).

    Source: the private section of the public suffix list. Such an entry is accepted at the cost of two approvals.
    """
    return entry.wildcard and _suffixes().private.holds(entry.host)


@dataclass(frozen=True, slots=True)
class _Section:
    """One section of the list: names on or above a suffix, names whose every child is one, and what is no suffix."""

    names: frozenset[str]
    parents: frozenset[str]
    not_suffixes: frozenset[str]

    def holds(self, host: str) -> bool:
        if host in self.names:
            return True
        return host.partition(".")[2] in self.parents and host not in self.not_suffixes


@dataclass(frozen=True, slots=True)
class _Suffixes:
    icann: _Section
    private: _Section


@functools.cache
def _suffixes() -> _Suffixes:
    icann = _listed(only_icann=True)
    official = _section(icann)
    registrars = _section(_listed(only_icann=False) - icann)
    return _Suffixes(official, _Section(registrars.names - official.names, registrars.parents, registrars.not_suffixes))


def _listed(*, only_icann: bool) -> frozenset[str]:
    # The library answers for one name only; "above a suffix" needs the list itself, which it keeps in this attribute.
    return frozenset(PublicSuffixList(only_icann=only_icann)._publicsuffix)  # noqa: SLF001


def _section(suffixes: frozenset[str]) -> _Section:
    names: set[str] = set()
    for suffix in suffixes:
        if not suffix.startswith("!"):
            labels = suffix.removeprefix("*.").split(".")
            names.update(".".join(labels[start:]) for start in range(len(labels)))
    return _Section(
        names=frozenset(names),
        parents=frozenset(suffix[2:] for suffix in suffixes if suffix.startswith("*.")),
        not_suffixes=frozenset(suffix[1:] for suffix in suffixes if suffix.startswith("!")),
    )


def _checked(text: str, entry: Entry | BadEntry) -> Entry | BadEntry:
    if isinstance(entry, BadEntry):
        if entry.code is EntryCode.NOT_ASCII and (advice := _a_label(text)) is not None:
            return BadEntry(entry.code, f"{text!a} is not ASCII; write {advice!r}")
        return entry
    if "xn--" in entry.host and unicode_form(entry.host) is None:
        return BadEntry(EntryCode.BAD_A_LABEL, f"{str(entry)!r} holds an A-label that decodes to no name; correct it")
    return entry


def _a_label(text: str) -> str | None:
    host, colon, port = text.partition(":")
    star = "*." if host.startswith("*.") else ""
    try:
        name = idna.encode(host.removeprefix("*."), uts46=True).decode("ascii")
    except (idna.IDNAError, UnicodeError):
        return None
    advice = f"{star}{name}{colon}{port}"
    return advice if isinstance(syntax.parse(advice), Entry) else None
