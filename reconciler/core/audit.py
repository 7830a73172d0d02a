"""Owns what an audit row is and how rows are chained; does not write them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


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
    FENCE_DRIFT = "agent_sandbox.fence.drift"
    DAEMON_START = "agent_sandbox.daemon.start"
    DAEMON_STOP = "agent_sandbox.daemon.stop"
    PROBE = "agent_sandbox.probe"


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
    before: object = None
    after: object = None
    weakening: bool = False
    detail: Mapping[str, object] | None = None
