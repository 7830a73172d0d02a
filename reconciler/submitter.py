"""Owns who may drop jobs as this host knows them, and directories that are theirs; does not decide who may."""

from __future__ import annotations

import contextlib
import os
import pwd
from dataclasses import dataclass
from typing import TYPE_CHECKING

from reconciler.durable import DIRECTORY

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class Submitter:
    """A user who may drop jobs: the name of its directory, and its uid and gid on this host."""

    name: str
    uid: int
    gid: int


def account(name: str) -> Submitter | None:
    """The user called `name` on this host, or None."""
    if "/" in name or name.startswith("."):
        return None
    try:
        entry = pwd.getpwnam(name)
    except (KeyError, ValueError):
        return None
    return Submitter(name, entry.pw_uid, entry.pw_gid) if entry.pw_name == name else None


def make_own(parent: Path, submitter: Submitter, *inner: str) -> None:
    """Make `parent/<submitter>` and directories in it, owned by the submitter, 0700.

    Raises:
        OSError: something else is in the way, or the file system does not let us.
    """
    outer = os.open(parent, DIRECTORY)
    try:
        own = _make(outer, submitter.name, submitter)
        try:
            for name in inner:
                os.close(_make(own, name, submitter))
        finally:
            os.close(own)
    finally:
        os.close(outer)


def _make(directory: int, name: str, submitter: Submitter) -> int:
    with contextlib.suppress(FileExistsError):
        os.mkdir(name, 0o700, dir_fd=directory)
    made = os.open(name, DIRECTORY, dir_fd=directory)
    if os.fstat(made).st_uid == os.geteuid():  # new, or a crash came between its making and its handing over
        os.fchown(made, submitter.uid, submitter.gid)
    return made
