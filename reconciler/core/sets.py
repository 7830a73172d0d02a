"""Owns the set functions of `x-loosens`: which element of a list covers which; knows no document, field or direction.

A set stands for everything that its elements cover. Atoms are elements at their finest: one host pattern with one
port, one address block, one name. Canonical form is unique: no atom that another covers, in one order.
"""

from __future__ import annotations

import functools
import ipaddress
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from proxy.entry import WEB_PORTS, Entry, EntryIndex, ports
from reconciler.core.hostnames import anybody_can_register_below

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_REMEMBERED = 4096
"""Entries of which the parts are kept: one agent's are asked for many times in a row."""

Network = ipaddress.IPv4Network | ipaddress.IPv6Network
Atom = TypeVar("Atom")


class Elements(Protocol[Atom]):
    """The per-type code: everything that is particular to one kind of element."""

    def read(self, texts: Iterable[str]) -> frozenset[Atom]:
        """Take canonical elements apart into atoms."""

    def write(self, atoms: frozenset[Atom]) -> list[str]:
        """Write atoms, of which none covers another, as sorted canonical elements."""

    def covered(self, atoms: frozenset[Atom], by: frozenset[Atom]) -> frozenset[Atom]:
        """Give those of `atoms` that one atom of `by` covers whole."""

    def minimal(self, atoms: frozenset[Atom]) -> frozenset[Atom]:
        """Leave out each atom that another covers."""

    def common(self, one: Atom, other: Atom) -> Atom | None:
        """Give the atom that both cover where neither covers the other; None where atoms are nested or disjoint."""

    def may_cover(self, wide: str, narrow: str) -> bool:
        """Say quickly whether one element could cover another; True decides nothing."""

    def witness(self, text: str, outside: frozenset[Atom]) -> str:
        """Give one target or address that the element covers and `outside` does not; empty where there is none."""

    def approvals(self, text: str) -> int:
        """Say how many approvals letting this element in costs at least."""


class SetFunction(Generic[Atom]):
    """The algebra of covered sets over one kind of element. Sets come and go as canonical lists of text."""

    __slots__ = ("elements",)

    def __init__(self, elements: Elements[Atom]) -> None:
        self.elements = elements

    def canonical(self, texts: Sequence[str]) -> list[str]:
        """Give the one canonical form of a list of canonical elements."""
        if not texts:
            return []
        return self.elements.write(self.elements.minimal(self.elements.read(texts)))

    def within(self, inner: Sequence[str], outer: Sequence[str]) -> bool:
        """Say whether `outer` covers everything that `inner` covers."""
        if inner == outer or not inner:
            return True
        here, there = self.elements.read(inner), self.elements.read(outer)
        rest = here - there
        return not rest or len(self.elements.covered(rest, there)) == len(rest)

    def covers(self, wide: str, narrow: str) -> bool:
        """Say whether one element covers another."""
        return wide == narrow or (self.elements.may_cover(wide, narrow) and self.within([narrow], [wide]))

    def missing(self, wanted: Sequence[str], present: Sequence[str]) -> list[str]:
        """Give the elements of `wanted` that `present` does not cover, at their finest and then fused."""
        if not wanted or not present:
            return list(wanted)
        here, there = self.elements.read(wanted), self.elements.read(present)
        rest = here - there
        return self.elements.write(rest - self.elements.covered(rest, there)) if rest else []

    def union(self, one: Sequence[str], other: Sequence[str]) -> list[str]:
        """Give everything that either covers."""
        if one == other or not other:
            return list(one)
        if not one:
            return list(other)
        return self.elements.write(self.elements.minimal(self.elements.read(one) | self.elements.read(other)))

    def intersection(self, one: Sequence[str], other: Sequence[str]) -> list[str]:
        """Give everything that both cover."""
        if one == other or not one:
            return list(one)
        if not other:
            return []
        here, there = self.elements.read(one), self.elements.read(other)
        if here <= there:
            return list(one)
        left, right = self.elements.covered(here, there), self.elements.covered(there, here)
        between = {self.elements.common(mine, theirs) for mine in here - left for theirs in there - right}
        both = left | right | frozenset(atom for atom in between if atom is not None)
        return self.elements.write(self.elements.minimal(both))

    def without(self, texts: Sequence[str], gone: Sequence[str]) -> list[str]:
        """Leave out the atoms that `gone` covers whole."""
        here = self.elements.read(texts)
        return self.elements.write(here - self.elements.covered(here, self.elements.read(gone)))

    def witness(self, text: str, outside: Sequence[str]) -> str:
        """Give one target or address that the element covers and `outside` does not; empty where there is none."""
        return self.elements.witness(text, self.elements.read(outside))


