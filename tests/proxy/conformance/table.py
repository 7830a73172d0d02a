"""Owns the cases: reads them, fills their shorthand in, says what each expects; sends nothing."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Final

from tests.proxy.conformance.scripted import BIG, PORT
from tests.proxy.examples import DATA, WIRE_ALLOW, cases

ALLOW: Final = (*WIRE_ALLOW, f"raw.example.com:{PORT}", "db.example.com:25", "example.com:9")
_REPEAT = re.compile(r"\{([^{}*]+)\*([0-9]+)\}", re.DOTALL)
_KEYS = frozenset(
    [
        "id",
        "send",
        "send_hex",
        "raw",
        "big",
        "tunnel",
        "hello",
        "pieces",
        "records",
        "size",
        "second",
        "early",
        "early_bytes",
        "then",
        "pause_s",
        "half_close",
        "answers_after_then",
        "policy",
        "names",
        "twice",
        "occupied",
        "resolv_conf",
        "hosts",
        "status",
        "statuses",
        "statuses_any",
        "code",
        "layer",
        "dns",
        "connects",
        "upstream",
        "client",
        "targets",
        "closes",
        "reaches",
        "reaches_not",
        "hears",
        "answer",
        "within_s",
        "slow",
        "refused_second",
        "asked",
    ]
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One row. `accept` says that it must be served; `row` holds what it sends and expects, as the tables have it."""

    id: str
    rule: str
    accept: bool
    row: dict[str, Any] = field(repr=False)

    @property
    def slow(self) -> bool:
        """Say whether it waits for a deadline of the proxy."""
        return bool(self.row.get("slow"))

    @property
    def statuses(self) -> list[int]:
        """The statuses that are expected, in order; empty where any will do."""
        if self.row.get("status") == "any" or "statuses_any" in self.row:
            return []
        return list(self.row.get("statuses", [self.row.get("status", 200)]))


def expand(text: str) -> bytes:
    """Fill in `{x*N}`, which is N times x, and encode."""
    return _REPEAT.sub(lambda found: found[1] * int(found[2]), text).encode("latin-1")


def load() -> list[Case]:
    """Read every table, the shared samples among them. Raises ValueError for a key that nobody reads."""
    found = []
    for path in sorted((DATA / "conformance").glob("*.yaml")):
        for group in cases(f"conformance/{path.stem}"):
            for accept in (True, False):
                rows = group["accept" if accept else "refuse"]
                found += [_case(group["rule"], row, accept=accept) for row in rows]
    for row in cases("wire"):
        statuses = row.get("statuses", [row.get("status", 200)])
        found.append(_case("the samples of bytes on the wire", _wire(row), accept=statuses[-1] == 200))
    for row in cases("dns"):
        if not {"resolv_conf", "hosts", "others"} & row.keys():
            found.append(_case("the samples of answers to questions", _dns(row), accept=row["status"] == 200))
    found += _addresses(cases("addresses"))
    for case in found:
        if unknown := case.row.keys() - _KEYS:
            raise ValueError(f"{case.id}: nobody reads {sorted(unknown)}")
    return found


def _case(rule: str, row: dict[str, Any], *, accept: bool) -> Case:
    if "tunnel" in row:
        row = {"send": f"CONNECT {row['tunnel']} HTTP/1.1\r\nHost: {row['tunnel']}\r\n\r\n", **row}
    if "raw" in row or "big" in row:
        path = f"{BIG}{row['big']}" if "big" in row else f"/raw/{row['raw'].encode('latin-1').hex()}"
        url = f"http://raw.example.com:{PORT}{path}"
        row = {
            "send": f"GET {url} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
            "dns": 1,
            "connects": "any",
            **row,
        }
    return Case(id=str(row["id"]), rule=rule, accept=accept, row=row)


def _wire(row: dict[str, Any]) -> dict[str, Any]:
    row = dict(row)
    upstream: dict[str, Any] = {}
    if host := row.pop("upstream_host", None):
        upstream["host"] = host
    if lacks := row.pop("upstream_lacks", None):
        upstream["lacks"] = lacks
    if first := row.pop("upstream_first_bytes", None):
        row["reaches"] = first
    if upstream:
        row["upstream"] = upstream
    if 200 in row.get("statuses", []):
        row |= {"dns": 1, "connects": "any"}
    return row


def _dns(row: dict[str, Any]) -> dict[str, Any]:
    answer = row["answer"]
    made: dict[str, Any] = {
        "send": "CONNECT example.com:443 HTTP/1.1\r\nHost: example.com\r\n\r\n",
        "names": {"example.com": answer},
    }
    made |= {
        "id": f"an answer: {row['id']}",
        "status": row["status"],
        "dns": 1,
        "slow": answer in ("silence", "wrong_id"),
    }
    made["within_s"] = 8
    made |= {key: row[key] for key in ("code", "within_s") if key in row}
    if row["status"] != 200:
        made["connects"] = 0
    return made


def _addresses(table: dict[str, Any]) -> list[Case]:
    send = "GET http://example.com/ HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    found = []
    for verdict in ("dial", "deny"):
        for address in table[verdict]:
            if "%" in address:
                continue  # a zone cannot be in an answer
            row: dict[str, Any] = {
                "id": f"{verdict} {address}",
                "names": {"example.com": [address]},
                "send": send,
                "dns": 1,
            }
            if verdict == "deny":
                row |= {"status": 403, "code": "address_private"}
            found.append(Case(id=row["id"], rule="the samples of addresses", accept=verdict == "dial", row=row))
    return found
