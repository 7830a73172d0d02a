"""Control groups of both versions: the kernel's own where mounted, else a directory that looks like one."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import pytest

from reconciler.backends.cgroup import Cgroup, NoCgroup, Root, children, find
from reconciler.backends.leftovers import empty

if TYPE_CHECKING:
    from collections.abc import Iterator

V1 = """\
30 29 0:20 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct
31 29 0:21 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory
32 29 0:22 / /sys/fs/cgroup/pids rw - cgroup cgroup rw,pids
"""
V2 = "33 29 0:23 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw,nsdelegate\n"
UNIFIED = "33 29 0:23 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw,nsdelegate\n"


def test_version_1_is_found_controller_by_controller() -> None:
    assert find(V1, {}) == {
        "cpu": Root(Path("/sys/fs/cgroup/cpu,cpuacct"), 1),
        "memory": Root(Path("/sys/fs/cgroup/memory"), 1),
        "pids": Root(Path("/sys/fs/cgroup/pids"), 1),
    }


def test_version_2_is_found_by_its_list_of_controllers() -> None:
    found = find(V2, {Path("/sys/fs/cgroup"): "cpuset cpu io memory pids\n"})
    assert found == dict.fromkeys(("cpu", "memory", "pids"), Root(Path("/sys/fs/cgroup"), 2))


def test_on_a_hybrid_host_each_controller_is_where_it_is() -> None:
    v1 = "\n".join(line for line in V1.splitlines() if "pids" not in line)
    found = find(f"{v1}\n{UNIFIED}", {Path("/sys/fs/cgroup/unified"): "pids"})
    assert not isinstance(found, NoCgroup)
    assert {name: root.version for name, root in found.items()} == {"cpu": 1, "memory": 1, "pids": 2}


@pytest.mark.parametrize("text", ["", UNIFIED, V1.splitlines()[0]], ids=["none", "an empty unified one", "only cpu"])
def test_without_all_three_it_says_which_are_missing(text: str) -> None:
    found = find(text, {})
    assert isinstance(found, NoCgroup)
    assert "memory, pids" in found.message


@pytest.fixture
def v2(tmp_path: Path) -> Cgroup:
    """A group of version 2 in a directory that stands for the kernel's."""
    roots = dict.fromkeys(("cpu", "memory", "pids"), Root(tmp_path, 2))
    made = Cgroup(roots, "ringfence.x/run.sandbox")
    made.create()
    return made


def test_version_2_gets_its_controllers_from_above_and_its_limits(v2: Cgroup, tmp_path: Path) -> None:
    assert (tmp_path / "cgroup.subtree_control").read_text() == "+cpu +memory +pids"
    assert (tmp_path / "ringfence.x/cgroup.subtree_control").read_text() == "+cpu +memory +pids"
    folder = tmp_path / "ringfence.x/run.sandbox"
    (folder / "memory.swap.max").touch()
    v2.limit(memory=1000, pids=7, cpus=0.5)
    assert v2.limits() == ("memory.max=1000", "pids.max=7", "cpu.max=50000 100000")
    assert (folder / "memory.swap.max").read_text() == "0"
    (folder / "memory.events").write_text("low 0\nhigh 0\nmax 3\noom 2\noom_kill 1\noom_group_kill 0\n")
    assert v2.oom_kills() == 1


def test_version_1_counts_the_buffers_of_sockets_too(tmp_path: Path) -> None:
    made = Cgroup(dict.fromkeys(("cpu", "memory", "pids"), Root(tmp_path, 1)), "ringfence.x/run.sandbox")
    made.create()
    file = tmp_path / "ringfence.x/run.sandbox/memory.kmem.tcp.limit_in_bytes"
    file.touch()
    made.limit(memory=1000, pids=7, cpus=0.5)
    assert file.read_text() == "1000"


@pytest.mark.parametrize(
    ("text", "inside"),
    [
        pytest.param("0::/ringfence.x/run.sandbox\n", True, id="inside"),
        pytest.param("0::/system.slice/x/ringfence.x/run.sandbox\n", True, id="inside, seen from further up"),
        pytest.param("0::/\n", False, id="outside"),
        pytest.param("0::/ringfence.x/run.sandbox/deeper\n", False, id="elsewhere"),
        pytest.param("4:memory:/ringfence.x/run.sandbox\n0::/\n", False, id="inside by another hierarchy's word"),
    ],
)
def test_whether_a_process_is_inside(v2: Cgroup, text: str, inside: bool) -> None:
    assert v2.holds(text) is inside


@pytest.fixture
def real() -> Iterator[Cgroup]:
    """A group of the kernel's own."""
    if os.geteuid() != 0:
        pytest.skip("control groups need root")
    roots = find(Path("/proc/self/mountinfo").read_text())
    if isinstance(roots, NoCgroup):
        pytest.skip(roots.message)
    made = Cgroup(roots, f"ringfence.test-{secrets.token_hex(4)}/run.sandbox")
    made.create()
    yield made
    anyio.run(empty, made)


@pytest.mark.bubblewrap
def test_processes_are_held_signalled_and_the_parent_goes_with_the_last_group(real: Cgroup) -> None:
    real.limit(memory=64 << 20, pids=5, cpus=0.5)
    assert any(line.endswith(f"={64 << 20}") for line in real.limits())
    process = subprocess.Popen(["/usr/bin/sleep", "60"])
    try:
        real.add(process.pid)
        assert real.pids() == {process.pid}
        assert real.holds(Path(f"/proc/{process.pid}/cgroup").read_text())
        assert not real.remove()
        real.send(signal.SIGTERM, but=[process.pid])
        assert process.poll() is None
        real.send(signal.SIGTERM)
        assert process.wait(timeout=5) == -signal.SIGTERM
    finally:
        process.kill()
        process.wait()
    parent = real.name.partition("/")[0]
    assert children(real._roots, parent) == {real.name}
    assert real.remove()
    assert real.remove()
    assert not any(Path("/sys/fs/cgroup").glob(f"*/{parent}"))
    assert real.pids() == frozenset()
    assert real.oom_kills() == 0


@pytest.mark.bubblewrap
def test_the_members_are_listed_once_however_many_are_signalled(real: Cgroup, monkeypatch: pytest.MonkeyPatch) -> None:
    processes = [subprocess.Popen(["/usr/bin/sleep", "60"]) for _ in range(5)]
    listed: list[Cgroup] = []

    def listing(group: Cgroup) -> frozenset[int]:
        listed.append(group)
        return frozenset(one.pid for one in processes)

    monkeypatch.setattr(Cgroup, "pids", listing)
    try:
        for process in processes[1:]:
            real.add(process.pid)
        real.send(signal.SIGTERM)
        assert [one.wait(timeout=5) for one in processes[1:]] == [-signal.SIGTERM] * 4
        assert processes[0].poll() is None, "one that is no member any more is let be"
        assert len(listed) == 1
    finally:
        monkeypatch.undo()
        for process in processes:
            process.kill()
            process.wait()


@pytest.mark.bubblewrap
def test_a_group_is_made_once(real: Cgroup) -> None:
    with pytest.raises(FileExistsError):
        real.create()
