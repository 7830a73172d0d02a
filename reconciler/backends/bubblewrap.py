"""Owns the bubblewrap backend: the order in which a fence is built, proven and taken down, and its probe.

Each step's own work lives beside it; policy and jobs are unknown here.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import time
from typing import TYPE_CHECKING

import anyio

from proxy.policy import ProxyPolicy
from reconciler.backends import bwrap_launch, bwrap_surroundings, leftovers
from reconciler.backends.base import ExitCode, Launch, LaunchRefused, Observer, Planned, Reaped, Sandbox
from reconciler.backends.cgroup import NoCgroup
from reconciler.backends.steps import Nobody, Steps
from reconciler.core.choose import Available, Missing, Probe
from reconciler.core.policy import HOST_IMAGE, BackendName, Isolation, Limits

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from anyio.abc import TaskGroup

    from reconciler.host import Host

_PROBE_S = 60.0
_PROBE_MEMORY = 128 * 1024 * 1024
_OWNER = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


class Bubblewrap:
    """Implements `base.Backend`. One for each daemon; `owner` labels everything that it makes on the host."""

    def __init__(self, host: Host, owner: str) -> None:
        """Look at nothing yet; `owner` is letters, digits, `-`, `_` and `.`, at most 64."""
        if _OWNER.fullmatch(owner) is None:
            raise ValueError(f"{owner!r} cannot be part of a file's name")
        self._host = host
        self._group = f"ringfence.{owner}"
        self._folder = host.runtime / "bubblewrap" / owner
        self._active: set[str] = set()
        self._probed: tuple[dict[str, str], Probe] | None = None
        self._surroundings: bwrap_surroundings.Surroundings | None = None

    @property
    def name(self) -> BackendName:
        """Bubblewrap."""
        return BackendName.BUBBLEWRAP

    async def probe(self) -> Probe:
        """Build a fence, prove it, run `true` in it; cached until bubblewrap, kernel or interpreter change."""
        found = bwrap_surroundings.look(self._host)
        if isinstance(found, Missing):
            return found
        versions = dict(found.versions)
        if self._probed is not None and self._probed[0] == versions and isinstance(self._probed[1], Available):
            return self._probed[1]
        self._surroundings = found
        answer = await self._canary_run(versions)
        self._probed = (versions, answer)
        return answer

    async def _canary_run(self, versions: dict[str, str]) -> Probe:
        answer: Probe = self._missing("probe_timeout", f"the canary run took more than {_PROBE_S:g} s")
        with anyio.move_on_after(_PROBE_S):
            async with self.launch(_canary_launch(), Nobody()) as sandbox:
                if isinstance(sandbox, LaunchRefused):
                    answer = self._missing(sandbox.code, sandbox.message)
                else:
                    await sandbox.start()
                    end = await sandbox.wait()
                    answer = (
                        Available(
                            backend=self.name,
                            isolation=Isolation.NAMESPACE,
                            versions=versions,
                            evidence=(*sandbox.evidence, f"gate passed: {len(sandbox.report.targets)} targets"),
                        )
                        if (end.code, end.status) == (ExitCode.EXITED, 0)
                        else self._missing("canary_failed", f"the canary run ended with {end.code} {end.status}")
                    )
        return answer

    def _missing(self, code: str, message: str) -> Missing:
        return Missing(backend=self.name, code=code, message=message)

    def plan(self, launch: Launch) -> tuple[Planned, ...]:
        """Say what `launch` would create, in order."""
        limits = launch.limits
        last = self._host.uid_first + self._host.uid_count - 1
        return (
            Planned(kind="uid", name="one free uid", detail=f"of {self._host.uid_first}-{last}, with no group"),
            Planned(kind="directory", name=str(self._folder / launch.run), detail="label and canary socket"),
            Planned(
                kind="cgroup",
                name=f"{self._group}/{launch.run}.sandbox",
                detail=f"memory {limits.memory} bytes, {limits.pids} processes, {limits.cpus:g} cores",
            ),
            Planned(kind="cgroup", name=f"{self._group}/{launch.run}.proxy", detail="the proxy's own bounds"),
            Planned(kind="canary", name="listeners of the daemon", detail="TCP and UDP on every address, Unix sockets"),
            Planned(kind="process", name="ringfence-proxy", detail=f"as {self._host.proxy_user}, outside the fence"),
            Planned(
                kind="sandbox",
                name="bwrap",
                detail="own user, pid, net, ipc, uts, cgroup and mount namespaces; only lo; /usr read-only",
            ),
            Planned(kind="gate", name="ringfence-gate", detail="inside the fence, before the command"),
        )

    @contextlib.asynccontextmanager
    async def launch(self, launch: Launch, observer: Observer) -> AsyncIterator[Sandbox | LaunchRefused]:
        """Build the fence, prove it, hold the command back; at the end of the context nothing is left."""
        steps = Steps(observer)
        self._active.add(launch.run)
        try:
            async with anyio.create_task_group() as tasks:
                try:
                    built = await self._build(launch, observer, steps, tasks)
                    if isinstance(built, LaunchRefused):
                        await steps.undo()
                    yield built
                finally:
                    await steps.undo()
                    tasks.cancel_scope.cancel()
        except BaseExceptionGroup as group:
            # That tasks run beside the caller's block is nothing that its exceptions should tell of.
            if len(group.exceptions) == 1:
                raise group.exceptions[0] from None
            raise
        finally:
            self._active.discard(launch.run)

    async def _build(
        self, launch: Launch, observer: Observer, steps: Steps, tasks: TaskGroup
    ) -> Sandbox | LaunchRefused:
        found = self._surroundings or bwrap_surroundings.look(self._host)
        if isinstance(found, Missing):
            return LaunchRefused(code=found.code, message=found.message)
        self._surroundings = found
        site = bwrap_launch.Site(host=self._host, surroundings=found, group=self._group, folder=self._folder)
        return await bwrap_launch.build(site, launch, observer, steps, tasks)

    async def reap(self, live: frozenset[str]) -> tuple[Reaped, ...]:
        """Remove what an earlier daemon of this owner left, and what is past its time. Idempotent."""
        roots = bwrap_surroundings.control_groups()
        return await leftovers.reap(
            roots={} if isinstance(roots, NoCgroup) else roots,
            group=self._group,
            folder=self._folder,
            live=live | self._active,
            now=time.time(),
        )


def _canary_launch() -> Launch:
    """Give the launch that probes: nothing is allowed, nothing is asked for."""
    run = f"probe-{secrets.token_hex(4)}"
    expires = time.time() + 2 * _PROBE_S
    return Launch(
        run=run,
        owner="probe",
        agent="probe",
        image=HOST_IMAGE,
        user=1000,
        command=("true",),
        limits=Limits(cpus=1.0, memory=_PROBE_MEMORY, pids=16, timeout=int(_PROBE_S), output=1024, connections=4),
        proxy=ProxyPolicy(
            run=run,
            generation=1,
            revision="probe",
            allow=(),
            deny=(),
            layers=(),
            resolvers=(("127.0.0.1", 53),),
            connections=4,
            proof_key=secrets.token_bytes(32),
            expires_at=expires,
        ),
        expires_at=expires,
    )
