"""Owns the way from bytes to one document with positions, or to all problems of its form; knows no schema or kind."""

from __future__ import annotations

import functools
import math
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import yaml
from yaml.resolver import Resolver

from reconciler.core.problem import Problem, Problems
from reconciler.core.text import BAD_SCALAR, text_of

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Bounds", "Document", "Position", "Problem", "Tree", "join", "load", "split"]

Tree: TypeAlias = Any
"""A JSON value: dict with string keys, list, str, int, float, bool, None. Any, because JSON is recursive."""

Position: TypeAlias = tuple[int, int]
"""Line and column, both from 1; columns count characters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """How large one document may be; settings of the host. Sizes in bytes, depth in nested maps and lists."""

    bytes: int = 256 * 1024
    depth: int = 16
    nodes: int = 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """One well-formed document. `value` is a map; `written` has the text of scalars other than strings, by pointer."""

    file: str
    value: dict[str, Tree]
    positions: Mapping[str, Position] = field(repr=False)
    keys: Mapping[str, Position] = field(repr=False)
    """Where a map's key is written, by the pointer of its value."""
    written: Mapping[str, str] = field(default_factory=dict, repr=False)

    def at(self, pointer: str) -> Position:
        """Say where the value at `pointer` is, or the nearest thing around it that is written down."""
        while pointer not in self.positions and pointer:
            pointer = pointer.rpartition("/")[0]
        return self.positions.get(pointer, (1, 1))

    def problem(self, pointer: str, message: str, *, on_key: bool = False) -> Problem:
        """Make a problem at `pointer`; `on_key` points at the key instead of its value."""
        line, column = self.keys.get(pointer, self.at(pointer)) if on_key else self.at(pointer)
        return Problem(self.file, line, column, pointer, message)


def join(pointer: str, token: str | int) -> str:
    """Append one token to a JSON pointer (RFC 6901)."""
    if isinstance(token, str) and ("~" in token or "/" in token):
        token = token.replace("~", "~0").replace("/", "~1")
    return f"{pointer}/{token}"


def split(pointer: str) -> tuple[str, ...]:
    """Take a JSON pointer apart; the empty pointer has no tokens (RFC 6901)."""
    return tuple(token.replace("~1", "/").replace("~0", "~") for token in pointer.split("/")[1:])


_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_WORDS: Mapping[str, bool | None] = {"true": True, "false": False, "null": None}
_YAML_1_1_BOOLEANS = frozenset({"y", "Y", "n", "N"})  # in the 1.1 specification, not in PyYAML's table
_MAX_NAME = 512  # characters of a key with all keys around it: each node below has them in its pointer
_MAX_REMEMBERED = 256  # characters of a text of which it is remembered what YAML takes it for
_MAX_NUMBER = 40  # characters; longer ones are no quantity, and int() is quadratic


def load(file: str, data: bytes, *, bounds: Bounds | None = None) -> Document | tuple[Problem, ...]:
    """Read one strict YAML document.

    `file` is only a name for problems. Answers every problem that can be found (the first of them and a count, where
    there are very many), sorted, else the document. Strict is:
    UTF-8 without BOM or invisible characters, one document, a map at the top, string keys, no duplicate keys, no
    anchors, aliases, merge keys, tags or directives, only JSON's scalars typed. Never raises for any bytes.
    """
    bounds = bounds or Bounds()
    text = text_of(file, data, bounds.bytes)
    if isinstance(text, tuple):
        return text
    reader = _Reader(file, bounds)
    try:
        for event in yaml.parse(text, Loader=yaml.CSafeLoader):
            if not reader.take(event):
                break
    except yaml.MarkedYAMLError as error:
        reader.problems.add(_syntax(file, text, error))
    except yaml.YAMLError:
        reader.problems.add(Problem(file, 1, 1, "", "is not YAML; write one YAML document"))
    return reader.finish()


