"""One rule per field, none left out.

Owns the one walker over `x-loosens`: which of two resolved documents is looser, in which field, by which element.
There is no code for any field here. A field without `x-loosens` counts as `any`, and fails the build.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from reconciler.core.directions import Group, Keyed, Leaf, Order, Path, find, floor, key_action, order_of, usable
from reconciler.core.rules import Silent, Step, Unordered

if TYPE_CHECKING:
    from reconciler.core.grants import Grant, Licence
    from reconciler.core.load import Tree

__all__ = [
    "Difference",
    "Group",
    "Keyed",
    "Leaf",
    "Loosening",
    "Order",
    "Walk",
    "covering",
    "find",
    "floor",
    "order_of",
]


@dataclass(frozen=True, slots=True)
class Loosening:
    """One element by which a field became looser: the step, what it costs and why.

    `below` is the way from the difference's path to the field; with `of_key` the element is the last key of that path
    itself, and its rule is the map's.
    """

    step: Step
    approvals: int
    why: str
    below: Path = ()
    of_key: bool = False


@dataclass(frozen=True, slots=True)
class Difference:
    """One field that differs. It is a weakening iff `loosenings` is not empty; None is "not there"."""

    path: Path
    before: Tree
    after: Tree
    loosenings: tuple[Loosening, ...]

    def field(self, loosening: Loosening) -> Path:
        """Give the path of the field, or map, that a loosening is in."""
        return self.path[:-1] if loosening.of_key else self.path + loosening.below


class Walk:
    """The walker. One object serves one pass: it remembers what it found for values that many documents share."""

    __slots__ = ("_leaves", "_memo")

    def __init__(self) -> None:
        # By identity of the arguments, which the values keep alive, so that no identity is used twice.
        self._memo: dict[tuple[str, int, int, int, int], tuple[Any, tuple[Any, ...]]] = {}
        self._leaves: dict[tuple[int, object, object], tuple[Loosening, ...]] = {}

    def forget(self) -> None:
        """Drop what was found for one agent's own values: the next one has others."""
        self._leaves.clear()

    def le(self, order: Order, one: Tree, other: Tree) -> bool:
        """Say whether `one` is nowhere looser than `other`."""
        return not self.loosened(order, other, one)

    def loosened(self, order: Order, before: Tree, after: Tree) -> tuple[Loosening, ...]:
        """Give every element by which `after` is looser than `before`."""
        return tuple(found for change in self.compare(order, before, after) for found in change.loosenings)

    def meet(self, order: Order, wanted: Tree, limit: Tree) -> Tree:
        """Give the loosest tree that is nowhere looser than either; fields without direction are as wanted."""
        return self._combine(order, wanted, limit, "meet")

    def tighten(self, order: Order, baseline: Tree, wanted: Tree) -> Tree:
        """Give the next baseline: the meet, without a value in the fields that no baseline limits."""
        return self._combine(order, baseline, wanted, "tighten")

    def join(self, order: Order, one: Tree, other: Tree) -> Tree:
        """Give the tightest tree that is nowhere tighter than either."""
        return self._combine(order, one, other, "join")

    def limit(self, order: Order, baseline: Tree, licence: Licence, wanted: Tree) -> Tree:
        """Give baseline ⊔ grants, for the keys that `wanted` has: what the wanted tree may be at most.

        In a map that loosens by adding, a key may be there when the baseline has it or a grant names it or something
        below it. In one that loosens by removing, a key of the baseline may be missing when a grant names it.
        """
        if not licence:
            return baseline
        match order:
            case Leaf(rule):
                grants = usable(order, licence.here)
                return rule.lift(baseline, grants) if grants else baseline
            case Group(fields):
                limits = {name: _at(baseline, name, child) for name, child in fields.items()}
                for name, below in licence.below.items():
                    child = fields.get(name)
                    if child is not None:
                        limits[name] = self.limit(child, limits[name], below, _at(wanted, name, child))
                return _same(baseline, limits)
            case Keyed():
                return self._limit_keys(order, baseline, licence, wanted)

    def _limit_keys(self, order: Keyed, baseline: Tree, licence: Licence, wanted: Tree) -> Tree:
        named = {grant.item for grant in usable(order, licence.here)}
        limits: dict[str, Tree] = {}
        for key in sorted({*baseline, *wanted}):
            below = licence.at(key)
            if order.removing:
                may_stay_out = key in named and key not in wanted
                known = not may_stay_out
            else:
                known = key in baseline or key in named or _licensed(order.value, below, order.approvals)
            if known:
                start = baseline.get(key, order.floor)
                if order.shared:
                    limits[key] = self._shared("limit", order.value, start, below, wanted.get(key, start))
                else:
                    limits[key] = self.limit(order.value, start, below, wanted.get(key, start))
        return limits

    def _combine(self, order: Order, one: Tree, other: Tree, way: str) -> Tree:
        if one is other and way != "tighten":
            return one
        match order:
            case Leaf(rule):
                if way == "tighten" and not rule.remembered:
                    return None
                if one == other and type(one) is type(other):
                    return one
                found = rule.join(one, other) if way == "join" else rule.meet(one, other)
                return one if found == one and type(found) is type(one) else found
            case Group(fields):
                made = {}
                for name, child in fields.items():
                    mine = one[name] if name in one else floor(child)
                    theirs = other[name] if name in other else floor(child)
                    same = mine is theirs or (mine == theirs and type(mine) is type(theirs))
                    if same and way == "tighten":
                        same = isinstance(child, Leaf) and child.rule.remembered
                    made[name] = mine if same else self._combine(child, mine, theirs, way)
                return _same(one, made)
            case Keyed():
                # Where a missing key is the looser side, the meet has the keys of both; and the other way round.
                all_keys = (way != "join") == order.removing
                keys = {*one, *other} if all_keys else one.keys() & other.keys()
                return _same(one, {key: self._combine_key(order, one, other, key, way) for key in sorted(keys)})

    def _combine_key(self, order: Keyed, one: Tree, other: Tree, key: str, way: str) -> Tree:
        if key not in one or key not in other:
            return one[key] if key in one else other[key]
        if order.shared:
            return self._shared(way, order.value, one[key], other[key])
        return self._combine(order.value, one[key], other[key], way)

    def compare(self, order: Order, before: Tree, after: Tree) -> tuple[Difference, ...]:
        """Give every field that differs, with the elements by which `after` is looser there."""
        if before is after or (before == after and type(before) is type(after)):
            return ()
        match order:
            case Leaf(Silent(identity=True)):
                return ()
            case Leaf():
                return (Difference((), before, after, self._loosenings(order, before, after)),)
            case Group(fields):
                found = []
                for name, child in fields.items():
                    one = before[name] if name in before else floor(child)
                    other = after[name] if name in after else floor(child)
                    # What is the same is most, and asked for here it costs no call.
                    if one is not other and (one != other or type(one) is not type(other)):
                        found += [_below(name, difference) for difference in self.compare(child, one, other)]
                return tuple(found)
            case Keyed():
                return tuple(
                    found for key in sorted({*before, *after}) for found in self._compare_key(order, before, after, key)
                )

    def _loosenings(self, order: Leaf, before: Tree, after: Tree) -> tuple[Loosening, ...]:
        """Give the elements by which one field loosens; asked again with equal values it is the same object."""
        key = (id(order), _frozen(before), _frozen(after))
        found = self._leaves.get(key)
        if found is None:
            steps = order.rule.steps(before, after)
            found = tuple(Loosening(step, max(order.approvals, step.approvals), order.why) for step in steps)
            self._leaves[key] = found
        return found

    def _compare_key(self, order: Keyed, before: Tree, after: Tree, key: str) -> tuple[Difference, ...]:
        if key in before and key in after:
            if order.shared:
                found = self._shared("compare", order.value, before[key], after[key])
            else:
                found = self.compare(order.value, before[key], after[key])
            return tuple(_below(key, difference) for difference in found)
        itself: tuple[Loosening, ...] = ()
        if (key in before) == order.removing:
            itself = (Loosening(Step(key_action(order), key), order.approvals, order.why, of_key=True),)
        if key in before:
            return (Difference((key,), before[key], None, itself),)
        if order.removing:
            return (Difference((key,), None, after[key], ()),)
        # The values of a new key say more than the key: a grant for one of them licenses the key too.
        inside = tuple(
            Loosening(one.step, max(one.approvals, order.approvals), one.why, difference.field(one))
            for difference in self.compare(order.value, order.floor, after[key])
            for one in difference.loosenings
        )
        if not inside and self.blocked(order.value, after[key]):
            return (Difference((key,), None, after[key], ()),)  # a key without a value in force lets nothing happen
        return (Difference((key,), None, after[key], inside or itself),)

    def blocked(self, order: Order, tree: Tree) -> tuple[Path, ...]:
        """Give the fields without an order that have no value in force."""
        match order:
            case Leaf(Unordered()):
                return ((),) if tree is None else ()
            case Leaf():
                return ()
            case Group(fields):
                return tuple(
                    (name, *path)
                    for name, child in fields.items()
                    if not isinstance(child, Leaf) or isinstance(child.rule, Unordered)
                    for path in self.blocked(child, _at(tree, name, child))
                )
            case Keyed():
                return tuple((key, *path) for key in tree for path in self.blocked(order.value, tree[key]))

    def _shared(self, way: str, order: Order, one: Tree, other: Tree, third: Tree = None) -> Any:
        key = (way, id(order), id(one), id(other), id(third))
        found = self._memo.get(key)
        if found is None:
            match way:
                case "limit":
                    result: Any = self.limit(order, one, other, third)
                case "compare":
                    result = self.compare(order, one, other)
                case _:
                    result = self._combine(order, one, other, way)
            found = self._memo[key] = (result, (order, one, other, third))
        return found[0]


