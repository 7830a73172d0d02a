"""Owns the k8s backend: its probe, what a launch would create, the life of a launch, and its reaper.

Each step's own work lives beside it; policy and jobs are unknown here.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread

from proxy.policy import ProxyPolicy
from reconciler.backends import k8s_client, k8s_launch, k8s_surroundings, labels, leftovers, nft
from reconciler.backends.base import ExitCode, Launch, LaunchRefused, Observer, Planned, Reaped, Sandbox
from reconciler.backends.k8s_client import Cluster, ClusterError, Kind
from reconciler.backends.k8s_launch import Site
from reconciler.backends.k8s_surroundings import missing
from reconciler.backends.steps import Nobody, Steps
from reconciler.backends.together import side_by_side
from reconciler.core.choose import Available, Missing, Probe
from reconciler.core.policy import BackendName, Limits

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from reconciler.backends.k8s_surroundings import Surroundings
    from reconciler.host import Host

_PROBE_S = 120.0
_PROBE_MEMORY = 64 * 1024 * 1024
_OWNER = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?")
_REAPED = (Kind.POD, Kind.JOB, Kind.POLICY)
"""In this order: what fences a pod in goes after it. Config maps are the job's, and go with it."""


@dataclass(frozen=True, slots=True)
class _Proven:
    """What canary runs proved, and the versions of everything for which that holds."""

    versions: tuple[dict[str, str], ...]
    found: Surroundings
    answer: Available


