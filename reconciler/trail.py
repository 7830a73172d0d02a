"""Owns which audit rows one job leaves, and their range; does not decide what happened."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Protocol

from reconciler.core.audit import Event, EventName, Head
from reconciler.core.result import AuditRange
from reconciler.journal import JournalFailed

if TYPE_CHECKING:
    from collections.abc import Mapping

    from reconciler.claim import Claim


class Audit(Protocol):
    """The audit log, as the job side needs it."""

    @property
    def head(self) -> Head:
        """The last row that is on disk."""

    async def append(self, *events: Event) -> int:
        """Write rows next to each other and give the last one's number, once they are on disk.

        Raises:
            JournalFailed: they are not; what waits for them must not happen.
        """


class AuditLog:
    """The audit log, with the knowledge of whether it takes rows: while it does not, nothing is launched."""

    def __init__(self, audit: Audit) -> None:
        self._audit = audit
        self._failing: str | None = None

    @property
    def head(self) -> Head:
        """The last row that is on disk."""
        return self._audit.head

    async def append(self, *events: Event) -> int:
        """Write rows next to each other and give the last one's number, once they are on disk.

        Raises:
            JournalFailed: they are not; what waits for them must not happen.
        """
        try:
            last = await self._audit.append(*events)
        except JournalFailed as error:
            self._failing = str(error)
            raise
        self._failing = None
        return last

    async def failing(self) -> str | None:
        """Say why the log takes no rows, having tried again; None while it takes them."""
        if self._failing is not None:
            message = f"rows were lost: {self._failing}"
            event = Event(
                name=EventName.FAIL,
                actor="ringfenced",
                object="audit",
                outcome="resumed",
                code="audit_failed",
                message=message,
            )
            with contextlib.suppress(JournalFailed):
                await self.append(event)
        return self._failing


class Trail:
    """The rows of one job, in the order in which it leaves them."""

    def __init__(self, audit: AuditLog, claim: Claim, *, agent: str | None, revision: str | None) -> None:
        self._audit = audit
        self._run = claim.run
        self._actor = claim.submitter.name
        self._object = f"jobs/{claim.job}" if agent is None else f"agents/{agent}"
        self._revision = revision
        self._first: int | None = None
        self._last = 0

    async def append(self, *events: Event) -> int:
        """Write rows that are made already.

        Raises:
            JournalFailed: they are not on disk.
        """
        last = await self._audit.append(*events)
        self._first = last - len(events) + 1 if self._first is None else self._first
        self._last = max(self._last, last)
        return last

    async def add(
        self,
        name: EventName,
        outcome: str,
        *,
        code: str | None = None,
        message: str = "",
        detail: Mapping[str, object] | None = None,
    ) -> None:
        """Write one row of this job.

        Raises:
            JournalFailed: it is not on disk.
        """
        await self.append(
            Event(
                name=name,
                actor=self._actor,
                object=self._object,
                outcome=outcome,
                code=code,
                message=message,
                revision=self._revision,
                run=self._run,
                detail=detail,
            )
        )

    def range(self) -> AuditRange | None:
        """Where the job's rows are, so far; None without any."""
        if self._first is None:
            return None
        head = self._audit.head
        return AuditRange(first=self._first, last=self._last, head=head.seq, hash=head.hash)
