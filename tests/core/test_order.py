"""The walker over `x-loosens`: the laws of a lattice over whole documents, and each field's neighbours."""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from reconciler.core.directions import (
    NEVER_APPROVED,
    Group,
    Keyed,
    Leaf,
    Order,
    compile_order,
    cost,
    find,
    floor,
    order_of,
    usable,
)
from reconciler.core.grants import NOTHING, Action, Approval, Grant, licences
from reconciler.core.order import Walk, covering
from reconciler.core.rules import Covered, Numbers, OneOf, Ranked, Silent, Unordered, Words
from reconciler.core.schema import load_schema
from reconciler.core.units import orders
from tests.strategies import agents, egresses, platforms, resolved

KINDS: dict[str, st.SearchStrategy[dict[str, Any]]] = {
    "platform": platforms(),
    "agent": agents("one"),
    "egress": egresses("org"),
}
each_kind = pytest.mark.parametrize("kind", KINDS)


def directed(order: Order, tree: Any) -> Any:
    """Leave only fields that have a direction: the others are in no lattice."""
    match order:
        case Group(fields):
            kept = {name: directed(child, tree[name]) for name, child in fields.items()}
            return {name: value for name, value in kept.items() if value is not None}
        case Keyed():
            return {}
        case Leaf(Silent() | Unordered()):
            return None
        case Leaf():
            return tree


def draw(data: st.DataObject, kind: str) -> dict[str, Any]:
    return resolved(kind, data.draw(KINDS[kind]))


@each_kind
@given(data=st.data())
def test_meet_and_join_obey_the_laws_of_a_distributive_lattice_over_whole_documents(
    kind: str, data: st.DataObject
) -> None:
    order, walk = order_of(load_schema(kind)), Walk()
    a, b, c = (draw(data, kind) for _ in range(3))

    def meet(one: Any, other: Any) -> Any:
        return walk.meet(order, one, other)

    def join(one: Any, other: Any) -> Any:
        return walk.join(order, one, other)

    def same(one: Any, other: Any) -> bool:
        return bool(directed(order, one) == directed(order, other))

    assert same(meet(a, b), meet(b, a))
    assert same(join(a, b), join(b, a))
    assert same(meet(a, meet(b, c)), meet(meet(a, b), c))
    assert same(join(a, join(b, c)), join(join(a, b), c))
    assert same(meet(a, join(a, b)), a)
    assert same(join(a, meet(a, b)), a)
    assert same(meet(a, join(b, c)), join(meet(a, b), meet(a, c)))
    assert meet(a, a) == a


@each_kind
@given(data=st.data())
def test_le_is_the_order_of_that_lattice(kind: str, data: st.DataObject) -> None:
    order, walk = order_of(load_schema(kind)), Walk()
    a, b, c = (draw(data, kind) for _ in range(3))
    assert walk.le(order, a, a)
    assert walk.le(order, walk.meet(order, a, b), a)
    assert walk.le(order, walk.meet(order, a, b), b)
    assert walk.le(order, a, walk.join(order, a, b))
    if walk.le(order, a, b) and walk.le(order, b, c):
        assert walk.le(order, a, c)
    if walk.le(order, a, b):
        assert directed(order, walk.meet(order, a, b)) == directed(order, a)
        if walk.le(order, b, a):
            assert directed(order, a) == directed(order, b)


@each_kind
@given(data=st.data())
def test_every_step_of_a_weakening_is_licensed_by_the_grant_that_it_names_and_by_nothing_less(
    kind: str, data: st.DataObject
) -> None:
    order, walk = order_of(load_schema(kind)), Walk()
    before, after = draw(data, kind), draw(data, kind)
    grants = []
    for difference in walk.compare(order, before, after):
        for one in difference.loosenings:
            path = difference.field(one)
            grant = granted(path, one.step.action, one.step.item)
            assert covering(order, licences([grant])["x"], path, one) == (grant,)
            assert covering(order, NOTHING, path, one) == ()
            other = Grant(**{**fields_of(grant), "approvals": ()})
            assert covering(order, licences([other])["x"], path, one) == ()
            grants.append(grant)
    licence = licences(grants).get("x", NOTHING)
    start = walk.tighten(order, before, before)
    limit = walk.limit(order, start, licence, after)
    reached = walk.meet(order, after, limit)
    wanted_maps = {grant.item for grant in grants}
    assume(not wanted_maps & set(before.get("secrets", {})))
    for difference in walk.compare(order, reached, after):
        # Only a value without an order that was in force before has no grant here.
        assert difference.path[0] == "secrets"


