"""From a document to its resolved value: structure, formats, defaults, canonical sets, and what is told of problems."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from hypothesis import given

from proxy.entry import BadEntry, Entry, covers
from proxy.entry import parse as parse_syntax
from reconciler.core import formats
from reconciler.core.hostnames import anybody_can_register_below, parse_deny_entry, parse_entry, unicode_form
from reconciler.core.load import Document, Problem, load
from reconciler.core.resolve import Resolved, resolve
from reconciler.core.schema import load_schema
from reconciler.core.sets import ALLOWED
from tests.strategies import IMAGE, agents, resolved

if TYPE_CHECKING:
    from collections.abc import Iterator

    from jsonschema import ValidationError

DATA = Path(__file__).parent.parent / "data" / "entries.yaml"
CASES = yaml.load(DATA.read_text("utf-8"), Loader=yaml.SafeLoader)  # noqa: TID251 — our own table
AGENT = {"version": 1, "kind": "agent", "name": "a", "image": IMAGE}


def problems(kind: str, value: dict[str, Any]) -> dict[str, str]:
    document = load(f"{kind}.yaml", json.dumps(value).encode())
    assert isinstance(document, Document), document
    found = resolve(document, load_schema(kind))
    assert isinstance(found, tuple), found
    return {one.where: one.message for one in found}


@pytest.mark.parametrize("case", CASES["accept"], ids=lambda case: case["in"])
def test_an_accepted_entry_has_its_canonical_form(case: dict[str, str]) -> None:
    assert str(parse_entry(case["in"])) == case["canonical"]
    assert formats.parse("entry", case["in"]) == case["canonical"]
    assert unicode_form(case["canonical"]) == case.get("unicode")


@pytest.mark.parametrize("text", CASES["two"])
def test_a_wildcard_on_a_private_suffix_is_accepted_and_costs_two_approvals(text: str) -> None:
    entry = parse_entry(text)
    assert isinstance(entry, Entry)
    assert anybody_can_register_below(entry)
    assert ALLOWED.elements.approvals(text) == 2


@pytest.mark.parametrize("case", CASES["refuse"], ids=lambda case: repr(case["in"]))
def test_a_refused_entry_has_its_code_and_says_what_to_write(case: dict[str, str]) -> None:
    found = parse_entry(case["in"])
    assert isinstance(found, BadEntry), found
    assert found.code == case["code"]
    assert case.get("says", "") in found.message


@pytest.mark.parametrize("case", CASES["cover"], ids=lambda case: f"{case['a']} and {case['b']}")
def test_cover_is_what_the_table_says_in_the_proxy_and_in_the_order(case: dict[str, Any]) -> None:
    entries = [entry for text in case["a"] if isinstance(entry := parse_syntax(text), Entry)]
    target = parse_syntax(case["b"])
    assert isinstance(target, Entry)
    assert covers(entries, target) is case["covers"]
    assert ALLOWED.within([case["b"]], case["a"]) is case["covers"]


SUFFIXES = {
    "a country's second level": ("*.co.uk", True, False),
    "below a country's second level": ("*.example.co.uk", False, False),
    "a rule with a wildcard": ("*.foo.ck", True, False),
    "an exception to it": ("*.www.ck", False, False),
    "above a public suffix": ("*.uk", True, False),
    "a top level nobody has listed": ("*.qqqq", True, False),
    "a private suffix": ("*.github.io", False, True),
    "below a private suffix": ("*.someone.github.io", False, False),
    "above a private suffix": ("*.amazonaws.com", False, True),
    "a private rule with a wildcard": ("*.eu-west-1.compute.amazonaws.com", False, True),
    "a suffix in another script": ("*.xn--p1ai", True, False),
}


@pytest.mark.parametrize(("text", "public", "private"), SUFFIXES.values(), ids=SUFFIXES)
def test_wildcards_on_suffixes(text: str, *, public: bool, private: bool) -> None:
    found = parse_entry(text)
    assert isinstance(found, BadEntry) is public
    if isinstance(found, Entry):
        assert anybody_can_register_below(found) is private
    assert isinstance(parse_deny_entry(text), Entry), "a deny list takes every suffix"


def test_a_host_that_is_itself_a_suffix_costs_nothing_more() -> None:
    assert ALLOWED.elements.approvals("github.io") == 1


def test_defaults_are_filled_in_and_units_are_read() -> None:
    found = resolved("agent", {**AGENT, "limits": {"memory": "1536MiB", "timeout": "2h"}})
    assert found["limits"] == {
        "cpus": 1,
        "memory": 1536 * 2**20,
        "pids": 256,
        "timeout": 7200,
        "output": 64 * 1024,
        "connections": 256,
    }
    assert found["minimum_isolation"] == "container"
    assert found["env"] == {"allow": []}
    assert found["user"] == 65534


def test_null_is_the_same_as_leaving_a_field_out() -> None:
    nulls = {**AGENT, "allow": None, "limits": {"memory": None}, "secrets": None, "env": None}
    assert resolved("agent", nulls) == resolved("agent", AGENT)


def test_null_cannot_stand_for_a_required_field() -> None:
    assert problems("agent", {**AGENT, "image": None}) == {"/image": "is missing; write it"}


def test_two_ways_to_write_the_same_are_the_same() -> None:
    one = {**AGENT, "allow": ["A.COM.", "a.com:80", "x.b.com", "*.b.com"], "limits": {"timeout": "600s"}}
    other = {**AGENT, "allow": ["*.b.com", "a.com"], "limits": {"timeout": "10m"}}
    assert resolved("agent", one) == resolved("agent", other)


ADVICE = {
    "a field that does not exist": ({"alow": []}, "/alow", "is not a field here; write allow"),
    "text where a number belongs": ({"limits": {"pids": "12"}}, "/limits/pids", "without quotes"),
    "a number where text belongs": ({"allow": [1.10]}, "/allow/0", 'quote it: "1.1"'),
    "a boolean where a number belongs": ({"user": True}, "/user", "write a whole number"),
    "a choice that does not exist": ({"minimum_isolation": "vm"}, "/minimum_isolation", "microvm, gvisor"),
    "the root user": ({"user": 0}, "/user", "the least is 1"),
    "a size without a unit": ({"limits": {"memory": "512"}}, "/limits/memory", "such as 512MiB"),
    "a size with a decimal unit": ({"limits": {"memory": "512MB"}}, "/limits/memory", "such as 512MiB"),
    "a size that is too small": ({"limits": {"memory": "1MiB"}}, "/limits/memory", "the least is 16MiB"),
    "a duration of nothing": ({"limits": {"timeout": "0s"}}, "/limits/timeout", "the least is 1s"),
    "a duration that is too long": ({"limits": {"timeout": "8d"}}, "/limits/timeout", "the most is 7d"),
    "an entry with a newline": ({"allow": ["a.com\n"]}, "/allow/0", "control character"),
    "an image without a digest": ({"image": "registry.example/helper:latest"}, "/image", "by digest"),
    "an image with a newline": ({"image": f"{IMAGE}\n"}, "/image", "by digest"),
    "a loader variable": ({"env": {"allow": ["LD_PRELOAD"]}}, "/env/allow/0", "steers"),
    "a python variable": ({"env": {"allow": ["PYTHONPATH"]}}, "/env/allow/0", "steers"),
    "the path": ({"env": {"allow": ["PATH"]}}, "/env/allow/0", "steers"),
    "a proxy variable in small letters": ({"env": {"allow": ["https_proxy"]}}, "/env/allow/0", "proxy variable"),
    "a secret by the name of a loader variable": (
        {"secrets": {"LD_AUDIT": {"file": "/s"}}},
        "/secrets/LD_AUDIT",
        "steers",
    ),
    "a variable with a dash": ({"env": {"allow": ["A-B"]}}, "/env/allow/0", "variable name"),
    "a secret that is not named by a plain path": (
        {"secrets": {"A": {"file": "/a/../b"}}},
        "/secrets/A/file",
        "absolute path",
    ),
    "a submitter with capitals": ({"submitters": ["Svc"]}, "/submitters/0", "user name"),
}


@pytest.mark.parametrize(("change", "where", "advice"), ADVICE.values(), ids=ADVICE)
def test_a_problem_says_where_and_what_to_write(change: dict[str, Any], where: str, advice: str) -> None:
    found = problems("agent", {**AGENT, **change})
    assert list(found) == [where]
    assert advice in found[where]


def test_all_problems_of_structure_and_of_formats_are_told_at_once() -> None:
    found = problems("agent", {**AGENT, "alow": [], "allow": ["*"], "limits": {"memory": "x", "pids": "y"}})
    assert sorted(found) == ["/allow/0", "/alow", "/limits/memory", "/limits/pids"]


def test_a_document_of_another_kind_is_told_only_that() -> None:
    assert problems("agent", {"version": 1, "kind": "platform", "enabled": True}) == {
        "/kind": "is not agent; write agent"
    }


def test_a_problem_points_at_the_line_that_is_wrong() -> None:
    text = f"version: 1\nkind: agent\nname: a\nimage: {IMAGE}\nallow:\n  - good.com\n  - '*'\n"
    document = load("agents/a.yaml", text.encode())
    assert isinstance(document, Document)
    found = resolve(document, load_schema("agent"))
    assert isinstance(found, tuple)
    (problem,) = found
    assert isinstance(problem, Problem)
    assert (problem.file, problem.line, problem.column, problem.where) == ("agents/a.yaml", 7, 5, "/allow/1")


TIMES = {
    "2027-02-28T00:00:00Z": 1803772800,
    "1970-01-01T00:00:00Z": 0,
    "2027-02-29T00:00:00Z": None,
    "2027-2-28T00:00:00Z": None,
    "2027-02-28T00:00:00": None,
    "2027-02-28T00:00:00+00:00": None,
    "2027-02-28 00:00:00Z": None,
    "2027-02-28": None,
    "2027-02-28T00:00:00Z\n": None,
    "2027-02-28T24:00:00Z": None,
}


@pytest.mark.parametrize(("text", "seconds"), TIMES.items(), ids=[repr(text) for text in TIMES])
def test_a_time_is_written_in_utc_in_one_way(text: str, seconds: int | None) -> None:
    found = formats.parse("timestamp", text)
    assert (found if isinstance(found, int) else None) == seconds
    if seconds is not None:
        assert formats.render("timestamp", seconds) == text


@pytest.mark.parametrize(
    ("name", "good", "canonical"),
    [
        ("size", "1024KiB", "1MiB"),
        ("size", "1536MiB", "1536MiB"),
        ("size", "0B", "0B"),
        ("duration", "90m", "90m"),
        ("duration", "120m", "2h"),
        ("duration", "86400s", "1d"),
    ],
)
def test_a_quantity_has_one_canonical_form(name: str, good: str, canonical: str) -> None:
    value = formats.parse(name, good)
    assert isinstance(value, int)
    assert formats.render(name, value) == canonical
    assert formats.parse(name, canonical) == value


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("address-range", "161.26.1.0/16"),
        ("address-range", "161.26.0.0"),
        ("address-range", "fe80::%eth0/64"),
        ("address-range", "host/8"),
        ("resolver", "192.0.2.1"),
        ("resolver", "2001:db8::1:53"),
        ("resolver", "[192.0.2.1]:53"),
        ("resolver", "dns.example.com:53"),
        ("name", "Helper"),
        ("name", "-a"),
        ("name", "a" * 64),
        ("scope", "**"),
        ("path", "relative"),
        ("path", "/"),
        ("path", "/a//b"),
        ("path", "/a\n"),
        ("document", "agents/"),
        ("document", "agents/a/b"),
        ("document", "host"),
        ("pointer", "allow"),
        ("pointer", "/a~2"),
        ("regex", "("),
        ("audience", ""),
        ("reason-id", "a b"),
        ("expiry", "Never"),
    ],
)
def test_a_text_that_has_not_its_format_is_refused(name: str, text: str) -> None:
    assert isinstance(formats.parse(name, text), formats.Bad)


@pytest.mark.parametrize(
    ("name", "text", "canonical"),
    [
        ("address-range", "2001:DB8::/32", "2001:db8::/32"),
        ("resolver", "[2001:DB8::1]:53", "[2001:db8::1]:53"),
        ("resolver", "192.0.2.1:53", "192.0.2.1:53"),
        ("scope", "*", "*"),
        ("document", "platform", "platform"),
        ("document", "egress/org", "egress/org"),
        ("expiry", "never", "never"),
        ("image", IMAGE, IMAGE),
        ("image", "localhost:5000/a/b_c:v1@sha256:" + "a" * 64, "localhost:5000/a/b_c:v1@sha256:" + "a" * 64),
    ],
)
def test_a_text_that_has_its_format_is_canonical(name: str, text: str, canonical: str) -> None:
    assert formats.parse(name, text) == canonical


def test_an_unknown_format_is_a_broken_schema() -> None:
    with pytest.raises(ValueError, match="no such format"):
        formats.parse("hostname", "x")


@given(agents("one"))
def test_resolving_a_valid_document_twice_gives_the_same(document: dict[str, Any]) -> None:
    assert resolved("agent", document) == resolved("agent", document)
    assert isinstance(Resolved(file="", kind="", value=document, positions={}).problem("/a/b", "x"), Problem)


class _Counting:
    """A validator that counts the errors that it was asked for."""

    def __init__(self) -> None:
        self.inner = load_schema("agent").validator
        self.made = 0

    def iter_errors(self, value: object) -> Iterator[ValidationError]:
        for error in self.inner.iter_errors(value):
            self.made += 1
            yield error


MANY = {
    "entries that are numbers": {"allow": [1] * 5000},
    "entries without a dot": {"allow": [f"a{n}" for n in range(5000)]},
    "variables that steer": {"env": {"allow": [f"LD_{n}" for n in range(5000)]}},
    "unknown fields": {f"a{n}": 1 for n in range(5000)},
    "secrets that are numbers": {"secrets": {f"a{n}": 1 for n in range(5000)}},
}


@pytest.mark.parametrize("fields", MANY.values(), ids=MANY)
def test_once_enough_is_told_of_a_document_no_more_is_looked_for(
    fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed = 0

    def parse(name: str, text: str) -> formats.Value | formats.Bad:
        nonlocal parsed
        parsed += 1
        return original(name, text)

    original = formats.parse
    monkeypatch.setattr(formats, "parse", parse)
    document = load("a.yaml", json.dumps(AGENT | fields).encode())
    assert isinstance(document, Document), document
    counting = _Counting()
    found = resolve(document, dataclasses.replace(load_schema("agent"), validator=counting))  # type: ignore[arg-type]  # as much of one as is used
    assert isinstance(found, tuple)
    assert len(found) == 101
    assert "more problems" in found[-1].message
    assert counting.made <= 101
    assert parsed <= 150


@pytest.mark.parametrize(
    ("fields", "where"),
    [
        pytest.param({"kind": "egress", "alow": 1}, ["/kind"], id="another kind"),
        pytest.param({"version": True}, ["/version"], id="a version that is no number"),
        pytest.param({"version": 2, "kind": "x"}, ["/kind", "/version"], id="another version and kind"),
    ],
)
def test_of_a_document_of_another_kind_or_version_only_that_is_told(fields: dict[str, Any], where: list[str]) -> None:
    assert sorted(problems("agent", AGENT | fields)) == where
