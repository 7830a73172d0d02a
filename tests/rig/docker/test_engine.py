"""The engines themselves: what is later said about a fence on them is worth as much as they are like real ones."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.rig import network
from tests.rig.docker import Engine, Firewall, Runtime, Store, Which
from tests.rig.docker.fixtures import Images, Setup
from tests.rig.keeper import cgroups
from tests.rig.rig import ROOT

if TYPE_CHECKING:
    from tests.rig import Rig

pytestmark = [pytest.mark.docker, pytest.mark.rig]

runtimes = pytest.mark.parametrize("runtime", Runtime, ids=str)


def test_the_engine_is_the_one_asked_for(docker_engine: Engine) -> None:
    version = docker_engine.get("/version")
    info = docker_engine.get("/info")
    assert version["Version"].split(".")[0] == {Which.CURRENT: "29", Which.DEBIAN: "20"}[docker_engine.which]
    assert set(Runtime) <= set(info["Runtimes"])
    driver = {Store.CONTAINERD: "overlayfs", Store.CLASSIC: "overlay2"}[docker_engine.store]
    assert (info["Driver"], info["CgroupDriver"]) == (driver, "cgroupfs")
    rules = docker_engine.tool("nft", "list", "ruleset")
    assert ("docker-bridges" in rules) == (docker_engine.firewall is Firewall.NFTABLES)
    assert ("chain DOCKER " in rules) == (docker_engine.firewall is Firewall.IPTABLES)


@runtimes
def test_a_container_runs_its_command_and_its_status_is_told(docker_engine: Engine, runtime: Runtime) -> None:
    run = ("run", "--rm", "--runtime", runtime, "agents.invalid/python:test")
    done = docker_engine.docker(*run, "python3", "-c", "import sys; print(open('/proc/version').read()); sys.exit(7)")
    assert done.returncode == 7, done.stderr
    assert ("gvisor" in done.stdout) == (runtime is Runtime.RUNSC)


@runtimes
def test_a_container_on_the_ordinary_bridge_reaches_the_rigs_internet(docker_engine: Engine, runtime: Runtime) -> None:
    docker_engine.rig.reset()
    job = {"attempts": [{"attempt": "get", "do": "tcp", "address": "93.184.216.34", "port": 8080, "send": "hello"}]}
    run = ("run", "--rm", "--runtime", runtime, "agents.invalid/python:test", "python3", "/workload.py")
    (line,) = docker_engine.docker(*run, json.dumps(job), check=True).stdout.splitlines()
    assert json.loads(line)["outcome"] == "reached"
    (arrival,) = docker_engine.rig.arrivals(port=8080)
    assert arrival.first == b"hello"


def test_the_host_is_set_up_as_a_docker_host_is(docker_engine: Engine) -> None:
    names = ("net.ipv4.ip_forward", "net.ipv4.conf.all.rp_filter", "net.ipv4.conf.docker0.rp_filter")
    rp_filter = docker_engine.rp_filter
    values = docker_engine.rig.run(["/usr/sbin/sysctl", "-n", *names]).stdout.split()
    assert [int(value) for value in values] == [1, rp_filter, rp_filter]


def test_a_program_beside_dockerd_sees_a_container_by_the_pid_that_inspect_tells(docker_engine: Engine) -> None:
    run = ("run", "--detach", "--init", "agents.invalid/python:test", "sleep", "600")
    container = docker_engine.docker(*run, check=True).stdout.strip()
    try:
        pid = docker_engine.get(f"/containers/{container}/json")["State"]["Pid"]
        beside = subprocess.run(
            [*docker_engine.enter, "cat", f"/proc/{pid}/cgroup"], capture_output=True, text=True, check=True, timeout=20
        )
        assert f"/{docker_engine.cgroup}/{container}" in beside.stdout
    finally:
        docker_engine.docker("rm", "--force", container, check=True)


def test_an_image_is_found_by_digest_without_a_pull(docker_engine: Engine, docker_images: Images) -> None:
    """The table in README.md, and what the reference by digest of a loaded image is on each store."""
    agent, store = docker_images.agent, docker_engine.store
    repository, tag = agent.name.rsplit(":", 1)
    known = {
        agent.name: True,
        f"{repository}@{agent.manifest}": store is Store.CONTAINERD,
        f"{repository}:{tag}@{agent.manifest}": store is Store.CONTAINERD,
        agent.manifest: store is Store.CONTAINERD,
        agent.configuration: store is Store.CLASSIC,
        f"{repository}@{agent.configuration}": False,
    }
    run = ("run", "--rm", "--pull", "never", "--network", "none")
    seen = {name: docker_engine.docker(*run, name, "true").returncode == 0 for name in known}
    assert seen == known
    image = docker_engine.get(f"/images/{agent.name}/json")
    digest = agent.pinned(store).rpartition("@")[2]
    assert (image["Id"], image["RepoTags"]) == (digest, [agent.name])
    assert image["RepoDigests"] == ([agent.pinned(store)] if store is Store.CONTAINERD else [])


@runtimes
@pytest.mark.parametrize(
    "docker_engine", [Setup(), Setup(which=Which.DEBIAN)], indirect=True, ids=["current engine", "debian engine"]
)
def test_a_dockerd_that_was_killed_starts_again_and_knows_its_containers(
    docker_engine: Engine, runtime: Runtime
) -> None:
    run = ("run", "--detach", "--init", "--runtime", runtime, "agents.invalid/python:test", "sleep", "600")
    container = docker_engine.docker(*run, check=True).stdout.strip()
    before = docker_engine.get(f"/containers/{container}/json")["State"]["Pid"]
    docker_engine.kill_daemon("dockerd")
    alive = subprocess.run([*docker_engine.enter, "kill", "-0", str(before)], check=False, timeout=20)
    assert alive.returncode == 0, "a container outlives dockerd"
    docker_engine.start_daemon("dockerd")
    assert docker_engine.get(f"/containers/{container}/json")["State"]["Running"] is False
    docker_engine.docker("rm", container, check=True)


_OWNER = """
import signal, sys
# As at a terminal: what a shell starts in the background is born deaf to Ctrl-C, and so is all that it starts.
signal.signal(signal.SIGINT, signal.default_int_handler)
from tests.rig import Rig
from tests.rig.docker import Engine
with Rig() as rig, Engine(rig) as engine:
    engine.load(sys.argv[1])
    engine.docker("run", "--detach", "--runtime", "runsc", "agents.invalid/python:test", "sleep", "600", check=True)
    print(rig.instance.name, engine.cgroup, engine.pid, flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT], ids=["kill -9", "Ctrl-C"])
