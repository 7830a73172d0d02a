"""Owns what comes before a Docker fence is raised: guard, image, a place of its own, another one where that is taken.

Does not raise it, does not undo (the steps do), does not run the command, does not probe.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread

from reconciler.backends import (
    docker_objects,
    docker_spec,
    guard,
    host_network,
    input_files,
    leftovers,
)
from reconciler.backends.base import Launch, LaunchRefused, Observer
from reconciler.backends.docker_engine import EngineError
from reconciler.backends.docker_image import find_image
from reconciler.backends.docker_place import Role, Where
from reconciler.backends.docker_raise import Raising, RangesTaken
from reconciler.backends.together import both
from reconciler.core.policy import HOST_IMAGE

if TYPE_CHECKING:
    from collections.abc import Mapping

    from anyio.abc import TaskGroup

    from reconciler.backends.docker_image import FoundImage
    from reconciler.backends.docker_raise import Site
    from reconciler.backends.docker_sandbox import DockerSandbox
    from reconciler.backends.docker_spec import Plain
    from reconciler.backends.steps import Steps
    from reconciler.host import Host

_ATTEMPTS = 4
_STUB_UPSTREAMS = Path("/run/systemd/resolve/resolv.conf")


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
    (failed, resolvers), image = await both(
        lambda: anyio.to_thread.run_sync(lambda: (_ensure_guard(), _resolvers(site.host))),
        lambda: find_image(site.engine, launch.image),
    )
    if failed is not None:
        return LaunchRefused(code="no_guard", message=f"the host guard is not in place: {'; '.join(failed.lines)}")
    steps.done("host guard")
    if image is None:
        return LaunchRefused(
            code="no_image",
            message=f"the Docker engine does not have {launch.image}: docker pull it, or docker load an archive of it",
        )
    taken: frozenset[str] = frozenset()
    for _ in range(_ATTEMPTS):
        where = await _place(site, launch, steps, taken)
        if where is None:
            break
        folder = steps.take("run directory", leftovers.run_folder(site.folder, launch))
        raising = Raising(
            site=site,
            launch=launch,
            observer=observer,
            steps=steps,
            tasks=tasks,
            where=where,
            specs=_specs(site, launch, where, image),
            folder=folder,
            resolvers=resolvers,
        )
        raised = await raising.run()
        if not isinstance(raised, RangesTaken):
            return raised
        await steps.undo()
        taken |= {str(where.slices.fence), str(where.slices.egress)}
    return LaunchRefused(
        code="no_range",
        message=f"no two free ranges of eight addresses in {site.host.docker.pool}: name a larger `pool` below"
        " `docker` in host.yaml, or see `docker network ls`",
    )


async def _place(site: Site, launch: Launch, steps: Steps, taken: frozenset[str]) -> Where | None:
    """Choose where the run's objects are; None when no ranges are left beside those `taken`."""
    slices = await steps.take_async(
        "address ranges", docker_objects.ranges(site.engine, site.host.docker.pool, site.reserved, taken)
    )
    if slices is None:
        return None
    return Where(
        run=launch.run,
        owner=site.owner,
        agent=launch.agent,
        expires=int(launch.expires_at),
        slices=slices,
        runtime=site.found.runtime,
        ipv6=site.found.ipv6,
        filters=site.found.filters,
    )


def _specs(site: Site, launch: Launch, where: Where, image: FoundImage) -> Mapping[Role, Plain]:
    return {
        Role.FENCE: docker_spec.fence_network(where, site.found.hazards),
        Role.EGRESS: docker_spec.egress_network(where),
        Role.PROXY: docker_spec.proxy_container(where, site.found.proxy_image),
        Role.GATE: docker_spec.gate_container(where, site.found.proxy_image, launch),
        Role.AGENT: docker_spec.agent_container(where, image.id, launch, image.volumes),
    }


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
