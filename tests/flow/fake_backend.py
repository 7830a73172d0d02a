"""Owns a backend that builds nothing: its objects are files in a directory, and its commands are lists of actions.

It keeps every promise of `reconciler.backends.base`, but no fence: `command` is `["do", ACTION, ...]`.
"""

from __future__ import annotations

import os
import signal
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import anyio
import anyio.lowlevel

from proxy.entry import matches
from proxy.record import Record, Verdict
from reconciler.backends.base import Exit, ExitCode, LaunchRefused, Planned, Reaped, Stream
from reconciler.core.choose import Available
from reconciler.core.gate_report import GateReport, TargetReport, TargetVerdict
from reconciler.core.policy import BackendName, Isolation

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence
    from pathlib import Path

    from proxy.policy import ProxyPolicy
    from reconciler.backends.base import Launch, Observer
    from reconciler.core.choose import Probe

STEPS = ("network", "proxy", "gate")


class Crash(BaseException):
    """The daemon ends here, at once: nothing may catch this, and no undo runs."""


def nothing(step: str, run: str) -> None:
    """The hook that does nothing."""


def kill_at(wanted: str) -> Callable[[str, str], None]:
    """A hook that kills this process with SIGKILL at one step."""

    def hook(step: str, run: str) -> None:
        del run
        if step == wanted:
            os.kill(os.getpid(), signal.SIGKILL)

    return hook


def report(*, passed: bool = True, proxy: str = "127.0.0.1:3128") -> GateReport:
    """A gate report of one target, and of where the proxy was found."""
    target = TargetReport(
        name="canary-v4",
        kind="tcp",
        address="192.0.2.1",
        port=40000,
        alive=True,
        verdict=TargetVerdict.DENIED if passed else TargetVerdict.REACHED,
        seen="ENETUNREACH" if passed else "answered",
    )
    return GateReport(
        passed=passed,
        challenge="00" * 16,
        anchor={"address": proxy, "answer": "00" * 32, "verdict": "reached", "seen": "answered"},
        targets=(target,),
        rounds=3,
        failures=() if passed else ("canary-v4",),
    )


@dataclass(slots=True)
class FakeBackend:
    """A backend whose objects are the files `world/<owner>.<run>.<step>`."""

    world: Path
    owner: str
    found: Probe = field(
        default_factory=lambda: Available(backend=BackendName.BUBBLEWRAP, isolation=Isolation.NAMESPACE)
    )
    hook: Callable[[str, str], None] = nothing
    gate_holds: bool = True
    acknowledges: bool = True
    drifted: tuple[str, ...] = ()
    proxies: Sequence[str] = ()
    """Where the proxies of its launches are found, one after the other; beyond that on a loopback."""
    launched: list[Launch] = field(default_factory=list)
    started: list[str] = field(default_factory=list)
    updates: list[ProxyPolicy] = field(default_factory=list)

    @property
    def name(self) -> BackendName:
        """It stands in for bubblewrap."""
        return BackendName.BUBBLEWRAP

    async def probe(self) -> Probe:
        """What the test says."""
        await anyio.lowlevel.checkpoint()
        return self.found

    def plan(self, launch: Launch) -> tuple[Planned, ...]:
        """One thing a step."""
        return tuple(Planned(kind=step, name=f"{launch.owner}.{launch.run}.{step}", detail="a file") for step in STEPS)

    @asynccontextmanager
    async def launch(self, launch: Launch, observer: Observer) -> AsyncIterator[FakeSandbox | LaunchRefused]:
        """Make one file a step, in order; leaving removes them."""
        proxy = self.proxies[len(self.launched)] if len(self.launched) < len(self.proxies) else "127.0.0.1:3128"
        self.launched.append(launch)
        made: list[Path] = []
        crashed = False
        try:
            for step in STEPS:
                self.hook(f"before {step}", launch.run)
                path = self.world / f"{launch.owner}.{launch.run}.{step}"
                path.touch()
                made.append(path)
                observer.step(step)
                self.hook(step, launch.run)
                await anyio.lowlevel.checkpoint()
            if self.gate_holds:
                yield FakeSandbox(self, launch, observer, proxy)
            else:
                yield LaunchRefused(
                    code="gate_failed", message="the gate reached canary-v4", report=report(passed=False)
                )
        except Crash:
            crashed = True
            raise
        finally:
            if not crashed:
                self.hook("undo", launch.run)
                for path in reversed(made):
                    path.unlink()

    async def reap(self, live: frozenset[str]) -> tuple[Reaped, ...]:
        """Remove our files of runs that are not alive."""
        await anyio.lowlevel.checkpoint()
        found = []
        for path in sorted(self.world.iterdir()):
            owner, run, step = path.name.rsplit(".", 2)
            if owner == self.owner and run not in live:
                path.unlink()
                found.append(Reaped(kind=step, name=path.name, run=run))
        return tuple(found)


