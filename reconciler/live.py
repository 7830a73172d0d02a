"""Owns what is seen of one run while it happens: bounded live files and tail, decisions and their audit rows.

Does not decide, start or stop anything.
"""

from __future__ import annotations

import os
from collections import Counter
from typing import TYPE_CHECKING, Protocol

import anyio

from proxy.record import Verdict
from reconciler.core.audit import Event, EventName
from reconciler.core.result import Decisions, Output
from reconciler.live_files import DECISIONS, OUTPUT, make, open_to, punch

if TYPE_CHECKING:
    from pathlib import Path

    from proxy.record import Record
    from reconciler.backends.base import Stream
    from reconciler.submitter import Submitter

KEPT_DECISIONS = 10_000
"""Of one run, lines of decisions.jsonl and audit rows: of denials, of allows, and of targets that were allowed first.

Each has room of its own, so that nobody can hide by noise where something went; what comes after is counted.
"""
KEPT_GAPS = 100
"""Rows that each tell of decisions that did not arrive; later ones are counted."""
_LIVE_WINDOW = 1024 * 1024
"""Bytes of output beyond the agent's own limit that a follower may lag behind."""
_TAIL = 16 * 1024
"""Bytes of output that result.json repeats."""
_BATCH = 500
_CONTINUATION = range(0x80, 0xC0)
"""Bytes that go on a character of UTF-8 (RFC 3629)."""


class Rows(Protocol):
    """Where audit rows go."""

    async def append(self, *events: Event) -> int:
        """Write rows next to each other and give the last one's number, once they are on disk."""


