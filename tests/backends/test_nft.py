"""The host guard as text and as it is read back; that the kernel takes it, where there is nft."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest

from reconciler.backends import guard, nft
from tests.backends.docker_world import beside
from tests.rig.docker.fixtures import Setup

if TYPE_CHECKING:
    from tests.backends.docker_world import Engines


def listed() -> dict[str, Any]:
    """What `nft -j` shows of the guard once it is loaded (version 1.0.6), counters and handles included."""
    rows: list[dict[str, Any]] = [{"metainfo": {"version": "1.0.6"}}, {"table": {"family": "inet", "name": nft.TABLE}}]
    for hook, rules in nft._CHAINS.items():
        chain = {"family": "inet", "table": nft.TABLE, "name": hook, "handle": 1, "type": "filter", "hook": hook}
        rows.append({"chain": {**chain, "prio": -210, "policy": "accept"}})
        for matches, verdict in rules:
            shown = [
                {"counter": {"packets": 3, "bytes": 9}} if part == "counter" else part
                for part in nft._expressions(matches, verdict)
            ]
            rows.append({"rule": {"family": "inet", "table": nft.TABLE, "chain": hook, "handle": 2, "expr": shown}})
    return {"nftables": rows}


def test_what_was_loaded_is_what_is_shown() -> None:
    assert nft.differences(listed()) == ()


@pytest.mark.parametrize("number", range(2, len(listed()["nftables"])), ids=lambda number: f"row {number}")
def test_each_chain_and_each_rule_that_is_missing_is_found(number: int) -> None:
    found = listed()
    del found["nftables"][number]
    assert nft.differences(found)


@pytest.mark.parametrize(
    ("key", "value"), [("policy", "drop"), ("prio", 0), ("hook", "prerouting"), ("type", "nat")], ids=str
)
def test_a_chain_that_is_another_is_found(key: str, value: object) -> None:
    found = listed()
    found["nftables"][2]["chain"][key] = value
    assert nft.differences(found)


def test_a_rule_more_and_a_chain_more_are_found() -> None:
    found = listed()
    more = copy.deepcopy(next(row for row in found["nftables"] if "rule" in row))
    more["rule"]["expr"] = [{"accept": None}]
    found["nftables"].insert(3, more)
    assert nft.differences(found)
    found = listed()
    found["nftables"].append({"chain": {"name": "mine"}})
    assert nft.differences(found)


@pytest.mark.parametrize("value", [None, [], {}, {"nftables": None}], ids=repr)
def test_what_is_no_listing_is_no_guard(value: object) -> None:
    assert nft.differences(value)


def test_what_was_dropped_is_counted() -> None:
    drops = sum(verdict == "drop" for rules in nft._CHAINS.values() for _, verdict in rules)
    assert nft.counters(listed()) == 3 * drops


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
