"""Owns the settled snapshot of a directory: every byte of one state of it, or why there is none; parses nothing."""

from __future__ import annotations

import hashlib
import os
import stat
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from reconciler.directory import Opened, Unsafe, open_directory, owners_of, trusted
from reconciler.git import Repository

if TYPE_CHECKING:
    from collections.abc import Mapping

_OPEN = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_RACY = 25_000_000
"""Nanoseconds. A file that changed this recently can change again without a new time stamp: kernels stamp files by a
tick of up to 10 ms."""
_MOST_BYTES = 256 * 1024 * 1024
"""Bytes of all files together: what `Bounds` lets each have would be gigabytes of memory in all."""
_PAUSE = 0.02
_IGNORED_SHOWN = 1000


@dataclass(frozen=True, slots=True)
class Layout:
    """Which names of a directory are ours: files at its top, and suffixes of files in its folders."""

    files: frozenset[str]
    folders: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def takes(self, folder: str, name: str) -> bool:
        """Say whether this file is one that we define (dotfiles never are)."""
        if not folder:
            return name in self.files
        return not name.startswith(".") and name.endswith(self.folders[folder])


POLICY = Layout(
    frozenset({"platform.yaml"}), {"agents": (".yaml",), "egress": (".yaml",), "reasons": (".yaml", ".sig")}
)
TRUST = Layout(frozenset({"allowed_signers", "revoked"}))


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """How much one snapshot may hold: `files` of at most `bytes` each. The host's settings max_files and max_bytes."""

    files: int = 20_000
    bytes: int = 256 * 1024


@dataclass(frozen=True, slots=True)
class FileRefused:
    """A file with one of our names that is not read. The message holds nothing of its content."""

    file: str
    code: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """One state of the directory, read at rest. Keys of `files` are relative paths such as `agents/helper.yaml`."""

    files: Mapping[str, bytes]
    digest: str
    """`sha256:` and 64 hex digits, over names and contents of `files`."""
    commit: str | None
    """What git's HEAD names, where there is a work tree; for people, and never trusted."""
    ignored: tuple[str, ...]
    """Names that we do not define, escaped where they are not text; at most 1000 of them."""
    refused: tuple[FileRefused, ...]


@dataclass(frozen=True, slots=True)
class NotSettled:
    """There is no state of the directory to go by; what is in force stays. The message says what to do."""

    code: str
    message: str


_Mark = tuple[int, int, int, int, int, int, int]


@dataclass(frozen=True, slots=True)
class _Moved:
    """The directory changed while it was read; `name` is what did."""

    name: str


def digest_of(files: Mapping[str, bytes]) -> str:
    """Give the digest of a set of files, the same on every host."""
    whole = hashlib.sha256()
    for name in sorted(files):
        label = name.encode()
        whole.update(len(label).to_bytes(4) + label + hashlib.sha256(files[name]).digest())
    return f"sha256:{whole.hexdigest()}"


def take(
    root: str | os.PathLike[str],
    *,
    owner: str | None,
    bounds: Bounds,
    deadline: float,
    layout: Layout = POLICY,
) -> Snapshot | NotSettled:
    """Read one state of `root`: list, read, look again; when anything moved, start over until `deadline` (seconds).

    Blocks the thread. Opens nothing but directories and regular files of at most `bounds.bytes`, follows no link below
    the root, runs no program, writes nothing.

    Args:
        root: the directory; it, its parents and its files must be owned by root or `owner` and not be writable by
            anybody else. It may be a symbolic link.
        owner: a user's name or uid. None asks nobody who could change it: for a developer's checkout, of which
            problems and plans are told; never for what is in force or what it is compared with.
        bounds: most files, and most bytes of one.
        deadline: seconds after which a directory that never rests is given up.
        layout: which names are ours.
    """
    owners = None if owner is None else owners_of(owner)
    if isinstance(owners, Unsafe):
        return NotSettled(owners.code, owners.message)
    until = time.monotonic() + deadline
    pause = _PAUSE
    while True:
        opened = open_directory(root, owners)
        if isinstance(opened, Unsafe):
            return NotSettled(opened.code, opened.message)
        with ExitStack() as stack:
            stack.callback(opened.close)
            attempt = _Reader(opened, owners, bounds, layout, stack).read()
        if not isinstance(attempt, _Moved):
            return attempt
        if time.monotonic() + pause > until:
            return _given_up(root, attempt.name, deadline)
        time.sleep(pause)
        pause = min(pause * 1.5, 0.25)


