"""Owns the step from a document to its resolved value: structure, formats, canonical sets, defaults; no comparing."""

from __future__ import annotations

import difflib
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from reconciler.core import formats
from reconciler.core.load import Document, Problem, join
from reconciler.core.problem import Problems
from reconciler.core.sets import set_function

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from jsonschema import ValidationError

    from reconciler.core.load import Position, Tree
    from reconciler.core.schema import Node, Schema


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """One valid document of any kind, with its defaults filled in.

    In `value` sizes are bytes, durations seconds, times Unix seconds, and sets are canonical (sorted, nothing that
    another element covers). `positions` are those of what is written; a default has none.
    """

    file: str
    kind: str
    value: dict[str, Tree]
    positions: Mapping[str, Position] = field(repr=False)

    def problem(self, pointer: str, message: str) -> Problem:
        """Make a problem at what is written at `pointer`, or the nearest thing around it."""
        around = pointer
        while around and around not in self.positions:
            around = around.rpartition("/")[0]
        return Problem(self.file, *self.positions.get(around, (1, 1)), pointer, message)


def resolve(document: Document, schema: Schema) -> Resolved | tuple[Problem, ...]:
    """Check one document against its schema and fill in what it leaves out; else all problems, sorted.

    `null` is the same as leaving a key out, unless the schema's type has null.
    """
    value = _without_nulls(document.value, schema.root)
    problems = Problems()
    sound = schema.fits(value)
    if not sound:
        # A file of another kind or version is wrong in everything; only that is worth saying.
        problems.take(_another_kind(document, value, schema.root))
        if problems:
            return problems.sorted()
        # Errors are made one by one, as they are asked for: of a file with many only those that are told.
        problems.take(
            problem for error in schema.validator.iter_errors(value) for problem in _structure(document, error)
        )
        if not problems:  # the two validators disagree, and a document passes only where both say so
            return (document.problem("", f"is not of the schema of {schema.kind}; write it as the reference says"),)
    if problems.full:
        problems.leave()
        return problems.sorted()
    resolved = _value(value, schema.root, "", _Into(document, problems, sound))
    if problems:
        return problems.sorted()
    return Resolved(file=document.file, kind=schema.kind, value=resolved, positions=document.positions)


def _another_kind(document: Document, value: dict[str, Tree], root: Node) -> Iterable[Problem]:
    """Say which of the fields that make a document one of its kind has another value; true is not 1 here."""
    for key, node in root.get("properties", {}).items():
        if "const" in node and key in value and (value[key] != node["const"] or isinstance(value[key], bool)):
            yield document.problem(join("", key), f"is not {node['const']}; write {node['const']}")


def default(node: Node) -> Tree:
    """Give the resolved value of something that is not written at all: its default, None where it has none."""
    if "default" in node:
        return _value(node["default"], node, "", None)
    if "properties" in node:
        return _value({}, node, "", None)
    return None


def canonical(node: Node, value: Tree) -> Tree | formats.Bad:
    """Read one value as the leaf `node` would: text of its format becomes what resolved trees hold."""
    name = node.get("x-format")
    if name is None or not isinstance(value, str):
        return value
    return formats.parse(name, value)


@dataclass(frozen=True, slots=True)
class _Into:
    """Where problems go, the document whose positions they carry, and whether its structure is that of the schema."""

    document: Document
    problems: Problems
    sound: bool


def _without_nulls(value: Tree, node: Node) -> Tree:
    """Drop keys whose value is null where the schema does not take null: they are the same as no key.

    What holds no such key is given back as it is.
    """
    if isinstance(value, list):
        items = node.get("items", {})
        if not any(isinstance(item, dict | list) for item in value):
            return value
        return [_without_nulls(item, items) for item in value]
    if not isinstance(value, dict):
        return value
    fields = node.get("properties", {})
    others = node.get("additionalProperties")
    kept = {}
    for key, child in value.items():
        if child is None and key in fields and "null" not in _types(fields[key]):
            continue
        if isinstance(child, dict | list):
            below = fields.get(key, others if isinstance(others, dict) else None)
            kept[key] = child if below is None else _without_nulls(child, below)
        else:
            kept[key] = child
    return kept


def _types(node: Node | None) -> tuple[str, ...]:
    wanted = (node or {}).get("type", ())
    return (wanted,) if isinstance(wanted, str) else tuple(wanted)


