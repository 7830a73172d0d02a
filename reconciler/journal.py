"""Owns the audit log on disk: when a row is durable, and its repair after a crash; does not decide what is written."""

from __future__ import annotations

import fcntl
import hashlib
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import anyio
from loguru import logger

from reconciler.core.audit import (
    GENESIS,
    Broken,
    Event,
    EventName,
    Head,
    chain,
    line_of,
    read_row,
    verify,
)
from reconciler.core.cut import canonical
from reconciler.durable import write_all
from reconciler.journal_files import HEAD, LOG, full, line_before, read_head, write_head

if TYPE_CHECKING:
    from pathlib import Path

    from reconciler.clock import Clock

MOST_BYTES = 64 * 1024 * 1024
"""Size at which the log goes on in a new file, where the host says nothing else."""
_TORN_KEPT = 4096
_NEXT = ".audit.jsonl.next"
_FLAGS = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW


class JournalFailed(Exception):  # noqa: N818 - the name says what happened
    """A row is not on disk. Whatever waited for it must not happen."""


@dataclass(slots=True, eq=False)
class _Waiting:
    """One caller's events on their way to disk."""

    events: tuple[Event, ...]
    seq: int = 0
    failed: OSError | None = None
    done: bool = False


class Journal:
    """The one writer of an audit log; a lock on the file keeps a second one out.

    Rows that are appended while another batch is being written share the next write and the next fsync, so nothing
    waits longer than for two of them, and a row is never held back to fill a batch.
    """

    def __init__(self, directory: int, log: int, clock: Clock, head: Head, size: int, *, most: int) -> None:
        self._directory = directory
        self._log = log
        self._clock = clock
        self._head = head
        self._size = size
        self._most = most
        self._failure: str | None = None
        self._queue: list[_Waiting] = []
        self._lock = anyio.Lock()

    @classmethod
    def open(cls, directory: Path, clock: Clock, *, most: int = MOST_BYTES) -> Self | Broken:
        """Open the log below `directory` (made with mode 0700 when missing), and repair a last line that a crash tore.

        With more than `most` bytes in the file that is written to, the next row goes into a new one.

        Gives Broken when the log does not reach its head, or what comes after its head does not hold: that is no crash,
        and the log is left as it is, as evidence. Rows before the head are for `verify` to check.

        Raises:
            JournalFailed: the log cannot be opened or written, or another process holds it.
        """
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            folder = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise JournalFailed(f"{directory}: {error.strerror}") from error
        log = -1
        try:
            log = os.open(LOG, _FLAGS, 0o600, dir_fd=folder)
            fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.fsync(folder)
            found = _recover(directory, log)
            if isinstance(found, Broken):
                os.close(log)
                os.close(folder)
                return found
            journal = cls(folder, log, clock, found.head, found.size, most=most)
            if found.repair is not None:
                os.ftruncate(log, found.size)
                journal._commit([_Waiting((found.repair,))])
        except BlockingIOError as error:
            os.close(log)
            os.close(folder)
            raise JournalFailed(f"{directory / LOG} is held by another ringfenced: only one may write it") from error
        except OSError as error:
            if log >= 0:
                os.close(log)
            os.close(folder)
            raise JournalFailed(f"{directory / LOG}: {error.strerror}") from error
        return journal

    @property
    def head(self) -> Head:
        """The last row that is on disk."""
        return self._head

    @property
    def failure(self) -> str | None:
        """Why nothing can be written any more, or None. Only opening the log again clears it."""
        return self._failure

    def close(self) -> None:
        """Give the log up. Every row that was promised is already on disk."""
        os.close(self._log)
        os.close(self._directory)
        self._failure = "the audit log is closed"

    async def append(self, *events: Event) -> int:
        """Write rows for `events`, in order and next to each other; give the last one's sequence number.

        Returns only when the rows and the head are on disk.

        Raises:
            JournalFailed: they are not. What waits for these rows must not happen.
            TypeError: an event holds something that is not JSON.
        """
        if not events:
            return self._head.seq
        for event in events:
            canonical([event.before, event.after, event.detail])  # an event that is not JSON fails its caller only
        waiting = _Waiting(events)
        self._queue.append(waiting)
        try:
            async with self._lock:
                if not waiting.done:
                    # The batch carries the rows of others: whoever started it finishes it, cancelled or not.
                    with anyio.CancelScope(shield=True):
                        batch, self._queue = self._queue, []
                        await anyio.to_thread.run_sync(self._attempt, batch)
        finally:
            if waiting in self._queue:
                self._queue.remove(waiting)
        if waiting.failed is not None:
            raise JournalFailed(f"the audit row was not written: {waiting.failed.strerror}") from waiting.failed
        return waiting.seq

    def _attempt(self, batch: list[_Waiting]) -> None:
        try:
            if self._size >= self._most and self._failure is None:
                self._go_on()
            self._commit(batch)
        except OSError as error:
            for one in batch:
                one.failed = error
        for one in batch:
            one.done = True

    def _commit(self, batch: list[_Waiting]) -> None:
        if self._failure is not None:
            raise OSError(5, self._failure)
        head, rows = self._head, []
        now = self._clock.now()
        for one in batch:
            for event in one.events:
                row = chain(prev=head.hash, seq=head.seq + 1, time=now, event=event)
                head = Head(head.seq + 1, str(row["hash"]))
                rows.append(row)
            one.seq = head.seq
        data = b"".join(map(line_of, rows))
        try:
            write_all(self._log, data)
        except OSError as error:
            # No space, most likely: take back the part that got there, and let later rows try again.
            try:
                os.ftruncate(self._log, self._size)
            except OSError:
                self._failure = f"a half-written row could not be taken back after: {error.strerror}"
            raise
        try:
            os.fsync(self._log)
            write_head(self._directory, head, self._size + len(data))
        except OSError as error:
            # After a failed fsync the kernel forgets what it lost, so trying again would lie.
            self._failure = f"the audit log could not be made durable: {error.strerror}"
            raise
        self._head, self._size = head, self._size + len(data)
        for row in rows:
            # The hash is in the line, so that a head is kept wherever the host's own log is kept; escaped, because
            # what a row tells of may have been named by somebody else.
            logger.bind(audit=row).info(
                "{} {} {!a} {!a} row {} {}",
                *(row["event"], row["outcome"], row["object"], row["message"], row["seq"], row["hash"]),
            )

    def _go_on(self) -> None:
        """Go on in a new file. Cut off anywhere, `_recover` finds where the chain ends.

        Raises:
            OSError: the log is full and there is no new file; the next batch tries again.
        """
        following = os.open(_NEXT, _FLAGS | os.O_TRUNC, 0o600, dir_fd=self._directory)
        try:
            fcntl.flock(following, fcntl.LOCK_EX | fcntl.LOCK_NB)  # before anybody can find it under its own name
            os.rename(LOG, full(self._head.seq), src_dir_fd=self._directory, dst_dir_fd=self._directory)
        except OSError:
            os.close(following)
            raise
        os.close(self._log)
        self._log, self._size = following, 0
        try:
            os.rename(_NEXT, LOG, src_dir_fd=self._directory, dst_dir_fd=self._directory)
            write_head(self._directory, self._head, 0)
        except OSError as error:
            self._failure = f"the audit log could not go on in a new file: {error.strerror}"
            raise


