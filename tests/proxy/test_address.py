"""Addresses: the table of cases, the edges of every range, and what parsing promises."""

from __future__ import annotations

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy import address
from proxy.address import Kind, Network
from tests.proxy.examples import ADDRESSES, cases

CASES = cases("addresses")
REFUSED_V4 = [
    "0.0.0.0/8",
    "10.0.0.0/8",
    "100.64.0.0/10",
    "127.0.0.0/8",
    "169.254.0.0/16",
    "172.16.0.0/12",
    "192.0.0.0/24",
    "192.0.2.0/24",
    "192.88.99.0/24",
    "192.168.0.0/16",
    "198.18.0.0/15",
    "198.51.100.0/24",
    "203.0.113.0/24",
    "224.0.0.0/4",
    "240.0.0.0/4",
    "168.63.129.16/32",
]
REFUSED_V6 = ["2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20"]
NAT64 = address.parse_nat64_prefix("64:ff9b::/96")


def kind_of(text: str) -> Kind | None:
    parsed = address.parse_address(text)
    return None if parsed is None else address.classify(parsed)


@pytest.mark.parametrize("text", CASES["deny"])
def test_an_address_of_the_table_is_not_public(text: str) -> None:
    assert kind_of(text) is not Kind.PUBLIC


@pytest.mark.parametrize("text", CASES["dial"])
def test_an_address_of_the_table_is_public(text: str) -> None:
    assert kind_of(text) is Kind.PUBLIC


@pytest.mark.parametrize("text", [*REFUSED_V4, *REFUSED_V6])
def test_a_refused_range_is_refused_to_its_last_address(text: str) -> None:
    network = ipaddress.ip_network(text)
    assert kind_of(str(network[0])) is not Kind.PUBLIC
    assert kind_of(str(network[-1])) is not Kind.PUBLIC


@given(st.integers(0, 2**32 - 1))
def test_ipv4_is_public_exactly_outside_the_refused_ranges(number: int) -> None:
    one = ipaddress.IPv4Address(number)
    refused = any(one in ipaddress.ip_network(text) for text in REFUSED_V4)
    assert (address.classify(one.packed) is Kind.PUBLIC) is not refused
    assert address.classify(b"\0" * 10 + b"\xff\xff" + one.packed) is address.classify(one.packed)


@given(st.integers(0, 2**128 - 1) | st.integers(0x2 << 124, (0x4 << 124) - 1))
def test_ipv6_is_public_exactly_inside_global_unicast_without_its_refused_ranges(number: int) -> None:
    one = ipaddress.IPv6Address(number)
    refused = any(one in ipaddress.ip_network(text) for text in REFUSED_V6)
    expected = one in ipaddress.ip_network("2000::/3") and not refused
    if one.ipv4_mapped is None:
        assert (address.classify(one.packed) is Kind.PUBLIC) is expected


@given(ADDRESSES)
def test_whatever_python_calls_not_global_is_not_public_here_either(packed: bytes) -> None:
    one = ipaddress.ip_address(packed)
    inner = getattr(one, "ipv4_mapped", None) or one
    if not inner.is_global:
        assert address.classify(packed) is not Kind.PUBLIC


@pytest.mark.parametrize("length", [32, 40, 48, 56, 64, 96])
def test_nat64_is_judged_by_the_ipv4_address_inside_whatever_the_prefix_length(length: int) -> None:
    """The layout is that of RFC 6052 section 2.4's table."""
    prefix = address.parse_nat64_prefix(f"2a00:db8::/{length}" if length > 32 else "2a00:db8::/32")
    assert prefix is not None
    inside = {
        32: "2a00:db8:c000:221::",
        40: "2a00:db8:c0:2:21::",
        48: "2a00:db8:0:c000:2:2100::",
        56: "2a00:db8:0:c0:0:221::",
        64: "2a00:db8::c0:2:2100:0",
        96: "2a00:db8::c000:221",
    }[length]
    packed = address.parse_address(inside)
    assert packed is not None
    assert address.text_of(address.unwrap(packed, (prefix,))) == "192.0.2.33"
    assert address.classify(packed, (prefix,)) is Kind.DOCUMENTATION


def test_nat64_of_a_metadata_address_is_refused_with_and_without_its_prefix() -> None:
    packed = address.parse_address("64:ff9b::a9fe:a9fe")
    public = address.parse_address("64:ff9b::5db8:d822")
    assert packed is not None
    assert public is not None
    assert NAT64 is not None
    assert address.classify(packed) is not Kind.PUBLIC
    assert address.classify(packed, (NAT64,)) is Kind.LINK_LOCAL
    assert address.classify(public) is not Kind.PUBLIC
    assert address.classify(public, (NAT64,)) is Kind.PUBLIC


@pytest.mark.parametrize(
    "text", ["1.2.3", "01.2.3.4", "1.2.3.4 ", "1.2.3.4\0", "0x7f.1.1.1", "", "fe80::1%eth0", "[::1]", "1.2.3.4/8"]
)
def test_only_the_standard_spelling_is_an_address(text: str) -> None:
    assert address.parse_address(text) is None


@pytest.mark.parametrize(
    "text",
    ["1.2.3.4/33", "1.2.3.4/8", "1.2.3.0/+24", "1.2.3.0/024", "1.2.3.0/", "1.2.3.0/\uff12\uff14", "::/129", "x/8"],
)
def test_an_unusable_range_is_not_read(text: str) -> None:
    assert address.parse_network(text) is None


def test_a_range_of_mapped_addresses_is_the_ipv4_range_that_it_means() -> None:
    mapped = address.parse_network("::ffff:161.26.0.0/112")
    assert mapped == Network(b"\xa1\x1a\0\0", 16)
    assert b"\xa1\x1a\x01\x02" in mapped


@given(ADDRESSES, st.integers(0, 128))
def test_a_range_holds_what_python_says_it_holds(packed: bytes, prefix: int) -> None:
    one = ipaddress.ip_address(packed)
    network = ipaddress.ip_network((one, min(prefix, one.max_prefixlen)), strict=False)
    ours = address.parse_network(str(network))
    assert ours is not None
    if getattr(one, "ipv4_mapped", None) is None:
        assert packed in ours
    assert address.text_of(packed) == str(one) or getattr(one, "ipv4_mapped", None) or one.version == 6
