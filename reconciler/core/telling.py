"""Owns what one pass tells: what changed, what is held, which signed reasons something depends on; decides nothing."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from reconciler.core.findings import SCOPE, Change, Held, Ledger, Teller, place_of
from reconciler.core.units import TO_COME

if TYPE_CHECKING:
    from collections.abc import Iterable

    from reconciler.core.directions import Order, Path
    from reconciler.core.findings import Place
    from reconciler.core.grants import Licence
    from reconciler.core.load import Tree
    from reconciler.core.order import Difference, Walk


class Telling:
    """Collects the findings of one pass."""

    __slots__ = ("_changes", "_held", "_teller", "_walk", "used")

    def __init__(self, walk: Walk) -> None:
        self._walk = walk
        self._teller = Teller()
        self._held: Ledger[Held] = Ledger()
        self._changes: Ledger[Change] = Ledger()
        self.used: set[str] = set()
        """Ids of the signed reasons that something in force depends on."""

    def forget(self) -> None:
        """Drop what was worked out for one agent's own document: the next one has another."""
        self._teller.forget()

    def holds(self, held: Iterable[Held]) -> None:
        """Note what is held of the platform, of one agent or of the agents to come."""
        for one in held:
            self._held.add(one)

    def held(self) -> tuple[Held, ...]:
        """Give everything that is held, once for all whom it concerns."""
        return tuple(_for_all(one) for one in self._held.all())

    def changes(self) -> tuple[Change, ...]:
        """Give every change, once for all whom it concerns."""
        return self._changes.all()

    def tell(
        self,
        order: Order,
        licence: Licence,
        agent: str | None,
        *,
        before: Tree,
        in_force: Tree,
        wanted: Tree,
        new: bool = False,
    ) -> tuple[Held, ...]:
        """Note what changed (of what is `new` only what loosens: the rest changed nothing), and give what is held."""
        agents = () if agent is None else (agent,)
        held = []
        for one in self._walk.compare(order, in_force, wanted):
            steps = self._teller.steps(order, one, licence, agent)
            if not steps:
                continue
            place = place_of(one.path, agent)
            after, desired = _sides(place, one)
            held.append(
                Held(
                    document=place.document,
                    field=place.field,
                    before=after if place.of_scope else _value(before, one.path),
                    after=after,
                    wanted=desired,
                    agents=agents,
                    steps=steps,
                )
            )
        for one in self._walk.compare(order, before, in_force):
            steps = self._teller.steps(order, one, licence, agent)
            place = place_of(one.path, agent)
            if new and not steps and not place.of_scope:
                continue
            was, now = _sides(place, one)
            self._changes.add(
                Change(document=place.document, field=place.field, before=was, after=now, agents=agents, steps=steps)
            )
        return tuple(held)

    def reasons(self, order: Order, licence: Licence, agent: str | None, start: Tree, in_force: Tree) -> frozenset[str]:
        """Give the ids of the signed reasons without which less would be in force."""
        if not licence:
            return frozenset()
        found = frozenset(
            grant.id
            for one in self._walk.compare(order, start, in_force)
            for step in self._teller.steps(order, one, licence, agent)
            for grant in step.grants
        )
        self.used |= found
        return found

    def came_or_went(self, name: str, before: Tree, after: Tree) -> None:
        """Note that a whole agent came (None before) or went (None after)."""
        self._changes.add(Change(document=f"agents/{name}", field="", before=before, after=after, agents=(name,)))


def whole(name: str, wanted: Tree) -> Held:
    """Say that a whole agent is held."""
    return Held(document=f"agents/{name}", field="", before=None, after=None, wanted=wanted, agents=(name,), steps=())


def blocked(agent: str, path: Path) -> str:
    """Say which field of an agent has no value in force."""
    place = place_of(path, agent)
    return place.field if place.document == f"agents/{agent}" else f"{place.document}#{place.field}"


def _for_all(held: Held) -> Held:
    """Ask for one grant where a document stopped selecting the agents to come: it lifts it from the present ones too.

    They are all in the same case: a grant for `*` lifts a layer from whomever the document does not select.
    """
    if TO_COME not in held.agents:
        return held
    steps = tuple(step for step in held.steps if step.field == f"/{SCOPE}" and step.value == TO_COME)
    return dataclasses.replace(held, steps=steps) if steps else held


def _sides(place: Place, one: Difference) -> tuple[Tree, Tree]:
    """Give the two sides of a difference; of a layer that came or went, whether it applies."""
    return (one.before is not None, one.after is not None) if place.of_scope else (one.before, one.after)


def _value(tree: Tree, path: Path) -> Tree:
    for token in path:
        if not isinstance(tree, dict) or token not in tree:
            return None
        tree = tree[token]
    return tree
