"""Owns the raising of one Docker fence in its place: what is made side by side, what waits for what, and the proof.

Network, bridge looked at, proxy, gate, agent, as decision 0019 has it. Does not choose the place, does not undo (the
steps do), does not run the command.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread

from reconciler.backends import (
    canary,
    docker_gate,
    docker_look,
    docker_objects,
    docker_proof,
    host_network,
    links,
)
from reconciler.backends.base import Launch, LaunchRefused, Observer
from reconciler.backends.docker_engine import EngineError
from reconciler.backends.docker_gate import Asked, Unheard
from reconciler.backends.docker_look import Standing
from reconciler.backends.docker_place import Role, Where
from reconciler.backends.docker_process import attached, how_it_ended
from reconciler.backends.docker_proxy import NoResolver, ProxyContainer, reachable
from reconciler.backends.docker_sandbox import DockerSandbox, Voice
from reconciler.backends.nft import PROXY_PORT
from reconciler.backends.together import Later, both

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from anyio.abc import TaskGroup

    from reconciler.backends.docker_engine import Engine
    from reconciler.backends.docker_objects import Reserved
    from reconciler.backends.docker_process import Streams
    from reconciler.backends.docker_spec import Plain
    from reconciler.backends.docker_surroundings import Surroundings
    from reconciler.backends.steps import Steps
    from reconciler.core.gate_report import GateReport
    from reconciler.host import Host

_READY_S = 20.0
_NAMED_FAILURES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Where and with what one daemon builds: `folder` is above its runs' own, `proc` where processes are seen."""

    host: Host
    owner: str
    engine: Engine
    found: Surroundings
    folder: Path
    proc: Path
    reserved: Reserved


@dataclass(frozen=True, slots=True)
class Voiced:
    """An agent's streams, attached before its start, and who hears them."""

    streams: Streams
    voice: Voice


