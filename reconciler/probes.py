"""Owns what is known of this host's backends: asks each when that is due, and audits what changed; chooses none."""

from __future__ import annotations

from typing import TYPE_CHECKING, assert_never

import anyio
from loguru import logger

from reconciler.core.audit import Event, EventName
from reconciler.core.choose import Available, Missing, not_in_this_version
from reconciler.core.policy import BackendName
from reconciler.journal import JournalFailed

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from reconciler.backends.base import Backend
    from reconciler.core.choose import Probe
    from reconciler.shell import Shell

_AGAIN = 15.0
"""Seconds after which a backend that was missing is probed again."""


class Probes:
    """What each backend's probe found last."""

    def __init__(self, shell: Shell, backends: Iterable[Backend]) -> None:
        self.found: dict[BackendName, Probe] = {}
        self._shell = shell
        self._backends = {backend.name: backend for backend in backends}
        self._asked: dict[BackendName, float] = {}

    def forget(self) -> None:
        """Have everything asked again at the next look."""
        self._asked.clear()

    async def look(self) -> Mapping[BackendName, Probe]:
        """Ask every backend what this host has. What is there is asked once, what is missing again after a while."""
        for name in BackendName:
            backend = self._backends.get(name)
            if backend is None:
                self.found[name] = not_in_this_version(name)
            elif self._due(name):
                await self._ask(backend)
        return dict(self.found)

    def _due(self, name: BackendName) -> bool:
        asked = self._asked.get(name)
        if asked is None:
            return True
        return not isinstance(self.found[name], Available) and anyio.current_time() - asked > _AGAIN

    async def _ask(self, backend: Backend) -> None:
        try:
            probe = await backend.probe()
        except Exception as error:  # noqa: BLE001 - a backend that breaks is one that this host does not have
            logger.opt(exception=error).error("the probe of {} failed", backend.name)
            message = f"its probe failed ({type(error).__name__}); the log of ringfenced says where"
            probe = Missing(backend=backend.name, code="probe_failed", message=message)
        before = self.found.get(backend.name)
        self.found[backend.name] = probe
        self._asked[backend.name] = anyio.current_time()
        if probe != before:
            await self._note(probe)

    async def _note(self, probe: Probe) -> None:
        detail: dict[str, object] | None = None
        match probe:
            case Available():
                outcome, code, message = "available", None, ""
                detail = {
                    "isolation": probe.isolation.value,
                    "versions": dict(probe.versions),
                    "evidence": list(probe.evidence),
                }
            case Missing():
                outcome, code, message = "missing", probe.code, probe.message
            case unreachable:
                assert_never(unreachable)
        event = Event(
            name=EventName.PROBE,
            actor="ringfenced",
            object=f"backends/{probe.backend}",
            outcome=outcome,
            code=code,
            message=message,
            detail=detail,
        )
        try:
            await self._shell.audit.append(event)
        except JournalFailed:
            logger.error("the probe of {} is not in the audit log", probe.backend)
