"""Owns what runs as process 1 of the engine's mount and pid namespaces: containerd and dockerd; makes no namespace.

    host.py SETTINGS    SETTINGS: JSON, as `Engine` makes it. Orders on standard input, one a line, answered by a line:
    start NAME          NAME is containerd or dockerd; answers when the process runs, not when it serves
    kill NAME           SIGKILL, answers when it is dead;  `stop NAME` the same with SIGTERM
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

CONTAINERD_SOCKET = "/run/containerd/containerd.sock"


def mount(*arguments: str) -> None:
    """Mount in the private namespace."""
    subprocess.run(["/usr/bin/mount", *arguments], check=True, timeout=20)


def prepare(settings: dict[str, Any]) -> None:
    """Give the engine places of its own: nothing that it writes is seen outside or outlives it, but for its sockets."""
    directory = Path(settings["directory"])
    data = directory / "data"
    data.mkdir()
    mount("-t", "tmpfs", "-o", "mode=755", "tmpfs", "/run")
    mount("-t", "tmpfs", "-o", f"mode=755,size={settings['data_size']}", "tmpfs", str(data))
    (directory / "resolv.conf").write_text(f"nameserver {settings['resolver']}\n")
    mount("--bind", str(directory / "resolv.conf"), str(Path("/etc/resolv.conf").resolve()))
    Path("/run/containerd").mkdir()
    # The plugins that are off would write to /opt, or answer a kubelet that is not there.
    (directory / "containerd.toml").write_text(
        f"""version = 2
root = "{data}/containerd"
state = "/run/containerd"
disabled_plugins = ["io.containerd.internal.v1.opt", "io.containerd.grpc.v1.cri"]
[grpc]
  address = "{CONTAINERD_SOCKET}"
"""
    )
    config = {
        "hosts": [f"unix://{settings['socket']}"],
        "data-root": f"{data}/docker",
        "exec-root": "/run/docker",
        "pidfile": "/run/docker.pid",
        "containerd": CONTAINERD_SOCKET,
        "cgroup-parent": f"/{settings['cgroup']}",
        "exec-opts": ["native.cgroupdriver=cgroupfs"],
        "runtimes": {"runsc": {"path": settings["runsc"]}},
        **settings["config"],
    }
    (directory / "daemon.json").write_text(json.dumps(config, indent=1))


class Daemons:
    """The processes by name. Process 1 reaps every orphan too, so waiting is done in one place."""

    def __init__(self, settings: dict[str, Any]) -> None:
        directory = settings["directory"]
        self._environment: dict[str, str] = settings["environment"]
        self._logs = Path(directory)
        self._argv = {
            "containerd": ["containerd", "--config", f"{directory}/containerd.toml"],
            "dockerd": ["dockerd", "--config-file", f"{directory}/daemon.json"],
        }
        self._pids: dict[str, int] = {}

    def start(self, name: str) -> None:
        """Start one, its output going to a log of its name."""
        # What a killed daemon leaves and a new one trips over; a host's service manager removes it, too.
        for stale in {"dockerd": ["/run/docker.pid"], "containerd": []}[name]:
            Path(stale).unlink(missing_ok=True)
        log = os.open(self._logs / f"{name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        actions = [(os.POSIX_SPAWN_DUP2, nothing, 0), (os.POSIX_SPAWN_DUP2, log, 1), (os.POSIX_SPAWN_DUP2, log, 2)]
        environment = {**os.environ, **self._environment}
        os.environ["PATH"] = self._environment["PATH"]  # posix_spawnp looks with ours
        self._pids[name] = os.posix_spawnp(self._argv[name][0], self._argv[name], environment, file_actions=actions)
        os.close(log)
        os.close(nothing)
        if name == "containerd":
            wait_for(Path(CONTAINERD_SOCKET))

    def end(self, name: str, number: int) -> None:
        """Signal one and wait until it is gone."""
        pid = self._pids.pop(name)
        os.kill(pid, number)
        deadline = time.monotonic() + 30
        while pid not in self.reap():
            if time.monotonic() > deadline:
                raise SystemExit(f"{name} does not end")
            time.sleep(0.01)

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
    prepare(settings)
    daemons = Daemons(settings)
    pending = b""
    while True:
        daemons.reap()
        if not select.select([0], [], [], 0.2)[0]:
            continue
        data = os.read(0, 4096)
        if not data:
            return
        *lines, pending = (pending + data).split(b"\n")
        for line in lines:
            verb, name = line.decode().split()
            if verb == "start":
                daemons.start(name)
            else:
                daemons.end(name, {"kill": signal.SIGKILL, "stop": signal.SIGTERM}[verb])
            os.write(1, b"done\n")


if __name__ == "__main__":
    main()