@dataclass(frozen=True, slots=True)
class _Recovered:
    head: Head
    size: int
    repair: Event | None


def _recover(directory: Path, log: int) -> _Recovered | Broken:
    """Find where the chain ends: from the stored head on, every row is checked; only the last line may be torn."""
    stored = read_head(directory)
    if isinstance(stored, str):
        return Broken(0, 0, stored)
    start, offset = (GENESIS, 0) if stored is None else stored
    if stored is not None and start.seq > 0:
        last = _end_of_full(directory, start) if os.fstat(log).st_size == 0 or offset == 0 else None
        if last is not None:
            offset = 0
        row = read_row(line_before(log, offset) if last is None else last)
        if isinstance(row, str) or row["hash"] != start.hash or row["seq"] != start.seq:
            return Broken(start.seq, 0, f"the row that {HEAD} names is not where it says: rows were changed or cut off")
    size, whole, torn = offset, [], b""
    with os.fdopen(os.dup(log), "rb") as file:
        file.seek(offset)
        for line in file:
            if line.endswith(b"\n"):
                whole.append(line)
                size += len(line)
            else:
                torn = line
    checked = verify(whole, None, start=start)
    if isinstance(checked, Broken):
        return checked
    if torn:
        repair = _repair(
            "torn_line",
            f"a last line of {len(torn)} bytes that a crash tore was taken away",
            bytes=len(torn),
            sha256=hashlib.sha256(torn).hexdigest(),
            text=torn[:_TORN_KEPT].decode("ascii", "backslashreplace"),
        )
    elif stored is None and checked.rows:
        repair = _repair("head_missing", f"{HEAD} was missing beside {checked.rows} rows that hold", rows=checked.rows)
    else:
        repair = None
    return _Recovered(checked.head, size, repair)


def _end_of_full(directory: Path, head: Head) -> bytes | None:
    """Give the last line of the file that ends at `head`, None when there is none such.

    The log goes on in a new file by then, which is empty, or holds rows that the stored head does not know of.
    """
    try:
        with (directory / full(head.seq)).open("rb") as file:
            return line_before(file.fileno(), os.fstat(file.fileno()).st_size)
    except FileNotFoundError:
        return None


def _repair(code: str, message: str, **detail: int | str) -> Event:
    return Event(
        name=EventName.AUDIT_REPAIR,
        actor="ringfenced",
        object=LOG,
        outcome="repaired",
        code=code,
        message=message,
        detail=detail,
    )
