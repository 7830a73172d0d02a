"""A ringfenced that kills itself with SIGKILL at one moment of a job: `python -m tests.e2e.dying_daemon MOMENT ...`.

Everything else is the real daemon. Does not judge what is left of it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import anyio

from reconciler import daemon
from reconciler.backends.base import LaunchRefused
from reconciler.core.policy import BackendName
from reconciler.host import Host, load_host

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from proxy.policy import ProxyPolicy
    from proxy.record import Record
    from reconciler.backends.base import (
        Backend,
        Exit,
        ExitCode,
        Launch,
        Observer,
        Planned,
        Reaped,
        Sandbox,
        Stream,
    )
    from reconciler.core.choose import Probe
    from reconciler.core.gate_report import GateReport
    from reconciler.core.policy import Isolation

MOMENTS = {
    BackendName.BUBBLEWRAP: (
        "uid",
        "proxy",
        "sandbox",
        "listener handed out",
        "gate",
        "start",
        "exit",
        "drain",
        "undo sandbox",
    ),
    BackendName.DOCKER: (
        "gate",
        "exit",
        "undo agent container",
    ),
}
"""In the order of a run. What has no own name in a launch: the command was let go, has ended, was drained."""


def die_at(moment: str, chosen: str) -> None:
    """Die if this is the moment."""
    if moment == chosen:
        os.kill(os.getpid(), signal.SIGKILL)


class Watching:
    """An observer that dies at a step, and else passes everything on."""

    def __init__(self, observer: Observer, chosen: str) -> None:
        self._observer, self._chosen = observer, chosen

    def step(self, name: str) -> None:
        """Pass it on, then die."""
        self._observer.step(name)
        die_at(name, self._chosen)

    def decision(self, record: Record) -> None:
        """Pass it on."""
        self._observer.decision(record)

    def decisions_end(self, last: int | None) -> None:
        """Pass it on."""
        self._observer.decisions_end(last)

    def output(self, stream: Stream, data: bytes) -> None:
        """Pass it on."""
        self._observer.output(stream, data)

    def undo_failed(self, step: str, message: str) -> None:
        """Pass it on."""
        self._observer.undo_failed(step, message)


class Mortal:
    """A sandbox that passes everything on, and dies where it is told to."""

    def __init__(self, sandbox: Sandbox, chosen: str) -> None:
        self._sandbox, self._chosen = sandbox, chosen

    @property
    def report(self) -> GateReport:
        """The gate's report."""
        return self._sandbox.report

    @property
    def isolation(self) -> Isolation:
        """What isolates it."""
        return self._sandbox.isolation

    @property
    def evidence(self) -> tuple[str, ...]:
        """The structural proof."""
        return self._sandbox.evidence

    async def start(self) -> None:
        """Start, then die."""
        await self._sandbox.start()
        die_at("start", self._chosen)

    async def wait(self) -> Exit:
        """Wait, then die."""
        end = await self._sandbox.wait()
        die_at("exit", self._chosen)
        return end

    async def stop(self, code: ExitCode) -> None:
        """Pass it on."""
        await self._sandbox.stop(code)

    async def update(self, policy: ProxyPolicy) -> bool:
        """Pass it on."""
        return await self._sandbox.update(policy)

    async def drift(self) -> tuple[str, ...]:
        """Pass it on."""
        return await self._sandbox.drift()

    async def drain(self) -> None:
        """Drain, then die."""
        await self._sandbox.drain()
        die_at("drain", self._chosen)


class Dying:
    """A backend under a daemon that dies; probes are left alone."""

    def __init__(self, backend: Backend, chosen: str) -> None:
        self._backend, self._chosen = backend, chosen

    @property
    def name(self) -> BackendName:
        """Its own."""
        return self._backend.name

    async def probe(self) -> Probe:
        """Pass it on."""
        return await self._backend.probe()

    def plan(self, launch: Launch) -> tuple[Planned, ...]:
        """Pass it on."""
        return self._backend.plan(launch)

    async def reap(self, live: frozenset[str]) -> tuple[Reaped, ...]:
        """Pass it on."""
        return await self._backend.reap(live)

    @contextlib.asynccontextmanager
    async def launch(self, launch: Launch, observer: Observer) -> AsyncIterator[Sandbox | LaunchRefused]:
        """Launch, and die at the moment."""
        async with self._backend.launch(launch, Watching(observer, self._chosen)) as sandbox:
            yield sandbox if isinstance(sandbox, LaunchRefused) else Mortal(sandbox, self._chosen)


def main() -> None:
    """Run the daemon until it dies."""
    parser = argparse.ArgumentParser()
    parser.add_argument("moment", choices=sorted({moment for each in MOMENTS.values() for moment in each}))
    parser.add_argument("--host-config", type=Path, required=True)
    given = parser.parse_args()

    def backends(host: Host, owner: str) -> Mapping[BackendName, Backend]:
        return {name: Dying(backend, given.moment) for name, backend in daemon.built_in(host, owner).items()}

    host = load_host(given.host_config)
    assert isinstance(host, Host), host
    parts = daemon.open_parts(host, backends)
    assert not isinstance(parts, str), parts
    with parts.closing:
        anyio.run(daemon.Daemon(parts).serve)


if __name__ == "__main__":
    main()
