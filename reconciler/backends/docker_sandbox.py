"""Owns one live Docker sandbox after its fence was proven: start, end, stop, update, drift.

Does not build the fence and does not take it down.
"""

from __future__ import annotations

import re
import signal
from dataclasses import replace
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread

from reconciler.backends import docker_look, kernel_log
from reconciler.backends.base import Exit, ExitCode, Stream
from reconciler.backends.docker_engine import EngineError
from reconciler.backends.docker_place import Role
from reconciler.backends.docker_process import until_ended
from reconciler.backends.exits import why_not
from reconciler.core.policy import Isolation

if TYPE_CHECKING:
    from typing import Any

    from proxy.policy import ProxyPolicy
    from reconciler.backends.docker_look import Standing
    from reconciler.backends.docker_process import Streams
    from reconciler.backends.docker_proxy import ProxyContainer
    from reconciler.core.gate_report import GateReport

GRACE_S = 5.0
"""How long a stopped command has between SIGTERM and SIGKILL."""
_KILL_S = 10.0
"""How long after SIGKILL the engine may take to say that the container has ended."""
_TOLD_S, _ASK_AGAIN_S = 1.0, 0.1
"""How long the engine may take to hear, after a container was killed, that it was for its memory."""
_STREAMS_S = 5.0
"""How long the last output may take after the container has ended."""
_KILLED = 128 + signal.SIGKILL
_SENTRY_CRASHED = 2
_INIT_FAILED = re.compile(rb"\[FATAL tini \([0-9]+\)\] exec .* failed: (No such file or directory|.*)\n", re.DOTALL)
_NOT_FOUND, _NOT_EXECUTABLE = 127, 126


class Voice:
    """Hands the agent's output on, and keeps the first bytes of its stderr: an init says there what it could not do."""

    _KEPT = 4096

    def __init__(self, output: Any) -> None:
        self._output = output
        self.errors = b""

    def __call__(self, stream: Stream, data: bytes) -> None:
        """Take one piece."""
        if stream is Stream.STDERR and len(self.errors) < self._KEPT:
            self.errors += data[: self._KEPT - len(self.errors)]
        self._output(stream, data)