def test_nothing_is_left_when_the_owner_dies(docker_images: Images, number: signal.Signals) -> None:
    argv = [sys.executable, "-c", _OWNER, str(docker_images.agent.archive)]
    with subprocess.Popen(
        argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=ROOT
    ) as owner:
        assert owner.stdout is not None
        name, cgroup, pid = owner.stdout.readline().split()
        assert cgroups(cgroup)
        owner.send_signal(number)
        owner.wait(timeout=60)
    places = [Path("/proc", pid), network.NETNS / f"{name}-host", network.Instance(name).directory]
    deadline = time.monotonic() + 20
    while left := [*(path for path in places if path.exists()), *cgroups(cgroup)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


def test_an_engine_that_is_stopped_leaves_the_host_namespace_as_it_was(docker_images: Images, rig: Rig) -> None:
    del docker_images
    links = ["ip", "-brief", "link"]
    before = rig.run(links).stdout
    with Engine(rig) as engine:
        assert rig.run(links).stdout != before
        rules = engine.tool("nft", "list", "ruleset")
        assert "DOCKER" in rules
    assert rig.run(links).stdout == before
    with Engine(rig) as engine:
        engine.kill_daemon("dockerd")
        engine.kill_daemon("containerd")
    assert not cgroups(engine.cgroup)
    assert rig.run(links).stdout == before


def test_debians_engine_is_not_asked_for_what_it_lacks(rig: Rig) -> None:
    with pytest.raises(ValueError, match="iptables firewall and the classic store"):
        Engine(rig, which=Which.DEBIAN, firewall=Firewall.NFTABLES)
    with pytest.raises(ValueError, match="iptables firewall and the classic store"):
        Engine(rig, which=Which.DEBIAN, store=Store.CONTAINERD)
