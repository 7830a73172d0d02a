"""Owns what tests of backends share: an observer that remembers, launches to start from, and a network to be in."""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import anyio

from proxy.policy import ProxyPolicy
from reconciler.backends.base import Launch, LaunchRefused, Sandbox, Stream
from reconciler.core.policy import Limits
from reconciler.host import Host

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from proxy.record import Record
    from reconciler.backends.base import Exit

MIB = 1024 * 1024
KEPT = 64 * 1024
LIMITS = Limits(cpus=1.0, memory=128 * MIB, pids=32, timeout=60, output=MIB, connections=16)


@dataclass(slots=True)
class Recorder:
    """An observer that remembers everything, of the output only the last bytes and how many there were."""

    steps: list[str] = field(default_factory=list)
    decisions: list[Record] = field(default_factory=list)
    undone: list[str] = field(default_factory=list)
    tails: dict[Stream, bytes] = field(default_factory=lambda: dict.fromkeys(Stream, b""))
    sizes: Counter[Stream] = field(default_factory=Counter)
    ends: list[int | None] = field(default_factory=list)
    wrote: anyio.Event = field(default_factory=anyio.Event)

    def step(self, name: str) -> None:
        """Remember."""
        self.steps.append(name)

    def decision(self, record: Record) -> None:
        """Remember."""
        self.decisions.append(record)

    def decisions_end(self, last: int | None) -> None:
        """Remember."""
        self.ends.append(last)

    def output(self, stream: Stream, data: bytes) -> None:
        """Remember the end."""
        self.wrote.set()
        self.sizes[stream] += len(data)
        self.tails[stream] = (self.tails[stream] + data)[-KEPT:]

    def undo_failed(self, step: str, message: str) -> None:
        """Remember."""
        self.undone.append(f"{step}: {message}")

    @property
    def stdout(self) -> str:
        """The end of what the command wrote there."""
        return self.tails[Stream.STDOUT].decode()

    @property
    def said(self) -> str:
        """The end of what it wrote to either, the one after the other."""
        return self.stdout + self.stderr

    @property
    def stderr(self) -> str:
        """The end of what the command wrote there."""
        return self.tails[Stream.STDERR].decode()


def launch(
    *command: str,
    limits: Limits = LIMITS,
    environment: Mapping[str, str] | None = None,
    files: Mapping[str, bytes] | None = None,
    run: str | None = None,
    resolvers: tuple[tuple[str, int], ...] = (("127.0.0.1", 53),),
) -> Launch:
    """A launch of a new run whose proxy allows nothing."""
    name = run or f"test-{secrets.token_hex(4)}"
    expires = time.time() + 300
    return Launch(
        run=name,
        owner="tests",
        agent="helper",
        image="host",
        user=1000,
        command=command,
        environment=environment or {},
        input=files or {},
        limits=limits,
        proxy=policy(name, generation=1, expires_at=expires, resolvers=resolvers),
        expires_at=expires,
    )


def policy(
    run: str, *, generation: int, expires_at: float, resolvers: tuple[tuple[str, int], ...], key: bytes | None = None
) -> ProxyPolicy:
    """A proxy policy that allows nothing."""
    return ProxyPolicy(
        run=run,
        generation=generation,
        revision="sha256:test",
        allow=(),
        deny=(),
        layers=(),
        resolvers=resolvers,
        proof_key=key or secrets.token_bytes(32),
        expires_at=expires_at,
    )


def host(runtime: Path, *, uid_first: int = 310_000, uid_count: int = 64) -> Host:
    """Settings of a host whose only used fields are those of a backend."""
    return Host(
        name="tests",
        policy=runtime,
        trust=runtime,
        state=runtime,
        spool=runtime,
        runtime=runtime,
        policy_owner="root",
        proxy_user="nobody",
        resolvers=(),
        nat64_prefixes=(),
        required_egress=(),
        ticket_pattern="",
        max_age=None,
        uid_first=uid_first,
        uid_count=uid_count,
        scan_interval=30.0,
        stop_timeout=10.0,
        python="/usr/bin/python3",
        max_files=1000,
        max_bytes=MIB,
    )


def built(sandbox: Sandbox | LaunchRefused) -> Sandbox:
    """The sandbox; a refusal fails the test with its message."""
    assert not isinstance(sandbox, LaunchRefused), f"{sandbox.code}: {sandbox.message}"
    return sandbox


def refused(sandbox: Sandbox | LaunchRefused) -> LaunchRefused:
    """The refusal; a sandbox fails the test."""
    assert isinstance(sandbox, LaunchRefused), "the launch was not refused"
    return sandbox


async def run(sandbox: Sandbox | LaunchRefused) -> Exit:
    """Start the command and wait for its end."""
    live = built(sandbox)
    await live.start()
    end = await live.wait()
    await live.drain()
    return end


@contextlib.contextmanager
def inside(namespace: Path) -> Iterator[None]:
    """Move this thread, and what it starts, into a network namespace for a while: where the daemon of a test lives."""
    before = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    wanted = os.open(namespace, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _enter(wanted)
        yield
    finally:
        _enter(before)
        os.close(wanted)
        os.close(before)


def _enter(descriptor: int) -> None:
    library = ctypes.CDLL(None, use_errno=True)
    if library.setns(descriptor, 0x4000_0000):
        raise OSError(ctypes.get_errno(), "setns")


def running_with(text: str, file: str) -> list[int]:
    """Processes whose `cmdline` or `environ` holds a text."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                if text.encode() in (entry / file).read_bytes():
                    found.append(int(entry.name))
    return found