class K8s:
    """Implements `base.Backend`. One for each daemon; `owner` labels everything that it makes in the cluster."""

    def __init__(self, host: Host, owner: str) -> None:
        """Look at nothing yet. `owner` is what a label's value may be."""
        if _OWNER.fullmatch(owner) is None:
            raise ValueError(f"{owner!r} cannot be the value of a label")
        self._host = host
        self._owner = owner
        self._folder = host.runtime / "k8s" / owner
        self._connected: Cluster | None = None
        self._active: set[str] = set()
        self._proven: _Proven | None = None
        self._found: Surroundings | None = None

    @property
    def name(self) -> BackendName:
        """Kubernetes."""
        return BackendName.K8S

    async def probe(self) -> Probe:
        """Build a fence on each node that matches, prove it, run a command in it; cached by versions."""
        cluster = await self._cluster()
        found = cluster if isinstance(cluster, Missing) else await k8s_surroundings.look(self._host.k8s, cluster)
        if isinstance(cluster, Missing) or isinstance(found, Missing):
            self._found = None
            return found if isinstance(found, Missing) else missing("no_cluster", "there is no cluster")
        versions = tuple(dict(each.versions) | {"nodes": _names(each)} for each in found.tries)
        if self._proven is not None and self._proven.versions == versions:
            # What was proven holds again, also after a while in which something was missing.
            self._found = self._proven.found
            return self._proven.answer
        self._found = self._proven = None
        why = list(found.skipped)
        answer: Probe = missing("no_node", "no node of the cluster takes pods")
        for each in found.tries:
            answer = await self._canary_runs(cluster, each, tuple(why))
            if isinstance(answer, Available):
                self._found = each
                self._proven = _Proven(versions, each, answer)
                break
            why.append(f"{each.runtime_class or 'without a RuntimeClass'}: {answer.code}: {answer.message}")
            answer = missing(answer.code, "; ".join(why))
        return answer

    async def _cluster(self) -> Cluster | Missing:
        """Read the credentials; again each time, for they change."""
        settings = self._host.k8s
        if settings.proxy_image is None:
            return missing(
                "no_proxy_image",
                "name the proxy's image by digest as `proxy_image` below `k8s` in host.yaml, where the nodes can fetch"
                " it: build it from deploy/images/proxy/Containerfile for the architectures of the nodes, and push it",
            )
        try:
            self._connected = await anyio.to_thread.run_sync(
                lambda: k8s_client.connect(settings.namespace, kubeconfig=settings.kubeconfig, context=settings.context)
            )
        except ClusterError as error:
            advice = "name a `kubeconfig` below `k8s` in host.yaml, or run ringfenced in the cluster"
            return missing("no_credentials", f"{error}: {advice}")
        return self._connected

    async def _canary_runs(self, cluster: Cluster, found: Surroundings, why: tuple[str, ...]) -> Probe:
        """Run one on every node that matches: that one of them works says nothing of another."""
        answers: list[Available | Missing] = await side_by_side(
            *(lambda node=node: self._canary_run(cluster, found, node.hostname) for node in found.nodes)
        )
        proven: list[Available] = []
        for node, answer in zip(found.nodes, answers, strict=True):
            if isinstance(answer, Missing):
                return missing(answer.code, f"on node {node.name}: {answer.message}")
            proven.append(answer)
        runs = f"canary runs on {len(proven)} nodes: {_names(found)}"
        return replace(proven[0], evidence=(*proven[0].evidence, runs, *why))

    async def _canary_run(self, cluster: Cluster, found: Surroundings, node: str) -> Available | Missing:
        answer: Available | Missing = missing("probe_timeout", f"the canary run took more than {_PROBE_S:g} s")
        launch = _canary_launch(self._host.k8s.proxy_image or "")
        with anyio.move_on_after(_PROBE_S):
            async with self._launch(launch, Nobody(), cluster, found, node) as sandbox:
                if isinstance(sandbox, LaunchRefused):
                    answer = missing(sandbox.code, sandbox.message)
                else:
                    await sandbox.start()
                    end = await sandbox.wait()
                    answer = (
                        Available(
                            backend=self.name,
                            isolation=sandbox.isolation,
                            versions=found.versions,
                            evidence=(
                                *sandbox.evidence,
                                f"gate passed: {len(sandbox.report.targets)} targets",
                                f"kernel seen inside: {sandbox.report.runtime.get('kernel')}",
                            ),
                        )
                        if (end.code, end.status) == (ExitCode.EXITED, 0)
                        else missing("canary_failed", f"the canary run ended with {end.code} {end.status}")
                    )
        return answer

    def plan(self, launch: Launch) -> tuple[Planned, ...]:
        """Say what `launch` would create, in order."""
        limits = launch.limits
        name = f"ringfence-{launch.run.lower()}"
        runtime = "the RuntimeClass that the probe proves, or the node's runtime"
        if self._found is not None:
            runtime = self._found.runtime_class or "the node's runtime"
        space = self._host.k8s.namespace
        return (
            Planned(kind="job", name=f"{space}/{name}-proxy", detail="the proxy's pod; owns everything else"),
            Planned(kind="policy", name=f"{space}/{name}-agent", detail="out only to the proxy, TCP 3128; nothing in"),
            Planned(
                kind="policy", name=f"{space}/{name}-proxy", detail="in from the sandbox; out to DNS and the public"
            ),
            Planned(kind="config map", name=f"{space}/{name}-policy", detail="what the proxy allows"),
            Planned(
                kind="config map", name=f"{space}/{name}-job", detail=f"{len(launch.input)} input files, read-only"
            ),
            Planned(kind="config map", name=f"{space}/{name}-gate", detail="what the gate is asked"),
            Planned(
                kind="pod",
                name=f"{space}/{name}-agent",
                detail=f"{runtime}, uid {launch.user}, memory {limits.memory} bytes, {limits.cpus:g} cores;"
                " the gate first, then the command",
            ),
        )

    @contextlib.asynccontextmanager
    async def launch(self, launch: Launch, observer: Observer) -> AsyncIterator[Sandbox | LaunchRefused]:
        """Build the fence, prove it, hold the command back; at the end of the context nothing is left."""
        if self._found is None:
            probed = await self.probe()
            if isinstance(probed, Missing):
                yield LaunchRefused(code=probed.code, message=probed.message)
                return
        found, cluster = self._found, await self._cluster()
        if found is None or isinstance(cluster, Missing):
            code, message = (cluster.code, cluster.message) if isinstance(cluster, Missing) else ("not_probed", "")
            yield LaunchRefused(code=code, message=message or "the backend is not probed")
            return
        async with self._launch(launch, observer, cluster, found, None) as sandbox:
            yield sandbox

    @contextlib.asynccontextmanager
    async def _launch(
        self, launch: Launch, observer: Observer, cluster: Cluster, found: Surroundings, node: str | None
    ) -> AsyncIterator[Sandbox | LaunchRefused]:
        steps = Steps(observer)
        self._active.add(launch.run)
        site = Site(
            host=self._host, owner=self._owner, cluster=cluster.counted(), found=found, folder=self._folder, node=node
        )
        try:
            async with anyio.create_task_group() as tasks:
                try:
                    built = await k8s_launch.build(site, launch, observer, steps, tasks)
                    if isinstance(built, LaunchRefused):
                        await steps.undo()
                    yield built
                finally:
                    await steps.undo()
                    tasks.cancel_scope.cancel()
        except BaseExceptionGroup as group:
            # That tasks run beside the caller's block is nothing that its exceptions should tell of.
            if len(group.exceptions) == 1:
                raise group.exceptions[0] from None
            raise
        finally:
            self._active.discard(launch.run)

    async def reap(self, live: frozenset[str]) -> tuple[Reaped, ...]:
        """Remove what an earlier daemon of this owner left, and what is past its time. Idempotent."""
        now = time.time()
        kept = live | self._active
        found = [*await leftovers.reap(roots={}, group="", folder=self._folder, live=kept, now=now)]
        cluster = await self._cluster()
        if isinstance(cluster, Missing):
            return tuple(found)
        # A cluster that is away keeps what it has, until its own deadlines; it is asked again at the next round.
        with contextlib.suppress(ClusterError):
            for kind in _REAPED:
                for each in await cluster.find(kind, labels=f"{labels.OWNER}={self._owner}"):
                    told = each["metadata"].get("labels") or {}
                    run = told.get(labels.RUN)
                    if run in kept and not labels.expired(told, now):
                        continue
                    if each["metadata"].get("deletionTimestamp"):
                        continue
                    name = each["metadata"]["name"]
                    await cluster.delete(kind, name, grace=1 if kind is Kind.POD else None)
                    found.append(Reaped(kind=kind.replace("_", " "), name=name, run=run))
        return tuple(found)


def _names(found: Surroundings) -> str:
    return ", ".join(node.name for node in found.nodes)


def _canary_launch(image: str) -> Launch:
    """Give the launch that probes: nothing is allowed, and the command is one of our own image."""
    run = f"probe-{secrets.token_hex(4)}"
    expires = time.time() + 2 * _PROBE_S
    return Launch(
        run=run,
        owner="probe",
        agent="probe",
        image=image,
        user=1000,
        command=("/usr/bin/python3", "-I", "-S", "-c", "pass"),
        limits=Limits(cpus=0.5, memory=_PROBE_MEMORY, pids=32, timeout=int(_PROBE_S), output=1024, connections=4),
        proxy=ProxyPolicy(
            run=run,
            generation=1,
            revision="probe",
            allow=(),
            deny=(),
            layers=(),
            resolvers=((nft.NOWHERE, 53),),
            connections=4,
            proof_key=secrets.token_bytes(32),
            expires_at=expires,
        ),
        expires_at=expires,
    )
