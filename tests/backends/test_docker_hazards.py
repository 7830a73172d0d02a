"""Each hazard of a Docker host, with its remedy taken out: the launch is refused, and says what is open.

A remedy whose absence nobody notices is no remedy. What the gate can see, the gate must name.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from reconciler.backends import docker_launch, docker_look, docker_place, docker_spec, guard, links
from reconciler.backends.docker_place import Role
from tests.backends.docker_world import OWNER, Kind, beside
from tests.backends.world import Recorder, built, launch, refused
from tests.rig.docker import Runtime, Which
from tests.rig.docker.fixtures import Setup

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from reconciler.backends.base import LaunchRefused
    from tests.backends.docker_world import DockerOnRig, Engines

pytestmark = [pytest.mark.docker, pytest.mark.rig]
CURRENT, DEBIAN = Setup(), Setup(which=Which.DEBIAN)
FORWARDING = Setup(which=Which.DEBIAN, local_resolver=True)


@pytest.fixture
def docker(
    request: pytest.FixtureRequest, docker_engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> Iterator[DockerOnRig]:
    """A probed backend of the kind that the test names."""
    kind: Kind = request.param
    with beside(docker_engines.engine(kind.setup), monkeypatch):
        yield docker_engines.backend(kind, OWNER)


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


def without(monkeypatch: pytest.MonkeyPatch, made: str, change: Callable[[Any], None]) -> None:
    """Change what one function of the specification makes."""
    real = getattr(docker_spec, made)

    def changed(*given: object) -> Any:
        spec = real(*given)
        change(spec)
        return spec

    monkeypatch.setattr(docker_spec, made, changed)


def blind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take out every look from outside and the host guard: the gate alone is left."""

    async def nothing(_standing: object) -> tuple[str, ...]:
        return ()

    monkeypatch.setattr(docker_look, "host", lambda _where: ())
    monkeypatch.setattr(docker_look, "differences", nothing)
    monkeypatch.setattr(links, "harden", lambda _name: None)
    monkeypatch.setattr(docker_launch, "_ensure_guard", lambda: None)


def plain_internal(spec: dict[str, Any]) -> None:
    """Make the fence what `docker network create --internal` makes."""
    spec["options"] = {key: value for key, value in spec["options"].items() if key.endswith("bridge.name")}
    spec["enable_ipv6"] = False
    spec["ipam"]["Config"] = spec["ipam"]["Config"][:1]


def no_guard(docker: DockerOnRig) -> None:
    docker.engine.tool("nft", "add", "table", "inet", "ringfence_guard")
    docker.engine.tool("nft", "delete", "table", "inet", "ringfence_guard")


@on(CURRENT, DEBIAN, runtimes=tuple(Runtime))
def test_a_plain_internal_network_is_seen_by_the_gate_alone(
    docker: DockerOnRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_guard(docker)
    blind(monkeypatch)
    without(monkeypatch, "fence_network", plain_internal)
    found = try_launch(docker)
    assert found.code == "gate_failed"
    assert found.report is not None
    reached = {target.name for target in found.report.targets if target.verdict == "reached"}
    assert any(name.startswith(("canary tcp:", "gateway tcp:")) for name in reached), reached
    assert found.report.arrivals


@on(CURRENT, DEBIAN)
def test_a_plain_internal_network_is_seen_on_the_bridge(docker: DockerOnRig, monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, "fence_network", plain_internal)
    found = try_launch(docker)
    assert found.code == "fence_failed"
    assert "has the host's address 10.202." in found.message


@on(CURRENT)
def test_an_option_that_an_engine_ignores_is_seen_on_the_bridge(
    docker: DockerOnRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def misspell(spec: dict[str, Any]) -> None:
        spec["options"]["com.docker.network.bridge.gateway_mode_ipv5"] = spec["options"].pop(
            "com.docker.network.bridge.gateway_mode_ipv4"
        )

    without(monkeypatch, "fence_network", misspell)
    assert "has the host's address" in try_launch(docker).message


@pytest.fixture
def forwarding(docker_engines: Engines, monkeypatch: pytest.MonkeyPatch) -> Iterator[DockerOnRig]:
    """A backend on an old engine whose host names a resolver on its own loopback."""
    with beside(docker_engines.engine(FORWARDING), monkeypatch):
        yield docker_engines.backend(Kind(setup=FORWARDING, runtime=Runtime.RUNC), OWNER)


def test_a_resolver_that_forwards_is_named_by_the_gate(
    forwarding: DockerOnRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def as_the_host_has_it(spec: dict[str, Any]) -> None:
        # A search list of our own has the engine forget where the host's servers are, which closes it as well.
        spec["HostConfig"] |= {"Dns": [], "DnsSearch": []}

    without(monkeypatch, "gate_container", as_the_host_has_it)
    found = try_launch(forwarding)
    assert found.code == "gate_failed"
    assert "dns dns-relay:127.0.0.11:53" in found.message


def test_a_resolver_that_would_forward_has_nobody_to_ask(forwarding: DockerOnRig) -> None:
    forwarding.engine.rig.clear()

    async def main() -> None:
        async with forwarding.launch(launch("true"), Recorder()) as sandbox:
            built(sandbox)

    anyio.run(main)
    assert forwarding.engine.rig.queries("gate.ringfence.invalid") == []


@on(CURRENT, DEBIAN)
def test_soft_settings_of_the_bridge_are_seen(docker: DockerOnRig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "harden", lambda _name: None)
    assert "arp_ignore is 0" in try_launch(docker).message


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


def weaken(key: str, value: object) -> Callable[[dict[str, Any]], None]:
    def change(spec: dict[str, Any]) -> None:
        spec["HostConfig"][key] = value

    return change


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


@on(CURRENT, DEBIAN, runtimes=tuple(Runtime))
def test_two_sandboxes_do_not_reach_each_others_proxy(docker: DockerOnRig) -> None:
    async def main() -> None:
        one, other = launch("sleep", "30"), launch("sleep", "30")
        async with docker.launch(one, Recorder()) as first:
            await built(first).start()
            proxy = built(first).report.anchor["address"]
            assert isinstance(proxy, str)
            neighbour = (proxy.rpartition(":")[0], 3128)
            async with docker.launch(dataclasses.replace(other, neighbours=(neighbour,)), Recorder()) as second:
                report = built(second).report
                (seen,) = [each for each in report.targets if each.name == f"neighbour tcp:{neighbour[0]}:3128"]
                assert seen.verdict != "reached"
                assert report.anchor["address"] != proxy

    anyio.run(main)


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
