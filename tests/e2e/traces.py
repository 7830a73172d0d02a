"""Owns the census of what the runs of one installation leave on the machine; removes nothing."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

from reconciler.host import Host, load_host
from reconciler.prepare import owner_of

if TYPE_CHECKING:
    from tests.e2e.installation import Installation

_CGROUPS = Path("/sys/fs/cgroup")
_FILES = ("run/runs/*", "run/bubblewrap/*/*", "spool/claimed/*", "spool/quarantine/*", "spool/in/*/*/*")


def look(installation: Installation) -> list[str]:
    """Name every process, control group and file of a run that there is."""
    found = [f"process {pid} uid {uid}: {command}" for pid, uid, command in processes(installation)]
    found += [f"control group {path}" for path in cgroups(installation)]
    found += [f"file {path}" for pattern in _FILES for path in sorted(installation.root.glob(pattern))]
    return found


def processes(installation: Installation) -> list[tuple[int, int, str]]:
    """List pid, uid and command of what runs as one of the installation's uids, in whatever namespace."""
    found = []
    for entry in os.scandir("/proc"):
        if not entry.name.isdecimal():
            continue
        with contextlib.suppress(OSError):
            lines = Path(entry.path, "status").read_text("utf-8", "replace").splitlines()
            status = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
            # The dead that nobody has waited for are process 1's to clear away, not ours.
            if status["State"][0] in "ZX":
                continue
            uids = {int(each) for each in status["Uid"].split()}
            command = Path(entry.path, "cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace").strip()
            found += [
                (int(entry.name), uid, command)
                for uid in uids
                if uid in installation.uids or uid == installation.proxy_uid
            ]
    return found


def sandboxes(installation: Installation) -> list[int]:
    """Pids of what runs inside sandboxes, or holds them together."""
    return [pid for pid, uid, _ in processes(installation) if uid != installation.proxy_uid]


def proxies(installation: Installation) -> list[int]:
    """Pids of live proxies."""
    return [pid for pid, uid, _ in processes(installation) if uid == installation.proxy_uid]


def cgroups(installation: Installation) -> list[str]:
    """List the control groups below the one of this installation's daemon, in every hierarchy."""
    host = load_host(installation.host_config)
    assert isinstance(host, Host), host
    name = f"ringfence.{owner_of(host)}"
    return [root for root, _directories, _files in os.walk(_CGROUPS) if f"/{name}/" in f"{root}/"]
