"""Owns the schemas as data: they are part of the program, so this is the one place of the core that reads files."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import jsonschema_rs
from jsonschema import Draft202012Validator

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

Node: TypeAlias = "Mapping[str, Any]"
"""One schema, or a part of one."""

DIRECTORY = Path(__file__).resolve().parent.parent.parent / "schema"
"""Beside the packages, in a checkout and in an installed wheel alike."""


@dataclass(frozen=True, slots=True, eq=False)
class Schema:
    """One schema with its references resolved, and the validators of its structure. Compared by identity."""

    kind: str
    root: Node
    validator: Draft202012Validator = field(repr=False)
    """Says what is wrong, and where."""
    quick: jsonschema_rs.Draft202012Validator = field(repr=False)
    """Says only whether something is; a hundred times as fast, and asked of each document first."""

    def fits(self, value: Any) -> bool:
        """Say whether a JSON value has this structure."""
        try:
            return bool(self.quick.is_valid(value))
        except ValueError:  # a value that it has no type for: the other one has the word
            return bool(self.validator.is_valid(value))


def make(kind: str, root: Node) -> Schema:
    """Make a schema from parsed JSON; KeyError when a local reference leads nowhere."""
    whole = _inlined(root, root)
    return Schema(kind, whole, Draft202012Validator(whole), jsonschema_rs.Draft202012Validator(dict(whole)))


@functools.cache
def load_schema(kind: str, version: int = 1) -> Schema:
    """Read `schema/KIND.vVERSION.json`. OSError or ValueError mean a broken installation."""
    return make(kind, json.loads((DIRECTORY / f"{kind}.v{version}.json").read_text("utf-8")))


def _inlined(node: Any, root: Node) -> Any:
    """Replace each local `$ref` by what it names, so that walkers see plain nodes. Our schemas are not recursive."""
    if isinstance(node, list):
        return [_inlined(item, root) for item in node]
    if not isinstance(node, dict):
        return node
    if "$ref" in node:
        target: Any = root
        for token in str(node["$ref"]).removeprefix("#/").split("/"):
            target = target[token]
        node = {**target, **{key: value for key, value in node.items() if key != "$ref"}}
    return {key: _inlined(value, root) for key, value in node.items() if key != "$defs"}


def leaves(node: Node, pointer: str = "") -> Iterator[tuple[str, Node]]:
    """Give each leaf and each map of a schema with its pointer; `*` stands for a map's key.

    A leaf is what has no fields of its own; a list is one. A map is an object whose keys are not fixed.
    """
    fields = node.get("properties")
    values = node.get("additionalProperties")
    if isinstance(values, dict):
        yield pointer, node
        yield from leaves(values, f"{pointer}/*")
    if fields is not None:
        for name, child in fields.items():
            yield from leaves(child, f"{pointer}/{name}")
    elif not isinstance(values, dict):
        yield pointer, node
