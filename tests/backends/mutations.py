"""Owns taking remedies out, one by one: what a test of a hazard changes, and the launch that must then be refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anyio
import pytest

from reconciler.backends import docker_launch, docker_look, docker_spec, links
from reconciler.backends.docker_engine import Engine
from tests.backends.docker_world import Kind
from tests.backends.world import Recorder, launch, refused
from tests.rig.docker import Runtime, Which
from tests.rig.docker.fixtures import Setup

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from reconciler.backends.base import LaunchRefused
    from tests.backends.docker_world import DockerOnRig

CURRENT, DEBIAN = Setup(), Setup(which=Which.DEBIAN)


def on(*setups: Setup, runtimes: tuple[Runtime, ...] = (Runtime.RUNC,)) -> pytest.MarkDecorator:
    """Run a test on these engines and runtimes."""
    kinds = [Kind(setup=setup, runtime=runtime) for setup in setups for runtime in runtimes]
    return pytest.mark.parametrize("docker", kinds, indirect=True, ids=str)


def try_launch(docker: DockerOnRig) -> LaunchRefused:
    """Launch, and expect the refusal; nothing is left of it."""
    recorder = Recorder()

    async def main() -> LaunchRefused:
        async with docker.launch(launch("true"), recorder) as sandbox:
            return refused(sandbox)

    found = anyio.run(main)
    assert recorder.undone == []
    assert anyio.run(docker.reap, frozenset()) == ()
    return found


def reached(found: LaunchRefused) -> set[str]:
    """Name what the gate of a refused launch reached, and where something arrived."""
    assert found.code == "gate_failed", found
    assert found.report is not None
    return {target.name for target in found.report.targets if target.verdict == "reached"} | {*found.report.arrivals}


def without(monkeypatch: pytest.MonkeyPatch, made: str, change: Callable[[Any], None]) -> None:
    """Change what one function of the specification makes: the remedy was never asked for."""
    real = getattr(docker_spec, made)

    def changed(*given: object) -> Any:
        spec = real(*given)
        change(spec)
        return spec

    monkeypatch.setattr(docker_spec, made, changed)


def slipped(monkeypatch: pytest.MonkeyPatch, role: str, change: Callable[[Any], None]) -> None:
    """Change what the engine is told of one container: the remedy was asked for, and is not there."""
    real = Engine.create_container

    async def changed(self: Engine, name: str, config: Mapping[str, Any]) -> tuple[str, ...]:
        given = {**config, "HostConfig": dict(config["HostConfig"])}
        if name.endswith(f"-{role}"):
            change(given)
        return await real(self, name, given)

    monkeypatch.setattr(Engine, "create_container", changed)


def weaken(key: str, value: object) -> Callable[[dict[str, Any]], None]:
    """Set one of a container's settings."""

    def change(spec: dict[str, Any]) -> None:
        spec["HostConfig"][key] = value

    return change


def blind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take out every look from outside and what we set on bridges: the gate is left, and the guard where it is."""

    async def nothing(_standing: object) -> tuple[str, ...]:
        return ()

    monkeypatch.setattr(docker_look, "host", lambda _where: ())
    monkeypatch.setattr(docker_look, "differences", nothing)
    monkeypatch.setattr(links, "harden", lambda _name: None)
    monkeypatch.setattr(docker_launch, "_ensure_guard", lambda: None)


def no_guard(docker: DockerOnRig) -> None:
    """Take out the host guard, as `nft flush ruleset` does."""
    docker.engine.tool("nft", "add", "table", "inet", "ringfence_guard")
    docker.engine.tool("nft", "delete", "table", "inet", "ringfence_guard")


def plain_internal(spec: dict[str, Any]) -> None:
    """Make the fence what `docker network create --internal` makes."""
    spec["options"] = {key: value for key, value in spec["options"].items() if key.endswith("bridge.name")}
    spec["enable_ipv6"] = False
    spec["ipam"]["Config"] = spec["ipam"]["Config"][:1]
