"""The strict loader: what it reads, what it refuses, where it says that something is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from reconciler.core.load import Bounds, Document, Problem, _typed, join, load, split
from reconciler.core.resolve import resolve
from reconciler.core.schema import load_schema

DATA = Path(__file__).parent.parent / "data" / "entries.yaml"
CASES = yaml.load(DATA.read_text("utf-8"), Loader=yaml.SafeLoader)  # noqa: TID251 — our own table


def problems(data: str | bytes, **bounds: int) -> tuple[Problem, ...]:
    found = load("a.yaml", data.encode() if isinstance(data, str) else data, bounds=Bounds(**bounds))
    assert not isinstance(found, Document), found.value
    return found


def value(data: str) -> dict[str, Any]:
    found = load("a.yaml", data.encode())
    assert isinstance(found, Document), found
    return found.value


def test_json_scalars_are_typed_and_everything_else_is_text() -> None:
    text = "a: true\nb: null\nc: -12\nd: 1.5e3\ne: '1'\nf: word\ng: 1.2.3\nh: |\n  two\n  lines\ni: a:b\nj: 1e3\n"
    assert value(text) == {
        "a": True,
        "b": None,
        "c": -12,
        "d": 1500.0,
        "e": "1",
        "f": "word",
        "g": "1.2.3",
        "h": "two\nlines\n",
        "i": "a:b",
        "j": 1000.0,
    }


QUOTE_IT = {
    "a boolean of YAML 1.1": ("a: no", 1, 4),
    "another boolean of YAML 1.1": ("a: on", 1, 4),
    "a boolean in capitals": ("a: True", 1, 4),
    "the one-letter boolean": ("a: y", 1, 4),
    "a sexagesimal number": ("a: 22:22", 1, 4),
    "an octal number": ("a: 0755", 1, 4),
    "a number with underscores": ("a: 1_000", 1, 4),
    "a hexadecimal number": ("a: 0x1F", 1, 4),
    "a date": ("a: 2027-02-28", 1, 4),
    "a time": ("a: 2027-02-28T00:00:00Z", 1, 4),
    "a tilde": ("a: ~", 1, 4),
    "a null in capitals": ("a: Null", 1, 4),
    "nothing at all": ("a:\nb: 1", 1, 3),
    "not a number": ("a: .nan", 1, 4),
    "infinity": ("a: -.inf", 1, 4),
    "a float without a leading digit": ("a: .5", 1, 4),
    "a number with a plus sign": ("a: +1", 1, 4),
    "a key that is a boolean": ("on: 1", 1, 1),
    "a key that is a number": ("1: a", 1, 1),
    "an unquoted wildcard": ("allow:\n  - *.example.com\n", 2, 5),
    "a wildcard in a flow list": ("allow: [a.com, *.example.com, b.com]\n", 1, 16),
    "a value that begins with an at sign": ("a: @b", 1, 4),
    "a value that YAML takes for an anchor": ("a: &b c", 1, 4),
}


@pytest.mark.parametrize(("text", "line", "column"), QUOTE_IT.values(), ids=QUOTE_IT)
def test_what_yaml_would_take_for_something_else_has_a_position_and_says_quote_it(
    text: str, line: int, column: int
) -> None:
    (found, *_) = problems(text)
    assert (found.line, found.column) == (line, column)
    assert "quote it" in found.message


def test_the_unquoted_wildcard_is_told_with_its_quotes() -> None:
    assert 'quote it: "*.example.com"' in problems("allow:\n  - *.example.com\n")[0].message


REFUSED = {
    "a duplicate key": ("a: 1\nb: 2\na: 3\n", "/a", "duplicate of the key in line 1", 3),
    "a duplicate key, deep": ("a:\n  b: 1\n  b: 1\n", "/a/b", "duplicate", 3),
    "an anchor": ("a: &x 1\n", "/a", "anchor", 1),
    "an alias": ("a: &x 1\nb: *x\n", "/b", "alias", 2),
    "a merge key": ("a: 1\n<<: {b: 2}\n", "/<<", "quote it", 2),
    "a tag": ("a: !!str 1\n", "/a", "tag", 1),
    "a local tag": ("a: !x 1\n", "/a", "tag", 1),
    "a directive": ("%YAML 1.1\n---\na: 1\n", "", "directive", 1),
    "a second document": ("a: 1\n---\nb: 2\n", "", "second document", 2),
    "a list at the top": ("- 1\n", "", "not a map", 1),
    "text at the top": ("word\n", "", "not a map", 1),
    "an empty file": ("", "", "not a map", 1),
    "only a comment": ("# a\n", "", "not a map", 1),
    "a list as a key": ("? [a]\n: 1\n", "", "not a string", 1),
    "a map as a key": ("{a: 1}: 2\n", "", "not a string", 1),
    "a number that is not finite": ("a: 1e999\n", "/a", "not finite", 1),
    "a number that is too long": (f"a: {'9' * 50}\n", "/a", "characters", 1),
    "a tab": ("a:\n\t- b\n", "", "U+0009", 2),
    "a carriage return": ("a: 1\r\nb: 2\r\n", "", "line feed only", 1),
    "a byte order mark": ("\ufeffa: 1\n", "", "byte order mark", 1),
    "a zero-width space": ("a: b\u200bc\n", "", "U+200B", 1),
    "a right-to-left override": ("a: b\u202ec\n", "", "U+202E", 1),
    "a soft hyphen": ("a: ex\u00adample.com\n", "", "U+00AD", 1),
    "a line separator": ("a: b\u2028c\n", "", "U+2028", 1),
    "a next line character": ("a: b\u0085c\n", "", "U+0085", 1),
    "a null byte": ("a: b\0c\n", "", "U+0000", 1),
    "an escape in a quoted value": ('a: "b\\0c"\n', "/a", "U+0000", 1),
    "an escaped override": ('a: "b\\u202ec"\n', "/a", "U+202E", 1),
    "a half of a surrogate pair": ('a: "\\ud800"\n', "", "", 1),
    "an unclosed list": ("a: [1,\n", "", "not YAML here", 2),
    "wrong indentation": ("a: 1\n  b: 2\n", "", "not YAML here", 2),
}


@pytest.mark.parametrize(("text", "where", "message", "line"), REFUSED.values(), ids=REFUSED)
def test_what_is_not_strict_is_refused_where_it_is(text: str, where: str, message: str, line: int) -> None:
    found = problems(text)
    assert any(one.where == where and message in one.message and one.line == line for one in found), found


def test_bytes_that_are_not_utf_8_are_refused_where_they_are() -> None:
    (found,) = problems(b"a: 1\nb: \xff\n")
    assert (found.line, found.column) == (2, 4)


def test_a_file_that_is_too_large_names_the_setting() -> None:
    (found,) = problems("a: 1\n" * 10, bytes=20)
    assert "max_bytes" in found.message


def test_too_many_nodes_and_too_deep_nesting_are_refused() -> None:
    assert "nodes" in problems("a: [" + "1," * 30 + "]\n", nodes=20)[0].message
    assert "deeper than 3" in problems("a: [[[[1]]]]\n", depth=3)[0].message
    assert value("a: [[[1]]]\n") == {"a": [[[1]]]}


def test_no_depth_of_input_reaches_pythons_stack() -> None:
    deep = "a:\n" + "".join(" " * level + "-\n" for level in range(1, 400))
    assert any("deeper than 16" in one.message for one in problems(deep))
    assert problems("a: " + "[" * 100_000)


def test_all_problems_are_listed_and_sorted() -> None:
    found = problems("a: no\nb: 0755\nc: &x 1\na: 2\n")
    assert [one.line for one in found] == [1, 2, 3, 4]
    assert list(found) == sorted(found)


def test_a_problem_reads_as_file_line_column_pointer_message() -> None:
    assert str(Problem("agents/a.yaml", 3, 7, "/allow/0", "is bad")) == "agents/a.yaml:3:7: /allow/0: is bad"


def test_positions_are_those_of_values_and_keys() -> None:
    found = load("a.yaml", b"version: 1\nlimits:\n  memory: 5\nlist: [1, x]\n")
    assert isinstance(found, Document)
    assert found.positions["/limits/memory"] == (3, 11)
    assert found.keys["/limits/memory"] == (3, 3)
    assert found.positions["/list/1"] == (4, 11)
    assert found.at("/limits/pids/x") == (3, 3)


@pytest.mark.parametrize("text", CASES["yaml_refused"])
def test_each_yaml_trap_is_refused_with_a_position_before_it_can_be_a_policy(text: str) -> None:
    data = f"version: 1\nkind: agent\nname: a\nimage: host\nminimum_isolation: namespace\n{text}"
    document = load("agents/a.yaml", data.encode())
    found = resolve(document, load_schema("agent")) if isinstance(document, Document) else document
    assert isinstance(found, tuple)
    assert all(one.line > 5 for one in found)
    assert any("quote it" in one.message or "duplicate" in one.message for one in found)


JSON = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(-(10**30), 10**30), st.text(st.characters(codec="ascii"), max_size=5)
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text("abc/~", max_size=3), inner, max_size=3)
    ),
    max_leaves=10,
)


@given(st.dictionaries(st.sampled_from(("a", "b/c", "d~e", "f")), JSON, min_size=1))
def test_json_without_control_characters_is_read_as_json_reads_it(tree: dict[str, Any]) -> None:
    text = json.dumps(tree)
    found = load("a.yaml", text.encode())
    if isinstance(found, Document):
        assert found.value == tree
    else:
        assert "invisible" in found[0].message


@given(st.binary(max_size=200))
def test_no_bytes_make_the_loader_raise(data: bytes) -> None:
    found = load("a.yaml", data)
    assert isinstance(found, Document) or (found and all(one.line >= 1 and one.column >= 1 for one in found))


@given(st.text("ab: -[]{},&*!|>'\"#%@`?~\n01.", max_size=60))
def test_no_text_of_yaml_signs_makes_the_loader_raise(text: str) -> None:
    found = load("a.yaml", text.encode())
    assert isinstance(found, Document) or found == tuple(sorted(found))


@given(st.lists(st.text("ab/~0", max_size=4), max_size=4))
def test_pointers_join_and_split_back(tokens: list[str]) -> None:
    pointer = ""
    for token in tokens:
        pointer = join(pointer, token)
    assert list(split(pointer)) == tokens


MANY = {
    "invisible characters": ("a: " + "\x01" * 5000, 5000),
    "invisible characters on lines of their own": ("\t\n" * 5000, 5000),
    "words that YAML takes for booleans": ("a:\n" + "- no\n" * 5000, 5000),
    "duplicate keys": ("a: 1\n" * 5001, 5000),
    "one more than are told": ("a:\n" + "- no\n" * 101, 101),
}


@pytest.mark.parametrize(("text", "count"), MANY.values(), ids=MANY)
def test_of_very_many_problems_the_first_are_told_and_the_others_counted(text: str, count: int) -> None:
    found = problems(text)
    assert len(found) == 101
    assert found[-1].message == f"… and {count - 100} more problems; mend these first"
    assert list(found[:-1]) == sorted(found[:-1])
    assert list(found) == sorted(found, key=lambda problem: (problem.line, problem.column))


def test_as_many_problems_as_are_told_need_no_count() -> None:
    found = problems("a:\n" + "- no\n" * 100)
    assert len(found) == 100
    assert "more problems" not in found[-1].message


def test_a_message_is_cut_where_the_file_would_fill_it() -> None:
    (found,) = problems(f"a: {'1_' * 50_000}1\n")
    assert len(found.message) < 1100


LONG_KEYS = {
    "one that is long": f'? "{"k" * 100_000}"\n: [{", ".join(["1"] * 1000)}]\n',
    "many in each other": "".join(f"{' ' * n}{'k' * 200}{n}:\n" for n in range(10)) + " " * 10 + "a: 1\n",
}


@pytest.mark.parametrize("text", LONG_KEYS.values(), ids=LONG_KEYS)
def test_keys_are_short_for_every_node_below_has_them_in_its_pointer(text: str) -> None:
    found = problems(text)
    assert "shorten it" in found[0].message
    assert all(len(problem.where) < 600 for problem in found)
    assert len(found[0].message) < 200


def test_a_long_text_is_not_kept_when_its_file_is_gone() -> None:
    _typed.cache_clear()
    problems(f"a: {'1_' * 50_000}1\nb: 1_000\n")
    assert _typed.cache_info().currsize == len(("a", "b", "1_000"))
