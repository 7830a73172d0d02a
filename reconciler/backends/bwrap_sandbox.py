"""Owns one live bubblewrap sandbox after its fence was proven: start, end, stop, update, drift.

Does not build the fence and does not take it down.
"""

from __future__ import annotations

import contextlib
import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING

import anyio

from reconciler.backends import bwrap_args, bwrap_proof
from reconciler.backends.base import Exit, ExitCode
from reconciler.backends.uids import ending, processes
from reconciler.core.policy import Isolation

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from proxy.policy import ProxyPolicy
    from reconciler.backends.bwrap_process import BwrapProcess, ExecFailed
    from reconciler.backends.cgroup import Cgroup
    from reconciler.backends.proxy_process import ProxyProcess
    from reconciler.core.gate_report import GateReport

GRACE_S = 5.0
"""How long a stopped command has between SIGTERM and SIGKILL."""
_STRAY_LOOK_S = 0.1
_KILLED = 128 + signal.SIGKILL
_NOT_FOUND = "ENOENT"


@dataclass(frozen=True, slots=True, kw_only=True)
class Proven:
    """What the gate and the structural proof found, and what a later look is compared with."""

    report: GateReport
    evidence: tuple[str, ...]
    expected: bwrap_proof.Expected
    limits: tuple[str, ...]


class BwrapSandbox:
    """Implements `base.Sandbox`. The command's end is known from bwrap's own status line."""

    def __init__(
        self,
        *,
        process: BwrapProcess,
        proxy: ProxyProcess,
        cgroup: Cgroup,
        proven: Proven,
        word: Mapping[str, object],
    ) -> None:
        """Take over what was built; `word` is what lets the launcher start the command."""
        self._process, self._proxy, self._cgroup, self._proven, self._word = process, proxy, cgroup, proven, word
        self._stopped_as: ExitCode | None = None
        self._exec_failed: ExecFailed | None = None
        self._started = False
        self._draining = False

    @property
    def report(self) -> GateReport:
        """The gate's report, judged."""
        return self._proven.report

    @property
    def isolation(self) -> Isolation:
        """Namespaces only."""
        return Isolation.NAMESPACE

    @property
    def evidence(self) -> tuple[str, ...]:
        """The structural proof read from outside, one fact a line."""
        return self._proven.evidence

    async def start(self) -> None:
        """Let the command start; returns when it was executed or could not be, which `wait` then says."""
        self._started = True
        self._process.started()
        if await self._process.say(self._word):
            self._exec_failed = await self._process.exec_answer()

    async def wait(self) -> Exit:
        """Wait until bwrap is gone and all output was handed on."""
        await self._process.ended.wait()
        # The kernel counts before it kills, so the count is there once the process is gone.
        oom = self._cgroup.oom_kills() > 0
        status = self._process.exit_status
        if self._stopped_as is not None:
            return Exit(code=self._stopped_as, status=None, oom_killed=oom)
        if self._exec_failed is not None:
            found = self._exec_failed.error != _NOT_FOUND
            return Exit(code=ExitCode.NOT_EXECUTABLE if found else ExitCode.NOT_FOUND, status=None, oom_killed=oom)
        if oom and status in (None, _KILLED):
            return Exit(code=ExitCode.OOM, status=None, oom_killed=True)
        if status is None:
            return Exit(code=ExitCode.SANDBOX_CRASHED, status=None, oom_killed=oom)
        return Exit(code=ExitCode.EXITED, status=status, oom_killed=oom)

    async def stop(self, code: ExitCode) -> None:
        """SIGTERM to everything inside, a grace period, SIGKILL; the first code given is the one that counts."""
        if self._process.ended.is_set():
            return
        if self._stopped_as is None:
            self._stopped_as = code
            if self._started:
                with contextlib.suppress(OSError):
                    self._cgroup.send(signal.SIGTERM, but=self._not_the_command())
                with anyio.move_on_after(GRACE_S):
                    await self._process.ended.wait()
            await self._process.kill()
        await self._process.ended.wait()

    def _not_the_command(self) -> Sequence[int]:
        return [pid for pid in (self._process.pid, self._process.init) if pid is not None]

    async def update(self, policy: ProxyPolicy) -> bool:
        """Hand the live proxy a newer generation."""
        return await self._proxy.update(policy)

    async def drift(self) -> tuple[str, ...]:
        """Look again at every process inside, at the limits, and for processes of the same uid outside them.

        Beside the loop: how many processes there are to look at is for the command to say.
        """
        lines = await anyio.to_thread.run_sync(self._look_around)
        strays = await anyio.to_thread.run_sync(self._strays)
        if strays:
            # One that came or went while the list was read may seem to be outside; a stray stays.
            await anyio.sleep(_STRAY_LOOK_S)
            strays &= await anyio.to_thread.run_sync(self._strays)
        return (*lines, *(f"process {pid} runs as the sandbox's uid outside its limits" for pid in sorted(strays)))

    def _look_around(self) -> tuple[str, ...]:
        lines: list[str] = []
        for pid in sorted(self._cgroup.pids() - {self._process.pid}):
            lines += [f"process {pid}: {line}" for line in self._look(pid)]
        if not self._process.ended.is_set() and (limits := self._cgroup.limits()) != self._proven.limits:
            lines.append(f"limits are {' '.join(limits)}")
        return tuple(lines)

    def _strays(self) -> frozenset[int]:
        if self._process.ended.is_set():
            return frozenset()
        inside = self._cgroup.pids()
        found = frozenset(processes(self._proven.expected.uid)) - inside - self._cgroup.pids()
        return frozenset(pid for pid in found if not ending(pid))

    def _look(self, pid: int) -> tuple[str, ...]:
        try:
            observed = bwrap_proof.observe(pid, listening=False)
        except (OSError, KeyError):
            # It ended meanwhile: a process that has died leaves its files without their content.
            return ()
        if observed.status.get("State", "").startswith(("Z", "X")):
            return ()
        return bwrap_proof.differences(observed, self._proven.expected, filtered=True, listening=False)

    async def drain(self) -> None:
        """End the proxy and take in its last decisions."""
        self._draining = True
        await self._proxy.end()

    async def stop_when_proxy_dies(self) -> None:
        """Watch the only door: a sandbox without it is stopped. Runs beside everything else."""
        await self._proxy.ended.wait()
        if not self._draining:
            await self.stop(ExitCode.PROXY_DIED)


def word(launch_command: Sequence[str], environment: Mapping[str, str]) -> dict[str, object]:
    """Give the line that lets the launcher start a command."""
    return {
        "command": list(launch_command),
        "environment": dict(environment),
        "directory": bwrap_args.WORKING_DIRECTORY,
    }
