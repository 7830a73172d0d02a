"""Owns where the objects of one run are: what they are called, their labels, their ranges, who has which address.

Pure. What they are made of is said elsewhere.
"""

from __future__ import annotations

import hashlib
import ipaddress
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from reconciler.backends.labels import AGENT, EXPIRES, OWNER, ROLE, RUN
from reconciler.backends.nft import EGRESS_LINKS, FENCE_LINKS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from reconciler.backends.docker_filter import Filters

RUNC = "runc"
_SLICE = 29

Network4 = ipaddress.IPv4Network


class Role(StrEnum):
    """The part that an object plays in a run."""

    FENCE = "fence"
    EGRESS = "egress"
    JOB = "job"
    PROXY = "proxy"
    GATE = "gate"
    AGENT = "agent"


@dataclass(frozen=True, slots=True, kw_only=True)
class Slices:
    """The two networks of one run, and who is where: `.1` is left to a gateway that a fence does not have."""

    fence: Network4
    egress: Network4

    @property
    def gateway(self) -> str:
        """Where an ordinary bridge would have the host."""
        return str(self.fence[1])

    @property
    def proxy(self) -> str:
        """The proxy, on the fence."""
        return str(self.fence[2])

    @property
    def inside(self) -> str:
        """The gate, and after it the agent."""
        return str(self.fence[3])

    @property
    def outside(self) -> str:
        """The proxy, towards the world."""
        return str(self.egress[2])

    @property
    def fence6(self) -> str:
        """A unique local range (RFC 4193) that nobody gets an address of: without one a bridge has no mode for IPv6."""
        number = int(self.fence.network_address)
        return f"fd72:6e67:{number >> 16:x}:{number & 0xFFFF:x}::/64"


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """What the objects of one run are called and where they are; `runtime` is the engine's name of the runtime."""

    run: str
    owner: str
    agent: str
    expires: int
    slices: Slices
    runtime: str
    ipv6: bool
    """Whether this host's kernel has IPv6: only then can it be switched off in a container."""
    filters: Filters = field(repr=False)
    """The system call filters; gVisor has its own."""

    def name(self, role: Role) -> str:
        """Name one object."""
        return f"ringfence-{self.run}-{role}"

    @property
    def fence_link(self) -> str:
        """The fence's bridge on the host."""
        return link(FENCE_LINKS, self.owner, self.run)

    @property
    def egress_link(self) -> str:
        """The other bridge."""
        return link(EGRESS_LINKS, self.owner, self.run)

    @property
    def gvisor(self) -> bool:
        """Whether the runtime is gVisor's."""
        return self.runtime != RUNC

    def labels(self, role: Role) -> dict[str, str]:
        """Give the labels of one object."""
        return {OWNER: self.owner, RUN: self.run, ROLE: role, AGENT: self.agent, EXPIRES: str(self.expires)}


def link(pattern: str, owner: str, run: str) -> str:
    """Name a bridge: the guard knows it by its first letters; eight hexadecimal digits tell runs apart."""
    return pattern.rstrip("*") + hashlib.sha256(f"{owner}/{run}".encode()).hexdigest()[:8]


def allocate(pool: str, taken: Iterable[str], count: int) -> tuple[Network4, ...]:
    """Give the first `count` slices of eight addresses of `pool` that touch nothing `taken`; fewer when it is used up.

    Args:
        pool: an IPv4 range.
        taken: ranges in use, of any version; the engine's networks and the host's routes.
        count: how many slices.
    """
    used = sorted(
        (int(network.network_address), int(network.broadcast_address))
        for network in (ipaddress.ip_network(text, strict=False) for text in taken)
        if isinstance(network, Network4)
    )
    whole = Network4(pool)
    size = 1 << (32 - _SLICE)
    first, last = int(whole.network_address), int(whole.broadcast_address)
    found: list[Network4] = []
    while first + size - 1 <= last and len(found) < count:
        over = next((end for begin, end in used if begin <= first + size - 1 and end >= first), None)
        if over is None:
            found.append(Network4((first, _SLICE)))
            first += size
        else:
            first = (over // size + 1) * size
    return tuple(found)
