"""Owns the structural proof of a bubblewrap fence, read from outside: what the kernel says of its processes.

Knows no gate and changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from reconciler.backends.bwrap_args import PROXY_ADDRESS, PlannedMount, mount_differences
from reconciler.backends.mountinfo import parse

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

NAMESPACES = ("user", "pid", "net", "ipc", "uts", "cgroup", "mnt")
_CAPABILITY_SETS = ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")
_SECCOMP_FILTER = "2"


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """What /proc says of one process. `namespaces`: inode by kind; texts as the kernel wrote them."""

    namespaces: Mapping[str, int]
    uid_map: tuple[str, ...]
    gid_map: tuple[str, ...]
    status: Mapping[str, str]
    mountinfo: str
    interfaces: tuple[str, ...]
    listeners: tuple[str, ...]
    cgroup: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What every process of the sandbox must look like. `namespaces`: as they were proven, the daemon's beside."""

    uid: int
    user: int
    mounts: tuple[PlannedMount, ...]
    namespaces: Mapping[str, int]
    daemon_namespaces: Mapping[str, int]


def namespaces(pid: int | str) -> dict[str, int]:
    """Read the inode of each namespace of a process.

    Raises:
        OSError: the process is gone.
    """
    return {kind: Path(f"/proc/{pid}/ns/{kind}").stat().st_ino for kind in NAMESPACES}


def observe(pid: int, *, listening: bool) -> Observed:
    """Read everything of one process; its listeners only where they count, before the command starts.

    Afterwards the command owns that table, and reading it for each process takes as long as it likes.

    Raises:
        OSError: the process is gone.
    """
    proc = Path(f"/proc/{pid}")
    lines = (proc / "status").read_text("utf-8", "replace").splitlines()
    return Observed(
        namespaces=namespaces(pid),
        uid_map=tuple((proc / "uid_map").read_text("ascii").split()),
        gid_map=tuple((proc / "gid_map").read_text("ascii").split()),
        status={name: value.strip() for name, _, value in (line.partition(":") for line in lines)},
        mountinfo=(proc / "mountinfo").read_text("utf-8", "surrogateescape"),
        interfaces=parse_interfaces((proc / "net/dev").read_text("ascii")),
        listeners=tuple(
            listener
            for file in ("tcp", "tcp6")
            if listening and (proc / "net" / file).exists()
            for listener in parse_listeners((proc / "net" / file).read_text("ascii"))
        ),
        cgroup=(proc / "cgroup").read_text("utf-8", "replace"),
    )


def parse_interfaces(text: str) -> tuple[str, ...]:
    """Read the names out of /proc/net/dev, below its two lines of heading."""
    return tuple(line.partition(":")[0].strip() for line in text.splitlines()[2:])


def parse_listeners(text: str) -> tuple[str, ...]:
    """Read the local `hex address:port` of each listening socket (state 0A) out of /proc/net/tcp or tcp6."""
    rows = [line.split() for line in text.splitlines()[1:]]
    return tuple(row[1] for row in rows if row[3] == "0A")


def differences(observed: Observed, expected: Expected, *, filtered: bool, listening: bool) -> tuple[str, ...]:
    """Compare; each line names one thing that is not as it must be. Empty means that the fence is as planned.

    Args:
        observed: one process of the sandbox.
        expected: what it must look like.
        filtered: whether the system call filter must be on (not yet while bwrap waits to start its command).
        listening: whether only the proxy's listener may listen (none at all otherwise); before the command starts.
    """
    lines = [
        f"{kind} namespace {inode} is the host's"
        for kind, inode in observed.namespaces.items()
        if inode == expected.daemon_namespaces[kind]
    ]
    lines += [
        f"{kind} namespace is {observed.namespaces[kind]}, not the proven {inode}"
        for kind, inode in expected.namespaces.items()
        if observed.namespaces[kind] != inode
    ]
    for name, found in (("uid", observed.uid_map), ("gid", observed.gid_map)):
        if found != (str(expected.user), str(expected.uid), "1"):
            lines.append(f"{name} map is {' '.join(found)}")
    status = observed.status
    for name in ("Uid", "Gid"):
        if set(status[name].split()) != {str(expected.uid)}:
            lines.append(f"{name} is {status[name]}")
    if status.get("Groups"):
        lines.append(f"supplementary groups are {status['Groups']}")
    lines += [f"{name} is {status[name]}" for name in _CAPABILITY_SETS if int(status[name], 16)]
    if status["NoNewPrivs"] != "1":
        lines.append("no_new_privs is off")
    if filtered and status["Seccomp"] != _SECCOMP_FILTER:
        lines.append("no system call filter is loaded")
    if observed.interfaces != ("lo",):
        lines.append(f"network interfaces are {', '.join(observed.interfaces)}")
    allowed = [_hex_address(PROXY_ADDRESS)]
    if listening and [*observed.listeners] not in ([], allowed):
        lines.append(f"unexpected listeners: {', '.join(observed.listeners)}")
    return (*lines, *mount_differences(expected.mounts, parse(observed.mountinfo)))


def _hex_address(address: tuple[str, int]) -> str:
    # The address as the kernel prints it: four bytes in the machine's order, read as one number.
    octets = bytes(int(part) for part in address[0].split("."))
    return f"{int.from_bytes(octets, 'little'):08X}:{address[1]:04X}"


def evidence(observed: Observed, expected: Expected, limits: Sequence[str]) -> tuple[str, ...]:
    """Say what was proven, one fact a line, once `differences` found none."""
    kinds = " ".join(f"{kind}:{observed.namespaces[kind]}" for kind in NAMESPACES)
    return (
        f"own namespaces, none of the host's: {kinds}",
        f"uid {expected.uid} outside, {expected.user} inside; no other id is mapped, no groups",
        "no capabilities in any set, no_new_privs, system call filter loaded",
        f"{len(expected.mounts)} mounts, all as planned",
        "the only network interface is lo",
        f"limits: {' '.join(limits)}",
    )
