"""Owns what other policy would have decided of targets: of one that is asked for, or of those of past runs."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from proxy.decision import Code, Deny, Resolve, Target, decide_name
from proxy.record import Verdict
from reconciler.core.policy import proxy_policy

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from proxy.policy import ProxyPolicy
    from proxy.record import Record
    from reconciler.core.policy import Effective, InForce

_BY_NAME = frozenset({Code.NOT_LISTED, Code.DENIED, Code.ORG_DENIED, Code.PORT})
"""Denials that a list decided. The others (an address, a certificate) no list would have decided otherwise."""


def asking(effective: Effective) -> ProxyPolicy:
    """Give the policy that a proxy of this agent decides names by; it has no key, and no proxy can be started on it."""
    return proxy_policy(
        effective, run="none", generation=0, revision="none", resolvers=(), proof_key=b"", expires_at=0.0
    )


def decide(effective: Effective, host: str, port: int) -> Deny | Resolve:
    """Say what a proxy of this agent answers before any lookup; `host` is canonical."""
    return decide_name(asking(effective), Target(host, port))


@dataclass(frozen=True, slots=True, order=True)
class Replayed:
    """Connections of an agent's past runs to one target that would be decided otherwise. `port` as in the record."""

    agent: str
    host: str
    port: int
    denied: bool
    """Whether they would be denied now; else they were denied and would pass the lists."""
    count: int
    by: str
    """What denies them: `agent`, a layer such as `egress/org`, or `gone` for an agent that is not in force."""

    def __str__(self) -> str:
        times = "1 connection" if self.count == 1 else f"{self.count} connections"
        where = f"of {self.agent} to {self.host}:{self.port}"
        if self.denied:
            return f"would have denied {times} {where} ({self.by})"
        return f"newly allows {times} {where} that were denied ({self.by})"


def replay(past: Iterable[tuple[str, Record]], in_force: InForce) -> tuple[Replayed, ...]:
    """Decide the recorded decisions of agents' past runs again, by name and port only; what is the same is left out."""
    asked: Counter[tuple[str, str, int, Verdict, str]] = Counter()
    for agent, record in past:
        allowed = record.verdict is Verdict.ALLOW
        if record.port is not None and (allowed or record.code in _BY_NAME):
            asked[agent, record.host, record.port, record.verdict, record.layer or ""] += record.count
    return tuple(sorted(_otherwise(asked, in_force)))


def _otherwise(asked: Mapping[tuple[str, str, int, Verdict, str], int], in_force: InForce) -> Iterator[Replayed]:
    policies: dict[str, ProxyPolicy] = {}
    for (agent, host, port, verdict, layer), count in asked.items():
        allowed = verdict is Verdict.ALLOW
        effective = in_force.agents.get(agent)
        if effective is None:
            if allowed:
                yield Replayed(agent, host, port, denied=True, count=count, by="gone")
            continue
        if agent not in policies:
            policies[agent] = asking(effective)
        found = decide_name(policies[agent], Target(host, port))
        match found:
            case Deny() if allowed:
                yield Replayed(agent, host, port, denied=True, count=count, by=found.layer or "agent")
            case Resolve() if not allowed:
                yield Replayed(agent, host, port, denied=False, count=count, by=layer or "agent")
            case _:
                pass