def granted(path: tuple[str, ...], action: Action, item: Any) -> Grant:
    both = (Approval("alice", "SHA256:a"), Approval("bob", "SHA256:b"))
    place = "".join(f"/{token}" for token in path)
    return Grant(id="G", document="x", field=place, action=action, item=item, ticket="T", approvals=both)


def fields_of(grant: Grant) -> dict[str, Any]:
    return {name: getattr(grant, name) for name in Grant.__dataclass_fields__}


def neighbours(order: Leaf) -> list[tuple[Any, Any, bool]]:
    """Give (before, after, loosens?) for two neighbouring values of a field, made from its rule alone."""
    match order.rule:
        case Ranked(Numbers(down=down)):
            return [(10, 11, not down), (11, 10, down), (10, 10, False)]
        case Ranked(Words(line)):
            pairs = list(pairwise(line))
            return [(tight, loose, True) for tight, loose in pairs] + [(loose, tight, False) for tight, loose in pairs]
        case Covered(removing=removing):
            less, more = elements(order)
            return [(less, more, not removing), (more, less, removing), (more, more, False)]
        case Unordered(default):
            return [(default, "/a", True), ("/a", "/b", True), ("/a", default, False), ("/a", "/a", False)]
        case Silent():
            return [("a", "b", False), ("b", "a", False)]
        case _:
            return []


def elements(order: Leaf) -> tuple[list[str], list[str]]:
    match order.node["items"]["x-format"]:
        case "entry" | "deny-entry":
            return ["x.a.com"], ["*.a.com"]
        case "address-range":
            return ["198.51.0.0/24"], ["198.51.0.0/16"]
        case _:
            return ["a"], ["a", "b"]


def all_leaves(order: Order, path: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], Leaf]]:
    match order:
        case Group(fields):
            return [found for name, child in fields.items() for found in all_leaves(child, (*path, name))]
        case Keyed():
            return all_leaves(order.value, (*path, "KEY"))
        case Leaf():
            return [(path, order)]


LEAVES = [(kind, path, leaf) for kind in KINDS for path, leaf in all_leaves(order_of(load_schema(kind)))]


@pytest.mark.parametrize(("kind", "path", "leaf"), LEAVES, ids=[f"{kind}/{'/'.join(path)}" for kind, path, _ in LEAVES])
def test_each_field_loosens_in_its_direction_and_in_no_other(kind: str, path: tuple[str, ...], leaf: Leaf) -> None:
    order, walk = order_of(load_schema(kind)), Walk()
    assert neighbours(leaf), path
    for before, after, loosens in neighbours(leaf):
        here, there = (planted(order, path, value) for value in (before, after))
        found = walk.loosened(order, here, there)
        assert bool(found) is loosens, (before, after)


def planted(order: Order, path: tuple[str, ...], value: Any) -> Any:
    tree = copy.deepcopy(floor(order))
    at = tree
    for token in path[:-1]:
        at = at.setdefault(token, {})
    at[path[-1]] = value
    return tree


def test_a_field_without_x_loosens_counts_as_one_without_an_order() -> None:
    order = compile_order({"properties": {"a": {"type": "string", "default": "x"}}})
    assert isinstance(order, Group)
    leaf = order.fields["a"]
    assert isinstance(leaf, Leaf)
    assert leaf.rule == Unordered("x")


@pytest.mark.parametrize("loosens", ["sideways", {"flag": "true"}, {"set": "entries", "by": "both"}, ["up"]], ids=str)
def test_an_x_loosens_without_meaning_is_a_broken_schema(loosens: Any) -> None:
    with pytest.raises(ValueError, match="means nothing"):
        compile_order({"type": "string", "x-loosens": loosens})


MAPS = {
    "properties": {
        "adding": {
            "x-loosens": "adding-key",
            "additionalProperties": {"properties": {"n": {"x-loosens": "up", "default": 1}}},
        },
        "removing": {
            "x-loosens": "removing-key",
            "additionalProperties": {"properties": {"n": {"x-loosens": "up", "default": 1}}},
        },
    }
}


