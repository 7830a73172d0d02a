"""Owns the census of what tests may leave: namespaces, processes, cgroups, files; removes nothing."""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tests.rig import network

if TYPE_CHECKING:
    from collections.abc import Mapping

MARK: Final = "RFRIG_SESSION"
"""Environment variable that marks what a test session started, as far as its environment is handed on."""
_NAMES: Final = ("ringfence", "rfrig-", "rf-")
_CGROUPS: Final = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True, kw_only=True)
class Census:
    """What of ours exists: keys name each thing, values say it to people."""

    things: Mapping[str, str]
    attributed: frozenset[str]
    """Keys of things that surely belong to the session, whoever else tests on this machine."""

    def since(self, before: Census, *, alone: bool) -> tuple[str, ...]:
        """Return what is new since `before`; unless we were alone on the machine, only what is surely ours."""
        keys = (set(self.things) - set(before.things)) if alone else (self.attributed - before.attributed)
        return tuple(sorted(self.things[key] for key in keys))


class Presence:
    """A shared lock that test sessions on one machine hold, so that each knows whether it was the only one."""

    def __init__(self) -> None:
        """Take the lock, which needs no file: it is on the directory /run."""
        self._handle = os.open("/run", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self.alone = self._try(fcntl.LOCK_EX)
        fcntl.flock(self._handle, fcntl.LOCK_SH)

    def leave(self) -> bool:
        """Give the lock up; True when no other session was there at either end."""
        alone = self._try(fcntl.LOCK_EX) and self.alone
        os.close(self._handle)
        return alone

    def _try(self, how: int) -> bool:
        try:
            fcntl.flock(self._handle, how | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def mark() -> str:
    """Return this session's value of MARK."""
    return f"{os.getpid()}-{time.monotonic_ns()}"


def take(value: str) -> Census:
    """Look at the machine; `value` is what MARK was set to."""
    things: dict[str, str] = {}
    attributed: set[str] = set()
    shared_memory = Path("/dev/shm")  # noqa: S108 - looked at, not used
    for directory in (network.NETNS, Path(tempfile.gettempdir()), Path("/run"), shared_memory):
        for path in directory.iterdir() if directory.is_dir() else []:
            if path.name.startswith(_NAMES):
                things[f"file {path}"] = f"{path}"
    for instance in network.owned_by(os.getpid()):
        key = f"rig {instance.name}"
        things[key] = f"rig {instance.name}"
        attributed.add(key)
    for root, directories, _files in os.walk(_CGROUPS):
        for name in directories:
            if "ringfence" in name:
                things[f"cgroup {root}/{name}"] = f"cgroup {root}/{name}"
    _processes(value, things, attributed)
    return Census(things=things, attributed=frozenset(attributed))


def _foreign(pid: int) -> bool:
    """Say whether a process descends from something that is older than this session and is not this session."""
    own = network.started(os.getpid()) or 0
    above = _ancestors(pid) - {0, 1, pid}
    return os.getpid() not in above and any((network.started(each) or own) < own for each in above)


def _processes(value: str, things: dict[str, str], attributed: set[str]) -> None:
    marked = f"{MARK}={value}".encode()
    common = {network.namespace_of(1), network.namespace_of(os.getpid())}
    family = _ancestors(os.getpid())
    for pid in network.pids():
        base = Path(f"/proc/{pid}")
        with contextlib.suppress(OSError):
            command = (base / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            namespace = network.namespace_of(pid)
            if pid in family or not command or namespace is None:  # ourselves, a kernel thread, a zombie
                continue
            key = f"process {pid} {network.started(pid)}"
            ours = marked in (base / "environ").read_bytes().split(b"\0")
            if ours:
                attributed.add(key)
            elif _foreign(pid):
                continue
            if (
                ours
                or namespace not in common
                or "ringfence" in (base / "cgroup").read_text()
                or "ringfence" in command
            ):
                things[key] = f"process {pid} {command[:200]}"


def _ancestors(pid: int) -> frozenset[int]:
    found: set[int] = set()
    while pid > 0 and pid not in found:
        found.add(pid)
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            break
    return frozenset(found)
