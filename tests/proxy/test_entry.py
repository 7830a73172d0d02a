"""Entries: the table, and what matching and covering promise."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy import entry
from proxy.entry import BadEntry, Entry, EntryCode, EntryIndex
from tests.proxy.examples import ENTRIES, HOSTS, PORTS, cases, entries

CASES = cases("entries")
BY_LIST = {"*.co.uk", "xn--zzzz9999.com"}
"""Found with lists that this package does without: the policy side's tests hold these rows."""


@pytest.mark.parametrize("case", CASES["accept"], ids=lambda case: case["in"])
def test_an_accepted_entry_has_its_canonical_form(case: dict[str, str]) -> None:
    parsed = entry.parse(case["in"])
    assert isinstance(parsed, Entry)
    assert str(parsed) == case["canonical"]
    assert entry.parse(str(parsed)) == parsed


@pytest.mark.parametrize("text", CASES["two"])
def test_a_wildcard_on_a_private_suffix_is_an_entry(text: str) -> None:
    assert str(entry.parse(text)) == text


@pytest.mark.parametrize(
    "case", [case for case in CASES["refuse"] if case["in"] not in BY_LIST], ids=lambda case: ascii(case["in"])
)
def test_a_refused_entry_has_its_code_and_says_what_to_write(case: dict[str, str]) -> None:
    parsed = entry.parse(case["in"])
    assert isinstance(parsed, BadEntry)
    assert parsed.code == case["code"]
    assert parsed.message.isascii()
    assert parsed.message.isprintable()
    if parsed.code is not EntryCode.NOT_ASCII:
        assert case.get("says", "") in parsed.message


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("", EntryCode.SYNTAX),
        (".", EntryCode.SYNTAX),
        ("example.com..", EntryCode.SYNTAX),
        ("*:443", EntryCode.BARE_WILDCARD),
        ("*.localhost", EntryCode.SPECIAL_NAME),
        ("a.cluster.local", EntryCode.SPECIAL_NAME),
        ("::1", EntryCode.IP_ADDRESS),
        ("[::ffff:127.0.0.1]", EntryCode.IP_ADDRESS),
        ("fe80::1%eth0", EntryCode.IP_ADDRESS),
        ("127.0.0.1.", EntryCode.IP_ADDRESS),
        ("a.0x1", EntryCode.IP_ADDRESS),
        ("[example.com]", EntryCode.SYNTAX),
        ("a-.com", EntryCode.SYNTAX),
        ("a" * 64 + ".com", EntryCode.SYNTAX),
        (".".join(["a" * 50] * 5) + ".com", EntryCode.SYNTAX),
        ("example.com:", EntryCode.PORT),
        ("example.com:80:80", EntryCode.PORT),
        ("example.com:4_43", EntryCode.PORT),
        ("\tcom", EntryCode.SYNTAX),
    ],
)
def test_what_is_no_entry_has_the_code_of_what_it_is(text: str, code: EntryCode) -> None:
    parsed = entry.parse(text)
    assert isinstance(parsed, BadEntry)
    assert parsed.code is code


def test_a_deny_list_may_name_a_whole_top_level_domain() -> None:
    assert entry.parse_deny("*.zip") == Entry("zip", True, None)
    refused = entry.parse("*.zip")
    assert isinstance(refused, BadEntry)
    assert refused.code is EntryCode.PUBLIC_SUFFIX


@pytest.mark.parametrize("case", CASES["cover"], ids=lambda case: f"{case['a']} {case['b']}")
def test_cover_is_as_the_table_says(case: dict[str, Any]) -> None:
    assert entry.covers(entries(case["a"]), entries([case["b"]])[0]) is case["covers"]


def test_a_deny_entry_without_a_port_denies_every_port_and_one_with_a_port_only_that() -> None:
    every, one = entry.parse_deny("a.com"), entry.parse_deny("a.com:22")
    assert isinstance(every, Entry)
    assert isinstance(one, Entry)
    assert entry.denies(every, "a.com", 9999)
    assert entry.denies(one, "a.com", 22)
    assert not entry.denies(one, "a.com", 443)
    assert entry.covers_deny([every], one)
    assert not entry.covers_deny([one], every)


@given(st.text(max_size=40))
def test_any_text_is_an_entry_or_has_a_printable_message(text: str) -> None:
    parsed = entry.parse(text)
    if isinstance(parsed, BadEntry):
        assert parsed.message.isascii()
        assert parsed.message.isprintable()
    else:
        assert entry.parse(str(parsed)) == parsed


@given(st.lists(ENTRIES, max_size=8), HOSTS, PORTS)
def test_an_index_answers_as_its_entries_do_one_by_one(listed: list[Entry], host: str, port: int) -> None:
    allow, deny = EntryIndex(allow=listed), EntryIndex(deny=listed)
    assert allow.matches(host, port) is any(entry.matches(one, host, port) for one in listed)
    assert deny.matches(host, port) is any(entry.denies(one, host, port) for one in listed)
    assert allow.matches_host(host) is any(entry.matches_host(one, host) for one in listed)


@given(st.lists(ENTRIES, max_size=5), ENTRIES, HOSTS, PORTS)
def test_what_a_covered_entry_matches_is_matched_by_what_covers_it(
    listed: list[Entry], one: Entry, host: str, port: int
) -> None:
    if entry.covers(listed, one) and entry.matches(one, host, port):
        assert any(entry.matches(other, host, port) for other in listed)
    if entry.covers_deny(listed, one) and entry.denies(one, host, port):
        assert any(entry.denies(other, host, port) for other in listed)


@given(st.lists(ENTRIES, max_size=5), ENTRIES)
def test_an_entry_that_is_not_covered_reaches_a_target_that_the_others_do_not(listed: list[Entry], one: Entry) -> None:
    """Entries are nested or disjoint, so a name below a suffix that nobody lists is a counterexample."""
    if not entry.covers(listed, one):
        host = f"nobody-lists-this.{one.host}" if one.wildcard else one.host
        assert any(
            entry.matches(one, host, port) and not any(entry.matches(other, host, port) for other in listed)
            for port in entry.ports(one)
        )


@given(st.lists(ENTRIES, min_size=2, max_size=8))
def test_entries_sort_by_reversed_labels_and_the_order_is_total(listed: list[Entry]) -> None:
    for before, after in pairwise(sorted(listed)):
        assert before <= after
        assert before.host.split(".")[::-1] <= after.host.split(".")[::-1]
