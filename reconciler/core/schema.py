"""Owns the schemas as data: they are part of the program, so this is the one place of the core that reads files."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from jsonschema import Draft202012Validator

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

Node: TypeAlias = "Mapping[str, Any]"
"""One schema, or a part of one."""

DIRECTORY = Path(__file__).resolve().parent.parent.parent / "schema"
"""Beside the packages, in a checkout and in an installed wheel alike."""


@dataclass(frozen=True, slots=True, eq=False)
class Schema:
    """One schema with its references resolved, and the validator of its structure. Compared by identity."""

    kind: str
    root: Node
    validator: Draft202012Validator = field(repr=False)


def make(kind: str, root: Node) -> Schema:
    """Make a schema from parsed JSON; KeyError when a local reference leads nowhere."""
    whole = _inlined(root, root)
    return Schema(kind, whole, Draft202012Validator(whole))


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
