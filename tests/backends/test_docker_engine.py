"""What goes wrong with an engine and its containers though the fence holds: limits, ends, floods, hanging calls."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread
import pytest

from reconciler.backends import docker_objects, docker_surroundings, docker_versions, links
from reconciler.backends.base import Exit, ExitCode
from reconciler.backends.docker_engine import Engine
from reconciler.backends.docker_sandbox import GRACE_S
from reconciler.core.choose import Available, Missing
from reconciler.core.policy import Isolation
from tests.backends.docker_world import GVISOR, OWNER, DockerOnRig, Kind, beside
from tests.backends.mutations import CURRENT, DEBIAN, on, slipped, try_launch, weaken, without
from tests.backends.world import LIMITS, MIB, Recorder, built, launch, refused, run
from tests.rig.docker import Runtime
from tests.rig.docker.fixtures import Setup

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from reconciler.backends.base import LaunchRefused
    from reconciler.host import Host
    from tests.backends.docker_world import Engines
    from tests.rig.docker import Engine as RigEngine

pytestmark = [pytest.mark.docker, pytest.mark.rig]


def outcome(docker: DockerOnRig, *command: str, **given: Any) -> Exit:
    """Run one command to its end and check that its teardown undid everything."""
    recorder = Recorder()

    async def main() -> Exit:
        async with docker.launch(launch(*command, **given), recorder) as sandbox:
            return await run(sandbox)

    end = anyio.run(main)
    assert recorder.undone == []
    return end


# --- limits that an engine drops ------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", docker_surroundings._NEEDED)
@on(CURRENT)
def test_an_engine_that_cannot_bound_containers_is_missing(
    docker: DockerOnRig, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    real = Engine.info

    async def lacking(self: Engine) -> dict[str, Any]:
        return {**await real(self), limit: False}

    with monkeypatch.context() as patched:
        patched.setattr(Engine, "info", lacking)
        found = anyio.run(docker.probe)
    assert isinstance(found, Missing)
    assert (found.code, limit in found.message) == ("no_limits", True)
    assert outcome(docker, "true").code is ExitCode.EXITED, "what was missing for a while is there again"


@on(CURRENT)
@pytest.mark.parametrize("role", ["proxy", "gate", "agent"])
def test_a_warning_of_the_engine_refuses(docker: DockerOnRig, monkeypatch: pytest.MonkeyPatch, role: str) -> None:
    real = Engine.create_container

    async def warning(self: Engine, name: str, config: Mapping[str, Any]) -> tuple[str, ...]:
        made = await real(self, name, config)
        return (*made, "PidsLimit: Limitation discarded.") if name.endswith(f"-{role}") else made

    monkeypatch.setattr(Engine, "create_container", warning)
    found = try_launch(docker)
    assert (found.code, "Limitation discarded" in found.message) == ("engine_failed", True)


@on(CURRENT, DEBIAN)
@pytest.mark.parametrize("key", ["Memory", "PidsLimit", "NanoCpus"])
def test_a_limit_that_an_engine_dropped_without_a_word_is_seen(
    docker: DockerOnRig, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    def drop(spec: dict[str, Any]) -> None:
        spec["HostConfig"][key] = 0
        if key == "Memory":
            spec["HostConfig"]["MemorySwap"] = 0

    slipped(monkeypatch, "agent", drop)
    found = try_launch(docker)
    assert (found.code, f"agent: {key} is" in found.message) == ("fence_failed", True)


# --- the client library ---------------------------------------------------------------------------------------------


@on(CURRENT)
def test_the_users_own_settings_of_a_docker_client_change_nothing(
    docker: DockerOnRig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text('{"currentContext": "elsewhere", "proxies": {"default": {"httpProxy": "x"}}}')
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere.sock")
    monkeypatch.setenv("DOCKER_CONTEXT", "elsewhere")
    monkeypatch.setenv("DOCKER_API_VERSION", "1.12")

    async def main() -> None:
        engine = Engine(str(docker.engine.socket))
        assert engine.speak(await engine.versions())
        assert (await engine.info())["OSType"] == "linux"
        engine.close()

    anyio.run(main)
    recorder = Recorder()

    async def environment() -> None:
        async with docker.launch(launch("env"), recorder) as sandbox:
            await run(sandbox)

    anyio.run(environment)
    assert "HTTP_PROXY=http://10.202." in recorder.stdout


@on(CURRENT, DEBIAN)
def test_an_image_that_is_not_there_is_not_pulled(docker: DockerOnRig) -> None:
    docker.engine.rig.clear()

    async def main() -> LaunchRefused:
        absent = dataclasses.replace(launch("true"), image=f"registry.example.com/agent@sha256:{'0' * 64}")
        async with docker.launch(absent, Recorder()) as sandbox:
            return refused(sandbox)

    assert anyio.run(main).code == "no_image"
    assert docker.engine.rig.queries("registry.example.com") == []


# --- calls that hang ------------------------------------------------------------------------------------------------


@on(CURRENT, DEBIAN)
def test_a_wait_for_a_container_that_runs_ends_by_itself(docker: DockerOnRig) -> None:
    async def main() -> None:
        job = launch("sleep", "30")
        async with docker.launch(job, Recorder()) as sandbox:
            await built(sandbox).start()
            with anyio.fail_after(10):
                assert not await docker._engine.wait(f"ringfence-{job.run}-agent")

    anyio.run(main)


@on(CURRENT)
def test_an_engine_that_hangs_does_not_hang_the_end_of_a_run(
    docker: DockerOnRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine looks like one whose container runs on; the deadline is our own."""
    monkeypatch.setattr("reconciler.backends.docker_engine.CALL_S", 2)
    monkeypatch.setattr("reconciler.backends.docker_sandbox._KILL_S", 2.0)

    async def main() -> Exit:
        async with docker.launch(launch("sleep", "300"), Recorder()) as sandbox:
            live = built(sandbox)
            await live.start()
            docker._engine._client.timeout = 2  # type: ignore[union-attr]  # the probe made it
            dockerd = frozen(docker)
            try:
                with anyio.fail_after(30):
                    await live.stop(ExitCode.TIMEOUT)
                    return await live.wait()
            finally:
                os.kill(dockerd, signal.SIGCONT)

    assert anyio.run(main) == Exit(code=ExitCode.TIMEOUT, status=None)
    assert anyio.run(docker.reap, frozenset()) == ()