class DockerSandbox:
    """Implements `base.Sandbox`. The command's end is known from the engine, its output from the streams."""

    def __init__(
        self,
        *,
        standing: Standing,
        proxy: ProxyContainer,
        streams: Streams,
        voice: Voice,
        report: GateReport,
        evidence: tuple[str, ...],
    ) -> None:
        """Take over what was built."""
        self._standing, self._proxy, self._streams, self._voice = standing, proxy, streams, voice
        self._report, self._evidence = report, evidence
        self._name = standing.where.name(Role.AGENT)
        self._stopped_as: ExitCode | None = None
        self._not_started: ExitCode | None = None
        self._started = False
        self._draining = False
        self._ended = anyio.Event()
        self._state: dict[str, Any] | None = None
        self._crashed = False
        self._out_of_memory = False

    @property
    def report(self) -> GateReport:
        """The gate's report, judged."""
        return self._report

    @property
    def isolation(self) -> Isolation:
        """What the runtime isolates with."""
        return Isolation.GVISOR if self._standing.where.gvisor else Isolation.CONTAINER

    @property
    def evidence(self) -> tuple[str, ...]:
        """The structural proof read from outside, one fact a line."""
        return self._evidence

    async def start(self) -> None:
        """Let the command start; returns when it was executed or could not be, which `wait` then says."""
        try:
            await self._standing.engine.start(self._name)
        except EngineError as error:
            self._not_started = why_not(str(error))
            self._ended.set()
            return
        self._started = True
        self._standing = replace(self._standing, agent_runs=True)

    async def wait(self) -> Exit:
        """Wait until the container has ended and all output was handed on."""
        if self._started and not self._ended.is_set():
            state = await until_ended(self._standing.engine, self._name, given_up=self._ended.is_set)
            with anyio.move_on_after(_STREAMS_S):
                await self._streams.ended.wait()
            if self._ended.is_set():
                return self._exit()
            self._state = state
            self._crashed = await self._sentry_crashed()
            self._out_of_memory = await self._memory_ran_out()
            self._ended.set()
        await self._ended.wait()
        return self._exit()

    def _exit(self) -> Exit:
        state = self._state or {}
        oom = self._out_of_memory or bool(state.get("OOMKilled"))
        status = state.get("ExitCode") if self._state is not None else None
        if self._stopped_as is not None:
            return Exit(code=self._stopped_as, status=None, oom_killed=oom)
        if self._not_started is not None:
            return Exit(code=self._not_started, status=None, oom_killed=oom)
        if status in (_NOT_FOUND, _NOT_EXECUTABLE) and (failed := self._init_failed()):
            return Exit(code=failed, status=None, oom_killed=oom)
        if oom and status in (None, _KILLED):
            return Exit(code=ExitCode.OOM, status=None, oom_killed=True)
        if status is None or self._crashed:
            return Exit(code=ExitCode.SANDBOX_CRASHED, status=None, oom_killed=oom)
        return Exit(code=ExitCode.EXITED, status=int(status), oom_killed=oom)

    async def _memory_ran_out(self) -> bool:
        """Tell a kill at the memory limit from any other, also where the engine has not heard of it yet.

        It hears of the limit and of the end on two ways, and of the limit sometimes later (seen: 20.10 under gVisor).
        """
        state = self._state or {}
        if state.get("ExitCode") != _KILLED or self._stopped_as is not None:
            return bool(state.get("OOMKilled"))
        end = anyio.current_time() + _TOLD_S
        while True:
            try:
                found = await self._standing.engine.container(self._name)
            except EngineError:
                return False
            if found is None or found["State"].get("OOMKilled"):
                return found is not None
            if await anyio.to_thread.run_sync(kernel_log.memory_ran_out, str(found["Id"])):
                return True
            if anyio.current_time() > end:
                return False
            await anyio.sleep(_ASK_AGAIN_S)

    async def _sentry_crashed(self) -> bool:
        """Tell a crash of gVisor's own from a command that ended with the same status.

        Its threads count among the sandbox's processes; where one is refused, all of it ends (seen: 2, the status of a
        Go program that panics).
        """
        state = self._state or {}
        if not self._standing.where.gvisor or state.get("ExitCode") != _SENTRY_CRASHED:
            return False
        if state.get("Error"):
            return True
        try:
            found = await self._standing.engine.container(self._name)
        except EngineError:
            return False
        return found is not None and await anyio.to_thread.run_sync(kernel_log.fork_was_refused, str(found["Id"]))

    def _init_failed(self) -> ExitCode | None:
        """Say what the container's init could not execute, where that is all that was ever said."""
        found = _INIT_FAILED.fullmatch(self._voice.errors)
        return None if found is None else why_not(found[1].decode("utf-8", "replace"))

    async def stop(self, code: ExitCode) -> None:
        """SIGTERM, a grace period, SIGKILL; the first code given is the one that counts."""
        if self._ended.is_set():
            return
        if self._stopped_as is None:
            self._stopped_as = code
            engine = self._standing.engine
            if not self._started:
                self._ended.set()
                return
            await self._signal("SIGTERM")
            with anyio.move_on_after(GRACE_S):
                await until_ended(engine, self._name)
            await self._signal("SIGKILL")
            with anyio.move_on_after(_KILL_S):
                await self.wait()
            # An engine that hangs does not say so; that this ended here and now is said all the same.
            self._ended.set()
        await self._ended.wait()

    async def _signal(self, name: str) -> None:
        try:
            await self._standing.engine.kill(self._name, name)
        except EngineError:
            # Whether it has ended is asked elsewhere; what is not killed now, the teardown removes.
            return

    async def update(self, policy: ProxyPolicy) -> bool:
        """Hand the live proxy a newer generation."""
        return await self._proxy.update(policy)

    async def drift(self) -> tuple[str, ...]:
        """Look again at everything that was proven."""
        if self._ended.is_set():
            return ()
        try:
            lines = await docker_look.differences(self._standing)
        except EngineError as error:
            return (f"the engine does not answer: {error}",)
        # What ended meanwhile differs from what was running, and is no drift.
        state = await self._agent_state()
        return () if state is None or (self._started and not state.get("Running")) else lines

    async def _agent_state(self) -> dict[str, Any] | None:
        try:
            found = await self._standing.engine.container(self._name)
        except EngineError:
            return None
        return None if found is None else found["State"]

    async def drain(self) -> None:
        """End the proxy and take in its last decisions."""
        self._draining = True
        await self._proxy.end()

    async def stop_when_proxy_dies(self) -> None:
        """Watch the only door: a sandbox without it is stopped. Runs beside everything else."""
        await self._proxy.ended.wait()
        if not self._draining:
            await self.stop(ExitCode.PROXY_DIED)
