"""Owns the building of one fence in a cluster: its steps in their order, and the proof before the command.

Does not undo (the steps do), does not run the command, does not probe.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import anyio

from reconciler.backends import (
    host_network,
    input_files,
    k8s_gate,
    k8s_look,
    k8s_node,
    k8s_objects,
    k8s_pods,
    labels,
    leftovers,
)
from reconciler.backends.base import Launch, LaunchRefused
from reconciler.backends.k8s_client import ClusterError, Kind
from reconciler.backends.k8s_gate import Around
from reconciler.backends.k8s_look import Standing
from reconciler.backends.k8s_place import CANARY_PORT, Role, Where
from reconciler.backends.k8s_pods import NotRunning
from reconciler.backends.k8s_proxy import ProxyPod, in_cluster
from reconciler.backends.k8s_sandbox import K8sSandbox
from reconciler.backends.nft import PROXY_PORT
from reconciler.backends.together import side_by_side
from reconciler.core.policy import HOST_IMAGE

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from pathlib import Path

    from anyio.abc import TaskGroup

    from proxy.policy import ProxyPolicy
    from reconciler.backends.base import Observer
    from reconciler.backends.gate_targets import Question
    from reconciler.backends.k8s_client import Cluster
    from reconciler.backends.k8s_node import Fence, Listeners
    from reconciler.backends.k8s_surroundings import Surroundings
    from reconciler.backends.steps import Steps
    from reconciler.core.gate_report import GateReport
    from reconciler.host import Host

Plain = dict[str, Any]

_POD_S = 60.0
"""How long a pod may take to run: a node may have to fetch an image first."""
_READY_S = 10.0
_NAMED_FAILURES = 5
_MOST_SAID = 1 << 20
_SECRET_BYTES = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Where and with what one daemon builds.

    `folder` is above its runs' own; `node` keeps both pods to one node, None leaves that to the cluster.
    """

    host: Host
    owner: str
    cluster: Cluster
    found: Surroundings
    folder: Path
    node: str | None = None


