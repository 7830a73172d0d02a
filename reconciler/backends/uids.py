"""Owns which uid of the host's range belongs to which live sandbox; knows nothing else of a sandbox."""

from __future__ import annotations

import contextlib
import fcntl
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


_PF_EXITING = 0x4
"""linux/sched.h."""


@dataclass(frozen=True, slots=True)
class NoUid:
    """Every uid of the range is taken; `message` says what to do."""

    message: str


@contextlib.contextmanager
def allocate(folder: Path, *, first: int, count: int) -> Iterator[int | NoUid]:
    """Take a uid that no other sandbox has and no process runs as; it is free again when the context ends.

    The lock on `folder`/<uid> is the kernel's: it is gone with the process that held it, however that ended.
    """
    folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    for uid in range(first, first + count):
        descriptor = os.open(folder / str(uid), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            if processes(uid):
                continue
            yield uid
            return
        finally:
            os.close(descriptor)
    yield NoUid(f"all {count} uids from {first} on are in use: lower max_parallel_runs or widen uid_count in host.yaml")


def processes(uid: int) -> tuple[int, ...]:
    """List the processes that run as `uid` now; a leftover must not share its uid with a new sandbox.

    One that has ended and only waits for its parent to notice runs no more.
    """
    found = []
    for entry in os.scandir("/proc"):
        if entry.name.isdecimal():
            # Not the owner of the directory: that is root's while a process may not be dumped (proc_pid(5)).
            with contextlib.suppress(OSError):
                status = Path(entry.path, "status").read_text("utf-8", "replace")
                ended = status.partition("\nState:\t")[2][:1] in ("Z", "X")
                if not ended and str(uid) in status.partition("\nUid:\t")[2].partition("\n")[0].split():
                    found.append(int(entry.name))
    return tuple(found)


def ending(pid: int) -> bool:
    """Say whether a process has ended or is about to: the kernel has left its control groups by then.

    It may take seconds of that, for thousands of open sockets, and its state reads as if it ran.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace")
    except OSError:
        return True
    # After the name, which may hold anything: state, five numbers, flags (proc_pid_stat(5)).
    return bool(int(text.rpartition(")")[2].split()[6]) & _PF_EXITING)
