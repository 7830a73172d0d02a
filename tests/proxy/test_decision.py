"""Decisions: which list answers first, and the properties that hold for every policy."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy import entry
from proxy.address import Kind, classify, parse_address, unwrap
from proxy.answer import refusal, status_of
from proxy.decision import AGENT, Code, Deny, Dial, Resolve, Target, decide_addresses, decide_name
from tests.proxy.examples import ADDRESSES, HOSTS, POLICIES, PORTS, cases, layer, policy

if TYPE_CHECKING:
    from proxy.policy import ProxyLayer, ProxyPolicy

TARGETS = st.builds(Target, HOSTS, PORTS)


@pytest.mark.parametrize(
    ("made", "target", "code", "who"),
    [
        (policy(), Target("evil.com", 443), Code.NOT_LISTED, AGENT),
        (policy(), Target("example.com", 22), Code.PORT, AGENT),
        (policy(deny=["example.com"]), Target("example.com", 443), Code.DENIED, AGENT),
        (policy(deny=["example.com:443"]), Target("example.com", 443), Code.DENIED, AGENT),
        (policy(allow=["a.com"], deny=["*.com"]), Target("a.com", 443), Code.DENIED, AGENT),
        (policy(layers=[layer()]), Target("example.com", 443), Code.ORG_DENIED, "egress/org"),
        (policy(layers=[layer(allow=["example.com:80"])]), Target("example.com", 443), Code.ORG_DENIED, "egress/org"),
        (
            policy(layers=[layer(default_allow=True, deny=["example.com"])]),
            Target("example.com", 443),
            Code.ORG_DENIED,
            "egress/org",
        ),
        (
            policy(layers=[layer(allow=["*.com"]), layer("egress/team")]),
            Target("example.com", 443),
            Code.ORG_DENIED,
            "egress/org",
        ),
        (policy(layers=[layer()]), Target("evil.com", 443), Code.NOT_LISTED, AGENT),
    ],
    ids=[
        "not listed",
        "listed at other ports",
        "the agent's own deny beats its allow",
        "a deny with a port denies that port",
        "a deny may name a whole top-level domain",
        "a layer that lists nothing denies",
        "a layer's port counts",
        "a layer's deny beats its default",
        "the first layer that denies is named",
        "the sandbox's own list answers before the layers",
    ],
)
def test_a_denial_names_who_denied(made: ProxyPolicy, target: Target, code: Code, who: str) -> None:
    denied = decide_name(made, target)
    assert isinstance(denied, Deny)
    assert (denied.code, denied.layer) == (code, who)
    assert target.host in denied.message


@pytest.mark.parametrize("row", cases("addresses")["answers"], ids=lambda row: " ".join(row["addresses"]) or "none")
def test_a_whole_answer_is_decided_as_the_table_says(row: dict[str, Any]) -> None:
    made = policy(nat64_prefixes=row.get("nat64_prefixes", []))
    packed = [address for text in row["addresses"] if (address := parse_address(text))]
    assert len(packed) == len(row["addresses"])
    decided = decide_addresses(made, Resolve(Target("example.com", 443)), packed, local=frozenset())
    if row["verdict"] == "dial":
        assert isinstance(decided, Dial)
    else:
        assert isinstance(decided, Deny)
        assert decided.code == row.get("code", decided.code)


@pytest.mark.parametrize(
    ("addresses", "local", "made", "code"),
    [
        (["93.184.216.34"], ["93.184.216.34"], policy(), Code.ADDRESS_LOCAL),
        (["::ffff:93.184.216.34"], ["93.184.216.34"], policy(), Code.ADDRESS_LOCAL),
        (["93.184.216.34"], [], policy(local_addresses=["93.184.216.34"]), Code.ADDRESS_LOCAL),
        (["93.184.216.34", "8.8.8.8"], ["8.8.8.8"], policy(), Code.MIXED_ANSWER),
        (["161.26.0.10"], [], policy(layers=[layer(deny_ranges=["161.26.0.0/16"])]), Code.ADDRESS_DENIED),
        (["8.8.8.8", "161.26.0.10"], [], policy(layers=[layer(deny_ranges=["161.26.0.0/16"])]), Code.ADDRESS_DENIED),
        (["::ffff:161.26.0.10"], [], policy(layers=[layer(deny_ranges=["161.26.0.0/16"])]), Code.ADDRESS_DENIED),
        (
            ["64:ff9b::a11a:a"],
            [],
            policy(nat64_prefixes=["64:ff9b::/96"], layers=[layer(deny_ranges=["161.26.0.0/16"])]),
            Code.ADDRESS_DENIED,
        ),
        (
            ["64:ff9b::5db8:d822"],
            ["93.184.216.34"],
            policy(nat64_prefixes=["64:ff9b::/96"]),
            Code.ADDRESS_LOCAL,
        ),
        (["10.1.2.3", "127.0.0.1"], [], policy(), Code.ADDRESS_PRIVATE),
    ],
    ids=[
        "an interface's own address",
        "an interface's own address, mapped",
        "an address of the host that the daemon names",
        "a public and a local address",
        "a denied range",
        "a denied range beside a public address",
        "a denied range, mapped",
        "a denied range behind NAT64",
        "a local address behind NAT64",
        "only private addresses",
    ],
)
def test_an_address_that_may_not_be_dialled_refuses_the_answer(
    addresses: list[str], local: list[str], made: ProxyPolicy, code: Code
) -> None:
    packed = [parse_address(text) or b"" for text in addresses]
    own = frozenset(parse_address(text) or b"" for text in local)
    denied = decide_addresses(made, Resolve(Target("example.com", 443)), packed, local=own)
    assert isinstance(denied, Deny)
    assert denied.code is code
    assert (denied.layer == "egress/org") is (code is Code.ADDRESS_DENIED)


def passes_lists(
    deny: tuple[entry.Entry, ...], allow: tuple[entry.Entry, ...], target: Target, *, otherwise: bool
) -> bool:
    if any(entry.denies(one, target.host, target.port) for one in deny):
        return False
    return otherwise or any(entry.matches(one, target.host, target.port) for one in allow)


@given(POLICIES, TARGETS)
def test_a_name_passes_exactly_when_every_list_passes_it(made: ProxyPolicy, target: Target) -> None:
    expected = passes_lists(made.deny, made.allow, target, otherwise=False) and all(
        passes_lists(one.deny, one.allow, target, otherwise=one.default_allow) for one in made.layers
    )
    assert isinstance(decide_name(made, target), Resolve) is expected


@given(POLICIES, TARGETS, st.builds(lambda: layer("egress/more")) | st.just(layer("egress/all", default_allow=True)))
def test_one_layer_more_never_lets_more_through(made: ProxyPolicy, target: Target, more: ProxyLayer) -> None:

    stricter = replace(made, layers=(*made.layers, more))
    if isinstance(decide_name(stricter, target), Resolve):
        assert isinstance(decide_name(made, target), Resolve)


@given(POLICIES, TARGETS, st.lists(ADDRESSES, max_size=16), st.frozensets(ADDRESSES, max_size=3))
def test_only_public_addresses_of_the_answer_are_ever_dialled(
    made: ProxyPolicy, target: Target, addresses: list[bytes], local: frozenset[bytes]
) -> None:
    decided = decide_addresses(made, Resolve(target), addresses, local=local)
    if isinstance(decided, Dial):
        assert decided.addresses
        assert set(decided.addresses) == {unwrap(address) for address in addresses}
        for address in addresses:
            inner = unwrap(address, made.nat64)
            assert classify(address, made.nat64) is Kind.PUBLIC
            assert not {address, inner} & (local | made.local)
            assert not any(address in one or inner in one for each in made.layers for one in each.ranges)


@given(POLICIES, TARGETS, st.lists(ADDRESSES, max_size=8), ADDRESSES)
def test_one_address_more_never_turns_a_denial_into_a_dial(
    made: ProxyPolicy, target: Target, addresses: list[bytes], more: bytes
) -> None:
    if addresses and isinstance(decide_addresses(made, Resolve(target), addresses, local=frozenset()), Deny):
        assert isinstance(decide_addresses(made, Resolve(target), [*addresses, more], local=frozenset()), Deny)


@pytest.mark.parametrize("code", [code for code in Code if code is not Code.ALLOWED])
def test_every_denial_has_a_status_and_an_answer_that_says_its_code(code: Code) -> None:
    answer = refusal(Deny(code, "why", "egress/org"), with_body=True)
    head, _, body = answer.partition(b"\r\n\r\n")
    lines = head.decode("ascii").split("\r\n")
    assert 400 <= status_of(code) <= 599
    assert lines[0] == f"HTTP/1.1 {status_of(code)} {code}"
    assert "Connection: close" in lines
    assert "Content-Type: text/plain" in lines
    assert any(line.startswith("Proxy-Status: ringfence; error=") for line in lines)
    assert f"Content-Length: {len(body)}" in lines
    assert body == f"ringfence: {code} (egress/org): why\n".encode()
    assert any(line.startswith("Proxy-Authenticate:") for line in lines) is (code is Code.CLIENT_SECRET)


def test_a_refusal_holds_no_second_line_whatever_its_message_holds() -> None:
    answer = refusal(Deny(Code.MALFORMED, "a\r\nSet-Cookie: x", 'e"\r\n'), with_body=True)
    assert b"\nSet-Cookie" not in answer
    assert answer.count(b"\r\n\r\n") == 1
