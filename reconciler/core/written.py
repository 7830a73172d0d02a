"""Owns how values are told: as a document would write them, with units; compares nothing."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from reconciler.core import formats
from reconciler.core.directions import Group, Keyed, Leaf, order_of
from reconciler.core.load import split
from reconciler.core.schema import load_schema

if TYPE_CHECKING:
    from reconciler.core.directions import Order
    from reconciler.core.grants import Grant
    from reconciler.core.load import Tree


def written(document: str, field: str, value: Tree) -> Tree:
    """Give a value of a resolved tree (of `field`, or of the whole document) as a document writes it.

    Sizes and durations get their unit, in maps too; the rest is as it is.
    """
    return _written(_order(document, field), value)


def text(document: str, field: str, value: Tree) -> str:
    """Give the same for people, on one line."""
    told = written(document, field, value)
    return json.dumps(told) if isinstance(told, list | dict) else formats.render(None, told)


def grant_text(grant: Grant) -> str:
    """Tell one grant for people, with its value as documents write it."""
    return f"{grant.document} {grant.field} {grant.action}: {text(grant.document, grant.field, grant.item)}"


def shown(document: str, field: str, before: Tree, after: Tree) -> str:
    """Write two values of a field for people: what joined and left a list, else one value and the other."""
    if isinstance(before, list) and isinstance(after, list):
        gone = [f"-{one}" for one in before if one not in after]
        come = [f"+{one}" for one in after if one not in before]
        return " ".join([*gone, *come])
    return f"{text(document, field, before)} -> {text(document, field, after)}"


def _written(order: Order | None, value: Tree) -> Tree:
    match order:
        case Leaf(node=node):
            name = node.get("x-format")
            plain = name is None or isinstance(value, bool) or not isinstance(value, int)
            return value if plain else formats.render(name, value)
        case Group(fields) if isinstance(value, dict):
            return {name: _written(fields.get(name), child) for name, child in value.items()}
        case Keyed() if isinstance(value, dict):
            return {name: _written(order.value, child) for name, child in value.items()}
        case _:
            return value


def _order(document: str, field: str) -> Order | None:
    kind = {"agents": "agent", "egress": "egress"}.get(document.partition("/")[0], "platform")
    order: Order | None = order_of(load_schema(kind))
    for token in split(field):
        match order:
            case Group(fields):
                order = fields.get(token)
            case Keyed():
                order = order.value
            case _:
                return None
    return order
