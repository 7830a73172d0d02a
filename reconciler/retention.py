"""Owns what of the spool's results and quarantine is old enough to go, and its removal; audits nothing, starts nothing.

What a submitter has put into a directory of its own is never walked and never followed: of a result only the files that
a result has are removed, and a directory that holds anything else stays. What is in quarantine may be deep or large
without end and may grow meanwhile: it is taken apart level by level, a bounded number of names at a time.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections import defaultdict
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

from reconciler.durable import DIRECTORY

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

    from reconciler.host import Keep

RESULT_FILES = ("result.json", "output.log", "decisions.jsonl")
_FRESH_NS = 60 * 10**9
"""What is younger than this stays, whatever else is so: its run may not be over in every respect."""
_MOST = 1000
"""Things that one look removes, and names that it removes from quarantine."""
_MOST_NAMES = 50_000
"""Names of one submitter's own directory that one look takes in."""
_LIFTED = "gone."
"""What the name of a directory begins with that came up one level; no run id does."""
_STAYS = frozenset(
    {
        *(errno.EACCES, errno.EBUSY, errno.ELOOP, errno.ENOENT),
        *(errno.ENOTDIR, errno.ENOTEMPTY, errno.EPERM, errno.EXDEV),
    }
)
"""What a removal answers where the reason lies in what is there, not in the disk."""


@dataclass(frozen=True, slots=True)
class Kept:
    """One result, or one delivery in quarantine. `since` is its change time in ns, which its owner can only move on."""

    owner: str
    name: str
    since: int
    bytes: int


def due(found: Iterable[Kept], keep: Keep, *, now_ns: int) -> tuple[Kept, ...]:
    """Say what has to go, oldest first: of each owner what is too old, and what is beyond count and bytes."""
    by_owner: Mapping[str, list[Kept]] = defaultdict(list)
    for one in sorted(found, key=lambda one: (-one.since, one.name)):
        by_owner[one.owner].append(one)
    gone = []
    for own in by_owner.values():
        whole = 0
        for place, one in enumerate(own):
            whole += one.bytes
            age = now_ns - one.since
            beyond = place >= keep.results or whole > keep.bytes or age > keep.age * 10**9
            if beyond and age > _FRESH_NS:
                gone.append(one)
    return tuple(sorted(gone, key=lambda one: (one.since, one.name)))[:_MOST]


def results(done: Path) -> list[Kept]:
    """Give every result in `done/<submitter>/`."""
    found = []
    for submitter in (path.name for path in done.iterdir()):
        try:
            directory = os.open(done / submitter, DIRECTORY)
        except OSError:
            continue
        try:
            with os.scandir(directory) as entries:
                names = [entry.name for entry in islice(entries, _MOST_NAMES)]
            found += [one for name in names if (one := _result(submitter, directory, name)) is not None]
        finally:
            os.close(directory)
    return found


def _result(submitter: str, directory: int, name: str) -> Kept | None:
    """Measure one result; None where its directory is none, or holds no result."""
    try:
        inner = os.open(name, DIRECTORY, dir_fd=directory)
    except OSError:
        return None
    try:
        facts = os.fstat(inner)
        sizes = [_size(inner, file) for file in RESULT_FILES]
    finally:
        os.close(inner)
    return None if sizes[0] is None else Kept(submitter, name, facts.st_ctime_ns, sum(size or 0 for size in sizes))


def _size(directory: int, name: str) -> int | None:
    try:
        facts = os.stat(name, dir_fd=directory, follow_symlinks=False)
    except OSError:
        return None
    return facts.st_size if stat.S_ISREG(facts.st_mode) else None


def remove_result(done: Path, one: Kept) -> bool:
    """Remove one result; False when something else is in its directory, which stays then, without the result's files.

    Raises:
        OSError: the spool cannot be written.
    """
    try:
        own = os.open(done / one.owner, DIRECTORY)
    except OSError:
        return False
    try:
        try:
            inner = os.open(one.name, DIRECTORY, dir_fd=own)
            try:
                for file in RESULT_FILES:
                    _gone(os.unlink, file, inner)
            finally:
                os.close(inner)
        except FileNotFoundError:
            return False
        return _gone(os.rmdir, one.name, own)
    finally:
        os.close(own)


def quarantined(quarantine: Path) -> list[Kept]:
    """Give every delivery in quarantine, by the uid that it has. A tree has no size that holds."""
    found = []
    for name in (path.name for path in quarantine.iterdir()):
        try:
            facts = (quarantine / name).lstat()
            owner = facts.st_uid
            if stat.S_ISDIR(facts.st_mode):
                with os.scandir(quarantine / name) as entries:
                    inner = next(entries, None)
                    owner = owner if inner is None else inner.stat(follow_symlinks=False).st_uid
        except OSError:
            continue
        found.append(Kept(str(owner), name, 0 if name.startswith(_LIFTED) else facts.st_ctime_ns, 0))
    return found


def remove_quarantined(quarantine: Path, one: Kept) -> None:
    """Remove what it holds, at most a bounded number of names; a directory in it comes up one level and goes later.

    Raises:
        OSError: the spool cannot be written.
    """
    outer = os.open(quarantine, DIRECTORY)
    try:
        inner = _entered(one.name, outer)
        if inner is None:
            _gone(os.unlink, one.name, outer)
            return
        try:
            with os.scandir(inner) as entries:
                for entry in islice(entries, _MOST):
                    if not entry.is_dir(follow_symlinks=False):
                        _gone(os.unlink, entry.name, inner)
                    elif not _gone(os.rmdir, entry.name, inner):
                        _lift(entry.name, f"{_LIFTED}{secrets.token_hex(8)}", inner, outer)
        finally:
            os.close(inner)
        _gone(os.rmdir, one.name, outer)
    finally:
        os.close(outer)


def _entered(name: str, outer: int) -> int | None:
    try:
        return os.open(name, DIRECTORY, dir_fd=outer)
    except (FileNotFoundError, NotADirectoryError):
        return None


def _lift(name: str, target: str, inner: int, outer: int) -> None:
    try:
        os.rename(name, target, src_dir_fd=inner, dst_dir_fd=outer)
    except OSError as error:
        if error.errno not in _STAYS:
            raise


def _gone(remove: Callable[..., None], name: str, directory: int) -> bool:
    """Remove one name; False where that cannot be now, for a reason that lies in what is there."""
    try:
        remove(name, dir_fd=directory)
    except OSError as error:
        if error.errno not in _STAYS:
            raise
        return False
    return True
