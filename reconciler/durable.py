"""Owns how bytes get on disk for good, and how a name is taken without replacing another; knows no layout."""

from __future__ import annotations

import ctypes
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
"""Flags to open a directory that must not be a link."""
_RENAME_NOREPLACE = 1


def rename_new(source: bytes | str, target: bytes | str, *, source_fd: int, target_fd: int) -> None:
    """Rename without ever replacing anything (renameat2(2) with RENAME_NOREPLACE).

    Raises:
        FileExistsError: the target is there already.
        FileNotFoundError: the source is not there any more.
        OSError: anything else.
    """
    library = ctypes.CDLL(None, use_errno=True)
    old, new = os.fsencode(source), os.fsencode(target)
    if library.renameat2(source_fd, old, target_fd, new, _RENAME_NOREPLACE) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), os.fsdecode(new))


def write_all(descriptor: int, data: bytes) -> None:
    """Write all of `data`, however many calls that takes."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def write(path: Path, data: bytes, *, mode: int = 0o600) -> None:
    """Write `data` to `path` and to disk; follows no link. What refers to it comes after this returned."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(path, flags, mode)
    try:
        write_all(descriptor, data)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace(path: Path, data: bytes, *, mode: int = 0o600) -> None:
    """Replace `path` by a file that holds `data`: after a crash it is the old one or the new one, whole."""
    temporary = path.with_name(f".{path.name}.new")
    write(temporary, data, mode=mode)
    temporary.rename(path)
    sync(path.parent)


def sync(directory: Path) -> None:
    """Get a directory's names on disk."""
    descriptor = os.open(directory, DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
