"""Owns the life of one rig: namespaces up, the world started, programs run in the host namespace, all of it down."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from socket import AF_INET, AF_INET6, SOCK_STREAM
from socket import socket as Socket  # noqa: N812 - Rig.socket has the name
from typing import IO, TYPE_CHECKING, Any, Final, Self

from tests.rig import addresses, network
from tests.rig.internet import Internet

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from types import TracebackType

    from tests.rig.network import Instance

ROOT: Final = Path(__file__).parents[2]
"""The checkout."""
_CLONE_NEWNET: Final = 0x40000000
_TERM_TIMEOUT: Final = 3.0


class Rig(Internet):
    """A context manager: inside it the two namespaces and the internet's services exist; README.md beside this file.

    Needs root, iproute2, util-linux, procps and openssl. Raises RuntimeError with the world's own words when it fails.
    """

    def __init__(self) -> None:
        """Name the rig; nothing exists before `start` or `with`."""
        self.instance: Instance = network.fresh()
        self.directory: Path = self.instance.directory
        self.control: Path = self.directory / "control.sock"
        super().__init__(self.control)
        self.ca: Path = self.directory / "ca.pem"
        self.host: str = self.instance.host
        self.internet: str = self.instance.internet
        self.enter: tuple[str, ...] = self.instance.enter(self.host)
        self.resolver: str = f"{addresses.RESOLVER_V4}:53"
        self.resolver_v6: str = f"[{addresses.RESOLVER_V6}]:53"
        self.host_addresses: tuple[str, ...] = addresses.HOST_ADDRESSES
        self.stragglers: tuple[str, ...] = ()
        self._world: subprocess.Popen[bytes] | None = None
        self._spawned: list[subprocess.Popen[bytes]] = []
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - the world's stderr, without a name; closed by stop

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _value: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Bring it up (about half a second), after sweeping what rigs of dead processes left."""
        sweep()
        self.directory.mkdir(mode=0o755)
        try:
            network.make(self.instance)
            self._start_world()
            network.await_link(self.instance)
        except BaseException:
            self.stop()
            raise

    def _start_world(self) -> None:
        argv = [*self.instance.enter(self.internet), sys.executable, "-m", "tests.rig.world", self.instance.name]
        self._world = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            cwd=ROOT,
            start_new_session=True,  # a Ctrl-C at the terminal ends the parent, and that ends the world
        )
        if self._world.stdout is None or self._world.stdout.readline() != b"ready\n":
            raise RuntimeError("the rig's internet did not start")

    def stop(self) -> None:
        """Take everything down; `stragglers` then names what was still running in `host` though nobody ended it.

        Raises RuntimeError with the world's own words when it had died before.
        """
        for process in reversed(self._spawned):
            end(process)
        self._spawned.clear()
        self.stragglers = tuple(_command_of(pid) for pid in sorted(network.inside(self.host)))
        world, self._world = self._world, None
        if world is not None:
            for stream in (world.stdin, world.stdout):
                if stream is not None:
                    stream.close()
            try:
                world.wait(timeout=20)
            except subprocess.TimeoutExpired:
                world.kill()
                world.wait(timeout=5)
        network.remove(self.instance)  # the world does it; this is for a world that died
        self._log.seek(0)
        words = self._log.read().decode(errors="replace")
        self._log.close()
        if world is not None and world.returncode:
            raise RuntimeError(f"the rig's internet broke: {words}")

    def spawn(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        stdin: int | IO[Any] = subprocess.DEVNULL,
        stdout: int | IO[Any] = subprocess.PIPE,
        stderr: int | IO[Any] | None = None,
        pass_fds: Iterable[int] = (),
    ) -> subprocess.Popen[bytes]:
        """Start a program in the host namespace; `stop` ends it if nobody did."""
        process = subprocess.Popen(
            [*self.enter, *argv],
            env=None if env is None else dict(env),
            cwd=cwd,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            pass_fds=tuple(pass_fds),
        )
        self._spawned.append(process)
        return process

    def run(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        stdin: bytes = b"",
        timeout_s: float = 30.0,
    ) -> subprocess.CompletedProcess[bytes]:
        """Run a program in the host namespace to its end; raises TimeoutExpired."""
        return subprocess.run(
            [*self.enter, *argv],
            env=None if env is None else dict(env),
            cwd=cwd,
            input=stdin,
            capture_output=True,
            timeout=timeout_s,
            check=False,
        )

    def socket(
        self,
        family: int = AF_INET,
        kind: int = SOCK_STREAM,
        protocol: int = 0,
        *,
        timeout_s: float | None = 10.0,
    ) -> Socket:
        """Make a socket that lives in the host namespace while this process stays where it is."""
        made: list[Socket | OSError] = []

        def make() -> None:
            # Only this thread changes its namespace, and it ends at once.
            try:
                with (network.NETNS / self.host).open("rb") as handle:
                    _setns(handle.fileno())
                made.append(Socket(family, kind, protocol))
            except OSError as broken:
                made.append(broken)

        thread = threading.Thread(target=make)
        thread.start()
        thread.join()
        match made:
            case [Socket() as ready]:
                ready.settimeout(timeout_s)
                return ready
            case [OSError() as broken]:
                raise broken
            case _:
                raise RuntimeError("the rig could not make a socket in its host namespace")

    def connect(self, address: str, port: int, *, timeout_s: float = 10.0) -> Socket:
        """Open a TCP connection from the host namespace; raises OSError."""
        family = AF_INET6 if ":" in address else AF_INET
        connection = self.socket(family, timeout_s=timeout_s)
        try:
            connection.connect((address, port))
        except BaseException:
            connection.close()
            raise
        return connection

    def describe(self) -> dict[str, object]:
        """Return what another program needs to use the rig, as JSON values."""
        return {
            "instance": self.instance.name,
            "host": self.host,
            "internet": self.internet,
            "enter": list(self.enter),
            "control": str(self.control),
            "ca": str(self.ca),
            "directory": str(self.directory),
            "resolver": self.resolver,
            "resolver_v6": self.resolver_v6,
            "host_addresses": list(self.host_addresses),
        }

    def environment(self) -> dict[str, str]:
        """Return this process's environment plus RINGFENCE_RIG, the JSON of `describe`."""
        return {**os.environ, "RINGFENCE_RIG": json.dumps(self.describe())}


def _setns(handle: int) -> None:
    """Move the calling thread; os.setns came with Python 3.12."""
    if ctypes.CDLL(None, use_errno=True).setns(handle, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns into the rig's host namespace")


def attached(environment: Mapping[str, str]) -> Internet:
    """Return the internet of the rig that started this process (`python -m tests.rig run`); raises KeyError if none."""
    return Internet(Path(json.loads(environment["RINGFENCE_RIG"])["control"]))


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process that we started: SIGTERM, a grace period, SIGKILL; closes its pipes."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(timeout=_TERM_TIMEOUT)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(timeout=5)
    for stream in (process.stdin, process.stdout, process.stderr):
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.close()


def sweep() -> tuple[str, ...]:
    """Remove what rigs of dead processes left; returns their names."""
    found = sorted(network.leftovers(), key=lambda instance: instance.name)
    for instance in found:
        network.remove(instance)
    return tuple(instance.name for instance in found)


def _command_of(pid: int) -> str:
    with contextlib.suppress(OSError):
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        return f"{pid} {command}"
    return str(pid)
