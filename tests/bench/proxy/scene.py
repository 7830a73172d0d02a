"""Owns where the benchmark happens: two namespaces without an uplink, the load's internet, cores; measures nothing."""

from __future__ import annotations

import json
import os
import subprocess
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tests.proxy.peers import parts
from tests.proxy.peers.peers import ADDRESS, Place
from tests.rig import addresses, network
from tests.rig.rig import sweep

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.rig.network import Instance

_LIMIT_S = 120


def cores() -> tuple[int, int]:
    """Say which core is the proxy's and which the load's; the same where there is only one."""
    usable = sorted(os.sched_getaffinity(0))
    return usable[-1], usable[0]


@dataclass(frozen=True, slots=True)
class Scene:
    """A host namespace for proxies and clients, an internet namespace for the load's world."""

    instance: Instance

    def place(self, name: str, *, core: int | None = None) -> Place:
        """Make room for one proxy, on the proxy's core."""
        return Place(
            enter=self.instance.enter(self.instance.host),
            directory=self.instance.directory / name,
            resolver=f"{addresses.RESOLVER_V4}:53",
            core=cores()[0] if core is None else core,
        )

    def load(self, *words: object) -> tuple[str, ...]:
        """Say how to start the load with these arguments, on its core."""
        pinned = ("/usr/bin/taskset", "-c", str(cores()[1]))
        enter = self.instance.enter(self.instance.internet if words == ("world",) else self.instance.host)
        return (*enter, *pinned, str(parts.load().path / "load"), *map(str, words))

    def measure(self, what: str, port: int, host: str, *words: object) -> dict[str, Any]:
        """Run the load to its end; what it found. Raises CalledProcessError with its words on our stderr."""
        argv = self.load(what, ADDRESS, port, host, *words)
        done = subprocess.run(argv, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, check=True, timeout=_LIMIT_S)
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    @contextmanager
    def tunnels(self, port: int, host: str, *words: object) -> Iterator[Callable[[], dict[str, Any]]]:
        """Open tunnels; what comes out measures through them, once."""
        argv = self.load("beat", ADDRESS, port, host, *words)
        with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            if process.stdin is None or process.stdout is None or process.stdout.readline() != b"ready\n":
                raise RuntimeError("the tunnels did not open")
            feed, told = process.stdin, process.stdout

            def measure() -> dict[str, Any]:
                feed.write(b"\n")
                feed.flush()
                found: dict[str, Any] = json.loads(told.readline())
                return found

            try:
                yield measure
            finally:
                process.kill()

    @contextmanager
    def beside(self, what: str, port: int, host: str, *words: object) -> Iterator[None]:
        """Run the load beside what is done in the context."""
        argv = self.load(what, ADDRESS, port, host, *words)
        with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            try:
                if process.stdout is None or process.stdout.readline() != b"ready\n":
                    raise RuntimeError(f"the load did not start: {what}")
                yield
            finally:
                if process.stdin is not None:
                    process.stdin.close()
                process.wait(10)


@contextmanager
def opened() -> Iterator[Scene]:
    """Bring the namespaces and the world up, and take everything down."""
    sweep()
    instance = network.fresh()
    instance.directory.mkdir(mode=0o755)
    try:
        network.make(instance)
        network.await_link(instance)
        for namespace in (instance.host, instance.internet):
            # a port may be used again at once: the benchmark opens more connections than there are ports
            settings = ("net.ipv4.tcp_tw_reuse=1", "net.ipv4.ip_local_port_range=2048 65535", "net.core.somaxconn=4096")
            argv = [*instance.enter(namespace), network.program("sysctl"), "-qw", *settings]
            subprocess.run(argv, check=True, timeout=10)
        scene = Scene(instance)
        with subprocess.Popen(scene.load("world"), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as world:
            try:
                if world.stdout is None or world.stdout.readline() != b"ready\n":
                    raise RuntimeError("the load's world did not start")
                yield scene
            finally:
                world.terminate()
    finally:
        network.remove(instance)