async def build(
    site: Site, launch: Launch, observer: Observer, steps: Steps, tasks: TaskGroup
) -> K8sSandbox | LaunchRefused:
    """Take the steps in their order; whatever was taken is undone by the caller."""
    if refused := _unusable(launch):
        return refused
    where = Where(
        namespace=site.cluster.namespace,
        run=launch.run,
        owner=site.owner,
        agent=launch.agent,
        expires=int(launch.expires_at),
        runtime_class=site.found.runtime_class,
        proxy_image=site.host.k8s.proxy_image or "",
        node=site.node,
        secret=secrets.token_urlsafe(_SECRET_BYTES),
        start=secrets.token_hex(_SECRET_BYTES),
    )
    raising = _Raising(site=site, launch=launch, observer=observer, steps=steps, tasks=tasks, where=where)
    try:
        return await raising.run()
    except ClusterError as error:
        return LaunchRefused(code="cluster_failed", message=f"the cluster: {error}")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Raising:
    """One fence on its way up."""

    site: Site
    launch: Launch
    observer: Observer
    steps: Steps
    tasks: TaskGroup
    where: Where

    async def run(self) -> K8sSandbox | LaunchRefused:
        """Anchor, policies, proxy, gate, proof."""
        where, launch, steps, cluster = self.where, self.launch, self.steps, self.site.cluster
        lasts = self._lasts()
        job = k8s_objects.anchor(where, lasts=lasts, lingers=self.site.host.k8s.linger)
        uid = await steps.take_async("anchor", _anchor(cluster, where, job))
        owner = k8s_objects.owner_reference(where, uid)
        policies = {
            Role.AGENT: k8s_objects.agent_policy(where, owner),
            Role.PROXY: self._allowed(owner, launch.proxy),
        }
        made = [
            (Kind.POLICY, policies[Role.AGENT]),
            (Kind.POLICY, policies[Role.PROXY]),
            (Kind.CONFIG_MAP, k8s_objects.policy_map(where, owner, self._adapt(launch.proxy))),
            (Kind.CONFIG_MAP, k8s_objects.job_map(where, owner, launch.input)),
        ]
        await steps.take_async("policies", _objects(cluster, made))
        proxy = ProxyPod(
            cluster,
            where,
            self.observer,
            adapt=self._adapt,
            allowed=lambda policy: self._allowed(owner, policy),
            policies=policies,
        )
        pod = await self._proxy(proxy)
        if isinstance(pod, LaunchRefused):
            return pod
        address = str(pod["status"]["podIP"])
        agent = k8s_objects.agent_pod(where, launch, owner=owner, proxy=address, lasts=lasts)
        fence = await steps.take_async("node guard's pods", k8s_node.fenced())
        report = await self._prove(proxy, address, fence, agent, owner)
        if isinstance(report, LaunchRefused):
            return report
        standing = Standing(
            cluster=cluster,
            where=where,
            pods={Role.AGENT: agent, Role.PROXY: job["spec"]["template"]},
            policies=policies,
            names={Role.AGENT: where.name("agent"), Role.PROXY: pod["metadata"]["name"]},
            fence=fence,
        )
        if lines := await k8s_look.differences(standing):
            message = f"the fence is not as it must be: {'; '.join(lines[:_NAMED_FAILURES])}"
            return LaunchRefused(code="fence_failed", message=message, report=report)
        steps.done("fence read back")
        sandbox = K8sSandbox(
            standing=standing,
            proxy=proxy,
            observer=self.observer,
            tasks=self.tasks,
            report=report,
            evidence=self._evidence(address),
        )
        self.tasks.start_soon(sandbox.stop_when_proxy_dies)
        return sandbox

    def _lasts(self) -> int:
        return max(1, round(self.launch.expires_at - time.time()))

    def _adapt(self, policy: ProxyPolicy) -> ProxyPolicy:
        return in_cluster(policy, where=self.where, resolvers=self._resolvers(), addresses=self._forbidden())

    def _allowed(self, owner: Plain, policy: ProxyPolicy) -> Plain:
        return k8s_objects.proxy_policy(
            self.where,
            owner,
            resolvers=self._resolvers(),
            forbidden=self._forbidden(),
            ports=k8s_objects.ports(policy),
        )

    def _forbidden(self) -> tuple[str, ...]:
        """Give what the proxy must not reach though it were public: the nodes, the API server, this host if a node."""
        found = self.site.found
        # A node has addresses that its cluster does not know.
        own = () if k8s_node.standing_on(found.all_nodes) is None else host_network.addresses()
        known = (*found.addresses, *(address for address, _ in found.api), *own)
        return tuple(dict.fromkeys(address.partition("%")[0] for address in known))

    def _resolvers(self) -> tuple[tuple[str, int], ...]:
        return host_network.resolvers(self.site.host.resolvers, ())

    async def _prove(
        self, proxy: ProxyPod, address: str, fence: Fence, agent: Plain, owner: Plain
    ) -> GateReport | LaunchRefused:
        """Create the agent's pod, whose gate is asked first; its report, judged.

        The daemon's own listeners are open from now until the gate was heard: afterwards whoever scans this host would
        find them.
        """
        where, steps, cluster = self.where, self.steps, self.site.cluster
        here = await anyio.to_thread.run_sync(k8s_node.standing_on, self.site.found.all_nodes)
        if here is not None and (failed := await anyio.to_thread.run_sync(k8s_node.ensure)):
            return LaunchRefused(
                code="no_guard", message=f"the node guard is not in place: {'; '.join(failed.lines[:_NAMED_FAILURES])}"
            )
        folder = steps.take("run directory", leftovers.run_folder(self.site.folder, self.launch))
        with contextlib.ExitStack() as opened:
            beside = None if here is None else opened.enter_context(k8s_node.listeners(folder))
            around = self._around(proxy, beside)
            question = k8s_gate.question(where, self.launch, proxy=address, around=around, now=time.time())
            asked = k8s_objects.gate_map(where, owner, json.dumps(question.to_object()))
            await steps.take_async("gate's question", _objects(cluster, [(Kind.CONFIG_MAP, asked)]))
            await steps.take_async("agent pod", _pod(cluster, agent))
            begun = await k8s_pods.until_begun(cluster, where.name("agent"), "gate", _POD_S)
            if isinstance(begun, NotRunning):
                return LaunchRefused(code=begun.code, message=f"the sandbox: {begun.message}")
            if here is not None and begun["spec"].get("nodeName") == here:
                lines = await fence.put(agent=str(begun["status"]["podIP"]), proxy=address, lasts=self._lasts())
                if lines:
                    return LaunchRefused(code="no_guard", message=f"the node guard: {'; '.join(lines)}")
                steps.done("node guard")
            said = await self._heard()
            arrivals = [] if beside is None else [*beside.canaries.arrivals()]
        if proxy.arrivals:
            arrivals.append(f"canary tcp:{address}:{CANARY_PORT}")
        return self._judge(question, said, arrivals)

    def _around(self, proxy: ProxyPod, beside: Listeners | None) -> Around:
        found = self.site.found
        own = host_network.resolvers((), host_network.nameservers())
        return Around(
            nodes=found.addresses,
            api=found.api,
            servers=tuple(dict.fromkeys((*proxy.resolvers, *self._resolvers(), *own))),
            canaries=() if beside is None else beside.targets,
            settling=() if beside is None else beside.settling,
        )

    async def _proxy(self, proxy: ProxyPod) -> Plain | LaunchRefused:
        """Wait for the proxy's pod until it listens; its pod."""
        cluster = self.site.cluster
        name = await self._proxy_name()
        pod = (
            NotRunning("pod_not_started", "the cluster made no pod of the proxy's Job: see its events")
            if name is None
            else await k8s_pods.until_begun(cluster, name, Role.PROXY, _POD_S)
        )
        if isinstance(pod, NotRunning):
            return LaunchRefused(code=pod.code, message=f"the proxy: {pod.message}")
        self.tasks.start_soon(proxy.listen, pod["metadata"]["name"])
        if unready := await proxy.until_ready(_READY_S):
            return LaunchRefused(code="proxy_failed", message=unready)
        self.steps.done("proxy ready")
        return pod

    async def _proxy_name(self) -> str | None:
        selector = ",".join(f"{key}={value}" for key, value in self.where.selector(Role.PROXY).items())
        with anyio.move_on_after(_READY_S):
            while True:
                pods = await self.site.cluster.find(Kind.POD, labels=selector)
                if pods:
                    return str(pods[0]["metadata"]["name"])
                await anyio.sleep(k8s_pods.ASK_S)
        return None

    async def _heard(self) -> bytes:
        """Hear the gate until its report, or until it has ended without one."""
        cluster, name = self.site.cluster, self.where.name("agent")
        said = bytearray()
        reported = anyio.Event()

        def take(data: bytes) -> None:
            said.extend(data[: _MOST_SAID - len(said)])
            if k8s_gate.read(bytes(said)) is not None:
                reported.set()

        async def hear() -> None:
            await k8s_pods.hear(cluster, name, "gate", take)
            reported.set()

        with anyio.move_on_after(k8s_gate.BUDGET_S + _READY_S):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(hear)
                await reported.wait()
                tasks.cancel_scope.cancel()
        return bytes(said)

    def _judge(self, question: Question, said: bytes, arrivals: Sequence[str]) -> GateReport | LaunchRefused:
        report, structure = k8s_gate.judged(self.where, question, said, arrivals)
        if failures := tuple(dict.fromkeys((*report.failures, *structure))):
            refused = replace(report, passed=False, failures=failures)
            return LaunchRefused(code="gate_failed", message=_message(failures, said), report=refused)
        self.steps.done("gate")
        return report

    def _evidence(self, address: str) -> tuple[str, ...]:
        where, found = self.where, self.site.found
        return (
            f"Kubernetes {found.versions['server']}, RuntimeClass {where.runtime_class or 'none'}",
            f"policy {where.name('agent')}: nothing in, out only to the proxy's pod at TCP {PROXY_PORT}",
            f"policy {where.name('proxy')}: in only from the sandbox; out to DNS and public IPv4 addresses",
            f"proxy {address}:{PROXY_PORT} in a pod of its own; {CANARY_PORT} beside it is alive and in no policy",
            "read back: both pods as asked for, with no container, volume or host namespace more",
            "no other policy of the namespace selects them and allows anything; one denies everything by default",
        )


