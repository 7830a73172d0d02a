"""Owns one live sandbox in a cluster after its fence was proven: start, end, stop, update, drift.

Does not build the fence and does not take it down.
"""

from __future__ import annotations

import contextlib
import signal
from typing import TYPE_CHECKING, Any

import anyio

from reconciler.backends import k8s_look, k8s_objects, k8s_pods
from reconciler.backends.base import Exit, ExitCode, Stream
from reconciler.backends.exits import why_not
from reconciler.backends.k8s_client import ClusterError, Kind
from reconciler.backends.k8s_place import Role
from reconciler.core.policy import Isolation

if TYPE_CHECKING:
    from anyio.abc import TaskGroup

    from proxy.policy import ProxyPolicy
    from reconciler.backends.base import Observer
    from reconciler.backends.k8s_look import Standing
    from reconciler.backends.k8s_proxy import ProxyPod
    from reconciler.core.gate_report import GateReport

Plain = dict[str, Any]

_START_S = 60.0
"""How long the agent's image may take to be there."""
_KILL_S = 15.0
"""How long after the grace period the cluster may take to say that a pod is gone."""
_STREAM_S = 5.0
_KILLED = 128 + signal.SIGKILL
_GVISOR_KILLED = 128
"""gVisor's sandbox as a whole is killed at its limit, and its container has this status."""
_OOM = "OOMKilled"
_NOT_STARTED = frozenset({"StartError", "ContainerCannotRun", "RunContainerError", "CreateContainerError"})


class K8sSandbox:
    """Implements `base.Sandbox`. The command's end is known from its pod, its output from its log."""

    def __init__(
        self,
        *,
        standing: Standing,
        proxy: ProxyPod,
        observer: Observer,
        tasks: TaskGroup,
        report: GateReport,
        evidence: tuple[str, ...],
    ) -> None:
        """Take over what was built."""
        self._standing, self._proxy, self._observer, self._tasks = standing, proxy, observer, tasks
        self._report, self._evidence = report, evidence
        self._name = standing.names[Role.AGENT]
        self._stopped_as: ExitCode | None = None
        self._not_started: ExitCode | None = None
        self._started = False
        self._draining = False
        self._heard = anyio.Event()
        self._ended = anyio.Event()
        self._pod: Plain | None = None

    @property
    def report(self) -> GateReport:
        """The gate's report, judged."""
        return self._report

    @property
    def isolation(self) -> Isolation:
        """What the RuntimeClass isolates with."""
        return Isolation.GVISOR if self._standing.where.gvisor else Isolation.CONTAINER

    @property
    def evidence(self) -> tuple[str, ...]:
        """The structural proof read from outside, one fact a line."""
        return self._evidence

    async def start(self) -> None:
        """Tell the gate that the command may start; returns when the API server has taken that."""
        cluster, where = self._standing.cluster, self._standing.where
        try:
            await cluster.patch(Kind.POD, self._name, k8s_objects.start_patch(where))
        except ClusterError:
            self._not_started = ExitCode.SANDBOX_CRASHED
            self._ended.set()
            return
        self._started = True
        self._tasks.start_soon(self._attend)

    async def _attend(self) -> None:
        """From the start of the command to its end; runs beside everything else."""
        cluster = self._standing.cluster
        try:
            begun = await k8s_pods.until_begun(cluster, self._name, Role.AGENT, _START_S)
            if isinstance(begun, k8s_pods.NotRunning):
                self._pod = await cluster.get(Kind.POD, self._name)
                if self._stopped_as is None:
                    self._not_started = ExitCode.SANDBOX_CRASHED
                self._ended.set()
                return
        except ClusterError:
            self._not_started = ExitCode.SANDBOX_CRASHED
            self._ended.set()
            return
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._hear)
            self._pod = await k8s_pods.until_over(
                cluster, self._name, Role.AGENT, hint=self._heard, given_up=self._ended.is_set
            )
            with anyio.move_on_after(_STREAM_S):
                await self._heard.wait()
            tasks.cancel_scope.cancel()
        self._ended.set()

    async def _hear(self) -> None:
        # A cluster hands out both outputs as one.
        await k8s_pods.hear(
            self._standing.cluster, self._name, Role.AGENT, lambda data: self._observer.output(Stream.STDOUT, data)
        )
        self._heard.set()

    async def wait(self) -> Exit:
        """Wait until the container has ended and all output was handed on."""
        await self._ended.wait()
        return self._exit()

    def _exit(self) -> Exit:
        state = self._terminated()
        oom = state.get("reason") == _OOM
        status = state.get("exitCode")
        if self._stopped_as is not None:
            return Exit(code=self._stopped_as, status=None, oom_killed=oom)
        if self._not_started is not None:
            return Exit(code=self._not_started, status=None, oom_killed=oom)
        if state.get("reason") in _NOT_STARTED:
            return Exit(code=why_not(str(state.get("message"))), status=None)
        if oom and status in (None, _KILLED, _GVISOR_KILLED):
            return Exit(code=ExitCode.OOM, status=None, oom_killed=True)
        if status is None:
            late = ((self._pod or {}).get("status") or {}).get("reason") == "DeadlineExceeded"
            return Exit(code=ExitCode.TIMEOUT if late else ExitCode.SANDBOX_CRASHED, status=None, oom_killed=oom)
        return Exit(code=ExitCode.EXITED, status=int(status), oom_killed=oom)

    def _terminated(self) -> Plain:
        if self._pod is None:
            return {}
        state = k8s_pods.status_of(self._pod, Role.AGENT).get("state") or {}
        found: Plain = state.get("terminated") or {}
        return found

    async def stop(self, code: ExitCode) -> None:
        """SIGTERM, a grace period, SIGKILL, all by the kubelet; the first code given is the one that counts."""
        if self._ended.is_set():
            return
        if self._stopped_as is None:
            self._stopped_as = code
            if not self._started:
                self._ended.set()
                return
            cluster = self._standing.cluster
            with anyio.move_on_after(k8s_objects.GRACE_S + _KILL_S):
                # What is not stopped now, the teardown removes, and after that the pod's own deadline.
                with contextlib.suppress(ClusterError):
                    await cluster.delete(Kind.POD, self._name, grace=k8s_objects.GRACE_S)
                await self._ended.wait()
            # A cluster that hangs does not say so; that this ended here and now is said all the same.
            self._ended.set()
        await self._ended.wait()

    async def update(self, policy: ProxyPolicy) -> bool:
        """Hand the live proxy a newer generation."""
        return await self._proxy.update(policy)

    async def drift(self) -> tuple[str, ...]:
        """Look again at everything that was proven."""
        if self._ended.is_set() or self._stopped_as is not None:
            return ()
        try:
            lines = await k8s_look.differences(self._standing)
            if not lines:
                return ()
            # What ended meanwhile differs from what was running, and is no drift.
            pod = await self._standing.cluster.get(Kind.POD, self._name)
        except ClusterError as error:
            return (f"the API server does not answer: {error}",)
        return () if pod is not None and k8s_pods.is_over(pod) else lines

    async def drain(self) -> None:
        """End the proxy and take in its last decisions."""
        self._draining = True
        await self._proxy.end()

    async def stop_when_proxy_dies(self) -> None:
        """Watch the only door: a sandbox without it is stopped. Runs beside everything else."""
        await self._proxy.ended.wait()
        if not self._draining:
            await self.stop(ExitCode.PROXY_DIED)
