"""Owns what the formula is applied to: the platform, each agent with its layers, and the agents to come."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from reconciler.core.directions import Group, Keyed, Leaf, Order, floor, order_of
from reconciler.core.findings import PLATFORM, SCOPE
from reconciler.core.rules import Silent
from reconciler.core.schema import load_schema

TO_COME = "*"
"""Stands for every agent that no document names yet, as it does in the scope of an egress document."""


@dataclass(frozen=True, slots=True)
class Orders:
    """The orders of what is compared: the platform, one layer, one agent with its layers, and layers alone.

    The last is for agents to come: of them nothing is known but the egress documents that select every agent.
    """

    platform: Group
    own: Group
    layer: Group
    unit: Group
    to_come: Group


@functools.cache
def orders() -> Orders:
    """Compile them from the schemas, once. A layer is an egress document without its scope and its identity."""
    own, fields = order_of(load_schema("agent")), order_of(load_schema("egress")).fields
    layer = Group({name: order for name, order in fields.items() if name != SCOPE and not _silent(order)})
    scope = fields[SCOPE]
    approvals, why = (scope.approvals, scope.why) if isinstance(scope, Leaf) else (1, "")
    layers = Keyed(layer, floor(layer), removing=True, approvals=approvals, why=why, node={}, shared=True)
    unit, to_come = Group({"own": own, "layers": layers}), Group({"layers": layers})
    return Orders(order_of(load_schema(PLATFORM)), own, layer, unit, to_come)


def _silent(order: Order) -> bool:
    return isinstance(order, Leaf) and isinstance(order.rule, Silent)
