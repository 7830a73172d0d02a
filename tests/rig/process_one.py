"""Owns what runs as process 1 of a machine's namespaces: starts and ends its programs; makes no namespace.

    process_one.py SETTINGS    SETTINGS: JSON, as `Machine` makes it. Orders on standard input, a line each:
    start NAME                 answered by a line when the program runs, not when it serves
    kill NAME                  SIGKILL, answered when it is dead;  `stop NAME` the same with SIGTERM
    pause NAME                 SIGSTOP;  `resume NAME` SIGCONT
The end of standard input ends it, and with process 1 the kernel ends all the rest. Standard library alone.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any


class Programs:
    """The processes by name. Process 1 reaps every orphan too, so waiting is done in one place."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._environment: dict[str, str] = settings["environment"]
        self._logs = Path(settings["directory"])
        self._programs: dict[str, dict[str, Any]] = settings["programs"]
        self._pids: dict[str, int] = {}

    def start(self, name: str) -> None:
        """Start one, its output going to a log of its name."""
        program = self._programs[name]
        # What a killed program leaves and a new one trips over; a host's service manager removes it, too.
        for stale in program["stale"]:
            Path(stale).unlink(missing_ok=True)
        log = os.open(self._logs / f"{name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        actions = [(os.POSIX_SPAWN_DUP2, nothing, 0), (os.POSIX_SPAWN_DUP2, log, 1), (os.POSIX_SPAWN_DUP2, log, 2)]
        environment = {**os.environ, **self._environment}
        os.environ["PATH"] = self._environment["PATH"]  # posix_spawnp looks with ours
        self._pids[name] = os.posix_spawnp(program["argv"][0], program["argv"], environment, file_actions=actions)
        os.close(log)
        os.close(nothing)
        if program["appears"] is not None:
            wait_for(Path(program["appears"]))

    def end(self, name: str, number: int) -> None:
        """Signal one and wait until it is gone."""
        pid = self._pids.pop(name)
        os.kill(pid, number)
        deadline = time.monotonic() + 30
        while pid not in self.reap():
            if time.monotonic() > deadline:
                raise SystemExit(f"{name} does not end")
            time.sleep(0.01)

    def tell(self, name: str, number: int) -> None:
        """Signal one that goes on afterwards."""
        os.kill(self._pids[name], number)

    def reap(self) -> frozenset[int]:
        """Collect what has ended."""
        ended: set[int] = set()
        while True:
            try:
                pid, _status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return frozenset(ended)
            if not pid:
                return frozenset(ended)
            ended.add(pid)


def wait_for(path: Path) -> None:
    """Wait until a socket exists; SystemExit after 30 s."""
    deadline = time.monotonic() + 30
    while not path.exists():
        if time.monotonic() > deadline:
            raise SystemExit(f"{path} does not appear")
        time.sleep(0.02)


def main() -> None:
    """Serve orders until standard input ends."""
    settings = json.loads(sys.argv[1])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for argv in settings["prepare"]:
        subprocess.run(argv, check=True, timeout=20)
    programs = Programs(settings)
    pending = b""
    while True:
        programs.reap()
        if not select.select([0], [], [], 0.2)[0]:
            continue
        data = os.read(0, 4096)
        if not data:
            return
        *lines, pending = (pending + data).split(b"\n")
        for line in lines:
            verb, name = line.decode().split()
            if verb == "start":
                programs.start(name)
            elif verb in {"pause", "resume"}:
                programs.tell(name, {"pause": signal.SIGSTOP, "resume": signal.SIGCONT}[verb])
            else:
                programs.end(name, {"kill": signal.SIGKILL, "stop": signal.SIGTERM}[verb])
            os.write(1, b"done\n")


if __name__ == "__main__":
    main()
