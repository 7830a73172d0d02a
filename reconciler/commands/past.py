"""Owns how the decisions of past runs are read again for a plan, and which of them it would decide otherwise."""

from __future__ import annotations

import json as json_module
from collections.abc import Iterator

from proxy.record import Record
from reconciler.core.policy import in_force
from reconciler.core.replay import Replayed, replay
from reconciler.evaluate import Evaluated
from reconciler.host import Host
from reconciler.state import State


def _past_decisions(host: Host) -> Iterator[tuple[str, Record]]:
    """Read the decisions of past runs that this user may read: agent and record."""
    for result in sorted((host.spool / "done").glob("*/*/result.json")):
        try:
            agent = json_module.loads(result.read_bytes()).get("agent")
            lines = result.with_name("decisions.jsonl").read_bytes().splitlines()
        except (OSError, ValueError, AttributeError):
            continue
        for line in lines:
            try:
                record = Record.parse(json_module.loads(line))
            except ValueError:
                continue
            if record is not None and isinstance(agent, str):
                yield agent, record


def replayed(host: Host, evaluated: Evaluated, base: State) -> tuple[Replayed, ...]:
    """Decide past runs again, and leave out what is decided otherwise by what the plan compares with already."""
    past = tuple(_past_decisions(host))
    already: tuple[Replayed, ...] = ()
    if base.memory.in_force is not None:
        before = in_force(base.memory.in_force, base.memory.last, revision=base.revision, generation=base.generation)
        already = replay(past, before)
    return tuple(one for one in replay(past, evaluated.in_force) if one not in already)
