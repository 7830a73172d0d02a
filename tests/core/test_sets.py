"""The set functions: the laws of a lattice, and agreement with what the proxy and the address arithmetic would do."""

from __future__ import annotations

import ipaddress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.entry import denies, matches, parse, parse_deny
from reconciler.core.sets import ALLOWED, DENIED, NAMES, RANGES, SetFunction, set_function
from tests.strategies import entries, entry_lists, name_lists, range_lists, ranges

KINDS: dict[str, tuple[SetFunction[Any], st.SearchStrategy[list[str]]]] = {
    "entries of an allow list": (ALLOWED, entry_lists()),
    "entries of a deny list": (DENIED, entry_lists()),
    "ranges": (RANGES, range_lists()),
    "names": (NAMES, name_lists()),
}
each_kind = pytest.mark.parametrize(("function", "lists"), KINDS.values(), ids=KINDS)

HOSTS = ("a.com", "b.a.com", "c.b.a.com", "z.c.b.a.com", "z.a.com", "x.com", "b.x.com", "z.b.x.com", "com", "evila.com")
PORTS = (22, 80, 443, 5432)


@each_kind
@given(data=st.data())
def test_union_and_intersection_obey_the_laws_of_a_distributive_lattice(
    function: SetFunction[Any], lists: st.SearchStrategy[list[str]], data: st.DataObject
) -> None:
    a, b, c = (function.canonical(data.draw(lists)) for _ in range(3))
    meet, join = function.intersection, function.union
    assert meet(a, b) == meet(b, a)
    assert join(a, b) == join(b, a)
    assert meet(a, meet(b, c)) == meet(meet(a, b), c)
    assert join(a, join(b, c)) == join(join(a, b), c)
    assert meet(a, a) == a == join(a, a)
    assert meet(a, join(a, b)) == a == join(a, meet(a, b))
    assert meet(a, join(b, c)) == join(meet(a, b), meet(a, c))
    assert meet(a, []) == []
    assert join(a, []) == a


@each_kind
@given(data=st.data())
def test_within_is_the_order_of_that_lattice(
    function: SetFunction[Any], lists: st.SearchStrategy[list[str]], data: st.DataObject
) -> None:
    a, b = (function.canonical(data.draw(lists)) for _ in range(2))
    assert function.within(a, b) == (function.intersection(a, b) == a) == (function.union(a, b) == b)
    assert (function.within(a, b) and function.within(b, a)) == (a == b)
    assert function.within(function.without(a, b), a)
    assert function.within(a, function.union(function.without(a, b), b))
    assert function.union(b, function.missing(a, b)) == function.union(a, b)
    assert function.missing(a, b) == [] or not function.within(a, b)


@each_kind
@given(data=st.data())
def test_the_canonical_form_does_not_depend_on_order_or_repeats(
    function: SetFunction[Any], lists: st.SearchStrategy[list[str]], data: st.DataObject
) -> None:
    texts = data.draw(lists)
    shuffled = data.draw(st.permutations(texts))
    canonical = function.canonical(texts)
    assert function.canonical(shuffled) == canonical == function.canonical(texts * 2) == function.canonical(canonical)


def reached(texts: list[str], *, deny: bool) -> set[tuple[str, int]]:
    """Ask the proxy's own functions, target by target."""
    decide, read = (denies, parse_deny) if deny else (matches, parse)
    entries: Any = [read(text) for text in texts]
    return {(host, port) for host in HOSTS for port in PORTS for entry in entries if decide(entry, host, port)}


@pytest.mark.parametrize("deny", [False, True], ids=["allow", "deny"])
@given(one=entry_lists(), other=entry_lists())
def test_the_algebra_of_entries_is_that_of_the_targets_that_the_proxy_matches(
    one: list[str], other: list[str], *, deny: bool
) -> None:
    function = DENIED if deny else ALLOWED
    here, there = reached(one, deny=deny), reached(other, deny=deny)
    assert reached(function.canonical(one), deny=deny) == here
    assert reached(function.union(one, other), deny=deny) == here | there
    assert reached(function.intersection(one, other), deny=deny) == here & there
    if function.within(one, other):
        assert here <= there


