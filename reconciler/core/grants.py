"""Owns what a signed reason licenses: its grants, indexed by document and field; does not verify signatures."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from reconciler.core.load import Tree, split

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping


class Action(StrEnum):
    """What a grant lets happen to its field: an element joins, an element leaves, a value is reached."""

    ADD = "add"
    REMOVE = "remove"
    VALUE = "value"


@dataclass(frozen=True, slots=True, order=True)
class Approval:
    """One good signature: the principal, and the key's fingerprint (`SHA256:...`)."""

    signer: str
    key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """One grant of one admitted signed reason. `item` is canonical: an element, or a value as resolved trees hold it.

    Sizes are bytes, durations seconds, entries canonical text. `expires` is Unix seconds; None stands until revoked.
    """

    id: str
    document: str
    field: str
    action: Action
    item: Tree
    ticket: str
    approvals: tuple[Approval, ...]
    expires: float | None = None

    @property
    def signers(self) -> tuple[str, ...]:
        """The principals that signed, sorted and each once."""
        return tuple(sorted({approval.signer for approval in self.approvals}))

    def approved_by(self, wanted: int) -> bool:
        """Say whether `wanted` distinct people approved with distinct keys.

        One person with two keys counts once, and one key listed under two principals counts once.
        """
        if wanted <= 1:
            return len(self.approvals) >= wanted
        people: dict[str, set[str]] = {}
        for approval in self.approvals:
            people.setdefault(approval.signer, set()).add(approval.key)
        return _matching(people) >= wanted


def _matching(people: Mapping[str, set[str]]) -> int:
    """Count the largest set of people with a key each of their own (augmenting paths; a statement has few signers)."""
    holder: dict[str, str] = {}

    def place(person: str, tried: set[str]) -> bool:
        for key in sorted(people[person] - tried):
            tried.add(key)
            if key not in holder or place(holder[key], tried):
                holder[key] = person
                return True
        return False

    return sum(place(person, set()) for person in sorted(people))


@dataclass(frozen=True, slots=True)
class Licence:
    """The live grants at one field and below it, as a tree that is walked beside the document's own."""

    here: tuple[Grant, ...] = ()
    below: Mapping[str, Licence] = field(default_factory=dict)

    def at(self, token: str) -> Licence:
        """Give the grants at and below one child."""
        return self.below.get(token, NOTHING)

    def __bool__(self) -> bool:
        return bool(self.here or self.below)

    def __iter__(self) -> Iterator[Grant]:
        yield from self.here
        for child in self.below.values():
            yield from child


NOTHING = Licence()
"""No grants at all."""


def licences(grants: Iterable[Grant]) -> dict[str, Licence]:
    """Index grants by document, then by field."""
    by_document: dict[str, dict[str, list[Grant]]] = {}
    for grant in grants:
        by_document.setdefault(grant.document, {}).setdefault(grant.field, []).append(grant)
    return {document: _tree(found) for document, found in by_document.items()}


def _tree(found: Mapping[str, list[Grant]]) -> Licence:
    """Build the tree of one document's grants, of which `found` has those of each field."""
    here: tuple[Grant, ...] = ()
    deeper: dict[str, dict[str, list[Grant]]] = {}
    for field_, grants in found.items():
        if field_:
            # Pointers stay escaped but for the token that leaves them.
            token, slash, rest = field_[1:].partition("/")
            deeper.setdefault(split(f"/{token}")[0], {})[f"{slash}{rest}"] = grants
        else:
            here = tuple(grants)
    return Licence(here, {token: _tree(rest) for token, rest in deeper.items()})
