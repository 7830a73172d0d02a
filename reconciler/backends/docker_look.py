"""Owns reading the structural proof of a Docker fence: from the engine, and from the kernel that it runs on.

Judges nothing itself and changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import anyio.to_thread

from reconciler.backends import docker_proof, guard, links
from reconciler.backends.docker_place import Role
from reconciler.backends.docker_proof import Observed
from reconciler.backends.docker_spec import PROXY_USER
from reconciler.backends.together import side_by_side

if TYPE_CHECKING:
    from collections.abc import Mapping

    from reconciler.backends.docker_engine import Engine
    from reconciler.backends.docker_place import Where
    from reconciler.backends.docker_spec import Plain


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """What stands and must go on standing. `specs`: what each object was made from; `proc`: where processes are seen.

    `own_network`: inode of the network namespace that is the host's.
    """

    engine: Engine
    where: Where
    specs: Mapping[Role, Plain]
    user: int
    proc: Path
    agent_runs: bool = False

    def member(self) -> Role:
        """Who is on the fence beside the proxy."""
        return Role.AGENT if Role.AGENT in self.specs else Role.GATE


async def differences(standing: Standing) -> tuple[str, ...]:
    """Look at everything; each line names what is not as it must be.

    Raises:
        EngineError: the engine does not answer.
    """
    where = standing.where
    rows: list[tuple[str, ...]] = await side_by_side(
        lambda: _network(standing, Role.FENCE, (Role.PROXY, standing.member())),
        lambda: _network(standing, Role.EGRESS, (Role.PROXY,)),
        lambda: _container(standing, Role.PROXY, running=True),
        lambda: _container(standing, Role.AGENT, running=standing.agent_runs),
        lambda: anyio.to_thread.run_sync(host, where),
    )
    return tuple(line for lines in rows for line in lines)


async def _network(standing: Standing, role: Role, members: tuple[Role, ...]) -> tuple[str, ...]:
    where = standing.where
    found = await standing.engine.network(where.name(role))
    return docker_proof.network(where, role, standing.specs[role], found, members)


async def _container(standing: Standing, role: Role, *, running: bool) -> tuple[str, ...]:
    if role not in standing.specs:
        return ()
    where = standing.where
    found = await standing.engine.container(where.name(role))
    lines = docker_proof.container(where, role, standing.specs[role], found, running=running)
    if found is not None and running and found["State"]["Running"]:
        lines += await anyio.to_thread.run_sync(_process, standing, role, int(found["State"]["Pid"]))
    return lines


def host(where: Where) -> tuple[str, ...]:
    """Look at the fence's bridge and at the guard, in the calling thread's network namespace."""
    name = where.fence_link
    found = links.look(name)
    lines = docker_proof.bridge(name, found, () if found is None else links.soft(found), most_ports=2)
    failed = guard.check()
    return lines if failed is None else (*lines, *(f"host guard: {line}" for line in failed.lines))


def _process(standing: Standing, role: Role, pid: int) -> tuple[str, ...]:
    user = int(PROXY_USER.partition(":")[0]) if role is Role.PROXY else standing.user
    try:
        observed = observe(standing.proc, pid)
    except (OSError, KeyError):
        # It ended meanwhile, which is nobody's drift; that it is gone is found by asking the engine.
        return ()
    if observed.status.get("State", "").startswith(("Z", "X")):
        return ()
    own = Path("/proc/thread-self/ns/net").stat().st_ino
    return docker_proof.process(standing.where, role, observed, own_network=own, user=user)


def observe(proc: Path, pid: int) -> Observed:
    """Read what /proc says of one process.

    Raises:
        OSError: the process is gone.
    """
    folder = proc / str(pid)
    status = (folder / "status").read_text("utf-8", "replace").splitlines()
    devices = (folder / "net/dev").read_text("ascii").splitlines()[2:]
    return Observed(
        network=(folder / "ns/net").stat().st_ino,
        interfaces=tuple(line.partition(":")[0].strip() for line in devices),
        status={name: value.strip() for name, _, value in (line.partition(":") for line in status)},
    )
