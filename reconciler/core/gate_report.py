"""Owns what a gate report is and whether it proves the fence; does not run the gate."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence


class TargetVerdict(StrEnum):
    """What the gate saw at one forbidden target."""

    DENIED = "denied"
    REACHED = "reached"
    UNPROVEN = "unproven"


class TargetKind(StrEnum):
    """How a target is tried; the last three are only ever found, never planned."""

    TCP = "tcp"
    UDP = "udp"
    TCP_BOUND = "tcp-bound"
    UDP_BOUND = "udp-bound"
    DNS_TCP = "dns-tcp"
    DNS_UDP = "dns-udp"
    DNS_RELAY = "dns-relay"
    UNIX_ABSTRACT = "unix-abstract"
    UNIX_PATH = "unix-path"
    ICMP = "icmp"
    ICMP_RAW = "icmp-raw"
    PACKET = "packet"
    VSOCK = "vsock"
    DESCRIPTOR = "descriptor"
    SOCKET = "socket"
    INTERFACE = "interface"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One target that the gate must try. `alive`: a listener of ours answers there now and counts arrivals.

    `near`: only this very host could answer there, so that silence need not last as long as elsewhere.
    """

    name: str
    kind: TargetKind
    address: str
    port: int | None
    alive: bool
    near: bool = False


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

    def to_object(self) -> dict[str, object]:
        """Give the report as plain JSON values, schema/gate-report.v1.json."""
        plain: dict[str, object] = json.loads(json.dumps(asdict(self)))
        return {"version": 1, "kind": "gate-report", **plain}


_SOCKET_KINDS = frozenset({TargetKind.ICMP, TargetKind.ICMP_RAW, TargetKind.PACKET, TargetKind.VSOCK})
_NO_SUCH_SOCKET = frozenset({"EPERM", "EACCES", "EAFNOSUPPORT", "EPROTONOSUPPORT", "ESOCKTNOSUPPORT", "ENODEV"})
_DENIALS = _NO_SUCH_SOCKET | {
    "EADDRNOTAVAIL",
    "ECONNREFUSED",
    "ECONNRESET",
    "EHOSTUNREACH",
    "ENETUNREACH",
    "ENOENT",
    "ENXIO",
    "ETIMEDOUT",
    "silence",
}
_ANSWERED = "answered"
_NOT_TRIED = "not_tried"


def verdict(kind: str, alive: bool, seen: str) -> TargetVerdict:
    """Judge what was seen in all rounds (comma-separated).

    The gate judges by the same table in its own words: it is one file that imports nothing of ours, and a second
    opinion is worth more than a shared line. A test holds the two together.
    """
    parts = seen.split(",")
    if _ANSWERED in parts:
        return TargetVerdict.REACHED
    # Where the kernel refuses the socket itself, no address has to be alive to prove the denial.
    if kind in _SOCKET_KINDS and all(part in _NO_SUCH_SOCKET for part in parts):
        return TargetVerdict.DENIED
    if alive and all(part in _DENIALS for part in parts):
        return TargetVerdict.DENIED
    return TargetVerdict.UNPROVEN


def judge(
    raw: object,
    *,
    challenge: str,
    answer: str,
    targets: Sequence[Target],
    arrivals: Collection[str],
    rounds: int = 1,
    interfaces: Collection[str] = ("lo",),
) -> GateReport:
    """Judge a gate's raw report again, against what was asked of it and what arrived outside; ends in refuse.

    Args:
        raw: the report as parsed JSON; any shape, None when there was none.
        challenge: what the anchor was asked, hex.
        answer: the HMAC that only the real proxy can give, lower-case hex.
        targets: what the gate was told to try.
        arrivals: names of the canaries of ours at which something arrived.
        rounds: how many rounds were asked for.
        interfaces: network interfaces that the fence may have.
    """
    report = raw if isinstance(raw, dict) else {}
    failures = [] if report.get("version") == 1 and report.get("challenge") == challenge else ["report"]
    anchor = _anchor(report.get("anchor"), answer)
    failures += [] if anchor["verdict"] == TargetVerdict.REACHED else ["anchor"]
    reported, strays = _match(report.get("targets"), targets)
    for target in reported:
        holds = target.verdict is TargetVerdict.DENIED or (
            not target.alive and target.verdict is TargetVerdict.UNPROVEN and target.seen != _NOT_TRIED
        )
        # After a target was reached the gate rightly stops; what it then left out is no finding of its own.
        if not holds and target.seen != _NOT_TRIED:
            failures.append(target.name)
    failures += [target.name for target in strays]
    runtime = report.get("runtime")
    runtime = {str(key): value for key, value in runtime.items()} if isinstance(runtime, dict) else {}
    seen_interfaces = runtime.get("interfaces")
    if not isinstance(seen_interfaces, list):
        failures.append("interfaces")
    else:
        failures += [f"interface:{name}" for name in seen_interfaces if name not in interfaces]
    failures += sorted(arrivals)
    done = _count(report.get("rounds"))
    if done < rounds or (not failures and any(target.seen == _NOT_TRIED for target in reported)):
        failures.append("rounds")
    # A gate that saw something wrong is believed, whatever its rows say.
    if not failures and report.get("passed") is not True:
        failures.append("gate")
    return GateReport(
        passed=not failures,
        challenge=challenge,
        anchor=anchor,
        targets=(*reported, *strays),
        rounds=done,
        runtime=runtime,
        arrivals=tuple(sorted(arrivals)),
        failures=tuple(dict.fromkeys(failures)),
        elapsed_ms=_count(report.get("elapsed_ms")),
    )


def _anchor(raw: object, answer: str) -> dict[str, object]:
    anchor = raw if isinstance(raw, dict) else {}
    given = _text(anchor.get("answer"))
    return {
        "address": _text(anchor.get("address")),
        "answer": given or None,
        "verdict": TargetVerdict.REACHED if given == answer else TargetVerdict.DENIED,
        "seen": _text(anchor.get("seen")),
    }


def _match(raw: object, targets: Sequence[Target]) -> tuple[list[TargetReport], list[TargetReport]]:
    """Pair what was asked with what was reported: the former in its order, then reported ones that nobody asked for."""
    rows = [row for row in raw if isinstance(row, dict)] if isinstance(raw, list) else []
    by_name: dict[str, list[dict[str, object]]] = {}
    for row in rows:
        by_name.setdefault(_text(row.get("name")), []).append(row)
    reported = []
    for target in targets:
        found = by_name.pop(target.name, [])
        # Reported twice, or as something else, is not reported.
        seen = _text(found[0].get("seen")) if len(found) == 1 and _same(found[0], target) else ""
        reported.append(
            TargetReport(
                name=target.name,
                kind=target.kind.value,
                address=target.address,
                port=target.port,
                alive=target.alive,
                verdict=verdict(target.kind, target.alive, seen) if seen else TargetVerdict.REACHED,
                seen=seen or "unreported",
            )
        )
    strays = [
        TargetReport(
            name=name or "unnamed",
            kind=_text(row.get("kind")),
            address=_text(row.get("address")),
            port=None,
            alive=True,
            verdict=TargetVerdict.REACHED,
            seen=_text(row.get("seen")),
        )
        for name, found in by_name.items()
        for row in found
    ]
    return reported, strays


def _same(row: Mapping[str, object], target: Target) -> bool:
    return (row.get("kind"), row.get("address"), row.get("port")) == (target.kind, target.address, target.port)


def _text(value: object) -> str:
    return value[:1000] if isinstance(value, str) else ""


def _count(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else 0