def _given_up(root: str | os.PathLike[str], moved: str, deadline: float) -> NotSettled:
    if moved.endswith("/index.lock"):
        return NotSettled(
            "git_busy", f"{moved} is there for {deadline:g} s: git is at work, or died; remove it when no git runs"
        )
    return NotSettled("never_quiet", f"{root} was never quiet for {deadline:g} s: {moved} kept changing")


class _Reader:
    """One attempt at one snapshot of one open directory."""

    def __init__(
        self, opened: Opened, owners: frozenset[int] | None, bounds: Bounds, layout: Layout, stack: ExitStack
    ) -> None:
        self._opened = opened
        self._owners = owners
        self._bounds = bounds
        self._layout = layout
        self._stack = stack
        self._folders = {"": opened.descriptor}
        self._files: dict[str, bytes] = {}
        self._refused: list[FileRefused] = []
        self._ignored: list[str] = []

    def read(self) -> Snapshot | NotSettled | _Moved:
        """Try once."""
        repository = Repository.find(self._opened.path, self._owners)
        if repository is not None and repository.busy():
            return _Moved(repository.lock)
        started = time.time_ns()
        problem = self._enter()
        if problem is not None:
            return problem
        before = self._list()
        if not isinstance(before, dict):
            return before
        for name, mark in before.items():
            # Only what changed a moment ago: a stamp from the future differs from the one a change would set now.
            if started - _RACY < max(mark[4], mark[5]) <= started + _RACY:
                return _Moved(_shown(name))
        for name, mark in before.items():
            if not name.endswith("/"):
                self._read(name, mark)
        after = self._list()
        if not isinstance(after, dict):
            return after
        if before != after:
            changed = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
            return _Moved(_shown(changed[0]))
        commit = None
        if repository is not None:
            commit = repository.commit()
            if repository.busy():
                return _Moved(repository.lock)
        if not self._files and not self._refused:
            names = ", ".join([*sorted(self._layout.files), *(f"{name}/" for name in sorted(self._layout.folders))])
            return NotSettled("empty", f"{self._opened.path} holds none of {names}: an empty directory deletes nothing")
        return Snapshot(
            files=self._files,
            digest=digest_of(self._files),
            commit=commit,
            ignored=tuple(sorted(self._ignored)),
            refused=tuple(sorted(self._refused, key=lambda refused: refused.file)),
        )

    def _enter(self) -> NotSettled | _Moved | None:
        """Open our folders and keep them open: a folder that is replaced later cannot lead elsewhere."""
        for folder in sorted(self._layout.folders):
            facts = _lstat(folder, self._opened.descriptor)
            if facts is None:
                continue
            if not stat.S_ISDIR(facts.st_mode):
                return NotSettled("not_a_directory", f"{folder} in {self._opened.path} is not a directory")
            problem = trusted(self._whole(folder), facts, self._owners)
            if problem is not None:
                return NotSettled(problem.code, problem.message)
            try:
                descriptor = os.open(folder, _FOLDER, dir_fd=self._opened.descriptor)
            except OSError:
                return _Moved(folder)
            self._stack.callback(os.close, descriptor)
            self._folders[folder] = descriptor
        return None

    def _list(self) -> dict[str, _Mark] | NotSettled | _Moved:
        """List what there is, relative path to mark. Directories that are not ours are named and not entered."""
        marks: dict[str, _Mark] = {}
        whole = 0
        self._ignored.clear()
        for folder, descriptor in self._folders.items():
            marks[f"{folder}/"] = _mark(os.fstat(descriptor))
            with os.scandir(descriptor) as entries:
                for entry in entries:
                    name = entry.name
                    path = f"{folder}/{name}" if folder else name
                    if not self._layout.takes(folder, name):
                        if len(self._ignored) < _IGNORED_SHOWN and path not in self._layout.folders and path != ".git":
                            self._ignored.append(_shown(path))
                        continue
                    if len(marks) >= self._bounds.files + len(self._folders):
                        advice = "delete some, or raise max_files in host.yaml"
                        return NotSettled("too_many_files", f"more than {self._bounds.files} files: {advice}")
                    facts = _lstat(name, descriptor)
                    if facts is None:
                        return _Moved(_shown(path))
                    marks[path] = _mark(facts)
                    whole += facts.st_size if facts.st_size <= self._bounds.bytes else 0  # a larger one is not read
                    if whole > _MOST_BYTES:
                        return NotSettled("too_large", f"more than {_MOST_BYTES} bytes in all: delete some")
        return marks

    def _read(self, path: str, mark: _Mark) -> None:
        """Read one file into `_files`, or say in `_refused` why not. A file that moved is found by the second look."""
        what = _refusal(mark[6])
        if what is not None:
            self._refuse(path, "not_a_file", f"is {what}: only regular files are read, so put the file itself here")
            return
        if not path.isascii() or not path.isprintable():
            self._refuse(path, "bad_name", "has a name that is not printable ASCII: rename it")
            return
        folder, _, name = path.rpartition("/")
        try:
            descriptor = os.open(name, _OPEN, dir_fd=self._folders[folder])
        except OSError as error:
            self._refuse(path, "unreadable", f"cannot be opened: {error.strerror}")
            return
        with os.fdopen(descriptor, "rb", buffering=0):
            facts = os.fstat(descriptor)
            if _mark(facts) != mark:
                return
            whole = self._whole(path)
            problem = trusted(whole, facts, self._owners)
            if problem is not None:
                self._refuse(path, problem.code, problem.message.removeprefix(f"{whole} "))
            elif facts.st_size > self._bounds.bytes:
                bound = f"{self._bounds.bytes} bytes: split it, or raise max_bytes in host.yaml"
                self._refuse(path, "too_large", f"is larger than {bound}")
            else:
                self._files[path] = _read_bounded(descriptor, facts.st_size)

    def _whole(self, path: str) -> str:
        return _shown(os.path.join(self._opened.path, path))  # noqa: PTH118 - a label for messages

    def _refuse(self, path: str, code: str, message: str) -> None:
        self._refused.append(FileRefused(_shown(path), code, message))


