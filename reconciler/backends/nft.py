"""Owns the host guard, as text and as the kernel must show it back: a table of its own that fences our bridges in.

Pure; loads nothing. It is the second layer: on our bridges the host has no address to begin with.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

FAMILY, TABLE = "inet", "ringfence_guard"
FENCE_LINKS = "rf*"
"""The bridges of fences: an agent and its proxy are on one."""
EGRESS_LINKS = "rx*"
"""The bridges over which proxies reach the world."""
NOWHERE = "192.0.2.1"
"""The nameserver that sandboxes are told (RFC 5737: nobody has it); an engine that forwards to it must not send."""
PROXY_PORT = 3128
_DNS_PORT = 53
_PRIORITY = -210
"""Before the chains of everybody else."""

_Rule = tuple[tuple[tuple[str, object], ...], str]

_TCP_TO_PROXY: tuple[str, object] = ("tcp dport", PROXY_PORT)
_TCP_FROM_PROXY: tuple[str, object] = ("tcp sport", PROXY_PORT)
_CHAINS: Mapping[str, tuple[_Rule, ...]] = {
    "input": (
        ((("iifname", FENCE_LINKS),), "drop"),
        # A proxy may ask a resolver that this host runs; nothing else here is for it.
        ((("iifname", EGRESS_LINKS), ("udp dport", _DNS_PORT)), "accept"),
        ((("iifname", EGRESS_LINKS), ("tcp dport", _DNS_PORT)), "accept"),
        ((("iifname", EGRESS_LINKS),), "drop"),
    ),
    "forward": (
        # Bridged frames come by here only where br_netfilter is on.
        ((("iifname", FENCE_LINKS), ("oifname", FENCE_LINKS), _TCP_TO_PROXY), "accept"),
        ((("iifname", FENCE_LINKS), ("oifname", FENCE_LINKS), _TCP_FROM_PROXY), "accept"),
        ((("iifname", FENCE_LINKS),), "drop"),
        ((("oifname", FENCE_LINKS),), "drop"),
        ((("ip daddr", NOWHERE),), "drop"),
    ),
    "output": (
        ((("oifname", FENCE_LINKS),), "drop"),
        ((("ip daddr", NOWHERE),), "drop"),
    ),
}


def text() -> str:
    """Give the ruleset for `nft -f`: it replaces our table in one transaction and touches no other."""
    lines = [
        "#!/usr/sbin/nft -f",
        "# The host guard of ringfence: `ringfence guard print`. It replaces its own table and touches no other.",
        f"table {FAMILY} {TABLE}",
        f"delete table {FAMILY} {TABLE}",
        f"table {FAMILY} {TABLE} {{",
    ]
    for hook, rules in _CHAINS.items():
        lines += [f"\tchain {hook} {{", f"\t\ttype filter hook {hook} priority {_PRIORITY}; policy accept;"]
        for matches, verdict in rules:
            said = " ".join(f"{key} {_quoted(value)}" for key, value in matches)
            lines.append(f"\t\t{said} counter {verdict}")
        lines.append("\t}")
    return "\n".join([*lines, "}", ""])


def _quoted(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) and value.endswith("*") else str(value)


def differences(listed: object) -> tuple[str, ...]:
    """Compare what `nft -j list table inet ringfence_guard` gave with what must be there; each line names one thing.

    Args:
        listed: the parsed JSON, None when there is no such table.
    """
    rows = listed.get("nftables") if isinstance(listed, dict) else None
    if not isinstance(rows, list):
        return (f"the table {FAMILY} {TABLE} is not loaded",)
    chains = {chain.get("name"): chain for row in rows if isinstance(chain := _row(row, "chain"), dict)}
    lines = [f"chain {name} is not of ours" for name in chains if name not in _CHAINS]
    for hook, rules in _CHAINS.items():
        chain = chains.get(hook)
        wanted = {"type": "filter", "hook": hook, "prio": _PRIORITY, "policy": "accept"}
        if chain is None or {key: chain.get(key) for key in wanted} != wanted:
            lines.append(f"chain {hook} is not as it must be")
        found = [rule for row in rows if (rule := _row(row, "rule")) is not None and rule.get("chain") == hook]
        if [_shown(rule) for rule in found] != [_expressions(*rule) for rule in rules]:
            lines.append(f"the rules of chain {hook} are not as they must be")
    return tuple(lines)


def counters(listed: Mapping[str, Any]) -> int:
    """Count the packets that the guard dropped: evidence that something tried."""
    rules = [rule for row in listed.get("nftables", []) if (rule := _row(row, "rule")) is not None]
    return sum(
        part["counter"]["packets"]
        for rule in rules
        if {"drop": None} in rule.get("expr", [])
        for part in rule["expr"]
        if isinstance(part.get("counter"), dict)
    )


def _row(row: object, kind: str) -> dict[str, Any] | None:
    found = row.get(kind) if isinstance(row, dict) else None
    return found if isinstance(found, dict) else None


def _shown(rule: Mapping[str, Any]) -> list[object]:
    """Give a rule's expressions without what its counter has counted."""
    parts: Sequence[Any] = rule.get("expr", [])
    return ["counter" if isinstance(part, dict) and "counter" in part else part for part in parts]


def _expressions(matches: Sequence[tuple[str, object]], verdict: str) -> list[object]:
    """Give a rule's expressions as `nft -j` shows them (libnftables-json(5))."""
    shown: list[object] = []
    for key, value in matches:
        protocol, _, field = key.partition(" ")
        left = {"payload": {"protocol": protocol, "field": field}} if field else {"meta": {"key": key}}
        shown.append({"match": {"op": "==", "left": left, "right": value}})
    return [*shown, "counter", {verdict: None}]