class FakeSandbox:
    """A sandbox whose command is a list of actions, which `wait` carries out."""

    def __init__(self, backend: FakeBackend, launch: Launch, observer: Observer, proxy: str) -> None:
        self._backend = backend
        self._proxy = proxy
        self._launch = launch
        self._observer = observer
        self._policy = launch.proxy
        self._scope = anyio.CancelScope()
        self._stopped: ExitCode | None = None
        self._seq = 0
        self._late: list[Record] = []
        self._mute = False

    @property
    def report(self) -> GateReport:
        """It always holds: one that does not never becomes a sandbox."""
        return report(proxy=self._proxy)

    @property
    def isolation(self) -> Isolation:
        """What its probe said."""
        found = self._backend.found
        return found.isolation if isinstance(found, Available) else Isolation.NAMESPACE

    @property
    def evidence(self) -> tuple[str, ...]:
        """One fact."""
        return ("world: one file a step",)

    async def start(self) -> None:
        """The command may start."""
        self._backend.hook("start", self._launch.run)
        self._backend.started.append(self._launch.run)
        with (self._backend.world.parent / "started").open("a") as file:
            file.write(f"{self._launch.run} {self._launch.agent}\n")
        await anyio.lowlevel.checkpoint()
        self._backend.hook("started", self._launch.run)

    async def wait(self) -> Exit:
        """Carry the command out."""
        ended = Exit(code=ExitCode.EXITED, status=0)
        with self._scope:
            if self._launch.command[0] != "do":
                return Exit(code=ExitCode.NOT_FOUND, status=None)
            for action in self._launch.command[1:]:
                exited = await self._act(action)
                if exited is not None:
                    ended = exited
                    break
        self._backend.hook("exit", self._launch.run)
        return Exit(code=self._stopped, status=None) if self._stopped is not None else ended

    async def _act(self, action: str) -> Exit | None:
        word, _, rest = action.partition(" ")
        await anyio.lowlevel.checkpoint()
        match word:
            case "print":
                self._observer.output(Stream.STDOUT, rest.encode() + b"\n")
            case "flood":
                for _ in range(int(rest) // 1000):
                    self._observer.output(Stream.STDERR, b"x" * 999 + b"\n")
            case "env":
                value = self._launch.environment.get(rest)
                self._observer.output(Stream.STDOUT, b"set\n" if value else b"unset\n")
            case "connect":
                self._observer.decision(self._decide(rest))
            case "late":
                self._late.append(self._decide(rest))
            case "mute":
                self._mute = True
            case "lose":
                self._seq += int(rest)
            case "sleep":
                await anyio.sleep(float(rest))
            case "exit":
                return Exit(code=ExitCode.EXITED, status=int(rest))
            case _:
                return Exit(code=ExitCode(word), status=None, oom_killed=word == "oom")
        return None

    def _decide(self, target: str) -> Record:
        host, port = target.rsplit(":", 1)
        allowed = any(matches(entry, host, int(port)) for entry in self._policy.allow)
        self._seq += 1
        return Record(
            seq=self._seq,
            time=1_700_000_000.5,
            run=self._launch.run,
            generation=self._policy.generation,
            verdict=Verdict.ALLOW if allowed else Verdict.DENY,
            code="allowed" if allowed else "not_listed",
            layer=None if allowed else "agent",
            method="CONNECT",
            host=host,
            port=int(port),
            address="93.184.216.34" if allowed else None,
            message="allowed" if allowed else "not on the agent's list",
        )

    async def stop(self, code: ExitCode) -> None:
        """End the command."""
        await anyio.lowlevel.checkpoint()
        if self._stopped is None:
            self._stopped = code
        self._scope.cancel()

    async def update(self, policy: ProxyPolicy) -> bool:
        """Take over newer policy."""
        await anyio.lowlevel.checkpoint()
        if self._backend.acknowledges:
            self._policy = policy
            self._backend.updates.append(policy)
        return self._backend.acknowledges

    async def drift(self) -> tuple[str, ...]:
        """What the test says."""
        await anyio.lowlevel.checkpoint()
        self._backend.hook("drift", self._launch.run)
        return self._backend.drifted

    async def drain(self) -> None:
        """Deliver what was decided and not told yet."""
        await anyio.lowlevel.checkpoint()
        self._backend.hook("drain", self._launch.run)
        for record in self._late:
            self._observer.decision(record)
        self._late.clear()
        if not self._mute:
            self._observer.decisions_end(self._seq)
