"""The chain: whatever is changed, taken away or put elsewhere is found, and the row is named."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from datetime import UTC, datetime
from types import MappingProxyType

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from reconciler.core.audit import (
    GENESIS,
    MOST_ROW,
    Broken,
    Event,
    EventName,
    Head,
    Verified,
    chain,
    line_of,
    read_row,
    verify,
)
from reconciler.core.cut import canonical, cut
from reconciler.core.schema import load_schema

NOON = datetime(2026, 1, 31, 12, 0, tzinfo=UTC)

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
events = st.builds(
    Event,
    name=st.sampled_from(EventName),
    actor=st.text(min_size=1),
    object=st.text(),
    outcome=st.text(min_size=1),
    code=st.none() | st.text(),
    message=st.text(),
    before=json_values,
    after=json_values,
    weakening=st.booleans(),
    detail=st.none() | st.dictionaries(st.text(), json_values, max_size=3),
)


def chained(*many: Event, start: Head = GENESIS) -> list[bytes]:
    lines, prev = [], start
    for event in many:
        row = chain(prev=prev.hash, seq=prev.seq + 1, time=NOON, event=event)
        prev = Head(prev.seq + 1, str(row["hash"]))
        lines.append(line_of(row))
    return lines


def event(number: int) -> Event:
    return Event(name=EventName.LAUNCH, actor="helper", object=f"run {number}", outcome="launched")


LINES = chained(*(event(number) for number in range(1, 6)))
HEAD = Head(5, str(read_row(LINES[-1])["hash"]))  # type: ignore[index]  # these lines hold


@given(st.lists(events, max_size=4))
def test_what_is_chained_holds_and_validates_against_the_schema(many: list[Event]) -> None:
    lines = chained(*many)
    found = verify(lines, None)
    assert isinstance(found, Verified)
    assert found.rows == len(many)
    validator = Draft202012Validator(dict(load_schema("audit").root))
    for line in lines:
        row = read_row(line)
        assert isinstance(row, dict)
        validator.validate(row)


def test_every_event_name_is_in_the_schema() -> None:
    assert set(load_schema("audit").root["properties"]["event"]["enum"]) == set(EventName)


@given(st.data())
def test_any_changed_byte_is_found_and_its_row_is_named(data: st.DataObject) -> None:
    whole = bytearray(b"".join(LINES))
    position = data.draw(st.integers(0, len(whole) - 1))
    old = whole[position]
    whole[position] = data.draw(st.integers(0, 255).filter(lambda value: value != old))
    row = whole[:position].count(b"\n") + 1
    found = verify(_lines(bytes(whole)), HEAD)
    assert isinstance(found, Broken)
    assert found.seq == row
    assert found.line == row


def _lines(data: bytes) -> list[bytes]:
    parts = data.split(b"\n")
    return [part + b"\n" for part in parts[:-1]] + ([parts[-1]] if parts[-1] else [])


@given(st.integers(1, 4))
def test_a_cut_off_tail_is_found_through_the_head(kept: int) -> None:
    assert isinstance(verify(LINES[:kept], None), Verified)
    found = verify(LINES[:kept], HEAD)
    assert isinstance(found, Broken)
    assert found.seq == kept + 1
    assert "cut off" in found.message


@pytest.mark.parametrize(
    ("lines", "seq"),
    [
        pytest.param(LINES[:1] + LINES[2:], 2, id="a row in the middle is missing"),
        pytest.param(LINES[1:], 1, id="the first row is missing"),
        pytest.param([LINES[0], LINES[2], LINES[1], *LINES[3:]], 2, id="two rows changed places"),
        pytest.param([*LINES[:3], *LINES[2:]], 4, id="a row is there twice"),
        pytest.param([*LINES[:4], LINES[4][:-1]], 5, id="the last line has no end"),
        pytest.param([*LINES[:2], b"\n", *LINES[2:]], 3, id="an empty line was put in"),
        pytest.param([*LINES[:2], LINES[2].replace(b'":', b'": '), *LINES[3:]], 3, id="white space was added"),
        pytest.param([], 1, id="every row is gone"),
    ],
)
def test_a_log_that_was_tampered_with_names_the_row(lines: list[bytes], seq: int) -> None:
    found = verify(lines, HEAD)
    assert isinstance(found, Broken)
    assert found.seq == seq


def test_a_row_that_was_replaced_together_with_its_hash_is_named() -> None:
    second = read_row(LINES[1])
    assert isinstance(second, dict)
    forged = chain(prev=str(second["prev"]), seq=2, time=NOON, event=event(99))
    found = verify([LINES[0], line_of(forged), *LINES[2:]], HEAD)
    assert isinstance(found, Broken)
    assert found.seq == 2
    assert "replaced" in found.message


def test_a_log_rewritten_as_a_whole_is_found_only_by_a_head_that_was_kept_elsewhere() -> None:
    forged = chained(*(event(number + 10) for number in range(5)))
    assert isinstance(verify(forged, None), Verified)
    found = verify(forged, HEAD)
    assert isinstance(found, Broken)
    assert found.seq == 5


def test_rows_after_the_head_are_counted() -> None:
    third = read_row(LINES[2])
    assert isinstance(third, dict)
    assert verify(LINES, Head(3, str(third["hash"]))) == Verified(5, HEAD, 2)


def test_a_rotated_log_goes_on_from_the_head_of_the_one_before() -> None:
    later = chained(event(6), event(7), start=HEAD)
    found = verify(later, None, start=HEAD)
    assert isinstance(found, Verified)
    assert found.head.seq == 7
    assert isinstance(verify(later, None), Broken)
    assert isinstance(verify(later, Head(2, "0" * 64), start=HEAD), Broken)


def test_a_deeply_nested_line_is_broken_and_not_a_crash() -> None:
    assert isinstance(verify([b"[" * 100_000 + b"\n"], None), Broken)


def test_one_value_has_one_spelling() -> None:
    assert canonical({"b": 1, "a": MappingProxyType({"ü": None})}) == b'{"a":{"\\u00fc":null},"b":1}'


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_number_that_is_not_finite_is_no_json(value: float) -> None:
    with pytest.raises(ValueError, match="JSON"):
        canonical(value)


def test_keys_that_are_numbers_survive_the_way_through_json() -> None:
    numbered = Event(name=EventName.PROBE, actor="a", object="o", outcome="x", detail={"m": {9: "a", 10: "b"}})
    assert isinstance(verify(chained(numbered), None), Verified)


LARGE: dict[str, object] = {
    "a list of entries": [f"host{number}.example.com" for number in range(10_000)],
    "a document with two long lists": {"name": "helper", "allow": ["a.com"] * 9000, "deny": ["b.com"] * 9000},
    "a map with very many keys": {f"key{number}": number for number in range(10_000)},
    "a map with very long keys": {f"{'k' * 5000}{number}": number for number in range(50)},
    "a long text": "\u2028" * 100_000,
    "characters beyond the first plane": "\U0001f600" * 50_000,
    "maps in maps": {"a": {"b": {"c": ["x" * 100] * 2000}}},
}


@pytest.mark.parametrize("value", LARGE.values(), ids=LARGE)
@pytest.mark.parametrize("field", ["before", "after", "detail"])
def test_a_row_is_bounded_and_its_digest_is_that_of_the_whole(field: str, value: object) -> None:
    whole = {"fact": value} if field == "detail" else value
    lines = chained(event(1), replace(event(2), **{field: whole}), event(3))  # type: ignore[arg-type]  # any field
    assert isinstance(verify(lines, None), Verified)
    assert all(len(line) < MOST_ROW for line in lines)
    row = read_row(lines[1])
    assert isinstance(row, dict)
    Draft202012Validator(load_schema("audit").root).validate(row)
    told = row[field]
    assert isinstance(told, dict)
    assert told["cut"] is True
    assert told["sha256"] == hashlib.sha256(canonical(whole)).hexdigest()
    assert told["count"] == len(whole)  # type: ignore[arg-type]  # all of them have a length


def test_of_a_long_list_the_first_items_are_told() -> None:
    entries = [f"host{number}.example.com" for number in range(10_000)]
    row = chain(prev=GENESIS.hash, seq=1, time=NOON, event=replace(event(1), after={"allow": entries, "name": "a"}))
    after = row["after"]
    assert isinstance(after, dict)
    assert after["first"]["name"] == "a"
    first = after["first"]["allow"]["first"]
    assert len(first) > 100
    assert first == entries[: len(first)]
    assert after["first"]["allow"]["count"] == 10_000


def test_words_of_a_row_are_bounded_too() -> None:
    long = replace(event(1), message="m" * 100_000, object="o" * 100_000, actor=",".join(["a" * 100] * 1000))
    (line,) = chained(long)
    assert len(line) < 4096
    assert hashlib.sha256(b"m" * 100_000).hexdigest().encode() in line


def test_what_is_small_enough_is_told_whole() -> None:
    row = chain(prev=GENESIS.hash, seq=1, time=NOON, event=replace(event(1), after=["a.com"] * 5000))
    assert row["after"] == ["a.com"] * 5000


@given(st.builds(lambda value, most: (value, cut(value, most)), json_values, st.integers(0, 300)))
def test_what_is_cut_is_never_much_more_than_asked_for(pair: tuple[object, object]) -> None:
    value, found = pair
    assert found == value or len(canonical(found)) <= 300 + 250