def maps(adding: dict[str, int], removing: dict[str, int]) -> dict[str, Any]:
    return {
        "adding": {key: {"n": value} for key, value in adding.items()},
        "removing": {key: {"n": value} for key, value in removing.items()},
    }


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        (maps({}, {}), maps({"a": 1}, {}), [(("adding",), "add", "a")]),
        (maps({}, {}), maps({"a": 5}, {}), [(("adding", "a", "n"), "value", 5)]),
        (maps({"a": 1}, {}), maps({}, {}), []),
        (maps({"a": 1}, {}), maps({"a": 2}, {}), [(("adding", "a", "n"), "value", 2)]),
        (maps({}, {"a": 1}), maps({}, {}), [(("removing",), "remove", "a")]),
        (maps({}, {}), maps({}, {"a": 9}), []),
        (maps({}, {"a": 1}), maps({}, {"a": 2}), [(("removing", "a", "n"), "value", 2)]),
    ],
)
def test_maps_loosen_by_keys_and_by_their_values(before: Any, after: Any, told: list[Any]) -> None:
    order, walk = compile_order(MAPS), Walk()
    found = [
        (difference.field(one), str(one.step.action), one.step.item)
        for difference in walk.compare(order, before, after)
        for one in difference.loosenings
    ]
    assert found == told
    assert walk.le(order, walk.meet(order, before, after), before)
    assert walk.le(order, walk.meet(order, before, after), after)


def test_approvals_are_those_of_the_field_or_of_the_element_whichever_is_more() -> None:
    schema = {
        "properties": {
            "two": {"x-loosens": "up", "x-approvals": 2, "default": 1},
            "never": {"x-loosens": "up", "x-approvals": "never", "default": 1},
        }
    }
    order, walk = compile_order(schema), Walk()
    one, both = ((Approval("alice", "a"),), (Approval("alice", "a"), Approval("bob", "b")))
    for name, approvals, value in (("two", one, 1), ("two", both, 5), ("never", both, 1)):
        grant = Grant(
            id="G", document="x", field=f"/{name}", action=Action.VALUE, item=5, ticket="T", approvals=approvals
        )
        limit = walk.limit(order, {"two": 1, "never": 1}, licences([grant])["x"], {"two": 9, "never": 9})
        assert limit[name] == value
    allow = find(order_of(load_schema("agent")), ("allow",))
    assert isinstance(allow, Leaf)
    assert cost(allow, Action.ADD, "*.github.io") == 2
    assert cost(allow, Action.ADD, "a.com") == 1
    never = find(order, ("never",))
    assert isinstance(never, Leaf)
    assert cost(never, Action.VALUE, 5) == NEVER_APPROVED


def test_a_grant_that_says_another_action_than_the_field_has_is_of_no_use() -> None:
    allow = find(order_of(load_schema("agent")), ("allow",))
    assert isinstance(allow, Leaf)
    for action in (Action.REMOVE, Action.VALUE):
        assert usable(allow, [granted(("allow",), action, "a.com")]) == ()


def test_find_names_fields_and_maps_and_nothing_else() -> None:
    order = order_of(load_schema("agent"))
    assert isinstance(find(order, ("limits", "memory")), Leaf)
    assert isinstance(find(order, ("secrets",)), Keyed)
    assert isinstance(find(order, ("secrets", "ANY", "file")), Leaf)
    for path in (("limits",), ("nothing",), ("allow", "0"), ("secrets", "ANY"), ()):
        assert find(order, path) is None


def test_a_value_that_a_schema_no_longer_has_is_the_tightest() -> None:
    rule = Ranked(Words(("tight", "loose")))
    assert rule.meet("loose", "gone") == "tight"
    assert rule.steps("gone", "tight") != ()


def test_what_a_field_without_an_order_may_be_is_a_set_of_values() -> None:
    rule = Unordered("x")
    assert rule.meet("a", OneOf(("x", "a"))) == "a"
    assert rule.meet("b", OneOf(("x", "a"))) is None
    assert rule.meet("x", "a") == "x"
    assert rule.meet("b", "a") is None
    assert rule.join("a", "b") == OneOf(("a", "b"))
    assert rule.join("a", None) == "a"
    assert rule.steps(OneOf(("a", "b")), "b") == ()


def test_a_layer_is_an_egress_document_without_scope_and_identity() -> None:
    assert sorted(orders().layer.fields) == ["allow", "default", "deny", "deny_ranges"]
