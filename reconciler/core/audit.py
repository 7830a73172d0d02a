"""Owns what an audit row is, how rows are chained and whether a chain holds; does not write or read a file."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import TYPE_CHECKING, TypeAlias

from reconciler.core.cut import canonical, cut, shortened

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

Json: TypeAlias = object
"""Plain JSON: None, bool, int, float, str, lists, and mappings with string keys."""


class EventName(StrEnum):
    """What an audit row is about."""

    LAUNCH = "agent_sandbox.launch"
    REFUSE = "agent_sandbox.refuse"
    FAIL = "agent_sandbox.fail"
    TEARDOWN = "agent_sandbox.teardown"
    EGRESS_DENY = "agent_sandbox.egress.deny"
    EGRESS_ALLOW = "agent_sandbox.egress.allow"
    CONFIG_UPDATE = "agent_sandbox.config.update"
    CONFIG_HELD = "agent_sandbox.config.held"
    REASON_ADMITTED = "agent_sandbox.reason.admitted"
    REASON_LAPSED = "agent_sandbox.reason.lapsed"
    REASON_REFUSED = "agent_sandbox.reason.refused"
    TRUST_UPDATE = "agent_sandbox.trust.update"
    ISOLATION_CHANGED = "agent_sandbox.isolation.changed"
    FENCE_DRIFT = "agent_sandbox.fence.drift"
    DAEMON_START = "agent_sandbox.daemon.start"
    DAEMON_STOP = "agent_sandbox.daemon.stop"
    PROBE = "agent_sandbox.probe"
    AUDIT_REPAIR = "agent_sandbox.audit.repair"
    SPOOL_REMOVED = "agent_sandbox.spool.removed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """What happened, before it has a place in the chain. `detail` is plain JSON and holds no secret."""

    name: EventName
    actor: str
    object: str
    outcome: str
    code: str | None = None
    message: str = ""
    revision: str | None = None
    run: str | None = None
    before: Json = None
    after: Json = None
    weakening: bool = False
    detail: Mapping[str, Json] | None = None


@dataclass(frozen=True, slots=True)
class Head:
    """Where a chain ends: the sequence number of its last row, and that row's hash (64 lower-case hex digits)."""

    seq: int
    hash: str


GENESIS = Head(0, "0" * 64)
"""What comes before the first row of a host's first log. A rotated file starts from the head of the one before it."""


@dataclass(frozen=True, slots=True)
class Verified:
    """Every row is there, unchanged and in order. `beyond` rows came after the head that was checked against."""

    rows: int
    head: Head
    beyond: int


@dataclass(frozen=True, slots=True)
class Broken:
    """The chain does not hold at row `seq`, which is (or should be) on line `line`, counted from 1."""

    seq: int
    line: int
    message: str

    def __str__(self) -> str:
        """One line for people."""
        return f"row {self.seq} (line {self.line}): {self.message}"


_KEYS = frozenset(
    {
        *("seq", "time", "event", "actor", "object", "outcome", "code", "message", "revision", "run"),
        *("before", "after", "weakening", "detail", "prev", "hash"),
    }
)


def stamp(time: datetime) -> str:
    """Give a row's spelling of an aware time: UTC, microseconds, `Z`."""
    return time.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


MOST_ROW = 64 * 1024
"""Bytes of one row's line, about: what is larger is cut, and what is left names the whole (`cut`)."""
_MOST_VALUE = 16 * 1024
_MOST_WORDS = 1000
_MOST_NAME = 300


def chain(*, prev: str, seq: int, time: datetime, event: Event) -> dict[str, object]:
    """Give `event` its place: row `seq`, after the row whose hash is `prev`. The row is bounded plain JSON."""
    loose: dict[str, object] = {
        "seq": seq,
        "time": stamp(time),
        "event": event.name.value,
        "actor": event.actor,
        "object": event.object,
        "outcome": event.outcome,
        "code": event.code,
        "message": event.message,
        "revision": event.revision,
        "run": event.run,
        "before": event.before,
        "after": event.after,
        "weakening": event.weakening,
        "detail": event.detail,
        "prev": prev,
    }
    if len(canonical(loose)) > MOST_ROW:
        for field in ("before", "after", "detail"):
            loose[field] = cut(loose[field], _MOST_VALUE)
        for field, most in (("message", _MOST_WORDS), ("actor", _MOST_NAME), ("object", _MOST_NAME)):
            loose[field] = shortened(str(loose[field]), most)
    # Through JSON once, so that what is hashed is what a reader will get back (keys that are numbers become strings).
    row: dict[str, object] = json.loads(canonical(loose))
    row["hash"] = _digest(row)
    return row


def line_of(row: Mapping[str, object]) -> bytes:
    """Give the row's line in the log, newline included."""
    return canonical(row) + b"\n"


def _digest(row: Mapping[str, object]) -> str:
    return hashlib.sha256(canonical({key: value for key, value in row.items() if key != "hash"})).hexdigest()


def read_row(line: bytes) -> dict[str, object] | str:
    """Read one line (newline included), and check it by itself: form, canonical spelling, own hash.

    Gives the row, or what is wrong with it.
    """
    if not line.endswith(b"\n"):
        return "the line is cut off"
    try:
        row: object = json.loads(line)
    except (ValueError, RecursionError):
        return "the line is not JSON"
    if not isinstance(row, dict) or row.keys() != _KEYS:
        return "the line does not have the fields of an audit row"
    try:
        same = line_of(row) == line
    except ValueError:
        same = False
    if not same:
        return "the line is not in canonical form, so it was changed after it was written"
    if row["hash"] != _digest(row):
        return "the row's content does not match its hash, so it was changed after it was written"
    return row


def verify(lines: Iterable[bytes], head: Head | None, *, start: Head = GENESIS) -> Verified | Broken:
    """Check that `lines` are the chain that starts after `start` and reaches `head`.

    Args:
        lines: the log's lines in order, each with its newline.
        head: the last row that somebody knows of, from `head.json` or kept elsewhere; None checks only the chain.
        start: the head of the log that was rotated away before this one.

    Only a head that was kept elsewhere shows a log that was rewritten as a whole.
    """
    last, number, known = start, 0, head is None or head == start
    for number, line in enumerate(lines, start=1):
        expected = last.seq + 1
        row = read_row(line)
        if isinstance(row, str):
            return Broken(expected, number, row)
        seq, own = row["seq"], row["hash"]
        if type(seq) is not int or type(own) is not str:
            return Broken(expected, number, "the row's sequence number is not a number")
        if seq > expected:
            return Broken(expected, number, f"rows {expected} to {seq - 1} are missing: row {seq} is in their place")
        if seq < expected:
            return Broken(expected, number, f"row {seq} is in its place: rows were reordered or repeated")
        if row["prev"] != last.hash:
            named = max(last.seq, start.seq + 1)
            return Broken(
                named, max(number - 1, 1), f"row {seq} was written after another row {last.seq}: it was replaced"
            )
        last = Head(seq, own)
        if head is not None and seq == head.seq:
            if own != head.hash:
                return Broken(seq, number, "the row's hash is not the one in the head: the log was rewritten")
            known = True
    if not known and head is not None:
        if head.seq <= start.seq:
            return Broken(start.seq + 1, 1, f"the head is row {head.seq}, which is before this log starts")
        return Broken(
            last.seq + 1, number + 1, f"rows {last.seq + 1} to {head.seq} are cut off: the head knows of them"
        )
    return Verified(last.seq - start.seq, last, last.seq - (head.seq if head else last.seq))