def _licensed(order: Order, licence: Licence, approvals: int) -> bool:
    """Say whether some usable grant names something inside a new key's value."""
    match order:
        case Leaf():
            return any(grant.approved_by(approvals) for grant in usable(order, licence.here))
        case Group(fields):
            return any(
                _licensed(fields[name], below, approvals) for name, below in licence.below.items() if name in fields
            )
        case Keyed():
            if any(grant.approved_by(approvals) for grant in usable(order, licence.here)):
                return True
            return any(_licensed(order.value, below, approvals) for below in licence.below.values())


def _at(tree: Tree, name: str, child: Order) -> Tree:
    """Give one field; what an older version of the schema did not have has its default."""
    return tree[name] if name in tree else floor(child)


def _same(known: Tree, made: dict[str, Tree]) -> Tree:
    """Give the tree that is known already where the one that was made is of the very same parts.

    Most trees of a pass are, and then they are held once, and compared by identity.
    """
    if len(known) == len(made) and all(key in known and known[key] is value for key, value in made.items()):
        return known
    return made


def _frozen(value: Tree) -> object:
    """Give a leaf's value as a key of a map; True and 1 are two."""
    return tuple(value) if isinstance(value, list) else (type(value), value)


def _below(token: str, found: Difference) -> Difference:
    return Difference((token, *found.path), found.before, found.after, found.loosenings)


def covering(order: Order, licence: Licence, path: Path, loosening: Loosening) -> tuple[Grant, ...]:
    """Give the grants that license one loosening of the field at `path`."""
    at = find(order, path)
    for token in path:
        licence = licence.at(token)
    return () if at is None else covering_at(at, licence, loosening)


def covering_at(order: Leaf | Keyed, licence: Licence, loosening: Loosening) -> tuple[Grant, ...]:
    """Give the grants, of those at one field, that license one loosening of it."""
    if not licence.here:
        return ()
    return tuple(
        grant
        for grant in licence.here
        if _covers(order, grant.item, loosening.step)
        and usable(order, (grant,))
        and grant.approved_by(loosening.approvals)
    )


def _covers(order: Leaf | Keyed, item: Tree, step: Step) -> bool:
    return order.rule.covers(item, step) if isinstance(order, Leaf) else bool(item == step.item)
