"""Owns an egress proxy that is a process of this host: its start, its policy, its lines, its end.

Does not read decisions for meaning and does not build the fence that it serves.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import anyio

from reconciler.backends.process_io import Descriptor, Lines, ended, write
from reconciler.backends.proxy_lines import LONGEST_LINE, ProxyLines

if TYPE_CHECKING:
    import socket
    from collections.abc import AsyncIterator

    from anyio.abc import TaskGroup

    from proxy.policy import ProxyPolicy
    from reconciler.backends.base import Observer
    from reconciler.backends.cgroup import Cgroup

_END_S = 5.0
_KEPT_DIAGNOSTICS = 2000


def program() -> str:
    """Give the path of `ringfence-proxy`: it is installed beside the interpreter that runs this."""
    return str(Path(sys.executable).parent / "ringfence-proxy")


@dataclass(frozen=True, slots=True)
class ProxyNotReady:
    """The proxy did not get as far as listening; `message` holds what it said."""

    message: str


class ProxyProcess:
    """One live proxy. Made by `start`; `end` is idempotent."""

    def __init__(self, process: subprocess.Popen[bytes], observer: Observer) -> None:
        if process.stdin is None or process.stdout is None or process.stderr is None:
            raise ValueError("the proxy's three streams are pipes")
        self._process = process
        self._stdin = Descriptor(os.dup(process.stdin.fileno()))
        process.stdin.close()
        self._pidfd = Descriptor(os.pidfd_open(process.pid))
        self._lines = ProxyLines(observer)
        self._diagnostics = b""
        self.ended = self._lines.ended
        """Set once the process is gone and its last line was read."""

    @property
    def pid(self) -> int:
        """The process's number."""
        return self._process.pid

    @property
    def diagnostics(self) -> str:
        """What it wrote to stderr, cut."""
        return self._diagnostics.decode("utf-8", "replace").strip()

    async def until_ready(self, limit: float) -> ProxyNotReady | None:
        """Wait until it listens with its first policy; None when it does."""
        if await self._lines.until_ready(limit):
            return None
        state = "ended" if self.ended.is_set() else f"did not become ready within {limit:g} s"
        return ProxyNotReady(f"the proxy {state}: {self.diagnostics or 'it said nothing'}")

    async def send(self, policy: ProxyPolicy) -> bool:
        """Write a policy to its input; False when it does not read any more."""
        return self._stdin.number >= 0 and await write(self._stdin.number, policy.to_json().encode("ascii") + b"\n")

    async def update(self, policy: ProxyPolicy) -> bool:
        """Hand over a newer generation; False when it is not acknowledged in time, or is not accepted."""
        return await self._lines.update(policy, self.send)

    async def end(self) -> None:
        """End its input, which closes everything, and take in its last lines; kill it when it takes too long."""
        self._stdin.close()
        with anyio.move_on_after(_END_S):
            await self.ended.wait()
        if not self.ended.is_set():
            self.kill()
            await self.ended.wait()

    def kill(self) -> None:
        """Kill it at once."""
        if self._pidfd.number >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd.number, signal.SIGKILL)

    async def watch(self) -> None:
        """Take in its lines until it has ended; runs beside everything else.

        Not to be cancelled: it ends when the process does, and whoever starts one ends it.
        """
        with anyio.CancelScope(shield=True):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._watch_errors)
                tasks.start_soon(self._watch_lines)
                await ended(self._pidfd.number)
                self._process.wait()
        self._pidfd.close()
        self._lines.end()

    async def _watch_errors(self) -> None:
        assert self._process.stderr is not None  # noqa: S101 - checked when it was made
        with self._process.stderr as stream:
            said = Lines(stream.fileno(), most=LONGEST_LINE)
            while (line := await said.next()) is not None:
                self._diagnostics = (self._diagnostics + line + b"\n")[-_KEPT_DIAGNOSTICS:]

    async def _watch_lines(self) -> None:
        assert self._process.stdout is not None  # noqa: S101 - checked when it was made
        with self._process.stdout as stream:
            said = Lines(stream.fileno(), most=LONGEST_LINE)
            while (line := await said.next()) is not None:
                if not self._lines.take(line):
                    # What does not keep to its contract may be anything: it loses the fence's only door.
                    self._diagnostics = (self._diagnostics + b"unusable line on stdout\n")[-_KEPT_DIAGNOSTICS:]
                    self.kill()
                    return


@contextlib.asynccontextmanager
async def start(
    policy: ProxyPolicy,
    *,
    user: str,
    receive: socket.socket,
    cgroup: Cgroup,
    tasks: TaskGroup,
    observer: Observer,
) -> AsyncIterator[ProxyProcess]:
    """Start a proxy that gets its listener through `receive` (closed here); at the end of the context it is gone.

    Raises:
        OSError: the program could not be started.
    """
    with receive:
        # From the loop's own thread and at once: what follows depends on it.
        process = subprocess.Popen(  # noqa: ASYNC220 - as above
            [program(), "--receive-listener", str(receive.fileno()), "--user", user],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=(receive.fileno(),),
            env={"LANG": "C.UTF-8", "PATH": "/usr/bin:/bin"},
            cwd="/",
        )
    proxy = ProxyProcess(process, observer)
    tasks.start_soon(proxy.watch)
    try:
        cgroup.add(proxy.pid)
        await proxy.send(policy)
        yield proxy
    finally:
        with anyio.CancelScope(shield=True):
            await proxy.end()
