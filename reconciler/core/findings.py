"""Owns how differences are told: by document and field, for all the agents that they concern; does not find them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeAlias, TypeVar

from reconciler.core import formats
from reconciler.core.load import join
from reconciler.core.memory import canonical_json
from reconciler.core.order import Leaf, covering_at, find

if TYPE_CHECKING:
    from collections.abc import Iterable

    from reconciler.core.directions import Path
    from reconciler.core.grants import Action, Grant, Licence
    from reconciler.core.load import Tree
    from reconciler.core.order import Difference, Keyed, Order

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
    it concerns (none for the platform; `*` are those to come). A step that has grants is licensed and held only by the
    pass's alarm.
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

    @property
    def of_scope(self) -> bool:
        """Whether it is the scope of an egress document."""
        return self.agent is not None and self.document.startswith("egress/") and self.field == f"/{SCOPE}"


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

    __slots__ = ("_of_layers", "_of_one")

    def __init__(self) -> None:
        # By identity of what was compared, which the values keep alive, and by path.
        self._of_layers: dict[_Asked, _Told] = {}
        self._of_one: dict[_Asked, _Told] = {}

    def forget(self) -> None:
        """Drop what was told of one agent's own document: the next one has another."""
        self._of_one.clear()

    def steps(self, order: Order, difference: Difference, licence: Licence, agent: str | None) -> tuple[Step, ...]:
        """Say each element by which a difference loosens, and the live grants that license it."""
        if not difference.loosenings:
            return ()
        at = licence
        for token in difference.path:
            at = at.at(token)
        path = difference.path
        of_layer = len(path) > len(("layers", "NAME")) and path[0] == "layers"
        told = self._of_layers if of_layer else self._of_one
        key = (id(difference.loosenings), id(at), path)
        found = told.get(key)
        if found is None:
            found = told[key] = (_tell(order, difference, licence, agent), difference.loosenings, at)
        return found[0]


_Asked: TypeAlias = tuple[int, int, "Path"]
_Told: TypeAlias = tuple[tuple["Step", ...], object, object]


def _tell(order: Order, difference: Difference, licence: Licence, agent: str | None) -> tuple[Step, ...]:
    """Tell one difference, field by field: most are one field's, and some a whole map's."""
    fields: dict[Path, tuple[Place, Leaf | Keyed | None, Licence]] = {}
    steps = []
    for one in difference.loosenings:
        path = difference.field(one)
        if path not in fields:
            at = licence
            for token in path:
                at = at.at(token)
            place = place_of(difference.path if path == ("layers",) else path, agent)
            fields[path] = (place, find(order, path), at)
        place, field, at = fields[path]
        steps.append(
            Step(
                document=place.document,
                field=place.field,
                action=one.step.action,
                value=agent if path == ("layers",) else _written(field, one.step.item),
                witness=one.step.witness,
                approvals=one.approvals,
                why=one.why,
                grants=() if field is None else covering_at(field, at, one),
            )
        )
    return tuple(steps)


def _written(order: object, item: Tree) -> Tree:
    """Give a value as a statement writes it: sizes and durations with their unit, the rest as it is."""
    name = order.node.get("x-format") if isinstance(order, Leaf) else None
    return item if name is None else formats.render(name, item)


Finding = TypeVar("Finding", Held, Change)


class Ledger(Generic[Finding]):
    """Collects findings of single agents (or of the platform), and gives each once with all agents that it concerns."""

    __slots__ = ("_same",)

    def __init__(self) -> None:
        self._same: dict[tuple[object, ...], list[Finding]] = {}

    def add(self, finding: Finding) -> None:
        """Add a finding; of a layer that came or went, its sides say whether it applies: True or False."""
        # Findings of a shared layer are mostly about the same objects; those that are only equal are merged at the end.
        key = (finding.document, finding.field, *(id(side) for side in _sides(finding)))
        self._same.setdefault(key, []).append(finding)

    def all(self) -> tuple[Finding, ...]:
        """Give the findings, sorted by document and field."""
        equal: dict[tuple[str, str, str], list[Finding]] = {}
        for same in self._same.values():
            first = same[0]
            # The last two: of what is held, what was in force before may differ from agent to agent. Only a layer's
            # field is compared more than once.
            sides = canonical_json(_sides(first)[-2:]) if first.document.startswith("egress/") else ""
            equal.setdefault((first.document, first.field, sides), []).extend(same)
        return tuple(_merged(equal[key]) for key in sorted(equal))


def _sides(finding: Held | Change) -> list[Tree]:
    return [finding.before, finding.after, *([finding.wanted] if isinstance(finding, Held) else [])]


def _merged(findings: list[Finding]) -> Finding:
    first = findings[0]
    if len(findings) == 1 and not first.steps and not first.document.startswith("egress/"):
        return first
    agents = tuple(sorted(agent for finding in findings for agent in finding.agents))
    of_scope = first.document.startswith("egress/") and first.field == f"/{SCOPE}"
    steps = first.steps
    if of_scope:
        # Each agent's part of the scope is a step of its own, and may be licensed by another statement.
        each = {step.key: step for finding in findings for step in finding.steps}
        steps = tuple(each[key] for key in sorted(each))

    def side(applies: Tree) -> Tree:
        return (list(agents) if applies else []) if of_scope else applies

    if isinstance(first, Held):
        before, after, wanted = side(first.before), side(first.after), side(first.wanted)
        return dataclasses.replace(first, agents=agents, steps=steps, before=before, after=after, wanted=wanted)
    grants = [grant for step in steps for grant in step.grants]
    return dataclasses.replace(
        first,
        agents=agents,
        steps=steps,
        before=side(first.before),
        after=side(first.after),
        grants=tuple(sorted({grant.id for grant in grants})),
        signers=tuple(sorted({signer for grant in grants for signer in grant.signers})),
        tickets=tuple(sorted({grant.ticket for grant in grants})),
    )
