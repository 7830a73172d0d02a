"""Owns what a gate report is and whether it proves the fence; does not run the gate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class TargetVerdict(StrEnum):
    """What the gate saw at one forbidden target."""

    DENIED = "denied"
    REACHED = "reached"
    UNPROVEN = "unproven"


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetReport:
    """One forbidden target: how it was tried, what answered (an errno's name, or `answered`), and the verdict."""

    name: str
    kind: str
    address: str
    port: int | None
    alive: bool
    verdict: TargetVerdict
    seen: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GateReport:
    """What the gate found from inside, with the daemon's judgement of it. schema/gate-report.v1.json."""

    passed: bool
    challenge: str
    anchor: Mapping[str, object]
    targets: tuple[TargetReport, ...]
    rounds: int
    runtime: Mapping[str, object] = field(default_factory=dict)
    arrivals: tuple[str, ...] = ()
    """Canaries at which something arrived, counted outside."""
    failures: tuple[str, ...] = ()
    """Names of the targets (or `anchor`, or a structural fact) that do not hold; empty exactly when `passed`."""
    elapsed_ms: int = 0
