"""Owns the life of one Docker engine in a rig's host namespace, and what a test asks of it; builds nothing."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import platform
import socket
import subprocess
import sys
import time
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

from tests.rig.docker import cache
from tests.rig.machine import Machine, Program
from tests.rig.rig import end

if TYPE_CHECKING:
    from types import TracebackType

    from tests.rig.rig import Rig

_HERE: Final = Path(__file__).parent
_CONTAINERD: Final = "/run/containerd/containerd.sock"


class Which(StrEnum):
    """Which engine."""

    CURRENT = "current"
    """29, from Go modules."""
    DEBIAN = "debian"
    """20.10, from Debian 12's packages."""


class Firewall(StrEnum):
    """What the engine writes its own rules with; Debian's knows iptables alone."""

    IPTABLES = "iptables"
    NFTABLES = "nftables"


class Store(StrEnum):
    """Where the engine keeps images; Debian's knows the classic store alone."""

    CONTAINERD = "containerd"
    """What a fresh engine 29 has: an image's id is the digest of its manifest."""
    CLASSIC = "classic"
    """What an engine that was upgraded keeps: an image's id is the digest of its configuration."""


class Runtime(StrEnum):
    """The runtimes that both engines have."""

    RUNC = "runc"
    RUNSC = "runsc"


