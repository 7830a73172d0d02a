"""With the fence broken on purpose the gate refuses the run and names the breach; nothing of the command runs."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
import socket
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from reconciler.backends import bwrap_args, bwrap_launch, bwrap_process, proxy_process
from tests.backends.world import Recorder, launch, refused

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Sequence
    from pathlib import Path

    from reconciler.backends.base import LaunchRefused
    from reconciler.backends.bubblewrap import Bubblewrap
    from reconciler.backends.proxy_process import ProxyProcess
    from tests.rig import Rig

pytestmark = [pytest.mark.bubblewrap, pytest.mark.rig]


def refusal(backend: Bubblewrap, run: str | None = None) -> LaunchRefused:
    """Launch into the broken fence: it must be refused, torn down, and its command must not have run."""
    recorder = Recorder()

    async def main() -> LaunchRefused:
        async with backend.launch(launch("sh", "-c", "echo ran", run=run), recorder) as sandbox:
            found = refused(sandbox)
            await anyio.sleep(0.1)
            return found

    found = anyio.run(main)
    assert recorder.undone == []
    assert recorder.sizes.total() == 0
    assert anyio.run(backend.reap, frozenset()) == ()
    assert found.code == "gate_failed"
    assert found.report is not None
    assert not found.report.passed
    assert found.report.failures
    assert found.report.failures[0] in found.message
    return found


def failures(found: LaunchRefused) -> tuple[str, ...]:
    """What the refusal names."""
    assert found.report is not None
    return found.report.failures


Break = "Callable[[Callable[[list[str]], list[str]]], None]"


@pytest.fixture
def alter(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[list[str]], list[str]]], None]:
    """Change the arguments that bwrap is started with."""
    planned = bwrap_args.arguments

    def apply(change: Callable[[list[str]], list[str]]) -> None:
        monkeypatch.setattr(bwrap_args, "arguments", lambda *given: tuple(change(list(planned(*given)))))

    return apply


def without(*words: str) -> Callable[[list[str]], list[str]]:
    """Leave out one run of arguments."""

    def change(arguments: list[str]) -> list[str]:
        at = next(n for n in range(len(arguments)) if arguments[n : n + len(words)] == list(words))
        return arguments[:at] + arguments[at + len(words) :]

    return change


def with_more(*words: str) -> Callable[[list[str]], list[str]]:
    """Put arguments in before the root is made read-only."""

    def change(arguments: list[str]) -> list[str]:
        at = arguments.index("--remount-ro")
        return [*arguments[:at], *words, *arguments[at:]]

    return change


def test_the_hosts_network_shared(bubblewrap: Bubblewrap, alter: Any, rig: Rig) -> None:
    alter(without("--unshare-net"))
    found = refusal(bubblewrap)
    names = failures(found)
    assert any(name.startswith("interface:") for name in names)
    for address in rig.host_addresses:
        shown = f"[{address}]" if ":" in address else address
        assert any(name.startswith(f"canary tcp:{shown}:") for name in names)
    assert any(name.startswith("canary unix-abstract:") for name in names)
    assert any("network interfaces are" in name for name in names)
    assert any(name.startswith("net namespace") for name in names)
    assert found.report is not None
    assert found.report.arrivals


@pytest.fixture
def host_socket(rig_runtime: Path) -> Iterator[tuple[Path, socket.socket]]:
    """A service of the host's on a path socket, which anybody may use."""
    path = rig_runtime / "service.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        path.chmod(0o666)
        listener.listen()
        yield path, listener
    path.unlink()


@pytest.mark.parametrize("option", ["--bind", "--ro-bind"])
def test_a_socket_of_the_host_bound_in(
    bubblewrap: Bubblewrap, alter: Any, host_socket: tuple[Path, socket.socket], option: str
) -> None:
    path, _ = host_socket
    alter(with_more(option, str(path), "/srv/service.sock"))
    names = failures(refusal(bubblewrap))
    assert "socket:/srv/service.sock" in names
    assert any(name.startswith("mount /srv/service.sock") for name in names)


