"""Owns the building of one Docker fence: its steps in their order, and the proof before the command.

Does not undo (the steps do), does not run the command, does not probe.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread

from reconciler.backends import (
    canary,
    docker_gate,
    docker_look,
    docker_objects,
    docker_proof,
    docker_spec,
    guard,
    host_network,
    input_files,
    leftovers,
    links,
)
from reconciler.backends.base import Launch, LaunchRefused, Observer
from reconciler.backends.docker_engine import EngineError
from reconciler.backends.docker_gate import Asked, Unheard
from reconciler.backends.docker_image import find_image
from reconciler.backends.docker_look import Standing
from reconciler.backends.docker_place import Role, Where
from reconciler.backends.docker_process import attached, how_it_ended
from reconciler.backends.docker_proxy import NoResolver, ProxyContainer, reachable
from reconciler.backends.docker_sandbox import DockerSandbox, Voice
from reconciler.backends.nft import PROXY_PORT
from reconciler.backends.together import both
from reconciler.core.policy import HOST_IMAGE

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from anyio.abc import TaskGroup

    from proxy.policy import ProxyPolicy
    from reconciler.backends.docker_engine import Engine
    from reconciler.backends.docker_objects import Reserved
    from reconciler.backends.docker_spec import Plain
    from reconciler.backends.docker_surroundings import Surroundings
    from reconciler.backends.steps import Steps
    from reconciler.core.gate_report import GateReport
    from reconciler.host import Host

_READY_S = 20.0
_ATTEMPTS = 4
_NAMED_FAILURES = 5
_STUB_UPSTREAMS = Path("/run/systemd/resolve/resolv.conf")


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


async def build(
    site: Site, launch: Launch, observer: Observer, steps: Steps, tasks: TaskGroup
) -> DockerSandbox | LaunchRefused:
    """Take the steps in their order; whatever was taken is undone by the caller."""
    try:
        return await _build(site, launch, observer, steps, tasks)
    except EngineError as error:
        return LaunchRefused(code="engine_failed", message=f"the Docker engine: {error}")


async def _build(
    site: Site, launch: Launch, observer: Observer, steps: Steps, tasks: TaskGroup
) -> DockerSandbox | LaunchRefused:
    if refused := _unusable(launch):
        return refused
    failed, image = await both(
        lambda: anyio.to_thread.run_sync(_ensure_guard), lambda: find_image(site.engine, launch.image)
    )
    if failed is not None:
        return LaunchRefused(code="no_guard", message=f"the host guard is not in place: {'; '.join(failed.lines)}")
    steps.done("host guard")
    if image is None:
        return LaunchRefused(
            code="no_image",
            message=f"the Docker engine does not have {launch.image}: docker pull it, or docker load an archive of it",
        )
    folder = steps.take("run directory", leftovers.run_folder(site.folder, launch))
    where = await _networks(site, launch, steps)
    if isinstance(where, LaunchRefused):
        return where
    specs: dict[Role, Plain] = {
        Role.FENCE: docker_spec.fence_network(where, site.found.hazards),
        Role.EGRESS: docker_spec.egress_network(where),
        Role.PROXY: docker_spec.proxy_container(where, site.found.proxy_image),
        Role.GATE: docker_spec.gate_container(where, site.found.proxy_image, launch),
        Role.AGENT: docker_spec.agent_container(where, image.id, launch, image.volumes),
    }
    raising = _Raising(site=site, launch=launch, observer=observer, steps=steps, tasks=tasks, where=where, specs=specs)
    return await raising.run(folder)


async def _networks(site: Site, launch: Launch, steps: Steps) -> Where | LaunchRefused:
    """Create both networks. Another daemon may take the same ranges at the same moment: the engine says so."""
    refused: set[str] = set()
    for _ in range(_ATTEMPTS):
        slices = await steps.take_async(
            "address ranges",
            docker_objects.ranges(site.engine, site.host.docker.pool, site.reserved, frozenset(refused)),
        )
        if slices is None:
            break
        where = Where(
            run=launch.run,
            owner=site.owner,
            agent=launch.agent,
            expires=int(launch.expires_at),
            slices=slices,
            runtime=site.found.runtime,
            ipv6=site.found.ipv6,
            filters=site.found.filters,
        )
        specs = (docker_spec.fence_network(where, site.found.hazards), docker_spec.egress_network(where))
        try:
            await steps.take_async("networks", docker_objects.networks(site.engine, specs))
        except EngineError as error:
            if "overlap" not in str(error).lower():
                raise
            refused |= {str(slices.fence), str(slices.egress)}
        else:
            return where
    return LaunchRefused(
        code="no_range",
        message=f"no two free ranges of eight addresses in {site.host.docker.pool}: name a larger `pool` below"
        " `docker` in host.yaml, or see `docker network ls`",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Raising:
    """One fence on its way up."""

    site: Site
    launch: Launch
    observer: Observer
    steps: Steps
    tasks: TaskGroup
    where: Where
    specs: Mapping[Role, Plain]

    async def run(self, folder: Path) -> DockerSandbox | LaunchRefused:
        """Bridge, proxy, gate, agent."""
        where, steps, engine = self.where, self.steps, self.site.engine
        await anyio.to_thread.run_sync(links.harden, where.fence_link)
        if lines := await anyio.to_thread.run_sync(docker_look.host, where):
            return _refused("fence_failed", lines)
        steps.done("bridge verified")
        await steps.take_async("volume", docker_objects.volume(engine, where))
        addresses = await anyio.to_thread.run_sync(host_network.addresses)
        resolvers = await anyio.to_thread.run_sync(_resolvers, self.site.host)

        def adapt(policy: ProxyPolicy) -> ProxyPolicy | NoResolver:
            return reachable(policy, upstreams=resolvers, addresses=addresses)

        if isinstance(unreachable := adapt(self.launch.proxy), NoResolver):
            return LaunchRefused(code="no_resolver", message=unreachable.message)
        proxy = ProxyContainer(self.observer, adapt)
        with contextlib.ExitStack() as opened:
            # The gate comes up beside the proxy, and is asked once that listens.
            unready, heard = await both(
                lambda: self._proxy(proxy),
                lambda: docker_gate.run(
                    engine,
                    where,
                    self.specs[Role.GATE],
                    self.launch,
                    when=lambda: self._question(proxy, folder, resolvers, opened),
                    tasks=self.tasks,
                ),
            )
        if unready is not None:
            return unready
        if isinstance(heard, Unheard):
            return _refused("gate_failed", heard.structure or ("the gate was not asked",))
        if failures := tuple(dict.fromkeys((*heard.structure, *heard.report.failures))):
            judged = replace(heard.report, passed=False, failures=failures)
            return LaunchRefused(code="gate_failed", message=_gate_message(failures, heard.diagnostics), report=judged)
        steps.done("gate")
        return await self._agent(proxy, heard.report)

    async def _proxy(self, proxy: ProxyContainer) -> LaunchRefused | None:
        """Create the proxy, look at it, start it; None when it listens."""
        with proxy.coming_up():
            return await self._raise_proxy(proxy)

    async def _question(
        self,
        proxy: ProxyContainer,
        folder: Path,
        resolvers: Sequence[tuple[str, int]],
        opened: contextlib.ExitStack,
    ) -> Asked | None:
        """Open the canaries once the proxy listens, and say what the gate is asked; None when the proxy does not.

        Only from now until the gate was heard: before, the bridge may not have all of its addresses; afterwards whoever
        scans this host would find them.
        """
        if not await proxy.settled():
            return None
        addresses = await anyio.to_thread.run_sync(host_network.addresses)
        canaries = opened.enter_context(canary.open_canaries(folder, addresses))
        self.steps.done("canaries")
        question = docker_gate.question(
            self.where, self.launch, canaries=canaries, addresses=addresses, resolvers=resolvers
        )
        return Asked(question, canaries)

    async def _raise_proxy(self, proxy: ProxyContainer) -> LaunchRefused | None:
        where, engine = self.where, self.site.engine
        name, spec = where.name(Role.PROXY), self.specs[Role.PROXY]
        await self.steps.take_async("proxy container", docker_objects.container(engine, name, spec))
        await engine.connect(where.name(Role.FENCE), name, where.slices.proxy)
        if lines := docker_proof.container(where, Role.PROXY, spec, await engine.container(name), running=False):
            return _refused("proxy_failed", lines)
        streams = await self.steps.take_async(
            "proxy streams", attached(engine, name, stdin=True, output=proxy.output, tasks=self.tasks)
        )
        self.tasks.start_soon(proxy.bind(streams))
        await engine.start(name)
        await proxy.send(self.launch.proxy)
        if unready := await proxy.until_ready(_READY_S):
            return LaunchRefused(code="proxy_failed", message=f"{unready} ({await how_it_ended(engine, name)})")
        self.steps.done("proxy ready")
        return None

    async def _agent(self, proxy: ProxyContainer, report: GateReport) -> DockerSandbox | LaunchRefused:
        """Create the agent, look at it, hold it back."""
        engine, name = self.site.engine, self.where.name(Role.AGENT)
        await self.steps.take_async("agent container", docker_objects.container(engine, name, self.specs[Role.AGENT]))
        standing = self._standing(Role.FENCE, Role.EGRESS, Role.PROXY, Role.AGENT)
        if lines := await docker_look.differences(standing):
            return _refused("fence_failed", lines)
        self.steps.done("agent inspected")
        voice = Voice(self.observer.output)
        streams = await self.steps.take_async(
            "agent streams", attached(engine, name, stdin=False, output=voice, tasks=self.tasks)
        )
        sandbox = DockerSandbox(
            standing=standing, proxy=proxy, streams=streams, voice=voice, report=report, evidence=self._evidence()
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


def _unusable(launch: Launch) -> LaunchRefused | None:
    if launch.image == HOST_IMAGE:
        return LaunchRefused(
            code="image_needs_backend",
            message=f"docker cannot run `image: {HOST_IMAGE}`: give the agent an image by digest",
        )
    for name in launch.input:
        if input_files.unusable_name(name):
            return LaunchRefused(code="bad_input", message=f"input file {name!a} is not a plain relative path")
    return None


def _ensure_guard() -> guard.GuardFailed | None:
    """Load the guard again where something flushed it: nothing of ours runs without it."""
    return None if guard.check() is None else guard.load()


def _resolvers(host: Host) -> tuple[tuple[str, int], ...]:
    """Give the resolvers of this host, those behind systemd's stub among them."""
    found = (*host_network.nameservers(), *host_network.nameservers(_STUB_UPSTREAMS))
    return host_network.resolvers(host.resolvers, found)


def _gate_message(failures: tuple[str, ...], diagnostics: str) -> str:
    named = "; ".join(failures[:_NAMED_FAILURES])
    more = f" and {len(failures) - _NAMED_FAILURES} more" if len(failures) > _NAMED_FAILURES else ""
    return f"the gate did not prove the fence: {named}{more}" + (f" ({diagnostics})" if diagnostics else "")


def _refused(code: str, lines: tuple[str, ...]) -> LaunchRefused:
    return LaunchRefused(code=code, message=f"the fence is not as it must be: {'; '.join(lines[:_NAMED_FAILURES])}")