class Engine:
    """A context manager: inside it a Docker engine runs in the host namespace of a rig that is up. One a rig at a time.

    Its data lie on a tmpfs of its own mount namespace, its processes in a pid namespace: nothing of it outlives `stop`,
    nor this process, `kill -9` included. Raises RuntimeError with the daemons' logs when it does not start.
    """

    def __init__(
        self,
        rig: Rig,
        *,
        which: Which = Which.CURRENT,
        firewall: Firewall = Firewall.IPTABLES,
        store: Store | None = None,
        rp_filter: int = 2,
        bridge_nf: bool = False,
        local_resolver: bool = False,
        data_size: str = "4g",
    ) -> None:
        """Name the engine; nothing exists before `start` or `with`.

        Args:
            rig: a rig that is up.
            which: the engine.
            firewall: what it writes rules with.
            store: where it keeps images; None: as it comes out of the box.
            rp_filter: 0, 1 or 2 for the host: the kernel's default, what many distributions set, what systemd sets.
            bridge_nf: whether bridged frames pass the firewall: true where the host has br_netfilter.
            local_resolver: whether the host's resolv.conf names 127.0.0.1, where a forwarder listens (as dnsmasq
                does), and not the rig's resolver: dockerd then asks in the host's namespace.
            data_size: the most that images and containers may take, as tmpfs reads it.

        Raises:
            ValueError: Debian's engine was asked for what it does not have.
        """
        out_of_the_box = Store.CONTAINERD if which is Which.CURRENT else Store.CLASSIC
        self.store: Store = out_of_the_box if store is None else store
        if which is Which.DEBIAN and (firewall is not Firewall.IPTABLES or self.store is not Store.CLASSIC):
            raise ValueError("Debian's engine has the iptables firewall and the classic store alone")
        self.rig: Rig = rig
        self.which: Which = which
        self.firewall: Firewall = firewall
        self.rp_filter: int = rp_filter
        self.bridge_nf: bool = bridge_nf
        self.local_resolver: bool = local_resolver
        self._machine = Machine(rig=rig, name="docker", environment=self._environment())
        self.directory: Path = self._machine.directory
        self.socket: Path = self.directory / "docker.sock"
        self.base_url: str = f"unix://{self.socket}"
        self.cgroup: str = self._machine.cgroup
        self._data_size = data_size
        self._forwarder: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _value: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.stop()

    # --- life ---------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start both daemons and wait until the engine answers (about a second)."""
        self._machine.prepare(self._sysctls(), resolver="127.0.0.1" if self.local_resolver else self._resolver)
        try:
            if self.local_resolver:
                forwarder = [sys.executable, str(_HERE / "forwarder.py"), self._resolver]
                self._forwarder = self.rig.spawn(forwarder, stdout=subprocess.DEVNULL)
            self._machine.start(self._programs(), data_size=self._data_size, inside=[["/bin/mkdir", "/run/containerd"]])
            self.start_daemon("containerd")
            self.start_daemon("dockerd")
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End the engine with all its containers at once, and bring the host namespace back to how it was found.

        The sysctls stay. Raises RuntimeError when something of it is left.
        """
        if self._forwarder is not None:
            end(self._forwarder)
        self._machine.stop()

    def start_daemon(self, name: str) -> None:
        """Start `containerd` or `dockerd` (again), and wait until it serves; raises RuntimeError with the logs."""
        self._machine.order("start", name)
        if name == "dockerd":
            deadline = time.monotonic() + 60
            while not self._answers():
                if time.monotonic() > deadline:
                    raise RuntimeError(f"the engine does not answer:\n{self.logs()}")
                time.sleep(0.05)

    def kill_daemon(self, name: str) -> None:
        """End `containerd` or `dockerd` by SIGKILL; the containers live on."""
        self._machine.order("kill", name)

    def stop_daemon(self, name: str) -> None:
        """End `containerd` or `dockerd` by SIGTERM: dockerd stops its containers first."""
        self._machine.order("stop", name)

    # --- what a test asks of it ---------------------------------------------------------------------------------------

    def docker(
        self, *arguments: str | Path, stdin: str = "", timeout_s: float = 60.0, check: bool = False
    ) -> subprocess.CompletedProcess[str]:
        """Run the command-line client (Debian's, which speaks to both engines).

        Raises RuntimeError with its words when `check` and it fails; TimeoutExpired.
        """
        done = subprocess.run(
            [str(cache.packages().path / "debian/usr/bin/docker"), *map(str, arguments)],
            env={"DOCKER_HOST": self.base_url, "DOCKER_CONFIG": str(self.directory / "client"), "PATH": "/usr/bin"},
            input=stdin,
            text=True,
            errors="replace",
            capture_output=True,
            timeout=timeout_s,
            check=False,
        )
        if check and done.returncode:
            raise RuntimeError(f"docker {' '.join(map(str, arguments))}: {done.stderr.strip()}")
        return done

    def get(self, path: str) -> Any:
        """Ask the engine's API, unversioned path (`/info`), and return its JSON; raises OSError, RuntimeError."""
        connection = _UnixConnection(self.socket)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            body = response.read()
        finally:
            connection.close()
        if response.status != http.client.OK:
            raise RuntimeError(f"GET {path}: {response.status} {body.decode(errors='replace').strip()}")
        return json.loads(body)

    def load(self, archive: Path) -> str:
        """Load a docker-archive; returns the id that this engine gives the image (`sha256:...`)."""
        said = self.docker("load", "--quiet", "--input", archive, timeout_s=120, check=True).stdout
        name = said.partition(": ")[2].strip()
        return str(self.get(f"/images/{name}/json")["Id"])

    @property
    def enter(self) -> tuple[str, ...]:
        """The argv prefix that runs a program beside dockerd: same network, mounts, pids.

        For a program that reads /proc of a container by the pid that `inspect` tells; it ends with the engine.
        """
        return self._machine.enter

    @property
    def pid(self) -> int:
        """The pid, seen from here, of process 1 of the engine's pid namespace."""
        return self._machine.pid

    def tool(self, name: str, *arguments: str, stdin: str = "") -> str:
        """Run nft, iptables or the like in the host namespace and return its output; raises RuntimeError."""
        return self._machine.tool(name, *arguments, stdin=stdin)

    def logs(self) -> str:
        """Return the last lines of what the daemons wrote."""
        return self._machine.logs()

    # --- how it is set up ---------------------------------------------------------------------------------------------

    def _environment(self) -> dict[str, str]:
        """Both engines find their tools and libraries where they were unpacked, before the machine's own."""
        packages, go = cache.packages().path, cache.go().path
        places = {Which.CURRENT: [], Which.DEBIAN: [packages / "debian"]}[self.which] + [packages / "tools"]
        multiarch = f"{platform.machine()}-linux-gnu"
        first = [go / "bin"] if self.which is Which.CURRENT else []
        programs = [*first, *(place / "usr" / each for place in places for each in ("sbin", "bin"))]
        libraries = [place / each / multiarch for place in places for each in ("lib", "usr/lib")]
        return {
            "PATH": ":".join([*map(str, programs), os.defpath, "/usr/sbin:/sbin"]),
            "LD_LIBRARY_PATH": ":".join(map(str, libraries)),
            "XTABLES_LIBDIR": str(packages / "tools" / "usr/lib" / multiarch / "xtables"),
        }

    def _programs(self) -> dict[str, Program]:
        """Write both daemons' configuration, and say how they are started."""
        # The plugins that are off would write to /opt, or answer a kubelet that is not there.
        (self.directory / "containerd.toml").write_text(
            f"""version = 2
root = "{self._machine.data}/containerd"
state = "/run/containerd"
disabled_plugins = ["io.containerd.internal.v1.opt", "io.containerd.grpc.v1.cri"]
[grpc]
  address = "{_CONTAINERD}"
"""
        )
        config: dict[str, object] = (
            {
                "firewall-backend": self.firewall.value,
                "features": {"containerd-snapshotter": self.store is Store.CONTAINERD},
            }
            if self.which is Which.CURRENT
            else {"deprecated-key-path": str(self.directory / "key.json")}
        )
        config |= {
            "hosts": [f"unix://{self.socket}"],
            "data-root": f"{self._machine.data}/docker",
            "exec-root": "/run/docker",
            "pidfile": "/run/docker.pid",
            "containerd": _CONTAINERD,
            "cgroup-parent": f"/{self.cgroup}",
            "exec-opts": ["native.cgroupdriver=cgroupfs"],
            "runtimes": {"runsc": {"path": str(cache.go().path / "bin" / "runsc")}},
        }
        (self.directory / "daemon.json").write_text(json.dumps(config, indent=1))
        return {
            "containerd": Program(
                argv=["containerd", "--config", str(self.directory / "containerd.toml")], appears=_CONTAINERD
            ),
            "dockerd": Program(
                argv=["dockerd", "--config-file", str(self.directory / "daemon.json")], stale=["/run/docker.pid"]
            ),
        }

    @property
    def _resolver(self) -> str:
        return self.rig.resolver.rpartition(":")[0]

    def _sysctls(self) -> dict[str, int]:
        """Return what the root namespace of an ordinary Docker host has."""
        return {
            "net.ipv4.ip_forward": 1,
            "net.ipv6.conf.all.forwarding": 1,
            "net.ipv4.conf.all.rp_filter": self.rp_filter,
            "net.ipv4.conf.default.rp_filter": self.rp_filter,
            "net.bridge.bridge-nf-call-iptables": int(self.bridge_nf),
            "net.bridge.bridge-nf-call-ip6tables": int(self.bridge_nf),
        }

    def _answers(self) -> bool:
        with contextlib.suppress(OSError, RuntimeError, http.client.HTTPException):
            self.get("/version")
            return True
        return False


class _UnixConnection(http.client.HTTPConnection):
    """HTTP over a unix socket."""

    def __init__(self, path: Path) -> None:
        super().__init__("engine", timeout=30)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))