def test_the_runs_own_canary_bound_in_is_reached_and_counted(bubblewrap: Bubblewrap, alter: Any) -> None:
    run = f"test-{secrets.token_hex(4)}"
    path = str(bubblewrap._folder / run / "canary.sock")
    alter(with_more("--bind", path, path))
    found = refusal(bubblewrap, run)
    assert f"canary unix-path:{path}" in failures(found)
    assert found.report is not None
    assert found.report.arrivals == (f"canary unix-path:{path}",)


def test_a_proxy_that_does_not_hold_the_proof_key(bubblewrap: Bubblewrap, monkeypatch: pytest.MonkeyPatch) -> None:
    real = proxy_process.start

    @contextlib.asynccontextmanager
    async def impostor(policy: Any, **given: Any) -> AsyncIterator[ProxyProcess]:
        async with real(dataclasses.replace(policy, proof_key=secrets.token_bytes(32)), **given) as proxy:
            yield proxy

    monkeypatch.setattr(proxy_process, "start", impostor)
    found = refusal(bubblewrap)
    assert failures(found) == ("anchor",)
    assert found.report is not None
    assert found.report.anchor["verdict"] == "denied"


def test_an_inherited_descriptor(bubblewrap: Bubblewrap, monkeypatch: pytest.MonkeyPatch, rig_runtime: Path) -> None:
    real = bwrap_process._spawn
    leak = os.open(rig_runtime, os.O_RDONLY)

    def leaky(command: Sequence[str], *, uid: int, passed: Sequence[int]) -> Any:
        return real(command, uid=uid, passed=(*passed, leak))

    monkeypatch.setattr(bwrap_process, "_spawn", leaky)
    try:
        names = failures(refusal(bubblewrap))
    finally:
        os.close(leak)
    assert len(names) == 1
    assert names[0].startswith(f"descriptor:{leak} -> ")


@pytest.mark.parametrize(
    ("words", "named"),
    [
        pytest.param(("--remount-ro", "/"), "mount / is not there as planned", id="a writable root"),
        pytest.param(("--unshare-pid",), "pid namespace", id="the host's processes"),
        pytest.param(("--unshare-ipc",), "ipc namespace", id="the host's shared memory"),
        pytest.param(("--unshare-uts",), "uts namespace", id="the host's name"),
        pytest.param(("--unshare-cgroup",), "cgroup namespace", id="the host's control groups"),
    ],
)
def test_a_part_of_the_fence_left_out(bubblewrap: Bubblewrap, alter: Any, words: tuple[str, ...], named: str) -> None:
    change = without(*words)
    alter(
        lambda arguments: change(without("--hostname", "sandbox")(arguments)) if "uts" in named else change(arguments)
    )
    assert any(name.startswith(named) for name in failures(refusal(bubblewrap)))


@pytest.mark.parametrize(
    ("words", "named"),
    [
        pytest.param(("--ro-bind", "/etc", "/srv/etc"), "mount /srv/etc", id="a directory of the host's"),
        pytest.param(("--tmpfs", "/srv"), "mount /srv", id="a file system without a bound"),
        pytest.param(("--cap-add", "CAP_NET_RAW"), "CapEff", id="a capability"),
    ],
)
def test_more_than_was_planned(bubblewrap: Bubblewrap, alter: Any, words: tuple[str, ...], named: str) -> None:
    alter(with_more(*words))
    assert any(name.startswith(named) for name in failures(refusal(bubblewrap)))


def test_no_system_call_filter(bubblewrap: Bubblewrap, alter: Any) -> None:
    def change(arguments: list[str]) -> list[str]:
        at = arguments.index("--seccomp")
        return arguments[:at] + arguments[at + 2 :]

    alter(change)
    names = failures(refusal(bubblewrap))
    assert "no system call filter is loaded" in names
    assert "vsock socket" in names


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(b"", id="a gate that says nothing"),
        pytest.param(b"print('{}')", id="a gate that reports nothing"),
        pytest.param(b"import os, signal; os.kill(os.getpid(), signal.SIGKILL)", id="a gate that was killed"),
    ],
)
def test_a_gate_that_does_not_do_its_work(
    bubblewrap: Bubblewrap, monkeypatch: pytest.MonkeyPatch, program: bytes
) -> None:
    real = bwrap_launch._program
    monkeypatch.setattr(bwrap_launch, "_program", lambda name: program if name == "gate.py" else real(name))
    names = failures(refusal(bubblewrap))
    assert {"report", "anchor"} <= set(names)