def frozen(docker: DockerOnRig) -> int:
    """Stop the engine's process for a while; its number."""
    listed = Path(f"/proc/{docker.engine.pid}/task/{docker.engine.pid}/children").read_text().split()
    (dockerd,) = [int(pid) for pid in listed if Path(f"/proc/{pid}/comm").read_text().strip() == "dockerd"]
    os.kill(dockerd, signal.SIGSTOP)
    return dockerd


# --- address ranges -------------------------------------------------------------------------------------------------


def pooled(docker: DockerOnRig, pool: str) -> DockerOnRig:
    """The same backend with another pool of addresses."""
    settings = docker._host
    made = type(docker)(
        dataclasses.replace(settings, docker=dataclasses.replace(settings.docker, pool=pool)),
        OWNER,
        docker.engine,
        docker.image,
    )
    made._engine, made._found = docker._engine, docker._found
    return made


@on(CURRENT)
def test_a_pool_that_is_used_up_refuses_and_says_what_to_do(docker: DockerOnRig) -> None:
    small = pooled(docker, "10.202.8.0/28")

    async def main() -> LaunchRefused:
        async with small.launch(launch("sleep", "30"), Recorder()) as first:
            built(first)
            async with small.launch(launch("true"), Recorder()) as second:
                return refused(second)

    found = anyio.run(main)
    assert (found.code, "host.yaml" in found.message) == ("no_range", True)


