"""Owns how differences are told: by document and field, for all the agents that they concern; does not find them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from reconciler.core import formats
from reconciler.core.load import join
from reconciler.core.memory import canonical_json
from reconciler.core.order import Difference, Leaf, Loosening, Order, covering, find

if TYPE_CHECKING:
    from collections.abc import Iterable

    from reconciler.core.grants import Action, Grant, Licence
    from reconciler.core.load import Tree
    from reconciler.core.order import Path

PLATFORM = "platform"
SCOPE = "agents"
"""The field of an egress document that selects agents. It is compared per agent, after selecting."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One element of a weakening, and the grant that licenses it at the least.

    `value` is as a statement writes it, `witness` one target or address that comes into reach (or empty),
    `approvals` how many distinct signers it costs, `grants` the live grants that license it.
    """

    document: str
    field: str
    action: Action
    value: Tree
    witness: str = ""
    approvals: int = 1
    why: str = ""
    grants: tuple[Grant, ...] = ()

    @property
    def key(self) -> tuple[str, str, str, str]:
        """What makes it one grant and not another; sorts."""
        return self.document, self.field, str(self.action), canonical_json(self.value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """One change that waits: `before` was in force, `after` is now, `wanted` is desired.

    `document` is such as `agents/helper`, `field` a JSON pointer in it (empty: the whole document), `agents` those whom
    it concerns (none for the platform). A step that has grants is licensed and held only by the pass's alarm.
    """

    document: str
    field: str
    before: Tree
    after: Tree
    wanted: Tree
    agents: tuple[str, ...]
    steps: tuple[Step, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One change of what is in force. `grants` (ids) and `signers` are of the signed reasons that cover a weakening.

    With an empty `field` the whole document came (`before` None) or went (`after` None).
    """

    document: str
    field: str
    before: Tree
    after: Tree
    agents: tuple[str, ...]
    steps: tuple[Step, ...] = ()
    grants: tuple[str, ...] = ()
    signers: tuple[str, ...] = ()
    tickets: tuple[str, ...] = ()

    @property
    def weakening(self) -> bool:
        """Whether something is allowed that was not."""
        return bool(self.steps)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a difference is, in the words of documents. `agent` is None for the platform."""

    document: str
    field: str
    agent: str | None


def place_of(path: Path, agent: str | None) -> Place:
    """Say which document and field a path means: of the platform, or of one agent's own document and its layers."""
    if agent is None:
        return Place(PLATFORM, _pointer(path), agent)
    match path:
        case ("layers", layer):
            return Place(f"egress/{layer}", f"/{SCOPE}", agent)
        case ("layers", layer, *rest):
            return Place(f"egress/{layer}", _pointer(rest), agent)
        case _:
            return Place(f"agents/{agent}", _pointer(path[1:]), agent)


def _pointer(path: Iterable[str]) -> str:
    pointer = ""
    for token in path:
        pointer = join(pointer, token)
    return pointer


class Teller:
    """Tells the steps of differences. Layers are shared by many agents, and so is what is told of them."""

    __slots__ = ("_told",)

    def __init__(self) -> None:
        # By identity of what was compared, which the values keep alive.
        self._told: dict[tuple[int, int, str], tuple[tuple[Step, ...], object, object]] = {}

    def steps(self, order: Order, difference: Difference, licence: Licence, agent: str | None) -> tuple[Step, ...]:
        """Say each element by which a difference loosens, and the live grants that license it."""
        if not difference.loosenings:
            return ()
        at = licence
        for token in difference.path:
            at = at.at(token)
        place = place_of(difference.path, agent)
        if place.field == f"/{SCOPE}":
            return self._tell(order, difference, licence, agent)
        key = (id(difference.loosenings), id(at), place.document)
        found = self._told.get(key)
        if found is None:
            found = self._told[key] = (self._tell(order, difference, licence, agent), difference.loosenings, at)
        return found[0]

    def _tell(self, order: Order, difference: Difference, licence: Licence, agent: str | None) -> tuple[Step, ...]:
        return tuple(_step(order, difference, one, licence, agent) for one in difference.loosenings)


def _step(order: Order, difference: Difference, one: Loosening, licence: Licence, agent: str | None) -> Step:
    path = difference.field(one)
    grants = covering(order, licence, path, one)
    if path == ("layers",):
        place, value = place_of(difference.path, agent), agent
    else:
        place, value = place_of(path, agent), _written(find(order, path), one.step.item)
    return Step(
        document=place.document,
        field=place.field,
        action=one.step.action,
        value=value,
        witness=one.step.witness,
        approvals=one.approvals,
        why=one.why,
        grants=grants,
    )


def _written(order: object, item: Tree) -> Tree:
    """Give a value as a statement writes it: sizes and durations with their unit, the rest as it is."""
    name = order.node.get("x-format") if isinstance(order, Leaf) else None
    return item if name is None else formats.render(name, item)


@dataclass(slots=True)
class _Entry:
    value: Held | Change
    agents: list[str]


@dataclass(slots=True)
class Ledger:
    """Collects what is held and what changed, and gives each finding once with all agents that it concerns."""

    _entries: dict[tuple[object, ...], _Entry] = field(default_factory=dict)

    def add(self, value: Held | Change) -> None:
        """Add a finding of one agent (or of the platform)."""
        seen = (value.before, value.after, value.wanted if isinstance(value, Held) else None)
        # Equal findings of shared layers are mostly the same objects; those that are only equal are merged at the end.
        key = (value.document, value.field, *(id(one) for one in seen))
        entry = self._entries.setdefault(key, _Entry(value, []))
        entry.agents.extend(value.agents)

    def held(self) -> tuple[Held, ...]:
        """Give what is held, sorted."""
        return tuple(
            dataclasses.replace(value, agents=agents) for value, agents in self._merged() if isinstance(value, Held)
        )

    def changes(self) -> tuple[Change, ...]:
        """Give the changes, sorted."""
        return tuple(
            dataclasses.replace(value, agents=agents) for value, agents in self._merged() if isinstance(value, Change)
        )

    def _merged(self) -> list[tuple[Held | Change, tuple[str, ...]]]:
        merged: dict[tuple[str, str, str], tuple[Held | Change, list[str]]] = {}
        for entry in self._entries.values():
            value = entry.value
            seen = [value.before, value.after, value.wanted if isinstance(value, Held) else None]
            key = (value.document, value.field, canonical_json(seen))
            merged.setdefault(key, (value, []))[1].extend(entry.agents)
        return [(value, tuple(sorted(agents))) for _, (value, agents) in sorted(merged.items(), key=lambda one: one[0])]
