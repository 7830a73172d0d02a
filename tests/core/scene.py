"""Owns a small stage for tests of the formula: documents and grants in, outcomes out, memory carried on."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from reconciler.core.grants import Approval, Grant
from reconciler.core.memory import Memory
from reconciler.core.policy import Effective, InForce, in_force
from reconciler.core.reconcile import Outcome, reconcile
from reconciler.core.statement import Statement, read
from reconciler.core.validate import Desired, desired
from tests.strategies import IMAGE

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

ALICE = Approval("alice", "SHA256:alice")
BOB = Approval("bob", "SHA256:bob")


def agent(name: str = "helper", **fields: Any) -> dict[str, bytes]:
    """Write one agent's file."""
    document = {"version": 1, "kind": "agent", "name": name, "image": IMAGE, **fields}
    return {f"agents/{name}.yaml": json.dumps(document).encode()}


def egress(name: str = "org", agents: Iterable[str] = ("*",), **fields: Any) -> dict[str, bytes]:
    """Write one egress file."""
    document = {"version": 1, "kind": "egress", "name": name, "agents": list(agents), **fields}
    return {f"egress/{name}.yaml": json.dumps(document).encode()}


def platform(**fields: Any) -> dict[str, bytes]:
    """Write the platform's file."""
    return {"platform.yaml": json.dumps({"version": 1, "kind": "platform", **fields}).encode()}


def signed(
    *grants: tuple[str, str, str, Any],
    identifier: str = "CHG-1",
    by: tuple[Approval, ...] = (ALICE,),
    expires: float | None = None,
) -> tuple[Grant, ...]:
    """Give the grants of one admitted statement; each is (document, field, add|remove|value, what)."""
    statement = {
        "version": 1,
        "kind": "signed-reason",
        "id": identifier,
        "audience": ["*"],
        "expires": "never",
        "ticket": identifier,
        "reason": "needed for the tests of the formula",
        "grants": [{"document": document, "field": place, way: what} for document, place, way, what in grants],
    }
    found = read("reasons/x.yaml", json.dumps(statement).encode())
    assert isinstance(found, Statement), found
    return tuple(
        Grant(
            id=grant.id,
            document=grant.document,
            field=grant.field,
            action=grant.action,
            item=grant.item,
            ticket=grant.ticket,
            approvals=by,
            expires=expires,
        )
        for grant in found.grants
    )


@dataclass
class Host:
    """One host: it takes passes, and remembers as the daemon would, through JSON."""

    memory: Memory = field(default_factory=Memory)
    now: float = 1000.0

    def run(self, files: Mapping[str, bytes], grants: Iterable[Grant] = (), **more: Any) -> Outcome:
        """Take one pass, and check that taking it again would change nothing."""
        wanted = desired(files)
        outcome = reconcile(wanted, self.memory, grants, now=self.now, **more)
        self.memory = Memory.from_json(json.loads(json.dumps(outcome.memory.to_json())))
        assert self.memory == outcome.memory
        again = reconcile(wanted, self.memory, grants, now=self.now, **more)
        assert again.changes == ()
        assert not again.held_changed
        assert [(one.document, one.field, one.after, one.wanted) for one in again.held] == [
            (one.document, one.field, one.after, one.wanted) for one in outcome.held
        ]
        assert again.memory == self.memory
        return outcome

    def good(self, files: Mapping[str, bytes], grants: Iterable[Grant] = (), **more: Any) -> Outcome:
        """Take one pass over documents without problems."""
        assert desired(files).problems == ()
        return self.run(files, grants, **more)


def force(outcome: Outcome) -> InForce:
    """Give what is in force as frozen values."""
    return in_force(outcome.tree, outcome.memory.last, revision="sha256:0", generation=1)


def effective(outcome: Outcome, name: str = "helper") -> Effective:
    """Give what is in force for one agent."""
    return force(outcome).agents[name]


def allowed(outcome: Outcome, name: str = "helper") -> list[str]:
    """Give an agent's own allow list in force."""
    return [str(entry) for entry in effective(outcome, name).agent.allow]


def missing(outcome: Outcome) -> list[tuple[str, str, str, Any]]:
    """Give every grant that is missing, as `signed` takes it."""
    steps = {step.key: step for held in outcome.held for step in held.steps if not step.grants}
    return [(step.document, step.field, str(step.action), step.value) for _, step in sorted(steps.items())]


def problems_of(files: Mapping[str, bytes]) -> list[str]:
    """Give the problems of a directory, each as its file and message."""
    found: Desired = desired(files)
    return [f"{one.file} {one.where} {one.message}" for one in found.problems]
