"""Owns the order that a schema compiles to: for each field its rule, for each map its direction; compares nothing."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from reconciler.core.grants import Action, Grant
from reconciler.core.resolve import default
from reconciler.core.rules import Covered, Numbers, Ranked, Rule, Silent, Unordered, Words
from reconciler.core.sets import set_function

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from reconciler.core.load import Tree
    from reconciler.core.schema import Node, Schema

NEVER_APPROVED = 1_000_000
"""More approvals than there can be: what `x-approvals: never` costs."""

Path = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Leaf:
    """One field: its rule, what its weakening costs and why it is one, and its schema."""

    rule: Rule
    approvals: int
    why: str
    node: Node = field(repr=False)
    default: Tree = None


@dataclass(frozen=True, slots=True)
class Group:
    """An object with fixed fields."""

    fields: Mapping[str, Order]


@dataclass(frozen=True, slots=True)
class Keyed:
    """A map by name. It loosens when a key is added or, with `removing`, removed; values recurse.

    A value that is added starts at `floor`, the resolved empty value. With `shared` values are the same objects in many
    documents, and a walk compares each pair of them once.
    """

    value: Order
    floor: Tree
    removing: bool
    approvals: int
    why: str
    node: Node = field(repr=False)
    shared: bool = False


Order = Leaf | Group | Keyed


@functools.cache
def order_of(schema: Schema) -> Group:
    """Compile the order of a schema, once. ValueError or TypeError when its `x-loosens` mean nothing."""
    order = compile_order(schema.root)
    if not isinstance(order, Group):
        raise TypeError(f"schema {schema.kind} is not an object with fields")
    return order


def compile_order(node: Node) -> Order:
    """Compile the order of one node of a schema."""
    approvals = node.get("x-approvals", 1)
    cost = NEVER_APPROVED if approvals == "never" else int(approvals)
    why = node.get("x-why", "")
    if "properties" in node:
        return Group({name: compile_order(child) for name, child in node["properties"].items()})
    values = node.get("additionalProperties")
    loosens = node.get("x-loosens")
    if isinstance(values, dict) and loosens in ("adding-key", "removing-key"):
        return Keyed(compile_order(values), default(values), loosens == "removing-key", cost, why, node)
    return Leaf(_rule(node, loosens), cost, why, node, default(node))


def _rule(node: Node, loosens: Any) -> Rule:
    match loosens:
        case "up" | "down":
            return Ranked(Numbers(down=loosens == "down"))
        case {"flag": bool(loose)}:
            return Ranked(Words((not loose, loose)))
        case {"chain": list(line)}:
            return Ranked(Words(tuple(line)))
        case {"set": _, "by": ("adding" | "removing") as way}:
            function = set_function(loosens)
            if function is not None:
                return Covered(function, way == "removing")
        case "never" | "identity":
            return Silent(identity=loosens == "identity")
        case "any" | None:
            return Unordered(default(node))
        case _:
            pass
    raise ValueError(f"x-loosens means nothing: {loosens!r}")


def floor(order: Order) -> Tree:
    """Give the resolved empty document: each field's default, None where it has none."""
    match order:
        case Group(fields):
            return {name: floor(child) for name, child in fields.items()}
        case Keyed():
            return {}
        case Leaf():
            return order.default


def find(order: Order, path: Path) -> Leaf | Keyed | None:
    """Give what stands at a path; None when nothing with a rule does."""
    for token in path:
        match order:
            case Group(fields) if token in fields:
                order = fields[token]
            case Keyed():
                order = order.value
            case _:
                return None
    return None if isinstance(order, Group) else order


def cost(order: Leaf | Keyed, action: Action, item: Tree) -> int:
    """Say how many approvals letting `item` happen to a field costs."""
    if isinstance(order, Leaf) and isinstance(order.rule, Covered) and action is Action.ADD:
        return max(order.approvals, order.rule.function.elements.approvals(item))
    return order.approvals


def usable(order: Leaf | Keyed, grants: Iterable[Grant]) -> tuple[Grant, ...]:
    """Give the grants that say what such a field's grant says and carry the approvals that it costs."""
    wanted = action_of(order)
    return tuple(
        grant for grant in grants if grant.action is wanted and grant.approved_by(cost(order, grant.action, grant.item))
    )


def action_of(order: Leaf | Keyed) -> Action | None:
    """Say what a grant for such a field says; None when it needs no grant or none can help."""
    return order.rule.action if isinstance(order, Leaf) else key_action(order)


def key_action(order: Keyed) -> Action:
    """Say whether such a map loosens when a key is added or removed."""
    return Action.REMOVE if order.removing else Action.ADD
