"""Owns what one nftables table is as data: its text for `nft -f`, and whether what the kernel shows is the same.

Pure; loads nothing, and knows no rule.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Match = tuple[str, object]
"""What is looked at, as nft writes it (fields of a concatenation with ` . ` between), and its value or `@set`."""
Rule = tuple[tuple[Match, ...], str]
"""Matches that must all hold, and the verdict; each rule counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """One table of ours. `chains` are named by their hook; each lets pass what no rule names.

    Attributes:
        sets: of each set the types of its elements; elements end by themselves.
    """

    family: str
    name: str
    priority: int
    chains: Mapping[str, tuple[Rule, ...]]
    sets: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def __str__(self) -> str:
        """Name it as nft does."""
        return f"{self.family} {self.name}"


def text(table: Table) -> str:
    """Give the text for `nft -f`: it replaces the table in one transaction and touches no other."""
    lines = [f"table {table}", f"delete table {table}", f"table {table} {{"]
    for name, types in table.sets.items():
        lines += [f"\tset {name} {{", f"\t\ttype {' . '.join(types)}", "\t\tflags timeout", "\t}"]
    for hook, rules in table.chains.items():
        lines += [f"\tchain {hook} {{", f"\t\ttype filter hook {hook} priority {table.priority}; policy accept;"]
        for matches, verdict in rules:
            said = " ".join(f"{key} {_quoted(value)}" for key, value in matches)
            lines.append(f"\t\t{said} counter {verdict}")
        lines.append("\t}")
    return "\n".join([*lines, "}", ""])


def _quoted(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) and value.endswith("*") else str(value)


def differences(table: Table, listed: object) -> tuple[str, ...]:
    """Compare what `nft -j list table` gave with what must be there, but for elements; each line names one thing.

    Args:
        table: what must be there.
        listed: the parsed JSON, None when there is no such table.
    """
    found = rows(listed)
    if found is None:
        return (f"the table {table} is not loaded",)
    lines = [f"chain {name} is not of ours" for name in _named(found, "chain") if name not in table.chains]
    lines += [f"set {name} is not of ours" for name in _named(found, "set") if name not in table.sets]
    sets = _named(found, "set")
    for name, types in table.sets.items():
        wanted = list(types) if len(types) > 1 else types[0]
        shown = sets.get(name, {})
        if (shown.get("type"), shown.get("flags")) != (wanted, ["timeout"]):
            lines.append(f"set {name} is not as it must be")
    chains = _named(found, "chain")
    for hook, rules in table.chains.items():
        wanted_chain = {"type": "filter", "hook": hook, "prio": table.priority, "policy": "accept"}
        chain = chains.get(hook)
        if chain is None or {key: chain.get(key) for key in wanted_chain} != wanted_chain:
            lines.append(f"chain {hook} is not as it must be")
        shown_rules = [rule for row in found if (rule := _row(row, "rule")) is not None and rule.get("chain") == hook]
        if [_shown(rule) for rule in shown_rules] != [expressions(*rule) for rule in rules]:
            lines.append(f"the rules of chain {hook} are not as they must be")
    return tuple(lines)


def elements(listed: object, name: str) -> frozenset[tuple[object, ...]]:
    """Give what a set holds; of a set of single values each is a tuple of one."""
    shown = _named(rows(listed) or [], "set").get(name, {})
    values = [
        each["elem"]["val"] if isinstance(each, dict) and "elem" in each else each for each in shown.get("elem", [])
    ]
    return frozenset(tuple(value["concat"]) if isinstance(value, dict) else (value,) for value in values)


def dropped(listed: object) -> int:
    """Count the packets that a table dropped: evidence that something tried."""
    rules = [rule for row in rows(listed) or [] if (rule := _row(row, "rule")) is not None]
    return sum(
        part["counter"]["packets"]
        for rule in rules
        if {"drop": None} in rule.get("expr", [])
        for part in rule["expr"]
        if isinstance(part.get("counter"), dict)
    )


def rows(listed: object) -> list[object] | None:
    """Give the objects of a listing; None when it is none."""
    found = listed.get("nftables") if isinstance(listed, dict) else None
    return found if isinstance(found, list) else None


def _named(found: Sequence[object], kind: str) -> dict[object, dict[str, Any]]:
    return {each.get("name"): each for row in found if (each := _row(row, kind)) is not None}


def _row(row: object, kind: str) -> dict[str, Any] | None:
    found = row.get(kind) if isinstance(row, dict) else None
    return found if isinstance(found, dict) else None


def _shown(rule: Mapping[str, Any]) -> list[object]:
    """Give a rule's expressions without what its counter has counted."""
    parts: Sequence[Any] = rule.get("expr", [])
    return ["counter" if isinstance(part, dict) and "counter" in part else part for part in parts]


def expressions(matches: Sequence[Match], verdict: str) -> list[object]:
    """Give a rule's expressions as `nft -j` shows them (libnftables-json(5))."""
    shown: list[object] = []
    for key, value in matches:
        parts = [_left(part) for part in key.split(" . ")]
        left = parts[0] if len(parts) == 1 else {"concat": parts}
        shown.append({"match": {"op": "==", "left": left, "right": value}})
    return [*shown, "counter", {verdict: None}]


def _left(key: str) -> dict[str, object]:
    protocol, _, field_ = key.rpartition(" ")
    return (
        {"payload": {"protocol": protocol, "field": field_}}
        if protocol not in ("", "meta")
        else {"meta": {"key": field_}}
    )
