"""Owns what every part of the job side shares of its daemon; does nothing itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from reconciler.core.audit import stamp

if TYPE_CHECKING:
    from pathlib import Path

    from reconciler.clock import Clock
    from reconciler.host import Host
    from reconciler.trail import AuditLog


@dataclass(frozen=True, slots=True, kw_only=True)
class Shell:
    """The daemon around a job. `owner` labels everything that this host's daemon creates."""

    host: Host
    owner: str
    clock: Clock
    audit: AuditLog

    def now(self) -> str:
        """Give the time as rows and results spell it."""
        return stamp(self.clock.now())

    def live(self, run: str) -> Path:
        """Give the directory of a run's live files."""
        return self.host.runtime / "runs" / run