def _syntax(file: str, text: str, error: yaml.MarkedYAMLError) -> Problem:
    mark = error.context_mark if error.context == "while scanning an alias" else error.problem_mark
    line, column = (mark.line + 1, mark.column + 1) if mark is not None else (1, 1)
    lines = text.split("\n")
    rest = lines[line - 1][column - 1 :] if line <= len(lines) else ""
    if rest.startswith("*"):
        shown = re.split(r"[\s,\]}]", rest, maxsplit=1)[0]
        return Problem(file, line, column, "", f'is an alias in YAML; quote it: "{shown}"')
    if rest[:1] in ("@", "`", "%", "&", "!"):
        return Problem(file, line, column, "", f"cannot begin with {rest[:1]!r} in YAML; quote it")
    return Problem(file, line, column, "", f"is not YAML here ({error.problem or 'unreadable'}); mend it or quote it")


@dataclass(slots=True)
class _Open:
    """A map or list that is being read. `key` waits for its value; `fresh` is False when the key was seen before."""

    value: dict[str, Tree] | list[Tree]
    pointer: str
    key: str | None = None
    fresh: bool = True


class _Reader:
    """Builds a value from events with its own stack, so that no depth of input reaches Python's."""

    __slots__ = ("_bounds", "_file", "_keys", "_nodes", "_positions", "_stack", "_top", "_written", "problems")

    def __init__(self, file: str, bounds: Bounds) -> None:
        self.problems = Problems()
        self._file = file
        self._bounds = bounds
        self._stack: list[_Open] = []
        self._top: list[Tree] = []
        self._positions: dict[str, Position] = {}
        self._keys: dict[str, Position] = {}
        self._written: dict[str, str] = {}
        self._nodes = 0

    def take(self, event: yaml.Event) -> bool:
        """Take one event; False when reading on makes no sense."""
        # In the order of how many there are: this runs for every scalar of every document.
        if isinstance(event, yaml.NodeEvent):
            return self._node(event)
        if isinstance(event, yaml.CollectionEndEvent):
            self._stack.pop()
            return True
        if isinstance(event, yaml.DocumentStartEvent):
            return self._document(event)
        return True

    def finish(self) -> Document | tuple[Problem, ...]:
        """Answer the document, or all problems, sorted."""
        if not self.problems and (not self._top or not isinstance(self._top[0], dict)):
            self.problems.add(Problem(self._file, 1, 1, "", "is not a map; begin with `version: 1` and `kind:`"))
        if self.problems:
            return self.problems.sorted()
        return Document(
            file=self._file, value=self._top[0], positions=self._positions, keys=self._keys, written=self._written
        )

    def _document(self, event: yaml.DocumentStartEvent) -> bool:
        at = _position(event)
        if self._top:
            self._problem(at, "", "holds a second document; write one document in each file")
            return False
        if event.version is not None or event.tags:
            self._problem(at, "", "begins with a YAML directive; remove it")
        return True

    def _node(self, event: yaml.NodeEvent) -> bool:
        mark = event.start_mark
        at = (1, 1) if mark is None else (mark.line + 1, mark.column + 1)
        self._nodes += 1
        if self._nodes > self._bounds.nodes:
            self._problem(at, "", f"has more than {self._bounds.nodes} nodes; split it")
            return False
        parent = self._stack[-1] if self._stack else None
        if parent is not None and parent.key is None and isinstance(parent.value, dict):
            return self._key(parent, event, at)
        pointer = _child(parent)
        if pointer not in self._positions:
            self._positions[pointer] = at
        self._unmarked(event, at, pointer)
        if isinstance(event, yaml.ScalarEvent):
            self._place(parent, self._scalar(event, at, pointer))
            return True
        value: Tree = None
        if isinstance(event, yaml.CollectionStartEvent):
            value = {} if isinstance(event, yaml.MappingStartEvent) else []
            if len(self._stack) >= self._bounds.depth:
                self._problem(at, pointer, f"is nested deeper than {self._bounds.depth} levels; flatten it")
                return False
            self._stack.append(_Open(value, pointer))
        self._place(parent, value)
        return True

    def _key(self, parent: _Open, event: yaml.NodeEvent, at: Position) -> bool:
        if not isinstance(event, yaml.ScalarEvent):
            self._unmarked(event, at, parent.pointer)
            self._problem(at, parent.pointer, "has a key that is not a string; write a plain name")
            return False
        pointer = join(parent.pointer, event.value)
        if len(pointer) > _MAX_NAME:
            advice = f"at most {_MAX_NAME} are read; shorten it"
            self._problem(at, parent.pointer, f"has a key of {len(pointer)} characters with those around it; {advice}")
            parent.key, parent.fresh = event.value[:1], False  # its value is read on for problems, and goes nowhere
            return True
        parent.key = event.value
        self._unmarked(event, at, pointer)
        self._scalar(event, at, pointer, is_key=True)
        parent.fresh = event.value not in parent.value
        if parent.fresh:
            self._keys[pointer] = at
        else:
            line, _ = self._keys[pointer]
            self._problem(at, pointer, f"is a duplicate of the key in line {line}; keep one of them")
        return True

    def _place(self, parent: _Open | None, value: Tree) -> None:
        if parent is None:
            self._top.append(value)
        elif isinstance(parent.value, list):
            parent.value.append(value)
        else:
            if parent.key is not None and parent.fresh:
                parent.value[parent.key] = value
            parent.key = None

    def _unmarked(self, event: yaml.NodeEvent, at: Position, pointer: str) -> None:
        """Refuse what makes one place of the text mean another: anchors, aliases, tags."""
        if isinstance(event, yaml.AliasEvent):
            self._problem(at, pointer, f'is an alias in YAML; quote it: "*{event.anchor}"')
            return
        if event.anchor is not None:
            self._problem(at, pointer, "has an anchor; write the value out, or quote it if it begins with '&'")
        if getattr(event, "tag", None) is not None:
            self._problem(at, pointer, "has a tag; remove it, or quote the value if it begins with '!'")

    def _scalar(self, event: yaml.ScalarEvent, at: Position, pointer: str, *, is_key: bool = False) -> Tree:
        text = event.value
        if event.style:  # quoted or a block; the C parser's plain style is an empty string
            # Only escapes can write what the text of the file does not show, and only double quotes have them.
            if event.style == '"' and (found := BAD_SCALAR.search(text)):
                self._problem(at, pointer, f"holds the invisible character U+{ord(found[0]):04X}; remove it")
            return text
        what = "key" if is_key else "value"
        if text in _WORDS or _NUMBER.fullmatch(text):
            if is_key:
                self._problem(at, pointer, f'is a key that is not a string; quote it: "{text}"')
                return text
            self._written[pointer] = text
            return _WORDS[text] if text in _WORDS else self._number(text, at, pointer)
        if not text:
            self._problem(at, pointer, f'has an empty {what}; write null, or quote it: ""')
        elif text in _YAML_1_1_BOOLEANS or _typed_by_yaml_1_1(text):
            self._problem(at, pointer, f'is a {what} that YAML takes for something else than text; quote it: "{text}"')
        return text

    def _number(self, text: str, at: Position, pointer: str) -> int | float:
        if len(text) > _MAX_NUMBER:
            self._problem(at, pointer, f"is a number of {len(text)} characters; write a shorter one or quote it")
            return 0
        if text.lstrip("-").isdigit():
            return int(text)
        number = float(text)
        if not math.isfinite(number):
            self._problem(at, pointer, "is a number that is not finite; write a smaller one or quote it")
        return number

    def _problem(self, at: Position, pointer: str, message: str) -> None:
        self.problems.add(Problem(self._file, at[0], at[1], pointer, message))


def _position(event: yaml.Event) -> Position:
    mark = event.start_mark
    return (mark.line + 1, mark.column + 1) if mark is not None else (1, 1)


def _child(parent: _Open | None) -> str:
    if parent is None:
        return ""
    if isinstance(parent.value, list):
        return join(parent.pointer, len(parent.value))
    return join(parent.pointer, parent.key or "")


def _typed_by_yaml_1_1(text: str) -> bool:
    """Say whether PyYAML's table of YAML 1.1 takes this plain scalar for something else than a string."""
    return (_typed if len(text) <= _MAX_REMEMBERED else _typed.__wrapped__)(text)


@functools.lru_cache(maxsize=4096)
def _typed(text: str) -> bool:
    table = Resolver.yaml_implicit_resolvers
    for _, pattern in table.get(text[0], ()):
        if pattern.match(text):
            return True
    return any(pattern.match(text) for _, pattern in table.get(None, ()))