class Live:
    """What a backend's observer is told of one run. Its methods return at once and never raise.

    `runtime/runs/<run>/` and output.log and decisions.jsonl in it are root's: what is read back is what was written,
    and nobody gets a place below /run to fill. An access list opens it to the submitter alone. output.log is
    append-only and its bytes keep their offsets: what is older than the window becomes a hole, so a follower never
    reads twice.
    """

    def __init__(
        self, directory: Path, *, run: str, agent: str, revision: str, submitter: Submitter, limit: int
    ) -> None:
        """Make the live files.

        Raises:
            OSError: the runtime directory cannot be written, or its file system knows no access lists.
        """
        self.broken: str | None = None
        """Why a decision could not be kept; the run must not go on then."""
        self.undone: list[str] = []
        """Steps of the teardown that failed."""
        self.created = anyio.Event()
        self._run, self._agent, self._revision = run, agent, revision
        self._limit = limit
        self._tail = bytearray()
        self._written = 0
        self._punched = 0
        self._verdicts: Counter[Verdict] = Counter()
        self._beyond: Counter[tuple[Verdict, str]] = Counter()
        self._kept: Counter[Verdict] = Counter()
        self._said: int | None = None
        self.cut = False
        """Whether the proxy ended without saying which decision was its last."""
        self._missing = self._last = self._gaps = self._uncounted = 0
        self._targets: set[tuple[str, int | None]] = set()
        self._pending: list[Event] = []
        self._summed = False
        self._news = anyio.Event()
        self._rows: list[tuple[int, int]] = []
        directory.mkdir(mode=0o700)
        self._output = make(directory / OUTPUT)
        self._decisions = make(directory / DECISIONS)
        if submitter.uid != os.geteuid():
            open_to(directory, submitter.uid)

    def files(self) -> dict[str, tuple[int, int]]:
        """Give device and inode of each live file, by name."""
        found = {OUTPUT: os.fstat(self._output), DECISIONS: os.fstat(self._decisions)}
        return {name: (facts.st_dev, facts.st_ino) for name, facts in found.items()}

    def step(self, name: str) -> None:
        """Something of the run exists from here on."""
        del name
        self.created.set()

    def undo_failed(self, step: str, message: str) -> None:
        """Keep it for the teardown's row."""
        self.undone.append(f"{step}: {message}")

    def output(self, stream: Stream, data: bytes) -> None:
        """Keep the tail, and let followers see it."""
        del stream
        self._tail += data
        if len(self._tail) > 2 * self._limit:
            del self._tail[: -self._limit]
        self._written += len(data)
        try:
            os.write(self._output, data)
            keep = self._written - self._limit - _LIVE_WINDOW
            if keep - self._punched > _LIVE_WINDOW and punch(self._output, self._punched, keep):
                self._punched = keep
        except OSError:
            pass  # the tail is in memory: followers lose, the result does not

    def decision(self, record: Record) -> None:
        """Count it, keep its line, and have its audit row written."""
        if record.seq > self._last + 1:
            self._gap(self._last + 1, record.seq - 1)
        self._last = max(self._last, record.seq)
        self._verdicts[record.verdict] += record.count
        target = (record.host, record.port)
        allowed = record.verdict is Verdict.ALLOW
        first = allowed and target not in self._targets and len(self._targets) < KEPT_DECISIONS
        if not first and self._kept[record.verdict] >= KEPT_DECISIONS:
            self._beyond[record.verdict, record.code] += record.count
            return
        if first:
            self._targets.add(target)
        else:
            self._kept[record.verdict] += 1
        try:
            os.write(self._decisions, record.to_line())
        except OSError as error:
            self.broken = f"{DECISIONS} cannot be written: {error.strerror}"
        if first or not allowed:
            self._pending.append(self._row(record))
        self._news.set()

    def decisions_end(self, last: int | None) -> None:
        """Keep how many there were."""
        self._said = last

    def _end(self) -> None:
        """Leave a row where decisions are known to be missing at the end, or nobody knows whether they are."""
        if self._said is None:
            self.cut = True
            message = (
                f"the proxy did not say which decision was its last: what it decided after {self._last} is unknown"
            )
            self._pending.append(self._gap_row("decisions_cut", message))
        elif self._said > self._last:
            self._gap(self._last + 1, self._said)

    def _row(self, record: Record) -> Event:
        allowed = record.verdict is Verdict.ALLOW
        return Event(
            name=EventName.EGRESS_ALLOW if allowed else EventName.EGRESS_DENY,
            actor=f"agents/{self._agent}",
            object=record.host if record.port is None else f"{record.host}:{record.port}",
            outcome=record.verdict.value,
            code=record.code,
            message=record.message,
            revision=self._revision,
            run=self._run,
            detail={
                "seq": record.seq,
                "generation": record.generation,
                "layer": record.layer,
                "method": record.method,
                "address": record.address,
                "count": record.count,
            },
        )

    def _gap(self, first: int, last: int) -> None:
        self._missing += last - first + 1
        self._gaps += 1
        if self._gaps > KEPT_GAPS:
            self._uncounted += last - first + 1
            return
        message = f"decisions {first} to {last} of the proxy did not arrive"
        self._pending.append(self._gap_row("decisions_missing", message))

    def _gap_row(self, code: str, message: str) -> Event:
        return Event(
            name=EventName.FAIL,
            actor="ringfenced",
            object=f"agents/{self._agent}",
            outcome="gap",
            code=code,
            message=message,
            revision=self._revision,
            run=self._run,
        )

    async def pump(self, rows: Rows) -> None:
        """Write audit rows of decisions as they come, for ever.

        Raises:
            JournalFailed: they cannot be written.
        """
        while True:
            await self._news.wait()
            self._news = anyio.Event()
            await self.flush(rows)

    async def flush(self, rows: Rows, *, final: bool = False) -> None:
        """Write the audit rows that are due; with `final` also those that only count.

        Raises:
            JournalFailed: they cannot be written.
        """
        if final and not self._summed:
            self._end()
            self._pending.extend(self._counted())
            if self._uncounted:
                message = f"{self._uncounted} more decisions did not arrive"
                self._pending.append(self._gap_row("decisions_missing", message))
            self._summed = True
        # Once a batch is on its way its numbers must be kept, whoever gives up waiting.
        with anyio.CancelScope(shield=True):
            while self._pending:
                batch = self._pending[:_BATCH]
                last = await rows.append(*batch)
                del self._pending[: len(batch)]
                self._note(last - len(batch) + 1, last)

    def _counted(self) -> list[Event]:
        return [
            Event(
                name=EventName.EGRESS_ALLOW if verdict is Verdict.ALLOW else EventName.EGRESS_DENY,
                actor=f"agents/{self._agent}",
                object="*",
                outcome=verdict.value,
                code=code,
                message=f"{count} more after the first {KEPT_DECISIONS} decisions of this run",
                revision=self._revision,
                run=self._run,
                detail={"count": count},
            )
            for (verdict, code), count in sorted(self._beyond.items())
        ]

    def _note(self, first: int, last: int) -> None:
        if self._rows and self._rows[-1][1] == first - 1:
            self._rows[-1] = (self._rows[-1][0], last)
        else:
            self._rows.append((first, last))

    def decisions(self) -> Decisions:
        """Count what was decided, so far."""
        return Decisions(
            allowed=self._verdicts[Verdict.ALLOW],
            denied=self._verdicts[Verdict.DENY],
            coalesced=sum(self._beyond.values()),
            missing=self._missing,
            cut=self.cut,
            rows=tuple(self._rows),
        )

    def written(self) -> Output:
        """Say what the command wrote, so far."""
        return output_of(self.tail(), self._written)

    def tail(self) -> bytes:
        """Give the last bytes of output, at most the agent's limit."""
        return bytes(self._tail[-self._limit :])

    def lines(self) -> bytes:
        """Give every line of decisions.jsonl."""
        size = os.fstat(self._decisions).st_size
        return os.pread(self._decisions, size, 0)

    def close(self) -> None:
        """Give the live files up."""
        os.close(self._output)
        os.close(self._decisions)


def output_of(tail: bytes, written: int) -> Output:
    """What a result says of output that ended in `tail` and was `written` bytes in all."""
    shown = tail[-_TAIL:]
    if len(shown) < written:
        # A cut may fall inside a character: what is left of that one is no text.
        start = next((at for at, byte in enumerate(shown[:4]) if byte not in _CONTINUATION), 0)
        shown = shown[start:]
    return Output(bytes=written, truncated=len(tail) < written, tail=shown.decode("utf-8", "backslashreplace"))
