"""Owns what goes on beside a running command: its deadline, newer policy, the fence, the audit, and being stopped.

Does not launch, report or tear down.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio

from reconciler.backends.base import Exit, ExitCode
from reconciler.core.audit import EventName
from reconciler.core.job import Refused, lets_run
from reconciler.core.result import ResultCode
from reconciler.journal import JournalFailed
from reconciler.prepare import STOP_GRACE

if TYPE_CHECKING:
    from anyio.abc import TaskGroup

    from reconciler.backends.base import Sandbox
    from reconciler.core.policy import Effective, InForce
    from reconciler.live import Live
    from reconciler.prepare import ProxySettings
    from reconciler.trail import Trail

DRIFT_INTERVAL = 5.0
"""Seconds between two looks at whether the fence is still as it was proven."""


class Stop:
    """That a run is to end, and why. The first code counts."""

    def __init__(self) -> None:
        self.code: ResultCode | None = None
        self._asked = anyio.Event()

    def ask(self, code: ResultCode) -> None:
        """Ask the run to end."""
        if self.code is None:
            self.code = code
        self._asked.set()

    async def wait(self) -> None:
        """Wait until it is to end."""
        await self._asked.wait()


class Following:
    """The policy that a run is under, and the newest that it should be under."""

    def __init__(self, agent: str, effective: Effective, generation: int, required_egress: tuple[str, ...]) -> None:
        self.generation = generation
        """The newest generation that holds for the run."""
        self.generations: tuple[int, ...] = (generation,)
        """The generations that its proxy had."""
        self._agent, self._effective, self._required = agent, effective, required_egress
        self._wanted: InForce | None = None
        self._news = anyio.Event()

    def want(self, in_force: InForce) -> None:
        """Have newer policy taken over."""
        self._wanted = in_force
        self._news.set()

    async def catch_up(self, sandbox: Sandbox, proxy: ProxySettings) -> ResultCode | None:
        """Bring the sandbox to the newest policy, or say with which code it has to end."""
        wanted = self._wanted
        if wanted is None or wanted.generation <= self.generation:
            return None
        effective = lets_run(self._agent, in_force=wanted, required_egress=self._required)
        if isinstance(effective, Refused):
            return ResultCode.POLICY_REMOVED
        if _reach(effective) != _reach(self._effective):
            if not await sandbox.update(proxy.policy(effective, wanted.revision, wanted.generation)):
                return ResultCode.POLICY_NOT_ACKNOWLEDGED
            self.generations = (*self.generations, wanted.generation)
        self.generation, self._effective = wanted.generation, effective
        return None

    async def news(self) -> None:
        """Wait for newer policy."""
        await self._news.wait()
        self._news = anyio.Event()


def _reach(effective: Effective) -> tuple[object, ...]:
    """Give what a proxy enforces of an agent's policy."""
    return (effective.agent.allow, effective.agent.deny, effective.agent.limits.connections, effective.layers)


class Attendance:
    """Everything beside one running command; `attend` ends with it."""

    def __init__(
        self, sandbox: Sandbox, *, stop: Stop, following: Following, proxy: ProxySettings, live: Live, trail: Trail
    ) -> None:
        self._sandbox, self._stop, self._following = sandbox, stop, following
        self._proxy, self._live, self._trail = proxy, live, trail

    async def attend(self, timeout: float) -> Exit:  # noqa: ASYNC109 - the command's deadline, not this call's
        """Wait for the command to end, of itself or because one of the others ends it."""
        ended: Exit | None = None
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._deadline, timeout, tasks)
            tasks.start_soon(self._obey, tasks)
            tasks.start_soon(self._follow)
            tasks.start_soon(self._watch_fence)
            tasks.start_soon(self._audit)
            ended = await self._sandbox.wait()
            tasks.cancel_scope.cancel()
        return ended or Exit(code=ExitCode.SANDBOX_CRASHED, status=None)

    async def _deadline(self, timeout: float, tasks: TaskGroup) -> None:  # noqa: ASYNC109 - see above
        await anyio.sleep(timeout)
        await self._end(ExitCode.TIMEOUT, tasks)

    async def _obey(self, tasks: TaskGroup) -> None:
        await self._stop.wait()
        await self._end(ExitCode.STOPPED, tasks)

    async def _end(self, code: ExitCode, tasks: TaskGroup) -> None:
        """Stop the command; a sandbox that does not end then is left to its teardown."""
        await self._sandbox.stop(code)
        await anyio.sleep(STOP_GRACE)
        tasks.cancel_scope.cancel()

    async def _follow(self) -> None:
        while True:
            code = await self._following.catch_up(self._sandbox, self._proxy)
            if code is not None:
                self._stop.ask(code)
                return
            await self._following.news()

    async def _watch_fence(self) -> None:
        while True:
            await anyio.sleep(DRIFT_INTERVAL)
            try:
                if await self.drifted():
                    self._stop.ask(ResultCode.FENCE_DRIFT)
                    return
            except JournalFailed:
                self._stop.ask(ResultCode.AUDIT_FAILED)
                return

    async def drifted(self) -> bool:
        """Read the proof again, and leave a row where it does not hold.

        Raises:
            JournalFailed: the row is not on disk.
        """
        lines = await self._sandbox.drift()
        if lines:
            message = "the fence is not as it was proven"
            detail = {"drift": list(lines)}
            await self._trail.add(EventName.FENCE_DRIFT, "drift", code="fence_drift", message=message, detail=detail)
        return bool(lines)

    async def _audit(self) -> None:
        try:
            await self._live.pump(self._trail)
        except JournalFailed:
            self._stop.ask(ResultCode.AUDIT_FAILED)
        else:
            # It ends by itself only when decisions can no longer be kept.
            self._stop.ask(ResultCode.FAILED)