@contextlib.asynccontextmanager
async def _anchor(cluster: Cluster, where: Where, body: Plain) -> AsyncIterator[str]:
    """Create the Job; its uid. At the end of the context it is gone, and so is its pod."""
    selector = f"{labels.RUN}={where.run},{labels.ROLE}={Role.PROXY}"
    try:
        made = await cluster.create(Kind.JOB, body)
        yield str(made["metadata"]["uid"])
    finally:
        with anyio.CancelScope(shield=True):
            await cluster.delete(Kind.JOB, where.name("proxy"))
            for pod in await cluster.find(Kind.POD, labels=selector):
                name = pod["metadata"]["name"]
                await cluster.delete(Kind.POD, name, grace=1)
                await k8s_pods.until_gone(cluster, Kind.POD, name)


@contextlib.asynccontextmanager
async def _objects(cluster: Cluster, bodies: Sequence[tuple[Kind, Plain]]) -> AsyncIterator[None]:
    """Create policies or config maps, all at once; at the end of the context they are gone."""
    try:
        await side_by_side(*(lambda kind=kind, body=body: cluster.create(kind, body) for kind, body in bodies))
        yield
    finally:
        with anyio.CancelScope(shield=True):
            names = [(kind, body["metadata"]["name"]) for kind, body in bodies]
            await side_by_side(*(lambda kind=kind, name=name: cluster.delete(kind, name) for kind, name in names))


@contextlib.asynccontextmanager
async def _pod(cluster: Cluster, body: Plain) -> AsyncIterator[None]:
    """Create the agent's pod; at the end of the context it is gone: what fences it in goes after it, never before."""
    name = body["metadata"]["name"]
    try:
        await cluster.create(Kind.POD, body)
        yield
    finally:
        with anyio.CancelScope(shield=True):
            await cluster.delete(Kind.POD, name, grace=1)
            await k8s_pods.until_gone(cluster, Kind.POD, name)


def _unusable(launch: Launch) -> LaunchRefused | None:
    if launch.image == HOST_IMAGE:
        return LaunchRefused(
            code="image_needs_backend",
            message=f"k8s cannot run `image: {HOST_IMAGE}`: give the agent an image by digest",
        )
    for name in launch.input:
        if input_files.unusable_name(name):
            return LaunchRefused(code="bad_input", message=f"input file {name!a} is not a plain relative path")
    return None


def _message(failures: tuple[str, ...], said: bytes) -> str:
    named = "; ".join(failures[:_NAMED_FAILURES])
    more = f" and {len(failures) - _NAMED_FAILURES} more" if len(failures) > _NAMED_FAILURES else ""
    # Where there is no report, what it wrote instead says why.
    words = "" if k8s_gate.read(said) is not None else said.decode("utf-8", "replace").strip()[:400]
    return f"the gate did not prove the fence: {named}{more}" + (f" ({words})" if words else "")
