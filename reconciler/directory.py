"""Owns how a directory or file is opened when others could have put traps on the way to it; reads nothing."""

from __future__ import annotations

import errno
import os
import pwd
import shlex
import stat
from dataclasses import dataclass
from pathlib import PurePosixPath

_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
_MAX_LINKS = 40  # what the kernel allows on one path (path_resolution(7))


@dataclass(frozen=True, slots=True)
class Unsafe:
    """The directory is missing, or somebody else could change what is in it; the message says what to do."""

    code: str
    message: str


@dataclass(frozen=True, slots=True)
class Opened:
    """An open directory. Who gets it closes it.

    `path` is where it really is; `links` are the symbolic links on the way there, each where it really is.
    """

    descriptor: int
    path: str
    identity: tuple[int, int]
    links: tuple[str, ...]

    def close(self) -> None:
        """Give the descriptor back."""
        os.close(self.descriptor)


def uid_of(user: str) -> int | None:
    """Give the uid of a user that settings name, by name or by number; None when this host has no such name."""
    if user.isascii() and user.isdecimal():
        return int(user)
    try:
        return pwd.getpwnam(user).pw_uid
    except KeyError:
        return None


def owners_of(user: str) -> frozenset[int] | Unsafe:
    """Give the uids that may own trusted files: root's, and that of `user` (a name or a number)."""
    uid = uid_of(user)
    if uid is None:
        return Unsafe("unknown_owner", f"there is no user {user!r}: create it, or name another policy_owner")
    return frozenset({0, uid})


def trusted(name: str, facts: os.stat_result, owners: frozenset[int] | None) -> Unsafe | None:
    """Say why a file or directory could be changed by somebody who is not in `owners`; None trusts everybody.

    `name` is its whole path, printable: the message holds a command to paste.

    A directory that is root's and sticky (/tmp) lets nobody rename or remove what is not theirs, so what lies in it
    is judged by its own owner.
    """
    if owners is None:
        return None
    if facts.st_uid not in owners:
        allowed = " or ".join(str(uid) for uid in sorted(owners))
        mend = f"chown -h {'root' if 0 in owners else min(owners)} {shlex.quote(name)}"
        return Unsafe("unsafe_owner", f"{name} is owned by uid {facts.st_uid}, not {allowed}: {mend}")
    if stat.S_ISLNK(facts.st_mode) or not facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return None
    if stat.S_ISDIR(facts.st_mode) and facts.st_mode & stat.S_ISVTX and facts.st_uid == 0:
        return None
    return Unsafe("unsafe_mode", f"{name} can be written by its group or by others: chmod go-w {shlex.quote(name)}")


def open_directory(root: str | os.PathLike[str], owners: frozenset[int] | None) -> Opened | Unsafe:
    """Walk to `root` from `/`, one component at a time, and check the owner and mode of each, links included.

    Symbolic links are followed (git-sync's layout), but only those that a trusted owner made.
    """
    todo = list(reversed(PurePosixPath(os.getcwd(), root).parts[1:]))  # noqa: PTH109 - parts, not a path to open
    links: list[str] = []
    here, path, seen = os.open("/", _FLAGS), "/", 0
    try:
        while True:
            problem = trusted(path, os.fstat(here), owners)
            if problem is not None:
                break
            if not todo:
                facts = os.fstat(here)
                return Opened(os.dup(here), path, (facts.st_dev, facts.st_ino), tuple(dict.fromkeys(links)))
            name = todo.pop()
            below = os.path.join(path, name)  # noqa: PTH118 - a label for messages: nothing is opened by it
            facts = os.stat(name, dir_fd=here, follow_symlinks=False)
            if stat.S_ISLNK(facts.st_mode):
                seen += 1
                problem = trusted(below, facts, owners)
                if seen > _MAX_LINKS:
                    problem = Unsafe("too_many_links", f"{below} is the {seen}th symbolic link on the way")
                if problem is not None:
                    break
                links.append(below)
                target = PurePosixPath(os.readlink(name, dir_fd=here))
                todo.extend(reversed(target.parts[1:] if target.is_absolute() else target.parts))
                if not target.is_absolute():
                    continue
                name, path = "/", "/"
            else:
                path = below
            following = os.open(name, _FLAGS, dir_fd=here)
            os.close(here)
            here = following
            path = os.path.normpath(path)
    except FileNotFoundError:
        return Unsafe("missing", f"{root} does not exist: {path} holds no such entry")
    except NotADirectoryError:
        return Unsafe("not_a_directory", f"{root} is not a directory")
    except OSError as error:
        return Unsafe("unreadable", f"{root}: {error.strerror}")
    finally:
        os.close(here)
    return problem


def open_file(path: str | os.PathLike[str], owners: frozenset[int] | None) -> int | Unsafe:
    """Open a regular file for reading when nobody but `owners` could put another in its place, and none is on the way.

    The file itself may be no link. Whoever gets the descriptor closes it.
    """
    whole = PurePosixPath(path)
    directory = open_directory(whole.parent, owners)
    if isinstance(directory, Unsafe):
        return directory
    try:
        descriptor = os.open(whole.name, _FILE, dir_fd=directory.descriptor)
    except OSError as error:
        if error.errno == errno.ELOOP:
            return Unsafe("not_a_file", f"{whole} is a symbolic link: name the file itself")
        return Unsafe("unreadable", f"{whole} cannot be opened: {error.strerror}")
    finally:
        directory.close()
    facts = os.fstat(descriptor)
    problem = trusted(str(whole), facts, owners)
    if not stat.S_ISREG(facts.st_mode):
        problem = Unsafe("not_a_file", f"{whole} is not a regular file")
    if problem is not None:
        os.close(descriptor)
        return problem
    return descriptor
