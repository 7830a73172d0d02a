"""Owns control groups, version 1, 2 and both at once: memory, processes and cores of one tree of processes.

Knows no sandbox; names are given by the caller.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from reconciler.backends.mountinfo import parse

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

CONTROLLERS = ("memory", "pids", "cpu")
_TRIES = 5
_PERIOD = 100_000
"""Microseconds over which cores are counted; the kernel's own default."""
_UNLIMITED_CPU_FLOOR = 1_000
"""The smallest quota in microseconds that the kernel takes."""


@dataclass(frozen=True, slots=True)
class Root:
    """Where one controller is mounted, and by which version of the interface (1 or 2)."""

    path: Path
    version: int


@dataclass(frozen=True, slots=True)
class NoCgroup:
    """A controller that this host does not offer; `message` says what to do."""

    message: str


def find(mountinfo: str, unified_controllers: Mapping[Path, str] | None = None) -> Mapping[str, Root] | NoCgroup:
    """Find each controller in the text of a mountinfo (proc_pid_mountinfo(5)); version 1 where both are mounted.

    `unified_controllers` gives the text of `cgroup.controllers` of each version 2 mount; it is read when left out.
    """
    found: dict[str, Root] = {}
    for mount in parse(mountinfo):
        point = Path(mount.point)
        if mount.kind == "cgroup":
            found.update({name: Root(point, 1) for name in CONTROLLERS if name in mount.super_options})
        elif mount.kind == "cgroup2":
            text = unified_controllers.get(point, "") if unified_controllers is not None else _controllers(point)
            for name in CONTROLLERS:
                if name in text.split():
                    found.setdefault(name, Root(point, 2))
    if lacking := [name for name in CONTROLLERS if name not in found]:
        return NoCgroup(
            f"no cgroup controller for {', '.join(lacking)} is mounted: mount cgroup2 on /sys/fs/cgroup with these"
            " controllers (systemd does), and run ringfenced where /sys/fs/cgroup is writable"
        )
    return found


def _controllers(point: Path) -> str:
    try:
        return (point / "cgroup.controllers").read_text("ascii")
    except OSError:
        return ""