@dataclass(frozen=True, slots=True)
class RangesTaken:
    """Another daemon took the same ranges at the same moment, and the engine said so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Raising:
    """One fence on its way up: what does not need each other is made side by side, and nothing starts unlooked at."""

    site: Site
    launch: Launch
    observer: Observer
    steps: Steps
    tasks: TaskGroup
    where: Where
    specs: Mapping[Role, Plain]
    folder: Path
    resolvers: tuple[tuple[str, int], ...]
    fence_made: Later[bool] = field(default_factory=Later)
    fence_looked_at: Later[bool] = field(default_factory=Later)
    """Made, and as it must be on the host."""
    host_addresses: Later[tuple[str, ...]] = field(default_factory=Later)
    """Once both networks are there; none when they are not."""

    async def run(self) -> DockerSandbox | LaunchRefused | RangesTaken:
        """Bridge, proxy, gate, agent."""
        where, steps, engine = self.where, self.steps, self.site.engine
        if isinstance(unreachable := reachable(self.launch.proxy, upstreams=self.resolvers, addresses=()), NoResolver):
            return LaunchRefused(code="no_resolver", message=unreachable.message)
        await steps.promise(
            "networks", docker_objects.networks(engine, (where.name(Role.FENCE), where.name(Role.EGRESS)))
        )
        await steps.promise("volume", docker_objects.volume(engine, where.name(Role.JOB)))
        await steps.promise("proxy container", docker_objects.container(engine, where.name(Role.PROXY)))
        await steps.promise("gate container", docker_objects.container(engine, where.name(Role.GATE)))
        addresses: list[str] = []
        proxy = ProxyContainer(
            self.observer, lambda policy: reachable(policy, upstreams=self.resolvers, addresses=addresses)
        )
        with contextlib.ExitStack() as opened:
            # The gate comes up beside the proxy, and is asked once that listens.
            bridged, (unready, (heard, voiced)) = await both(
                self._networks,
                lambda: both(
                    lambda: self._proxy(proxy, addresses),
                    lambda: both(
                        lambda: docker_gate.run(
                            engine,
                            where,
                            self.specs[Role.GATE],
                            self.launch,
                            standing=self.fence_looked_at.get,
                            when=lambda: self._question(proxy, opened),
                            steps=steps,
                            tasks=self.tasks,
                        ),
                        lambda: self._create_agent(proxy),
                    ),
                ),
            )
        if bridged is not None:
            return bridged
        if unready is not None:
            return unready
        if isinstance(heard, Unheard) or voiced is None:
            return _refused("gate_failed", heard.structure or ("the gate was not asked",))
        if failures := tuple(dict.fromkeys((*heard.structure, *heard.report.failures))):
            judged = replace(heard.report, passed=False, failures=failures)
            return LaunchRefused(code="gate_failed", message=_gate_message(failures, heard.diagnostics), report=judged)
        steps.done("gate")
        return await self._agent(proxy, voiced, heard.report)

    async def _networks(self) -> LaunchRefused | RangesTaken | None:
        """Create the fence, look at it on the host while the way out is created; None when both are there."""
        try:
            await self.site.engine.create_network(self.specs[Role.FENCE])
            self.fence_made.set(True)
            lines, _ = await both(self._look_at_fence, self._way_out)
        except EngineError as error:
            if "overlap" not in str(error).lower():
                raise
            return RangesTaken()
        finally:
            # Whoever still waits for one of them waits for nothing.
            self.fence_made.set(False)
            self.fence_looked_at.set(False)
            self.host_addresses.set(())
        return _refused("fence_failed", lines) if lines else None

    async def _look_at_fence(self) -> tuple[str, ...]:
        await anyio.to_thread.run_sync(links.harden, self.where.fence_link)
        lines = await anyio.to_thread.run_sync(docker_look.host, self.where)
        if not lines:
            self.steps.done("bridge verified")
        self.fence_looked_at.set(not lines)
        return lines

    async def _way_out(self) -> None:
        await self.site.engine.create_network(self.specs[Role.EGRESS])
        self.steps.done("networks")
        self.host_addresses.set(await anyio.to_thread.run_sync(host_network.addresses))

    async def _proxy(self, proxy: ProxyContainer, addresses: list[str]) -> LaunchRefused | None:
        """Create the proxy, look at it, start it; None when it listens, or when there is nothing to start it on."""
        with proxy.coming_up():
            return await self._raise_proxy(proxy, addresses)

    async def _raise_proxy(self, proxy: ProxyContainer, addresses: list[str]) -> LaunchRefused | None:
        where, engine = self.where, self.site.engine
        name, spec = where.name(Role.PROXY), self.specs[Role.PROXY]
        await docker_objects.create(engine, name, spec)
        self.steps.done("proxy container")
        if not await self.fence_made.get():
            return None
        await engine.connect(where.name(Role.FENCE), name, where.slices.proxy)
        found, streams = await both(
            lambda: engine.container(name),
            lambda: self.steps.take_async(
                "proxy streams", attached(engine, name, stdin=True, output=proxy.output, tasks=self.tasks)
            ),
        )
        if lines := docker_proof.container(where, Role.PROXY, spec, found, running=False):
            return _refused("proxy_failed", lines)
        self.tasks.start_soon(proxy.bind(streams))
        addresses += await self.host_addresses.get()
        if not addresses or not await self.fence_looked_at.get():
            return None
        await engine.start(name)
        self.steps.done("proxy started")
        await proxy.send(self.launch.proxy)
        if unready := await proxy.until_ready(_READY_S):
            return LaunchRefused(code="proxy_failed", message=f"{unready} ({await how_it_ended(engine, name)})")
        self.steps.done("proxy ready")
        return None

    async def _question(self, proxy: ProxyContainer, opened: contextlib.ExitStack) -> Asked | None:
        """Open the canaries once the proxy listens, and say what the gate is asked; None when the proxy does not.

        Only from now until the gate was heard: before, the bridge may not have all of its addresses; afterwards whoever
        scans this host would find them.
        """
        if not await proxy.settled():
            return None
        addresses = await anyio.to_thread.run_sync(host_network.addresses)
        canaries = opened.enter_context(canary.open_canaries(self.folder, addresses))
        self.steps.done("canaries")
        question = docker_gate.question(
            self.where, self.launch, canaries=canaries, addresses=addresses, resolvers=self.resolvers
        )
        return Asked(question, canaries)

    async def _create_agent(self, proxy: ProxyContainer) -> Voiced | None:
        """Create the agent while the gate listens; until its start the gate alone has the network that is for both."""
        if not await proxy.settled():
            return None
        engine, name = self.site.engine, self.where.name(Role.AGENT)
        await self.steps.promise("agent container", docker_objects.container(engine, name))
        await docker_objects.create(engine, name, self.specs[Role.AGENT])
        self.steps.done("agent container")
        voice = Voice(self.observer.output)
        streams = await self.steps.take_async(
            "agent streams", attached(engine, name, stdin=False, output=voice, tasks=self.tasks)
        )
        return Voiced(streams, voice)

    async def _agent(self, proxy: ProxyContainer, voiced: Voiced, report: GateReport) -> DockerSandbox | LaunchRefused:
        """Look at everything once the gate has ended, and hold the agent back."""
        engine = self.site.engine
        standing = self._standing(Role.FENCE, Role.EGRESS, Role.PROXY, Role.AGENT)
        lines, _ = await both(
            lambda: docker_look.differences(standing), lambda: engine.remove_container(self.where.name(Role.GATE))
        )
        if lines:
            return _refused("fence_failed", lines)
        self.steps.done("agent inspected")
        sandbox = DockerSandbox(
            standing=standing,
            proxy=proxy,
            streams=voiced.streams,
            voice=voiced.voice,
            report=report,
            evidence=self._evidence(),
        )
        self.tasks.start_soon(sandbox.stop_when_proxy_dies)
        return sandbox

    def _standing(self, *roles: Role) -> Standing:
        return Standing(
            engine=self.site.engine,
            where=self.where,
            specs={role: self.specs[role] for role in roles},
            user=self.launch.user,
            proc=self.site.proc,
        )

    def _evidence(self) -> tuple[str, ...]:
        where, found = self.where, self.site.found
        return (
            f"Docker engine {found.versions['engine']}, API {found.versions['api']}, runtime {where.runtime}",
            f"bridge {where.fence_link}: no address of the host, arp_ignore 2, rp_filter 1, IPv6 off",
            f"network {where.name(Role.FENCE)} ({where.slices.fence}): internal; on it only proxy and sandbox",
            f"proxy {where.slices.proxy}:{PROXY_PORT} on the fence alone, ip_forward 0, no capabilities, read-only",
            "host guard loaded and read back",
            "inspected: one network, one volume, no ports, devices, capabilities or host namespaces",
        )


def _gate_message(failures: tuple[str, ...], diagnostics: str) -> str:
    named = "; ".join(failures[:_NAMED_FAILURES])
    more = f" and {len(failures) - _NAMED_FAILURES} more" if len(failures) > _NAMED_FAILURES else ""
    return f"the gate did not prove the fence: {named}{more}" + (f" ({diagnostics})" if diagnostics else "")


def _refused(code: str, lines: tuple[str, ...]) -> LaunchRefused:
    return LaunchRefused(code=code, message=f"the fence is not as it must be: {'; '.join(lines[:_NAMED_FAILURES])}")
