"""Owns what a result says of one job, as a value and as JSON; does not write it or decide it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


class ResultCode(StrEnum):
    """How a job ended. Only `exited` means that the command ended by itself, with the status beside it."""

    EXITED = "exited"
    TIMEOUT = "timeout"
    OOM = "oom"
    COMMAND_NOT_FOUND = "command_not_found"
    COMMAND_NOT_EXECUTABLE = "command_not_executable"
    SANDBOX_CRASHED = "sandbox_crashed"
    PROXY_DIED = "proxy_died"
    REFUSED = "refused"
    INTERRUPTED = "interrupted"
    CANCELLED = "cancelled"
    CANCEL_SENT = "cancel_sent"
    POLICY_REMOVED = "policy_removed"
    POLICY_NOT_ACKNOWLEDGED = "policy_not_acknowledged"
    FENCE_DRIFT = "fence_drift"
    AUDIT_FAILED = "audit_failed"
    STOPPING = "stopping"
    FAILED = "failed"


MESSAGES: Mapping[ResultCode, str] = {
    ResultCode.EXITED: "the command ended by itself",
    ResultCode.TIMEOUT: "the command was stopped at its deadline",
    ResultCode.OOM: "the command was killed at its memory limit",
    ResultCode.COMMAND_NOT_FOUND: "the sandbox has no such command",
    ResultCode.COMMAND_NOT_EXECUTABLE: "the command is there but cannot be executed",
    ResultCode.SANDBOX_CRASHED: "the sandbox died under the command",
    ResultCode.PROXY_DIED: "the sandbox's proxy died, so the command was stopped",
    ResultCode.REFUSED: "nothing ran",
    ResultCode.INTERRUPTED: "ringfenced was interrupted during this run; it is not run again",
    ResultCode.CANCELLED: "its submitter cancelled it",
    ResultCode.CANCEL_SENT: "the run is being stopped; its own result says how it ended",
    ResultCode.POLICY_REMOVED: "policy no longer lets this agent run, so the command was stopped",
    ResultCode.POLICY_NOT_ACKNOWLEDGED: "the proxy did not take over newer policy in time, so the command was stopped",
    ResultCode.FENCE_DRIFT: "the fence was no longer as it was proven",
    ResultCode.AUDIT_FAILED: "the audit log could not be written, so the command was stopped",
    ResultCode.STOPPING: "ringfenced was stopping, so the command was stopped",
    ResultCode.FAILED: "the run failed in ringfence itself; its log says where",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Why nothing ran."""

    code: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendUsed:
    """What built the sandbox, and why nothing that isolates more did."""

    name: str
    isolation: str
    versions: Mapping[str, str] = field(default_factory=dict)
    why: tuple[str, ...] = ()
    evidence: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """When each state was reached; UTC, ISO 8601 with `Z`, None for a state that never was."""

    claimed: str
    intent: str | None = None
    gated: str | None = None
    started: str | None = None
    exited: str | None = None
    reported: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """What the command wrote: how much in all, and its last bytes as text (undecodable ones escaped)."""

    bytes: int = 0
    truncated: bool = False
    tail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decisions:
    """Every decision of the proxy, counted. `rows` are the ranges (first, last) of audit rows that record them."""

    allowed: int = 0
    denied: int = 0
    coalesced: int = 0
    missing: int = 0
    cut: bool = False
    rows: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditRange:
    """The run's first and last audit row so far, and the chain's hash at the row `head`."""

    first: int
    last: int
    head: int
    hash: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What became of one job. schema/result.v1.json describes each field."""

    run: str
    job: str
    submitter: str
    code: ResultCode
    message: str
    status: int | None = None
    oom_killed: bool = False
    refusal: Refusal | None = None
    agent: str | None = None
    revision: str | None = None
    generations: tuple[int, ...] = ()
    reasons: tuple[str, ...] = ()
    backend: BackendUsed | None = None
    image: str | None = None
    gate: Mapping[str, object] | None = None
    times: Times
    output: Output = field(default_factory=Output)
    decisions: Decisions = field(default_factory=Decisions)
    audit: AuditRange | None = None

    def to_json(self) -> dict[str, object]:
        """The result as plain JSON."""
        # Through JSON once: tuples become lists and enums their values, as a reader will see them.
        plain: dict[str, object] = json.loads(json.dumps({"version": 1, "kind": "result", **asdict(self)}))
        return plain
