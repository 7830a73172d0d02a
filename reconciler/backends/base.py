"""Owns what every backend promises: probe, launch, reap. Knows no backend and no policy document."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping
    from contextlib import AbstractAsyncContextManager

    from proxy.policy import ProxyPolicy
    from proxy.record import Record
    from reconciler.core.choose import Probe
    from reconciler.core.gate_report import GateReport
    from reconciler.core.policy import BackendName, Isolation, Limits


class Stream(StrEnum):
    """Which of the command's two outputs a piece came from."""

    STDOUT = "stdout"
    STDERR = "stderr"


class ExitCode(StrEnum):
    """How a run ended, for machines; `exited` is the only one that carries an exit status of the command's own."""

    EXITED = "exited"
    TIMEOUT = "timeout"
    OOM = "oom"
    NOT_FOUND = "command_not_found"
    NOT_EXECUTABLE = "command_not_executable"
    SANDBOX_CRASHED = "sandbox_crashed"
    PROXY_DIED = "proxy_died"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """How the command ended: `status` is its own 0-255 (128+signal when killed), None when there was none to have."""

    code: ExitCode
    status: int | None
    oom_killed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """Everything that a backend needs to know of one run. Values of `environment` are secret: never log them."""

    run: str
    owner: str
    agent: str
    image: str
    user: int
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    input: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    limits: Limits
    proxy: ProxyPolicy
    expires_at: float
    """Unix seconds past which nothing of the run may exist."""
    neighbours: tuple[tuple[str, int], ...] = ()
    """Address and port of other live sandboxes' proxies, for the gate to try."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """One thing that a launch would create: `kind` and `name` for people, `detail` as plain text."""

    kind: str
    name: str
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchRefused:
    """The fence could not be built, or the gate did not prove it: nothing ran. `report` where a gate got that far."""

    code: str
    message: str
    report: GateReport | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reaped:
    """One leftover that the reaper removed."""

    kind: str
    name: str
    run: str | None


class Observer(Protocol):
    """Where a backend reports what happens while it happens; calls return at once and never raise."""

    def step(self, name: str) -> None:
        """A named step of the launch or teardown was completed."""

    def decision(self, record: Record) -> None:
        """The sandbox's proxy decided."""

    def decisions_end(self, last: int | None) -> None:
        """No decision comes any more. `last` is the number of the last that the proxy made, None where it did not say.

        Called when a proxy is gone, once; a proxy that is drained is gone before `drain` returns.
        """

    def output(self, stream: Stream, data: bytes) -> None:
        """The command wrote."""

    def undo_failed(self, step: str, message: str) -> None:
        """A step of the teardown failed; the reaper will find what it left."""


class Sandbox(Protocol):
    """One live sandbox whose fence was built and proven; its command has not started until `start`."""

    @property
    def report(self) -> GateReport:
        """The gate's report, judged."""

    @property
    def isolation(self) -> Isolation:
        """What isolates this sandbox."""

    @property
    def evidence(self) -> tuple[str, ...]:
        """The structural proof read from outside, one fact a line."""

    async def start(self) -> None:
        """Let the command start, behind the fence that the gate proved."""

    async def wait(self) -> Exit:
        """Wait until the command ends by itself, is killed, or its proxy dies (which stops it)."""

    async def stop(self, code: ExitCode) -> None:
        """SIGTERM, a grace period, SIGKILL; `wait` then answers with `code`. Idempotent."""

    async def update(self, policy: ProxyPolicy) -> bool:
        """Hand the live proxy a newer generation; False when it did not acknowledge it within 5 s."""

    async def drift(self) -> tuple[str, ...]:
        """Re-read the structural proof; each line names what is no longer as it was proven. Empty means it holds."""

    async def drain(self) -> None:
        """After the command ended: stop the proxy accepting, and deliver its last decisions to the observer."""


class Backend(Protocol):
    """What builds sandboxes of one kind."""

    @property
    def name(self) -> BackendName:
        """Which backend this is."""

    async def probe(self) -> Probe:
        """Say what this host really has, by a canary run; cached by versions. Leaves nothing."""

    def plan(self, launch: Launch) -> tuple[Planned, ...]:
        """Say what `launch` would create, in order; creates nothing."""

    def launch(self, launch: Launch, observer: Observer) -> AbstractAsyncContextManager[Sandbox | LaunchRefused]:
        """Build the fence, prove it, hold the command back; leaving the context tears everything down."""

    async def reap(self, live: frozenset[str]) -> tuple[Reaped, ...]:
        """Remove what carries our owner label and whose run is not in `live`. Idempotent."""
