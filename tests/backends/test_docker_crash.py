"""A daemon or an engine that is killed at any moment: one end of the run, and nothing that a successor must keep."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import os
import secrets
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread
import pytest

from reconciler.backends import docker_place, docker_process, labels
from reconciler.backends.base import ExitCode
from reconciler.backends.docker import Docker
from reconciler.backends.docker_engine import Engine
from tests.backends.docker_world import OWNER, Kind, beside
from tests.backends.mutations import CURRENT, DEBIAN, on
from tests.backends.world import Recorder, built, launch, refused
from tests.rig.docker import Runtime

if TYPE_CHECKING:
    from collections.abc import Iterator

    from reconciler.backends.base import Exit, Launch, Reaped
    from tests.backends.docker_world import DockerOnRig, Engines

pytestmark = [
    pytest.mark.docker,
    pytest.mark.rig,
    pytest.mark.timeout(180),
    # The client library drops a socket that it could not connect; an engine that is away makes it do so.
    pytest.mark.filterwarnings("ignore:unclosed <socket.socket fd=[0-9]+, family=1, type=1, proto=0>:ResourceWarning"),
]
ROOT = Path(__file__).parents[2]
_IDLE_ROUNDS, _BETWEEN_ROUNDS_S = 3, 0.3
STEPS = [
    "host guard",
    "run directory",
    "address ranges",
    "networks",
    "bridge verified",
    "gate container",
    "gate started",
    "proxy container",
    "proxy streams",
    "proxy started",
    "proxy ready",
    "canaries",
    "gate",
    "agent container",
    "agent inspected",
    "agent streams",
    "started",
    "teardown",
]
CASES = [
    *((Kind(setup=CURRENT, runtime=Runtime.RUNC), step) for step in STEPS),
    *((Kind(setup=CURRENT, runtime=Runtime.RUNSC), step) for step in ("proxy ready", "canaries", "started")),
    *(
        (Kind(setup=DEBIAN, runtime=Runtime.RUNC), step)
        for step in ("networks", "proxy ready", "agent streams", "started")
    ),
]


async def everything(path: Path, owner: str) -> list[str]:
    """Name all that an engine has of an owner."""
    with contextlib.closing(Engine(str(path))) as engine:
        engine.speak(await engine.versions())
        containers, networks, volumes = await engine.labelled(f"{labels.OWNER}={owner}")
    return [*(row["Names"][0] for row in containers), *(row["Name"] for row in (*networks, *volumes))]


async def rounds(after: Docker) -> list[Reaped]:
    """Let the reaper come until it finds nothing more: an engine still makes what it was asked for before the kill."""
    found: list[Reaped] = []
    idle = 0
    with anyio.fail_after(20):
        while idle < _IDLE_ROUNDS:
            left = await after.reap(frozenset())
            found += left
            idle = 0 if left else idle + 1
            await anyio.sleep(_BETWEEN_ROUNDS_S)
    return found


@pytest.mark.parametrize(("kind", "step"), CASES, ids=[f"{kind}: {step}" for kind, step in CASES])
def test_a_daemon_killed_at_any_step_leaves_nothing_after_the_reaper(
    docker_engines: Engines, rig_runtime: Path, monkeypatch: pytest.MonkeyPatch, kind: Kind, step: str
) -> None:
    owner, name = f"killed-{os.getpid()}", f"test-{secrets.token_hex(4)}"
    engine = docker_engines.engine(kind.setup)
    settings = docker_engines.settings(kind)
    said = dataclasses.asdict(settings.docker) | {"socket": str(settings.docker.socket)}
    with beside(engine, monkeypatch):
        image = docker_engines.backend(kind, OWNER).image
        proc = f"/proc/{engine.pid}/root/proc"
        killed = subprocess.run(
            [
                *(sys.executable, "-m", "tests.backends.killed", step, name, owner, str(rig_runtime)),
                *("docker", image, proc, json.dumps(said)),
            ],
            cwd=ROOT,
            check=False,
            timeout=60,
            capture_output=True,
        )
        assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
        after = Docker(settings, owner, proc=Path(proc))
        with contextlib.closing(after._engine):
            reaped = anyio.run(rounds, after)
        assert {thing.run for thing in reaped} <= {name}
        assert anyio.run(everything, engine.socket, owner) == []
        links = engine.tool("ip", "-o", "link")
        assert docker_place.link("rf*", owner, name) not in links
        assert docker_place.link("rx*", owner, name) not in links
    assert not (rig_runtime / "docker" / owner / name).exists()


def test_what_another_owner_has_and_what_is_live_is_left_alone(
    docker_engines: Engines, rig_runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = Kind(setup=CURRENT, runtime=Runtime.RUNC)
    with beside(docker_engines.engine(kind.setup), monkeypatch):
        docker = docker_engines.backend(kind, OWNER)
        successor = Docker(docker_engines.settings(kind), OWNER)
        stranger = Docker(docker_engines.settings(kind), "stranger")

        async def main() -> None:
            job = launch("sleep", "300")
            with contextlib.closing(successor._engine), contextlib.closing(stranger._engine):
                await beside_it(job)

        async def beside_it(job: Launch) -> None:
            async with docker.launch(job, Recorder()) as sandbox:
                await built(sandbox).start()
                assert await stranger.reap(frozenset()) == ()
                assert await successor.reap(frozenset({job.run})) == ()
                assert await built(sandbox).drift() == ()

        anyio.run(main)
    assert not (rig_runtime / "docker" / "stranger").exists()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that is away for 3 s counts as lost: nobody starts it again before that."""
    monkeypatch.setattr(docker_process, "_AWAY_S", 3.0)


