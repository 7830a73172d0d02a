"""Owns the docker backend: its probe, what a launch would create, the life of a launch, and its reaper.

Each step's own work lives beside it; policy and jobs are unknown here.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import anyio

from proxy.policy import ProxyPolicy
from reconciler.backends import docker_launch, docker_place, docker_surroundings, labels, leftovers, nft
from reconciler.backends.base import ExitCode, Launch, LaunchRefused, Observer, Planned, Reaped, Sandbox
from reconciler.backends.docker_engine import Engine, EngineError
from reconciler.backends.docker_objects import Reserved
from reconciler.backends.docker_raise import Site
from reconciler.backends.steps import Nobody, Steps
from reconciler.core.choose import Available, Missing, Probe
from reconciler.core.policy import BackendName, Limits

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from reconciler.backends.docker_surroundings import Surroundings
    from reconciler.host import Host

_PROBE_S = 90.0
_PROBE_MEMORY = 128 * 1024 * 1024
_OWNER = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class _Proven:
    """What a canary run proved, and the versions of everything for which that holds."""

    versions: tuple[dict[str, str], ...]
    found: Surroundings
    answer: Available


class Docker:
    """Implements `base.Backend`. One for each daemon; `owner` labels everything that it makes on the engine."""

    def __init__(self, host: Host, owner: str, *, proc: Path = _PROC) -> None:
        """Look at nothing yet.

        Args:
            host: settings.
            owner: letters, digits, `-`, `_` and `.`, at most 64.
            proc: where the processes of containers are seen under the numbers that the engine gives them.
        """
        if _OWNER.fullmatch(owner) is None:
            raise ValueError(f"{owner!r} cannot be part of a file's name")
        self._host = host
        self._owner = owner
        self._folder = host.runtime / "docker" / owner
        self._proc = proc
        self._engine = Engine(str(host.docker.socket))
        self._reserved = Reserved()
        self._active: set[str] = set()
        self._proven: _Proven | None = None
        self._found: Surroundings | None = None

    @property
    def name(self) -> BackendName:
        """Docker."""
        return BackendName.DOCKER

    async def probe(self) -> Probe:
        """Build a fence, prove it, run a command in it, under each runtime until one holds; cached by versions."""
        found = await docker_surroundings.look(self._host, self._engine)
        if isinstance(found, Missing):
            self._found = None
            return found
        versions = tuple(dict(each.versions) for each in found.tries)
        if self._proven is not None and self._proven.versions == versions:
            # What was proven holds again, also after a while in which something was missing.
            self._found = self._proven.found
            return self._proven.answer
        self._found = self._proven = None
        why = list(found.skipped)
        answer: Probe = self._missing("no_runtime", "the engine has no runtime")
        for each in found.tries:
            answer = await self._canary_run(each, tuple(why))
            if isinstance(answer, Available):
                self._found = each
                self._proven = _Proven(versions, each, answer)
                break
            why.append(f"{each.runtime}: {answer.code}: {answer.message}")
            answer = self._missing(answer.code, "; ".join(why))
        return answer

    async def _canary_run(self, found: Surroundings, why: tuple[str, ...]) -> Probe:
        answer: Probe = self._missing("probe_timeout", f"the canary run took more than {_PROBE_S:g} s")
        with anyio.move_on_after(_PROBE_S):
            async with self._launch(_canary_launch(found), Nobody(), found) as sandbox:
                if isinstance(sandbox, LaunchRefused):
                    answer = self._missing(_code(sandbox), sandbox.message)
                else:
                    await sandbox.start()
                    end = await sandbox.wait()
                    answer = (
                        Available(
                            backend=self.name,
                            isolation=sandbox.isolation,
                            versions=found.versions,
                            evidence=(
                                *sandbox.evidence,
                                f"gate passed: {len(sandbox.report.targets)} targets",
                                f"kernel seen inside: {sandbox.report.runtime.get('kernel')}",
                                *why,
                            ),
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
        runtime = self._found.runtime if self._found else "the strongest runtime that the probe proves"
        name = f"ringfence-{launch.run}"
        bridge = docker_place.link(nft.FENCE_LINKS, self._owner, launch.run)
        return (
            Planned(kind="guard", name="inet ringfence_guard", detail="checked, loaded where it is not"),
            Planned(kind="directory", name=str(self._folder / launch.run), detail="label and canary socket"),
            Planned(kind="network", name=f"{name}-fence", detail=f"internal, bridge {bridge} without the host on it"),
            Planned(kind="network", name=f"{name}-egress", detail="the proxy's own way out"),
            Planned(kind="volume", name=f"{name}-job", detail=f"{len(launch.input)} input files, read-only"),
            Planned(kind="container", name=f"{name}-proxy", detail="ringfence-proxy, on the fence's address alone"),
            Planned(kind="canary", name="listeners of the daemon", detail="TCP and UDP on every address, Unix sockets"),
            Planned(kind="container", name=f"{name}-gate", detail="the agent's twin, removed before the command"),
            Planned(
                kind="container",
                name=f"{name}-agent",
                detail=f"{runtime}, uid {launch.user}, memory {limits.memory} bytes, {limits.pids} processes,"
                f" {limits.cpus:g} cores",
            ),
        )

    @contextlib.asynccontextmanager
    async def launch(self, launch: Launch, observer: Observer) -> AsyncIterator[Sandbox | LaunchRefused]:
        """Build the fence, prove it, hold the command back; at the end of the context nothing is left."""
        found = self._found
        if found is None:
            probed = await self.probe()
            if isinstance(probed, Missing) or self._found is None:
                code, message = (probed.code, probed.message) if isinstance(probed, Missing) else ("", "")
                yield LaunchRefused(code=code or "not_probed", message=message or "the backend is not probed")
                return
            found = self._found
        async with self._launch(launch, observer, found) as sandbox:
            yield sandbox

    @contextlib.asynccontextmanager
    async def _launch(
        self, launch: Launch, observer: Observer, found: Surroundings
    ) -> AsyncIterator[Sandbox | LaunchRefused]:
        steps = Steps(observer)
        self._active.add(launch.run)
        site = Site(
            host=self._host,
            owner=self._owner,
            engine=self._engine,
            found=found,
            folder=self._folder,
            proc=self._proc,
            reserved=self._reserved,
        )
        try:
            async with anyio.create_task_group() as tasks:
                try:
                    built = await docker_launch.build(site, launch, observer, steps, tasks)
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

    async def reap(self, live: frozenset[str]) -> tuple[Reaped, ...]:
        """Remove what an earlier daemon of this owner left, and what is past its time. Idempotent."""
        found = await leftovers.reap(roots={}, group="", folder=self._folder, live=live | self._active, now=time.time())
        if not self._host.docker.socket.exists():
            return found
        try:
            if not self._engine.speaks and not self._engine.speak(await self._engine.versions()):
                return found
            return (*found, *await self._reap(live | self._active))
        except EngineError:
            # An engine that is away keeps what it has; it is asked again at the next round.
            return found

    async def _reap(self, live: frozenset[str]) -> tuple[Reaped, ...]:
        containers, networks, volumes = await self._engine.labelled(f"{labels.OWNER}={self._owner}")
        now = time.time()
        found: list[Reaped] = []
        for kind, rows, remove in (
            ("container", containers, self._engine.remove_container),
            ("network", networks, self._engine.remove_network),
            ("volume", volumes, self._engine.remove_volume),
        ):
            for row in rows:
                told = row.get("Labels") or {}
                run = told.get(labels.RUN)
                if run in live and not labels.expired(told, now):
                    continue
                name = row["Names"][0].lstrip("/") if kind == "container" else row["Name"]
                with contextlib.suppress(EngineError):
                    await remove(name)
                    found.append(Reaped(kind=kind, name=name, run=run))
        return tuple(found)


def _code(refused: LaunchRefused) -> str:
    """Name an old gVisor for what it is: on kernels since 6.11 it takes every namespace for the host's."""
    return "runsc_too_old" if "root network namespace" in refused.message else refused.code


def _canary_launch(found: Surroundings) -> Launch:
    """Give the launch that probes: nothing is allowed, and the command is our own image's gate asked for its usage."""
    run = f"probe-{secrets.token_hex(4)}"
    expires = time.time() + 2 * _PROBE_S
    return Launch(
        run=run,
        owner="probe",
        agent="probe",
        image=found.proxy_image,
        user=1000,
        command=("/usr/bin/python3", "-I", "-S", "-c", "pass"),
        limits=Limits(cpus=1.0, memory=_PROBE_MEMORY, pids=32, timeout=int(_PROBE_S), output=1024, connections=4),
        proxy=ProxyPolicy(
            run=run,
            generation=1,
            revision="probe",
            allow=(),
            deny=(),
            layers=(),
            resolvers=((nft.NOWHERE, 53),),
            connections=4,
            proof_key=secrets.token_bytes(32),
            expires_at=expires,
        ),
        expires_at=expires,
    )