def _structure(document: Document, error: ValidationError) -> Iterable[Problem]:
    """Turn one finding of the schema's structure into problems that say what to write."""
    pointer = ""
    for token in error.absolute_path:
        pointer = join(pointer, token)
    wanted: Any = error.validator_value
    instance: Any = error.instance
    match error.validator:
        case "additionalProperties":
            known = sorted(error.schema.get("properties", {})) if isinstance(error.schema, dict) else []
            for key in instance:
                if key not in known:
                    near = difflib.get_close_matches(key, known, n=1)
                    advice = f"write {near[0]}" if near else f"remove it; the fields are {', '.join(known)}"
                    yield document.problem(join(pointer, key), f"is not a field here; {advice}", on_key=True)
        case "required":
            for key in wanted:
                if key not in instance:
                    yield document.problem(join(pointer, key), "is missing; write it")
        case "type":
            yield document.problem(pointer, _wrong_type(document, pointer, instance, error.schema))
        case "enum":
            yield document.problem(pointer, f"is none of the choices; write one of {', '.join(map(str, wanted))}")
        case str(bound) if bound in _BOUNDS:
            yield document.problem(pointer, _BOUNDS[bound].format(wanted))
        case _:
            yield document.problem(pointer, error.message)


_BOUNDS: Mapping[str, str] = {
    "minimum": "is too small; the least is {}",
    "minLength": "is too short; the least length is {}",
    "minItems": "has too few items; the least number is {}",
    "maximum": "is too large; the most is {}",
    "maxLength": "is too long; the most characters are {}",
    "maxItems": "has too many items; the most are {}",
}
_TYPE_NAMES = {
    "object": "a map",
    "array": "a list",
    "string": "text",
    "integer": "a whole number",
    "number": "a number",
    "boolean": "true or false",
    "null": "null",
}


def _wrong_type(document: Document, pointer: str, value: Tree, schema: Any) -> str:
    wanted = _types(schema)
    written = document.written.get(pointer)
    if "string" in wanted and written is not None:
        return f'is not text; quote it: "{written}"'
    if isinstance(value, str) and not {"array", "object"} & set(wanted):
        return f"is text; write {' or '.join(_TYPE_NAMES[name] for name in wanted)} without quotes"
    return f"has the wrong type; write {' or '.join(_TYPE_NAMES[name] for name in wanted)}"


def _value(value: Tree, node: Node, pointer: str, into: _Into | None) -> Tree:
    """Resolve one value that has the structure of `node`. `into` is None for defaults, which the schema vouches for."""
    if isinstance(value, dict):
        return _map(value, node, pointer, into)
    if isinstance(value, list):
        return _list(value, node, pointer, into)
    if isinstance(value, str):
        return _text(value, node, pointer, into) if "x-format" in node else sys.intern(value)
    if isinstance(value, float) and value.is_integer():
        return int(value)  # 1.0 and 1 are one number (JSON Schema 2020-12, 4.2.3), and one canonical form
    return value


def _map(value: dict[str, Tree], node: Node, pointer: str, into: _Into | None) -> dict[str, Tree]:
    fields: Mapping[str, Node] = node.get("properties", {})
    resolved: dict[str, Tree] = {}
    for key, child in fields.items():
        if key in value:
            resolved[key] = _value(value[key], child, join(pointer, key), into)
        elif "default" in child:
            resolved[key] = default(child)
        elif into is None and key in node.get("required", ()):
            resolved[key] = None
    others = node.get("additionalProperties")
    if isinstance(others, dict):
        for key in sorted(value.keys() - fields.keys()):
            below = join(pointer, key)
            if into is not None and "x-keys" in node and not into.problems.full:
                name = formats.parse(node["x-keys"], key)
                if isinstance(name, formats.Bad):
                    into.problems.add(into.document.problem(below, name.message, on_key=True))
            resolved[key] = _value(value[key], others, below, into)
    return resolved


def _list(value: list[Tree], node: Node, pointer: str, into: _Into | None) -> list[Tree]:
    items = node.get("items", {})
    resolved = [_value(item, items, join(pointer, index), into) for index, item in enumerate(value)]
    if into is not None and (into.problems or not into.sound):
        return resolved  # what is not an element has no canonical form
    function = set_function(node.get("x-loosens"))
    return resolved if function is None else function.canonical(resolved)


def _text(value: str, node: Node, pointer: str, into: _Into | None) -> Tree:
    name = node["x-format"]
    if into is not None and into.problems.full:
        into.problems.leave()
        return None
    parsed = formats.parse(name, value)
    if isinstance(parsed, formats.Bad):
        if into is None:
            raise ValueError(f"the schema's default {value!r} is not of its format {name}: {parsed.message}")
        into.problems.add(into.document.problem(pointer, parsed.message))
        return None
    if into is not None and (advice := out_of_bounds(node, parsed)):
        into.problems.add(into.document.problem(pointer, advice))
    return parsed


def out_of_bounds(node: Node, value: Tree) -> str | None:
    """Say why a resolved number is less or more than the leaf `node` takes; None when it is neither, or no number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    name = node.get("x-format")
    for keyword, small in (("minimum", True), ("maximum", False)):
        written = node.get(keyword if name is None else f"x-{keyword}")
        bound = written if name is None or written is None else formats.parse(name, written)
        if isinstance(bound, int | float) and (value < bound if small else value > bound):
            return f"is too small; the least is {written}" if small else f"is too large; the most is {written}"
    return None
