"""The host guard as text and as it is read back; that the kernel takes it, where there is nft."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest

from reconciler.backends import guard, nft, nft_table, pod_guard
from tests.backends.docker_world import beside
from tests.rig.docker.fixtures import Setup

if TYPE_CHECKING:
    from reconciler.backends.nft_table import Table
    from tests.backends.docker_world import Engines


TABLES = (nft.GUARD, *pod_guard.tables(pod_guard.DAEMON))


def listed(table: Table) -> dict[str, Any]:
    """What `nft -j` shows of a table once it is loaded (version 1.0.6), counters and handles included."""
    own: dict[str, Any] = {"family": table.family, "table": table.name, "handle": 1}
    rows: list[dict[str, Any]] = [
        {"metainfo": {"version": "1.0.6"}},
        {"table": {"family": table.family, "name": table.name}},
    ]
    for name, types in table.sets.items():
        rows.append(
            {"set": {**own, "name": name, "type": list(types) if types[1:] else types[0], "flags": ["timeout"]}}
        )
    for hook, rules in table.chains.items():
        chain = {**own, "name": hook, "type": "filter", "hook": hook}
        rows.append({"chain": {**chain, "prio": table.priority, "policy": "accept"}})
        for matches, verdict in rules:
            shown = [
                {"counter": {"packets": 3, "bytes": 9}} if part == "counter" else part
                for part in nft_table.expressions(matches, verdict)
            ]
            rows.append({"rule": {**own, "chain": hook, "expr": shown}})
    return {"nftables": rows}


def chain_of(found: dict[str, Any]) -> dict[str, Any]:
    return next(row["chain"] for row in found["nftables"] if "chain" in row)


@pytest.mark.parametrize("table", TABLES, ids=str)
def test_what_was_loaded_is_what_is_shown(table: Table) -> None:
    assert nft_table.differences(table, listed(table)) == ()


@pytest.mark.parametrize("table", TABLES, ids=str)
def test_each_set_each_chain_and_each_rule_that_is_missing_is_found(table: Table) -> None:
    for number in range(2, len(listed(table)["nftables"])):
        found = listed(table)
        gone = found["nftables"].pop(number)
        assert nft_table.differences(table, found), gone


@pytest.mark.parametrize(
    ("key", "value"), [("policy", "drop"), ("prio", 0), ("hook", "postrouting"), ("type", "nat")], ids=str
)
def test_a_chain_that_is_another_is_found(key: str, value: object) -> None:
    for table in TABLES:
        found = listed(table)
        chain_of(found)[key] = value
        assert nft_table.differences(table, found)


@pytest.mark.parametrize(("key", "value"), [("type", "ether_type"), ("flags", ["interval"])], ids=str)
def test_a_set_that_is_another_is_found(key: str, value: object) -> None:
    table = pod_guard.inet(pod_guard.DAEMON)
    found = listed(table)
    found["nftables"][2]["set"][key] = value
    assert nft_table.differences(table, found)


def test_a_rule_more_a_chain_more_and_a_set_more_are_found() -> None:
    table = nft.GUARD
    found = listed(table)
    more = copy.deepcopy(next(row for row in found["nftables"] if "rule" in row))
    more["rule"]["expr"] = [{"accept": None}]
    found["nftables"].insert(3, more)
    assert nft_table.differences(table, found)
    for kind in ("chain", "set"):
        found = listed(table)
        found["nftables"].append({kind: {"name": "mine"}})
        assert nft_table.differences(table, found)


@pytest.mark.parametrize("value", [None, [], {}, {"nftables": None}], ids=repr)
def test_what_is_no_listing_is_no_guard(value: object) -> None:
    assert nft_table.differences(nft.GUARD, value)


def test_what_was_dropped_is_counted() -> None:
    drops = sum(verdict == "drop" for rules in nft.GUARD.chains.values() for _, verdict in rules)
    assert nft_table.dropped(listed(nft.GUARD)) == 3 * drops


@pytest.mark.docker
@pytest.mark.rig
def test_the_kernel_takes_it_and_shows_it_back_until_it_is_flushed(
    docker_engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    with beside(docker_engines.engine(Setup()), monkeypatch) as engine:
        engine.tool("nft", "delete", "table", "inet", nft.TABLE) if guard.check() is None else None
        assert guard.check() is not None
        assert guard.load() is None
        assert guard.check() is None
        assert guard.load() is None
        engine.tool("nft", "insert", "rule", "inet", nft.TABLE, "input", "accept")
        assert guard.check() is not None
        assert guard.load() is None
        engine.tool("nft", "delete", "table", "inet", nft.TABLE)
        assert guard.check() is not None
