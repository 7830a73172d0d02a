"""What is looked at from outside: containers as they were asked for, the guard, and what changes during a run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from reconciler.backends import docker_place, docker_proof, guard, links
from reconciler.backends.docker_engine import Engine
from reconciler.backends.docker_place import Role
from tests.backends.docker_world import OWNER, beside
from tests.backends.mutations import (
    CURRENT,
    DEBIAN,
    no_guard,
    on,
    slipped,
    try_launch,
    weaken,
    without,
)
from tests.backends.world import Recorder, built, launch

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.backends.docker_world import DockerOnRig, Engines

pytestmark = [pytest.mark.docker, pytest.mark.rig]


@on(CURRENT)
def test_an_agent_in_the_proxys_namespace_is_refused(docker: DockerOnRig, monkeypatch: pytest.MonkeyPatch) -> None:
    def share(spec: dict[str, Any]) -> None:
        network = next(iter(spec["NetworkingConfig"]["EndpointsConfig"]))
        spec["HostConfig"] |= {
            "NetworkMode": f"container:{network.removesuffix('-fence')}-proxy",
            "Dns": [],
            "DnsSearch": [],
        }
        spec["HostConfig"]["Sysctls"] = {}
        spec["NetworkingConfig"] = {}
        spec["Hostname"] = ""

    without(monkeypatch, "agent_container", share)
    found = try_launch(docker)
    assert found.code == "fence_failed"
    assert "agent: networks are" in found.message


@on(CURRENT, DEBIAN)
def test_the_gate_is_gone_before_the_agent_is_started(docker: DockerOnRig, monkeypatch: pytest.MonkeyPatch) -> None:
    present: dict[str, bool] = {}
    real = Engine.start

    async def looking(self: Engine, name: str) -> None:
        if name.endswith("-agent"):
            present[name] = await self.container(name.removesuffix("agent") + "gate") is not None
        await real(self, name)

    monkeypatch.setattr(Engine, "start", looking)

    async def main() -> None:
        async with docker.launch(launch("true"), Recorder()) as sandbox:
            await built(sandbox).start()

    anyio.run(main)
    assert list(present.values()) == [False]


OPENINGS = {
    "PortBindings": {"3128/tcp": [{"HostIp": "127.0.0.1", "HostPort": "0"}]},
    "ExtraHosts": ["host.docker.internal:172.17.0.1"],
    "Binds": ["/run:/host:ro"],
    "CapAdd": ["NET_RAW"],
    "Devices": [{"PathOnHost": "/dev/null", "PathInContainer": "/dev/x", "CgroupPermissions": "r"}],
    "PidMode": "host",
    "UTSMode": "host",
    "Privileged": True,
    "NetworkMode": "bridge",
    "Dns": ["9.9.9.9"],
    "AutoRemove": True,
    "SecurityOpt": ["seccomp=unconfined"],
}
"""Settings of a container, each of which opens it to the host, or takes the proof away."""
GOLDEN = {"Dns", "SecurityOpt"}
"""What we ask for of these is compared with what there is, and what we ask for is golden."""


def opened(spec: dict[str, Any], key: str) -> dict[str, Any]:
    """Give a specification with one opening."""
    made = {**spec, "HostConfig": {**spec["HostConfig"], key: OPENINGS[key]}}
    return {**made, "Hostname": ""} if key == "UTSMode" else made


@on(CURRENT, DEBIAN)
def test_what_opens_a_container_to_the_host_is_seen_by_inspection(docker: DockerOnRig) -> None:
    """Each opening beside a fence that stands: what the engine says of a container that has it is not what must be."""

    async def main() -> list[str]:
        unseen = []
        async with docker.launch(launch("true"), Recorder()) as sandbox:
            standing = built(sandbox)._standing  # type: ignore[attr-defined]  # what is looked at from outside
            where, spec, engine = standing.where, standing.specs[Role.AGENT], standing.engine
            name = f"{where.name(Role.AGENT)}-opened"

            async def found(given: dict[str, Any]) -> dict[str, Any] | None:
                """What the engine says of such a container."""
                await engine.create_container(name, given)
                try:
                    made: dict[str, Any] | None = await engine.container(name)
                    return made
                finally:
                    await engine.remove_container(name)

            said = await found(spec)
            assert docker_proof.container(where, Role.AGENT, spec, said, running=False) == (), "as it must be"
            for key in OPENINGS:
                made = await found(opened(spec, key))
                unseen += [
                    f"{key}, {'not asked for' if asked is spec else 'asked for'}"
                    for asked in ([spec] if key in GOLDEN else [spec, opened(spec, key)])
                    if not docker_proof.container(where, Role.AGENT, asked, made, running=False)
                ]
        return unseen

    assert anyio.run(main) == []


@on(CURRENT, DEBIAN)
@pytest.mark.parametrize("asked", [False, True], ids=["though not asked for", "though asked for"])
def test_a_launch_whose_agent_is_open_to_the_host_is_refused(
    docker: DockerOnRig, monkeypatch: pytest.MonkeyPatch, asked: bool
) -> None:
    if asked:
        without(monkeypatch, "agent_container", weaken("Privileged", True))
    else:
        slipped(monkeypatch, "agent", weaken("Privileged", True))
    found = try_launch(docker)
    assert (found.code, "Privileged" in found.message) == ("fence_failed", True)


@on(CURRENT)
def test_the_guard_is_loaded_again_where_it_was_flushed(docker: DockerOnRig) -> None:
    no_guard(docker)

    async def main() -> None:
        async with docker.launch(launch("true"), Recorder()) as sandbox:
            built(sandbox)

    anyio.run(main)
    assert "ringfence_guard" in docker.engine.tool("nft", "list", "tables")


@on(CURRENT)
def test_a_guard_that_cannot_be_loaded_refuses(docker: DockerOnRig, monkeypatch: pytest.MonkeyPatch) -> None:
    no_guard(docker)
    monkeypatch.setattr(guard, "load", guard.check)
    assert try_launch(docker).code == "no_guard"


@on(CURRENT)
def test_a_guard_that_is_flushed_during_a_run_is_drift(docker: DockerOnRig) -> None:
    async def main() -> tuple[str, ...]:
        async with docker.launch(launch("sleep", "30"), Recorder()) as sandbox:
            live = built(sandbox)
            await live.start()
            assert await live.drift() == ()
            no_guard(docker)
            return await live.drift()

    assert any(line.startswith("host guard") for line in anyio.run(main))


@on(CURRENT, DEBIAN)
@pytest.mark.parametrize(
    ("what", "named"),
    [
        (lambda engine, name: engine.docker("network", "connect", "bridge", name), "networks are"),
        (lambda engine, name: engine.docker("update", "--memory", "64m", "--memory-swap", "64m", name), "Memory is"),
        (lambda engine, name: engine.docker("exec", "--detach", name, "sleep", "20"), "executes something"),
        (lambda engine, name: engine.docker("pause", name.replace("-agent", "-proxy")), None),
    ],
    ids=["a second network", "another limit", "an exec", "a paused proxy is none"],
)
def test_what_is_changed_during_a_run_is_drift(
    docker: DockerOnRig, what: Callable[[Any, str], object], named: str | None
) -> None:
    async def main() -> tuple[str, ...]:
        job = launch("sleep", "30")
        async with docker.launch(job, Recorder()) as sandbox:
            live = built(sandbox)
            await live.start()
            await anyio.to_thread.run_sync(what, docker.engine, f"ringfence-{job.run}-agent")
            found = await live.drift()
            docker.engine.docker("unpause", f"ringfence-{job.run}-proxy")
            return found

    lines = anyio.run(main)
    assert named is None or any(named in line for line in lines), lines


@on(CURRENT, DEBIAN)
def test_an_address_that_the_bridge_gets_during_a_run_is_drift(docker: DockerOnRig) -> None:
    async def main() -> tuple[str, ...]:
        job = launch("sleep", "30")
        async with docker.launch(job, Recorder()) as sandbox:
            live = built(sandbox)
            await live.start()
            bridge = docker_place.link("rf*", OWNER, job.run)
            docker.engine.tool("ip", "address", "add", "10.202.0.1/29", "dev", bridge)
            return await live.drift()

    assert any("has the host's address 10.202.0.1" in line for line in anyio.run(main))


@on(CURRENT)
def test_the_capability_free_agent_is_what_the_kernel_shows(
    docker: DockerOnRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    without(monkeypatch, "proxy_container", weaken("CapDrop", []))
    found = try_launch(docker)
    assert "proxy: CapEff" in found.message or "CapPrm" in found.message or "CapBnd" in found.message


def test_links_are_read_where_the_thread_is(docker_engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    with beside(docker_engines.engine(CURRENT), monkeypatch):
        assert links.look("rf-none") is None
        assert links.look("docker0") is not None
    assert Path("/proc/sys/net/ipv4").is_dir()
    assert Role.AGENT in set(Role)
