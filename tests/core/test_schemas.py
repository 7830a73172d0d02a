"""Every schema says only what we understand, and every field of policy says in which direction it loosens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from reconciler.core import formats
from reconciler.core.directions import Group, Keyed, Leaf, Order, find, floor, order_of
from reconciler.core.resolve import default
from reconciler.core.rules import Covered, Ranked, Silent, Words
from reconciler.core.schema import DIRECTORY, Schema, leaves, load_schema, make

FILES = sorted(path for path in DIRECTORY.glob("*.v*.json") if not path.name.startswith("keywords."))
KEYWORDS = Draft202012Validator(json.loads((DIRECTORY / "keywords.v1.json").read_text("utf-8")))
POLICY_KINDS = ("platform", "agent", "egress")


def named(path: Path) -> str:
    return path.name


def undirected(schema: Schema) -> list[str]:
    """Name each leaf and map that does not say in which direction it loosens."""
    return [f"{schema.kind}{pointer}" for pointer, node in leaves(schema.root) if "x-loosens" not in node]


@pytest.mark.parametrize("path", FILES, ids=named)
def test_a_schema_uses_only_known_keywords(path: Path) -> None:
    found = [
        f"{path.name}{error.json_path}: {error.message}" for error in KEYWORDS.iter_errors(json.loads(path.read_text()))
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("path", FILES, ids=named)
def test_a_schema_is_itself_valid_and_is_named_after_its_file(path: Path) -> None:
    schema = json.loads(path.read_text())
    Draft202012Validator.check_schema(schema)
    assert schema["$id"] == path.name


@pytest.mark.parametrize(
    ("keyword", "value"),
    [("patern", "x"), ("pattern", "^a$"), ("format", "ipv4"), ("x-loosen", "up"), ("oneOf", []), ("allOf", [])],
)
def test_a_misspelt_or_foreign_keyword_is_found_at_any_depth(keyword: str, value: Any) -> None:
    schema = {
        "description": "A map.",
        "type": "object",
        "properties": {
            "a": {"description": "A list.", "type": "array", "items": {"description": "One.", keyword: value}}
        },
    }
    assert not KEYWORDS.is_valid(schema)


@pytest.mark.parametrize(
    "loosens",
    [
        "upwards",
        "removing",
        {"flag": "true"},
        {"chain": ["one"]},
        {"set": "entries"},
        {"set": "hosts", "by": "adding"},
        {},
    ],
    ids=str,
)
def test_an_x_loosens_without_meaning_is_found(loosens: Any) -> None:
    assert not KEYWORDS.is_valid({"description": "A field.", "x-loosens": loosens})


@pytest.mark.parametrize("kind", POLICY_KINDS)
def test_each_field_of_policy_says_in_which_direction_it_loosens(kind: str) -> None:
    assert undirected(load_schema(kind)) == []


def test_a_new_field_that_does_not_say_so_is_named() -> None:
    root = json.loads((DIRECTORY / "agent.v1.json").read_text("utf-8"))
    root["properties"]["env"]["properties"]["inherit"] = {"description": "New.", "type": "boolean", "default": False}
    assert undirected(make("agent", root)) == ["agent/env/inherit"]


@pytest.mark.parametrize("kind", POLICY_KINDS)
def test_each_optional_field_of_policy_has_a_default_that_its_own_schema_accepts(kind: str) -> None:
    schema = load_schema(kind)

    def check(node: Any, pointer: str) -> None:
        for name, child in node.get("properties", {}).items():
            here = f"{pointer}/{name}"
            if name not in node.get("required", ()):
                assert "default" in child, f"{kind}{here} is optional and has no default"
                assert Draft202012Validator(child).is_valid(child["default"]), here
                default(child)
            check(child, here)
        if isinstance(node.get("additionalProperties"), dict):
            check(node["additionalProperties"], f"{pointer}/*")

    check(schema.root, "")


@pytest.mark.parametrize("kind", POLICY_KINDS)
def test_a_weakening_of_each_field_says_why_it_is_one(kind: str) -> None:
    missing = [
        f"{kind}{pointer}"
        for pointer, node in leaves(load_schema(kind).root)
        if node.get("x-loosens") not in ("never", "identity") and "x-why" not in node
    ]
    assert missing == []


@pytest.mark.parametrize("path", FILES, ids=named)
def test_each_format_that_a_schema_names_exists_and_each_bound_is_of_it(path: Path) -> None:
    for _, node in leaves(make(path.name, json.loads(path.read_text())).root):
        for name in (node.get("x-format"), node.get("items", {}).get("x-format"), node.get("x-keys")):
            if name is not None:
                formats.parse(name, "x")
        for bound in ("x-minimum", "x-maximum"):
            if bound in node:
                assert isinstance(formats.parse(node["x-format"], node[bound]), int)


@pytest.mark.parametrize("kind", POLICY_KINDS)
def test_a_direction_fits_the_type_of_its_field(kind: str) -> None:
    def check(order: Order, pointer: str) -> None:
        match order:
            case Group(fields):
                for name, child in fields.items():
                    check(child, f"{pointer}/{name}")
            case Keyed():
                check(order.value, f"{pointer}/*")
            case Leaf(Ranked(Words(line))):
                values = order.node.get("enum", [True, False])
                assert sorted(map(str, line)) == sorted(map(str, values)), f"{pointer}: the line lacks a value"
            case Leaf(Ranked()):
                number = order.node.get("type") in ("integer", "number")
                assert number or order.node.get("x-format") in ("size", "duration"), pointer
            case Leaf(Covered()):
                assert order.node["type"] == "array", pointer
            case Leaf():
                pass

    check(order_of(load_schema(kind)), kind)


NOT_MINIMAL = {
    "platform/backend": "a host without signers must still be able to run something: the strongest that it has",
    "platform/require_runtime_class": "clusters without gVisor are still fenced; who needs it demands it",
    "platform/max_parallel_runs": "one run at a time would make the product useless without a signature",
    "agent/minimum_isolation": "a microvm by default would refuse most hosts; containers are what they have",
    "agent/deny": "nobody can deny by name what nobody has thought of",
    "agent/limits/cpus": "a run needs some of the host",
    "agent/limits/memory": "a run needs some of the host",
    "agent/limits/pids": "a run needs some of the host",
    "agent/limits/timeout": "a run needs some time",
    "agent/limits/output": "a result without output says nothing",
    "agent/limits/connections": "a run with an allow list needs connections",
    "egress/deny": "nobody can deny by name what nobody has thought of",
    "egress/deny_ranges": "no public address is suspect by itself",
}
"""Fields whose default is not the tightest value, so that a host which saw a tighter one before is tighter."""


@pytest.mark.parametrize("kind", POLICY_KINDS)
def test_each_field_whose_default_is_not_the_tightest_has_a_sentence_that_says_why(kind: str) -> None:
    found = set()
    for pointer, node in leaves(load_schema(kind).root):
        at = find(order_of(load_schema(kind)), tuple(pointer.split("/")[1:]))
        if not isinstance(at, Leaf) or pointer.split("/")[-1] in node.get("required", ()):
            continue
        match at.rule:
            case Ranked(Words(line)):
                minimal = floor(at) == line[0]
            case Ranked():
                minimal = False
            case Covered(removing=removing):
                minimal = not removing or at.default is None
            case Silent():
                minimal = True
            case _:
                minimal = True
        if not minimal:
            found.add(f"{kind}{pointer}")
    assert found == {place for place in NOT_MINIMAL if place.startswith(f"{kind}/")}


def test_a_local_reference_is_resolved_before_anything_walks_the_schema() -> None:
    schema = make(
        "x", {"properties": {"a": {"$ref": "#/$defs/b", "description": "Mine."}}, "$defs": {"b": {"type": "string"}}}
    )
    assert schema.root["properties"]["a"] == {"type": "string", "description": "Mine."}


def test_every_schema_is_found_beside_the_packages() -> None:
    assert Path(DIRECTORY).is_dir()
    assert {"platform", "agent", "egress", "signed-reason"} <= {path.name.partition(".")[0] for path in FILES}
