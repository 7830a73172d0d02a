"""Owns the life of what a run has on a Docker engine: ranges of addresses, and objects gone at the end of a context.

A context begins before its object is made: so nothing is ever there that nobody will remove. Says nothing of what they
are made of, nor in which order.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread

from reconciler.backends import docker_place, links
from reconciler.backends.docker_engine import EngineError
from reconciler.backends.docker_place import Slices

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from reconciler.backends.docker_engine import Engine
    from reconciler.backends.docker_spec import Plain


@dataclass(slots=True)
class Reserved:
    """The ranges that launches of this daemon hold; whoever looks for free ones holds the lock meanwhile."""

    lock: anyio.Lock = field(default_factory=anyio.Lock)
    ranges: set[str] = field(default_factory=set)


@contextlib.asynccontextmanager
async def ranges(
    engine: Engine, pool: str, reserved: Reserved, refused: frozenset[str]
) -> AsyncIterator[Slices | None]:
    """Reserve two free ranges; what the engine and the host use is read each time."""
    async with reserved.lock:
        taken = await anyio.to_thread.run_sync(links.routed)
        for network in await engine.networks():
            taken += tuple(
                each["Subnet"] for each in (network.get("IPAM") or {}).get("Config") or () if "Subnet" in each
            )
        found = docker_place.allocate(pool, (*taken, *refused, *reserved.ranges), 2)
        mine = {str(each) for each in found}
        reserved.ranges.update(mine)
    try:
        yield Slices(fence=found[0], egress=found[1]) if len(found) == 2 else None  # noqa: PLR2004 - fence and egress
    finally:
        reserved.ranges.difference_update(mine)


@contextlib.asynccontextmanager
async def networks(engine: Engine, names: tuple[str, ...]) -> AsyncIterator[None]:
    """Remove networks at the end of the context, the last first, whether they were made in it or not."""
    try:
        yield
    finally:
        with anyio.CancelScope(shield=True):
            for name in reversed(names):
                await engine.remove_network(name)


@contextlib.asynccontextmanager
async def volume(engine: Engine, name: str) -> AsyncIterator[None]:
    """Remove a volume at the end of the context, whether it was made in it or not."""
    try:
        yield
    finally:
        with anyio.CancelScope(shield=True):
            await engine.remove_volume(name)


@contextlib.asynccontextmanager
async def container(engine: Engine, name: str) -> AsyncIterator[None]:
    """Remove a container at the end of the context, whether it was made in it or not."""
    try:
        yield
    finally:
        with anyio.CancelScope(shield=True):
            await engine.remove_container(name)


async def create(engine: Engine, name: str, spec: Plain) -> None:
    """Create a container; a warning means that something asked for is left out, which is not what was proven.

    Raises:
        EngineError: the engine warns or refuses.
    """
    if warnings := await engine.create_container(name, spec):
        raise EngineError(f"it warns of {name}: {'; '.join(warnings)}")