class Cgroup:
    """One control group: a directory of the same name below the root of each controller. Methods raise OSError."""

    __slots__ = ("_name", "_roots")

    def __init__(self, roots: Mapping[str, Root], name: str) -> None:
        """Speak of the group `name`, such as `ringfence.host/run.sandbox`; touches nothing."""
        self._roots = roots
        self._name = name

    @property
    def name(self) -> str:
        """The path below the controllers' roots."""
        return self._name

    def create(self) -> None:
        """Make the directories; the last part of the name must be new."""
        for root in set(self._roots.values()):
            for left in reversed(range(_TRIES)):
                try:
                    self._create(root)
                    break
                except FileNotFoundError:
                    # Another process of ours removed the parent as its last group ended.
                    if not left:
                        raise

    def _create(self, root: Root) -> None:
        path = root.path / self._name
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        if root.version == 2:  # noqa: PLR2004 - the interface's version
            wanted = " ".join(f"+{name}" for name, where in self._roots.items() if where == root)
            for above in (root.path, path.parent):
                (above / "cgroup.subtree_control").write_text(wanted, "ascii")
        path.mkdir(mode=0o755)

    def limit(self, *, memory: int, pids: int, cpus: float) -> None:
        """Set the bounds: bytes (swap included: none), processes, cores."""
        quota = max(_UNLIMITED_CPU_FLOOR, int(cpus * _PERIOD))
        match self._roots["memory"].version:
            case 1:
                self._write("memory", "memory.limit_in_bytes", str(memory))
                self._write_where_present("memory", "memory.memsw.limit_in_bytes", str(memory))
                # In version 1 buffers of sockets are counted beside the rest, and not at all until they are limited.
                self._write_where_present("memory", "memory.kmem.tcp.limit_in_bytes", str(memory))
            case _:
                self._write("memory", "memory.max", str(memory))
                self._write_where_present("memory", "memory.swap.max", "0")
        self._write("pids", "pids.max", str(pids))
        match self._roots["cpu"].version:
            case 1:
                self._write("cpu", "cpu.cfs_period_us", str(_PERIOD))
                self._write("cpu", "cpu.cfs_quota_us", str(quota))
            case _:
                self._write("cpu", "cpu.max", f"{quota} {_PERIOD}")

    def limits(self) -> tuple[str, ...]:
        """Read the bounds back, one `file=value` each: evidence, and what drift is compared with."""
        files = {
            ("memory", 1): ("memory.limit_in_bytes",),
            ("memory", 2): ("memory.max",),
            ("pids", 1): ("pids.max",),
            ("pids", 2): ("pids.max",),
            ("cpu", 1): ("cpu.cfs_quota_us", "cpu.cfs_period_us"),
            ("cpu", 2): ("cpu.max",),
        }
        return tuple(
            f"{file}={self._read(controller, file).strip()}"
            for controller in CONTROLLERS
            for file in files[controller, self._roots[controller].version]
        )

    def add(self, pid: int) -> None:
        """Move one process in; its later children follow."""
        for path in self._paths():
            (path / "cgroup.procs").write_text(str(pid), "ascii")

    def holds(self, process_cgroup: str) -> bool:
        """Say whether a process whose /proc/PID/cgroup reads `process_cgroup` is inside for every controller."""
        places = {}
        for line in process_cgroup.splitlines():
            _, names, path = line.split(":", 2)
            places.update(dict.fromkeys(names.split(",") if names else ["unified"], path))
        # The path is relative to the hierarchy's root, which a mount inside a container need not show: compare the end.
        return all(
            places.get(name if root.version == 1 else "unified", "").endswith(f"/{self._name}")
            for name, root in self._roots.items()
        )

    def pids(self) -> frozenset[int]:
        """List the processes inside; empty where the group does not exist."""
        found: set[int] = set()
        for path in self._paths():
            with contextlib.suppress(FileNotFoundError):
                found.update(int(line) for line in (path / "cgroup.procs").read_text("ascii").split())
        return frozenset(found - {0})

    def oom_kills(self) -> int:
        """Count the processes that the kernel killed here for want of memory."""
        file = "memory.oom_control" if self._roots["memory"].version == 1 else "memory.events"
        with contextlib.suppress(FileNotFoundError):
            for line in self._read("memory", file).splitlines():
                name, _, value = line.partition(" ")
                if name == "oom_kill":
                    return int(value)
        return 0

    def send(self, number: signal.Signals, *, but: Iterable[int] = ()) -> None:
        """Send a signal to every process inside, except `but`; what has ended by then is fine."""
        spared = frozenset(but)
        for pid in self.pids() - spared:
            with contextlib.suppress(ProcessLookupError, FileNotFoundError):
                handle = os.pidfd_open(pid)
                try:
                    # The number may have passed to another process since it was listed; the handle cannot.
                    # Asked of that one process: to list the group again for each of thousands takes seconds.
                    lines = Path(f"/proc/{pid}/cgroup").read_text("utf-8", "replace").splitlines()
                    if any(line.endswith(f"/{self._name}") for line in lines):
                        signal.pidfd_send_signal(handle, number)
                finally:
                    os.close(handle)

    def remove(self) -> bool:
        """Remove the directories, and the parent once nothing else is in it; False while something lives inside."""
        removed = [_removed(path) for path in self._paths()]
        gone = all(removed)
        if gone and "/" in self._name:
            for path in self._paths():
                _removed(path.parent)
        return gone

    def _paths(self) -> list[Path]:
        return [root.path / self._name for root in sorted(set(self._roots.values()), key=lambda root: root.path)]

    def _read(self, controller: str, file: str) -> str:
        return (self._roots[controller].path / self._name / file).read_text("ascii")

    def _write(self, controller: str, file: str, value: str) -> None:
        (self._roots[controller].path / self._name / file).write_text(value, "ascii")

    def _write_where_present(self, controller: str, file: str, value: str) -> None:
        with contextlib.suppress(FileNotFoundError, PermissionError):
            path = self._roots[controller].path / self._name / file
            if path.exists():
                path.write_text(value, "ascii")


def _removed(path: Path) -> bool:
    try:
        path.rmdir()
    except FileNotFoundError:
        return True
    except OSError as error:
        # Busy: processes or groups inside. Not empty: what version 2 says of the latter.
        if error.errno not in (errno.EBUSY, errno.ENOTEMPTY):
            raise
        return False
    return True


def children(roots: Mapping[str, Root], parent: str) -> frozenset[str]:
    """List the names of groups directly below `parent`, in whichever hierarchy."""
    found: set[str] = set()
    for root in set(roots.values()):
        with contextlib.suppress(FileNotFoundError):
            found.update(f"{parent}/{path.name}" for path in (root.path / parent).iterdir() if path.is_dir())
    return frozenset(found)
