"""Owns a machine's namespaces and cgroups from outside them: starts process 1, waits, removes; knows no program.

keeper.py CGROUP ARGV...    It outlives a parent that is killed: then standard input, which process 1 reads, ends.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")


def cgroups(name: str) -> list[Path]:
    """Return the cgroups of this name, in every hierarchy."""
    return [path for path in (CGROUPS / name, *CGROUPS.glob(f"*/{name}")) if path.is_dir()]


def remove_cgroups(name: str) -> tuple[str, ...]:
    """Remove the cgroup of this name and those in it, in every hierarchy; returns what is still there after 5 s."""
    deadline = time.monotonic() + 5
    while True:
        roots = cgroups(name)
        for root in roots:
            for path in (*sorted((each for each in root.rglob("*") if each.is_dir()), reverse=True), root):
                try:
                    path.rmdir()
                except OSError:
                    break  # what was in it has not quite ended
        left = tuple(str(path) for path in roots if path.exists())
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.05)


def main() -> int:
    """Run process 1 to its end; the exit status is 1 when a cgroup could not be removed."""
    name, argv = sys.argv[1], sys.argv[2:]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    child = subprocess.Popen([*argv])
    signal.signal(signal.SIGTERM, lambda _number, _frame: child.kill())  # unshare's --kill-child does the rest
    child.wait()
    return 1 if remove_cgroups(name) else 0


if __name__ == "__main__":
    sys.exit(main())
