"""Owns what a daemon does that is on a node of the cluster: listeners there that no pod may reach, and the node guard.

Network policies leave a node's own processes, IPv6 link-local addresses and ICMP open; on a node both can be seen and
closed. Where the daemon is elsewhere none of this is done, and the gate alone says what it reaches.
"""

from __future__ import annotations

import contextlib
import random
import socket
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread

from reconciler.backends import canary, gate_targets, host_network, node_guard
from reconciler.backends.pod_guard import Fenced
from reconciler.core.gate_report import Target, TargetKind

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Iterator
    from pathlib import Path

    from reconciler.backends.canary import Canaries
    from reconciler.backends.guard import GuardFailed
    from reconciler.backends.k8s_surroundings import Node

_FIRST_NODE_PORT, _LAST_NODE_PORT = 30000, 32767
"""The range of a cluster's node ports: enforcers are known that leave every process of a node open there."""
_TRIED_PORTS = 64
_BACKLOG = 4096
_SPARE_S = 120
"""How long a pod stays fenced in past its time, should nobody let it out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listeners:
    """Listeners on this node. `settling` answer too but count nothing: the gate waits until it cannot reach them."""

    canaries: Canaries
    settling: tuple[Target, ...]

    @property
    def targets(self) -> tuple[Target, ...]:
        """What the gate must not reach, from a socket of any kind."""
        found = self.canaries.targets
        return (*found, *gate_targets.bound(found), *self.settling)


@dataclass(slots=True)
class Fence:
    """The pods of one run that the node guard fences in: none before the agent's has an address."""

    pods: tuple[Fenced, ...] = field(default=())

    async def put(self, *, agent: str, proxy: str, lasts: int) -> tuple[str, ...]:
        """Fence a pod in; what is wrong with that, a line each."""
        return await anyio.to_thread.run_sync(self._put, agent, proxy, lasts)

    def _put(self, agent: str, proxy: str, lasts: int) -> tuple[str, ...]:
        mac = node_guard.mac_of(agent)
        if mac is None:
            # Without it only what is routed is shut: link-local addresses are not.
            return (f"the link of {agent} does not say its MAC address",)
        self.pods = (Fenced(agent=agent, mac=mac, proxy=proxy),)
        failed = node_guard.put(self.pods, seconds=lasts + _SPARE_S)
        return () if failed is None else failed.lines

    async def missing(self) -> tuple[str, ...]:
        """Say what is no longer as it was put."""
        if not self.pods:
            return ()
        lines = await anyio.to_thread.run_sync(node_guard.missing, self.pods)
        return tuple(f"node guard: {line}" for line in lines)


def standing_on(nodes: Iterable[Node]) -> str | None:
    """Name the node that this process is on; None where none of its addresses is of this network namespace."""
    own = set(host_network.addresses())
    return next((node.name for node in nodes if own & set(node.addresses)), None)


def ensure() -> GuardFailed | None:
    """Have the node guard's tables in place."""
    return node_guard.ensure()


@contextlib.asynccontextmanager
async def fenced() -> AsyncIterator[Fence]:
    """Hold what the node guard is told of one run; at the end of the context its pods are let out. They are gone."""
    fence = Fence()
    try:
        yield fence
    finally:
        if fence.pods:
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(node_guard.take, fence.pods)


@contextlib.contextmanager
def listeners(folder: Path) -> Iterator[Listeners]:
    """Open the canaries, where enforcers are known to leave a node open, and listeners to settle by.

    Args:
        folder: a directory of the run's own.

    Raises:
        OSError: a listener could not be opened.
    """
    addresses = host_network.addresses()
    ports = random.sample(range(_FIRST_NODE_PORT, _LAST_NODE_PORT + 1), _TRIED_PORTS)
    outside = [address for address in addresses if not address.startswith("127.") and address != "::1"]
    with contextlib.ExitStack() as stack:
        settling = []
        for family in sorted({socket.AF_INET6 if ":" in address else socket.AF_INET for address in outside}):
            made = stack.enter_context(canary.listen_everywhere(family, socket.SOCK_STREAM, ports, backlog=_BACKLOG))
            port = made.getsockname()[1]
            settling += [
                _settling(address, port) for address in outside if (":" in address) == (family == socket.AF_INET6)
            ]
        canaries = stack.enter_context(canary.open_canaries(folder, addresses, ports=ports))
        yield Listeners(canaries=canaries, settling=tuple(settling))


def _settling(address: str, port: int) -> Target:
    shown = f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
    return Target(name=f"node tcp:{shown}", kind=TargetKind.TCP, address=address, port=port, alive=False)
