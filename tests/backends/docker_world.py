"""Owns the Docker backends that tests run against: engines that stay up for the session, and a backend on each."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import pytest

from reconciler.backends.docker import Docker
from reconciler.core.choose import Missing
from reconciler.core.policy import HOST_IMAGE
from reconciler.host import DockerSettings
from tests.backends.world import host, inside
from tests.rig import Rig
from tests.rig.docker import Engine, Runtime

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractAsyncContextManager

    from reconciler.backends.base import Launch, LaunchRefused, Observer, Planned, Sandbox
    from reconciler.host import Host
    from tests.rig.docker.fixtures import Images, Setup

GVISOR = "runsc"


class DockerOnRig(Docker):
    """The docker backend, for launches that name no image: they get the rig's agent image."""

    def __init__(self, settings: Host, owner: str, engine: Engine, image: str) -> None:
        super().__init__(settings, owner, proc=Path(f"/proc/{engine.pid}/root/proc"))
        self.engine = engine
        self.image = image

    def launch(  # type: ignore[override]  # the same context manager, by its public name
        self, launch: Launch, observer: Observer
    ) -> AbstractAsyncContextManager[Sandbox | LaunchRefused]:
        """Launch with the agent image."""
        return super().launch(self._imaged(launch), observer)

    def plan(self, launch: Launch) -> tuple[Planned, ...]:
        """Plan with the agent image."""
        return super().plan(self._imaged(launch))

    def _imaged(self, launch: Launch) -> Launch:
        return dataclasses.replace(launch, image=self.image) if launch.image == HOST_IMAGE else launch


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One engine and one runtime of it."""

    setup: Setup
    runtime: Runtime

    def __str__(self) -> str:
        """Read as a test's id."""
        return f"docker: {self.setup}, {self.runtime}"


class Engines:
    """Engines with both images loaded, started when the first test asks for one, each in a rig of its own."""

    def __init__(self, images: Images, stack: contextlib.ExitStack, runtime: Path) -> None:
        self._images, self._stack, self._runtime = images, stack, runtime
        self._up: dict[Setup, Engine] = {}
        self._backends: dict[Kind, DockerOnRig] = {}
        self.rigs: list[Rig] = []

    def engine(self, setup: Setup) -> Engine:
        """Give the engine of this setup."""
        if setup not in self._up:
            rig = self._stack.enter_context(Rig())
            self.rigs.append(rig)
            made = Engine(
                rig,
                which=setup.which,
                firewall=setup.firewall,
                store=setup.store,
                rp_filter=setup.rp_filter,
                local_resolver=setup.local_resolver,
            )
            self._stack.enter_context(made)
            for image in (self._images.agent, self._images.proxy):
                made.load(image.archive)
            self._up[setup] = made
        return self._up[setup]

    def settings(self, kind: Kind) -> Host:
        """Give the settings of a host with this engine."""
        engine = self.engine(kind.setup)
        docker = DockerSettings(
            socket=engine.socket,
            proxy_image=self._images.proxy.pinned(engine.store),
            gvisor_runtime=GVISOR if kind.runtime is Runtime.RUNSC else None,
        )
        return dataclasses.replace(host(self._runtime), docker=docker)

    def backend(self, kind: Kind, owner: str) -> DockerOnRig:
        """Give a probed backend; the caller is in its rig's namespace. Fails when the probe says Missing."""
        if kind not in self._backends:
            engine = self.engine(kind.setup)
            made = DockerOnRig(self.settings(kind), owner, engine, self._images.agent.pinned(engine.store))
            found = anyio.run(made.probe)
            if isinstance(found, Missing):
                pytest.fail(f"docker is missing where an engine runs: {found.code}: {found.message}", pytrace=False)
            self._backends[kind] = made
        return self._backends[kind]


@pytest.fixture(scope="session")
def docker_engines(docker_images: Images, rig_runtime: Path) -> Iterator[Engines]:
    """Engines, for the whole session."""
    with contextlib.ExitStack() as stack:
        engines = Engines(docker_images, stack, rig_runtime)
        yield engines
    left = [text for rig in engines.rigs for text in rig.stragglers]
    if left:
        pytest.fail("still running in a rig's host namespace:\n  " + "\n  ".join(left), pytrace=False)


@contextlib.contextmanager
def beside(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """Be in an engine's network namespace, with the rig's nft in PATH: where the daemon of a test lives."""
    for name, value in engine._environment().items():
        monkeypatch.setenv(name, value)
    with inside(Path("/run/netns", engine.rig.host)):
        yield engine


OWNER = f"tests-{os.getpid()}"
