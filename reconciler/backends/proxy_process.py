"""Owns an egress proxy that is a process of this host: its start, its policy, its lines, its end.

Does not read decisions for meaning and does not build the fence that it serves.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import anyio

from proxy.record import Record
from reconciler.backends.process_io import Descriptor, Lines, ended, write

if TYPE_CHECKING:
    import socket
    from collections.abc import AsyncIterator, Callable

    from anyio.abc import TaskGroup

    from proxy.policy import ProxyPolicy
    from reconciler.backends.cgroup import Cgroup

ACKNOWLEDGE_S = 5.0
"""How long a live proxy may take to acknowledge a newer generation."""
_END_S = 5.0
_LONGEST_LINE = 64 * 1024
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

    def __init__(self, process: subprocess.Popen[bytes], decided: Callable[[Record], None]) -> None:
        if process.stdin is None or process.stdout is None or process.stderr is None:
            raise ValueError("the proxy's three streams are pipes")
        self._process = process
        self._stdin = Descriptor(os.dup(process.stdin.fileno()))
        process.stdin.close()
        self._decided = decided
        self._pidfd = Descriptor(os.pidfd_open(process.pid))
        self._news = anyio.Event()
        self._accepted = -1
        self._refused: str | None = None
        self._diagnostics = b""
        self._ready = False
        self.ended = anyio.Event()
        """Set once the process is gone and its last line was read."""
        self.canary_arrivals: list[str] = []

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
        ready = False
        with anyio.move_on_after(limit):
            ready = await self._until_ready()
        if ready:
            return None
        state = "ended" if self.ended.is_set() else f"did not become ready within {limit:g} s"
        return ProxyNotReady(f"the proxy {state}: {self.diagnostics or 'it said nothing'}")

    async def _until_ready(self) -> bool:
        while not (self._ready or self.ended.is_set()):
            await self._news.wait()
        return self._ready

    async def send(self, policy: ProxyPolicy) -> bool:
        """Write a policy to its input; False when it does not read any more."""
        return self._stdin.number >= 0 and await write(self._stdin.number, policy.to_json().encode("ascii") + b"\n")

    async def update(self, policy: ProxyPolicy) -> bool:
        """Hand over a newer generation; False when it is not acknowledged in time, or is not accepted."""
        if policy.generation <= self._accepted:
            return False
        self._refused = None
        with anyio.move_on_after(ACKNOWLEDGE_S):
            if not await self.send(policy):
                return False
            while self._is_silent_about(policy.generation):
                await self._news.wait()
        return self._accepted >= policy.generation

    def _is_silent_about(self, generation: int) -> bool:
        return self._accepted < generation and self._refused is None and not self.ended.is_set()

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
        self.ended.set()
        self._wake()

    async def _watch_errors(self) -> None:
        assert self._process.stderr is not None  # noqa: S101 - checked when it was made
        with self._process.stderr as stream:
            said = Lines(stream.fileno(), most=_LONGEST_LINE)
            while (line := await said.next()) is not None:
                self._diagnostics = (self._diagnostics + line + b"\n")[-_KEPT_DIAGNOSTICS:]

    async def _watch_lines(self) -> None:
        assert self._process.stdout is not None  # noqa: S101 - checked when it was made
        with self._process.stdout as stream:
            said = Lines(stream.fileno(), most=_LONGEST_LINE)
            while (line := await said.next()) is not None:
                if not self._take(line):
                    # What does not keep to its contract may be anything: it loses the fence's only door.
                    self._diagnostics = (self._diagnostics + b"unusable line on stdout\n")[-_KEPT_DIAGNOSTICS:]
                    self.kill()
                    return

    def _take(self, line: bytes) -> bool:
        try:
            said = json.loads(line)
        except ValueError:
            return False
        match said:
            case {"kind": "decision"}:
                record = Record.parse(said)
                if record is None:
                    return False
                self._decided(record)
            case {"kind": "ready", "generation": int(generation)}:
                self._accepted = generation
                self._ready = True
            case {"kind": "policy", "accepted": True, "generation": int(generation)}:
                self._accepted = max(self._accepted, generation)
            case {"kind": "policy", "accepted": False}:
                self._refused = str(said.get("message"))
            case {"kind": "canary", "peer": str(peer)}:
                self.canary_arrivals.append(peer)
            case {"kind": "stopped"}:
                pass
            case _:
                return False
        self._wake()
        return True

    def _wake(self) -> None:
        self._news.set()
        self._news = anyio.Event()


@contextlib.asynccontextmanager
async def start(
    policy: ProxyPolicy,
    *,
    user: str,
    receive: socket.socket,
    cgroup: Cgroup,
    tasks: TaskGroup,
    decided: Callable[[Record], None],
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
    proxy = ProxyProcess(process, decided)
    tasks.start_soon(proxy.watch)
    try:
        cgroup.add(proxy.pid)
        await proxy.send(policy)
        yield proxy
    finally:
        with anyio.CancelScope(shield=True):
            await proxy.end()
