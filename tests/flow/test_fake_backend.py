"""The fake keeps the promises of a backend that the flow tests lean on; those of a fence it cannot keep."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio
import pytest

from proxy.policy import ProxyPolicy
from reconciler.backends.base import Backend, Exit, ExitCode, Launch, LaunchRefused, Sandbox, Stream
from tests.flow.fake_backend import STEPS, FakeBackend
from tests.flow.house import OWNER, entries, limits

if TYPE_CHECKING:
    from pathlib import Path

    from proxy.record import Record


class Seen:
    """An observer that remembers."""

    def __init__(self) -> None:
        self.steps: list[str] = []
        self.decisions: list[Record] = []
        self.ends: list[int | None] = []
        self.written = b""

    def step(self, name: str) -> None:
        self.steps.append(name)

    def decision(self, record: Record) -> None:
        self.decisions.append(record)

    def decisions_end(self, last: int | None) -> None:
        self.ends.append(last)

    def output(self, stream: Stream, data: bytes) -> None:
        del stream
        self.written += data

    def undo_failed(self, step: str, message: str) -> None:
        raise AssertionError(step, message)


def launch(*actions: str) -> Launch:
    """A launch of a list of actions."""
    proxy = ProxyPolicy(
        run="r1", generation=1, revision="x", allow=entries("a.com"), deny=(), layers=(), resolvers=(),
        proof_key=b"k" * 32, expires_at=4e9,
    )  # fmt: skip
    return Launch(
        run="r1", owner=OWNER, agent="helper", image="host", user=65534, command=("do", *actions), limits=limits(),
        proxy=proxy, expires_at=4e9,
    )  # fmt: skip


@pytest.fixture
def backend(tmp_path: Path) -> Backend:
    """The fake, as the protocol that it keeps."""
    (tmp_path / "world").mkdir()
    return FakeBackend(tmp_path / "world", OWNER)


def world(tmp_path: Path) -> list[str]:
    """What is there."""
    return sorted(path.name for path in (tmp_path / "world").iterdir())


def test_plan_creates_nothing(backend: Backend, tmp_path: Path) -> None:
    assert len(backend.plan(launch())) == len(STEPS)
    assert world(tmp_path) == []


def test_nothing_runs_before_start_and_nothing_is_left_after(backend: Backend, tmp_path: Path) -> None:
    seen = Seen()

    async def main() -> Exit:
        async with backend.launch(launch("print x", "connect a.com:443", "exit 7"), seen) as sandbox:
            assert not isinstance(sandbox, LaunchRefused)
            assert sandbox.report.passed
            assert seen.steps == list(STEPS)
            assert seen.written == b""
            assert len(world(tmp_path)) == len(STEPS)
            await sandbox.start()
            ended = await sandbox.wait()
            await sandbox.drain()
            assert await sandbox.drift() == ()
            return ended

    assert anyio.run(main) == Exit(code=ExitCode.EXITED, status=7)
    assert seen.written == b"x\n"
    assert [record.seq for record in seen.decisions] == [1]
    assert world(tmp_path) == []


@pytest.mark.parametrize("code", [ExitCode.TIMEOUT, ExitCode.STOPPED])
def test_stop_ends_the_command_with_its_code_and_may_be_said_twice(backend: Backend, code: ExitCode) -> None:
    async def ended(sandbox: Sandbox) -> Exit:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(sandbox.stop, code)
            tasks.start_soon(sandbox.stop, ExitCode.OOM)
            return await sandbox.wait()
        raise AssertionError

    async def main() -> Exit:
        async with backend.launch(launch("sleep 30"), Seen()) as sandbox:
            assert not isinstance(sandbox, LaunchRefused)
            await sandbox.start()
            return await ended(sandbox)

    assert anyio.run(main).code is code


def test_a_cancelled_launch_leaves_nothing(backend: Backend, tmp_path: Path) -> None:
    async def main() -> None:
        with anyio.move_on_after(0.05):
            async with backend.launch(launch("sleep 30"), Seen()) as sandbox:
                assert not isinstance(sandbox, LaunchRefused)
                await sandbox.start()
                await sandbox.wait()

    anyio.run(main)
    assert world(tmp_path) == []


def test_the_reaper_leaves_live_runs_and_other_owners_alone(backend: Backend, tmp_path: Path) -> None:
    for name in (f"{OWNER}.r1.proxy", f"{OWNER}.r2.proxy", "other.r2.proxy"):
        (tmp_path / "world" / name).touch()
    reaped = anyio.run(backend.reap, frozenset({"r1"}))
    assert [one.run for one in reaped] == ["r2"]
    assert world(tmp_path) == sorted([f"{OWNER}.r1.proxy", "other.r2.proxy"])
    assert anyio.run(backend.reap, frozenset({"r1"})) == ()