class Entries:
    """Entries of an allow list (no port: 80 and 443) or, with `denying`, of a deny list (no port: every port).

    An atom is an entry with its port; None is every port, on a deny list only.
    """

    __slots__ = ("_denying",)

    def __init__(self, *, denying: bool) -> None:
        self._denying = denying

    def read(self, texts: Iterable[str]) -> frozenset[Entry]:
        """Take entries apart by port."""
        if self._denying:
            return frozenset(_entry(text) for text in texts)
        return frozenset(atom for text in texts for atom in _atoms(text))

    def write(self, atoms: frozenset[Entry]) -> list[str]:
        """Fuse what no port stands for, and sort."""
        if self._denying:
            return [str(entry) for entry in sorted(atoms)]
        found: set[Entry] = set()
        for atom in atoms:
            fused = atom.port in WEB_PORTS and all(Entry(atom.host, atom.wildcard, port) in atoms for port in WEB_PORTS)
            found.add(Entry(atom.host, atom.wildcard, None) if fused else atom)
        return [str(entry) for entry in sorted(found)]

    def covered(self, atoms: frozenset[Entry], by: frozenset[Entry]) -> frozenset[Entry]:
        """Ask the index that the proxy decides with."""
        if not any(atom.wildcard or atom.port is None for atom in by):
            return atoms & by  # a name with a port covers itself
        index = self._index(by)
        return frozenset(atom for atom in atoms if index.covers(atom, atom.port))

    def minimal(self, atoms: frozenset[Entry]) -> frozenset[Entry]:
        """Leave out what lies below another wildcard, and ports of what has every port."""
        if len(atoms) == 1:
            return atoms
        wider = self._index(frozenset(atom for atom in atoms if atom.wildcard))
        return frozenset(
            atom
            for atom in atoms
            # The bare name is covered by exactly those wildcards that cover the atom and are not it.
            if not wider.covers(Entry(atom.host, wildcard=False, port=atom.port), atom.port)
            and not (atom.port is not None and Entry(atom.host, atom.wildcard, None) in atoms)
        )

    def common(self, one: Entry, other: Entry) -> Entry | None:
        """Cross a name with every port and a wider name with one: only deny lists have such pairs."""
        if (one.port is None) == (other.port is None):
            return None
        every, single = (one, other) if one.port is None else (other, one)
        if EntryIndex(deny=[Entry(single.host, single.wildcard, None)]).covers(every, None):
            return Entry(every.host, every.wildcard, single.port)
        return None

    def may_cover(self, wide: str, narrow: str) -> bool:
        """Compare the names: an entry covers its own, or those below it."""
        one, other = _entry(wide), _entry(narrow)
        return one.host == other.host or (one.wildcard and other.host.endswith(f".{one.host}"))

    def witness(self, text: str, outside: frozenset[Entry]) -> str:
        """Name one host and port."""
        index = self._index(outside)
        for atom in sorted(self.read([text]), reverse=True):
            port = atom.port if atom.port is not None else 443
            if not outside:
                return f"{'x.' if atom.wildcard else ''}{atom.host}:{port}"
            if not atom.wildcard:
                if not index.covers(atom, atom.port):
                    return f"{atom.host}:{port}"
                continue
            labels = ("x", *(f"x{number}" for number in range(1, len(outside) + 2)))
            for label in labels:
                if not index.matches(f"{label}.{atom.host}", port):
                    return f"{label}.{atom.host}:{port}"
        return text

    def approvals(self, text: str) -> int:
        """Two where anybody can register a name below the wildcard."""
        return 2 if not self._denying and anybody_can_register_below(_entry(text)) else 1

    def _index(self, atoms: frozenset[Entry]) -> EntryIndex:
        return EntryIndex(deny=atoms) if self._denying else EntryIndex(allow=atoms)


