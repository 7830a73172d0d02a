"""Owns a process that holds a backend and is killed at one step of a launch: the reaper's test.

    python -m tests.backends.killed STEP RUN OWNER RUNTIME bubblewrap UID_FIRST
    python -m tests.backends.killed STEP RUN OWNER RUNTIME docker IMAGE PROC SETTINGS
    python -m tests.backends.killed STEP RUN OWNER RUNTIME k8s IMAGE SECONDS SETTINGS

STEP is a step's name, `started` (the command runs) or `teardown` (the first undo was done). It kills itself: SIGKILL.
SETTINGS: what a host says of its engine or cluster, as JSON. SECONDS: after which nothing of the run may exist.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import anyio

from reconciler.backends import docker_surroundings, k8s_surroundings
from reconciler.backends.bubblewrap import Bubblewrap
from reconciler.backends.docker import Docker
from reconciler.backends.k8s import K8s
from reconciler.core.choose import Missing
from reconciler.host import DockerSettings, K8sSettings
from tests.backends.world import Recorder, built, host, launch

if TYPE_CHECKING:
    from reconciler.backends.base import Backend


def die() -> None:
    """End as a daemon ends under kill -9: nothing is undone."""
    os.kill(os.getpid(), signal.SIGKILL)


class Killer(Recorder):
    """An observer that kills its process at one step."""

    def __init__(self, at: str) -> None:
        super().__init__()
        self.at = at

    def step(self, name: str) -> None:
        """Die at the step."""
        if name == self.at or (self.at == "teardown" and name.startswith("undo ")):
            die()


async def main(*arguments: str) -> None:
    """Launch, start, and get killed on the way."""
    at, run, owner, runtime, kind, *given = arguments
    job = launch("sleep", "300", run=run)
    backend: Backend
    if kind == "docker":
        image, proc, settings = given
        job = dataclasses.replace(job, image=image)
        backend = await docker(Path(runtime), owner, Path(proc), settings)
    elif kind == "k8s":
        image, seconds, settings = given
        until = time.time() + float(seconds)
        small = dataclasses.replace(job.limits, cpus=0.1)
        proxy = dataclasses.replace(job.proxy, expires_at=until)
        job = dataclasses.replace(job, image=image, limits=small, proxy=proxy, expires_at=until)
        backend = await k8s(Path(runtime), owner, settings)
    else:
        backend = Bubblewrap(host(Path(runtime), uid_first=int(given[0])), owner)
    async with backend.launch(job, Killer(at)) as sandbox:
        await built(sandbox).start()
        if at == "started":
            await anyio.sleep(0.1)
            die()


async def docker(runtime: Path, owner: str, proc: Path, settings: str) -> Docker:
    """Give the docker backend with the first runtime that it would try, which its owner has proven already."""
    said = json.loads(settings)
    named = DockerSettings(**said | {"socket": Path(said["socket"])})
    made = Docker(dataclasses.replace(host(runtime), docker=named), owner, proc=proc)
    found = await docker_surroundings.look(made._host, made._engine)
    if isinstance(found, Missing):
        raise SystemExit(f"{found.code}: {found.message}")
    made._found = found.tries[0]
    return made


async def k8s(runtime: Path, owner: str, settings: str) -> K8s:
    """Give the k8s backend with the nodes' own runtime, which its owner has proven already."""
    said = json.loads(settings)
    named = K8sSettings(**said | {"kubeconfig": Path(said["kubeconfig"])})
    made = K8s(dataclasses.replace(host(runtime), k8s=named), owner)
    cluster = await made._cluster()
    found = cluster if isinstance(cluster, Missing) else await k8s_surroundings.look(named, cluster)
    if isinstance(found, Missing):
        raise SystemExit(f"{found.code}: {found.message}")
    made._found = found.tries[-1]
    return made


if __name__ == "__main__":
    anyio.run(main, *sys.argv[1:])
