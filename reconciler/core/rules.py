"""Owns the kinds of `x-loosens` that one field can have: what is looser, what a grant lifts; knows no field by name.

A rule orders the values of one field. `None` is "no value in force", tighter than every value.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from reconciler.core.grants import Action, Grant

if TYPE_CHECKING:
    from collections.abc import Iterable

    from reconciler.core.load import Tree
    from reconciler.core.sets import SetFunction


@dataclass(frozen=True, slots=True)
class Step:
    """One way in which a value is looser than another: what a grant must name to license it.

    `witness` is one target or address that was out of reach before, or empty; `approvals` is what it costs at least.
    """

    action: Action
    item: Tree
    witness: str = ""
    approvals: int = 1


@dataclass(frozen=True, slots=True)
class OneOf:
    """The limit of a field without an order: the values that it may have. Never part of a document."""

    values: tuple[Tree, ...]


class Rule(Protocol):
    """What is known of the direction of one field."""

    @property
    def action(self) -> Action | None:
        """What a grant for such a field says; None when no grant can help."""

    @property
    def remembered(self) -> bool:
        """Whether a baseline limits such a field: it has a direction."""

    def meet(self, wanted: Tree, limit: Tree) -> Tree:
        """Give the loosest value that is no looser than either."""

    def join(self, one: Tree, other: Tree) -> Tree:
        """Give the tightest value that is no tighter than either."""

    def lift(self, limit: Tree, grants: Iterable[Grant]) -> Tree:
        """Give the limit together with what the grants license. Their approvals were counted before."""

    def steps(self, before: Tree, after: Tree) -> tuple[Step, ...]:
        """Say in what `after` is looser than `before`; empty when in nothing."""

    def covers(self, item: Tree, step: Step) -> bool:
        """Say whether a grant of `item` licenses the step."""


@dataclass(frozen=True, slots=True)
class Ranked:
    """A field whose values stand in one line: a number, a flag or a chain of words."""

    order: Numbers | Words
    action: Action = Action.VALUE
    remembered: bool = True

    def meet(self, wanted: Tree, limit: Tree) -> Tree:
        """Give the tighter one."""
        return self.order.known(wanted if self.order.rank(wanted) <= self.order.rank(limit) else limit)

    def join(self, one: Tree, other: Tree) -> Tree:
        """Give the looser one."""
        return one if self.order.rank(one) >= self.order.rank(other) else other

    def lift(self, limit: Tree, grants: Iterable[Grant]) -> Tree:
        """Give the loosest of the limit and what the grants name."""
        for grant in grants:
            limit = self.join(limit, grant.item)
        return limit

    def steps(self, before: Tree, after: Tree) -> tuple[Step, ...]:
        """One step, to the looser value."""
        return () if self.order.rank(after) <= self.order.rank(before) else (Step(Action.VALUE, after),)

    def covers(self, item: Tree, step: Step) -> bool:
        """A looser value licenses a tighter one."""
        return self.order.rank(step.item) <= self.order.rank(item)


@dataclass(frozen=True, slots=True)
class Numbers:
    """Numbers of which the larger are looser, or with `down` the smaller."""

    down: bool = False

    def rank(self, value: Tree) -> float:
        """Larger is looser; what is no number is tightest."""
        if not isinstance(value, int | float):
            return float("-inf")
        return -value if self.down else value

    def known(self, value: Tree) -> Tree:
        """Leave it: every number has a place."""
        return value


@dataclass(frozen=True, slots=True)
class Words:
    """Values in a line from tight to loose; one that is not among them ranks as tightest."""

    line: tuple[Tree, ...]

    def rank(self, value: Tree) -> float:
        """Place in the line; -1 for what has none."""
        return self.line.index(value) if value in self.line else -1

    def known(self, value: Tree) -> Tree:
        """Give the tightest value for one that an older version of the schema had."""
        return value if value in self.line else self.line[0]


@dataclass(frozen=True, slots=True)
class Covered:
    """A set of elements that cover one another. It loosens when elements are added or, with `removing`, removed."""

    function: SetFunction[Any] = field(repr=False)
    removing: bool
    remembered: bool = True

    @property
    def action(self) -> Action:
        """Elements join, or leave."""
        return Action.REMOVE if self.removing else Action.ADD

    def meet(self, wanted: Tree, limit: Tree) -> Tree:
        """Allow what both allow; deny what either denies."""
        if wanted is None or limit is None:
            return None
        return self.function.union(wanted, limit) if self.removing else self.function.intersection(wanted, limit)

    def join(self, one: Tree, other: Tree) -> Tree:
        """Allow what either allows; deny what both deny."""
        if one is None or other is None:
            return one if other is None else other
        return self.function.intersection(one, other) if self.removing else self.function.union(one, other)

    def lift(self, limit: Tree, grants: Iterable[Grant]) -> Tree:
        """Let elements join; let those leave that one grant covers whole."""
        items = [grant.item for grant in grants]
        if limit is None or not items:
            return limit
        return self.function.without(limit, items) if self.removing else self.function.union(limit, items)

    def steps(self, before: Tree, after: Tree) -> tuple[Step, ...]:
        """One step for each element that joins (or leaves) at its finest."""
        loose, tight = (before or [], after or []) if self.removing else (after or [], before or [])
        return tuple(
            Step(self.action, item, self.function.witness(item, tight), self.function.elements.approvals(item))
            for item in self.function.missing(loose, tight)
        )

    def covers(self, item: Tree, step: Step) -> bool:
        """A wider element licenses a narrower one."""
        return self.function.covers(item, step.item)


@dataclass(frozen=True, slots=True)
class Unordered:
    """A field without a direction: it has its default, or a value that a live grant names, or none at all."""

    default: Tree
    action: Action = Action.VALUE
    remembered: bool = False

    def meet(self, wanted: Tree, limit: Tree) -> Tree:
        """Give the wanted value where it is the default or the limit has it, else none."""
        allowed = limit.values if isinstance(limit, OneOf) else (self.default, limit)
        return wanted if wanted in allowed else None

    def join(self, one: Tree, other: Tree) -> Tree:
        """Give what both may be."""
        both = [
            *(one.values if isinstance(one, OneOf) else (one,)),
            *(other.values if isinstance(other, OneOf) else (other,)),
        ]
        values = tuple(dict.fromkeys(value for value in both if value is not None))
        return OneOf(values) if len(values) > 1 else (*values, None)[0]

    def lift(self, limit: Tree, grants: Iterable[Grant]) -> Tree:  # noqa: ARG002 — no memory limits such a field
        """Give the default and the values that the grants name, whatever was before."""
        return OneOf((self.default, *(grant.item for grant in grants)))

    def steps(self, before: Tree, after: Tree) -> tuple[Step, ...]:
        """One step to each new value but the default."""
        known = before.values if isinstance(before, OneOf) else (before,)
        return () if after is None or after == self.default or after in known else (Step(Action.VALUE, after),)

    def covers(self, item: Tree, step: Step) -> bool:
        """Only the very value."""
        return bool(item == step.item) and isinstance(item, bool) == isinstance(step.item, bool)


@dataclass(frozen=True, slots=True)
class Silent:
    """A field that says nothing about reach: what is wanted is in force.

    With `identity` it is what the document is: its file settles it, so it never changes in place and is not told.
    """

    identity: bool = False

    action: None = None
    remembered: bool = False

    def meet(self, wanted: Tree, limit: Tree) -> Tree:  # noqa: ARG002 — nothing limits it
        """Give what is wanted."""
        return wanted

    def join(self, one: Tree, other: Tree) -> Tree:  # noqa: ARG002 — likewise
        """Give the first."""
        return one

    def lift(self, limit: Tree, grants: Iterable[Grant]) -> Tree:  # noqa: ARG002 — likewise
        """Leave it."""
        return limit

    def steps(self, before: Tree, after: Tree) -> tuple[Step, ...]:  # noqa: ARG002 — it loosens nothing
        """No steps."""
        return ()

    def covers(self, item: Tree, step: Step) -> bool:  # noqa: ARG002 — there is no step
        """Nothing to cover."""
        return False