def _refusal(mode: int) -> str | None:
    if stat.S_ISREG(mode):
        return None
    kinds = ((stat.S_ISLNK, "a symbolic link"), (stat.S_ISFIFO, "a FIFO"), (stat.S_ISDIR, "a directory"))
    return next((what for check, what in kinds if check(mode)), "a device or a socket")


def _read_bounded(descriptor: int, size: int) -> bytes:
    """Read `size` bytes and one more, so that a file that grew is seen; never more."""
    parts, left = [], size + 1
    while left and (part := os.read(descriptor, left)):
        parts.append(part)
        left -= len(part)
    return b"".join(parts)


def _lstat(name: str, descriptor: int) -> os.stat_result | None:
    try:
        return os.stat(name, dir_fd=descriptor, follow_symlinks=False)
    except FileNotFoundError:
        return None


def _mark(facts: os.stat_result) -> _Mark:
    return (
        facts.st_dev,
        facts.st_ino,
        facts.st_uid,
        facts.st_size,
        facts.st_mtime_ns,
        facts.st_ctime_ns,
        facts.st_mode,
    )


def _shown(name: str) -> str:
    """Give a file's name as printable ASCII, whatever bytes it is made of."""
    return os.fsencode(name).decode("ascii", "backslashreplace").encode("unicode_escape").decode("ascii")
