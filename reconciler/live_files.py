"""Owns the live files of a run on disk: making them, opening them to one user, and reading back what one left behind.

Does not know what is written into them.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import shutil
import struct
from typing import TYPE_CHECKING, BinaryIO

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

OUTPUT = "output.log"
DECISIONS = "decisions.jsonl"
_PUNCH = 0x01 | 0x02  # FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE


def make(path: Path) -> int:
    """Make one file that only root can change; give it open for appending.

    Raises:
        OSError: it is there already, or cannot be made.
    """
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o600)
    os.fchmod(descriptor, 0o444)
    return descriptor


def open_to(directory: Path, uid: int) -> None:
    """Let one user read what is in a directory.

    Raises:
        OSError: its file system knows no access lists.
    """
    os.setxattr(directory, "system.posix_acl_access", _readable_by(uid))


def _readable_by(uid: int) -> bytes:
    """Give an access list in the kernel's form (linux/posix_acl_xattr.h): rwx for the owner, r-x for one user."""
    nobody = 0xFFFFFFFF  # what entries without a user of their own have as its id
    entries = ((0x01, 7, nobody), (0x02, 5, uid), (0x04, 0, nobody), (0x10, 5, nobody), (0x20, 0, nobody))
    return struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)


def punch(descriptor: int, start: int, end: int) -> bool:
    """Give the disk back what a file holds between two offsets; its size and other bytes stay (fallocate(2))."""
    library = ctypes.CDLL(None, use_errno=True)
    offset, length = ctypes.c_longlong(start), ctypes.c_longlong(end - start)
    return bool(library.fallocate(descriptor, _PUNCH, offset, length) == 0)


def recovered(directory: Path, files: Mapping[str, tuple[int, int]], limit: int) -> tuple[bytes, int, bytes]:
    """Read what the live files of an earlier daemon's run hold: last bytes of output, bytes in all, decision lines.

    `files` are device and inode of each: only the files that the daemon made are read, whatever has their names now.
    """
    tail, written, lines = b"", 0, b""
    with contextlib.suppress(OSError), _reopen(directory, OUTPUT, files) as file:
        written = file.seek(0, os.SEEK_END)
        file.seek(max(0, written - limit))
        tail = file.read(limit)
    with contextlib.suppress(OSError), _reopen(directory, DECISIONS, files) as file:
        lines = file.read()
    return tail, written, lines[: lines.rfind(b"\n") + 1]


def _reopen(directory: Path, name: str, files: Mapping[str, tuple[int, int]]) -> BinaryIO:
    """Open one live file again.

    Raises:
        OSError: it is gone, or something else has its name.
    """
    descriptor = os.open(directory / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    facts = os.fstat(descriptor)
    if files.get(name) != (facts.st_dev, facts.st_ino):
        os.close(descriptor)
        raise FileNotFoundError(errno.ENOENT, "not the file that was made", name)
    return os.fdopen(descriptor, "rb")


def forget(directory: Path) -> None:
    """Remove the live files of a run."""
    shutil.rmtree(directory, ignore_errors=True)
