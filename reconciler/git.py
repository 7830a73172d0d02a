"""Owns what is read of a git work tree: whether git is at work in it, and which commit HEAD names; never runs git."""

from __future__ import annotations

import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Self

_COMMIT = re.compile(r"[0-9a-f]{40}(?:[0-9a-f]{24})?\Z")
_REF = re.compile(r"refs/[A-Za-z0-9._/-]{1,200}\Z")
_SMALL = 4096
_PACKED = 1 << 20


@dataclass(frozen=True, slots=True)
class Repository:
    """The git directories of one work tree. What is read of them is text for people, and is taken only as a hash."""

    directory: Path
    common: Path

    @classmethod
    def find(cls, root: str, owners: frozenset[int] | None) -> Self | None:
        """Find the git directory of the work tree that `root` (a path without links) is, or lies in.

        A `.git` that is a file (a linked work tree, which is what git-sync makes) is followed to where it points.
        """
        for parent in (Path(root), *Path(root).parents):
            dot = parent / ".git"
            try:
                facts = dot.lstat()
            except OSError:
                continue
            if owners is not None and facts.st_uid not in owners:
                return None
            if stat.S_ISDIR(facts.st_mode):
                return cls(dot, dot)
            text = _text(dot, _SMALL)
            if text is None or not text.startswith("gitdir: "):
                return None
            directory = Path(os.path.normpath(parent / text.removeprefix("gitdir: ").rstrip("\n")))
            common = _text(directory / "commondir", _SMALL)
            where = directory if common is None else Path(os.path.normpath(directory / common.rstrip("\n")))
            return cls(directory, where)
        return None

    @property
    def lock(self) -> str:
        """The file that git holds while it changes the work tree."""
        return str(self.directory / "index.lock")

    def busy(self) -> bool:
        """Say whether git is changing the work tree now."""
        return os.path.lexists(self.lock)

    def commit(self) -> str | None:
        """Read which commit HEAD names; None where that cannot be told."""
        head = _text(self.directory / "HEAD", _SMALL)
        if head is None:
            return None
        head = head.strip()
        if not head.startswith("ref: "):
            return head if _COMMIT.match(head) else None
        ref = head.removeprefix("ref: ")
        if not _REF.match(ref) or ".." in PurePosixPath(ref).parts:
            return None
        loose = _text(self.common / ref, _SMALL)
        if loose is not None:
            return loose.strip() if _COMMIT.match(loose.strip()) else None
        for line in (_text(self.common / "packed-refs", _PACKED) or "").splitlines():
            commit, _, name = line.partition(" ")
            if name == ref and _COMMIT.match(commit):
                return commit
        return None


def _text(path: Path, most: int) -> str | None:
    """Read a small regular file; None when it is none, is too large or is not ASCII."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    except (OSError, ValueError):  # a path that a file names may hold a NUL, which is no OSError
        return None
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return None
        data = file.read(most + 1)
    if len(data) > most:
        return None
    try:
        return data.decode("ascii")
    except UnicodeDecodeError:
        return None