@given(one=entry_lists(), other=entry_lists())
def test_a_witness_is_a_target_that_only_the_element_reaches(one: list[str], other: list[str]) -> None:
    for text in ALLOWED.missing(one, other):
        host, _, port = ALLOWED.witness(text, other).rpartition(":")
        entries: Any = [parse(old) for old in other]
        new: Any = parse(text)
        assert matches(new, host, int(port))
        assert not any(matches(entry, host, int(port)) for entry in entries)


@given(one=range_lists(), other=range_lists())
def test_the_algebra_of_ranges_is_that_of_their_addresses(one: list[str], other: list[str]) -> None:
    def holds(texts: list[str], address: str) -> bool:
        probe = ipaddress.ip_address(address)
        return any(probe in block for block in map(ipaddress.ip_network, texts) if block.version == probe.version)

    for address in (
        "198.51.0.1",
        "198.51.1.1",
        "198.51.2.1",
        "198.51.3.255",
        "198.51.4.1",
        "2001:db8:2::1",
        "2001:db9::",
    ):
        here, there = holds(one, address), holds(other, address)
        assert holds(RANGES.union(one, other), address) == (here or there)
        assert holds(RANGES.intersection(one, other), address) == (here and there)
    for text in RANGES.missing(one, other):
        witness = RANGES.witness(text, other)
        assert holds([text], witness)
        assert not holds(other, witness)


CANONICAL = {
    "ports that make the whole": (ALLOWED, ["a.com:80", "a.com:443"], ["a.com"]),
    "what lies below a wildcard": (ALLOWED, ["*.a.com", "x.a.com", "*.y.a.com"], ["*.a.com"]),
    "the apex is not below its wildcard": (ALLOWED, ["*.a.com", "a.com"], ["a.com", "*.a.com"]),
    "a wildcard for one port leaves the other": (ALLOWED, ["*.a.com:80", "x.a.com"], ["*.a.com:80", "x.a.com:443"]),
    "on a deny list every port holds each": (DENIED, ["a.com", "a.com:80"], ["a.com"]),
    "on a deny list two ports are not all": (DENIED, ["a.com:80", "a.com:443"], ["a.com:80", "a.com:443"]),
    "two halves are one range": (RANGES, ["10.0.0.0/9", "10.128.0.0/9"], ["10.0.0.0/8"]),
    "the star holds every name": (NAMES, ["b", "*", "a"], ["*"]),
}


@pytest.mark.parametrize(("function", "texts", "canonical"), CANONICAL.values(), ids=CANONICAL)
def test_canonical_forms(function: SetFunction[Any], texts: list[str], canonical: list[str]) -> None:
    assert function.canonical(texts) == canonical


def test_a_deny_entry_leaves_only_when_one_removed_element_covers_all_of_it() -> None:
    assert DENIED.without(["*.a.com"], ["x.a.com"]) == ["*.a.com"]
    assert DENIED.without(["x.a.com"], ["x.a.com:443"]) == ["x.a.com"]
    assert DENIED.without(["x.a.com:443", "b.com"], ["*.a.com"]) == ["b.com"]


def test_an_unknown_set_function_is_a_broken_schema() -> None:
    with pytest.raises(ValueError, match="no such set function"):
        set_function({"set": "hosts", "by": "adding"})
    assert set_function("up") is None


@pytest.mark.parametrize(
    ("function", "elements"),
    [(ALLOWED, entries()), (DENIED, entries()), (RANGES, ranges()), (NAMES, st.sampled_from(("one", "two", "*")))],
    ids=["entries", "denied entries", "ranges", "names"],
)
def test_one_element_covers_another_exactly_when_the_sets_of_one_do(
    function: SetFunction[Any], elements: st.SearchStrategy[str]
) -> None:
    @given(elements, elements)
    def same(wide: str, narrow: str) -> None:
        assert function.covers(wide, narrow) == function.within([narrow], [wide])

    same()
