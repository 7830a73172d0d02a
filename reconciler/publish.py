"""Owns status.json: what the daemon says of itself to whoever may read its runtime directory; decides nothing."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from itertools import chain, islice
from typing import TYPE_CHECKING

import anyio
from loguru import logger

from reconciler import durable
from reconciler.core.choose import Available, Missing
from reconciler.core.memory import canonical_json
from reconciler.core.policy import BackendName
from reconciler.snapshot import Snapshot

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from reconciler.admission import Admissions
    from reconciler.core.choose import Probe
    from reconciler.core.findings import Held
    from reconciler.core.policy import InForce
    from reconciler.evaluate import Evaluated
    from reconciler.jobs import Jobs
    from reconciler.shell import Shell

INTERVAL = 0.1
"""Seconds between two looks at whether there is anything new to say."""
_SHOWN, _LONGEST = 1000, 1000
"""Most lines of each list, and characters of each line: a document may have more problems than anybody reads."""
_FRESH = 10.0
"""Seconds after which status.json is written again though nothing changed, so that a stuck daemon shows."""


@dataclass(slots=True)
class View:
    """What the config side wants to be seen. Replaced field by field after each pass."""

    in_force: InForce | None = None
    last: Evaluated | None = None
    trouble: str | None = None
    """Why the last pass was not applied."""
    watch: tuple[str, ...] = ()
    """Why events do not come."""
    state: str = "running"


class Publisher:
    """Writes status.json whenever what it would say has changed."""

    def __init__(self, shell: Shell, jobs: Jobs, view: View) -> None:
        self._shell, self._jobs, self._view = shell, jobs, view
        self._started = shell.now()
        self._said: dict[str, object] = {}
        self._seen: tuple[object, ...] = ()
        self._policy: dict[str, object] = {}
        self._when = 0.0

    async def publish_changes(self) -> None:
        """Publish for ever."""
        while True:
            await self.publish()
            await anyio.sleep(INTERVAL)

    async def publish(self) -> None:
        """Publish now if there is anything new; a runtime directory that cannot be written is not worth dying for."""
        value = self._value()
        now = anyio.current_time()
        if value == self._said and now - self._when < _FRESH:
            return
        data = json.dumps({**value, "updated": self._shell.now()}, sort_keys=True).encode() + b"\n"
        write: Callable[[], None] = lambda: durable.replace(self._shell.host.status, data, mode=0o644)  # noqa: E731
        try:
            await anyio.to_thread.run_sync(write)
        except OSError as error:
            logger.error("{} cannot be written: {}", self._shell.host.status, error.strerror)
        self._said, self._when = value, now

    def _value(self) -> dict[str, object]:
        jobs, head = self._jobs, self._shell.audit.head
        return {
            "version": 1,
            "kind": "status",
            "host": self._shell.host.name,
            "pid": os.getpid(),
            "started": self._started,
            "state": self._view.state,
            "policy": self._policy_now(),
            "backends": [_backend(name, jobs.probes.found.get(name)) for name in BackendName],
            "runs": [
                {
                    "run": run.claim.run,
                    "job": run.claim.job,
                    "agent": run.agent,
                    "submitter": run.claim.submitter.name,
                    "state": run.claim.state.value,
                    "since": run.claim.claimed,
                    "backend": run.backend.name.value,
                    "generation": run.generation,
                }
                for run in jobs.runs.values()
            ],
            "spool": {
                "waiting": jobs.waiting,
                "claiming": not jobs.stopping and not jobs.trouble,
                "message": jobs.trouble,
                "unknown": _few(jobs.unknown),
            },
            "audit": {"seq": head.seq, "hash": head.hash},
        }

    def _policy_now(self) -> dict[str, object]:
        """Say it anew after a pass; between two passes it is the same."""
        view = self._view
        seen = (view.last, view.in_force, view.trouble, view.watch)
        if len(self._seen) != len(seen) or any(one is not other for one, other in zip(self._seen, seen, strict=True)):
            self._seen, self._policy = seen, self._policy_of(view)
        return self._policy

    @staticmethod
    def _policy_of(view: View) -> dict[str, object]:
        last, in_force = view.last, view.in_force
        snapshot = last.snapshot if last is not None and isinstance(last.snapshot, Snapshot) else None
        problems = [text for text in (view.trouble, last.alarm if last is not None else None) if text is not None]
        return {
            "revision": in_force.revision if in_force is not None else None,
            "generation": in_force.generation if in_force is not None else 0,
            "enabled": in_force is not None and in_force.platform.enabled,
            "agents": sorted(in_force.agents) if in_force is not None else [],
            "seen": snapshot.digest if snapshot is not None else None,
            "commit": snapshot.commit if snapshot is not None else None,
            "problems": _few(problems, map(str, last.problems) if last is not None else ()),
            "bad": _few(sorted(last.desired.bad)) if last is not None else [],
            "ignored": _few(snapshot.ignored) if snapshot is not None else [],
            "held": _few(_held(last.outcome.held)) if last is not None else [],
            "refused": _few(_refused(last.admissions)) if last is not None else [],
            "unused": _few(last.outcome.unused) if last is not None else [],
            "expiring": _few(last.expiring) if last is not None else [],
            "inherited": _few(last.inherited) if last is not None else [],
            "watch": "; ".join(view.watch) or "by events, and by the timed scan",
        }


def _few(*lists: Iterable[str]) -> list[str]:
    """Give the first lines of all, each cut where it is too long, and say so where there are more."""
    lines = [line[:_LONGEST] for line in islice(chain.from_iterable(lists), _SHOWN + 1)]
    return lines if len(lines) <= _SHOWN else [*lines[:_SHOWN], "and more: see `ringfence check` and `ringfence plan`"]


def _refused(found: Admissions) -> Iterable[str]:
    """Say what does not count: what waits to be looked at, then what is refused."""
    for file in found.waiting:
        yield f"{file}: was not looked at yet, so it grants nothing: there are many, and the next pass goes on"
    for one in found.refused:
        yield f"{one.file}: [{one.code}] {one.message}"


def _held(found: Iterable[Held]) -> Iterable[str]:
    """Say what is held, one grant that is missing a line."""
    for held in found:
        for step in held.steps:
            yield f"{step.document} {step.field}: {step.action} {canonical_json(step.value)}"


def _backend(name: BackendName, probe: Probe | None) -> dict[str, object]:
    available = probe if isinstance(probe, Available) else None
    missing = probe if isinstance(probe, Missing) else None
    return {
        "name": name.value,
        "state": "available" if available else "missing" if missing else "not_probed",
        "isolation": available.isolation.value if available else None,
        "versions": dict(available.versions) if available else {},
        "evidence": list(available.evidence) if available else [],
        "code": missing.code if missing else None,
        "message": missing.message if missing else None,
    }
