"""What only bubblewrap promises, and that a daemon killed at any step leaves nothing that its successor must keep."""

from __future__ import annotations

import dataclasses
import os
import secrets
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import pytest

from reconciler.backends import uids
from reconciler.backends.base import Exit, ExitCode, LaunchRefused
from reconciler.backends.bubblewrap import Bubblewrap
from reconciler.backends.bwrap_sandbox import BwrapSandbox
from reconciler.backends.cgroup import NoCgroup
from reconciler.backends.seccomp import NoSeccomp
from reconciler.backends.uids import ending
from reconciler.core.choose import Missing
from tests.backends.world import Recorder, built, host, launch, refused, run, running_with

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.rig import Rig

pytestmark = [pytest.mark.bubblewrap, pytest.mark.rig]
ROOT = Path(__file__).parents[2]

STEPS = [
    "uid",
    "run directory",
    "sandbox cgroup",
    "proxy cgroup",
    "canaries",
    "proxy",
    "sandbox",
    "listener handed out",
    "gate",
    "started",
]


@pytest.mark.parametrize("step", STEPS)
def test_a_daemon_killed_at_any_step_leaves_nothing_after_the_reaper(in_rig: Rig, rig_runtime: Path, step: str) -> None:
    del in_rig
    owner, name = f"killed-{os.getpid()}", f"test-{secrets.token_hex(4)}"
    first = 330_000
    killed = subprocess.run(
        [sys.executable, "-m", "tests.backends.killed", step, name, owner, str(rig_runtime), "bubblewrap", str(first)],
        cwd=ROOT,
        check=False,
        timeout=60,
        capture_output=True,
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    after = Bubblewrap(host(rig_runtime, uid_first=first), owner)
    reaped = anyio.run(after.reap, frozenset())
    assert {thing.run for thing in reaped} <= {name}
    with_timeout = anyio.run(gone, first)
    assert with_timeout == ()
    assert running_with(name, "cmdline") == []
    assert not (rig_runtime / "bubblewrap" / owner / name).exists()
    assert not any(Path("/sys/fs/cgroup").glob(f"*/ringfence.{owner}*"))
    assert anyio.run(after.reap, frozenset()) == ()


async def gone(uid: int) -> tuple[int, ...]:
    """Processes of a sandbox's uid, once those that are ending have ended."""
    left: tuple[int, ...] = ()
    for _ in range(100):
        left = uids.processes(uid)
        if not left:
            break
        await anyio.sleep(0.05)
    return left


def test_what_is_past_its_expiry_is_reaped_though_it_is_called_live(in_rig: Rig, rig_runtime: Path) -> None:
    del in_rig
    backend = Bubblewrap(host(rig_runtime), "expiry")
    kept, past = rig_runtime / "bubblewrap/expiry/kept", rig_runtime / "bubblewrap/expiry/past"
    for folder, expires in ((kept, 9e9), (past, 1.0)):
        folder.mkdir(parents=True)
        (folder / "label.json").write_text(f'{{"expires_at": {expires}}}')
    reaped = anyio.run(backend.reap, frozenset({"kept", "past"}))
    assert [(thing.kind, thing.run) for thing in reaped] == [("directory", "past")]
    assert kept.exists()
    anyio.run(backend.reap, frozenset())
    assert not kept.exists()


def test_a_dead_proxy_stops_the_command(bubblewrap: Bubblewrap) -> None:
    recorder = Recorder()

    async def main() -> Exit:
        async with bubblewrap.launch(launch("sleep", "60"), recorder) as sandbox:
            live = built(sandbox)
            await live.start()
            assert isinstance(live, BwrapSandbox)
            live._proxy.kill()
            with anyio.fail_after(10):
                return await live.wait()

    assert anyio.run(main) == Exit(code=ExitCode.PROXY_DIED, status=None)
    assert recorder.ends == [None]


def test_a_proxy_that_says_nonsense_loses_the_sandbox_its_door(
    bubblewrap: Bubblewrap, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = tmp_path / "proxy"
    program.write_text("#!/bin/sh\necho nonsense\nexec sleep 60\n")
    program.chmod(0o755)
    monkeypatch.setattr("reconciler.backends.proxy_process.program", lambda: str(program))

    async def main() -> LaunchRefused:
        async with bubblewrap.launch(launch("true"), Recorder()) as sandbox:
            return refused(sandbox)

    found = anyio.run(main)
    assert found.code == "proxy_failed"
    assert "unusable line" in found.message


def widen(sandbox: BwrapSandbox) -> None:
    """Let the sandbox have more processes."""
    sandbox._cgroup._write("pids", "pids.max", "4000")


def run_outside(sandbox: BwrapSandbox) -> None:
    """Start a process of the sandbox's uid beside the sandbox."""
    uid = sandbox._proven.expected.uid
    strays.append(subprocess.Popen(["/usr/bin/sleep", "60"], user=uid, group=uid, extra_groups=[]))


def move_in(sandbox: BwrapSandbox) -> None:
    """Put a process of the host's into the sandbox's control group."""
    stray = subprocess.Popen(["/usr/bin/sleep", "60"])
    strays.append(stray)
    sandbox._cgroup.add(stray.pid)


strays: list[subprocess.Popen[bytes]] = []


@pytest.mark.parametrize(
    ("change", "named"),
    [
        pytest.param(widen, "limits are ", id="a wider limit"),
        pytest.param(run_outside, "outside its limits", id="a process of its uid outside"),
        pytest.param(move_in, "namespace", id="a process of the host's inside"),
    ],
)
def test_drift_is_named(bubblewrap: Bubblewrap, change: Callable[[BwrapSandbox], None], named: str) -> None:
    async def main() -> tuple[str, ...]:
        async with bubblewrap.launch(launch("sleep", "60"), Recorder()) as sandbox:
            live = built(sandbox)
            assert isinstance(live, BwrapSandbox)
            await live.start()
            change(live)
            return await live.drift()

    try:
        assert any(named in line for line in anyio.run(main))
    finally:
        while strays:
            stray = strays.pop()
            stray.kill()
            stray.wait()


BUSY = """
import os, socket, time
listener = socket.create_server(("127.0.0.1", 0))
kept = []
for _ in range(50):
    kept += [socket.create_connection(listener.getsockname()), listener.accept()]
print("ready", flush=True)
while True:
    if os.fork() == 0:
        os._exit(0)
    os.wait()
"""


def test_what_a_command_has_open_is_not_read_by_a_look_for_drift(
    bubblewrap: Bubblewrap, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tables(_: str) -> tuple[str, ...]:
        raise AssertionError("the command decides how long this is")

    async def main() -> list[tuple[str, ...]]:
        recorder = Recorder()
        async with bubblewrap.launch(launch("python3", "-c", BUSY), recorder) as sandbox:
            live = built(sandbox)
            await live.start()
            await anyio.sleep(1)
            assert "ready" in recorder.stdout
            monkeypatch.setattr("reconciler.backends.bwrap_proof.parse_listeners", tables)
            return [await live.drift() for _ in range(20)]

    assert anyio.run(main) == [()] * 20


def test_one_that_ends_has_left_its_groups() -> None:
    process = subprocess.Popen(["/usr/bin/sleep", "60"])
    assert not ending(process.pid)
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert ending(process.pid)
    process.wait()
    assert ending(process.pid)


def test_each_sandbox_has_a_uid_of_its_own_and_gives_it_back(in_rig: Rig, rig_runtime: Path) -> None:
    del in_rig
    backend = Bubblewrap(host(rig_runtime, uid_first=340_000, uid_count=2), f"uids-{os.getpid()}")

    async def main() -> None:
        async with (
            backend.launch(launch("true"), Recorder()) as one,
            backend.launch(launch("true"), Recorder()) as two,
        ):
            uid = [live._proven.expected.uid for live in (one, two) if isinstance(live, BwrapSandbox)]
            assert uid == [340_000, 340_001]
            async with backend.launch(launch("true"), Recorder()) as three:
                assert refused(three).code == "no_uid"
        async with backend.launch(launch("true"), Recorder()) as again:
            assert (await run(again)).status == 0

    anyio.run(main)


def test_inside_nothing_is_writable_but_memory_and_nothing_of_the_host_is_there(bubblewrap: Bubblewrap) -> None:
    code = """
import os
found = []
for folder, folders, files in os.walk("/"):
    if folder in ("/proc", "/usr"):
        folders.clear()
        continue
    if os.access(folder, os.W_OK):
        found.append(folder)
print(sorted(found))
print(sorted(os.listdir("/")), os.listdir("/run"), sorted(os.listdir("/etc")))
"""
    recorder = Recorder()

    async def main() -> None:
        async with bubblewrap.launch(launch("python3", "-c", code), recorder) as sandbox:
            await run(sandbox)

    anyio.run(main)
    writable, seen = recorder.stdout.splitlines()
    # What is in /dev/pts the kernel makes; nothing else can be made there.
    assert writable == "['/dev/pts', '/dev/shm', '/tmp']"
    for name in ("home", "var", "root", "opt", "srv", "mnt", "sys"):
        assert f"'{name}'" not in seen
    assert "'shadow'" not in seen


def test_another_image_is_refused(bubblewrap: Bubblewrap) -> None:
    async def main() -> str:
        job = dataclasses.replace(launch("true"), image="registry.example.com/a@sha256:00")
        async with bubblewrap.launch(job, Recorder()) as sandbox:
            return refused(sandbox).code

    assert anyio.run(main) == "image_needs_backend"


@pytest.mark.parametrize(
    ("broken", "code"),
    [
        pytest.param({"os.geteuid": lambda: 1000}, "not_root", id="not root"),
        pytest.param({"shutil.which": lambda *_, **__: None}, "no_bwrap", id="no bwrap"),
        pytest.param({"compile_filter": lambda: NoSeccomp("none")}, "no_seccomp", id="no libseccomp"),
        pytest.param({"find": lambda *_: NoCgroup("none")}, "no_cgroup", id="no control groups"),
    ],
)
def test_a_host_that_lacks_something_says_what(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, broken: dict[str, Callable[..., object]], code: str
) -> None:
    for name, value in broken.items():
        monkeypatch.setattr(f"reconciler.backends.bwrap_surroundings.{name}", value)
    found = anyio.run(Bubblewrap(host(tmp_path), "lacking").probe)
    assert isinstance(found, Missing)
    assert (found.code, bool(found.message)) == (code, True)


@pytest.mark.parametrize(
    ("setting", "value", "code"),
    [
        pytest.param("python", "/usr/bin/no-python", "no_interpreter", id="no interpreter"),
        pytest.param("python", sys.executable, "no_interpreter", id="an interpreter that no sandbox can see"),
        pytest.param("proxy_user", "nobody-of-that-name", "no_proxy_user", id="no user for proxies"),
    ],
)
def test_settings_that_cannot_work_say_what(tmp_path: Path, setting: str, value: str, code: str) -> None:
    settings = dataclasses.replace(host(tmp_path), **{setting: value})  # type: ignore[arg-type]  # texts both
    found = anyio.run(Bubblewrap(settings, "lacking").probe)
    assert isinstance(found, Missing)
    assert found.code == code