@pytest.fixture
def restarting(docker: DockerOnRig) -> Iterator[DockerOnRig]:
    """A backend whose engine is up again afterwards, whatever the test did to it."""
    yield docker
    if docker.engine.docker("version").returncode:
        docker.engine.start_daemon("dockerd")
    anyio.run(docker.reap, frozenset())
    gc.collect()  # now, where the warning above is expected


@on(CURRENT, DEBIAN, runtimes=tuple(Runtime))
def test_an_engine_that_is_killed_during_a_run_and_started_again(restarting: DockerOnRig) -> None:
    """Without live-restore it takes its containers with it: one end, said once, and nothing is left."""
    docker, recorder = restarting, Recorder()

    async def main() -> tuple[Exit, Exit]:
        async with docker.launch(launch("sleep", "300"), recorder) as sandbox:
            live = built(sandbox)
            await live.start()
            await anyio.to_thread.run_sync(docker.engine.kill_daemon, "dockerd")
            await anyio.sleep(0.5)
            await anyio.to_thread.run_sync(docker.engine.start_daemon, "dockerd")
            with anyio.fail_after(60):
                return await live.wait(), await live.wait()

    first, again = anyio.run(main)
    assert first == again
    assert (first.code, first.status) == (ExitCode.PROXY_DIED, None)
    assert anyio.run(docker.reap, frozenset()) == ()
    assert anyio.run(everything, docker.engine.socket, OWNER) == []


@on(CURRENT)
@pytest.mark.usefixtures("impatient")
def test_an_engine_that_stays_away_ends_the_run_and_is_cleaned_up_when_it_is_back(restarting: DockerOnRig) -> None:
    docker, recorder = restarting, Recorder()

    async def main() -> Exit:
        async with docker.launch(launch("sleep", "300"), recorder) as sandbox:
            live = built(sandbox)
            await live.start()
            await anyio.to_thread.run_sync(docker.engine.kill_daemon, "dockerd")
            with anyio.fail_after(60):
                return await live.wait()

    assert anyio.run(main).code is ExitCode.PROXY_DIED
    assert recorder.undone, "what could not be removed is told"
    docker.engine.start_daemon("dockerd")
    assert {thing.kind for thing in anyio.run(docker.reap, frozenset())} >= {"container", "network", "volume"}
    assert anyio.run(everything, docker.engine.socket, OWNER) == []


@on(CURRENT)
@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("step", ["networks", "proxy ready", "canaries", "agent container"])
def test_an_engine_that_is_killed_during_a_launch_refuses_it(restarting: DockerOnRig, step: str) -> None:
    docker = restarting

    class Killing(Recorder):
        """Kills the engine at one step."""

        def step(self, name: str) -> None:
            """Do so."""
            if name == step:
                docker.engine.kill_daemon("dockerd")

    async def main() -> str:
        with anyio.fail_after(60):
            async with docker.launch(launch("true"), Killing()) as sandbox:
                return refused(sandbox).code

    assert anyio.run(main) in ("engine_failed", "proxy_failed", "gate_failed")
    docker.engine.start_daemon("dockerd")
    anyio.run(docker.reap, frozenset())
    assert anyio.run(everything, docker.engine.socket, OWNER) == []
