"""Policies and decisions as JSON: reading, writing, and agreement with their schemas."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from proxy.decision import Code
from proxy.policy import BadPolicy, ProxyPolicy, parse
from proxy.record import CUT, MAX_TEXT, Record, Verdict, printable
from tests.proxy.examples import DATA, POLICIES, layer, policy

if TYPE_CHECKING:
    from collections.abc import Callable

SCHEMAS = DATA.parents[1] / "schema"


def schema(name: str) -> Any:
    return json.loads((SCHEMAS / f"{name}.v1.json").read_bytes())


POLICY = Draft202012Validator(schema("proxy-policy"))
DECISION = Draft202012Validator(schema("decision"))
DROP = object()


def example() -> dict[str, Any]:
    full = policy(
        deny=["*.zip"],
        layers=[layer(allow=["*.example.com"], deny=["a.com"], deny_ranges=["161.26.0.0/16"])],
        resolvers=[("93.184.216.53", 53), ("2606:2800:220::53", 53)],
        local_addresses=["93.184.216.77"],
        nat64_prefixes=["64:ff9b::/96"],
        canary=3129,
        client_secret="s3cret",  # noqa: S106 — only looks like one
    )
    document: dict[str, Any] = json.loads(full.to_json())
    return document


@given(POLICIES)
def test_a_policy_survives_being_written_and_read(made: ProxyPolicy) -> None:
    line = made.to_json()
    assert "\n" not in line
    assert parse(line.encode()) == made
    POLICY.validate(json.loads(line))


def test_secrets_are_not_in_the_representation() -> None:
    text = repr(policy(client_secret="hush"))  # noqa: S106 — only looks like one
    assert "hush" not in text
    assert bytes(range(32)).hex() not in text
    assert "proof_key" not in text


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("version", 2),
        ("version", True),
        ("kind", "policy"),
        ("run", ""),
        ("run", 7),
        ("generation", 0),
        ("generation", True),
        ("generation", "1"),
        ("revision", None),
        ("allow", "a.com"),
        ("allow", [1]),
        ("allow", [""]),
        ("deny", {}),
        ("layers", [{}]),
        ("layers", ["x"]),
        ("resolvers", "1.1.1.1:53"),
        ("limits", {}),
        ("limits", {"connections": 0}),
        ("limits", {"connections": 1, "memory": 1}),
        ("canary", 0),
        ("canary", 65536),
        ("canary", "3129"),
        ("proof_key", "ab"),
        ("proof_key", None),
        ("client_secret", ""),
        ("client_secret", 5),
        ("expires_at", 0),
        ("expires_at", -1),
        ("expires_at", "soon"),
        ("expires_at", False),
        ("run", DROP),
        ("canary", DROP),
        ("client_secret", DROP),
        ("extra", 1),
    ],
    ids=lambda value: "left out" if value is DROP else ascii(value),
)
def test_parser_and_schema_refuse_the_same_documents(path: str, value: object) -> None:
    document = example()
    if value is DROP:
        del document[path]
    else:
        document[path] = value
    assert isinstance(parse(json.dumps(document).encode()), BadPolicy)
    assert not POLICY.is_valid(document)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("allow", ["*"]),
        ("allow", ["*.com"]),
        ("allow", ["10.0.0.1"]),
        ("deny", ["not a host"]),
        ("resolvers", ["1.1.1.1"]),
        ("resolvers", ["dns.example.com:53"]),
        ("resolvers", ["2606:4700::1111:53"]),
        ("resolvers", ["[1.1.1.1]:53"]),
        ("resolvers", ["1.1.1.1:0"]),
        ("local_addresses", ["93.184.216.0/24"]),
        ("nat64_prefixes", ["64:ff9b::/95"]),
        ("nat64_prefixes", ["10.0.0.0/8"]),
        ("proof_key", "g" * 32),
        ("proof_key", "a" * 33),
        ("proof_key", "ab " * 16),
        ("client_secret", "a b"),
        ("client_secret", "é"),
        ("expires_at", 1e300),
    ],
    ids=ascii,
)
def test_what_a_schema_cannot_say_the_parser_refuses(path: str, value: object) -> None:
    document = example()
    document[path] = value
    bad = parse(json.dumps(document).encode())
    assert isinstance(bad, BadPolicy)
    assert path in bad.message
    assert "s3cret" not in bad.message


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"null",
        b"[]",
        b"{",
        b'{"version":1}',
        b"\xff",
        b'{"expires_at":NaN}',
        b"[" * 100_000,
        json.dumps(example()).encode()[:-1] + b',"run":"again"}',
    ],
    ids=["nothing", "null", "a list", "half", "too little", "not UTF-8", "NaN", "deep", "a field twice"],
)
def test_a_line_that_is_no_policy_has_a_message(line: bytes) -> None:
    bad = parse(line)
    assert isinstance(bad, BadPolicy)
    assert bad.message


def test_a_policy_cannot_be_made_from_addresses_that_are_none() -> None:
    make: list[Callable[[], object]] = [
        lambda: policy(local_addresses=["nowhere"]),
        lambda: policy(nat64_prefixes=["64:ff9b::/97"]),
        lambda: layer(deny_ranges=["10.0.0.1/8"]),
    ]
    for one in make:
        with pytest.raises(ValueError, match="not a usable"):
            one()


RECORDS = st.builds(
    Record,
    seq=st.integers(1, 10**9),
    time=st.floats(0, 4e9).map(lambda value: round(value, 3)),
    run=st.text(max_size=30),
    generation=st.integers(1, 99),
    verdict=st.sampled_from(Verdict),
    code=st.sampled_from(Code).map(str),
    layer=st.none() | st.text(max_size=30),
    method=st.text(max_size=300).map(printable),
    host=st.text(max_size=300).map(printable),
    port=st.none() | st.integers(1, 65535),
    address=st.none() | st.just("93.184.216.34"),
    message=st.text(max_size=300).map(printable),
    count=st.integers(1, 99),
)


@given(RECORDS)
def test_a_decision_survives_being_written_and_read(record: Record) -> None:
    line = record.to_line()
    assert line.endswith(b"\n")
    assert line.isascii()
    assert line.count(b"\n") == 1
    document = json.loads(line)
    assert line == json.dumps(document, sort_keys=True, separators=(",", ":")).encode() + b"\n"
    assert Record.parse(document) == record
    DECISION.validate(document)


@pytest.mark.parametrize(
    "change", [{"kind": "ready"}, {"version": 2}, {"seq": "1"}, {"port": "80"}, {"verdict": "maybe"}, {"more": 1}]
)
def test_what_is_not_a_decision_is_not_read_as_one(change: dict[str, object]) -> None:
    record = Record(
        seq=1,
        time=1.0,
        run="r",
        generation=1,
        verdict=Verdict.DENY,
        code="port",
        layer=None,
        method="GET",
        host="a.com",
        port=80,
        address=None,
        message="",
    )
    document = json.loads(record.to_line()) | change
    assert Record.parse(document) is None
    assert Record.parse(None) is None
    assert Record.parse([]) is None


def test_schema_and_code_know_the_same_fields_and_codes() -> None:
    assert {field.name for field in fields(Record)} | {"kind", "version"} == schema("decision")["properties"].keys()
    assert schema("decision")["properties"]["code"]["enum"] == [str(code) for code in Code]


@given(st.text())
def test_text_from_outside_becomes_printable_and_bounded(text: str) -> None:
    shown = printable(text)
    assert shown.isascii()
    assert shown.isprintable()
    assert len(shown) <= MAX_TEXT + len(CUT)


@pytest.mark.parametrize("name", ["proxy-policy", "decision"])
def test_every_part_of_the_schema_is_described_and_closed(name: str) -> None:
    def walk(node: dict[str, Any], where: str) -> None:
        assert node.get("description"), where
        if node.get("type") == "object":
            assert node["additionalProperties"] is False, where
            assert sorted(node["required"]) == sorted(node["properties"]), where
            for key, value in node["properties"].items():
                walk(value, f"{where}/{key}")
        if "items" in node:
            walk(node["items"], f"{where}/items")

    Draft202012Validator.check_schema(schema(name))
    walk(schema(name), name)