@on(CURRENT, DEBIAN)
def test_ranges_that_another_daemon_took_at_the_same_moment_are_left_to_it(
    docker: DockerOnRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the engine's list nor the routes show them yet; the engine refuses, and the next ranges are tried."""
    docker.engine.docker("network", "create", "--subnet", "10.202.16.8/29", "taken-by-another", check=True)

    async def unseen(_self: Engine) -> list[Any]:
        return []

    monkeypatch.setattr(Engine, "networks", unseen)
    monkeypatch.setattr(links, "routed", lambda: ())
    narrow = pooled(docker, "10.202.16.0/27")
    try:
        assert outcome(narrow, "true") == Exit(code=ExitCode.EXITED, status=0)
    finally:
        docker.engine.docker("network", "rm", "taken-by-another", check=True)


@on(CURRENT)
def test_more_sandboxes_than_an_engine_has_networks_by_itself(docker: DockerOnRig) -> None:
    """Thirty-one, with the default pools; ranges of our own do not run out."""

    async def main() -> None:
        engine, where = docker._engine, docker_objects.Reserved()
        async with contextlib.AsyncExitStack() as stack:
            given = [
                await stack.enter_async_context(docker_objects.ranges(engine, "10.202.0.0/16", where, frozenset()))
                for _ in range(64)
            ]
        every = [network for each in given if each is not None for network in (each.fence, each.egress)]
        assert len(every) == 128
        assert not [pair for pair in itertools.combinations(every, 2) if pair[0].overlaps(pair[1])]

    anyio.run(main)


# --- ends -----------------------------------------------------------------------------------------------------------


@on(CURRENT, DEBIAN)
@pytest.mark.parametrize("init", [True, False], ids=["with an init", "with the remedy taken out"])
def test_a_first_process_that_ignores_sigterm(docker: DockerOnRig, monkeypatch: pytest.MonkeyPatch, init: bool) -> None:
    if not init:
        without(monkeypatch, "agent_container", weaken("Init", False))

    recorder = Recorder()

    async def main() -> float:
        async with docker.launch(launch("sh", "-c", "echo it runs; exec sleep 300"), recorder) as sandbox:
            live = built(sandbox)
            await live.start()
            # An engine says that it started before runc has become the command, and runc does not ignore it.
            await recorder.wrote.wait()
            began = anyio.current_time()
            await live.stop(ExitCode.TIMEOUT)
            return anyio.current_time() - began

    assert (anyio.run(main) < GRACE_S) is init


def ends(*words: str) -> Callable[[dict[str, Any]], None]:
    """Have a container of our image say something on stderr and end with 3, without having read its input."""

    def change(spec: dict[str, Any]) -> None:
        code = f"import os; os.write(2, {' '.join(words)!r}.encode()); os._exit(3)"
        spec |= {"Entrypoint": ["/usr/bin/python3", "-I", "-c", code], "Cmd": []}

    return change


@on(CURRENT, DEBIAN, runtimes=tuple(Runtime))
@pytest.mark.parametrize(
    ("made", "code"), [("proxy_container", "proxy_failed"), ("gate_container", "gate_failed")], ids=["proxy", "gate"]
)
def test_whoever_of_ours_ends_at_once_is_told_with_how(
    docker: DockerOnRig, monkeypatch: pytest.MonkeyPatch, made: str, code: str
) -> None:
    without(monkeypatch, made, ends("nothing", "works"))
    found = try_launch(docker)
    assert (found.code, "exit status 3" in found.message, "nothing works" in found.message) == (code, True, True), found


@on(CURRENT, DEBIAN)
def test_a_proxy_without_memory_to_start_is_told_as_that(docker: DockerOnRig, monkeypatch: pytest.MonkeyPatch) -> None:
    def starve(spec: dict[str, Any]) -> None:
        spec["HostConfig"] |= {"Memory": 6 * MIB, "MemorySwap": 6 * MIB}

    without(monkeypatch, "proxy_container", starve)
    found = try_launch(docker)
    assert (found.code, "exit status 137; out of memory" in found.message) == ("proxy_failed", True), found


BOMB = """
import os, time
for _ in range(2000):
    if os.fork() == 0:
        time.sleep(60)
        os._exit(0)
"""


@on(CURRENT, DEBIAN, runtimes=(Runtime.RUNSC,))
def test_a_crash_of_the_sandbox_is_not_taken_for_a_status_of_the_command(docker: DockerOnRig) -> None:
    """Of processes there are fewer than memory would hold: the first that is refused ends gVisor itself, with 2."""
    limits = dataclasses.replace(LIMITS, memory=1024 * MIB, pids=16)
    end = outcome(docker, "python3", "-c", BOMB, limits=limits)
    assert end == Exit(code=ExitCode.SANDBOX_CRASHED, status=None)


@on(CURRENT, runtimes=(Runtime.RUNSC,))
def test_without_the_kernels_log_such_a_crash_looks_like_a_status(
    docker: DockerOnRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("reconciler.backends.kernel_log.fork_was_refused", lambda _name: False)
    limits = dataclasses.replace(LIMITS, memory=1024 * MIB, pids=16)
    assert outcome(docker, "python3", "-c", BOMB, limits=limits) == Exit(code=ExitCode.EXITED, status=2)


@on(CURRENT, runtimes=(Runtime.RUNSC,))
def test_below_the_floor_gvisor_does_not_even_start(docker: DockerOnRig, monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, "gate_container", weaken("PidsLimit", 16))
    assert try_launch(docker).code in ("gate_failed", "engine_failed")


@on(CURRENT, DEBIAN, runtimes=tuple(Runtime))
def test_a_command_that_is_killed_is_not_out_of_memory(docker: DockerOnRig) -> None:
    end = outcome(docker, "sh", "-c", "sh -c 'kill -KILL $$'; exit $?")
    assert end == Exit(code=ExitCode.EXITED, status=128 + signal.SIGKILL)


def silent_on_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have an engine that does not hear of a container's memory."""
    real = Engine.container

    async def silent(self: Engine, name: str) -> dict[str, Any] | None:
        found = await real(self, name)
        return None if found is None else {**found, "State": {**found["State"], "OOMKilled": False}}

    monkeypatch.setattr(Engine, "container", silent)


@on(CURRENT, runtimes=tuple(Runtime))
def test_out_of_memory_is_known_by_two_words_alone(docker: DockerOnRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's and the kernel's: the status is the same as of any kill."""
    silent_on_memory(monkeypatch)
    monkeypatch.setattr("reconciler.backends.kernel_log.memory_ran_out", lambda _name: False)
    end = outcome(docker, "python3", "-c", "b = bytearray(400 << 20)")
    assert end == Exit(code=ExitCode.EXITED, status=128 + signal.SIGKILL)


@on(CURRENT, DEBIAN, runtimes=tuple(Runtime))
def test_out_of_memory_is_known_where_the_engine_does_not_hear_of_it(
    docker: DockerOnRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    silent_on_memory(monkeypatch)
    end = outcome(docker, "python3", "-c", "b = bytearray(400 << 20)")
    assert end == Exit(code=ExitCode.OOM, status=None, oom_killed=True)


@on(CURRENT)
def test_out_of_memory_is_known_where_the_engine_hears_of_it_late(
    docker: DockerOnRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("reconciler.backends.kernel_log.memory_ran_out", lambda _name: False)
    real, asked = Engine.container, itertools.count()

    async def late(self: Engine, name: str) -> dict[str, Any] | None:
        found = await real(self, name)
        ended = name.endswith("-agent") and found is not None and found["State"]["Status"] == "exited"
        if found is None or not ended or next(asked) > 1:
            return found
        return {**found, "State": {**found["State"], "OOMKilled": False}}

    monkeypatch.setattr(Engine, "container", late)
    end = outcome(docker, "python3", "-c", "b = bytearray(400 << 20)")
    assert end == Exit(code=ExitCode.OOM, status=None, oom_killed=True)


@on(CURRENT, DEBIAN)
@pytest.mark.parametrize("bounded", [True, False], ids=["bounded", "with the remedy taken out"])
def test_a_flood_of_output_does_not_fill_the_disk(
    docker: DockerOnRig, monkeypatch: pytest.MonkeyPatch, bounded: bool
) -> None:
    if not bounded:
        without(monkeypatch, "agent_container", weaken("LogConfig", {"Type": "json-file", "Config": {}}))

    recorder = Recorder()
    job = launch("sh", "-c", "head -c 20000000 /dev/zero | tr '\\0' x | fold -w 1000; sleep 30")

    async def main() -> int:
        async with docker.launch(job, recorder) as sandbox:
            await built(sandbox).start()
            with anyio.fail_after(60):
                # It grows until the command sleeps.
                while recorder.sizes.total() < 20_000_000:  # noqa: ASYNC110 - as above
                    await anyio.sleep(0.05)
            return await anyio.to_thread.run_sync(kept, docker, job.run)

    assert (anyio.run(main) < 4 * MIB) is bounded


def kept(docker: DockerOnRig, run_id: str) -> int:
    """Bytes that the engine keeps of an agent's output."""
    log = Path(docker.engine.get(f"/containers/ringfence-{run_id}-agent/json")["LogPath"])
    return sum(file.stat().st_size for file in Path(f"/proc/{docker.engine.pid}/root{log.parent}").glob(f"{log.name}*"))


# --- gVisor's own settings ------------------------------------------------------------------------------------------


def test_a_gvisor_that_is_configured_to_open_the_host_is_not_used(
    docker_engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = Kind(setup=Setup(), runtime=Runtime.RUNSC)
    engine = docker_engines.engine(kind.setup)
    file = engine.directory / "daemon.json"
    before = file.read_text()
    settings = json.loads(before)
    settings["runtimes"]["open"] = {"path": settings["runtimes"][GVISOR]["path"], "runtimeArgs": ["--network=host"]}
    with beside(engine, monkeypatch):
        restarted(docker_engines, kind, json.dumps(settings))
        try:
            made = docker_engines.backend(kind, OWNER)
            host = dataclasses.replace(made._host, docker=dataclasses.replace(made._host.docker, gvisor_runtime="open"))
            found = anyio.run(probed, host, engine, made.image)
            assert isinstance(found, Available)
            assert found.isolation is Isolation.CONTAINER
            assert any("--network=host" in line for line in found.evidence)
            monkeypatch.setattr(docker_versions, "unsafe_runtime", lambda _arguments: None)
            believed = anyio.run(probed, host, engine, made.image)
            assert isinstance(believed, Available)
            assert believed.isolation is Isolation.GVISOR
        finally:
            restarted(docker_engines, kind, before)


async def probed(host: Host, engine: RigEngine, image: str) -> object:
    """Probe once."""
    backend = DockerOnRig(host, OWNER, engine, image)
    with contextlib.closing(backend._engine):
        return await backend.probe()


def restarted(docker_engines: Engines, kind: Kind, config: str) -> None:
    """Start the engine anew with another configuration."""
    engine = docker_engines.engine(kind.setup)
    engine.stop_daemon("dockerd")
    (engine.directory / "daemon.json").write_text(config)
    engine.start_daemon("dockerd")