class Ranges:
    """Address blocks. The canonical blocks of a set are its largest ones, so one of them covers what the set covers."""

    __slots__ = ()

    def read(self, texts: Iterable[str]) -> frozenset[Network]:
        """Read CIDR blocks."""
        return frozenset(ipaddress.ip_network(text) for text in texts)

    def write(self, atoms: frozenset[Network]) -> list[str]:
        """Sort by version and address."""
        return [str(block) for block in sorted(atoms, key=lambda block: (block.version, block))]

    def covered(self, atoms: frozenset[Network], by: frozenset[Network]) -> frozenset[Network]:
        """Look each block's enclosing blocks up."""
        wide = self.minimal(by)
        return frozenset(
            block
            for block in atoms
            if any(block.supernet(new_prefix=length) in wide for length in range(block.prefixlen + 1))
        )

    def minimal(self, atoms: frozenset[Network]) -> frozenset[Network]:
        """Collapse to the largest blocks."""
        old = [block for block in atoms if isinstance(block, ipaddress.IPv4Network)]
        new = [block for block in atoms if isinstance(block, ipaddress.IPv6Network)]
        return frozenset([*ipaddress.collapse_addresses(old), *ipaddress.collapse_addresses(new)])

    def common(self, one: Network, other: Network) -> None:  # noqa: ARG002 — blocks are nested or disjoint
        """Give nothing: blocks are nested or disjoint."""
        return

    def may_cover(self, wide: str, narrow: str) -> bool:  # noqa: ARG002 — blocks are cheap to compare
        """Leave it open."""
        return True

    def witness(self, text: str, outside: frozenset[Network]) -> str:
        """Name one address."""
        left: list[Network] = [ipaddress.ip_network(text)]
        for hole in outside:
            left = [piece for block in left for piece in _minus(block, hole)]
        return str(min(left, key=lambda block: block.network_address)[0]) if left else text

    def approvals(self, text: str) -> int:  # noqa: ARG002 — the same for each
        """One."""
        return 1


def _minus(block: Network, hole: Network) -> list[Network]:
    match block, hole:
        case (ipaddress.IPv4Network(), ipaddress.IPv4Network()) | (ipaddress.IPv6Network(), ipaddress.IPv6Network()):
            if block.subnet_of(hole):  # type: ignore[arg-type]  # the case above pairs the versions
                return []
            if hole.subnet_of(block):  # type: ignore[arg-type]  # likewise
                return list(block.address_exclude(hole))  # type: ignore[arg-type]  # likewise
            return [block]
        case _:
            return [block]


class Names:
    """Names that cover only themselves, and `*` that covers each."""

    __slots__ = ()

    def read(self, texts: Iterable[str]) -> frozenset[str]:
        """Read names."""
        return frozenset(texts)

    def write(self, atoms: frozenset[str]) -> list[str]:
        """Sort."""
        return sorted(atoms)

    def covered(self, atoms: frozenset[str], by: frozenset[str]) -> frozenset[str]:
        """Look names up; `*` covers all."""
        return atoms if "*" in by else atoms & by

    def minimal(self, atoms: frozenset[str]) -> frozenset[str]:
        """Leave only `*` where it is."""
        return frozenset({"*"}) if "*" in atoms else atoms

    def common(self, one: str, other: str) -> None:  # noqa: ARG002 — names are equal or disjoint
        """Give nothing: names are nested or disjoint."""
        return

    def may_cover(self, wide: str, narrow: str) -> bool:
        """A name covers itself, and `*` each."""
        return wide in ("*", narrow)

    def witness(self, text: str, outside: frozenset[str]) -> str:  # noqa: ARG002 — a name reaches nothing
        """Give nothing: a name is no target."""
        return ""

    def approvals(self, text: str) -> int:  # noqa: ARG002 — the same for each
        """One."""
        return 1


@functools.lru_cache(maxsize=_REMEMBERED)
def _entry(text: str) -> Entry:
    """Take a canonical entry apart. It was checked when its document was resolved; this runs for each comparison."""
    name, _, port = text.partition(":")
    return Entry(name.removeprefix("*."), name.startswith("*."), int(port) if port else None)


@functools.lru_cache(maxsize=_REMEMBERED)
def _atoms(text: str) -> tuple[Entry, ...]:
    """Take an entry of an allow list apart by port."""
    entry = _entry(text)
    return tuple(Entry(entry.host, entry.wildcard, port) for port in sorted(ports(entry)))


ALLOWED = SetFunction(Entries(denying=False))
DENIED = SetFunction(Entries(denying=True))
RANGES = SetFunction(Ranges())
NAMES = SetFunction(Names())


def set_function(loosens: object) -> SetFunction[Any] | None:
    """Give the set function that an `x-loosens` names; None when it names none. ValueError when there is none such.

    A list that loosens by removing denies: there an entry without a port means every port.
    """
    match loosens:
        case {"set": "entries", "by": "adding"}:
            return ALLOWED
        case {"set": "entries", "by": "removing"}:
            return DENIED
        case {"set": "ranges"}:
            return RANGES
        case {"set": "names"}:
            return NAMES
        case {"set": other}:
            raise ValueError(f"no such set function: {other}")
        case _:
            return None
