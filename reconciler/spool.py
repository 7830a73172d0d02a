"""Owns the spool as its submitters see it: layout, delivery, order and claims; does not read a job or report on one."""

from __future__ import annotations

import errno
import fcntl
import heapq
import os
import stat
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Self

from reconciler import durable
from reconciler.claim import Claim
from reconciler.core.job import RefusalCode, Refused, stem_of
from reconciler.directory import Unsafe, open_directory
from reconciler.durable import DIRECTORY
from reconciler.submitter import Submitter, account, make_own

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

_FULL_OR_BROKEN = frozenset({errno.ENOSPC, errno.EROFS, errno.EIO})
"""What the spool's file system says of itself; any other error comes from what a submitter made of its directory."""
_MAX_NAMES = 10_000
"""Names of one submitter that one look takes in; the rest wait for a later look."""
_PEEK = 512
"""Bytes of a file that is looked at before it is claimed: enough for a cancel, and for little else."""
FREE_BYTES = 64 * 1024 * 1024
FREE_INODES = 1024
"""Below either of these marks nothing is claimed: a result that cannot be written is worse than a job that waits."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """One name in a submitter's `new`. `arrived` is its inode's change time in ns, which its owner cannot set."""

    arrived: int
    submitter: Submitter
    name: bytes


def in_turn(found: Iterable[Waiting], *, running: Mapping[str, int], served: Mapping[str, int]) -> Iterator[Waiting]:
    """Give what waits in the order in which it may be claimed: each submitter's oldest first, and in turn.

    Whoever has the fewest jobs running comes first, and among those whoever was served the longest ago: a long queue
    of one submitter is in nobody else's way. `running` and `served` are by submitter; a larger turn is a later one.
    """
    queues: dict[str, list[Waiting]] = {}
    for one in sorted(found, key=lambda one: (one.arrived, one.submitter.name, one.name), reverse=True):
        queues.setdefault(one.submitter.name, []).append(one)
    turns = [(running.get(name, 0), served.get(name, 0), queue[-1].arrived, name) for name, queue in queues.items()]
    heapq.heapify(turns)
    latest = max(served.values(), default=0)
    while turns:
        many, _, _, name = heapq.heappop(turns)
        yield queues[name].pop()
        latest += 1
        if queues[name]:
            heapq.heappush(turns, (many + 1, latest, queues[name][-1].arrived, name))


def deliver(root: Path, *, submitter: str, name: str, data: bytes) -> Path | Refused:
    """Drop a job file into the spool as its submitter: it appears whole or not at all, and replaces nothing.

    Gives where it is, or why it was not delivered.

    Raises:
        OSError: the spool's file system does not take it.
    """
    if stem_of(name) is None:
        return Refused(RefusalCode.BAD_NAME, "name the job file [a-z0-9][a-z0-9._-]*.yaml, at most 100 characters")
    new = root / "in" / submitter / "new"
    try:
        directory = os.open(new, DIRECTORY)
    except FileNotFoundError:
        message = f"{new} does not exist: ringfenced makes it once an agent in force names {submitter} as a submitter"
        return Refused(RefusalCode.NOT_A_SUBMITTER, message)
    except PermissionError:
        return Refused(RefusalCode.NOT_A_SUBMITTER, f"{new} is closed to this user: submit as {submitter}")
    try:
        # A file without a name until it is whole: no half-written job can be seen, and a crash leaves nothing.
        descriptor = os.open(".", os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o600, dir_fd=directory)
        try:
            durable.write_all(descriptor, data)
            os.fsync(descriptor)
            os.link(f"/proc/self/fd/{descriptor}", name, dst_dir_fd=directory, follow_symlinks=True)
        finally:
            os.close(descriptor)
        os.fsync(directory)
    except FileExistsError:
        return Refused(RefusalCode.STEM_USED, f"{name} is waiting already: give the job another name")
    finally:
        os.close(directory)
    return new / name


class Spool:
    """The spool of one daemon, which holds a lock on it for as long as it is open.

    `in/<submitter>` belongs to the submitter, so everything in it is reached through descriptors that follow no link.
    """

    def __init__(self, root: Path, lock: int) -> None:
        self.root = root
        self.claimed = root / "claimed"
        self._lock = lock

    @classmethod
    def open(cls, root: Path) -> Self | Refused:
        """Make what is missing below `root`, and take the lock; Refused when others could change it, or have the lock.

        Raises:
            OSError: the file system does not let us.
        """
        root.mkdir(mode=0o755, parents=True, exist_ok=True)
        opened = open_directory(root, frozenset({0, os.geteuid()}))
        if isinstance(opened, Unsafe):
            return Refused(opened.code, opened.message)
        opened.close()
        lock = os.open(root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            return Refused("locked", f"another ringfenced holds {root}: one daemon for one spool")
        for name, mode in (("in", 0o755), ("claimed", 0o700), ("done", 0o755), ("quarantine", 0o700)):
            (root / name).mkdir(exist_ok=True)
            (root / name).chmod(mode)
        return cls(root, lock)

    def close(self) -> None:
        """Give the lock up."""
        os.close(self._lock)

    def room(self) -> str | None:
        """Why nothing may be claimed for want of space; None while there is enough."""
        facts = os.statvfs(self.root)
        if facts.f_bavail * facts.f_frsize < FREE_BYTES:
            return f"less than {FREE_BYTES // 1024 // 1024} MiB are free on {self.root}: nothing is claimed"
        if facts.f_files and facts.f_favail < FREE_INODES:
            return f"fewer than {FREE_INODES} inodes are free on {self.root}: nothing is claimed"
        return None

    def prepare(self, names: Iterable[str]) -> tuple[str, ...]:
        """Make the directories of each submitter; gives the names that are no users of this host, or are in the way."""
        unusable = []
        for name in sorted(set(names)):
            submitter = account(name)
            if submitter is None or submitter.name != name or "/" in name or name.startswith("."):
                unusable.append(name)
                continue
            try:
                make_own(self.root / "in", submitter, "tmp", "new")
                make_own(self.root / "done", submitter)
            except OSError as error:
                if error.errno not in {errno.ELOOP, errno.ENOTDIR, errno.ENOENT}:
                    raise
                unusable.append(name)
        return tuple(unusable)

    def waiting(self) -> tuple[Waiting, ...]:
        """Give what waits in each `new`, oldest first; a directory that is not its submitter's own is passed over."""
        found: list[Waiting] = []
        for entry in os.scandir(self.root / "in"):
            submitter = account(entry.name)
            if submitter is not None and submitter.name == entry.name:
                found.extend(self._waiting(submitter))
        return tuple(sorted(found, key=lambda one: (one.arrived, one.submitter.name, one.name)))

    def _waiting(self, submitter: Submitter) -> Iterator[Waiting]:
        try:
            directory = self._new(submitter)
        except OSError:
            return
        try:
            for name in islice(_names(directory), _MAX_NAMES):
                try:
                    facts = os.stat(name, dir_fd=directory, follow_symlinks=False)
                except OSError:
                    continue  # gone; or a mount of its owner's, which even root may not look at (FUSE)
                yield Waiting(facts.st_ctime_ns, submitter, name)
        finally:
            os.close(directory)

    def _new(self, submitter: Submitter) -> int:
        """Open a submitter's `new`.

        Raises:
            OSError: it is missing, a link, or not the submitter's own.
        """
        outer = os.open(self.root / "in" / submitter.name, DIRECTORY)
        try:
            inner = os.open("new", DIRECTORY, dir_fd=outer)
        finally:
            os.close(outer)
        facts = os.fstat(inner)
        if facts.st_uid != submitter.uid or facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            os.close(inner)
            raise PermissionError(errno.EPERM, "not the submitter's own directory", submitter.name)
        return inner

    def peek(self, waiting: Waiting) -> bytes:
        """Give the first bytes of what waits, where it is a small plain file of its submitter's; else nothing."""
        try:
            directory = self._new(waiting.submitter)
            try:
                file = os.open(
                    waiting.name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory
                )
            finally:
                os.close(directory)
            try:
                facts = os.fstat(file)
                own = stat.S_ISREG(facts.st_mode) and facts.st_uid == waiting.submitter.uid
                return os.read(file, _PEEK) if own and facts.st_size <= _PEEK else b""
            finally:
                os.close(file)
        except OSError:
            return b""

    def claim(self, waiting: Waiting, run: str, now: str) -> Claim | None:
        """Take one name out of `new` into `claimed/<run>`; None when it is gone, whoever took it.

        Raises:
            OSError: the spool cannot be written.
        """
        claim = Claim.make(self.root, run=run, submitter=waiting.submitter, name=waiting.name, claimed=now)
        target = os.open(claim.file.parent, DIRECTORY)
        source = -1
        try:
            try:
                source = self._new(waiting.submitter)
                durable.rename_new(waiting.name, claim.file.name, source_fd=source, target_fd=target)
            except OSError as error:
                claim.forget()
                if error.errno in _FULL_OR_BROKEN:
                    raise
                return None
            # The name must be gone from `new` for good before anything is decided, or a power cut would bring it back.
            os.fsync(target)
            os.fsync(source)
        finally:
            os.close(target)
            if source >= 0:
                os.close(source)
        return claim

    def give_back(self, claim: Claim) -> bool:
        """Put a claimed file of which nothing was decided back into `new`.

        False when that is not possible: its name is taken there again, or `new` is not its submitter's any more.
        """
        try:
            target = self._new(claim.submitter)
        except OSError:
            return False
        source = -1
        try:
            source = os.open(claim.file.parent, DIRECTORY)
            durable.rename_new(claim.file.name, claim.file.name, source_fd=source, target_fd=target)
            os.fsync(target)
        except FileNotFoundError:
            pass  # the crash was before the rename: it is in `new` still
        except OSError as error:
            if error.errno in _FULL_OR_BROKEN:
                raise
            return False
        finally:
            os.close(target)
            if source >= 0:
                os.close(source)
        claim.forget()
        return True

    def claims(self) -> tuple[str, ...]:
        """Give the run id of every claim that is on disk, oldest first."""
        with os.scandir(self.claimed) as entries:
            return tuple(sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False)))


def _names(directory: int) -> Iterator[bytes]:
    with os.scandir(directory) as entries:
        for entry in entries:
            yield os.fsencode(entry.name)
