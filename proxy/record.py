"""Owns the JSON lines that a proxy writes: one decision a line; does not decide or write."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    """What the proxy answered."""

    ALLOW = "allow"
    DENY = "deny"


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One decision, as evidence. schema/decision.v1.json. `time` is Unix seconds, `count` of coalesced denials."""

    seq: int
    time: float
    run: str
    generation: int
    verdict: Verdict
    code: str
    layer: str | None
    method: str
    host: str
    port: int | None
    address: str | None
    message: str
    count: int = 1
